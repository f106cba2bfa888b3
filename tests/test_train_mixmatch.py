"""MixMatch + L2AC: its mathematics, three iterations by hand, the ramp, exact resume, and that the
two tutorials can still be read side by side."""
import csv
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import (
    FLOAT64,
    TINY,
    central_differences,
    exit_of,
    files,
    log_rows,
    relative_difference,
    same,
    stopped,
)
from conftest import train as train_tiny
from replay import Replay

import data
import models
import train_fixmatch
import train_mixmatch
from attractor import BiasAttractor
from bilevel import omega_gradient, reference_gradient, snapshot, update
from support import UserError, config

slow = pytest.mark.slow


def train(out, flags="", on_step=None):
    return train_tiny(out, flags, train_mixmatch.main, on_step)


# ---------------------------------------------------------------------------------------------
# sharpening, mixup, losses


@pytest.mark.parametrize("temperature", [0.5, 1.0, 0.25])
def test_sharpen_against_numpy(temperature):
    p = np.random.default_rng(0).dirichlet(np.ones(4), 5)
    expected = np.zeros_like(p)
    for i in range(5):
        for k in range(4):
            expected[i, k] = p[i, k] ** (1 / temperature) / sum(
                p[i, j] ** (1 / temperature) for j in range(4))
    ours = train_mixmatch.sharpen(torch.from_numpy(p), temperature).numpy()
    np.testing.assert_allclose(ours, expected, rtol=1e-12)


def test_sharpen_at_the_lowest_temperature_that_the_flag_allows():
    """p^10 of probabilities about 1/1000 must not fall below the smallest float32."""
    p = torch.full((1, 1000), 0.001)
    torch.testing.assert_close(train_mixmatch.sharpen(p, 0.1), p)
    with pytest.raises(UserError, match="--temperature"):
        config.read(["--temperature", "0.09"], "mixmatch")


def test_mixup_against_numpy():
    g = np.random.default_rng(0)
    x, q, partner = g.normal(size=(7, 3, 2, 2)), g.dirichlet(np.ones(4), 7), g.permutation(7)
    ours = train_mixmatch.mixup(*map(torch.from_numpy, (x, q)), 0.7, torch.from_numpy(partner))
    for i, j in enumerate(partner):
        np.testing.assert_allclose(ours[0][i].numpy(), 0.7 * x[i] + 0.3 * x[j], rtol=1e-12)
        np.testing.assert_allclose(ours[1][i].numpy(), 0.7 * q[i] + 0.3 * q[j], rtol=1e-12)


def mixmatch_by_hand(logits, q, labeled):
    """Soft cross-entropy of the first rows; squared error of the others, over 2U rows and K."""
    p = [np.exp(row) / np.exp(row).sum() for row in logits]
    loss_x = loss_u = 0
    for i, row in enumerate(p):
        for k in range(len(row)):
            if i < labeled:
                loss_x -= q[i, k] * np.log(row[k]) / labeled
            else:
                loss_u += (row[k] - q[i, k]) ** 2 / len(row) / (len(p) - labeled)
    return loss_x, loss_u


def test_losses_against_numpy():
    g = np.random.default_rng(0)
    logits, q = g.normal(size=(3 + 2 * 5, 4)), g.dirichlet(np.ones(4), 3 + 2 * 5)
    loss_x, loss_u = mixmatch_by_hand(logits, q, 3)
    ours = train_mixmatch.mixmatch_loss(torch.from_numpy(logits), torch.from_numpy(q), 3, 37.5)
    assert [x.item() for x in ours] == pytest.approx([loss_x + 37.5 * loss_u, loss_x, loss_u],
                                                     rel=1e-12)


def draw(step, seed=0, alpha=0.75, rows=18):
    return train_mixmatch.draw_mix(SimpleNamespace(seed=seed, mix_alpha=alpha), step, rows, "cpu")


def test_a_draw_is_one_coefficient_and_a_permutation():
    draws = [draw(step) for step in range(50)]
    for share, partner in draws:
        assert isinstance(share, float) and 0.5 <= share <= 1
        assert sorted(partner.tolist()) == list(range(18))
    assert len({share for share, _ in draws}) == len({tuple(p.tolist()) for _, p in draws}) == 50


