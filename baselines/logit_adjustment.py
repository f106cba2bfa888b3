"""Logit adjustment (Menon et al. 2021), also known as balanced softmax: explain the bias of the
labels by a constant.

    d_k = log(N_k / sum N)                       N_k labeled images of class k
    la           H(y, l + d) on labeled rows     right if the pseudo-labels that count are uniform
    la_all       ... on unlabeled rows too       right if they are distributed like the labels
    la_post_hoc  argmax l - d at test time       right if both together are; plain training

By Bayes' rule, where images of a class look alike in both sets: if l + d fits the posterior under
the prior N_k / sum N, then l fits that under the uniform prior. Pseudo-labels are always made from
l. Against L2AC: the bias is not learned, so it cannot follow the pseudo-labels; nor does it cost
anything.
"""
import torch
import torch.nn.functional as F

from baselines import Method


def log_prior(counts):
    """(K,) numbers of images -> (K,) logs of their shares."""
    return (counts / counts.sum()).log().float()


class LA(Method):
    def __init__(self, ctx):
        super().__init__(ctx)
        self.shift = log_prior(ctx.counts).to(ctx.device)                      # (K,)

    def supervised_loss(self, logits, target, step):
        return F.cross_entropy(logits + self.shift, target)


class LAAll(LA):
    def unlabeled_loss(self, logits, plain, batch):
        return plain(logits + self.shift)


class LAPostHoc(Method):
    @staticmethod
    def heads(model):
        model.register_buffer("log_prior", torch.zeros(model.classifier.out_features))

    def __init__(self, ctx):
        super().__init__(ctx)
        for network in (ctx.model, ctx.ema.model):
            network.log_prior.copy_(log_prior(ctx.counts))

    @staticmethod
    def predict(model, x):
        return model(x) - model.log_prior
