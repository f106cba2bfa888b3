"""The files of a run: checkpoint, log, and what --resume may touch. (Killed, full disk, damaged:
test_reliability.py.)"""
import errno
import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY, exit_of, own_npz, stopped, train

import evaluate
import train_fixmatch
import train_mixmatch
from attractor import BiasAttractor
from baselines import train as baselines
from support import UserError, checkpoint


def content(step):
    return {"step": step, "seconds": 0.0, "config": {}, "history": [],
            "model": {"w": torch.ones(3)}, "ema": {}}


def test_round_trip_and_the_one_before(tmp_path, capsys):
    for step in (1, 2):
        checkpoint.save_checkpoint(tmp_path, {}, **content(step))
    assert checkpoint.load_checkpoint(tmp_path)["step"] == 2
    whole = (tmp_path / "last.pt").read_bytes()
    for damaged in (whole[:100], b"", b"junk"):
        (tmp_path / "last.pt").write_bytes(damaged)
        assert checkpoint.load_checkpoint(tmp_path)["step"] == 1
        assert "last.pt cannot be used" in capsys.readouterr().err
    for foreign in ({"weights": 3}, [1, 2], content("two")):  # readable, but not ours
        torch.save(foreign, tmp_path / "last.pt")
        assert checkpoint.load_checkpoint(tmp_path)["step"] == 1
    (tmp_path / "prev.pt").write_bytes(b"")
    with pytest.raises(UserError, match="has to start again"):
        checkpoint.load_checkpoint(tmp_path)


def test_no_checkpoint_at_all(tmp_path):
    assert checkpoint.load_checkpoint(tmp_path) is None


def test_log_is_cut_back_to_the_history(tmp_path):
    rows = [{"iter": i, "bacc": i / 3} for i in range(1, 4)]
    checkpoint.write_log(tmp_path, rows)
    checkpoint.write_log(tmp_path, rows[:2])
    assert (tmp_path / "log.csv").read_text() == "iter,bacc\n1,0.333333\n2,0.666667\n"


# ---------------------------------------------------------------------------------------------
# --resume


def disk(folder):
    return {f.name: (f.read_bytes(), f.stat().st_mtime_ns) for f in folder.iterdir()}


def refused(folder, main, argv, capsys):
    """The sentence with which a command ends that must not change the folder."""
    before = disk(folder)
    code, err = exit_of(main, argv, capsys)
    assert code == 2 and err.count("\n") == 1 and "Traceback" not in err, err
    assert disk(folder) == before
    return err


def some(names, *fast):
    """All of them, only these not marked slow."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("main,flags", [
    (train_fixmatch.main, "--tau 0.2 --iters 4"),            # its last evaluation is off the grid
    pytest.param(train_mixmatch.main, "", marks=pytest.mark.slow),
    pytest.param(baselines.main, "--base supervised --method crt --iters 3 --crt_iters 3",
                 marks=pytest.mark.slow)])
def test_resuming_a_finished_run_changes_no_file(tmp_path, monkeypatch, main, flags):
    train(tmp_path, flags, main)
    before = disk(tmp_path)
    assert {"config.json", "result.json", "log.csv", "last.pt"} <= before.keys()
    monkeypatch.setattr(checkpoint, "own_commit", lambda: "another")
    train(tmp_path, flags + " --resume", main)
    assert disk(tmp_path) == before


def test_a_run_that_was_killed_before_its_result_gets_one(tmp_path):
    train(tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    (tmp_path / "result.json").unlink()
    weights = disk(tmp_path)["last.pt"]
    train(tmp_path, "--resume")
    again = json.loads((tmp_path / "result.json").read_text())
    clocks = {"sec_per_iter", "peak_memory_mb"}
    assert all(again[key] == result[key] for key in result.keys() - clocks)
    assert disk(tmp_path)["last.pt"] == weights


def test_resuming_cuts_rows_off_the_log_that_the_checkpoint_does_not_have(tmp_path):
    """Killed after log.csv was written, and last.pt is lost: the run goes on from prev.pt."""
    train(tmp_path)
    os.replace(tmp_path / "prev.pt", tmp_path / "last.pt")
    assert [line.split(",")[0] for line in log(tmp_path)] == ["iter", "3", "6"]
    stopped(tmp_path, "--resume", after=4)
    assert [line.split(",")[0] for line in log(tmp_path)] == ["iter", "3"]


def log(folder):
    return (folder / "log.csv").read_text().splitlines()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    train(folder)
    return folder


def resume(folder, monkeypatch, error):
    """--resume, where the attractor's load_state_dict raises the error."""
    def load_state_dict(self, state):
        raise error
    monkeypatch.setattr(BiasAttractor, "load_state_dict", load_state_dict)
    train_fixmatch.main([*TINY.split(), "--iters", "9", "--resume", "--out", str(folder)])


@pytest.mark.parametrize("kind", [AttributeError, TypeError, NameError])
def test_a_mistake_in_our_code_keeps_its_traceback(finished, monkeypatch, kind):
    with pytest.raises(kind, match="a typo"):
        resume(finished, monkeypatch, kind("a typo"))


# ---------------------------------------------------------------------------------------------
# other data


