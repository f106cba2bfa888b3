"""The training script: its losses, three iterations by hand, every method and recipe, exact
resume, what the files hold."""
import csv
import json

import numpy as np
import pytest
import torch
from conftest import own_npz, same, stopped
from conftest import train as train_tiny
from replay import FixMatchReplay

import models
import train_fixmatch
from attractor import BiasAttractor

slow = pytest.mark.slow
TAU = "--tau 0.2 "                       # low, so that some pseudo-labels count at once


def train(out, flags="", on_step=None):
    return train_tiny(out, TAU + flags, on_step=on_step)


def fixmatch_by_hand(logits, y_l, y_u, mask):
    """Eq. 1 with loops over rows."""
    log_p = [row - np.log(np.exp(row).sum()) for row in logits]
    loss_x = -np.mean([log_p[i][y] for i, y in enumerate(y_l)])
    rows = [-m * log_p[len(y_l) + 2 * i + view][y]
            for i, (y, m) in enumerate(zip(y_u, mask, strict=True)) for view in range(2)]
    return loss_x, sum(rows) / len(rows)


def test_losses_against_numpy():
    g = np.random.default_rng(0)
    logits, y_l, y_u = g.normal(size=(3 + 2 * 5, 4)), g.integers(4, size=3), g.integers(4, size=5)
    mask = np.array([1.0, 0, 1, 0, 0])
    loss_x, loss_u = fixmatch_by_hand(logits, y_l, y_u, mask)
    ours = train_fixmatch.fixmatch_loss(*map(torch.from_numpy, (logits, y_l, y_u, mask)), 0.7)
    assert [x.item() for x in ours] == pytest.approx([loss_x + 0.7 * loss_u, loss_x, loss_u])


def silent(cfg, counts):
    """An attractor that adds nothing to the logits."""
    attractor = BiasAttractor(len(counts))
    torch.nn.init.zeros_(attractor.out.weight)
    return attractor


def test_an_attractor_that_adds_nothing_leaves_fixmatch(tmp_path, monkeypatch):
    monkeypatch.setattr(train_fixmatch, "build_attractor", silent)
    a, b = (train(tmp_path / m, f"--eta 0 --method {m}") for m in ("l2ac", "none"))
    for part in ("model", "ema", "optimizer"):
        assert same(a[part], b[part])


# ---------------------------------------------------------------------------------------------
# the loop


@pytest.mark.parametrize("flags", [
    "--omega_order after", "--omega_order before", "--lambda_u 0.5 --omega_every 2",
    "--method attractor", "--method single_level", pytest.param("--method none", marks=slow),
    pytest.param("--inner sgd", marks=slow), pytest.param("--pseudo_from adaptive", marks=slow),
    "--attractor vector --attractor_start prior --inner sgd",
    pytest.param("--attractor_start prior --omega_order before", marks=slow)])
def test_three_iterations_by_hand(tmp_path, flags):
    flags += " --iters 3 --eval_every 1 --n_strong 2 --ema 0.5 --weight_decay 5"
    losses = []
    state = train(tmp_path, flags, lambda step, values: losses.append(
        {name: value.item() for name, value in values.items()}))
    assert any(0 < row["mask_rate"] < 1 for row in state["history"])
    FixMatchReplay(TAU + flags).compare(state, losses)


def test_only_iterations_that_move_omega_are_averaged(tmp_path):
    """The log's L_bal is the mean over omega's turns, NaN where there was none."""
    seen = {}
    state = train(tmp_path, "--omega_every 4 --eval_every 2", lambda step, losses: seen.update(
        {step: losses["loss_bal"].item()} if "loss_bal" in losses else {}))
    assert list(seen) == [0, 4]
    logged = [row["loss_bal"] for row in state["history"]]
    assert logged == pytest.approx([seen[0], np.nan, seen[4]], nan_ok=True)


@pytest.mark.parametrize("flags", [
    "--recipe official --omega_every 2", pytest.param("--inner sgd --n_strong 2", marks=slow),
    pytest.param("--method l2ac", marks=slow), pytest.param("--method none", marks=slow),
    pytest.param("--method attractor", marks=slow),
    pytest.param("--method single_level", marks=slow),
    pytest.param("--imbalance step --gamma_u 10 --reverse_u", marks=slow),
    pytest.param("--pseudo_from adaptive", marks=slow)])
