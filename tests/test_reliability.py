"""Faults on purpose: full disk, damaged files, code in a checkpoint, signals, a busy folder."""
import fcntl
import math
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import common
import data
import run_folder
import settings
import train_fixmatch
import train_mixmatch
from baselines import train as baselines_train
from test_distributed import torchrun
from test_train_fixmatch import TINY, same, train

ROOT = Path(__file__).parent.parent


def answer(out, flags, capsys):
    """(exit code, stderr) of a run that ends in an error."""
    with pytest.raises(SystemExit) as end:
        settings.exit_cleanly(lambda: train(out, flags), data.DataError)
    return end.value.code, capsys.readouterr().err


def files(folder):
    return {f.name: f.read_bytes() for f in folder.iterdir()}


class Killed(BaseException):
    """SIGKILL, as far as a test in the same process can play it: nothing catches it."""


# ---------------------------------------------------------------------------------------------
# files


@pytest.fixture
def small_files():
    """A function that sets the size, in bytes, beyond which write() fails with EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path, capsys, small_files):
    whole = train(tmp_path / "whole", "--iters 9")
    train(tmp_path / "run", "--iters 6")
    before = files(tmp_path / "run")
    small_files(100_000)                              # a checkpoint has about a megabyte
    code, err = answer(tmp_path / "run", "--iters 9 --resume", capsys)
    small_files(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    assert code == 2 and err.count("\n") == 1 and "File too large" in err and "last.pt" in err
    after = files(tmp_path / "run")
    assert before.keys() == after.keys() and before["last.pt"] == after["last.pt"]
    assert same(whole, train(tmp_path / "run", "--iters 9 --resume"))


@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b[:len(b) // 2], lambda b: b"junk" * 9,
                                    lambda b: b[:2000] + bytes(len(b) - 2000)])
def test_a_damaged_checkpoint_never_replaces_a_good_one(tmp_path, capsys, damage):
    whole = train(tmp_path)
    good, bad = (tmp_path / "prev.pt").read_bytes(), damage((tmp_path / "last.pt").read_bytes())
    (tmp_path / "last.pt").write_bytes(bad)
    assert same(whole, train(tmp_path, "--resume"))
    assert "WARNING" in capsys.readouterr().err
    assert (tmp_path / "prev.pt").read_bytes() == good
    assert (tmp_path / "damaged.pt").read_bytes() == bad


@pytest.mark.parametrize("rename", [1, 2])
def test_killed_between_the_renames(tmp_path, monkeypatch, rename):
    """last.pt -> prev.pt, last.pt.tmp -> last.pt: killed before the first and before the second."""
    whole, replace, seen = train(tmp_path / "whole"), os.replace, []
    def stop(source, target):
        seen.extend([target] if target.name in ("prev.pt", "last.pt") and seen or
                    target.name == "prev.pt" else [])
        if len(seen) == rename:
            raise Killed
        replace(source, target)
    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(Killed):
        train(tmp_path / "run")
    monkeypatch.undo()
    assert (tmp_path / "run/last.pt").exists() == (rename == 1)
    assert same(whole, train(tmp_path / "run", "--resume"))


class Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_checkpoint_with_code_in_it_runs_nothing(tmp_path, capsys):
    state = train(tmp_path / "run")
    (tmp_path / "run/prev.pt").unlink()
    torch.save(state | {"step": Trap(str(tmp_path / "ran"))}, tmp_path / "run/last.pt")
    code, err = answer(tmp_path / "run", "--resume", capsys)
    assert code == 2 and err.count("\n") == 1 and "last.pt" in err
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "run/last.pt", weights_only=False)         # the trap is a real one
    assert (tmp_path / "ran").exists()


def test_a_loss_that_is_not_finite_keeps_the_last_good_checkpoint(tmp_path, capsys, monkeypatch):
    losses, calls = train_fixmatch.fixmatch_losses, []
    def broken(*batch):
        calls.append(1)                               # twice an iteration: for both levels
        x, u = losses(*batch)
        return x, u * (math.nan if len(calls) == 2 * 4 + 1 else 1)
    monkeypatch.setattr(train_fixmatch, "fixmatch_losses", broken)
    code, err = answer(tmp_path, "", capsys)
    assert code == 2 and err.count("\n") == 1
    assert "iteration 4 is not finite" in err and "nan" in err
    assert torch.load(tmp_path / "last.pt", weights_only=True)["step"] == 3


# ---------------------------------------------------------------------------------------------
# a folder in use


def test_a_folder_in_use_is_left_alone_until_its_process_dies(tmp_path_factory, capsys):
    tmp_path = tmp_path_factory.mktemp("run")
    train(tmp_path)
    run_folder.lock(tmp_path_factory.mktemp("other"))  # a process has one run at a time: let go
    before = files(tmp_path)
    holder = subprocess.Popen(
        [sys.executable, "-c", "import fcntl, os, sys, time\n"
         f"fcntl.flock(os.open({str(tmp_path)!r}, os.O_RDONLY), fcntl.LOCK_EX)\n"
         "print('held', flush=True)\ntime.sleep(600)"], stdout=subprocess.PIPE)
    holder.stdout.readline()
    for flags in ("", "--resume", "--overwrite"):
        code, err = answer(tmp_path, flags, capsys)
        assert code == 2 and err.count("\n") == 1 and "in use" in err and f"--out {tmp_path}" in err
    assert files(tmp_path) == before
    holder.kill()
    holder.wait()
    train(tmp_path, "--resume")


def test_a_run_holds_its_folder(tmp_path, monkeypatch):
    seen = []
    def see(self, step, losses):
        with pytest.raises(BlockingIOError):
            fcntl.flock(os.open(tmp_path, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
        seen.append(step)
    monkeypatch.setattr(common.Watch, "see", see)
    train(tmp_path)
    assert len(seen) == 6


# ---------------------------------------------------------------------------------------------
# signals


@pytest.fixture
def listening():
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    common.interrupt.listen()
    yield
    signal.signal(signal.SIGINT, before[0])
    signal.signal(signal.SIGTERM, before[1])
    common.interrupt.wished = False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_of_saving(tmp_path, monkeypatch, capsys, listening, number):
    whole, fsync = train(tmp_path / "whole"), os.fsync
    def interrupted(descriptor):
        if "last.pt" in os.readlink(f"/proc/self/fd/{descriptor}") and not common.interrupt.wished:
            signal.raise_signal(number)
        fsync(descriptor)
    monkeypatch.setattr(os, "fsync", interrupted)
    assert train(tmp_path / "run") == 130
    assert "stopped after iteration 4" in capsys.readouterr().out
    assert signal.getsignal(number) == signal.SIG_DFL                # a second one would end it
    common.interrupt.wished = False
    monkeypatch.undo()
    assert same(whole, train(tmp_path / "run", "--resume"))


SCRIPTS = {"train_fixmatch": train_fixmatch, "train_mixmatch": train_mixmatch,
           "baselines.train": baselines_train}


@pytest.mark.parametrize("script", ["train_mixmatch", "baselines.train"])
def test_ten_and_resume_and_ten_equals_twenty(tmp_path, monkeypatch, script):
    """FixMatch's is in test_train_fixmatch.py; these two cannot be made longer, so they are
    stopped."""
    def run(out, *more):
        words = TINY.replace("--tau 0.2", "--iters 20 --eval_every 8").split()
        return SCRIPTS[script].main([*words, *more, "--out", str(out)])
    see = common.Watch.see
    def stop(self, step, losses):
        common.interrupt.wished = step == 9
        see(self, step, losses)
    run(tmp_path / "whole")
    monkeypatch.setattr(common.Watch, "see", stop)
    assert run(tmp_path / "parts") == 130
    monkeypatch.undo()
    common.interrupt.wished = False
    run(tmp_path / "parts", "--resume")
    whole, parts = (torch.load(tmp_path / n / "last.pt", weights_only=True)
                    for n in ("whole", "parts"))
    assert whole["step"] == 20 and same(whole, parts)


# ---------------------------------------------------------------------------------------------
# real processes


def wait_for(path, process, seconds=120):
    until = time.time() + seconds
    while not path.exists():
        assert process.poll() is None and time.time() < until, process.communicate()
        time.sleep(0.05)


LONG = [*TINY.replace("--iters 6", "--iters 100000").split(), "--batch_size", "8"]


def test_sigterm_from_a_shell(tmp_path):
    run = subprocess.Popen([sys.executable, "train_fixmatch.py", *LONG, "--out", str(tmp_path)],
                           cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(tmp_path / "log.csv", run)
    run.terminate()
    out, err = run.communicate(timeout=60)
    assert run.returncode == 130 and "--resume" in out and err == ""
    assert torch.load(tmp_path / "last.pt", weights_only=True)["step"] >= 3


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_one_of_two_processes_gets_a_signal(tmp_path, number):
    """SIGKILL: the other one notices, says so and ends, within a minute. SIGTERM: both save."""
    run = torchrun(2, "train_fixmatch.py", *LONG, "--out", tmp_path,
                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(tmp_path / "log.csv", run)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    os.kill(int(children[1]), number)
    out, err = run.communicate(timeout=60)
    assert run.returncode != 0
    if number == signal.SIGKILL:
        assert "another process of this run is dead" in err and "--resume" in err
    else:
        assert "the same command with --resume goes on" in out
    step = torch.load(tmp_path / "last.pt", weights_only=True)["step"]
    more = [*LONG, "--iters", str(step + 3), "--resume", "--out", str(tmp_path)]
    train_fixmatch.main(more)                         # one process may go on where two began
    assert torch.load(tmp_path / "last.pt", weights_only=True)["step"] == step + 3
