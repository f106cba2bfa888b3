"""MixMatch + L2AC: its mathematics, three iterations by hand, exact resume."""
import math

import numpy as np
import pytest
import torch
from conftest import same, stopped
from conftest import train as train_tiny
from replay import MixMatch, compare
from test_train_fixmatch import Untouchable

import train_mixmatch
from support import UserError


def train(out, flags=""):
    return train_tiny(out, flags, train_mixmatch.main)


# ---------------------------------------------------------------------------------------------
# sharpening, mixup, loss


@pytest.mark.parametrize("temperature", [0.5, 1.0, 0.25])
def test_sharpen_against_numpy(temperature):
    p = np.random.default_rng(0).dirichlet(np.ones(4), 5)
    expected = np.array([[a ** (1 / temperature) for a in row] for row in p])
    expected /= expected.sum(1, keepdims=True)
    ours = train_mixmatch.sharpen(torch.from_numpy(p), temperature).numpy()
    np.testing.assert_allclose(ours, expected, rtol=1e-12)


def test_mixup_against_numpy():
    g = np.random.default_rng(0)
    x, q, partner = g.normal(size=(7, 3, 2, 2)), g.dirichlet(np.ones(4), 7), g.permutation(7)
    ours = train_mixmatch.mixup(*map(torch.from_numpy, (x, q)), 0.7, torch.from_numpy(partner))
    for i, j in enumerate(partner):
        np.testing.assert_allclose(ours[0][i].numpy(), 0.7 * x[i] + 0.3 * x[j], rtol=1e-12)
        np.testing.assert_allclose(ours[1][i].numpy(), 0.7 * q[i] + 0.3 * q[j], rtol=1e-12)


def test_loss_against_numpy():
    """Soft cross-entropy of the first images; squared error of the others, over 2U images, K."""
    g = np.random.default_rng(0)
    logits, q = g.normal(size=(3 + 2 * 5, 4)), g.dirichlet(np.ones(4), 3 + 2 * 5)
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    loss_x = -sum(q[i, k] * np.log(p[i, k]) for i in range(3) for k in range(4)) / 3
    loss_u = sum((p[i, k] - q[i, k]) ** 2 for i in range(3, 13) for k in range(4)) / 10 / 4
    ours = train_mixmatch.mixmatch_loss(torch.from_numpy(logits), torch.from_numpy(q), 3, 37.5)
    assert [x.item() for x in ours] == pytest.approx([loss_x + 37.5 * loss_u, loss_x, loss_u],
                                                     rel=1e-12)


@pytest.mark.parametrize("alpha", [0.75, 0.3])
def test_draws_of_mixup(alpha):
    """A permutation, and b or 1 - b for b ~ Beta(a, a), whichever is larger:
    E|b - 1/2| = 4^-a / (a B(a, a)) and var b = 1 / (4 (2 a + 1))."""
    rng = np.random.default_rng(0)
    shares, partners = zip(*(train_mixmatch.draw_mix(rng, alpha, 5, "cpu") for _ in range(4000)),
                           strict=True)
    shares = np.array(shares)
    assert shares.shape == (4000,) and shares.min() >= 0.5
    beta = math.gamma(alpha) ** 2 / math.gamma(2 * alpha)
    assert shares.mean() == pytest.approx(0.5 + 4 ** -alpha / (alpha * beta), abs=0.01)
    assert ((shares - 0.5) ** 2).mean() == pytest.approx(1 / (4 * (2 * alpha + 1)), abs=0.005)
    partners = torch.stack(partners)                                           # (4000, 5)
    assert (partners.sort(1).values == torch.arange(5)).all()
    often = torch.stack([(partners == j).sum(0) for j in range(5)])            # 800 +- 25 each
    assert (often - 800).abs().max() < 5 * 25


# ---------------------------------------------------------------------------------------------
# the loop


@pytest.mark.parametrize("flags", [
    "--method l2ac", "--method none", "--pseudo_from adaptive --omega_every 2 --seed 1 --no_flip",
    pytest.param("--attractor vector --attractor_start prior --lambda_u 20",
                 marks=pytest.mark.slow),
    pytest.param("--attractor_input l2", marks=pytest.mark.slow)])
def test_three_iterations_by_hand(tmp_path, flags):
    compare(MixMatch, tmp_path, flags)


def test_plain_mixmatch_knows_no_attractor(tmp_path, monkeypatch):
    monkeypatch.setattr(train_mixmatch, "build_attractor", lambda K, *rest: Untouchable(K))
    assert train(tmp_path, "--method none --iters 2")["step"] == 2


def test_a_stopped_run_goes_on_but_not_for_longer(tmp_path):
    """Bit for bit as if it had not been stopped. The weight of the unlabeled loss grows over the
    whole run: a longer one would have been another from the second iteration on."""
    whole = train(tmp_path / "whole", "--iters 8")
    stopped(tmp_path / "parts", "--iters 8", 4, train_mixmatch.main)
    with pytest.raises(UserError, match="--iters is 9"):
        train(tmp_path / "parts", "--iters 9 --resume")
    assert same(whole, train(tmp_path / "parts", "--iters 8 --resume"))