def test_every_method_trains(tmp_path, flags):
    state = train(tmp_path, flags)
    result = json.loads((tmp_path / "result.json").read_text())
    with open(tmp_path / "log.csv") as file:
        rows = list(csv.DictReader(file))
    assert [int(r["iter"]) for r in rows] == [3, 6] and state["step"] == 6
    assert all(torch.isfinite(v).all() for v in state["model"].values())
    assert result["bacc"] == pytest.approx(np.mean([float(r["bacc"]) for r in rows]), rel=1e-5)
    assert len(result["recall"]) == 10 and result["sec_per_iter"] > 0
    assert json.loads((tmp_path / "config.json").read_text())["method"] == result["method"]


def test_methods_differ_and_move_omega_or_not(tmp_path):
    """Omega has its own optimizer; in the joint ablations it shares that of theta and phi."""
    methods = ("none", "l2ac", "attractor", "single_level")
    states = {m: train(tmp_path / m, f"--iters 3 --method {m}") for m in methods}
    weights = [tuple(s["model"]["classifier.weight"].flatten().tolist()) for s in states.values()]
    assert len(set(weights)) == 4
    torch.manual_seed(0)
    tensors, start = len(list(models.build("wrn-10-1", 10).parameters())), BiasAttractor(10)
    for method, state in states.items():
        moved = {not torch.equal(state["attractor"][k], v) for k, v in start.state_dict().items()}
        assert moved == {method != "none"}, method
        joint = method in ("attractor", "single_level")
        assert len(state["optimizer"]["state"]) == tensors + 4 * joint, method
        assert len(state["omega_optimizer"]["state"]) == 4 * (method == "l2ac"), method


def test_the_omega_step_touches_only_omega(tmp_path):
    """With eta = 0, stepping omega at every iteration or hardly ever is the same run: weights,
    moments, BatchNorm statistics and EMA, bit for bit."""
    a = train(tmp_path / "a", "--iters 3 --eta 0 --omega_every 1")
    b = train(tmp_path / "b", "--iters 3 --eta 0 --omega_every 100")
    for part in ("model", "ema", "attractor", "optimizer"):
        assert same(a[part], b[part])
    assert not same(a["omega_optimizer"], b["omega_optimizer"])


@slow
def test_order_of_the_two_levels_matters(tmp_path):
    a, b = (train(tmp_path / o, f"--omega_order {o} --eta 0.01") for o in ("after", "before"))
    assert not same(a["model"], b["model"])


