"""Several ranks: the steps of one process on the same rows, omega's gradient, whole runs."""
import os
import socket
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
import worker
from conftest import ROOT, TINY, checkpoint

import data
import models
import train_fixmatch
from support import augment, distributed
from support.run import Run

FLAGS = "--batch_size 8 --tau 0.1 --n_strong 2 --weight_decay 0.1 --eta 0 "


def without_norms(module):
    for name, child in module.named_children():
        if isinstance(child, torch.nn.BatchNorm2d):
            setattr(module, name, torch.nn.Identity())
        without_norms(child)
    return module


class DoubleNormalise(augment.Normalise):
    def __call__(self, *args):
        return super().__call__(*args).double()


def of_both(view, x, rngs, *args, **kwargs):
    """A view of the batch of two ranks, each half with its rank's draws."""
    return torch.cat([view(part, rng, *args, **kwargs)
                      for part, rng in zip(x.chunk(2), rngs, strict=True)])


def mean_of_omega_gradients(omega_gradient, attractor, lower_loss, logits, z, classifier, optimizer,
                            z_b, y_b):
    """In one process: that of the rows of one rank, that of the rows of the other, their mean."""
    given, labeled = lower_loss.keywords, len(lower_loss.keywords["y_l"])
    losses, found = [], []
    for rank in range(2):
        rows = [torch.cat([part.chunk(2)[rank] for part in (x[:labeled], x[labeled:])])
                for x in (logits, z)]
        own = {key: given[key].chunk(2)[rank] for key in ("y_l", "target_u", "mask")}
        losses.append(omega_gradient(attractor, partial(lower_loss, **own), *rows, classifier,
                                     optimizer, z_b.chunk(2)[rank], y_b.chunk(2)[rank]))
        found.append([p.grad.clone() for p in attractor.parameters()])
    for p, *gradients in zip(attractor.parameters(), *found, strict=True):
        p.grad = torch.stack(gradients).mean(0)
    return torch.stack(losses).mean()


def exact_run(out, flags):
    """FixMatch in float64 without BatchNorm, on the same rows whether by one process or by two
    ranks. Omega's gradients go to a file. (Eta is 0: one process would find another gradient.)"""
    build, attractor = models.build, train_fixmatch.build_attractor
    average, take_folder = distributed.average_gradients, Run.take_folder
    models.build = lambda *args: without_norms(build(*args)).double()
    models.feature_pass = lambda model, *args: model.features
    train_fixmatch.build_attractor = lambda *args: attractor(*args).double()
    train_fixmatch.Normalise = DoubleNormalise
    gradients = []

    def recorded(module):
        average(module)
        if not hasattr(module, "classifier"):                # the attractor
            gradients.append(torch.cat([p.grad.flatten() for p in module.parameters()]))

    def late(run, resizable):                                # rank 1 must not see rank 0's files
        time.sleep(0.3 * distributed.rank())
        return take_folder(run, resizable)
    train_fixmatch.average_gradients, Run.take_folder = recorded, late
    if "WORLD_SIZE" not in os.environ:
        data.view_rng = lambda *args: [data.rng(*args, rank) for rank in range(2)]
        train_fixmatch.weak, train_fixmatch.strong = (
            partial(of_both, view) for view in (augment.weak, augment.strong))
        train_fixmatch.omega_gradient = partial(mean_of_omega_gradients,
                                                train_fixmatch.omega_gradient)
    train_fixmatch.main([*TINY.split(), *FLAGS.split(), *flags.split(), "--out", str(out)])
    torch.save(torch.stack(gradients), f"{out}.{distributed.rank()}")


def on_two(function, *args, folder):
    """function(*args) on two ranks, without torchrun."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    folders = [folder / "rank0", folder / "rank1"]
    ranks = [worker.start(function, *args, folder=folders[rank], RANK=str(rank), WORLD_SIZE="2",
                          LOCAL_RANK=str(rank), MASTER_ADDR="localhost", MASTER_PORT=str(port))
             for rank in range(2)]
    ends = [worker.end(*pair) for pair in zip(ranks, folders, strict=True)]
    assert [end[0] for end in ends] == [0, 0], ends


def assert_close(ours, theirs, apart_from="it_per_s"):
    for part in ("model", "ema"):
        for key in theirs[part]:
            torch.testing.assert_close(ours[part][key], theirs[part][key], rtol=1e-9, atol=1e-9)
    for our, row in zip(ours["history"], theirs["history"], strict=True):
        for key in [key for key in row if not key.startswith(apart_from)]:
            assert our[key] == pytest.approx(row[key], rel=1e-5, nan_ok=True), key


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """Four iterations by one process."""
    folder = tmp_path_factory.mktemp("one")
    worker.run(exact_run, folder / "run", "--iters 4", folder=folder)
    return folder / "run"


def test_two_ranks_make_the_steps_of_one(one, tmp_path):
    """theta and phi; omega's gradient is the mean of those of the ranks' own rows; the log."""
    on_two(exact_run, tmp_path / "run", "--iters 4", folder=tmp_path)
    assert_close(checkpoint(tmp_path / "run"), checkpoint(one))
    theirs = torch.load(f"{one}.0")                          # (4, numbers in omega)
    assert len(theirs) == 4 and theirs.norm(dim=1).min() > 0
    for rank in range(2):
        torch.testing.assert_close(torch.load(f"{tmp_path}/run.{rank}"), theirs, rtol=1e-6,
                                   atol=1e-12)


def test_two_ranks_and_then_one(one, tmp_path):
    """In the middle of an epoch. `right` counts images, and a rank has seen half of them."""
    on_two(exact_run, tmp_path / "run", "--iters 2", folder=tmp_path)
    worker.run(exact_run, tmp_path / "run", "--iters 4 --resume", folder=tmp_path)
    assert_close(checkpoint(tmp_path / "run"), checkpoint(one), ("it_per_s", "right"))


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train_fixmatch.py", "train_mixmatch.py"])
def test_torchrun(tmp_path, script):
    """With BatchNorm, with omega steps."""
    flags = [*TINY.split(), "--batch_size", "8", "--out", str(tmp_path), "--iters", "8"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
         script, *flags], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0 and "2 processes" in done.stdout, done.stderr
    assert done.stdout.count("iter   loss_x") == 1           # rank 1 is silent
    state = checkpoint(tmp_path)
    assert state["step"] == 8 and state["attractor"]["out.bias"].abs().min() > 0
    assert (tmp_path / "result.json").exists()
