"""L2AC as it is usually written, "traditional" in the paper's cost table: the step of *every*
weight depends on omega, and the whole network is differentiated twice."""
import torch
import torch.nn.functional as F
from torch.func import functional_call

from bilevel import adam_step, first


def full_unroll(model, attractor, lower_loss, logits, optimizer, x_b, y_b):
    """Put dL_bal/domega and the lower gradient into p.grad; returns L_bal. The optimizers step
    afterwards. Like bilevel.omega_gradient, but theta moves too, so the images x_b are needed.

    logits      (N, K) of the images in L, with the graph of the whole network
    optimizer   torch.optim.Adam of the model
    """
    names, params = zip(*model.named_parameters(), strict=True)
    loss = first(lower_loss(logits + attractor(logits)))                       # Eq. 2, 3
    gradient = torch.autograd.grad(loss, params, create_graph=True)
    moved = [adam_step(p, g, optimizer) for p, g in zip(params, gradient, strict=True)]    # Eq. 4
    predicted = functional_call(model, dict(zip(names, moved, strict=True)), (x_b,))
    loss_bal = F.cross_entropy(predicted, y_b)                                 # Eq. 5
    omega = list(attractor.parameters())
    for p, g in zip(omega, torch.autograd.grad(loss_bal, omega), strict=True):
        p.grad = g
    for p, g in zip(params, gradient, strict=True):
        p.grad = torch.empty_like(p).copy_(g.detach())    # in p's memory layout, for fused Adam
    return loss_bal.detach()
