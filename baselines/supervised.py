"""Supervised methods, with labeled images only, and a reference with all labels.

    vanilla       cross-entropy on the labeled images: labels only
    resampling    every class equally often
    ldam          LDAM-DRW: larger margins for rarer classes, class weights near the end
    crt           cRT: vanilla first, then a new classifier on the frozen network
    upper_bound   cross-entropy on labeled and unlabeled images with their true labels: all labels
"""
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import data
from baselines import Method
from support import UserError


class Resampling(Method):
    """Draw a class, then one of its images: image i is drawn with probability 1 / (K N_y)."""

    def __init__(self, ctx):
        super().__init__(ctx)
        self.stream = data.BalancedStream(ctx.index_l, ctx.dataset.labels, ctx.cfg.batch_size,
                                          ctx.cfg.seed)


class UpperBound(Method):
    """All training images with their true labels."""

    def __init__(self, ctx):
        super().__init__(ctx)
        everything = np.union1d(ctx.index_l, ctx.index_u)
        if (ctx.dataset.labels[everything] < 0).any():
            raise UserError("--method upper_bound needs the true labels of the unlabeled images, "
                            "and this dataset has none; choose another --method")
        self.stream = data.IndexStream(everything, ctx.cfg.batch_size, ctx.cfg.seed, "labeled")


class CosineClassifier(nn.Linear):
    """cos(w_k, z), (N, D) -> (N, K): a plain linear layer could grow its weights instead of
    meeting the margins."""

    def __init__(self, features, num_classes):
        super().__init__(features, num_classes, bias=False)
        nn.init.xavier_normal_(self.weight)

    def forward(self, z):
        return F.linear(F.normalize(z), F.normalize(self.weight))              # in [-1, 1]


def effective_number_weights(counts, beta=0.9999):
    """(1 - beta) / (1 - beta^N_k), scaled to sum to K. (K,) float64 -> (K,)"""
    weights = (1 - beta) / (1 - beta ** counts)
    return weights * len(counts) / weights.sum()


class LDAM(Method):
    scale = 30                     # cosines are at most 1; softmax needs a wider range

    @staticmethod
    def heads(model):
        model.classifier = CosineClassifier(model.classifier.in_features,
                                            model.classifier.out_features)

    def __init__(self, ctx):
        super().__init__(ctx)
        # (K,) m_k ~ N_k^(-1/4); that of the rarest class is 0.5
        self.margins = (0.5 * (ctx.counts.min() / ctx.counts) ** 0.25).float().to(ctx.device)
        self.weights = effective_number_weights(ctx.counts).float().to(ctx.device)

    def supervised_loss(self, logits, target, step):
        """Cross-entropy with margins; class weights in the last 20 % of the run (deferred
        re-weighting)."""
        late = step >= 0.8 * self.ctx.cfg.iters
        lowered = logits - F.one_hot(target, logits.shape[1]) * self.margins   # (B, K)
        return F.cross_entropy(self.scale * lowered, target, self.weights if late else None)

    @staticmethod
    def predict(model, x):
        return LDAM.scale * model(x)                 # as in the loss


class CRT(Method):
    """Two stages: vanilla for --iters iterations, then the classifier alone, from scratch and with
    class weights. Imbalance harms the classifier more than the features."""

    @staticmethod
    def flags(p):
        p.add_argument("--crt_iters", type=int, help="iterations of the second stage, after the "
                       "--iters of the first; None: 20 x eval_every, at most half of --iters")

    @staticmethod
    def check(cfg):
        cfg.crt_iters = cfg.crt_iters or max(1, min(20 * cfg.eval_every, cfg.iters // 2))
        cfg.iters += cfg.crt_iters                   # `iters` in result.json is the sum

    def __init__(self, ctx):
        super().__init__(ctx)
        weights = len(ctx.counts) / ctx.counts / (1 / ctx.counts).sum()    # 1 / N_k, their sum K
        self.weights = weights.float().to(ctx.device)                          # (K,)
        self.first_stage = ctx.cfg.iters - ctx.cfg.crt_iters
        self.milestones = (self.first_stage,)

    def after_epoch(self, done):
        cfg, model, ema = self.ctx.cfg, self.ctx.model, self.ctx.ema.model
        if done != self.first_stage:
            return
        model.load_state_dict(ema.state_dict())      # go on from the averaged weights
        std = np.sqrt(2 / sum(model.classifier.weight.shape))                  # Xavier's
        fresh = data.rng(cfg.seed, "cRT").normal(0, std, model.classifier.weight.shape)
        with torch.no_grad():
            for classifier in (model.classifier, ema.classifier):
                classifier.weight.copy_(torch.from_numpy(fresh))
                classifier.bias.zero_()
        self.ctx.optimizer.state.clear()

    def base(self, step):
        """In the second stage all but the classifier is frozen, also after --resume."""
        if step >= self.first_stage:
            self.ctx.model.requires_grad_(False).eval()    # eval: BatchNorm's statistics too
            self.ctx.model.classifier.requires_grad_(True)
        return super().base(step)

    def supervised_loss(self, logits, target, step):
        """In the second stage the mean of w_y H over the batch. LDAM divides by the sum of the
        weights in the batch; that would weaken just the batches that hold rare classes."""
        if step < self.first_stage:
            return F.cross_entropy(logits, target)
        return (self.weights[target] * F.cross_entropy(logits, target, reduction="none")).mean()

    @staticmethod
    def reported(history, cfg):
        """Evaluations of the second stage only."""
        return [row for row in history if row["iter"] > cfg.iters - cfg.crt_iters]
