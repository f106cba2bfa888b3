"""MixMatch + L2AC: its mathematics, three iterations by hand, the ramp, exact resume, and that the
two tutorials can still be read side by side."""
import csv
import difflib
import json
import math
import re
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import augment
import common
import data
import settings
import train_fixmatch
import train_mixmatch
from attractor import BiasAttractor, adapt
from bilevel import omega_gradient, reference_gradient, remember, update
from test_bilevel import central_differences, relative_difference
from test_cli import run
from test_train_fixmatch import ByHand, initial_attractor, same

TINY = "--image_size 8 --batch_size 6 --eval_every 3 --iters 6 --threads 1 --device cpu"
FLOAT64 = torch.float64


def train(out, flags=""):
    status = train_mixmatch.main([*TINY.split(), *flags.split(), "--out", str(out)])
    return status or torch.load(out / "last.pt", weights_only=True)


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
    with pytest.raises(settings.UserError, match="--temperature"):
        train_mixmatch.config(["--temperature", "0.09"])


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
    ours = train_mixmatch.mixmatch_losses(torch.from_numpy(logits), torch.from_numpy(q), 3)
    assert [x.item() for x in ours] == pytest.approx(mixmatch_by_hand(logits, q, 3), rel=1e-12)


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
        torch.set_num_threads(1)                              # for so little, more would only wait
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
            l_hat = adapt(self.classifier(self.z), self.attractor)
            torch.autograd.backward(self.lower_loss(l_hat),
                                    inputs=list(self.classifier.parameters()))
            optimizer.step()
        self.inner = remember(self.classifier.parameters(), optimizer, warm + 1, kind)

    def lower_loss(self, l_hat):
        loss_x, loss_u = train_mixmatch.mixmatch_losses(l_hat, self.q, self.B)
        return loss_x + 37.5 * loss_u

    def balanced_loss(self):
        """L_bal(omega) without second derivatives; the lower gradient by the closed forms
        dL_x/dl^ = (p - q) / B and dL_u/dl^ = 2 (p e - p <p, e>) / (2U K), e = p - q."""
        weight, bias = (s.param for s in self.inner)
        with torch.no_grad():
            p = adapt(self.z @ weight.T + bias, self.attractor).softmax(1)
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


class MixMatchByHand(ByHand):
    """The loop again, slowly (see ByHand); mixup row by row, the losses written out."""

    def batches(self, step):
        normalise = augment.Normalise(self.dataset.mean, self.dataset.std)
        (x_l, y_l), (x_u, _), (x_b, y_b) = (self.dataset.take(s.batch(step)) for s in self.streams)
        x_l, x_w, x_v, x_b = (
            augment.weak(x, data.rng(0, f"{name} view", step), normalise) for x, name
            in ((x_l, "labeled"), (x_u, "weak"), (x_u, "second weak"), (x_b, "balanced")))
        return x_l, y_l, x_w, x_v, x_b, y_b

    def guess(self, x_w, x_v):
        logits = [deepcopy(self.model)(x).detach() for x in (x_w, x_v)]
        if self.cfg.pseudo_from == "adaptive":
            logits = [l + self.attractor(l).detach() for l in logits]
        squares = ((logits[0].softmax(1) + logits[1].softmax(1)) / 2) ** 2     # temperature 1/2
        return squares / squares.sum(1)[:, None]

    def mixtures(self, x, q, step):
        g = data.rng(0, "mixup", step)
        share = g.beta(0.75, 0.75)
        share, partner = max(share, 1 - share), g.permutation(18)
        return (torch.stack([share * t[i] + (1 - share) * t[j] for i, j in enumerate(partner)])
                for t in (x, q))

    def iterate(self, step):
        x_l, y_l, x_w, x_v, x_b, y_b = self.batches(step)
        q_u = self.guess(x_w, x_v)
        x, q = self.mixtures(torch.cat([x_l, x_w, x_v]),
                             torch.cat([torch.eye(10)[y_l], q_u, q_u]), step)
        z = self.model.features(x)
        logits = self.model.classifier(z)

        def lower(l):
            loss_x = -(q[:6] * l[:6].log_softmax(1)).sum() / 6
            loss_u = ((l[6:].softmax(1) - q[6:]) ** 2).sum() / 10 / 12
            return loss_x + 75 * step / 3 * loss_u
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


@pytest.mark.parametrize("flags", ["--omega_order after", "--omega_order before",
                                   "--omega_order after --pseudo_from adaptive"])
def test_three_iterations_by_hand(tmp_path, flags):
    flags += " --iters 3 --eval_every 1"
    state = train(tmp_path, flags)
    hand = MixMatchByHand(train_mixmatch.config([*TINY.split(), *flags.split()]))
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


@pytest.mark.parametrize("flags", [
    "--method l2ac", "--method none", "--method attractor", "--method single_level",
    "--method full_unroll", "--recipe official --omega_every 2", "--inner sgd --temperature 1"])
def test_every_method_trains(tmp_path, flags):
    state = train(tmp_path, flags)
    result = json.loads((tmp_path / "result.json").read_text())
    with open(tmp_path / "log.csv") as file:
        rows = list(csv.DictReader(file))
    assert [int(r["iter"]) for r in rows] == [3, 6] and state["step"] == 6
    assert all(torch.isfinite(v).all() for v in state["model"].values())
    assert result["bacc"] == pytest.approx(np.mean([float(r["bacc"]) for r in rows]), rel=1e-5)
    assert result["base"] == "mixmatch" and [float(r["mask_rate"]) for r in rows] == [1, 1]