def test_a_draw_is_a_function_of_seed_and_step():
    (a, p), (b, q) = draw(7), draw(7)
    assert a == b and torch.equal(p, q)
    assert draw(7, seed=1)[0] != a != draw(8)[0]


@pytest.mark.parametrize("alpha", [0.75, 0.3])
def test_distribution_of_the_coefficient(alpha):
    """b ~ Beta(a, a): E|b - 1/2| = 4^-a / (a B(a, a)) and var b = 1 / (4 (2 a + 1))."""
    shares = np.array([draw(step, alpha=alpha, rows=2)[0] for step in range(4000)])
    beta = math.gamma(alpha) ** 2 / math.gamma(2 * alpha)
    assert shares.mean() == pytest.approx(0.5 + 4 ** -alpha / (alpha * beta), abs=0.01)
    assert ((shares - 0.5) ** 2).mean() == pytest.approx(1 / (4 * (2 * alpha + 1)), abs=0.005)


# ---------------------------------------------------------------------------------------------
# the omega step through MixMatch's loss


class OmegaStep:
    """A random one in float64. The lower loss is the script's, soft targets and weight 75 / 2."""
    B, U, K, D, M = 4, 3, 4, 5, 8

    def __init__(self, kind, warm=3):
        torch.manual_seed(0)
        rows = self.B + 2 * self.U
        self.classifier = torch.nn.Linear(self.D, self.K).to(FLOAT64)
        self.attractor = BiasAttractor(self.K, 6).to(FLOAT64)
        self.z, self.z_b = (torch.randn(n, self.D, dtype=FLOAT64) for n in (rows, self.M))
        self.y_b = torch.randint(self.K, (self.M,))
        self.q = torch.randn(rows, self.K, dtype=FLOAT64).softmax(1)
        optimizer = torch.optim.Adam(self.classifier.parameters(), 0.05)
        for _ in range(warm):                                 # moments of an optimizer at work
            optimizer.zero_grad()
            logits = self.classifier(self.z)
            loss, *_ = self.lower_loss(logits + self.attractor(logits.detach()).detach())
            loss.backward()
            optimizer.step()
        self.inner = snapshot(self.classifier.parameters(), optimizer, warm + 1, kind)

    def lower_loss(self, l_hat):
        return train_mixmatch.mixmatch_loss(l_hat, self.q, self.B, 37.5)

    def balanced_loss(self):
        """L_bal(omega) without second derivatives; the lower gradient by the closed forms
        dL_x/dl^ = (p - q) / B and dL_u/dl^ = 2 (p e - p <p, e>) / (2U K), e = p - q."""
        weight, bias = (s.param for s in self.inner)
        with torch.no_grad():
            logits = self.z @ weight.T + bias
            p = (logits + self.attractor(logits)).softmax(1)
            e = p - self.q
            r = 37.5 * 2 * (p * e - p * (p * e).sum(1, keepdim=True)) / (2 * self.U * self.K)
            r[:self.B] = e[:self.B] / self.B
            weight, bias = map(update, self.inner, (r.T @ self.z, r.sum(0)))
        return F.cross_entropy(self.z_b @ weight.T + bias, self.y_b).item()


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_omega_gradient_through_mixmatch(kind):
    problem = OmegaStep(kind)
    expected = central_differences(problem.attractor, problem.balanced_loss)
    logits = problem.z @ problem.inner[0].param.T + problem.inner[1].param
    rest = problem.z, problem.inner, problem.z_b, problem.y_b
    ours = omega_gradient(problem.attractor, problem.lower_loss, logits, *rest)
    twice = reference_gradient(problem.attractor, problem.lower_loss, *rest)
    assert ours[0].item() == pytest.approx(problem.balanced_loss(), rel=1e-12)
    assert relative_difference(ours[1], expected) < 1e-6
    assert relative_difference(twice[1], expected) < 1e-6


# ---------------------------------------------------------------------------------------------
# the loop


