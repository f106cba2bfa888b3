"""scripts.full_unroll against finite differences of a real step of torch.optim.Adam."""
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import models
from attractor import BiasAttractor
from scripts.full_unroll import full_unroll

K, N, M = 4, 6, 8


def problem():
    """A small network with BatchNorm whose Adam has made two steps, and an attractor."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Softplus(),
                          nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, K)).double()
    attractor = BiasAttractor(K, 4).double()
    x, x_b = (torch.randn(n, 3, 6, 6, dtype=torch.float64) for n in (N, M))
    y, y_b = torch.arange(N) % K, torch.arange(M) % K
    optimizer = torch.optim.Adam(model.parameters(), 0.05)    # large: differences stand out
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, attractor, optimizer, x, y, x_b, y_b


def test_gradients_against_finite_differences():
    model, attractor, optimizer, x, y, x_b, y_b = problem()

    def lower_loss(l_hat):
        return F.cross_entropy(l_hat, y)

    def balanced_loss():
        """L_bal after torch.optim's step of the whole network."""
        moved, step = deepcopy((model, optimizer))
        step.zero_grad()
        logits = moved(x)
        lower_loss(logits + attractor(logits).detach()).backward()
        lower = [p.grad.clone() for p in moved.parameters()]
        step.step()
        return F.cross_entropy(moved(x_b), y_b).item(), lower

    expected, lower = balanced_loss()
    before = deepcopy(model.state_dict())
    with models.frozen_bn_stats(model):
        loss_bal = full_unroll(model, attractor, lower_loss, model(x), optimizer, x_b, y_b)
    assert loss_bal.item() == pytest.approx(expected, rel=1e-12)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])                # neither weights nor statistics move
    for p, g in zip(model.parameters(), lower, strict=True):
        torch.testing.assert_close(p.grad, g)
    omega = list(attractor.parameters())
    for seed in range(3):                                     # along random directions
        torch.manual_seed(seed)
        direction = [torch.randn_like(p) for p in omega]
        values = []
        for size in (1e-5, -2e-5, 1e-5):                      # ahead, behind, back to the start
            for p, d in zip(omega, direction, strict=True):
                p.data += size * d
            values.append(balanced_loss()[0])
        slope = sum((p.grad * d).sum().item() for p, d in zip(omega, direction, strict=True))
        assert slope == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-5)
