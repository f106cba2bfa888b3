"""The omega step: first-order form = double backward = central differences, in float64.

Independent references: finite differences of L_bal as a function of omega, torch.optim for the
inner step, a network unrolled as a whole, the closed form of the paper's Proposition 3.1.
"""
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F

import models
from attractor import BiasAttractor, adapt
from bilevel import full_unroll, omega_gradient, reference_gradient, remember, update

K, D, B, U, M = 4, 6, 5, 7, 8
LR = 0.05               # large, so that differences of L_bal stand out from rounding
FLOAT64 = torch.float64


def cross_entropy_rows(y, weight):
    """FixMatch: masked cross-entropy rows with weights kappa_i."""
    return lambda l_hat: (weight * F.cross_entropy(l_hat, y, reduction="none")).sum()


def squared_error_rows(q, weight):
    """MixMatch: squared error between probabilities."""
    return lambda l_hat: (weight[:, None] * (l_hat.softmax(1) - q) ** 2).sum() / K


class Problem:
    """A random omega step. Rows B.. are unlabeled and partly masked."""

    def __init__(self, kind="adam", loss="ce", norm="softmax", warm_steps=3, seed=0):
        torch.manual_seed(seed)
        self.classifier = torch.nn.Linear(D, K).to(FLOAT64)
        self.attractor = BiasAttractor(K, 6, norm).to(FLOAT64)
        self.z, self.z_b = torch.randn(B + U, D, dtype=FLOAT64), torch.randn(M, D, dtype=FLOAT64)
        self.y, self.y_b = torch.randint(K, (B + U,)), torch.randint(K, (M,))
        mask = torch.tensor([1, 0, 1, 1, 0, 0, 1], dtype=FLOAT64)
        weight = torch.cat([torch.full((B,), 1 / B, dtype=FLOAT64), mask / U])
        q = torch.rand(B + U, K, dtype=FLOAT64).softmax(1)
        self.weight = weight
        self.lower_loss = (cross_entropy_rows(self.y, weight) if loss == "ce"
                           else squared_error_rows(q, weight))
        self.optimizer = torch.optim.Adam(self.classifier.parameters(), LR)
        for _ in range(warm_steps):                  # real moments of a real optimizer
            self.real_step()
        self.inner = remember(self.classifier.parameters(), self.optimizer, warm_steps + 1, kind)

    def real_step(self, optimizer=None):
        optimizer = optimizer or self.optimizer
        optimizer.zero_grad()
        l_hat = adapt(self.classifier(self.z), self.attractor)
        torch.autograd.backward(self.lower_loss(l_hat), inputs=list(self.classifier.parameters()))
        optimizer.step()

    def balanced_loss(self):
        """L_bal(omega), first derivatives only: what the differences are taken of."""
        weight, bias = (s.param.clone().requires_grad_() for s in self.inner)
        l_hat = adapt(self.z @ weight.T + bias, self.attractor)
        g = torch.autograd.grad(self.lower_loss(l_hat), (weight, bias))
        weight, bias = map(update, self.inner, g)
        return F.cross_entropy(self.z_b @ weight.T + bias, self.y_b).item()

    def first_order(self):
        with torch.no_grad():
            logits = self.z @ self.inner[0].param.T + self.inner[1].param
        return omega_gradient(self.attractor, self.lower_loss, logits, self.z, self.inner,
                              self.z_b, self.y_b)

    def reference(self):
        return reference_gradient(self.attractor, self.lower_loss, self.z, self.inner,
                                  self.z_b, self.y_b)


def central_differences(attractor, value, h=1e-5):
    """d value() / d omega, one weight at a time."""
    result = []
    for p in attractor.parameters():
        flat = p.data.view(-1)                        # shares memory with the weights
        for i in range(len(flat)):
            ends = []
            for move in (h, -2 * h):
                flat[i] += move
                ends.append(value())
            flat[i] += h
            result.append((ends[0] - ends[1]) / (2 * h))
    return [torch.tensor(result, dtype=FLOAT64)]


def relative_difference(a, b):
    a, b = (torch.cat([t.flatten() for t in x]) for x in (a, b))
    return ((a - b).norm() / b.norm()).item()


