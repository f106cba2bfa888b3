"""A run from its folder to its last line: log, evaluations, screen, checkpoint, resume, signals."""
import csv
import json
import math
import os
import random
import signal
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import worker
from conftest import TINY, checkpoint, files, own_npz, same, stopped, train

import data
import train_fixmatch
import train_mixmatch
from support import UserError, config
from support import run as run_module
from support.finished import FinishedRun
from support.run import Means, Run

TAU = "--tau 0.2 "                       # pseudo-labels count from the first iteration on


def read_log(out):
    with open(out / "log.csv", newline="") as file:
        return [{key: float(x) for key, x in row.items()} for row in csv.DictReader(file)]


# ---------------------------------------------------------------------------------------------
# log and result


def test_rows_of_the_log_are_means_since_the_epoch_began(tmp_path):
    """Epochs of 4; the last evaluation is inside the third. loss_bal: of the omega steps alone."""
    seen = []

    def on_step(step, losses):
        seen.append({key: x.item() for key, x in losses.items()})
    train(tmp_path, TAU + "--iters 10 --eval_every 4 --omega_every 3", on_step=on_step)
    rows = read_log(tmp_path)
    assert [row["iter"] for row in rows] == [4, 8, 10] and ["loss_bal" in x for x in seen] == [
        True, False, False, True, False, False, True, False, False, True]
    for row, part in zip(rows, (seen[0:4], seen[4:8], seen[8:10]), strict=True):
        for key in ("loss_x", "loss_u", "loss_bal"):
            mean = np.mean([losses[key] for losses in part if key in losses])
            assert row[key] == pytest.approx(mean, rel=1e-5), key


def test_means_of_pseudo_labels_against_numpy():
    """kept, right and their parts by class; the true label of some images is not known (-1)."""
    g, means, seen = np.random.default_rng(0), Means(3, "cpu"), []
    for _ in range(7):
        batch = dict(y_u=g.integers(3, size=6), mask=g.integers(2, size=6).astype("float32"),
                     true_u=g.integers(-1, 3, size=6))
        means.add(**{k: torch.from_numpy(v) for k, v in batch.items()}, loss_x=torch.tensor(1.0),
                  loss_u=torch.tensor(2.0))
        seen.append(batch)
    mask, y_u, true_u = (np.concatenate([b[k] for b in seen]) for k in ("mask", "y_u", "true_u"))
    counted = (mask == 1) & (true_u >= 0)
    expected = {"loss_x": 1, "loss_u": 2, "loss_bal": math.nan, "kept": mask.mean(),
                "right": (y_u == true_u)[counted].mean()}
    expected |= {f"kept_{k}": mask[y_u == k].sum() / len(mask) for k in range(3)}
    expected |= {f"right_{k}": (true_u == k)[counted & (y_u == k)].mean() for k in range(3)}
    assert means.values() == pytest.approx(expected, nan_ok=True)


def test_the_result_is_the_mean_of_the_log(tmp_path):
    told = train_mixmatch.main([*TINY.split(), "--iters", "7", "--out", str(tmp_path)])
    rows, result = read_log(tmp_path), json.loads((tmp_path / "result.json").read_text())
    for key in ("bacc", "gm", "acc"):
        assert told[key] == result[key] == pytest.approx(
            np.mean([row[key] for row in rows]), rel=1e-5)
    assert told["recall"] == pytest.approx(
        [np.mean([row[f"recall_{k}"] for row in rows]) for k in range(10)], rel=1e-5)
    assert files(tmp_path).keys() == {"config.json", "log.csv", "last.pt", "result.json"}
    assert json.loads((tmp_path / "config.json").read_text())["temperature"] == 0.5


# ---------------------------------------------------------------------------------------------
# when a run is evaluated


def evaluations(iters, eval_every, milestones=()):
    run = Run.__new__(Run)
    run.cfg, run.milestones = SimpleNamespace(iters=iters, eval_every=eval_every), milestones
    return [done for done in range(1, iters + 1) if run.is_evaluated(done)]


