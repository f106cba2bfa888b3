"""scripts.full_unroll against finite differences of a real step of torch.optim.Adam."""
from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import train
from torch import nn

import models
from attractor import BiasAttractor
from baselines import train as baselines
from scripts.full_unroll import FullUnroll, full_unroll


def test_gradients_against_finite_differences():
    """A small network with BatchNorm whose Adam has made two steps, and an attractor."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Softplus(),
                          nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)).double()
    attractor = BiasAttractor(4, 4).double()
    x, x_b = (torch.randn(n, 3, 6, 6, dtype=torch.float64) for n in (6, 8))
    y, y_b = torch.arange(6) % 4, torch.arange(8) % 4
    optimizer = torch.optim.Adam(model.parameters(), 0.05)    # large: differences stand out
    lower_loss = partial(F.cross_entropy, target=y)

    def balanced_loss(model, optimizer):
        """L_bal after torch.optim's step of the whole network."""
        optimizer.zero_grad()
        logits = model(x)
        lower_loss(logits + attractor(logits).detach()).backward()
        optimizer.step()
        return F.cross_entropy(model(x_b), y_b).item()
    balanced_loss(model, optimizer)
    balanced_loss(model, optimizer)
    with models.frozen_bn_stats(model):
        loss_bal, to_omega, _ = full_unroll(model, attractor, lower_loss, model(x), optimizer,
                                            x_b, y_b)
    assert loss_bal.item() == pytest.approx(balanced_loss(*deepcopy((model, optimizer))), rel=1e-12)
    omega = list(attractor.parameters())
    for seed in range(3):                                     # along random directions
        torch.manual_seed(seed)
        direction = [torch.randn_like(p) for p in omega]
        values = []
        for size in (1e-5, -2e-5, 1e-5):                      # ahead, behind, back to the start
            for p, d in zip(omega, direction, strict=True):
                p.data += size * d
            values.append(balanced_loss(*deepcopy((model, optimizer))))
        slope = sum((g * d).sum().item() for g, d in zip(to_omega, direction, strict=True))
        assert slope == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-5)


def test_the_loop_gets_these_gradients(tmp_path):
    """Those of theta and phi are the ones of a joint step on L(l^), that of omega is another."""
    flags = "--n1 40 --m1 30 --gamma_l 20 --tau 0.2 --model wrn-10-1 --iters 1 --method "
    main = partial(baselines.main, own=FullUnroll)
    ours, joint = (train(tmp_path / method, flags + method, main)["optimizer"]["state"]
                   for method in ("fullunroll", "attractor"))
    same = [torch.allclose(ours[i]["exp_avg"], joint[i]["exp_avg"], rtol=1e-3, atol=1e-6)
            for i in joint]
    assert same == [True] * (len(joint) - 4) + [False] * 4                     # omega: two layers