class MixMatchReplay(Replay):
    """Mixup row by row, the losses written out. Of three iterations."""

    def __init__(self, flags):
        super().__init__(flags, "mixmatch")

    def rows(self, step):
        (x_l, y_l), (x_u, _) = self.take("labeled", step), self.take("unlabeled", step)
        x_l, x_w, x_v = (self.weak(x, name, step) for x, name in (
            (x_l, "labeled"), (x_u, "weak"), (x_u, "second weak")))
        squares = ((self.logits(x_w).softmax(1) + self.logits(x_v).softmax(1)) / 2) ** 2
        q_u = squares / squares.sum(1)[:, None]               # temperature 1/2
        g = data.rng(0, "mixup", step)
        share = g.beta(0.75, 0.75)
        share, partner = max(share, 1 - share), g.permutation(18)
        x, q = torch.cat([x_l, x_w, x_v]), torch.cat([torch.eye(10)[y_l], q_u, q_u])
        x, q = (torch.stack([share * t[i] + (1 - share) * t[j] for i, j in enumerate(partner)])
                for t in (x, q))

        def lower_loss(l_hat):
            loss_x = -(q[:6] * l_hat[:6].log_softmax(1)).sum() / 6
            loss_u = ((l_hat[6:].softmax(1) - q[6:]) ** 2).sum() / 10 / 12
            return (loss_x + self.cfg.lambda_u * step / 3 * loss_u,)
        return x, lower_loss


@pytest.mark.parametrize("flags", [
    "--omega_order before", "--lambda_u 20 --omega_every 2", "--method attractor",
    "--method single_level", pytest.param("--omega_order after", marks=slow),
    pytest.param("--pseudo_from adaptive --eta 0.01", marks=slow),
    pytest.param("--method none", marks=slow),
    pytest.param("--inner sgd", marks=slow),
    pytest.param("--attractor vector --attractor_start prior --inner sgd", marks=slow),
    pytest.param("--attractor_start prior --omega_order before", marks=slow)])
def test_three_iterations_by_hand(tmp_path, flags):
    flags += " --iters 3 --eval_every 1 --ema 0.5 --weight_decay 5"
    losses = []
    state = train(tmp_path, flags, lambda step, values: losses.append(
        {name: value.item() for name, value in values.items()}))
    MixMatchReplay(flags).compare(state, losses)


@pytest.mark.parametrize("flags", [
    "--recipe official --omega_every 2", pytest.param("--method l2ac", marks=slow),
    pytest.param("--method none", marks=slow), pytest.param("--method attractor", marks=slow),
    pytest.param("--method single_level", marks=slow),
    pytest.param("--inner sgd --temperature 1", marks=slow)])
def test_every_method_trains(tmp_path, flags):
    state = train(tmp_path, flags)
    result = json.loads((tmp_path / "result.json").read_text())
    with open(tmp_path / "log.csv") as file:
        rows = list(csv.DictReader(file))
    assert [int(r["iter"]) for r in rows] == [3, 6] and state["step"] == 6
    assert all(torch.isfinite(v).all() for v in state["model"].values())
    assert result["bacc"] == pytest.approx(np.mean([float(r["bacc"]) for r in rows]), rel=1e-5)
    assert result["base"] == "mixmatch" and [float(r["mask_rate"]) for r in rows] == [1, 1]


@pytest.mark.slow
def test_methods_differ_and_move_omega_or_not(tmp_path):
    methods = ("none", "l2ac", "attractor", "single_level")
    states = {m: train(tmp_path / m, f"--iters 3 --method {m}") for m in methods}
    weights = [tuple(s["model"]["classifier.weight"].flatten().tolist()) for s in states.values()]
    assert len(set(weights)) == 4
    torch.manual_seed(0)
    models.build("wrn-10-1", 10)
    start = BiasAttractor(10).state_dict()
    for method, state in states.items():
        moved = {not torch.equal(v, start[k]) for k, v in state["attractor"].items()}
        assert moved == {method != "none"}, method


def test_the_omega_step_touches_only_omega(tmp_path):
    """With eta = 0, stepping omega at every iteration or hardly ever is the same run: weights,
    moments, BatchNorm statistics and EMA, bit for bit."""
    a = train(tmp_path / "a", "--iters 3 --eta 0 --omega_every 1")
    b = train(tmp_path / "b", "--iters 3 --eta 0 --omega_every 100")
    for part in ("model", "ema", "attractor", "optimizer"):
        assert same(a[part], b[part])
    assert not same(a["omega_optimizer"], b["omega_optimizer"])


