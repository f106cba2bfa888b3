"""L2AC as it is usually written, "traditional" in the paper's cost table: the step of *every*
weight depends on omega, and the whole network is differentiated twice."""
from functools import partial

import torch
import torch.nn.functional as F
from torch.func import functional_call

import models
from baselines.joint import SingleLevel
from bilevel import adam_step, first
from train_fixmatch import fixmatch_loss


def full_unroll(model, attractor, lower_loss, logits, optimizer, x_b, y_b):
    """(L_bal, its gradient with respect to omega, that of L with respect to theta and phi). Like
    bilevel.unrolled_gradient, but theta moves too, so the images x_b are needed.

    logits      (N, K) of the images in L, with the graph of the whole network
    optimizer   torch.optim.Adam of the model, which steps afterwards
    """
    names, params = zip(*model.named_parameters(), strict=True)
    loss = first(lower_loss(logits + attractor(logits)))                       # Eq. 2, 3
    gradient = torch.autograd.grad(loss, params, create_graph=True)
    moved = [adam_step(p, g, optimizer) for p, g in zip(params, gradient, strict=True)]    # Eq. 4
    predicted = functional_call(model, dict(zip(names, moved, strict=True)), (x_b,))
    loss_bal = F.cross_entropy(predicted, y_b)                                 # Eq. 5
    to_omega = torch.autograd.grad(loss_bal, list(attractor.parameters()))
    return loss_bal.detach(), to_omega, [g.detach() for g in gradient]


class FullUnroll(SingleLevel):
    """It on FixMatch, to measure its cost: omega shares the network's Adam."""

    def adapt(self, logits):
        self.logits = logits                              # (N, K)
        return logits.detach()                            # the loop's own losses are for the log

    def extra_loss(self, batch):
        """A function whose gradients are those of the full unroll."""
        ctx, logits, self.logits = self.ctx, self.logits, None                 # free their graph
        lower_loss = partial(fixmatch_loss, y_l=batch.y_l, target_u=batch.y_u, mask=batch.mask,
                             lambda_u=ctx.cfg.lambda_u)
        with models.frozen_bn_stats(ctx.model):
            batch.loss_bal, to_omega, to_model = full_unroll(
                ctx.model, self.attractor, lower_loss, logits, ctx.optimizer,
                *self.balanced_batch(batch.step))
        params = [*self.attractor.parameters(), *ctx.model.parameters()]
        return sum((p * g).sum() for p, g in zip(params, [*to_omega, *to_model], strict=True))
