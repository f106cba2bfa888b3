"""The files of a run: checkpoint, log, and what --resume may touch. (Killed, full disk, damaged:
test_reliability.py.)"""
import json
import os
import shutil

import pytest
import torch
from conftest import TINY, exit_of, stopped, train

import train_fixmatch
import train_mixmatch
from baselines import train as baselines
from support import UserError, checkpoint


def content(step):
    return {"step": step, "config": {}, "history": [], "model": {"w": torch.ones(3)}, "ema": {}}


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


@pytest.mark.parametrize("main,flags", [
    (train_fixmatch.main, "--tau 0.2 --iters 4"),            # its last evaluation is off the grid
    pytest.param(train_mixmatch.main, "", marks=pytest.mark.slow),
    pytest.param(baselines.main, "--base supervised --method crt --iters 3 --crt_iters 3",
                 marks=pytest.mark.slow)])
def test_resuming_a_finished_run_changes_no_file(tmp_path, monkeypatch, main, flags):
    train(tmp_path, flags, main)
    before = disk(tmp_path)
    assert {"config.json", "result.json", "log.csv", "last.pt"} <= before.keys()
    versions = checkpoint.versions() | {"commit": "another", "torch": "0.0"}
    monkeypatch.setattr(checkpoint, "versions", lambda: versions)
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
    monkeypatch.setattr(train_fixmatch.BiasAttractor, "load_state_dict", load_state_dict)
    train_fixmatch.main([*TINY.split(), "--iters", "9", "--resume", "--out", str(folder)])


@pytest.mark.parametrize("kind", [AttributeError, TypeError, NameError])
def test_a_mistake_in_our_code_keeps_its_traceback(finished, monkeypatch, kind):
    with pytest.raises(kind, match="a typo"):
        resume(finished, monkeypatch, kind("a typo"))


def test_a_checkpoint_with_other_shapes_is_a_sentence_with_its_cause(finished, tmp_path, capsys):
    """torch's own error, from an attractor of another width."""
    run = shutil.copytree(finished, tmp_path / "run")
    other = train_fixmatch.BiasAttractor(10, 5).state_dict()
    torch.save(torch.load(run / "last.pt", weights_only=True) | {"attractor": other},
               run / "last.pt")
    before, argv = disk(run), [*TINY.split(), "--iters", "9", "--resume", "--out", str(run)]
    with pytest.raises(UserError, match=r"last\.pt does not fit .*attractor") as error:
        train_fixmatch.main(argv)
    assert isinstance(error.value.__cause__, RuntimeError)
    assert "size mismatch" in str(error.value.__cause__)
    code, err = exit_of(train_fixmatch.main, argv, capsys)
    assert code == 2 and err.count("\n") == 1 and "Traceback" not in err
    assert disk(run) == before
