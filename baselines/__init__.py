"""The comparison methods. One file holds the mathematics of one method; train.py holds the loop.

`Method` is everything that a method may change in that loop. Its calls do nothing of their own, so
that a subclass reads as the difference between the method and its base.

    B labeled, U unlabeled images in a batch; N rows of the loss; K classes; D features
"""
import numpy as np
import torch.nn.functional as F
from torch import nn


def rows_of(index_u, total):
    """(total,) array that turns an image's number in the dataset into its row among `index_u`."""
    rows = np.full(total, -1)
    rows[index_u] = np.arange(len(index_u))
    return rows


class Method(nn.Module):
    """The plain base method. Buffers of a subclass are saved with the run and restored with it.

    run: what the loop has at hand, by the names it has there; counts (K,) float64: N_k
    An epoch is --eval_every iterations, as in the protocol.

    Several processes (distributed.py): `labeled` and `refine` are asked by every process and about
    the whole batch, so what a method learns there is the same everywhere. The two losses are means
    over a process's slice; who draws there draws for the whole batch and keeps distributed.mine.
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

    def __init__(self, run):
        super().__init__()
        self.run = run

    # ------------------------------------------------------------------------------ inside the loop

    milestones = ()           # numbers of iterations after which an epoch ends besides the others

    def schedule(self, step):
        """(this step, of how many), for what grows over a training."""
        return step, self.run.cfg.iters

    def labeled(self, step):
        """Which labeled images come next: indices (B,) and labels (B,)."""
        index = self.run.stream_l.batch(step)
        return index, self.run.dataset.labels[index]

    def supervised_loss(self, logits, target, step):
        """Of the labeled rows; logits (B, K), target (B,) or, after mixup, (B, K)."""
        return F.cross_entropy(logits, target)

    def refine(self, p, batch):
        """Probabilities (U, K) that pseudo-labels are made of (MixMatch: sharpened ones). No
        gradient passes here.

        batch: step; x_l (B, 3, H, W) weak views, y_l (B,); x_u (U, 3, H, W) uint8 images as they
        are, index_u (U,) which they are, z_u (U, D) of their weak views.
        """
        return p

    def extra_loss(self, batch):
        """Added to the loss. batch as in `refine`, but a slice of it and without index_u; and z
        (N, D) of all rows of the loss."""
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
