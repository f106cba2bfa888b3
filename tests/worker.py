"""What torchrun starts in test_distributed.py: a list of training runs, one after the other.

    torchrun --standalone --nproc_per_node 2 tests/worker.py jobs.json

A job is {"script", "argv"} and perhaps
    exact   in float64 and without BatchNorm, where N processes must equal one up to rounding
    stop    the last process (and only that one) is asked to stop in this iteration
    record  a file name: the images that went into the network are saved under it, by process
"""
import importlib
import json
import sys
from contextlib import ExitStack
from unittest import mock

import torch
from torch import nn

import augment
import common
import distributed
import models
from attractor import BiasAttractor
from baselines import Method, supervised


class Scale(nn.Module):
    """In BatchNorm's place: weight and bias, but no statistics, so that rows stay apart."""

    def __init__(self, channels, momentum):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, channels))
        self.bias = nn.Parameter(torch.linspace(-0.5, 0.5, channels))

    def forward(self, x):
        return x * self.weight[:, None, None] + self.bias[:, None, None]


def plain_features(model, *_):
    def features(x):
        recorded.append(x)
        return model.features(x)
    return features


def double_weights(logits, target, weights):
    return weighted(logits, target, None if weights is None else weights.double())


class DoubleEMA(common.EMA):
    def __init__(self, model, decay):
        super().__init__(model.double(), decay)


class Double(augment.Normalise):
    def __call__(self, *args):
        return super().__call__(*args).double()


recorded, weighted = [], supervised.weighted_cross_entropy


def run(job):
    script = importlib.import_module(job["script"])
    common.interrupt.wished = False
    recorded.clear()
    with ExitStack() as patches:
        patch = lambda *what: patches.enter_context(mock.patch.object(*what))   # noqa: E731
        if job.get("exact"):
            patch(models, "Norm", Scale)
            patch(models, "feature_pass", plain_features)
            patch(script, "Normalise", Double)
            patch(common, "EMA", DoubleEMA)              # made before the optimizers
            patch(Method, "to", lambda method, device: method.double())
            patch(supervised, "weighted_cross_entropy", double_weights)
            if hasattr(script, "BiasAttractor"):
                patch(script, "BiasAttractor", lambda *args: BiasAttractor(*args).double())
        if "stop" in job:
            see = common.Watch.see

            def stop(self, step, losses):
                last = distributed.rank() == distributed.size() - 1
                common.interrupt.wished |= last and step == job["stop"]
                see(self, step, losses)
            patch(common.Watch, "see", stop)
        status = script.main(job["argv"])
    assert status == (130 if "stop" in job else None), status
    if "record" in job:
        torch.save(recorded, f"{job['record']}.{distributed.rank()}")


if __name__ == "__main__":
    for job in json.loads(open(sys.argv[1]).read()):
        run(job)
    distributed.stop()
