"""What every loop holds: the EMA, and the watch over losses and weights."""
import math

import pytest
import torch

import common
import models
import settings


def test_ema_has_its_closed_form_and_covers_bn_statistics():
    model = models.build("wrn-10-1", 3, 0.1)
    ema, decay = common.EMA(model, 0.9), 0.9
    expected = {k: v.clone() for k, v in model.state_dict().items()}
    for step in range(4):
        model(torch.randn(4, 3, 8, 8))                       # moves the running statistics
        with torch.no_grad():
            for p in model.parameters():
                p += torch.randn_like(p)
        ema.update()
        for key, value in model.state_dict().items():
            expected[key] = decay * expected[key] + (1 - decay) * value
    for key, value in ema.model.state_dict().items():
        torch.testing.assert_close(value, expected[key])
    assert any("running_var" in key for key in expected)


def test_watch_stops_at_a_loss_that_is_not_finite():
    watch = common.Watch()
    watch.see(0, torch.tensor([1.0, 2.0]))
    with pytest.raises(settings.UserError, match=r"iteration 1 is not finite .\[1.0, nan\]"):
        watch.see(1, torch.tensor([1.0, math.nan]))


def test_watch_on_a_device_that_is_not_waited_for():
    watch = common.Watch()
    watch.seen = {s: torch.tensor([float("inf") if s == 7 else 1.0]) for s in range(5, 10)}
    with pytest.raises(settings.UserError, match="iteration 7"):
        watch.look()


def test_watch_refuses_weights_that_are_not_finite():
    watch, module = common.Watch(), torch.nn.Linear(2, 2)
    module.weight.data[0, 0] = math.nan
    with pytest.raises(settings.UserError, match="weights are not finite after iteration 3"):
        watch.check(3, module)
