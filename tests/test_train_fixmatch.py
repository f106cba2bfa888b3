"""The training script: its losses, every method and recipe, exact resume, what the files hold."""
import csv
import json
from copy import deepcopy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import augment
import common
import data
import models
import train_fixmatch
from attractor import BiasAttractor, adapt
from bilevel import reference_gradient, remember

TINY = ("--image_size 8 --batch_size 6 --eval_every 3 --iters 6 --threads 1 --device cpu "
        "--tau 0.2")                     # a low threshold, so that some pseudo-labels count at once


def train(out, flags=""):
    status = train_fixmatch.main([*TINY.split(), *flags.split(), "--out", str(out)])
    return status or torch.load(out / "last.pt", weights_only=True)


def same(a, b):
    """Equality of nested checkpoints, bit for bit; the clock and the command line may differ."""
    if isinstance(a, dict):
        skip = {"seconds", "it_per_s", "config"}
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a.keys() - skip)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return a == b or (a != a and b != b)


def fixmatch_by_hand(logits, y_l, y_u, mask):
    """Eq. 1 with loops over rows."""
    log_p = [row - np.log(np.exp(row).sum()) for row in logits]
    loss_x = -np.mean([log_p[i][y] for i, y in enumerate(y_l)])
    rows = [-m * log_p[len(y_l) + 2 * i + view][y] for i, (y, m) in enumerate(zip(y_u, mask))
            for view in range(2)]
    return loss_x, sum(rows) / len(rows)


def test_losses_against_numpy():
    g = np.random.default_rng(0)
    logits, y_l, y_u = g.normal(size=(3 + 2 * 5, 4)), g.integers(4, size=3), g.integers(4, size=5)
    mask = np.array([1.0, 0, 1, 0, 0])
    ours = train_fixmatch.fixmatch_losses(*map(torch.from_numpy, (logits, y_l, y_u, mask)))
    assert [x.item() for x in ours] == pytest.approx(fixmatch_by_hand(logits, y_l, y_u, mask))


def test_an_attractor_that_adds_nothing_leaves_fixmatch():
    attractor, logits = BiasAttractor(4), torch.randn(9, 4)
    torch.nn.init.zeros_(attractor.mlp[2].weight)
    batch = torch.randint(4, (3,)), torch.randint(4, (3,)), torch.ones(3)
    a, b = (train_fixmatch.fixmatch_losses(l, *batch) for l in (logits, adapt(logits, attractor)))
    assert a == b


@pytest.mark.parametrize("flags", [
    "--method l2ac", "--method none", "--method attractor", "--method single_level",
    "--method full_unroll", "--recipe official --omega_every 2", "--inner sgd --n_strong 2",
    "--imbalance step --gamma_u 10 --reverse_u", "--pseudo_from adaptive"])
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