@pytest.mark.slow
def test_evaluate_and_resume_refuse_other_data(tmp_path, capsys):
    """The same sizes and names, but one pixel, label or name is another."""
    path = own_npz(tmp_path)
    with np.load(path) as arrays:
        arrays = dict(arrays)
    argv = [*TINY.split(), "--iters", "3", "--dataset", str(path), "--out", str(tmp_path / "run")]
    train_fixmatch.main(argv)
    evaluate.main([str(tmp_path / "run")])
    for change in (dict(x_train=255 - arrays["x_train"]), dict(y_test=arrays["y_test"][::-1]),
                   dict(names=list("edcba")), dict(x_unlabeled=arrays["x_unlabeled"][:70])):
        np.savez(path, **arrays | change)
        evaluate.load_data.cache_clear()
        for main, words in ((evaluate.main, [str(tmp_path / "run")]), (
                train_fixmatch.main, [*argv, "--iters", "6", "--resume"])):
            err = refused(tmp_path / "run", main, words, capsys)
            assert "not what the run" in err and f"--dataset {path}" in err
    evaluate.load_data.cache_clear()


# ---------------------------------------------------------------------------------------------
# links, files that cannot be read, commits


def test_links_in_a_run_folder_are_never_written_through(finished, tmp_path):
    """Under the names of every file and of the temporaries of older versions."""
    run, precious = shutil.copytree(finished, tmp_path / "run"), tmp_path / "precious"
    precious.write_text("precious")
    for name in ("config.json", "log.csv", "result.json", "prev.pt"):
        (run / name).unlink()
        (run / name).symlink_to(precious)
    for name in checkpoint.FILES:
        (run / f"{name}.tmp").symlink_to(precious)
    shutil.move(run / "last.pt", tmp_path / "elsewhere")
    (run / "last.pt").symlink_to(tmp_path / "elsewhere")
    before = (tmp_path / "elsewhere").read_bytes()
    train_fixmatch.main([*TINY.split(), "--iters", "9", "--resume", "--out", str(run)])
    assert precious.read_text() == "precious"
    assert (tmp_path / "elsewhere").read_bytes() == before
    assert not any((run / name).is_symlink() for name in ("config.json", "log.csv", "last.pt"))


def test_temporaries_of_a_killed_run_are_removed_and_no_other_files(finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    (run / "last.pt.0123456789abcdef.tmp").write_text("half")
    for name in ("notes.tmp", "mine.0123456789abcdef.tmp", "last.pt.backup"):
        (run / name).write_text("mine")
    train_fixmatch.main([*TINY.split(), "--iters", "9", "--resume", "--out", str(run)])
    assert {f.name for f in run.iterdir()} == {
        *(set(checkpoint.FILES) - {"damaged.pt"}), "notes.tmp", "mine.0123456789abcdef.tmp",
        "last.pt.backup"}


def test_write_leaves_what_is_no_file_alone(tmp_path):
    for place in (tmp_path, Path("/dev/null")):
        with pytest.raises(OSError, match="not a regular file"):
            checkpoint.write(place, b"x")
    assert Path("/dev/null").is_char_device() and not list(tmp_path.parent.glob("*.tmp"))


@pytest.mark.parametrize("fault", some(["permission", "folder", "loop"], "permission"))
def test_a_checkpoint_that_cannot_be_read_is_not_damaged(finished, tmp_path, capsys, monkeypatch,
                                                         fault):
    run = shutil.copytree(finished, tmp_path / "run")
    read = Path.read_bytes
    if fault == "permission":                                # root may read everything
        def forbidden(path):
            if path.name == "last.pt":
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return read(path)
        monkeypatch.setattr(Path, "read_bytes", forbidden)
    else:
        (run / "last.pt").unlink()
        (run / "last.pt").mkdir() if fault == "folder" else (run / "last.pt").symlink_to("last.pt")
    names = sorted(f.name for f in run.iterdir())
    for main, argv in ((evaluate.main, [str(run)]), (train_fixmatch.main, [
            *TINY.split(), "--iters", "9", "--resume", "--out", str(run)])):
        code, err = exit_of(main, argv, capsys)
        assert code == 2 and err.count("\n") == 1 and "last.pt cannot be read" in err
        assert "overwrite" not in err
    assert sorted(f.name for f in run.iterdir()) == names


def test_commit_of_this_checkout_only(tmp_path, monkeypatch):
    """A copy without .git inside another repository has none; with its own it has that one's."""
    def git(*words):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True,
                       cwd=tmp_path, capture_output=True)
    monkeypatch.setattr(checkpoint, "__file__", str(tmp_path / "copy/support/checkpoint.py"))
    git("init", ".")
    git("commit", "--allow-empty", "-m", "outer")
    git("init", "copy")
    git("-C", "copy", "commit", "--allow-empty", "-m", "own")
    own = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tmp_path / "copy", text=True,
                         capture_output=True).stdout
    assert checkpoint.own_commit() and own.startswith(checkpoint.own_commit())
    shutil.rmtree(tmp_path / "copy/.git")
    assert checkpoint.own_commit() is None
    (tmp_path / "copy/.git").mkdir()                         # empty: not a repository
    assert checkpoint.own_commit() is None


def test_the_commits_of_start_and_resume_are_recorded(tmp_path, monkeypatch):
    for commit, iters, seen in (("a", 3, ["a"]), ("a", 6, ["a"]), ("b", 9, ["a", "b"])):
        monkeypatch.setattr(checkpoint, "own_commit", lambda commit=commit: commit)
        train(tmp_path, f"--method none --iters {iters} --resume")
        for name in ("config.json", "result.json"):
            written = json.loads((tmp_path / name).read_text())
            assert (written["commit"], written["commits"]) == ("a", seen)
