"""The bookkeeping of a run: averages for the log, when it is evaluated, the guard against NaN, stop
signals, warnings."""
import csv
import math
import signal
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import TINY, checkpoint, same, stopped, train

import data
from baselines import Method
from baselines import train as baselines
from support import UserError, config, distributed
from support.averages import Averages
from support.health import Health, NaNGuard
from support.run import Run, StopSignal, stop_signal

# ---------------------------------------------------------------------------------------------
# averages


def batches(count, size=6):
    """What a step hands to Averages.add, some steps without an omega step; labels may be -1."""
    g = np.random.default_rng(0)
    for step in range(count):
        batch = dict(y_u=g.integers(3, size=size), mask=g.integers(2, size=size).astype("float32"),
                     true_u=g.integers(-1, 3, size=size),
                     loss_x=np.float32(g.random()), loss_u=np.float32(g.random()))
        if step % 2:
            batch |= dict(loss_bal=np.float32(g.random()), omega_grad=np.float32(g.random()))
        yield batch


def add(averages, batch):
    averages.add(**{k: torch.from_numpy(np.asarray(v)) for k, v in batch.items()},
                 loss=torch.tensor(9.0))


def expected_means(seen):
    def column(name):
        return np.mean([batch[name] for batch in seen if name in batch])
    mask, y_u, true_u = (np.concatenate([b[k] for b in seen]) for k in ("mask", "y_u", "true_u"))
    counted = (mask == 1) & (true_u >= 0)
    by_class = {f"kept_{k}": mask[y_u == k].sum() / len(mask) for k in range(3)} | {
        f"precision_{k}": (true_u == k)[counted & (y_u == k)].mean() for k in range(3)}
    return {"loss_x": column("loss_x"), "loss_u": column("loss_u"), "mask_rate": mask.mean(),
            "pseudo_acc": (y_u == true_u)[counted].mean(), "loss_bal": column("loss_bal"),
            "omega_grad": column("omega_grad")} | by_class


def test_averages_against_numpy():
    averages, seen = Averages(3, "cpu"), list(batches(7))
    for batch in seen:
        add(averages, batch)
    assert averages.means() == pytest.approx(expected_means(seen))
    averages.reset()
    assert all(math.isnan(value) for value in averages.means().values())
    add(averages, seen[0])                                   # no omega step since the reset
    assert math.isnan(averages.means()["loss_bal"]) and averages.means()["loss_x"] > 0


def test_averages_do_not_depend_on_when_they_are_asked_for():
    """Bit for bit: float32 sums depend on their order."""
    often, once, seen = Averages(3, "cpu"), Averages(3, "cpu"), list(batches(2100))
    for step, batch in enumerate(seen):
        add(often, batch)
        add(once, batch)
        if step % 7 == 0:
            often.means()
            often.load_state_dict(often.state_dict())
    assert often.means() == once.means()
    assert len(once.pending) == 0 and once.means() == pytest.approx(expected_means(seen), rel=1e-4)


def test_averages_of_several_ranks_are_reduced_only_for_the_log(monkeypatch):
    """Two ranks in one process. There is no process group, so that any message would fail."""
    monkeypatch.setattr(distributed, "size", lambda: 2)
    ranks, seen = [Averages(3, "cpu"), Averages(3, "cpu")], list(batches(8))
    for step in range(0, 8, 2):                              # step by step, one batch for each
        for averages, batch in zip(ranks, seen[step:step + 2], strict=True):
            batch |= {k: v for k, v in seen[step + 1].items() if k in ("loss_bal", "omega_grad")}
            add(averages, batch)
            averages.means()                                 # the status line: local values

    def mean_over_ranks(tensors):
        sums, = tensors
        assert any(sums is averages.sums for averages in ranks)
        return [(ranks[0].sums + ranks[1].sums) / 2]
    for averages in ranks:
        assert averages.means(mean_over_ranks) == pytest.approx(expected_means(seen))


def test_averages_of_another_number_of_ranks_are_restored_as_their_mean(monkeypatch):
    sums = torch.arange(40.0).view(2, 2, 10)                 # six columns, and two for each class
    averages = Averages(2, "cpu")
    averages.load_state_dict({"sums": sums})
    assert torch.equal(averages.sums, (sums[0] + sums[1]) / 2)
    monkeypatch.setattr(distributed, "size", lambda: 2)
    monkeypatch.setattr(distributed, "rank", lambda: 1)
    averages.load_state_dict({"sums": sums})                 # the same number: each its own
    assert torch.equal(averages.sums, sums[1])
    for wrong in ([], {}, {"sums": 3}, {"sums": torch.tensor(1.0)}, {"sums": sums[:, :1]},
                  {"sums": sums[:0]}, {"sums": sums.double()}):
        with pytest.raises(ValueError, match="sums"):
            averages.load_state_dict(wrong)


