"""The bias attractor: logits -> what the training bias adds to them.

A residual MLP behind the linear classifier. In training the two together must fit the skewed
labels and the biased pseudo-labels; bilevel.py tunes omega so that the bias ends up in here and
the linear classifier stays clean. At test time this file is not needed: only the linear
classifier predicts.

    f_phi(z)          linear classifier      l = W z + b                          (N, K)
    Delta f_omega     bias attractor         an MLP of width 256, one hidden layer
    F_(omega,phi)(z)  adaptive classifier    l^ = l + Delta f_omega(norm(l))      Eq. 2
"""
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn


class BiasAttractor(nn.Module):
    """Delta f_omega, (N, K) -> (N, K): l^ = l + attractor(l).

    Its input is detached: the attractor reads the prediction, but theta and phi must not be
    trained through what it reads. That is also why the omega step is cheap: l^ depends on phi
    through the identity path alone.
    The input is scaled (softmax, or the L2 norm, which the paper takes for CIFAR-100 and SUN397),
    so that its size does not drift while the logits grow.
    """

    def __init__(self, num_classes, hidden=256, norm="softmax"):
        super().__init__()
        self.norm = partial(F.normalize, dim=-1) if norm == "l2" else nn.Softmax(-1)
        self.hidden = nn.Linear(num_classes, hidden)
        self.out = nn.Linear(hidden, num_classes)
        for layer in (self.hidden, self.out):
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, logits):
        return self.out(F.relu(self.hidden(self.norm(logits.detach()))))       # (N, K)


class BiasVector(nn.Module):
    """Ours, for comparison: omega is K numbers that are added to every image's logits."""

    def __init__(self, num_classes):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(num_classes))

    def forward(self, logits):
        return self.bias.expand_as(logits)                                     # (N, K)


def build_attractor(num_classes, kind="mlp", hidden=256, norm="softmax", counts=None):
    """kind: mlp or vector. counts (K,), labeled images per class N_k: start at the prior.

    The start is ours: the bias of the output layer begins at the centred log N_k, so the bias of
    the labels is in the attractor from the first step on, and the omega step learns only the rest.
    """
    vector = kind == "vector"
    attractor = BiasVector(num_classes) if vector else BiasAttractor(num_classes, hidden, norm)
    if counts is not None:
        log = counts.double().log()                                            # (K,)
        (attractor if vector else attractor.out).bias.data.copy_(log - log.mean())
    return attractor
