"""ACR (Wei and Gan 2023): two heads, and an estimate of how the unlabeled images are distributed.

    l1, l2                        heads with losses H(y, l1) and H(y, l2 + 2 log pi); l2 predicts
    y1 = argmax l1 - c log pi     for head 1, if softmax(l1 - c log pi) or softmax(l1) is sure
    y2 = argmax l1 - 2 log pi     for head 2, if softmax(l1 - 2 log pi) or softmax(l2) is sure
    w                             running shares of argmax l2 among sure unlabeled images
    D                             for a = pi, uniform, pi reversed: (KL(w || a) + KL(a || w)) / 2
    c = 2 softmax(mean D)[0]      near 0 if w is pi, 1 if uniform, 2 if reversed

l1 is taken to have the prior pi; l1 - c log pi then has pi^(1-c), to be that of the unlabeled set.
Assumes of the unlabeled set that one number describes it: it lies between pi and its reverse.

The official code does not count: of the images of a class it looks at one, and whether that is
sure, so that a long tail looks nearly uniform. As there, D = 0 in steps without a sure image.
"""
import numpy as np
import torch
import torch.nn.functional as F

from baselines import Method
from baselines.abc_head import ABC
from support.augment import to_device

STRENGTH = 2.0                                       # of log pi, where it does not depend on w
START, PERIOD, MEMORY = 0.012, 0.002, 0.0004         # shares of the run; in steps: 3,000, 500, 100


def anchors(counts):
    """(3, K): pi, uniform, pi reversed (the rarest class has the largest share). counts (K,)"""
    pi, order = counts / counts.sum(), counts.argsort(stable=True)
    reverse = torch.zeros_like(pi).scatter(0, order, pi[order.flip(0)])
    return torch.stack([pi, torch.full_like(pi, 1 / len(pi)), reverse]).float()


def distances(w, a):
    """D (3,) between w (K,) and the anchors a (3, K)."""
    return ((w - a) * ((w + 1e-12) / a).log()).sum(1) / 2      # both KL in one sum


class ACR(Method):
    # ABC's second classifier, which predicts: model.auxiliary, here l2
    heads, predict = map(staticmethod, (ABC.heads, ABC.predict))

    def __init__(self, ctx):
        super().__init__(ctx)
        iters, K = ctx.cfg.iters, len(ctx.counts)
        self.start = max(ctx.cfg.eval_every, round(START * iters))
        self.period, self.memory = max(1, round(PERIOD * iters)), max(10, MEMORY * iters)
        self.unknown = np.ones(len(ctx.dataset.labels), np.float32)
        self.unknown[ctx.index_l] = 0                # --pool union: they are in index_u too
        self.anchors = anchors(ctx.counts).to(ctx.device)                      # (3, K)
        self.log_pi = self.anchors[0].log()                                    # (K,)
        self.register_buffer("w", torch.full((K,), 1 / K))
        self.register_buffer("D", torch.zeros(3))
        self.register_buffer("c", torch.tensor(STRENGTH))

    def estimate(self, p2, unknown):
        """Update w and D. p2 (U, K); unknown (U,): 1 for images that have no label"""
        sure = (p2.amax(1) >= self.ctx.cfg.tau) * unknown                      # (U,)
        guess = F.one_hot(p2.argmax(1), p2.shape[1]).to(p2.dtype)              # (U, K)
        h = (guess * sure[:, None]).sum(0)                                     # (K,)
        any_sure = (h.sum() > 0).to(h.dtype)
        self.w.lerp_(h / h.sum().clamp_min(1), any_sure / self.memory)
        self.D += any_sure * distances(self.w, self.anchors) / self.period

    def refine(self, p, batch):
        model, since = self.ctx.model, batch.step - self.start
        l1, p2 = model.classifier(batch.z_u), model.auxiliary(batch.z_u).softmax(1)    # (U, K)
        if since >= 0:
            if since % self.period == 0:
                self.c.copy_(STRENGTH * self.D.softmax(0)[0])
                self.D.zero_()
            self.estimate(p2, to_device(self.unknown[batch.index_u], p))
        p1, p12 = ((l1 - c * self.log_pi).softmax(1) for c in (self.c, STRENGTH))
        self.y2 = p12.argmax(1)                                                # (U,)
        self.mask = (torch.maximum(p2.amax(1), p12.amax(1)) >= self.ctx.cfg.tau).float()
        sure = torch.maximum(p1.amax(1), p.amax(1))                            # (U,)
        return F.one_hot(p1.argmax(1), p1.shape[1]) * sure[:, None]    # its argmax, its maximum

    def extra_loss(self, batch):
        logits = self.ctx.model.auxiliary(batch.z)                             # (B+SU, K)
        B, views = len(batch.y_l), self.ctx.cfg.n_strong
        loss_x = F.cross_entropy(logits[:B] + STRENGTH * self.log_pi, batch.y_l)
        rows = F.cross_entropy(logits[B:], self.y2.repeat_interleave(views), reduction="none")
        loss_u = (rows.view(-1, views) * self.mask[:, None]).mean()
        return loss_x + self.ctx.cfg.lambda_u * loss_u
