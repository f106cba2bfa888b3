"""ABC: an auxiliary classifier on the same features that sees every class equally often.

An image of class k enters its loss with probability b_k = N_min / N_k, so the auxiliary classifier
learns from balanced classes. The base method keeps its own classifier, losses and pseudo-labels.
At test time the auxiliary classifier predicts.

    L_cls = 1/B sum_i m_i H(y_i, l_a(x_i))                 m_i ~ Bernoulli(b_{y_i})
    L_con = sum_views 1/U sum_u [max q >= 0.95] n_u H(q, l_a(strong view of u))
            q = softmax l_a(weak view of u), soft and constant;  n_u ~ Bernoulli(b_{argmax q}(e))
    b_k(e) = 1 - (1 - b_k) e/E                             from 1 to b_k over the epochs

Thinning pseudo-labels by the labeled counts is right only if M_k is proportional to N_k.
"""
import torch.nn.functional as F
from torch import nn

import data
import models
from baselines import Method
from support.augment import strong, to_device

TAU = 0.95                               # ABC's own, whatever --tau is; MixMatch has none


def thinned_loss(logits, y, rates, draw):
    """L_cls. logits (B, K), y (B,), rates (K,), draw (B,) uniform in [0, 1)."""
    kept = (draw < rates[y]).float()
    return (F.cross_entropy(logits, y, reduction="none") * kept).mean()


def consistency_loss(logits, q, rates, draw):
    """L_con, summed over the views of an image.

    logits (SU, K): S strong views of each image; q (U, K); rates (K,); draw (U,) in [0, 1), one
    number for all views of an image.
    """
    confidence, y = q.max(1)
    kept = ((confidence >= TAU) & (draw < rates[y])).float()                   # (U,)
    views = len(logits) // len(q)
    targets, kept = (t.repeat_interleave(views, dim=0) for t in (q, kept))     # (SU, K), (SU,)
    return (F.cross_entropy(logits, targets, reduction="none") * kept).sum() / len(q)


class ABC(Method):
    @staticmethod
    def heads(model):
        model.auxiliary = nn.Linear(model.classifier.in_features, model.classifier.out_features)
        models.initialise(model.auxiliary)

    def __init__(self, ctx):
        super().__init__(ctx)
        self.rates = (ctx.counts.min() / ctx.counts).float().to(ctx.device)    # (K,) b_k

    def uniform_draws(self, purpose, step, rows):
        """(rows,) in [0, 1)."""
        draws = data.rng(self.ctx.cfg.seed, purpose, step).random(rows, dtype="float32")
        return to_device(draws, self.ctx.device)

    def extra_loss(self, batch):
        cfg, head = self.ctx.cfg, self.ctx.model.auxiliary
        labeled = len(batch.y_l)
        z_l, z_s = self.unmixed(batch) if cfg.base == "mixmatch" else batch.z.split(
            [labeled, len(batch.z) - labeled])                                 # (B, D), (SU, D)
        q = head(batch.z_u).detach().softmax(1)                                # (U, K)
        epoch_start = batch.step - batch.step % cfg.eval_every                 # fixed in an epoch
        rates = 1 - epoch_start / cfg.iters * (1 - self.rates)                 # (K,) b_k(e)
        draw_l = self.uniform_draws("ABC labeled", batch.step, labeled)        # (B,)
        draw_u = self.uniform_draws("ABC unlabeled", batch.step, len(q))       # (U,)
        return (thinned_loss(head(z_l), batch.y_l, self.rates, draw_l)
                + consistency_loss(head(z_s), q, rates, draw_u))

    def unmixed(self, batch):
        """Features (B, D) of the labeled views and (2U, D) of two strong views of each unlabeled
        image, for MixMatch, whose own rows are all mixed. BatchNorm's running statistics stay."""
        ctx, views = self.ctx, batch.x_u.repeat_interleave(2, dim=0)
        x_s = strong(views, data.rng(ctx.cfg.seed, "strong view", batch.step), ctx.normalise,
                     no_flip=ctx.cfg.no_flip)
        with models.frozen_bn_stats(ctx.model):
            return ctx.features(batch.x_l), ctx.features(x_s)

    @staticmethod
    def predict(model, x):
        return model.auxiliary(model.features(x))