@pytest.mark.parametrize("decay_bn", [False, True])
def test_ema_first_then_decay(tmp_path, decay_bn):
    """One iteration: ema = 0.9 start + 0.1 w, and the live weights are w (1 - lr wd)."""
    flag = "--decay_bn" if decay_bn else "--no-decay_bn"
    state = train(tmp_path, f"--iters 1 --ema 0.9 --lr 0.01 --weight_decay 5 {flag}")
    torch.manual_seed(0)
    start = models.build("wrn-10-1", 10, 0.02).state_dict()
    for key, live in state["model"].items():
        w = (state["ema"][key] - 0.9 * start[key]) / 0.1
        shrink = 1 if "running" in key and not decay_bn else 1 - 0.01 * 5
        torch.testing.assert_close(live, w * shrink, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("gammas,adaptive", [
    ("--gamma_l 10 --gamma_u 10", True),
    pytest.param("--gamma_l 10 --gamma_u 10 --reverse_u", False, marks=slow)])
def test_auto_pseudo_labels_follow_the_ratios(tmp_path, gammas, adaptive):
    """The released code's rule: the attractor joins in iff gamma_l = gamma_u."""
    flags = f"{gammas} --iters 3 --eta 0.05 --tau 0"
    states = {n: train(tmp_path / n, f"{flags} --pseudo_from {n}")["model"]
              for n in ("auto", "adaptive", "linear")}
    assert same(states["auto"], states["adaptive"]) == adaptive
    assert same(states["auto"], states["linear"]) != adaptive


@slow
def test_auto_pseudo_labels_of_own_data_come_from_the_linear_classifier(tmp_path):
    own = f"--dataset {own_npz(tmp_path)} --model wrn-10-1 --image_size 8 --eta 0.05"
    a, b, c = (train(tmp_path / n, f"{own} --tau 0 --pseudo_from {n}")
               for n in ("auto", "linear", "adaptive"))
    assert same(a["model"], b["model"]) and not same(a["model"], c["model"])


def test_own_npz(tmp_path):
    train_fixmatch.main(f"--dataset {own_npz(tmp_path)} --model wrn-10-1 --batch_size 6 "
                        f"--iters 2 --eval_every 1 --out {tmp_path}/run".split())
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert len(result["recall"]) == 5 and result["gamma_l"] is None
    assert result["recall"][4] is None                        # no test image of that class


# ---------------------------------------------------------------------------------------------
# the same run again, and the rest of a run


@pytest.mark.slow
def test_the_same_command_gives_the_same_run(tmp_path):
    first = train(tmp_path / "a", "--iters 3")
    assert same(first, train(tmp_path / "b", "--iters 3"))
    assert not same(first, train(tmp_path / "a", "--iters 3 --overwrite --seed 1"))


@pytest.mark.parametrize("flags", ["", pytest.param("--method none", marks=slow),
                                   pytest.param("--recipe official", marks=slow),
                                   pytest.param("--method attractor", marks=slow),
                                   pytest.param("--attractor vector", marks=slow),
                                   pytest.param("--attractor_start prior", marks=slow)])
def test_ten_and_resume_and_ten_equals_twenty(tmp_path, flags):
    whole = train(tmp_path / "whole", flags + " --iters 20 --eval_every 5")
    train(tmp_path / "parts", flags + " --iters 10 --eval_every 5")
    parts = train(tmp_path / "parts", flags + " --iters 20 --eval_every 5 --resume")
    assert same(whole, parts)


@pytest.mark.slow
def test_a_run_that_is_made_longer_off_the_grid_of_evaluations(tmp_path):
    whole = train(tmp_path / "whole", "--iters 6")
    train(tmp_path / "parts", "--iters 4")
    assert same(whole, train(tmp_path / "parts", "--iters 6 --resume"))


def test_a_signal_between_evaluations_loses_nothing(tmp_path, capsys):
    whole = train(tmp_path / "whole")
    stopped(tmp_path / "parts", TAU, after=4)
    assert "--resume" in capsys.readouterr().out
    assert same(whole, train(tmp_path / "parts", "--resume"))


def test_resume_starts_where_there_is_nothing_and_repeats_what_is_done(tmp_path, capsys):
    first = train(tmp_path / "new", "--resume")
    assert same(first, train(tmp_path / "new", "--resume"))
    assert capsys.readouterr().out.count("l2ac: bACC") == 2


@pytest.mark.slow
def test_a_lost_checkpoint_costs_one_interval(tmp_path):
    whole = train(tmp_path)
    (tmp_path / "last.pt").write_bytes(b"")
    assert same(whole, train(tmp_path, "--resume"))


@pytest.mark.slow
def test_a_short_default_run_learns_digits(tmp_path):
    """No data flag at all: real digits. The EMA, which is evaluated, has not come far by then."""
    train_fixmatch.main(f"--iters 200 --threads 1 --out {tmp_path}".split())
    with open(tmp_path / "log.csv") as file:
        rows = list(csv.DictReader(file))
    iters = [int(row["iter"]) for row in rows]
    assert iters == [60, 120, *range(180, 201)]
    first, last = ({key: float(value) for key, value in rows[i].items()} for i in (0, -1))
    assert last["loss_x"] < 0.2 * first["loss_x"] and last["loss_bal"] < 0.5 * first["loss_bal"]
    assert last["mask_rate"] > first["mask_rate"] and last["pseudo_acc"] > 0.9
    kept, right = ([last[f"{name}_{k}"] for k in range(10)] for name in ("kept", "precision"))
    assert sum(kept) == pytest.approx(last["mask_rate"], rel=1e-4)
    share = sum(n * p for n, p in zip(kept, right, strict=True) if n) / sum(kept)
    assert share == pytest.approx(last["pseudo_acc"], rel=1e-4)


@pytest.mark.slow
def test_digits_at_the_papers_scale(tmp_path):
    train_fixmatch.main(["--scale", "paper", *"--iters 1 --threads 1 --batch_size 4 --out".split(),
                         str(tmp_path)])
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model"], config["image_size"], config["no_flip"]) == ("wrn-28-2", 32, True)
    assert json.loads((tmp_path / "result.json").read_text())["evaluations"] == 1