@pytest.mark.parametrize("iters", [200, 219, 399, 1000, 1999, 2250])
@pytest.mark.parametrize("eval_every", [1, 7, 100, 231, 10**6])
def test_the_last_20_evaluations_lie_in_the_last_tenth(iters, eval_every):
    seen = evaluations(iters, eval_every, (iters // 3,))
    epochs = {*range(eval_every, iters + 1, eval_every), iters // 3}
    assert all(done > 0.9 * iters for done in seen[-20:]) and seen[-1] == iters
    assert epochs <= set(seen) and len(set(seen) - epochs) <= 20


@pytest.mark.parametrize("iters,eval_every,expected", [
    (199, 50, [50, 100, 150, 199]), (1, 5, [1]),
    (250_000, 500, range(500, 250_001, 500)),                # the paper's: 20 are a 25th of the run
    (1200, 60, [*range(60, 1081, 60), *range(1086, 1201, 6)]),                 # digits
    (3000, 100, [*range(100, 2801, 100), *range(2810, 3001, 10)]),    # 15 would not divide 100
    (250_000, 25_000, [*range(25_000, 225_001, 25_000), *range(226_250, 250_001, 1250)])])
def test_evaluations_of_short_and_long_runs(iters, eval_every, expected):
    assert evaluations(iters, eval_every) == list(expected)


# ---------------------------------------------------------------------------------------------
# a run without a network


def learn(out, iters, flags="", on_step=None, late=0, loss_bal=None):
    """A run whose loop is a few additions. late: no pseudo-label counts before this iteration"""
    argv = f"{TINY} --eval_every 30 --iters {iters} --out {out} {flags}".split()
    cfg = config.read(argv, "fixmatch", "", train_fixmatch.flags, train_fixmatch.l2ac_flags)
    run, model = Run(cfg, on_step), torch.nn.Linear(3, 2, bias=False)
    torch.nn.init.ones_(model.weight)

    def score():
        return dict.fromkeys(["bacc", "gm", "acc", "recall_0"], model.weight.mean().item() % 100)
    dataset = data.from_flags(cfg)
    start = run.open(dataset, *data.split(dataset, cfg), {"model": model}, score, resizable=True)
    y_u = torch.arange(6)
    for step in range(start, iters):
        with torch.no_grad():
            model.weight += 0.1 * (step % 7)
        loss = model.weight.detach().mean()
        run.after_step(step, y_u, torch.full((6,), float(step >= late)), (y_u + step) % 10,
                       loss_x=loss, loss_u=loss / 3, loss_bal=loss_bal)
    run.finish()
    return checkpoint(out), [row | {"it_per_s": 0} for row in read_log(out)]


@pytest.mark.parametrize("first,then,stop", [(200, 210, None), (250, 300, 237), (60, 90, 45)])
def test_a_run_that_is_made_longer_is_the_longer_run(tmp_path, first, then, stop):
    """Bit for bit, finished or stopped before, be it where evaluations are dense."""
    def on_step(step, losses):
        run_module.stop_requests += ["a signal"] * (step + 1 == stop)
    try:
        learn(tmp_path / "parts", first, on_step=on_step)
    except SystemExit:
        run_module.stop_requests.clear()
    assert checkpoint(tmp_path / "parts")["step"] == (stop or first)
    whole = learn(tmp_path / "whole", then)
    assert same(learn(tmp_path / "parts", then, "--resume"), whole)
    assert [row["iter"] for row in whole[1]] == evaluations(then, 30)


@pytest.mark.parametrize("iters,loss_bal", [(1000, None), (77, torch.tensor(2.0))])
def test_the_screen_has_80_columns_and_20_rows(tmp_path, monkeypatch, capsys, iters, loss_bal):
    """`right` has no number at first, as no pseudo-label counts; loss_bal perhaps never."""
    monkeypatch.chdir(tmp_path)
    learn(tmp_path / "run", iters, f"--eval_every {iters // 40} --out run", late=iters // 2,
          loss_bal=loss_bal)
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80 and "nan" not in out
    table, titles, rows = {}, None, 0
    for words in map(str.split, lines):
        if words[:2] == ["iter", "loss_x"]:
            titles = words
        elif titles and len(words) > 5 and words[0].isdigit():
            table |= dict(zip(titles, words, strict=True))   # of the last row, in the end
            rows += 1
    assert 10 <= rows <= 20 and table["iter"] == str(iters)
    last = read_log(tmp_path / "run")[-1]
    assert float(table["right"]) == pytest.approx(last["right"], abs=5e-4)
    assert ("loss_bal" in table) == ("loss_bal" in last) == (loss_bal is not None)


@pytest.mark.parametrize("iters", [1000, 100_000])
def test_an_estimate_after_20_iterations(tmp_path, monkeypatch, capsys, iters):
    """An iteration takes a second: 1,000 take minutes, 100,000 more than a day."""
    clock = [0.0]
    monkeypatch.setattr(run_module.time, "perf_counter", lambda: clock[0])

    def on_step(step, losses):
        clock[0] += 1
        run_module.stop_requests += ["a signal"] * (step == 19)
        assert "to go" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        learn(tmp_path, iters, f"--eval_every {iters}", on_step)
    out = capsys.readouterr().out
    assert f"about {timedelta(seconds=iters - 20)} to go" in out
    assert ("WARNING" in out) == (iters > 24 * 60 * 60)


# ---------------------------------------------------------------------------------------------
# resume


@pytest.fixture(scope="module")
def run6(tmp_path_factory):
    """The folder of an uninterrupted run of six iterations; tests only read it."""
    folder = tmp_path_factory.mktemp("run6")
    train(folder, TAU)
    return folder


@pytest.fixture
def copy(run6, tmp_path):
    for name, content in files(run6).items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


@pytest.mark.parametrize("main", [train_fixmatch.main, train_mixmatch.main])
def test_ten_and_resume_and_ten_equals_twenty(tmp_path, capsys, main):
    flags = "--iters 20 --eval_every 8" + " --tau 0.2" * (main == train_fixmatch.main)
    whole = train(tmp_path / "whole", flags, main)
    stopped(tmp_path / "parts", flags, 10, main)
    capsys.readouterr()
    assert same(train(tmp_path / "parts", flags + " --resume", main), whole)
    assert "after iteration 10 of 20" in capsys.readouterr().out
    assert whole["step"] == 20 and whole["attractor"]["out.bias"].abs().min() > 0    # omega moved


def test_resuming_a_finished_run_changes_no_file(copy):
    before = files(copy)
    train(copy, TAU + "--resume", on_step=lambda step, losses: pytest.fail("it trains"))
    assert files(copy) == before


def test_fewer_iterations_than_are_done_are_refused(copy):
    before = files(copy)
    with pytest.raises(UserError, match="--iters is 5, but .* is already at 6"):
        train(copy, TAU + "--resume --iters 5")
    assert files(copy) == before


class Killed(BaseException):
    """SIGKILL, as far as a test in the same process can play it: nothing catches it."""


def test_a_longer_run_has_no_result_until_it_ends(copy, tmp_path_factory):
    def on_step(step, losses):
        raise Killed
    with pytest.raises(Killed):
        train(copy, TAU + "--resume --iters 9", on_step=on_step)
    assert files(copy).keys() == {"config.json", "log.csv", "last.pt"}
    whole = train(tmp_path_factory.mktemp("whole"), TAU + "--iters 9")
    assert same(train(copy, TAU + "--resume --iters 9"), whole) and (copy / "result.json").exists()


@pytest.mark.parametrize("when", ["fsync", "replace"])
def test_a_crash_while_saving_leaves_the_old_checkpoint(run6, tmp_path, monkeypatch, when):
    """Killed after 1,000 bytes of the second checkpoint, or when all are there but not renamed."""
    call, saved = getattr(os, when), []

    def crash(*args):
        name = str(args[0]) if when == "replace" else os.readlink(f"/proc/self/fd/{args[0]}")
        if "last.pt" in name and saved:
            if when == "fsync":
                os.truncate(args[0], 1000)
            raise Killed
        saved.extend([name] * ("last.pt" in name))
        return call(*args)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, when, crash)
        train(tmp_path, TAU)
    assert checkpoint(tmp_path)["step"] == 3
    assert same(train(tmp_path, TAU + "--resume"), checkpoint(run6))


def test_a_flipped_bit_is_noticed(tmp_path):
    """Anywhere in the file, or it changes nothing (names are padded, times are not used)."""
    state = {"model": {"w": torch.arange(6.0)}, "means": torch.ones(2, 3), "step": 3,
             "config": {"seed": 0}}
    run_module.write(tmp_path / "last.pt", state)
    good, noticed = (tmp_path / "last.pt").read_bytes(), 0
    for place in random.Random(0).sample(range(8 * len(good)), 200):
        bad = bytearray(good)
        bad[place // 8] ^= 1 << place % 8
        (tmp_path / "last.pt").write_bytes(bad)
        try:
            assert same(run_module.load_checkpoint(tmp_path), state), place
        except UserError as error:
            assert "last.pt is damaged" in str(error)
            noticed += 1
    assert noticed > 100


def test_a_run_from_before_a_flag_existed(copy, tmp_path_factory):
    """It has the flag's default, for --resume and for evaluate.py."""
    numbers = FinishedRun(copy).last
    state = checkpoint(copy)
    for flag in ("hidden", "omega_every", "pool"):
        del state["config"][flag]
    torch.save(state, copy / "last.pt")
    again = FinishedRun(copy)
    assert same(again.last, numbers) and (again.cfg.hidden, again.cfg.pool) == (256, "disjoint")
    with pytest.raises(UserError, match="--omega_every is 2"):
        train(copy, TAU + "--resume --iters 9 --omega_every 2")
    whole = train(tmp_path_factory.mktemp("whole"), TAU + "--iters 9")
    assert same(train(copy, TAU + "--resume --iters 9"), whole)


def test_data_that_have_changed_are_refused(tmp_path):
    path, run = own_npz(tmp_path), tmp_path / "run"
    with np.load(path) as arrays:
        arrays = dict(arrays)
    flags = f"--dataset {path} --iters 3"
    train(run, flags)
    before = files(run)
    for change in (dict(x_train=255 - arrays["x_train"]), dict(names=list("edcba"))):
        np.savez(path, **arrays | change)
        with pytest.raises(UserError, match="not what the run"):
            train(run, flags + " --iters 6 --resume")
        with pytest.raises(UserError, match="not what the run"):
            print(FinishedRun(run).last)
    assert files(run) == before


# ---------------------------------------------------------------------------------------------
# trouble


def test_a_loss_that_is_not_finite_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    loss, calls = train_fixmatch.fixmatch_loss, []

    def broken(*args, **kwargs):
        calls.append(1)                               # twice an iteration: for both levels
        total, loss_x, loss_u = loss(*args, **kwargs)
        return total, loss_x, loss_u * (math.nan if len(calls) == 2 * 4 + 1 else 1)
    monkeypatch.setattr(train_fixmatch, "fixmatch_loss", broken)
    with pytest.raises(UserError, match="not finite"):
        train(tmp_path, TAU)
    assert checkpoint(tmp_path)["step"] == 3 and not (tmp_path / "result.json").exists()


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    with pytest.raises(UserError, match="not finite"):
        train(tmp_path, "--lr 1e9 --weight_decay 1e9 --lambda_u 1e9 --iters 9 --method none")
    assert not (tmp_path / "last.pt").exists()


def test_sigterm_saves_and_ends_with_130(tmp_path):
    argv = [*TINY.split(), "--iters", "100000", "--out", str(tmp_path / "run")]
    process = worker.start(run_module.launch, lambda: train_fixmatch.main(argv), folder=tmp_path)
    while process.is_alive() and not (tmp_path / "run/log.csv").exists():
        time.sleep(0.01)
    process.terminate()
    code, out, err = worker.end(process, tmp_path)
    step = checkpoint(tmp_path / "run")["step"]
    assert code == 130 and f"stopped after iteration {step}" in out and err == "" and step >= 3


@pytest.mark.slow
def test_killed_at_random_moments_and_resumed(tmp_path):
    """Real digits, SIGKILL in the middle of whatever the process does some milliseconds after a
    random iteration: every file equals that of the uninterrupted run, but for the clock."""
    def run(out, steps=1000, delay=0.0):
        def on_step(step, losses):
            nonlocal steps
            steps -= 1
            if steps == 0:
                threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        train_fixmatch.main(f"--iters 60 --eval_every 3 --threads 1 --batch_size 8 --resume "
                            f"--out {out}".split(), on_step)
    whole, parts, moment = tmp_path / "whole", tmp_path / "parts", random.Random(0)
    train(tmp_path / "first", "--dataset digits")            # imports what the forks need
    worker.run(run, whole, folder=tmp_path)
    codes = []
    while not (parts / "result.json").exists():
        process = worker.start(run, parts, moment.randint(1, 9), moment.uniform(0, 0.05),
                               folder=tmp_path)
        codes.append(worker.end(process, tmp_path)[0])
    # the last one, too, if it has written all its files but has not ended yet
    assert set(codes) <= {0, -signal.SIGKILL} and len(codes) > 8
    assert same(checkpoint(whole), checkpoint(parts))
    logs = [[line.rsplit(",", 1)[0] for line in (out / "log.csv").read_text().splitlines()]
            for out in (whole, parts)]                       # it_per_s is the last column
    results = [json.loads((out / "result.json").read_text()) | {"seconds": 0}
               for out in (whole, parts)]
    assert logs[0] == logs[1] and results[0] == results[1]
