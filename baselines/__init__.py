"""The comparison methods: one file per method, and train.py with the training loop they share.

`Method` has one hook for everything that a method may change in that loop. Its defaults are the
plain base method, so a subclass holds only what differs from it. How to add a method: README.md in
this folder.

    B labeled, U unlabeled images in a batch; N rows of the loss; K classes; D features
"""
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import data
import models
from support.augment import Normalise

LIKE_CIFAR10 = ("digits", "synthetic", "cifar10")      # DARP, DASO: the constants of CIFAR-10


def matched(cfg):
    """Whether the flags say that labeled and unlabeled set are distributed alike."""
    return cfg.ratio is not None or (
        cfg.gamma_u is not None and cfg.gamma_l == cfg.gamma_u and not cfg.reverse_u)


@dataclass
class Context:
    """What the loop shares with its method."""
    cfg: object                    # argparse.Namespace of all flags
    device: torch.device
    dataset: data.Dataset
    index_l: np.ndarray            # (N_l,) indices of the labeled images in the dataset
    index_u: np.ndarray            # (N_u,) of the unlabeled ones
    stream: data.IndexStream       # batches of the labeled ones
    counts: torch.Tensor           # (K,) float64, N_k: labeled images per class; on the CPU
    normalise: Normalise
    model: nn.Module
    ema: models.EMA
    features: object               # function (N, 3, H, W) -> (N, D), with autocast
    optimizer: torch.optim.Optimizer = None    # made after the method, whose parameters it trains


@dataclass
class Batch:
    """The batch of one iteration. Fields that are None are filled in as the loop goes on."""
    step: int
    x_l: torch.Tensor              # (B, 3, H, W) weak views
    y_l: torch.Tensor              # (B,)
    index_u: np.ndarray = None     # (U,) indices in the dataset
    x_u: torch.Tensor = None       # (U, 3, H, W) uint8, not augmented
    z_u: torch.Tensor = None       # (U, D) features of their weak views, no gradient
    p: torch.Tensor = None         # (U, K) probabilities, refined
    y_u: torch.Tensor = None       # (U,) pseudo-labels, argmax p
    mask: torch.Tensor = None      # (U,) 1 where the pseudo-label counts, else 0
    z: torch.Tensor = None         # (N, D) features of all rows of the loss
    loss_bal: torch.Tensor = None  # of a method that has one, for the log


@torch.no_grad()
def probabilities(model, ctx, index):
    """Softmax outputs for images without augmentation. index (N,) -> (N, K), on the CPU"""
    return torch.cat([model(ctx.normalise(ctx.dataset.take(chunk)[0])).softmax(1).cpu()
                      for chunk in np.array_split(index, len(index) // 500 + 1)])


class Method(nn.Module):
    """The plain base method. An epoch is --eval_every iterations, as in the protocol.

    Buffers and parameters of a subclass are saved with the run and restored with it. Parameters are
    trained by the same Adam as the network; they are neither averaged by the EMA nor decayed.
    """
    milestones = ()                # epochs also end after these numbers of iterations

    @staticmethod
    def flags(p):
        """Add the method's own flags."""

    @staticmethod
    def check(cfg):
        """Complete the flags."""

    @staticmethod
    def heads(model):
        """Replace or add classifiers of a new network, in place; evaluate.py calls this too."""

    def __init__(self, ctx):
        super().__init__()
        self.ctx, self.stream = ctx, ctx.stream
        self.attractor = None      # what it adds to the logits of test images is logged

    def base(self, step):
        """The base method of this iteration; "supervised" leaves the unlabeled images out."""
        return self.ctx.cfg.base

    def schedule(self, step):
        """(step, number of steps) with unlabeled images, for the ramp of lambda_u."""
        return step, self.ctx.cfg.iters

    def labeled(self, step):
        """The labeled batch: indices (B,) in the dataset and labels (B,)."""
        index = self.stream.batch(step)
        return index, self.ctx.dataset.labels[index]

    def refine(self, p, batch):
        """p (U, K) of the unlabeled images -> (U, K) from which pseudo-labels are made. Without
        gradients. MixMatch: p is the sharpened guess. batch.z_u is set; FixMatch and MixMatch set
        batch.z only later."""
        return p

    def adapt(self, logits):
        """Logits (N, K) of all rows -> those that the losses see."""
        return logits

    def supervised_loss(self, logits, target, step):
        """Loss of the labeled rows: logits (B, K), target (B,) or, after mixup, (B, K)."""
        return F.cross_entropy(logits, target)

    def unlabeled_loss(self, logits, plain, batch):
        """Loss of the unlabeled rows: logits (SU, K) of FixMatch's strong views or (2U, K) of
        MixMatch's rows. plain: the loss of the base method, a function of these logits"""
        return plain(logits)

    def extra_loss(self, batch):
        """A scalar that is added to the loss. All fields of the batch are set."""
        return 0

    def after_epoch(self, done):
        """After `done` iterations: the EMA has been evaluated, the checkpoint is not yet saved."""

    @staticmethod
    def predict(model, x):
        """Test images (N, 3, H, W), normalised -> logits (N, K). model: the EMA in eval mode"""
        return model(x)

    @staticmethod
    def reported(history, cfg):
        """The evaluations (rows of log.csv) that count; the mean of the last 20 is reported."""
        return history