def test_methods_differ_and_move_omega_or_not(tmp_path):
    methods = ("none", "l2ac", "attractor", "single_level", "full_unroll")
    states, start = {m: train(tmp_path / m, f"--method {m}") for m in methods}, initial_attractor()
    weights = [tuple(s["model"]["classifier.weight"].flatten().tolist()) for s in states.values()]
    assert len(set(weights)) == 5
    for method, state in states.items():
        moved = [not torch.equal(v, start[k]) for k, v in state["attractor"].items()]
        assert set(moved) == {method != "none"}, method


def rows_of(state):
    return [{k: v for k, v in row.items() if k != "it_per_s"} for row in state["history"]]


def test_the_first_step_knows_no_unlabeled_loss(tmp_path):
    """Row i of the log shows the losses at the weights that i - 1 steps have made."""
    flags = "--iters 4 --eval_every 1 --method none"
    with_u, without = (rows_of(train(tmp_path / u, f"{flags} --lambda_u {u}")) for u in ("75", "0"))
    assert same(with_u[0], without[0])
    assert with_u[1]["loss_x"] == without[1]["loss_x"]
    assert all(with_u[i]["loss_x"] != without[i]["loss_x"] for i in (2, 3))


def test_the_ramp_is_linear_over_the_run(tmp_path):
    """Half the weight over half the run is the same slope, so the same run as far as it goes."""
    short = train(tmp_path / "a", "--iters 4 --eval_every 1 --lambda_u 40")
    long = train(tmp_path / "b", "--iters 8 --eval_every 1 --lambda_u 80")
    other = train(tmp_path / "c", "--iters 8 --eval_every 1 --lambda_u 40")
    assert same(rows_of(short), rows_of(long)[:4])
    assert not same(rows_of(short), rows_of(other)[:4])


@pytest.mark.parametrize("flags", ["", "--method none", "--recipe official", "--method attractor"])
def test_ten_and_resume_and_ten_equals_twenty(tmp_path, monkeypatch, flags):
    flags += " --iters 20 --eval_every 4"
    whole = train(tmp_path / "whole", flags)
    def see(self, step, losses):                              # a signal comes in iteration 10
        common.interrupt.wished = step == 9
    with monkeypatch.context() as patch:
        patch.setattr(common.Watch, "see", see)
        assert train(tmp_path / "parts", flags) == 130
    common.interrupt.wished = False
    half = torch.load(tmp_path / "parts/last.pt", weights_only=True)
    assert half["step"] == 10 and [row["iter"] for row in half["history"]] == [4, 8]
    assert same(whole, train(tmp_path / "parts", flags + " --resume"))


def refused(flags, out, capsys):
    return run(train_mixmatch.main, [*TINY.split(), *flags.split(), "--out", str(out)], capsys)


@pytest.mark.parametrize("iters", [9, 3])
def test_the_ramp_forbids_another_length(tmp_path, capsys, iters):
    train(tmp_path)
    before = {f.name: f.read_bytes() for f in tmp_path.iterdir()}
    code, err = refused(f"--iters {iters} --resume", tmp_path, capsys)
    assert code == 2 and err.count("\n") == 1 and f"--iters is {iters}" in err
    assert before == {f.name: f.read_bytes() for f in tmp_path.iterdir()}


@pytest.mark.parametrize("flags", ["--temperature 0", "--temperature nan", "--mix_alpha -1",
                                   "--lambda_u -1", "--tau 0.5", "--n_strong 2"])
def test_wrong_flags_end_in_one_sentence(tmp_path, capsys, flags):
    code, err = refused(flags, tmp_path / "run", capsys)
    assert code == 2 and err.count("\n") == 1 and flags.split()[0] in err
    assert not (tmp_path / "run").exists()


def test_the_released_protocol_keeps_mixmatch_pools_apart():
    pools = {}
    for script in (train_fixmatch, train_mixmatch):
        cfg = script.config(["--recipe", "official"])
        labeled, unlabeled = data.split(data.load("synthetic", image_size=8), cfg)
        pools[script] = cfg.pool, len(set(labeled) & set(unlabeled)) / len(labeled)
    assert pools == {train_fixmatch: ("union", 1), train_mixmatch: ("disjoint", 0)}
    assert train_mixmatch.config(["--pool", "union"]).pool == "union"


# ---------------------------------------------------------------------------------------------
# two tutorials, side by side


def source(script):
    return Path(script.__file__).read_text().splitlines()


@pytest.mark.parametrize("heading", [r"    # -{20,} (.*)", r"        # (\d+)\) "])
def test_both_tutorials_have_the_same_sections(heading):
    found = [[m[1] for m in map(re.compile(heading).match, source(s)) if m]
             for s in (train_fixmatch, train_mixmatch)]
    assert found[0] == found[1] and len(found[0]) >= 5


def test_the_tutorials_differ_in_few_lines():
    changed = [line for line in difflib.ndiff(*map(source, (train_fixmatch, train_mixmatch)))
               if line[0] in "+-"]
    assert len(changed) < 130