class ByHand:
    """The loop again, slowly: copies for every pass that must leave no trace, plain torch.optim,
    the double-backward reference for omega, EMA and decay tensor by tensor."""

    def __init__(self, cfg):
        self.cfg, self.dataset = cfg, data.load("synthetic", image_size=8)
        index_l, index_u = data.split(self.dataset, cfg)
        labels = self.dataset.labels[index_l]
        self.streams = (data.IndexStream(index_l, 6, 0, "labeled"),
                        data.IndexStream(index_u, 6, 0, "unlabeled"),
                        data.BalancedStream(index_l, labels, 6, 0))
        torch.manual_seed(0)
        self.model, self.attractor = models.build("wrn-10-1", 10, 0.02), BiasAttractor(10)
        self.ema = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.optimizer = torch.optim.Adam(self.model.parameters(), cfg.lr)
        self.omega_optimizer = torch.optim.Adam(self.attractor.parameters(), cfg.eta)

    def batches(self, step):
        normalise = augment.Normalise(self.dataset.mean, self.dataset.std)
        (x_l, y_l), (x_u, _), (x_b, y_b) = (self.dataset.take(s.batch(step)) for s in self.streams)
        x_l, x_w, x_b = (augment.weak(x, data.rng(0, f"{name} view", step), normalise) for x, name
                         in ((x_l, "labeled"), (x_u, "weak"), (x_b, "balanced")))
        x_s = augment.strong(x_u.repeat_interleave(2, 0), data.rng(0, "strong view", step),
                             normalise, 3, 4.0)
        return x_l, y_l, x_w, x_s, x_b, y_b

    def upper(self, lower, z, inner, moved, x_b, y_b):
        """`moved`: a network after the step of phi (or of theta and phi) that is judged."""
        z_b = deepcopy(moved).features(x_b).detach()
        gradient = reference_gradient(self.attractor, lower, z, inner, z_b, y_b)[1]
        for p, g in zip(self.attractor.parameters(), gradient):
            p.grad = g
        self.omega_optimizer.step()
        return F.cross_entropy(moved.classifier(z_b), y_b).item()

    def virtually_stepped(self, lower, logits):
        """A copy of the network whose classifier alone made its Adam step."""
        gradient = torch.autograd.grad(lower(adapt(logits, self.attractor)),
                                       list(self.model.classifier.parameters()), retain_graph=True)
        copy = deepcopy(self.model)
        optimizer = torch.optim.Adam(copy.parameters(), self.cfg.lr)
        optimizer.load_state_dict(deepcopy(self.optimizer.state_dict()))
        for p, g in zip(copy.classifier.parameters(), gradient):
            p.grad = g
        optimizer.step()
        return copy

    def iterate(self, step):
        x_l, y_l, x_w, x_s, x_b, y_b = self.batches(step)
        p, y_u = deepcopy(self.model)(x_w).softmax(1).max(1)
        mask, y_u = ((p > self.cfg.tau).float().repeat_interleave(2), y_u.repeat_interleave(2))
        z = self.model.features(torch.cat([x_l, x_s]))
        logits = self.model.classifier(z)

        def lower(l):
            rows = F.cross_entropy(l[6:], y_u, reduction="none")
            return F.cross_entropy(l[:6], y_l) + (rows * mask.detach()).sum() / len(rows)
        inner = remember(self.model.classifier.parameters(), self.optimizer, step + 1)
        if self.cfg.omega_order == "before":
            moved = self.virtually_stepped(lower, logits)
            loss_bal = self.upper(lower, z, inner, moved, x_b, y_b)
        self.optimizer.zero_grad()
        lower(logits + self.attractor(logits).detach()).backward()
        self.optimizer.step()
        if self.cfg.omega_order == "after":
            loss_bal = self.upper(lower, z, inner, self.model, x_b, y_b)
        for key, value in self.model.state_dict().items():
            self.ema[key] = self.cfg.ema * self.ema[key] + (1 - self.cfg.ema) * value
        for p in self.model.parameters():
            p.data *= 1 - self.cfg.lr * self.cfg.weight_decay
        return loss_bal


@pytest.mark.parametrize("order", ["after", "before"])
def test_three_iterations_by_hand(tmp_path, order):
    flags = f"--iters 3 --eval_every 1 --n_strong 2 --omega_order {order}"
    state = train(tmp_path, flags)
    hand = ByHand(train_fixmatch.config([*TINY.split(), *flags.split()]))
    loss_bal = [hand.iterate(step) for step in range(3)]
    assert [row["loss_bal"] for row in state["history"]] == pytest.approx(loss_bal, rel=1e-4)
    for name, ours, theirs in (("model", state["model"], hand.model.state_dict()),
                               ("ema", state["ema"], hand.ema),
                               ("attractor", state["attractor"], hand.attractor.state_dict())):
        a, b = (torch.cat([s[k].flatten() for k in ours]) for s in (ours, theirs))
        # Adam divides a gradient by its own size: where that is nearly 0, rounding decides.
        assert ((a - b).abs() < 2e-5).float().mean() > 0.99, name
    for key, value in hand.model.named_buffers():             # few among the weights: by themselves
        torch.testing.assert_close(state["model"][key], value, rtol=1e-3, atol=1e-5)


def initial_attractor():
    torch.manual_seed(0)
    models.build("wrn-10-1", 10)
    return BiasAttractor(10).state_dict()


@pytest.mark.parametrize("method,moves", [("l2ac", True), ("none", False), ("attractor", True),
                                          ("single_level", True), ("full_unroll", True)])
def test_which_methods_move_omega(tmp_path, method, moves):
    state, start = train(tmp_path, f"--method {method}"), initial_attractor()
    assert all(torch.equal(v, start[k]) != moves for k, v in state["attractor"].items())


def test_methods_differ_and_share_their_start(tmp_path):
    states = [train(tmp_path / m, f"--method {m}")
              for m in ("none", "l2ac", "attractor", "single_level", "full_unroll")]
    weights = [s["model"]["classifier.weight"] for s in states]
    assert len({tuple(w.flatten().tolist()) for w in weights}) == 5


def test_the_omega_step_touches_only_omega(tmp_path):
    """With eta = 0, stepping omega at every iteration or hardly ever is the same run: weights,
    moments, BatchNorm statistics and EMA, bit for bit."""
    a = train(tmp_path / "a", "--eta 0 --omega_every 1")
    b = train(tmp_path / "b", "--eta 0 --omega_every 100")
    for part in ("model", "ema", "attractor", "optimizer"):
        assert same(a[part], b[part])
    assert not same(a["omega_optimizer"], b["omega_optimizer"])


