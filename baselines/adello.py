"""FlexDA and ADELLO (Sanchez Aimar et al. 2024): a target prior that moves from that of the
unlabeled images to a nearly uniform one.

    Q                                            running mean of p(weak view), starts uniform
    Q_a ~ Q^alpha                                alpha = 1 - 0.9 s^2, s: share of the run
    H(y, l + log(pi / Q_a))                      labeled rows; pi_k = N_k / sum N
    [p >= tau] H(argmax p, l + log(Q / Q_a))     unlabeled rows
    adello adds L_c: of images below tau and after 19 % of the run,
    H(p^(1/T) / sum, (l + log(Q / Q_a)) / T)     T = exp KL(uniform || Q), taken once, at its start

The logits of a row are shifted to its prior, pi or Q, so that l has the prior Q_a: early that of
the images to be labeled, late a balanced one. The losses use the Q from before this batch.
Assumes of the unlabeled set that images of a class look as the labeled ones do, and that the mean
prediction estimates its distribution.

In effect the official code has T = 1: a flag that no published setting has switches T on. As there,
the p that is averaged has the prior Q_a, flatter than the Q it is to estimate.
"""
import torch
import torch.nn.functional as F

from baselines import Method

WARM, TINY = 50_000 / 262_144, 1e-9


def shifts(pi, Q, share):
    """log(pi / Q_a) and log(Q / Q_a): (K,) each, from pi (K,), Q (K,) and share = s."""
    powers = Q ** (1 - 0.9 * share ** 2)
    target = powers / powers.sum() + TINY
    return ((pi + TINY) / target).log(), ((Q + TINY) / target).log()


class FlexDA(Method):
    def __init__(self, ctx):
        super().__init__(ctx)
        K = ctx.dataset.num_classes
        self.memory = max(10, 0.004 * ctx.cfg.iters)           # in steps; 1,000 of 250,000
        self.register_buffer("pi", (ctx.counts / ctx.counts.sum()).float())    # (K,)
        self.register_buffer("Q", torch.full((K,), 1 / K))

    def refine(self, p, batch):
        share = batch.step / self.ctx.cfg.iters
        self.shift_l, self.shift_u = shifts(self.pi, self.Q, share)            # (K,) each
        seen = (p / p.sum(1, keepdim=True)).mean(0)                            # (K,)
        self.Q.lerp_(seen, 1 / self.memory)
        return p

    def supervised_loss(self, logits, target, step):
        return F.cross_entropy(logits + self.shift_l, target)

    def unlabeled_loss(self, logits, plain, batch):
        return plain(logits + self.shift_u)


class ADELLO(FlexDA):
    def __init__(self, ctx):
        super().__init__(ctx)
        self.start = round(WARM * ctx.cfg.iters)
        self.register_buffer("T", torch.ones(()))

    def refine(self, p, batch):
        if batch.step == self.start:
            self.T.copy_((-(len(self.Q) * self.Q.clamp_min(TINY)).log().mean()).exp())
        return super().refine(p, batch)

    def extra_loss(self, batch):
        """L_c."""
        if batch.step < self.start:
            return 0
        logits = self.ctx.model.classifier(batch.z[len(batch.y_l):]) + self.shift_u    # (SU, K)
        target, views = batch.p ** (1 / self.T), len(logits) // len(batch.p)
        target = (target / target.sum(1, keepdim=True)).repeat_interleave(views, dim=0)    # (SU, K)
        each = F.cross_entropy(logits / self.T, target, reduction="none")      # (SU,)
        return (each.view(-1, views) * (1 - batch.mask)[:, None]).mean()
