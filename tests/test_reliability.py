"""Faults on purpose: full disk, damaged files, code in a checkpoint, signals, a busy folder.
Several ranks have a file of their own, test_distributed.py."""
import fcntl
import math
import os
import resource
import signal
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, TINY, checkpoint, exit_of, files, same, stopped, train, wait_for

import train_fixmatch
import train_mixmatch
from baselines import train as baselines
from support import checkpoint as checkpoint_module
from support.run import stop_signal

TAU = "--tau 0.2 "                       # pseudo-labels count from the first iteration on


def ends(out, flags, capsys):
    """(exit code, stderr) of a tiny FixMatch run."""
    argv = f"{TINY} --iters 6 {TAU}{flags} --out {out}".split()
    return exit_of(train_fixmatch.main, argv, capsys)


class Killed(BaseException):
    """SIGKILL, as far as a test in the same process can play it: nothing catches it."""


# ---------------------------------------------------------------------------------------------
# files


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """last.pt of an uninterrupted run of six iterations."""
    return train(tmp_path_factory.mktemp("whole"), TAU)


@pytest.fixture
def small_files():
    """A function that sets the size, in bytes, beyond which write() fails with EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_old_checkpoint(whole, tmp_path, capsys, small_files):
    train(tmp_path, TAU + "--iters 3")
    before = files(tmp_path)
    small_files(100_000)                              # a checkpoint has about a megabyte
    code, err = ends(tmp_path, "--resume", capsys)
    small_files(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    assert code == 2 and err.count("\n") == 1 and "File too large" in err and "last.pt" in err
    after = files(tmp_path)
    assert before.keys() == after.keys() and before["last.pt"] == after["last.pt"]
    assert same(whole, train(tmp_path, TAU + "--resume"))


DAMAGES = {"half": lambda b: b[:len(b) // 2], "empty": lambda b: b"", "junk": lambda b: b"junk" * 9,
           "zeros": lambda b: b[:2000] + bytes(len(b) - 2000)}


@pytest.mark.parametrize("damage", [name if name == "half" else pytest.param(
    name, marks=pytest.mark.slow) for name in DAMAGES])
def test_a_damaged_checkpoint_never_replaces_a_good_one(whole, tmp_path, capsys, damage):
    train(tmp_path, TAU)
    good = (tmp_path / "prev.pt").read_bytes()
    bad = DAMAGES[damage]((tmp_path / "last.pt").read_bytes())
    (tmp_path / "last.pt").write_bytes(bad)
    assert same(whole, train(tmp_path, TAU + "--resume"))
    assert "WARNING" in capsys.readouterr().err
    assert (tmp_path / "prev.pt").read_bytes() == good
    assert (tmp_path / "damaged.pt").read_bytes() == bad


@pytest.mark.slow
@pytest.mark.parametrize("rename", [1, 2])
def test_killed_between_the_renames(whole, tmp_path, monkeypatch, rename):
    """last.pt -> prev.pt, last.pt.tmp -> last.pt: killed before the first and before the second."""
    replace, seen = os.replace, []

    def stop(source, target):
        if target.name == "prev.pt" or target.name == "last.pt" and seen:
            seen.append(target)
        if len(seen) == rename:
            raise Killed
        replace(source, target)
    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(Killed):
        train(tmp_path, TAU)
    monkeypatch.setattr(os, "replace", replace)
    assert (tmp_path / "last.pt").exists() == (rename == 1)
    assert same(whole, train(tmp_path, TAU + "--resume"))


class Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_checkpoint_with_code_in_it_runs_nothing(whole, tmp_path, capsys):
    run, ran = tmp_path / "run", tmp_path / "ran"
    run.mkdir()
    torch.save(whole | {"step": Trap(str(ran))}, run / "last.pt")
    code, err = ends(run, "--resume", capsys)
    assert code == 2 and err.count("\n") == 1 and "last.pt" in err
    assert not ran.exists()
    torch.load(run / "last.pt", weights_only=False)                  # the trap is a real one
    assert ran.exists()


def test_a_loss_that_is_not_finite_keeps_the_last_good_checkpoint(tmp_path, capsys, monkeypatch):
    loss, calls = train_fixmatch.fixmatch_loss, []

    def broken(*args, **kwargs):
        calls.append(1)                               # twice an iteration: for both levels
        total, loss_x, loss_u = loss(*args, **kwargs)
        return total, loss_x, loss_u * (math.nan if len(calls) == 2 * 4 + 1 else 1)
    monkeypatch.setattr(train_fixmatch, "fixmatch_loss", broken)
    code, err = ends(tmp_path, "", capsys)
    assert code == 2 and err.count("\n") == 1
    assert "iteration 4 is not finite" in err and "loss_u nan" in err
    assert checkpoint(tmp_path)["step"] == 3


# ---------------------------------------------------------------------------------------------
# a folder in use


def test_a_folder_in_use_is_left_alone_until_its_process_dies(tmp_path, capsys):
    run = tmp_path / "run"
    train(run, "--iters 1 --method none")
    checkpoint_module.lock(tmp_path / "other")        # a process has one run at a time: let go
    before = files(run)
    holder = subprocess.Popen(
        [sys.executable, "-c", "import fcntl, os, sys, time\n"
         f"fcntl.flock(os.open({str(run)!r}, os.O_RDONLY), fcntl.LOCK_EX)\n"
         "print('held', flush=True)\ntime.sleep(600)"], stdout=subprocess.PIPE)
    holder.stdout.readline()
    for flags in ("", "--resume", "--overwrite"):
        code, err = ends(run, flags, capsys)
        assert code == 2 and err.count("\n") == 1 and "in use" in err and f"--out {run}" in err
    assert files(run) == before
    holder.kill()
    holder.wait()
    train(run, "--iters 2 --method none --resume")


def test_a_run_holds_its_folder(tmp_path):
    seen = []

    def on_step(step, losses):
        folder = os.open(tmp_path, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(folder)
        seen.append(step)
    train(tmp_path, "--iters 2 --method none", on_step=on_step)
    assert seen == [0, 1]


# ---------------------------------------------------------------------------------------------
# signals


@pytest.fixture
def listening():
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    stop_signal.listen()
    yield
    signal.signal(signal.SIGINT, before[0])
    signal.signal(signal.SIGTERM, before[1])


@pytest.mark.parametrize("number", [signal.SIGTERM,
                                    pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_in_the_middle_of_saving(whole, tmp_path, monkeypatch, capsys, listening, number):
    fsync = os.fsync

    def interrupted(descriptor):
        if "last.pt" in os.readlink(f"/proc/self/fd/{descriptor}") and not stop_signal.requested:
            signal.raise_signal(number)
        fsync(descriptor)
    monkeypatch.setattr(os, "fsync", interrupted)
    assert train(tmp_path, TAU) == 130
    assert "stopped after iteration 4" in capsys.readouterr().out
    assert signal.getsignal(number) == signal.SIG_DFL                # a second one would end it
    stop_signal.requested = False
    monkeypatch.setattr(os, "fsync", fsync)
    assert same(whole, train(tmp_path, TAU + "--resume"))


@pytest.mark.slow
@pytest.mark.parametrize("main", [train_mixmatch.main, baselines.main])
def test_ten_and_resume_and_ten_equals_twenty(tmp_path, main):
    """FixMatch's is in test_train_fixmatch.py; these two cannot be made longer, so they are
    stopped."""
    flags = "--iters 20 --eval_every 8"
    stopped(tmp_path / "parts", flags, 10, main)
    parts = train(tmp_path / "parts", flags + " --resume", main)
    assert parts["step"] == 20 and same(train(tmp_path / "whole", flags, main), parts)


@pytest.mark.slow
def test_sigterm_from_a_shell(tmp_path):
    run = subprocess.Popen([sys.executable, "train_fixmatch.py", *TINY.split(), "--iters", "100000",
                            "--out", str(tmp_path)],
                           cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(tmp_path / "log.csv", run)
    run.terminate()
    out, err = run.communicate(timeout=60)
    assert run.returncode == 130 and "--resume" in out and err == ""
    assert checkpoint(tmp_path)["step"] >= 3
