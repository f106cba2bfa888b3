"""scripts.full_unroll: its gradient against differences of a whole network, its loop by hand."""
import csv
import json
from copy import deepcopy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import (
    FLOAT64,
    TINY,
    central_differences,
    exit_of,
    relative_difference,
    same,
    stopped,
    train,
)
from replay import FixMatchReplay

import models
from attractor import BiasAttractor
from bilevel import omega_gradient, snapshot
from scripts import full_unroll

K, D, N, M = 4, 6, 6, 8
LR = 0.05               # large, so that differences of L_bal stand out from rounding
TAU = "--tau 0.2 "      # low, so that some pseudo-labels count at once


class Small(torch.nn.Module):
    """A network with BatchNorm, small enough to be unrolled many times."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = torch.nn.Conv2d(3, D, 3), models.Norm(D, 0.1)
        self.classifier = torch.nn.Linear(D, K)

    def features(self, x):
        return F.softplus(self.bn(self.conv(x))).mean((2, 3))

    def forward(self, x):
        return self.classifier(self.features(x))


class Problem:
    """One iteration of a network whose Adam has made two steps."""

    def __init__(self):
        torch.manual_seed(1)
        self.model, self.attractor = Small().to(FLOAT64), BiasAttractor(K, 4).to(FLOAT64)
        self.x, self.x_b = (torch.randn(n, 3, 6, 6, dtype=FLOAT64) for n in (N, M))
        self.y, self.y_b = (torch.randint(K, (n,)) for n in (N, M))
        self.optimizer = torch.optim.Adam(self.model.parameters(), LR)
        for _ in range(2):
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(self.x), self.y).backward()
            self.optimizer.step()

    def lower_loss(self, l_hat):
        return F.cross_entropy(l_hat, self.y), "whatever else it returns"

    def lower_gradient(self, model):
        logits = model(self.x)
        loss, _ = self.lower_loss(logits + self.attractor(logits.detach()))
        return torch.autograd.grad(loss, list(model.parameters()))

    @torch.enable_grad()
    def balanced_loss(self, part=""):
        """L_bal after torch.optim's step of the parameters whose names start with `part`."""
        model, optimizer = deepcopy((self.model, self.optimizer))
        for (name, p), g in zip(model.named_parameters(), self.lower_gradient(model), strict=True):
            p.grad = g if name.startswith(part) else None    # torch.optim leaves it where it is
        optimizer.step()
        return F.cross_entropy(model(self.x_b), self.y_b).item()


def test_unrolling_only_the_classifier_of_a_network():
    """bilevel.omega_gradient: theta stays, phi moves."""
    problem = Problem()
    model = problem.model
    inner = snapshot(model.classifier.parameters(), problem.optimizer, 3)
    z, z_b = model.features(problem.x), model.features(problem.x_b).detach()
    loss_bal, gradient = omega_gradient(problem.attractor, problem.lower_loss, model.classifier(z),
                                        z, inner, z_b, problem.y_b)

    def phi_moves():
        return problem.balanced_loss("classifier")
    assert loss_bal.item() == pytest.approx(phi_moves(), rel=1e-12)
    expected = central_differences(problem.attractor, phi_moves)
    assert relative_difference(gradient, expected) < 1e-6


def test_unrolling_the_whole_network():
    problem = Problem()
    model = problem.model
    inner = snapshot(model.parameters(), problem.optimizer, 3)
    before = deepcopy(model.state_dict())
    with models.frozen_bn_stats(model):
        loss_bal, gradient, lower = full_unroll.full_unroll(
            model, problem.attractor, problem.lower_loss, model(problem.x), inner, problem.x_b,
            problem.y_b)
    assert same(model.state_dict(), before)
    assert loss_bal.item() == pytest.approx(problem.balanced_loss(), rel=1e-12)
    expected = central_differences(problem.attractor, problem.balanced_loss)
    assert relative_difference(gradient, expected) < 1e-6
    for ours, theirs in zip(lower, problem.lower_gradient(model), strict=True):
        torch.testing.assert_close(ours, theirs)


