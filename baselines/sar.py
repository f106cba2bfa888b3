"""SaR, self-adaptive refinement: scale soft pseudo-labels up for classes that are rarely predicted.

A reconstruction: neither SaR's paper nor its code was available. What is known: a "mitigating
vector" v, estimated during training, refines the soft label before the one-hot step, without any
assumption about the unlabeled set. That v multiplies the probabilities, and that it is the
effective-number weight of the pseudo-label counts, is taken from related code by its first author.

    p' = v * p / sum(v * p)                         then argmax and tau as in the base method
    v_k = (1 - beta) / (1 - beta^n_k), sum K        n_k: images whose latest raw prediction is k
    beta = (n - 1) / n,  n = mean of n_k            after every epoch

Raw predictions are counted, not refined ones, so that v has no direct feedback on itself.
"""
import torch

from baselines import Method
from baselines.supervised import effective_number_weights
from support.augment import to_device


def mitigating_vector(counts):
    """(K,) numbers of pseudo-labels -> v (K,). A class that is never predicted counts as one."""
    counts = counts.double().clamp_min(1)
    mean = counts.mean()
    return effective_number_weights(counts, (mean - 1) / mean)


class SaR(Method):
    def __init__(self, ctx):
        super().__init__(ctx)
        # MixMatch: p is sharpened (to the power 1/T), but v applies to the guess before that
        self.power = 1 / getattr(ctx.cfg, "temperature", 1)
        # class that is predicted for each image of the dataset, -1: none yet
        self.register_buffer("newest", torch.full((len(ctx.dataset.labels),), -1))
        self.register_buffer("v", torch.ones(ctx.dataset.num_classes))

    def refine(self, p, batch):
        self.newest[to_device(batch.index_u, p)] = p.argmax(1)
        refined = p * self.v ** self.power                                     # (U, K)
        refined = refined / refined.sum(1, keepdim=True)
        return torch.where((self.v == 1).all(), p, refined)    # exactly p while v is 1

    def after_epoch(self, done):
        seen = self.newest[self.newest >= 0]
        self.v.copy_(mitigating_vector(torch.bincount(seen, minlength=len(self.v))))
