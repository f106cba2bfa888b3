"""The omega step, in float64, against double backward through optimizers written out here, against
central differences of L_bal after real steps of torch.optim, and against Proposition 3.1."""
import re
from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, relative_difference
from torch import nn
from torch.optim import SGD, Adam, AdamW, RMSprop

from attractor import BiasAttractor, BiasVector
from bilevel import omega_gradient, unrolled_gradient
from train_mixmatch import mixmatch_loss

K, D, B, U, M = 4, 6, 5, 7, 8
LR = 0.05               # large, so that differences of L_bal stand out from rounding
OPTIMIZERS = {          # type, its settings for the classifier
    "Adam": (Adam, {}),
    "Adam, second group": (Adam, {"betas": (0.7, 0.8), "eps": 1e-4}),
    "AdamW": (AdamW, {"weight_decay": 0.3}),
    "SGD": (SGD, {}),
    "momentum": (SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "Nesterov": (SGD, {"momentum": 0.9, "nesterov": True})}
LOWER = {               # l^ -> L alone, or L and its parts
    "scalar": lambda l_hat, y, q: F.cross_entropy(l_hat[:B + 3], y[:B + 3]),     # others are masked
    "tuple": lambda l_hat, y, q: mixmatch_loss(l_hat, q, B, 37.5)}


@pytest.fixture(autouse=True)
def double_precision():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def scalar(loss):
    return loss[0] if isinstance(loss, tuple) else loss


class Reference:
    """A linear classifier and its optimizer from their definitions, differentiable."""

    def __init__(self, head, kind, settings):
        self.kind, self.settings = kind, {
            "lr": LR, "momentum": 0, "nesterov": False, "weight_decay": 0, "betas": (0.9, 0.999),
            "eps": 1e-8} | settings
        self.phi, self.states = [p.detach().clone() for p in head.parameters()], [(0, 0, 0)] * 2

    def step(self, attractor, lower_loss, z):
        """Make a step on L; returns [phi'] with its graph."""
        phi = [p.requires_grad_() for p in self.phi]
        logits = F.linear(z, *phi)
        loss = scalar(lower_loss(logits + attractor(logits.detach())))
        gradient = torch.autograd.grad(loss, phi, create_graph=True)
        moved = [self.updated(i, p.detach(), g)
                 for i, (p, g) in enumerate(zip(phi, gradient, strict=True))]
        self.phi = [p.detach() for p in moved]
        return moved

    def updated(self, i, p, g):
        """p' of parameter number i, as a function of its gradient g."""
        s, (t, m, v) = self.settings, self.states[i]
        if self.kind is SGD:
            g = g + s["weight_decay"] * p
            m = s["momentum"] * m + g
            self.states[i] = t, m.detach(), v
            return p - s["lr"] * (g + s["momentum"] * m if s["nesterov"] else m)
        t, (beta1, beta2) = t + 1, s["betas"]
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g ** 2
        self.states[i] = t, m.detach(), v.detach()
        root = (v / (1 - beta2 ** t)).clamp_min(1e-30).sqrt()     # its derivative at 0 is infinite
        decayed = p * (1 - s["lr"] * s["weight_decay"])
        return decayed - s["lr"] * m / (1 - beta1 ** t) / (root + s["eps"])


class Problem:
    """A classifier that its optimizer has moved a few times; its next step is the one in question.
    The first feature is always 0, and so are the moments of its weights: 0 / 0 for Adam."""

    def __init__(self, name="Adam", bias=True, loss="scalar", attractor="softmax", steps=3, **more):
        torch.manual_seed(0)
        kind, settings = OPTIMIZERS[name]
        self.head, body = nn.Linear(D, K, bias), nn.Linear(D, D)
        self.attractor = BiasVector(K) if attractor == "vector" else BiasAttractor(K, 4, attractor)
        self.z, self.z_b = torch.randn(B + U, D), torch.randn(M, D)
        self.z[:, 0] = 0
        self.y, self.y_b = torch.randint(K, (B + U,)), torch.randint(K, (M,))
        self.lower_loss = partial(LOWER[loss], y=self.y, q=torch.randn(B + U, K).softmax(1))
        groups = [{"params": self.head.parameters(), "lr": LR} | settings | more]
        if "group" in name:
            groups.insert(0, {"params": body.parameters()})
        self.optimizer = kind(groups, lr=1e-5)
        self.reference = Reference(self.head, kind, settings | more)
        for _ in range(steps):
            self.reference.step(self.attractor, self.lower_loss, self.z)
            self.step(self.head, self.optimizer)

    def step(self, head, optimizer):
        """torch.optim's step on L. Returns the logits (N, K) that it was made with."""
        optimizer.zero_grad()
        logits = head(self.z)
        scalar(self.lower_loss(logits + self.attractor(logits).detach())).backward()
        optimizer.step()
        return logits

    def balanced_loss(self):
        """L_bal after a real step of a copy, as a number."""
        head, optimizer = deepcopy((self.head, self.optimizer))
        self.step(head, optimizer)
        return F.cross_entropy(head(self.z_b), self.y_b).item()

    def double_backward(self):
        """[dL_bal/domega] and [phi'] of the next step."""
        moved = self.reference.step(self.attractor, self.lower_loss, self.z)
        loss_bal = F.cross_entropy(F.linear(self.z_b, *moved), self.y_b)
        return torch.autograd.grad(loss_bal, list(self.attractor.parameters())), moved

    def ours(self):
        """L_bal, [dL_bal/domega] by omega_gradient, after the step."""
        logits = self.step(self.head, self.optimizer)
        loss_bal = omega_gradient(self.attractor, self.lower_loss, logits, self.z, self.head,
                                  self.optimizer, self.z_b, self.y_b)
        return loss_bal.item(), [p.grad for p in self.attractor.parameters()]


def slope(module, function, direction):
    """The central difference of function() along a direction in the space of the parameters."""
    values = []
    for size in (1e-5, -2e-5, 1e-5):                  # there, to the other side, and back
        for p, d in zip(module.parameters(), direction, strict=True):
            p.data += size * d
        values.append(function())
    return torch.tensor((values[0] - values[1]) / 2e-5)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("loss,attractor", [("scalar", "softmax"), ("tuple", "l2")])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_omega_gradient(name, bias, loss, attractor, steps):
    # Adam's first step is lr * sign(g) but for eps: L_bal hardly depends on omega, and differences
    # of so flat a function drown in rounding. A larger eps makes it a fair question.
    large = {"eps": 1e-2} if steps == 0 and "Adam" in name else {}
    problem = Problem(name, bias, loss, attractor, steps, **large)
    (expected, moved), value = problem.double_backward(), problem.balanced_loss()
    directions = [[torch.randn_like(p) for p in problem.attractor.parameters()] for _ in range(3)]
    slopes = [slope(problem.attractor, problem.balanced_loss, d) for d in directions]
    if name in ("Adam", "Adam, second group"):                # the definition, before the step
        loss_bal, gradient = unrolled_gradient(
            problem.attractor, problem.lower_loss, problem.z, problem.head, problem.optimizer,
            problem.z_b, problem.y_b)
        assert loss_bal.item() == pytest.approx(value, rel=1e-13)
        assert relative_difference(gradient, expected) < 1e-9
    loss_bal, gradient = problem.ours()
    assert relative_difference(problem.head.parameters(), moved) < 1e-13    # as torch.optim steps
    assert loss_bal == pytest.approx(value, rel=1e-13)
    assert relative_difference(gradient, expected) < 1e-9
    ours = [sum((g * d).sum() for g, d in zip(gradient, direction, strict=True))
            for direction in directions]
    assert relative_difference(ours, slopes) < 1e-6


@pytest.mark.parametrize("kind,settings", [
    (Adam, {"amsgrad": True}), (Adam, {"weight_decay": 0.1}), (Adam, {"maximize": True}),
    (AdamW, {"amsgrad": True}), (SGD, {"momentum": 0.9, "dampening": 0.1}), (RMSprop, {})])
def test_optimizers_whose_derivative_is_unknown(kind, settings):
    problem = Problem()
    problem.optimizer = kind(problem.head.parameters(), LR, **settings)
    with pytest.raises(ValueError, match="knows the derivative of"):
        problem.ours()


@pytest.mark.parametrize("attractor", ["softmax", "vector"])
def test_proposition_3_1(attractor):
    """SGD, cross-entropy: the gradient is -alpha sum_i kappa_i (dDelta_i/domega)^T G_i, with
    G_i = (diag(p_i) - p_i p_i^T) (G_W z_i + G_b), the similarity of sample i's gradient and the
    balanced set's. Each dDelta_ik/domega is taken by itself."""
    problem = Problem("SGD", attractor=attractor)
    kappa, omega = 1 / (B + 3), list(problem.attractor.parameters())
    y, z, z_b = problem.y[:B + 3], problem.z[:B + 3], problem.z_b
    weight, bias = problem.head.parameters()
    logits = (z @ weight.T + bias).detach()
    delta = problem.attractor(logits)
    p = (logits + delta).softmax(1).detach()                                           # (N, K)
    r = kappa * (p - F.one_hot(y, K))
    weight, bias = weight - LR * r.T @ z, bias - LR * r.sum(0)
    r_b = ((z_b @ weight.T + bias).softmax(1) - F.one_hot(problem.y_b, K)) / M
    u = z @ (r_b.T @ z_b).T + r_b.sum(0)                                               # (N, K)
    similarity = p * u - p * (p * u).sum(1, keepdim=True)                              # G_i
    total = [torch.zeros_like(w) for w in omega]
    for i in range(B + 3):
        for k in range(K):
            jacobian = torch.autograd.grad(delta[i, k], omega, retain_graph=True)
            for t, j in zip(total, jacobian, strict=True):
                t -= LR * kappa * similarity[i, k].item() * j
    assert relative_difference(problem.ours()[1], total) < 1e-10


# ---------------------------------------------------------------------------------------------
# eight lines in another training loop


@pytest.mark.parametrize("kind,settings", [
    (Adam, {"lr": 0.01}), (AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True})])