# ---------------------------------------------------------------------------------------------
# the loop


class FullUnrollReplay(FixMatchReplay):
    """The gradient of full_unroll, on a copy of the network; all else by hand."""

    def iterate(self, step):
        (x, lower_loss), (x_b, y_b) = self.rows(step), self.take("balanced", step)
        x_b, copy = self.weak(x_b, "balanced", step), deepcopy(self.model)
        inner = snapshot(self.model.parameters(), self.optimizer, step + 1, self.cfg.inner)
        _, gradient, _ = full_unroll.full_unroll(copy, self.attractor, lower_loss, copy(x), inner,
                                                 x_b, y_b)
        logits = self.model(x)
        loss, = lower_loss(logits + self.attractor(logits).detach())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        for p, g in zip(self.attractor.parameters(), gradient, strict=True):
            p.grad = g
        self.omega_optimizer.step()
        loss_bal = F.cross_entropy(deepcopy(self.model)(x_b), y_b)
        self.average_and_decay()
        return {"loss": loss.item(), "loss_bal": loss_bal.item()}


def test_three_iterations_by_hand(tmp_path):
    flags = TAU + ("--iters 3 --eval_every 1 --n_strong 2 --ema 0.5 --weight_decay 5 --eta 0.001 "
                   "--lambda_u 0.5")
    losses = []
    state = train(tmp_path, flags, full_unroll.main, lambda step, values: losses.append(
        {name: value.item() for name, value in values.items()}))
    assert any(0 < row["mask_rate"] < 1 for row in state["history"])
    FullUnrollReplay(flags).compare(state, losses)


@pytest.mark.slow
def test_it_steps_theta_and_phi_like_l2ac(tmp_path):
    """The first step of theta and phi is the same; only omega's gradient differs."""
    a = train(tmp_path / "l2ac", TAU + "--iters 1")
    b = train(tmp_path / "full", TAU + "--iters 1", full_unroll.main)
    for key, value in a["model"].items():
        torch.testing.assert_close(value, b["model"][key], rtol=1e-4, atol=1e-5)
    assert not same(a["attractor"], b["attractor"])


@pytest.mark.slow
def test_a_run_and_its_files(tmp_path):
    """Stopped and resumed it is the same run; it differs from l2ac's and moves omega."""
    flags = TAU + "--iters 4 --eval_every 2"
    whole = train(tmp_path / "whole", flags, full_unroll.main)
    result, cfg = (json.loads((tmp_path / "whole" / name).read_text())
                   for name in ("result.json", "config.json"))
    with open(tmp_path / "whole/log.csv") as file:
        rows = list(csv.DictReader(file))
    assert [int(r["iter"]) for r in rows] == [2, 4]
    assert result["bacc"] == pytest.approx(np.mean([float(r["bacc"]) for r in rows]), rel=1e-5)
    assert result["method"] == cfg["method"] == "full_unroll"
    torch.manual_seed(0)
    models.build("wrn-10-1", 10)
    start = BiasAttractor(10).state_dict()
    assert not any(torch.equal(v, start[k]) for k, v in whole["attractor"].items())
    assert not same(whole["model"], train(tmp_path / "l2ac", flags)["model"])
    stopped(tmp_path / "parts", flags, 3, full_unroll.main)
    assert same(whole, train(tmp_path / "parts", flags + " --resume", full_unroll.main))


@pytest.mark.parametrize("flags", ["--method l2ac", "--recipe official", "--omega_every 2",
                                   "--omega_order before", "--pseudo_from adaptive", "--compile"])
def test_flags_of_variants_that_it_does_not_have(tmp_path, capsys, flags):
    argv = [*TINY.split(), "--iters", "1", *flags.split(), "--out", str(tmp_path / "run")]
    code, err = exit_of(full_unroll.main, argv, capsys)
    assert code == 2 and err.count("\n") == 1 and flags.split()[0] in err
    assert not (tmp_path / "run").exists()