def test_the_first_step_knows_no_unlabeled_loss(tmp_path):
    """Row i of the log shows the losses at the weights that i - 1 steps have made."""
    flags = "--iters 3 --eval_every 1 --method none"
    with_u, without = (log_rows(train(tmp_path / u, f"{flags} --lambda_u {u}"))
                       for u in ("75", "0"))
    assert same(with_u[0], without[0])
    assert with_u[1]["loss_x"] == without[1]["loss_x"]
    assert with_u[2]["loss_x"] != without[2]["loss_x"]


def test_the_ramp_is_linear_over_the_run(tmp_path):
    """L = L_x + lambda_u step / iters L_u"""
    losses = []
    train(tmp_path, "--iters 4 --lambda_u 40", lambda step, values: losses.append(
        [values[name].item() for name in ("loss", "loss_x", "loss_u")]))
    weights = [(loss - loss_x) / loss_u for loss, loss_x, loss_u in losses]
    assert weights == pytest.approx([0, 10, 20, 30], rel=1e-3)


@slow
def test_the_same_slope_is_the_same_run(tmp_path):
    """Half the weight over half the run is the same slope, so the same run as far as it goes."""
    short = train(tmp_path / "a", "--iters 4 --eval_every 1 --lambda_u 40")
    long = train(tmp_path / "b", "--iters 8 --eval_every 1 --lambda_u 80")
    other = train(tmp_path / "c", "--iters 8 --eval_every 1 --lambda_u 40")
    assert same(log_rows(short), log_rows(long)[:4])
    assert not same(log_rows(short), log_rows(other)[:4])


@pytest.mark.parametrize("flags", ["", pytest.param("--method none", marks=slow),
                                   pytest.param("--recipe official", marks=slow),
                                   pytest.param("--method attractor", marks=slow),
                                   pytest.param("--attractor vector", marks=slow),
                                   pytest.param("--attractor_start prior", marks=slow)])
def test_ten_and_resume_and_ten_equals_twenty(tmp_path, flags):
    flags += " --iters 20 --eval_every 4"
    whole = train(tmp_path / "whole", flags)
    half = stopped(tmp_path / "parts", flags, 10, train_mixmatch.main)
    assert [row["iter"] for row in half["history"]] == [4, 8]
    assert same(whole, train(tmp_path / "parts", flags + " --resume"))


def refused(flags, out, capsys):
    argv = [*TINY.split(), "--iters", "6", *flags.split(), "--out", str(out)]
    return exit_of(train_mixmatch.main, argv, capsys)


@pytest.mark.parametrize("iters", [9, pytest.param(3, marks=slow)])
def test_the_ramp_forbids_another_length(tmp_path, capsys, iters):
    train(tmp_path)
    before = files(tmp_path)
    code, err = refused(f"--iters {iters} --resume", tmp_path, capsys)
    assert code == 2 and err.count("\n") == 1 and f"--iters is {iters}" in err
    assert before == files(tmp_path)


@pytest.mark.parametrize("flags", ["--temperature 0", "--temperature nan", "--mix_alpha -1",
                                   "--lambda_u -1", "--tau 0.5", "--n_strong 2"])
def test_wrong_flags_end_in_one_sentence(tmp_path, capsys, flags):
    code, err = refused(flags, tmp_path / "run", capsys)
    assert code == 2 and err.count("\n") == 1 and flags.split()[0] in err
    assert not (tmp_path / "run").exists()


def test_the_released_protocol_keeps_mixmatch_pools_apart():
    pools = {}
    for base in ("fixmatch", "mixmatch"):
        cfg = config.read(["--recipe", "official"], base)
        labeled, unlabeled = data.split(data.load("synthetic", image_size=8), cfg)
        pools[base] = cfg.pool, len(set(labeled) & set(unlabeled)) / len(labeled)
    assert pools == {"fixmatch": ("union", 1), "mixmatch": ("disjoint", 0)}
    assert config.read(["--pool", "union"], "mixmatch").pool == "union"


# ---------------------------------------------------------------------------------------------
# two tutorials, side by side


@pytest.mark.parametrize("heading", [r"    # -{20,} (.*)", r"        # (\d+)\) "])
def test_both_tutorials_have_the_same_sections(heading):
    sources = [Path(s.__file__).read_text() for s in (train_fixmatch, train_mixmatch)]
    a, b = (re.findall("^" + heading, source, re.MULTILINE) for source in sources)
    assert a == b != []
