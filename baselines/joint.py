"""The two ablations of L2AC: the bias attractor without its bi-level training.

    attractor       theta, phi and omega make a step on L(l^) together         Eq. 3
    single_level    ... on L(l^) + L_bal, with the linear classifier as it is  Eq. 3 + Eq. 5

    l^ = l + Delta f_omega(l)        Eq. 2; at test time the linear classifier predicts alone

In both omega learns with --lr from the same Adam. With the first, nothing tells the bias to move
from the linear classifier into the attractor. The second asks for a balanced linear classifier, but
does not look at what omega does to it: L_bal has no gradient with respect to omega.
"""
import torch.nn.functional as F

import data
import models
from attractor import build_attractor
from baselines import Method
from support.augment import weak


class JointAttractor(Method):
    @staticmethod
    def flags(p):
        add = p.add_argument_group("attractor").add_argument
        add("--hidden", type=int, default=256, help="width of the attractor")
        add("--attractor_input", choices=("softmax", "l2"), default="softmax", help="its scaling")
        add("--attractor", choices=("mlp", "vector"), default="mlp",
            help="vector: K numbers that are the same for all images")
        add("--attractor_start", choices=("zero", "prior"), default="zero",
            help="prior: the bias of its output layer starts at the centred log class counts")

    def __init__(self, ctx):
        super().__init__(ctx)
        cfg = ctx.cfg
        self.attractor = build_attractor(
            len(ctx.counts), cfg.attractor, cfg.hidden, cfg.attractor_input,
            ctx.counts if cfg.attractor_start == "prior" else None)

    def adapt(self, logits):
        return logits + self.attractor(logits)                                 # Eq. 2


class SingleLevel(JointAttractor):
    def __init__(self, ctx):
        super().__init__(ctx)
        self.balanced = data.BalancedStream(ctx.index_l, ctx.dataset.labels, ctx.cfg.batch_size,
                                            ctx.cfg.seed)

    def balanced_batch(self, step):
        """Weak views (M, 3, H, W) and labels (M,)."""
        ctx, cfg = self.ctx, self.ctx.cfg
        x_b, y_b = ctx.dataset.take(self.balanced.batch(step))
        return weak(x_b, data.rng(cfg.seed, "balanced view", step), ctx.normalise,
                    no_flip=cfg.no_flip), y_b

    def extra_loss(self, batch):
        """L_bal of Eq. 5, with weight 1."""
        ctx, (x_b, y_b) = self.ctx, self.balanced_batch(batch.step)
        with models.frozen_bn_stats(ctx.model):
            batch.loss_bal = F.cross_entropy(ctx.model.classifier(ctx.features(x_b)), y_b)
        return batch.loss_bal