def test_the_lines_of_the_readme(kind, settings):
    """On Gaussian classes with 60, 20, 7 and 2 labeled images: omega's gradient at every step, and
    L_bal at the beginning and at the end."""
    torch.manual_seed(0)
    body, head = nn.Sequential(nn.Linear(5, 16), nn.Tanh()), nn.Linear(16, 4)
    optimizer = kind([*body.parameters(), *head.parameters()], **settings)
    reference, balanced = Reference(head, kind, settings), []
    y = torch.arange(4).repeat_interleave(torch.tensor([60, 20, 7, 2]))
    x = torch.randn(4, 5)[y] + torch.randn(len(y), 5)

    def batches():
        for _ in range(60):
            i = torch.randint(len(y), (16,))
            i_b = (y == torch.arange(4)[:, None]).double().multinomial(4, True).flatten()   # (16,)
            before = deepcopy(scope["attractor"])
            moved = reference.step(before, lambda l_hat, i=i: F.cross_entropy(l_hat, y[i]),
                                   body(x[i]).detach())
            yield x[i], y[i], x[i_b], y[i_b]
            loss_bal = F.cross_entropy(F.linear(body(x[i_b]).detach(), *moved), y[i_b])
            expected = torch.autograd.grad(loss_bal, list(before.parameters()))
            omega = list(scope["attractor"].parameters())
            assert relative_difference([p.grad for p in omega], expected) < 1e-9
            assert relative_difference(omega, before.parameters()) > 1e-6        # a step was made
            balanced.append(loss_bal.item())
    scope = {"torch": torch, "F": F, "num_classes": 4, "body": body, "head": head,
             "optimizer": optimizer, "batches": batches()}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines, = [block for block in blocks if "from bilevel import omega_gradient" in block]
    exec(lines, scope)
    assert sum(balanced[-10:]) < 0.7 * sum(balanced[:10])