def test_rows_of_all_ranks_and_back(monkeypatch):
    """join_ranks: part after part, in a part rank after rank; local_rows undoes it."""
    parts = [torch.arange(6).view(2, 3), torch.arange(10, 14).view(2, 2)]      # [rank] of each part
    monkeypatch.setattr(distributed, "all_gather", lambda x: {3: parts[0], 2: parts[1]}[len(x)]
                        .flatten())
    for rank in range(2):
        run = SimpleNamespace(rank=rank, size=2)
        local = [part[rank] for part in parts]
        whole = Run.join_ranks(run, *local)
        assert whole.tolist() == [0, 1, 2, 3, 4, 5, 10, 11, 12, 13]
        assert torch.equal(Run.local_rows(run, whole, 3, 2), torch.cat(local))


# ---------------------------------------------------------------------------------------------
# when a run is evaluated


def evaluations(iters, eval_every, milestones=()):
    run = Run.__new__(Run)
    run.cfg, run.milestones = SimpleNamespace(iters=iters, eval_every=eval_every), milestones
    return [done for done in range(1, iters + 1) if run.is_evaluated(done)]


@pytest.mark.parametrize("iters", [200, 201, 219, 399, 400, 1000, 1500, 1999, 2000, 2250, 69_300])
@pytest.mark.parametrize("eval_every", [1, 7, 75, 100, 231, 500, 10**6])
def test_the_last_20_evaluations_lie_in_the_last_tenth(iters, eval_every):
    seen = evaluations(iters, eval_every, (iters // 3,))
    assert all(done > 0.9 * iters for done in seen[-20:]) and seen[-1] == iters
    epochs = {*range(eval_every, iters + 1, eval_every), iters // 3}
    assert epochs <= set(seen) and len(set(seen) - epochs) <= 20
    assert all(done > 0.9 * iters for done in set(seen) - epochs)
    assert all(b - a >= iters // 200 for a, b in zip(seen, seen[1:], strict=False)
               if not {a, b} & epochs)                       # and they are spread over that tenth


@pytest.mark.parametrize("iters,eval_every,expected", [
    (199, 50, [50, 100, 150, 199]), (6, 3, [3, 6]), (1, 5, [1]),
    (250_000, 25_000, [*range(25_000, 225_001, 25_000), *range(226_250, 250_001, 1250)])])
def test_evaluations_of_short_and_long_runs(iters, eval_every, expected):
    assert evaluations(iters, eval_every) == expected


def learn(out, iters, eval_every=30, stop=None, resume=False):
    """A run whose loop is a few additions. Returns its checkpoint and log.csv without the clock."""
    argv = [*TINY.split(), *f"--iters {iters} --eval_every {eval_every} --out {out}".split()]
    run = Run(config.read(argv + ["--resume"] * resume, "fixmatch"))
    dataset, index_l, index_u = data.load_split(run.cfg, run.device)
    model = torch.nn.Linear(3, 2, bias=False)
    torch.nn.init.ones_(model.weight)
    start = run.open(dataset, index_l, index_u, {"model": model, "ema": model},
                     resizable=True)
    y_u, mask = torch.arange(6), torch.ones(6)
    columns = ["bacc", "gm", "acc", *(f"recall_{k}" for k in range(10))]
    for step in range(start, iters):
        with torch.no_grad():
            model.weight += 0.1 * (step % 7)
        loss = model.weight.detach().mean() / 3
        stop_signal.requested = step + 1 == stop
        score = model.weight.mean().item() % 100
        if run.after_step(step, partial(dict.fromkeys, columns, score), y_u, mask,
                          (y_u + step) % 10, loss_x=loss, loss_u=2 * loss):
            break
    stop_signal.requested = False
    with open(out / "log.csv") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        del row["it_per_s"]
    return checkpoint(out), rows


@pytest.mark.parametrize("first,then,stop", [
    (250, 300, 240), (60, 90, 45), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (200, 400, None), (200, 230, None), (200, 210, None), (400, 600, 391), (150, 200, None),
        (250, 260, 245)))])
def test_a_run_that_is_made_longer_is_the_longer_run(tmp_path, first, then, stop):
    """Bit for bit, finished or stopped before, be it inside its dense part."""
    whole = learn(tmp_path / "whole", then)
    state, _ = learn(tmp_path / "parts", first, stop=stop)
    assert state["step"] == (stop or first)
    again = learn(tmp_path / "parts", then, resume=True)
    assert same(whole, again)
    assert [int(row["iter"]) for row in again[1]] == evaluations(then, 30)


@pytest.mark.slow
def test_a_run_that_is_stopped_in_its_dense_part_goes_on_as_if_it_had_not_been(tmp_path):
    whole = learn(tmp_path / "whole", 250)
    learn(tmp_path / "parts", 250, stop=237)
    assert same(whole, learn(tmp_path / "parts", 250, resume=True))


def test_means_of_a_dense_evaluation_are_since_the_epoch_began(tmp_path):
    """Epochs of 30: the row of iteration 235 averages iterations 211 to 235, that of 240 all 30."""
    _, rows = learn(tmp_path, 250)
    weights = np.cumsum([0.1 * (step % 7) for step in range(250)]) + 1
    for row in rows:
        done = int(row["iter"])
        mean = (weights[(done - 1) // 30 * 30:done] / 3).mean()
        assert float(row["loss_x"]) == pytest.approx(mean, rel=1e-4), done


# ---------------------------------------------------------------------------------------------
# losses and weights that are not finite


CFG = SimpleNamespace(method="l2ac", lr=0.002, lambda_u=1e9, eta=1e-4)


def losses(x, u):
    return {"loss_x": torch.tensor(x), "loss_u": torch.tensor(u)}


def test_guard_names_the_iteration_and_the_losses():
    guard = NaNGuard(CFG)
    guard.pending.append((0, losses(1.0, 2.0)))
    assert not guard.flush()
    guard.pending.append((1, losses(1.0, math.nan)))
    assert guard.flush()
    with pytest.raises(UserError, match="iteration 1 is not finite .*loss_u nan"):
        guard.fail()


def test_guard_on_a_device_that_is_not_waited_for():
    """There losses pile up until something is saved; the first bad one is named."""
    guard = NaNGuard(CFG)
    for step in range(5, 10):
        guard.pending.append((step, losses(math.inf if step >= 7 else 1.0, 1.0)))
    with pytest.raises(UserError, match="iteration 7"):
        guard.check(10, {})


def test_a_gpu_keeps_few_losses_that_are_not_checked():
    """However long an epoch is: they are checked after 1,000 steps."""
    nothing = SimpleNamespace(add=lambda *a, **k: None, due=lambda: False)
    run = SimpleNamespace(device=torch.device("cuda"), guard=NaNGuard(CFG), averages=nothing,
                          progress=nothing, on_step=None, is_evaluated=lambda done: False)
    with pytest.raises(UserError, match="iteration 1500"):
        for step in range(2000):
            Run.after_step(run, step, None, None, None, None,
                           loss=torch.tensor(math.nan if step == 1500 else 1.0))
    assert step == 1999


@pytest.mark.parametrize("method,named", [("l2ac", True), ("none", False)])
def test_guard_names_every_flag_that_may_be_the_cause(method, named):
    """Not --lr alone; and --eta only where omega has a learning rate of its own."""
    with pytest.raises(UserError, match="--lr 0.002.*--lambda_u 1e[+]09") as error:
        NaNGuard(SimpleNamespace(**vars(CFG) | {"method": method})).stop("x")
    assert ("--eta 0.0001" in str(error.value)) == named


def test_guard_refuses_weights_and_moments_that_are_not_finite():
    guard, module = NaNGuard(CFG), torch.nn.BatchNorm2d(2)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.randn(4, 2, 3, 3)).sum().backward()
    optimizer.step()
    parts = {"model": module, "optimizer": optimizer}
    guard.check(3, parts)
    for tensor in (module.weight, module.running_var, optimizer.state[module.bias]["exp_avg"]):
        with torch.no_grad():
            tensor[0] = math.nan
        with pytest.raises(UserError, match="weights are not finite after iteration 3"):
            guard.check(3, parts)
        with torch.no_grad():
            tensor[0] = 1


# ---------------------------------------------------------------------------------------------
# signals


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_signal_ends_the_process_unless_torchrun_may_send_several(monkeypatch, ranks):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    before, stop = signal.getsignal(signal.SIGTERM), StopSignal()
    try:
        signal.signal(signal.SIGTERM, stop.request)
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested and not StopSignal.requested
        assert signal.getsignal(signal.SIGTERM) == (signal.SIG_DFL if ranks == 1 else stop.request)
    finally:
        signal.signal(signal.SIGTERM, before)


# ---------------------------------------------------------------------------------------------
# warnings

HEALTHY = {"mask_rate": 0.5, **{f"kept_{k}": 0.05 for k in range(10)},
           **{f"bias_{k}": 0.1 * (4.5 - k) for k in range(10)}}
LABELS = [10, 8, 7, 6, 5, 4, 3, 3, 2, 2]                     # N_k of the digits
PRIOR = (np.log(LABELS) - np.log(LABELS).mean()).tolist()


def health(counts=LABELS, **flags):
    cfg = dict(method="l2ac", base="fixmatch", iters=1000, eval_every=50, batch_size_u=32, eta=1e-4,
               omega_every=1, attractor_start="zero", tau=0.95, lambda_u=1.0, lr=2e-3)
    return Health(SimpleNamespace(**cfg | flags), [f"class {k}" for k in range(len(counts))],
                  np.array(counts))


def history(late, until=1000):
    """Rows of a run that is healthy until half of it."""
    return [{"iter": done} | HEALTHY | (late if done > 500 else {})
            for done in range(50, until + 1, 50)]


def bias(values):
    return {f"bias_{k}": float(value) for k, value in enumerate(values)}


def kept(k, share, rate=0.5):
    """A share of the pseudo-labels that count, and the rest spread over the other classes."""
    return {"mask_rate": rate} | {f"kept_{i}": rate * (share if i == k else (1 - share) / 9)
                                  for i in range(10)}


STILL = "attractor has hardly moved"
NONE = "hardly any pseudo-label"
ONE = "takes over"


@pytest.mark.parametrize("late,flags,says", [
    (bias([0.0] * 10), {}, STILL), (bias(np.linspace(-0.11, 0.11, 10)), {"omega_every": 10}, STILL),
    ({"mask_rate": 0.0}, {}, NONE), ({"mask_rate": 0.0009}, {"method": "none"}, NONE),
    (kept(3, 0.97), {}, ONE), (kept(3, 0.96, 0.06), {"method": "darp"}, ONE)])
def test_a_bad_sign_is_reported_once(late, flags, says):
    judge, told = health(**flags), []
    for row in history(late):
        told += [(row["iter"], text) for text in judge.warnings(row)]
    (done, text), = told
    assert done == 550 and says in text and "iteration 550" in text and "\n" not in text


@pytest.mark.parametrize("late,flags", [
    ({}, {}), (bias(PRIOR), {}), (bias(np.zeros(10)), {"attractor_start": "prior"}),
    (bias([0.0] * 10), {"method": "single_level"}), (bias([0.0] * 10), {"counts": [5] * 10}),
    ({"mask_rate": 0.002}, {}), ({"mask_rate": math.nan}, {"method": "vanilla"}),
    (kept(0, 0.9), {}), (kept(0, 1.0, 0.04), {}), (kept(0, 0.99), {"counts": [90] + [1] * 9})])
def test_healthy_rows_are_not_warned_of(late, flags):
    judge = health(**flags)
    assert [text for row in history(late) for text in judge.warnings(row)] == []


def test_mixmatch_has_no_threshold_to_raise():
    judge = health()
    del judge.cfg.tau
    text, = judge.warnings({"iter": 900} | HEALTHY | kept(3, 1.0, 1.0))
    assert "--tau" not in text and "lower --lambda_u 1 or --lr 0.002" in text


def test_signs_at_the_start_of_a_run_or_of_few_images_do_not_count():
    bad = {"iter": 500, **HEALTHY, "mask_rate": 0.0}
    assert health().warnings(bad) == [] and len(health().warnings(bad | {"iter": 501})) == 1
    assert health(batch_size_u=4).warnings(bad | {"iter": 900}) == []
    assert health().warnings({"iter": 900}) == []            # a log without these columns


REAL = "--n1 100 --iters 32 --eval_every 16 --batch_size 64"


@pytest.mark.parametrize("flags,says", [
    ("--eta 0 --tau 0.1", STILL), ("--method none --tau 1", NONE), ("--eta 0.05 --tau 0.1", None)])
def test_a_real_run_warns_and_is_not_changed_by_it(tmp_path, capsys, monkeypatch, flags, says):
    loud = train(tmp_path / "loud", f"{REAL} {flags}")
    lines = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert len(lines) == (says is not None) and all(says in line for line in lines)
    monkeypatch.setattr(Health, "warnings", lambda self, row: [])
    assert same(loud, train(tmp_path / "silent", f"{REAL} {flags}"))


def test_a_real_run_in_which_one_class_takes_over(tmp_path, capsys):
    """The pseudo-labels of every iteration are the fourth class's, whatever the network says."""
    class Captured(Method):
        def refine(self, p, batch):
            return torch.nn.functional.one_hot(torch.full_like(p[:, 0], 3).long(), p.shape[1]).to(p)
    train(tmp_path, REAL, partial(baselines.main, own=Captured))
    line, = [x for x in capsys.readouterr().out.splitlines() if "warning" in x]
    assert "100% of the pseudo-labels" in line and ONE in line


def test_a_resumed_run_does_not_repeat_its_warnings(tmp_path, capsys):
    flags = "--n1 100 --iters 64 --eval_every 16 --batch_size 64 --method none --tau 1"
    stopped(tmp_path, flags, after=56)
    assert capsys.readouterr().out.count("warning") == 1
    train(tmp_path, f"{flags} --resume")
    assert capsys.readouterr().out.count("warning") == 0
