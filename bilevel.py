"""The omega step: tune the attractor by its effect on one update of the classifier.

    theta   feature extractor, z = h_theta(x)             fixed here: z is a constant
    phi     linear classifier (W, b), l = W z + b         moves by one step that depends on omega
    omega   bias attractor, l^ = l + Delta f_omega(l)     what we differentiate with respect to

    g(omega)    = d/dphi L(l^)                            gradient of the lower loss        Eq. 3
    phi'(omega) = update(phi, g(omega))                   one step, SGD or Adam             Eq. 4
    L_bal       = mean H(W' z_b + b', y_b)                the *linear* classifier, judged
                                                          on a class-balanced batch         Eq. 5
    omega      <- omega - eta dL_bal/domega               through phi', a second derivative Eq. 6

`reference_gradient` writes this down as it stands and lets autograd differentiate twice.
`omega_gradient` gets the same numbers with a second derivative with respect to the logits only. The
attractor's input is detached, so l^ depends on phi through l = W z + b only, and with r_i =
dL/dl^_i the lower gradient is

    g_W = sum_i r_i z_i^T        g_b = sum_i r_i          linear in r.

Let C = dL_bal/dg, a constant of phi's shape (first-order: L_bal is an ordinary function of g).
The chain rule is then  dL_bal/domega = d/domega <g(omega), C> = d/domega sum_i <r_i(omega), u_i>
with u_i = C_W z_i + C_b: one backward pass through N x K numbers and the small MLP. It holds for
every lower loss that is a function of the logits l^ and every update rule of phi.

Where the rows of L and the balanced batch are spread over several ranks, L and L_bal are means over
ranks, hence so are g, C and the result: `mean_over_ranks` takes these means, all else is local.

No backbone pass, no data, no BatchNorm, no optimizer step on theta and phi.
"""
from typing import NamedTuple

import torch
import torch.nn.functional as F


class InnerStep(NamedTuple):
    """What a parameter's next value depends on, apart from its gradient."""
    param: torch.Tensor    # value before the step
    m: torch.Tensor        # Adam's moments before the step (zeros at the first one)
    v: torch.Tensor
    t: int                 # number of this step, from 1
    lr: float              # the optimizer's settings for this step
    betas: tuple
    eps: float
    kind: str              # "adam": the update Adam really makes; "sgd": Eq. 4 to the letter


def snapshot(params, optimizer, t, kind="adam"):
    """An InnerStep of each parameter, copied from the optimizer before it steps."""
    group, steps = optimizer.param_groups[0], []
    if group["weight_decay"] or group["amsgrad"]:
        raise ValueError("bilevel.update is Adam without weight_decay and amsgrad; the omega step "
                         "would be differentiated through another update than the optimizer's")
    for p in params:
        state = optimizer.state.get(p, {})
        m, v = (state[key].clone() if key in state else torch.zeros_like(p)
                for key in ("exp_avg", "exp_avg_sq"))
        steps.append(InnerStep(p.detach().clone(), m, v, t, group["lr"], group["betas"],
                               group["eps"], kind))
    return steps


def update(s, g):
    """The parameter after one step with gradient g, as a differentiable function of g.  Eq. 4

    Adam is torch's, as in the real step. The released code adds eps before the bias correction.
    This multiplies eps by 1 / sqrt(1 - beta2^t), 32 at the first step. There m_hat / sqrt(v_hat)
    is the sign of g, so the derivative of the step is proportional to eps, and dL_bal/domega
    grows by the same factor.
    """
    if s.kind == "sgd":
        return s.param - s.lr * g
    beta1, beta2 = s.betas
    m = beta1 * s.m + (1 - beta1) * g
    v = beta2 * s.v + (1 - beta2) * g * g
    m_hat, v_hat = m / (1 - beta1 ** s.t), v / (1 - beta2 ** s.t)
    # at the first step v_hat = g^2: where g is 0, the derivative of sqrt would be infinite
    return s.param - s.lr * m_hat / (v_hat.clamp_min(1e-30).sqrt() + s.eps)


def omega_step(attractor, optimizer, *args):
    """Move omega by omega_gradient, which takes the args. Returns (L_bal, gradient norm)."""
    loss_bal, gradient = omega_gradient(attractor, *args)
    for p, g in zip(attractor.parameters(), gradient, strict=True):
        p.grad = g
    optimizer.step()                                                           # Eq. 6
    return loss_bal, torch.nn.utils.get_total_norm(gradient)


def omega_gradient(attractor, lower_loss, logits, z, inner, z_b, y_b, mean_over_ranks=list):
    """(L_bal, [dL_bal/domega]): no second derivative with respect to theta or phi.

    lower_loss  function of l^ (N, K) -> (L, ...), where L is the scalar loss of Eq. 3
    logits, z   (N, K), (N, D) of the rows of L;   z_b, y_b  (M, D), (M,) of the balanced batch
    inner       InnerSteps of W (K, D) and b (K,)
    mean_over_ranks   tensors -> their means (`list` leaves those of a single rank as they are)
    """
    logits, z = logits.detach(), z.detach()
    l_hat = logits + attractor(logits)                                         # Eq. 2, (N, K)
    loss, *_ = lower_loss(l_hat)
    r, = torch.autograd.grad(loss, l_hat, create_graph=True)                   # (N, K) dL/dl^
    rows = r.detach()
    g = mean_over_ranks([rows.T @ z, rows.sum(0)])                             # (K, D), (K,) Eq. 3
    for part in g:
        part.requires_grad_()
    loss_bal = F.cross_entropy(F.linear(z_b, *map(update, inner, g)), y_b)     # Eq. 4, 5
    c_weight, c_bias = mean_over_ranks(torch.autograd.grad(loss_bal, g))       # (K, D), (K,)
    u = z @ c_weight.T + c_bias                                                # (N, K)
    gradient = torch.autograd.grad((r * u).sum(), list(attractor.parameters()))
    return loss_bal.detach(), mean_over_ranks(gradient)


def reference_gradient(attractor, lower_loss, z, inner, z_b, y_b):
    """The same by differentiating twice: slower, and the definition in seven lines."""
    weight, bias = (s.param.clone().requires_grad_() for s in inner)
    logits = F.linear(z.detach(), weight, bias)
    l_hat = logits + attractor(logits.detach())                                # Eq. 2
    loss, *_ = lower_loss(l_hat)
    g = torch.autograd.grad(loss, (weight, bias), create_graph=True)           # Eq. 3
    loss_bal = F.cross_entropy(F.linear(z_b, *map(update, inner, g)), y_b)     # Eq. 4, 5
    return loss_bal.detach(), torch.autograd.grad(loss_bal, list(attractor.parameters()))