CASES = [(kind, loss, norm, warm) for kind in ("adam", "sgd") for loss in ("ce", "mse")
         for norm in ("softmax", "l2") for warm in (0, 3)]


@pytest.mark.parametrize("kind,loss,norm,warm", CASES)
def test_first_order_equals_double_backward(kind, loss, norm, warm):
    problem = Problem(kind, loss, norm, warm)
    (loss_a, a), (loss_b, b) = problem.first_order(), problem.reference()
    assert loss_a.item() == pytest.approx(loss_b.item(), rel=1e-13)
    assert relative_difference(a, b) < 1e-10


@pytest.mark.parametrize("kind,loss,norm,warm", CASES)
def test_first_order_equals_central_differences(kind, loss, norm, warm):
    # Adam's first step is lr * sign(g) but for eps: L_bal hardly depends on omega, and the
    # differences of so flat a function drown in rounding. A larger eps makes it a fair question.
    problem = Problem(kind, loss, norm, warm)
    if warm == 0:
        problem.optimizer.param_groups[0]["eps"] = 1e-2
    expected = central_differences(problem.attractor, problem.balanced_loss)
    assert relative_difference(problem.first_order()[1], expected) < 1e-6


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("warm", [0, 1, 5])
def test_inner_step_is_what_torch_optim_does(kind, warm):
    problem = Problem(kind, warm_steps=warm)
    real = problem.optimizer if kind == "adam" else torch.optim.SGD(
        problem.classifier.parameters(), problem.optimizer.param_groups[0]["lr"])
    problem.real_step(real)
    g = [p.grad for p in problem.classifier.parameters()]
    for ours, theirs in zip(map(update, problem.inner, g), problem.classifier.parameters()):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-14, atol=1e-14)


def test_the_omega_step_touches_nothing():
    problem = Problem(warm_steps=2)
    def everything():
        states = [s for p in problem.classifier.parameters()
                  for s in problem.optimizer.state[p].values()]
        return [t.detach().clone() for t in (*problem.classifier.parameters(),
                                             *problem.attractor.parameters(), *states)]
    before = everything()
    problem.first_order()
    problem.reference()
    assert all(torch.equal(a, b) for a, b in zip(before, everything()))
    assert all(p.grad is None for p in problem.attractor.parameters())


def test_a_gradient_of_exactly_zero_at_the_first_step_is_no_nan():
    problem = Problem(warm_steps=0)
    problem.z[:, 0] = 0                               # g_W[:, 0] = 0 and both moments are 0
    assert all(torch.isfinite(g).all() for g in problem.first_order()[1])
    assert relative_difference(problem.first_order()[1], problem.reference()[1]) < 1e-10


@pytest.mark.parametrize("warm", [0, 4])
def test_adam_factor_has_its_closed_form(warm):
    """-dphi'/dg = lr [(1-b1)/(1-b1^t)/(s+eps) - m^/(s+eps)^2 (1-b2)/(1-b2^t) g/s], s = sqrt(v^)."""
    problem = Problem(warm_steps=warm)
    s, g = problem.inner[0], torch.randn(K, D, dtype=FLOAT64).requires_grad_()
    ours, = torch.autograd.grad(update(s, g).sum(), g)
    b1, b2, eps, lr, t = 0.9, 0.999, 1e-8, LR, warm + 1
    g = g.detach()
    m_hat = (b1 * s.m + (1 - b1) * g) / (1 - b1 ** t)
    root = ((b2 * s.v + (1 - b2) * g ** 2) / (1 - b2 ** t)).sqrt()
    factor = lr * ((1 - b1) / (1 - b1 ** t) / (root + eps)
                   - m_hat / (root + eps) ** 2 * (1 - b2) / (1 - b2 ** t) * g / root)
    torch.testing.assert_close(-ours, factor, rtol=1e-6, atol=1e-12)