def test_order_of_the_two_levels_matters(tmp_path):
    a, b = (train(tmp_path / o, f"--omega_order {o} --eta 0.01") for o in ("after", "before"))
    assert not same(a["model"], b["model"])


def test_full_unroll_steps_theta_and_phi_like_l2ac(tmp_path):
    """The first step of theta and phi is the same; only omega's gradient differs."""
    a, b = (train(tmp_path / m, f"--method {m} --iters 1") for m in ("l2ac", "full_unroll"))
    for key, value in a["model"].items():
        torch.testing.assert_close(value, b["model"][key], rtol=1e-4, atol=1e-5)
    assert not same(a["attractor"], b["attractor"])


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


def test_the_same_command_gives_the_same_run(tmp_path):
    assert same(train(tmp_path / "a"), train(tmp_path / "b"))
    assert not same(train(tmp_path / "a", "--overwrite --seed 1"), train(tmp_path / "c"))


@pytest.mark.parametrize("flags", ["", "--method none", "--recipe official", "--method attractor"])
def test_ten_and_resume_and_ten_equals_twenty(tmp_path, flags):
    whole = train(tmp_path / "whole", flags + " --iters 20 --eval_every 5")
    train(tmp_path / "parts", flags + " --iters 10 --eval_every 5")
    parts = train(tmp_path / "parts", flags + " --iters 20 --eval_every 5 --resume")
    assert same(whole, parts)


def test_a_run_that_is_made_longer_off_the_grid_of_evaluations(tmp_path):
    whole = train(tmp_path / "whole", "--iters 9")
    train(tmp_path / "parts", "--iters 4")
    assert same(whole, train(tmp_path / "parts", "--iters 9 --resume"))


def test_a_signal_between_evaluations_loses_nothing(tmp_path, monkeypatch, capsys):
    whole = train(tmp_path / "whole")
    def see(self, step, losses):                              # a signal comes in iteration 4 of 6
        common.interrupt.wished = step == 3
    monkeypatch.setattr(common.Watch, "see", see)
    assert train(tmp_path / "parts") == 130
    assert "--resume" in capsys.readouterr().out
    monkeypatch.undo()
    common.interrupt.wished = False
    assert same(whole, train(tmp_path / "parts", "--resume"))


def test_resume_starts_where_there_is_nothing_and_repeats_what_is_done(tmp_path, capsys):
    first = train(tmp_path / "new", "--resume")
    assert same(first, train(tmp_path / "new", "--resume"))
    assert capsys.readouterr().out.count("l2ac: bACC") == 2


def test_a_lost_checkpoint_costs_one_interval(tmp_path):
    whole = train(tmp_path)
    (tmp_path / "last.pt").write_bytes(b"")
    assert same(whole, train(tmp_path, "--resume"))


def test_auto_pseudo_labels_follow_the_ratios(tmp_path):
    """The released code's rule: the attractor joins in iff gamma_l = gamma_u."""
    equal = "--gamma_l 10 --gamma_u 10"
    a, b, c = (train(tmp_path / n, f"{equal} --tau 0 --pseudo_from {n}")
               for n in ("auto", "adaptive", "linear"))
    assert same(a["model"], b["model"]) and not same(a["model"], c["model"])
    other = equal + " --reverse_u --tau 0"
    a, c = (train(tmp_path / (n + "r"), f"{other} --pseudo_from {n}") for n in ("auto", "linear"))
    assert same(a["model"], c["model"])


def test_auto_pseudo_labels_of_own_data_come_from_the_linear_classifier(tmp_path):
    own = f"--dataset {own_npz(tmp_path)} --model wrn-10-1 --image_size 8"
    a, c = (train(tmp_path / n, f"{own} --tau 0 --pseudo_from {n}") for n in ("auto", "linear"))
    assert same(a["model"], c["model"])


def own_npz(folder):
    g = np.random.default_rng(0)
    def images(n):
        return g.integers(0, 256, (n, 20, 20, 3), dtype=np.uint8)
    np.savez(folder / "own.npz", x_train=images(60), y_train=np.arange(60) % 5,
             x_test=images(20), y_test=np.arange(20) % 4, x_unlabeled=images(80))
    return folder / "own.npz"


def test_own_npz(tmp_path):
    train_fixmatch.main(f"--dataset {own_npz(tmp_path)} --model wrn-10-1 --batch_size 6 "
                        f"--iters 2 --eval_every 1 --out {tmp_path}/run".split())
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert len(result["recall"]) == 5 and result["gamma_l"] is None
    assert result["recall"][4] is None                        # no test image of that class
