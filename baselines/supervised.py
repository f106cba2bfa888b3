"""Supervised methods, with labeled images only, and the lower and upper bounds.

    vanilla       cross-entropy on the labeled images; also called lower_bound
    resampling    every class equally often
    ldam          LDAM-DRW: larger margins for rarer classes, class weights near the end
    crt           cRT: vanilla first, then a new classifier on the frozen network
    upper_bound   cross-entropy on labeled and unlabeled images with their true labels

Only the upper bound uses unlabeled images.
"""
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import data
from baselines import Method
from support import UserError, cli
from support.distributed import mean_over_ranks


class Resampling(Method):
    """Draw a class, then one of its images: image i is drawn with probability 1 / (K N_y)."""

    def __init__(self, ctx):
        super().__init__(ctx)
        self.stream = data.BalancedStream(ctx.index_l, ctx.dataset.labels, ctx.cfg.batch_size,
                                          ctx.cfg.seed, ctx.shard)
        ctx.dataset.read_ahead(self.stream)

    def labeled(self, step):
        index = self.stream.batch(step)
        return index, self.ctx.dataset.labels[index]


class UpperBound(Method):
    """All training images with their true labels."""

    def __init__(self, ctx):
        super().__init__(ctx)
        everything = np.union1d(ctx.index_l, ctx.index_u)
        if (ctx.dataset.labels[everything] < 0).any():
            raise UserError("--method upper_bound needs the true labels of the unlabeled images, "
                            "and this dataset has none; choose another --method")
        self.stream = data.IndexStream(everything, ctx.cfg.batch_size, ctx.cfg.seed, "labeled",
                                       ctx.shard)
        ctx.dataset.read_ahead(self.stream)

    def labeled(self, step):
        index = self.stream.batch(step)
        return index, self.ctx.dataset.labels[index]


# ---------------------------------------------------------------------------------------------
# LDAM-DRW


class CosineClassifier(nn.Linear):
    """cos(w_k, z): an unnormalised linear layer could satisfy the margins by growing its weights.

    z (N, D) -> (N, K)
    """

    def __init__(self, features, num_classes):
        super().__init__(features, num_classes, bias=False)
        nn.init.xavier_normal_(self.weight)

    def forward(self, z):
        return F.linear(F.normalize(z), F.normalize(self.weight))              # in [-1, 1]


def margins(counts, largest=0.5):
    """m_k ~ N_k^(-1/4); that of the rarest class is `largest`. (K,) -> (K,)"""
    return largest * (counts.min() / counts) ** 0.25


def effective_number_weights(counts, beta=0.9999):
    """(1 - beta) / (1 - beta^N_k), scaled to sum to K. (K,) float64 -> (K,)"""
    weights = (1 - beta) / (1 - beta ** counts)
    return weights * len(counts) / weights.sum()


def weighted_cross_entropy(logits, target, weights):
    """sum w_i H_i / sum w_i, such that the mean over ranks is that of the global batch.

    logits (B, K), target (B,), weights (K,) or None
    """
    if weights is None:
        return F.cross_entropy(logits, target)
    total = weights[target].sum()
    mean, = mean_over_ranks([total])
    return F.cross_entropy(logits, target, weights) * (total / mean)


class LDAM(Method):
    scale = 30                     # cosines are at most 1; softmax needs a wider range

    @staticmethod
    def heads(model):
        model.classifier = CosineClassifier(model.classifier.in_features,
                                            model.classifier.out_features)

    def __init__(self, ctx):
        super().__init__(ctx)
        self.margins = margins(ctx.counts).float().to(ctx.device)              # (K,)
        self.weights = effective_number_weights(ctx.counts).float().to(ctx.device)

    def supervised_loss(self, logits, target, step):
        """Cross-entropy with margins; class weights in the last 20 % of the run (deferred
        re-weighting)."""
        late = step >= 0.8 * self.ctx.cfg.iters
        lowered = logits - F.one_hot(target, logits.shape[1]) * self.margins   # (B, K)
        return weighted_cross_entropy(self.scale * lowered, target, self.weights if late else None)

    @staticmethod
    def predict(model, x):
        return LDAM.scale * model(x)                 # as in the loss


# ---------------------------------------------------------------------------------------------
# cRT


def inverse_frequency_weights(counts):
    """1 / N_k, scaled to sum to K. (K,) -> (K,)"""
    return len(counts) / counts / (1 / counts).sum()


class CRT(Method):
    """Two stages: vanilla for --iters iterations, then the classifier alone, from scratch and with
    class weights. Imbalance harms the classifier more than the features."""

    @staticmethod
    def flags(p):
        p.add_argument("--crt_iters", type=cli.number(int, 1), help="iterations of the second "
                       "stage, after the --iters of the first (default: 20 x eval_every, "
                       "at most half of --iters)")

    @staticmethod
    def check(cfg):
        cfg.crt_iters = cfg.crt_iters or max(1, min(20 * cfg.eval_every, cfg.iters // 2))
        cfg.iters += cfg.crt_iters                   # `iters` in result.json is the sum

    def __init__(self, ctx):
        super().__init__(ctx)
        self.weights = inverse_frequency_weights(ctx.counts).float().to(ctx.device)    # (K,)
        self.second_stage = False
        self.milestones = (ctx.cfg.iters - ctx.cfg.crt_iters,)

    def after_epoch(self, done):
        cfg, model, ema = self.ctx.cfg, self.ctx.model, self.ctx.ema.model
        if done not in self.milestones:
            return
        self.second_stage = True
        model.load_state_dict(ema.state_dict())      # go on from the averaged weights
        std = np.sqrt(2 / sum(model.classifier.weight.shape))                  # Xavier's
        fresh = data.rng(cfg.seed, "cRT").normal(0, std, model.classifier.weight.shape)
        with torch.no_grad():
            for classifier in (model.classifier, ema.classifier):
                classifier.weight.copy_(torch.from_numpy(fresh))
                classifier.bias.zero_()
        self.ctx.optimizer.state.clear()
        self.freeze()

    def freeze(self):
        self.ctx.model.requires_grad_(False).eval()  # eval: BatchNorm's running statistics too
        self.ctx.model.classifier.requires_grad_(True)

    def get_extra_state(self):                       # saved with the buffers
        return self.second_stage

    def set_extra_state(self, state):
        self.second_stage = state
        if self.second_stage:
            self.freeze()

    def supervised_loss(self, logits, target, step):
        """In the second stage the mean of w_y H over the batch. LDAM divides by the sum of the
        weights in the batch; that would weaken just the batches that hold rare classes."""
        if not self.second_stage:
            return F.cross_entropy(logits, target)
        return (self.weights[target] * F.cross_entropy(logits, target, reduction="none")).mean()

    @staticmethod
    def judged(history, cfg):
        """Evaluations of the second stage only."""
        return [row for row in history if row["iter"] > cfg.iters - cfg.crt_iters]
