"""The omega step: tune the attractor by its effect on one update of the classifier.

    theta   feature extractor, z = h_theta(x)             fixed here: z is a constant
    phi     linear classifier (W, b), l = W z + b         moves by one step that depends on omega
    omega   bias attractor, l^ = l + Delta f_omega(l)     what we differentiate with respect to

    g(omega)    = d/dphi L(l^)                            gradient of the lower loss        Eq. 3
    phi'(omega) = phi moved by one step with g(omega)     the optimizer's, e.g. Adam        Eq. 4
    L_bal       = mean H(W' z_b + b', y_b)                the *linear* classifier on a
                                                          class-balanced batch              Eq. 5
    omega      <- omega - eta dL_bal/domega               through phi', a second derivative Eq. 6

`unrolled_gradient` writes this down as it stands and lets autograd differentiate twice.
`omega_gradient` gets the same numbers after the optimizer has made its step, when phi' is the live
classifier and g stands in p.grad. Two facts make it cheap. The step moves every entry of phi by its
own entry of g, so with C = dL_bal/dphi' * dphi'/dg, element by element, the chain rule says
dL_bal/domega = d/domega <g(omega), C>. And the attractor's input is detached, so l^ depends on phi
through l = W z + b only, and with r_i = dL/dl^_i the gradient is linear in r:

    g_W = sum_i r_i z_i^T        g_b = sum_i r_i
    <g(omega), C> = sum_i <r_i(omega), u_i>               u_i = C_W z_i + C_b, a constant

What is left is one backward pass through N x K numbers and the small MLP, for every lower loss that
is a function of the logits l^. This file and attractor.py need nothing else of the project.
"""
import torch
import torch.nn.functional as F


def unrolled_gradient(attractor, lower_loss, z, classifier, optimizer, z_b, y_b):
    """The definition: (L_bal, [dL_bal/domega]) of the step that Adam is about to make with phi.

    lower_loss  function of l^ (N, K) -> L, the scalar of Eq. 3, or a tuple that begins with it
    z           (N, D) features of the images in L;   z_b, y_b  (M, D), (M,) of the balanced batch
    """
    phi = [p.detach().clone().requires_grad_() for p in classifier.parameters()]
    logits = F.linear(z.detach(), *phi)                                        # (N, K)
    l_hat = logits + attractor(logits)                                         # Eq. 2
    loss = first(lower_loss(l_hat))                                            # Eq. 3
    gradient = torch.autograd.grad(loss, phi, create_graph=True)
    moved = [adam_step(p, g, optimizer)                                        # Eq. 4
             for p, g in zip(classifier.parameters(), gradient, strict=True)]
    loss_bal = F.cross_entropy(F.linear(z_b, *moved), y_b)                     # Eq. 5
    return loss_bal.detach(), torch.autograd.grad(loss_bal, list(attractor.parameters()))


def adam_step(p, g, optimizer):
    """p after the step that Adam is about to make, as a function of its gradient g.       Eq. 4"""
    group, state = group_of(p, optimizer), optimizer.state.get(p) or {}
    (beta1, beta2), t = group["betas"], int(state.get("step", 0)) + 1
    m = beta1 * state.get("exp_avg", 0) + (1 - beta1) * g
    v = beta2 * state.get("exp_avg_sq", 0) + (1 - beta2) * g * g
    m_hat, v_hat = m / (1 - beta1 ** t), v / (1 - beta2 ** t)
    # where g was always 0, the derivative of the square root would be infinite
    return p.detach() - group["lr"] * m_hat / (v_hat.clamp_min(1e-30).sqrt() + group["eps"])


def omega_gradient(attractor, lower_loss, logits, z, classifier, optimizer, z_b, y_b):
    """Put dL_bal/domega into p.grad of the attractor's parameters; returns L_bal.

    Call it after optimizer.step() and before the gradients of that step are cleared.
    logits, z   (N, K), (N, D) of the images in L as they were in that step; the others as above
    """
    logits, z = logits.detach(), z.detach()
    phi = list(classifier.parameters())                       # phi': W (K, D), b (K,) if there is b
    loss_bal = F.cross_entropy(classifier(z_b.detach()), y_b)                  # Eq. 5
    c = [to_phi * step_derivative(p, optimizer)                                # dL_bal/dg
         for p, to_phi in zip(phi, torch.autograd.grad(loss_bal, phi), strict=True)]
    u = F.linear(z, *c)                                                        # (N, K)
    l_hat = logits + attractor(logits)                                         # Eq. 2, (N, K)
    loss = first(lower_loss(l_hat))                                            # Eq. 3
    r, = torch.autograd.grad(loss, l_hat, create_graph=True)                   # (N, K) dL/dl^
    attractor.zero_grad()
    (r * u).sum().backward(inputs=list(attractor.parameters()))                # for Eq. 6
    return loss_bal.detach()


def step_derivative(p, optimizer):
    """dphi'/dg of the step that the optimizer has just made with p, element by element.   Eq. 4

    Adam: phi' = phi - lr m^ / (s + eps) with s = sqrt(v^). At the first step m^ / s is the sign of
    g, and what is left of the derivative is proportional to eps. Decoupled weight decay (AdamW)
    does not depend on g.
    """
    group = group_of(p, optimizer)
    adam = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    coupled_decay = type(optimizer) is torch.optim.Adam and group["weight_decay"]
    variant = any(group.get(key) for key in ("amsgrad", "dampening", "maximize"))
    if not (adam or type(optimizer) is torch.optim.SGD) or coupled_decay or variant:
        raise ValueError("the omega step knows the derivative of AdamW, of Adam without "
                         "weight_decay and of SGD, without amsgrad, dampening and maximize")
    if not adam:
        return -group["lr"] * (1 + group["momentum"] if group["nesterov"] else 1)
    state, (beta1, beta2) = optimizer.state[p], group["betas"]
    t = state["step"].double()
    m_hat = state["exp_avg"] / (1 - beta1 ** t)
    s = (state["exp_avg_sq"] / (1 - beta2 ** t)).sqrt().clamp_min(1e-15)   # 0 where g was always 0
    dm = (1 - beta1) / (1 - beta1 ** t)
    ds = (1 - beta2) / (1 - beta2 ** t) * p.grad / s
    return -group["lr"] * (dm / (s + group["eps"]) - m_hat / (s + group["eps"]) ** 2 * ds)


def first(loss):
    """The scalar of a loss that comes alone, or as the first of several: (L, its parts ...)."""
    return loss[0] if isinstance(loss, tuple) else loss


def group_of(p, optimizer):
    """The settings of the group that holds p: a head may have its own learning rate."""
    return next(group for group in optimizer.param_groups if any(q is p for q in group["params"]))
