"""What torchrun starts in test_distributed.py: a list of training runs, one after the other.

    torchrun --standalone --nproc_per_node 2 tests/worker.py jobs.json

A job is {"script", "argv"} and perhaps
    exact   in float64, where N ranks must equal one up to rounding
    stop    the last rank (and only that one) is asked to stop in this iteration
    nan     the loss of this iteration is NaN on the last rank (and only there)
    record  a file name: the images that went into the network are saved under it, by rank
"""
import importlib
import json
import math
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch
from conftest import synthetic_once

import data
import models
from attractor import build_attractor
from baselines import Method, supervised
from support import augment, cli, distributed
from support import run as run_module


def plain_features(model, *_):
    def features(x):
        recorded.append(x)
        return model.features(x)
    return features


class DoubleEMA(models.EMA):
    """Made before the optimizers exist, so the model may change its type here."""

    def __init__(self, model, decay):
        super().__init__(model.double(), decay)


class DoubleNormalise(augment.Normalise):
    def __call__(self, *args):
        return super().__call__(*args).double()


class DoubleAverages(run_module.Averages):
    def __init__(self, *args):
        super().__init__(*args)
        self.sums = self.sums.double()


def double_attractor(*args):
    return build_attractor(*args).double()


def double_method(method, device):
    return method.double()


def double_weights(logits, target, weights):
    return weighted(logits, target, None if weights is None else weights.double())


recorded, weighted = [], supervised.weighted_cross_entropy


def last_rank():
    return distributed.rank() == distributed.size() - 1


def broken_loss(script, step, calls_per_step=2):
    """script.fixmatch_loss, but NaN in both levels of this iteration."""
    loss, calls = script.fixmatch_loss, []

    def broken(*args, **kwargs):
        total, loss_x, loss_u = loss(*args, **kwargs)
        calls.append(1)
        bad = (len(calls) - 1) // calls_per_step == step and last_rank()
        return total, loss_x, loss_u * math.nan if bad else loss_u
    return broken


def run(job):
    script = importlib.import_module(job["script"])
    run_module.stop_signal.requested = False
    recorded.clear()

    def on_step(step, losses):
        run_module.stop_signal.requested |= step == job.get("stop") and last_rank()

    with ExitStack() as patches:
        def patch(*what):
            patches.enter_context(mock.patch.object(*what))
        patch(data, "synthetic", synthetic_once)
        if job.get("exact"):
            patch(models, "feature_pass", plain_features)
            patch(models, "EMA", DoubleEMA)
            patch(script, "Normalise", DoubleNormalise)
            patch(run_module, "Averages", DoubleAverages)
            patch(Method, "to", double_method)
            patch(supervised, "weighted_cross_entropy", double_weights)
            if hasattr(script, "build_attractor"):
                patch(script, "build_attractor", double_attractor)
        if "nan" in job:
            patch(script, "fixmatch_loss", broken_loss(script, job["nan"]))
        status = script.main(job["argv"], on_step)
    assert status == (130 if "stop" in job else None), status
    if "record" in job:
        torch.save(recorded, f"{job['record']}.{distributed.rank()}")


def run_all(jobs):
    for job in jobs:
        run(job)


if __name__ == "__main__":
    cli.exit_cleanly(lambda: run_all(json.loads(Path(sys.argv[1]).read_text())))
