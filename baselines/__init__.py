"""The comparison methods. One file holds the mathematics of one method; train.py holds the loop.

`Method` is everything that a method may change in that loop. Its calls do nothing of their own, so
that a subclass reads as the difference between the method and its base. README.md: add your own.

    B labeled, U unlabeled images in the local batch; N rows of the loss; K classes; D features
"""
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import data
import models
from support.augment import Normalise


@dataclass
class Context:
    """What the loop has at hand, for its method."""
    cfg: object                    # all flags
    device: torch.device
    shard: tuple                   # (rank, size)
    dataset: data.Dataset
    index_l: np.ndarray            # which images are labeled
    index_u: np.ndarray            # which are not
    stream_l: data.IndexStream
    counts: torch.Tensor           # (K,) float64, N_k
    normalise: Normalise
    model: nn.Module
    ema: models.EMA
    optimizer: torch.optim.Optimizer
    features: object               # (N, 3, H, W) -> (N, D), the network under autocast


@dataclass
class Batch:
    """The local batch of one iteration; the loop fills in what it comes to."""
    step: int
    x_l: torch.Tensor              # (B, 3, H, W) weak views
    y_l: torch.Tensor              # (B,)
    index_u: np.ndarray = None     # (U,) which unlabeled images
    x_u: torch.Tensor = None       # (U, 3, H, W) uint8, not augmented
    z_u: torch.Tensor = None       # (U, D) of their weak views
    z: torch.Tensor = None         # (N, D) of all rows of the loss


def row_lookup(index_u, total):
    """(total,) array that turns an image's number in the dataset into its row among `index_u`."""
    rows = np.full(total, -1)
    rows[index_u] = np.arange(len(index_u))
    return rows


class Method(nn.Module):
    """The plain base method. Buffers of a subclass are saved with the run and restored with it.

    An epoch is --eval_every iterations, as in the protocol.
    With several ranks (support/distributed.py) a batch is the local one. What a method *learns*
    from it has to be the same on every rank: all_gather it first. The two losses are means over
    the local batch; random draws are for the global batch, and a rank takes its local_slice.
    """

    # ------------------------------------------------------------------------ before there is a run

    @staticmethod
    def flags(p):
        """Add the method's own flags."""

    @staticmethod
    def check(cfg):
        """Refuse or complete the settings."""

    @staticmethod
    def heads(model):
        """Replace or add classifiers of a new network; evaluate.py needs this too."""

    def __init__(self, ctx):
        super().__init__()
        self.ctx = ctx

    # ------------------------------------------------------------------------------ inside the loop

    milestones = ()           # numbers of iterations after which an epoch ends besides the others

    def schedule(self, step):
        """(this step, of how many), for what grows over a training."""
        return step, self.ctx.cfg.iters

    def labeled(self, step):
        """Which labeled images come next: indices (B,) and labels (B,)."""
        index = self.ctx.stream_l.batch(step)
        return index, self.ctx.dataset.labels[index]

    def supervised_loss(self, logits, target, step):
        """Of the labeled rows; logits (B, K), target (B,) or, after mixup, (B, K)."""
        return F.cross_entropy(logits, target)

    def refine(self, p, batch):
        """Probabilities (U, K) that pseudo-labels are made of (MixMatch: sharpened ones). Called
        without gradients, when batch.z_u is there and batch.z is not."""
        return p

    def extra_loss(self, batch):
        """Added to the loss."""
        return 0

    def after_epoch(self, done):
        """After `done` iterations, when the EMA has been evaluated and before anything is saved."""

    @staticmethod
    def predict(model, x):
        """Test images (N, 3, H, W) -> scores (N, K)."""
        return model(x)

    @staticmethod
    def judged(history, cfg):
        """The evaluations (rows of log.csv) whose mean is reported."""
        return history[-20:]
