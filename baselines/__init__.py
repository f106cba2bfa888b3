"""The comparison methods. One file holds the mathematics of one method; train.py holds the loop.

`Method` is everything that a method may change in that loop. Its calls do nothing of their own, so
that a subclass reads as the difference between the method and its base.

    B labeled, U unlabeled images in a batch; N rows of the loss; K classes; D features
"""
import torch.nn.functional as F
from torch import nn


class Method(nn.Module):
    """The plain base method. Buffers of a subclass are saved with the run and restored with it.

    run: what the loop has at hand, by the names it has there; counts (K,) float64: N_k
    An epoch is --eval_every iterations, as in the protocol.

    Several processes (distributed.py): `labeled` and `refine` are asked by every process and about
    the whole batch, so what a method learns there is the same everywhere. The two losses are means
    over a process's slice; a method that gathers numbers there passes them through
    distributed.gather, one that draws there draws for the whole batch and keeps distributed.mine.
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

    def labeled(self, step):
        """Which labeled images come next: indices (B,) and labels (B,)."""
        index = self.run.stream_l.batch(step)
        return index, self.run.dataset.labels[index]

    def supervised_loss(self, logits, target, step):
        """Of the labeled rows; logits (B, K), target (B,) or, after mixup, (B, K)."""
        return F.cross_entropy(logits, target)

    def refine(self, p, z_u, index_u, step):
        """Probabilities (U, K) that pseudo-labels are made of. No gradient passes here."""
        return p

    def extra_loss(self, x_l, y_l, x_u, z_u, z, step):
        """Added to the loss. x_l (B, 3, H, W) weak views, x_u (U, 3, H, W) uint8 images as they
        are, z_u (U, D) of their weak views without gradient, z (N, D) of the rows of the loss."""
        return 0

    def after_epoch(self, done):
        """After `done` iterations, when the EMA has been evaluated and before anything is saved."""

    @staticmethod
    def predict(model, x):
        """Test images (N, 3, H, W) -> scores (N, K)."""
        return model(x)
