"""The comparison methods: one file per method, and train.py with the training loop they share.

`Method` has one hook for everything that a method may change in that loop. Its defaults are the
plain base method, so a subclass holds only what differs from it. How to add a method: README.md in
this folder.

    B labeled, U unlabeled images in the local batch; N rows of the loss; K classes; D features
"""
from dataclasses import dataclass

from support.augment import Normalise  # isort: skip (before torch, see support/__init__.py)

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import data
import models


@dataclass
class Context:
    """What the loop shares with its method."""
    cfg: object                    # argparse.Namespace of all flags
    device: torch.device
    shard: tuple                   # (rank, size)
    dataset: data.Dataset
    index_l: np.ndarray            # (N_l,) indices of the labeled images in the dataset
    index_u: np.ndarray            # (N_u,) of the unlabeled ones
    stream_l: data.IndexStream
    counts: torch.Tensor           # (K,) float64, N_k: labeled images per class; on the CPU
    normalise: Normalise
    model: nn.Module
    ema: models.EMA
    optimizer: torch.optim.Optimizer
    features: object               # function (N, 3, H, W) -> (N, D), with autocast


@dataclass
class Batch:
    """The local batch of one iteration. Fields that are None are filled in as the loop goes on."""
    step: int
    x_l: torch.Tensor              # (B, 3, H, W) weak views
    y_l: torch.Tensor              # (B,)
    index_u: np.ndarray = None     # (U,) indices in the dataset
    x_u: torch.Tensor = None       # (U, 3, H, W) uint8, not augmented
    z_u: torch.Tensor = None       # (U, D) features of their weak views, no gradient
    z: torch.Tensor = None         # (N, D) features of all rows of the loss


def row_lookup(index_u, total):
    """(total,): position in `index_u` (U,) of each image of the dataset, -1 if it is not there."""
    rows = np.full(total, -1)
    rows[index_u] = np.arange(len(index_u))
    return rows


class Method(nn.Module):
    """The plain base method. Buffers of a subclass are saved with the run and restored with it.

    An epoch is --eval_every iterations, as in the protocol.
    With several ranks (support/distributed.py) a batch is the local batch. State that a method
    updates from it must be the same on every rank: all_gather first. The losses are means over the
    local batch. Random numbers are drawn for the global batch; each rank takes its local_slice.
    """

    # ------------------------------------------------------------------------------- before the run

    @staticmethod
    def flags(p):
        """Add the method's own flags."""

    @staticmethod
    def check(cfg):
        """Complete the flags, or raise UserError."""

    @staticmethod
    def heads(model):
        """Replace or add classifiers of a new network, in place; evaluate.py calls this too."""

    def __init__(self, ctx):
        super().__init__()
        self.ctx = ctx

    # ------------------------------------------------------------------------------ inside the loop

    milestones = ()           # epochs also end after these numbers of iterations

    def base(self, step):
        """The base method of this iteration; "supervised" leaves the unlabeled images out."""
        return self.ctx.cfg.base

    def schedule(self, step):
        """(step, number of steps) with unlabeled images, for the ramp of lambda_u."""
        return step, self.ctx.cfg.iters

    def labeled(self, step):
        """The labeled batch: indices (B,) in the dataset and labels (B,)."""
        index = self.ctx.stream_l.batch(step)
        return index, self.ctx.dataset.labels[index]

    def supervised_loss(self, logits, target, step):
        """Loss of the labeled rows: logits (B, K), target (B,) or, after mixup, (B, K)."""
        return F.cross_entropy(logits, target)

    def unlabeled_loss(self, logits, plain, batch):
        """Loss of the unlabeled rows: logits (SU, K) of FixMatch's strong views or (2U, K) of
        MixMatch's rows. plain: the loss of the base method, a function of these logits"""
        return plain(logits)

    def refine(self, p, batch):
        """p (U, K) of the unlabeled images -> (U, K) from which pseudo-labels are made. Without
        gradients. MixMatch: p is the sharpened guess. batch.z_u is set; FixMatch and MixMatch set
        batch.z only later."""
        return p

    def extra_loss(self, batch):
        """A scalar that is added to the loss. batch.z is set."""
        return 0

    def after_epoch(self, done):
        """After `done` iterations: the EMA has been evaluated, the checkpoint is not yet saved."""

    @staticmethod
    def predict(model, x):
        """Test images (N, 3, H, W), normalised -> logits (N, K). model: the EMA in eval mode"""
        return model(x)

    @staticmethod
    def judged(history, cfg):
        """The evaluations (rows of log.csv) that count; the mean of the last 20 is reported."""
        return history