def test_proposition_3_1():
    """SGD, cross-entropy: the gradient is -alpha sum_i kappa_i (dDelta_i/domega)^T G_i, with
    G_i = (diag(p_i) - p_i p_i^T) (G_W z_i + G_b), the similarity of sample i's gradient and the
    balanced set's. Each dDelta_ik/domega is taken by itself."""
    problem = Problem("sgd")
    alpha, (s_w, s_b) = LR, problem.inner
    logits = problem.z @ s_w.param.T + s_b.param
    delta = problem.attractor(logits)
    p = (logits + delta).softmax(1).detach()                                           # (N, K)
    r = problem.weight[:, None] * (p - F.one_hot(problem.y, K))
    weight, bias = s_w.param - alpha * r.T @ problem.z, s_b.param - alpha * r.sum(0)
    r_b = ((problem.z_b @ weight.T + bias).softmax(1) - F.one_hot(problem.y_b, K)) / M
    u = problem.z @ (r_b.T @ problem.z_b).T + r_b.sum(0)                               # (N, K)
    similarity = p * u - p * (p * u).sum(1, keepdim=True)                              # G_i
    total = [torch.zeros_like(w) for w in problem.attractor.parameters()]
    for i in range(B + U):
        for k in range(K):
            jacobian = torch.autograd.grad(delta[i, k], list(problem.attractor.parameters()),
                                           retain_graph=True)
            for t, j in zip(total, jacobian):
                t -= alpha * problem.weight[i] * similarity[i, k] * j
    assert relative_difference(problem.first_order()[1], total) < 1e-10


class Small(torch.nn.Module):
    """A network with BatchNorm, small enough to be unrolled many times."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = torch.nn.Conv2d(3, D, 3), models.Norm(D, 0.1)
        self.classifier = torch.nn.Linear(D, K)

    def features(self, x):
        return F.softplus(self.bn(self.conv(x))).mean((2, 3))

    def forward(self, x):
        return self.classifier(self.features(x))


@pytest.fixture
def network_problem():
    torch.manual_seed(1)
    model, attractor = Small().to(FLOAT64), BiasAttractor(K, 8).to(FLOAT64)
    x, x_b = torch.randn(6, 3, 6, 6, dtype=FLOAT64), torch.randn(M, 3, 6, 6, dtype=FLOAT64)
    y, y_b = torch.randint(K, (6,)), torch.randint(K, (M,))
    optimizer = torch.optim.Adam(model.parameters(), LR)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, attractor, x, y, x_b, y_b, optimizer


def moved_balanced_loss(problem, moving):
    """L_bal after a real torch.optim step of the parameters whose name passes `moving`."""
    model, attractor, x, y, x_b, y_b, optimizer = problem
    model = deepcopy(model)
    copy = torch.optim.Adam(model.parameters(), LR)
    copy.load_state_dict(deepcopy(optimizer.state_dict()))
    l_hat = adapt(model(x), attractor)
    torch.autograd.backward(F.cross_entropy(l_hat, y), inputs=list(model.parameters()))
    for name, p in model.named_parameters():
        if not moving(name):
            p.grad = None                                    # torch.optim leaves it where it is
    copy.step()
    return F.cross_entropy(model(x_b), y_b).item()


def test_unrolling_only_the_classifier_of_a_real_network(network_problem):
    """theta stays, phi moves by torch.optim.Adam: differences of the whole network's L_bal."""
    model, attractor, x, y, x_b, y_b, optimizer = network_problem
    inner = remember(model.classifier.parameters(), optimizer, 3)
    z, z_b = model.features(x), model.features(x_b).detach()
    _, g = omega_gradient(attractor, lambda l: F.cross_entropy(l, y), model.classifier(z), z,
                          inner, z_b, y_b)
    expected = central_differences(attractor, lambda: moved_balanced_loss(
        network_problem, lambda name: name.startswith("classifier")))
    assert relative_difference(g, expected) < 1e-6


def test_full_unroll_moves_the_whole_network(network_problem):
    model, attractor, x, y, x_b, y_b, optimizer = network_problem
    inner = remember(model.parameters(), optimizer, 3)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with models.frozen_bn_stats(model):
        _, g, lower = full_unroll(model, attractor, lambda l: F.cross_entropy(l, y), model(x),
                                  inner, x_b, y_b)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    expected = central_differences(attractor, lambda: moved_balanced_loss(
        network_problem, lambda name: True))
    assert relative_difference(g, expected) < 1e-6
    optimizer.zero_grad()
    F.cross_entropy(adapt(model(x), attractor), y).backward()
    for ours, p in zip(lower, model.parameters()):
        torch.testing.assert_close(ours, p.grad)
