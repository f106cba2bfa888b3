"""The omega step: first-order form = double backward = central differences, in float64.

Independent references: finite differences of L_bal as a function of omega, torch.optim for the
inner step, the closed form of the paper's Proposition 3.1. A whole network: test_full_unroll.py.
"""
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from conftest import FLOAT64, central_differences, relative_difference

from attractor import BiasAttractor, BiasVector
from bilevel import omega_gradient, omega_step, reference_gradient, snapshot, update

K, D, B, U, M = 4, 6, 5, 7, 8
LR = 0.05               # large, so that differences of L_bal stand out from rounding


def cross_entropy_rows(y, weight):
    """FixMatch: masked cross-entropy rows with weights kappa_i."""
    return lambda l_hat: ((weight * F.cross_entropy(l_hat, y, reduction="none")).sum(),)


def squared_error_rows(q, weight):
    """MixMatch: squared error between probabilities."""
    return lambda l_hat: ((weight[:, None] * (l_hat.softmax(1) - q) ** 2).sum() / K,)


class Problem:
    """A random omega step. Rows B.. are unlabeled and partly masked."""

    def __init__(self, kind="adam", loss="ce", norm="softmax", warm_steps=3, **settings):
        torch.manual_seed(0)
        self.kind = kind
        self.classifier = torch.nn.Linear(D, K).to(FLOAT64)
        self.attractor = (BiasVector(K) if norm == "vector"
                          else BiasAttractor(K, 4, norm)).to(FLOAT64)
        self.z, self.z_b = torch.randn(B + U, D, dtype=FLOAT64), torch.randn(M, D, dtype=FLOAT64)
        self.y, self.y_b = torch.randint(K, (B + U,)), torch.randint(K, (M,))
        mask = torch.tensor([1, 0, 1, 1, 0, 0, 1], dtype=FLOAT64)
        self.weight = torch.cat([torch.full((B,), 1 / B, dtype=FLOAT64), mask / U])
        q = torch.rand(B + U, K, dtype=FLOAT64).softmax(1)
        self.lower_loss = (cross_entropy_rows(self.y, self.weight) if loss == "ce"
                           else squared_error_rows(q, self.weight))
        self.optimizer = torch.optim.Adam(self.classifier.parameters(), LR, **settings)
        for _ in range(warm_steps):                  # real moments of a real optimizer
            self.real_step(self.classifier, self.optimizer)
        self.inner = snapshot(self.classifier.parameters(), self.optimizer, warm_steps + 1, kind)

    def real_step(self, classifier, optimizer):
        """torch.optim's step of the classifier on L. Returns the gradient."""
        logits = classifier(self.z)
        loss, = self.lower_loss(logits + self.attractor(logits.detach()))
        gradient = torch.autograd.grad(loss, list(classifier.parameters()))
        for p, g in zip(classifier.parameters(), gradient, strict=True):
            p.grad = g
        optimizer.step()
        return gradient

    def stepped(self):
        """A copy of the classifier after the step that omega is judged by, and its gradient."""
        if self.kind == "sgd":
            classifier = deepcopy(self.classifier)
            optimizer = torch.optim.SGD(classifier.parameters(), LR)
        else:
            classifier, optimizer = deepcopy((self.classifier, self.optimizer))
        return classifier, self.real_step(classifier, optimizer)

    @torch.enable_grad()
    def balanced_loss(self):
        """L_bal(omega), first derivatives only: what the differences are taken of."""
        return F.cross_entropy(self.stepped()[0](self.z_b), self.y_b).item()

    def arguments(self):
        """Those of omega_gradient, but for the attractor."""
        logits = self.classifier(self.z)
        return self.lower_loss, logits, self.z, self.inner, self.z_b, self.y_b

    def first_order(self):
        return omega_gradient(self.attractor, *self.arguments())

    def reference(self):
        return reference_gradient(self.attractor, self.lower_loss, self.z, self.inner,
                                  self.z_b, self.y_b)


CASES = [(kind, loss, norm, warm) for kind in ("adam", "sgd") for loss in ("ce", "mse")
         for norm in ("softmax", "l2", "vector") for warm in (0, 3)]


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
    problem = Problem(kind, loss, norm, warm, eps=1e-8 if warm else 1e-2)
    loss_bal, gradient = problem.first_order()
    assert loss_bal.item() == pytest.approx(problem.balanced_loss(), rel=1e-12)
    expected = central_differences(problem.attractor, problem.balanced_loss)
    assert relative_difference(gradient, expected) < 1e-6


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("warm", [0, 1, 5])
@pytest.mark.parametrize("settings", [{}, {"betas": (0.7, 0.8), "eps": 0.01}])
def test_inner_step_is_what_torch_optim_does(kind, warm, settings):
    problem = Problem(kind, warm_steps=warm, **settings)
    classifier, gradient = problem.stepped()
    ours = map(update, problem.inner, gradient)
    for a, b in zip(ours, classifier.parameters(), strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("change", [{"lr": 7 * LR}, {"betas": (0.5, 0.6)}, {"eps": 1.0}])
def test_snapshot_copies_the_settings_of_the_optimizer(change):
    """A learning rate schedule changes param_groups in place. The step that is differentiated
    remains the one made with the settings that held when it was made."""
    problem = Problem()
    before, classifier = problem.first_order()[1], problem.classifier
    gradient = problem.real_step(classifier, problem.optimizer)
    stepped = [p.detach().clone() for p in classifier.parameters()]
    problem.optimizer.param_groups[0].update(change)
    for ours, theirs in zip(map(update, problem.inner, gradient), stepped, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)
    with torch.no_grad():
        for p, inner in zip(classifier.parameters(), problem.inner, strict=True):
            p.copy_(inner.param)
    assert relative_difference(problem.first_order()[1], before) < 1e-12


@pytest.mark.parametrize("setting", [{"weight_decay": 0.1}, {"amsgrad": True}])
def test_snapshot_refuses_an_update_that_it_does_not_know(setting):
    classifier = torch.nn.Linear(D, K)
    optimizer = torch.optim.Adam(classifier.parameters(), LR, **setting)
    with pytest.raises(ValueError, match=next(iter(setting))):
        snapshot(classifier.parameters(), optimizer, 1)


def test_the_omega_gradient_touches_nothing():
    problem = Problem(warm_steps=2)

    def everything():
        states = [s for p in problem.classifier.parameters()
                  for s in problem.optimizer.state[p].values()]
        return [t.detach().clone() for t in (*problem.classifier.parameters(),
                                             *problem.attractor.parameters(), *states)]
    before = everything()
    gradients = [p.grad.clone() for p in problem.classifier.parameters()]
    problem.first_order()
    problem.reference()
    assert all(torch.equal(a, b) for a, b in zip(before, everything(), strict=True))
    assert all(p.grad is None for p in problem.attractor.parameters())
    assert all(torch.equal(p.grad, g)
               for p, g in zip(problem.classifier.parameters(), gradients, strict=True))


def test_the_omega_step_moves_omega_by_the_optimizer_and_nothing_else():
    problem = Problem()
    phi = deepcopy(problem.classifier.state_dict())
    loss_bal = problem.balanced_loss()
    gradient = central_differences(problem.attractor, problem.balanced_loss)
    expected = [p.detach() - 0.1 * g
                for p, g in zip(problem.attractor.parameters(), gradient, strict=True)]
    optimizer = torch.optim.SGD(problem.attractor.parameters(), 0.1)
    ours, norm = omega_step(problem.attractor, optimizer, *problem.arguments())
    assert ours.item() == pytest.approx(loss_bal, rel=1e-12)
    squares = sum((g ** 2).sum().item() for g in gradient)
    assert norm.item() == pytest.approx(squares ** 0.5, rel=1e-6)
    for a, b in zip(problem.attractor.parameters(), expected, strict=True):
        torch.testing.assert_close(a.detach(), b, rtol=1e-7, atol=1e-9)
    assert all(torch.equal(v, phi[k]) for k, v in problem.classifier.state_dict().items())


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
            for t, j in zip(total, jacobian, strict=True):
                t -= alpha * problem.weight[i] * similarity[i, k] * j
    assert relative_difference(problem.first_order()[1], total) < 1e-10


def test_omega_gradient_of_a_vector_by_hand():
    """Three classes, one feature, SGD with alpha = 0.1; the numbers are those of methods_after.md,
    section 5. Its entries sum to 0: a constant added to all logits changes nothing."""
    classifier, vector = torch.nn.Linear(1, 3).to(FLOAT64), BiasVector(3).to(FLOAT64)
    with torch.no_grad():
        classifier.weight.copy_(torch.tensor([[0.2], [-0.1], [0]]))
        classifier.bias.zero_()
        vector.bias.copy_(torch.tensor([0.3, 0, -0.3]))
    z, z_b = torch.tensor([[1.0], [-1]]).to(FLOAT64), torch.tensor([[1.0], [-1], [0.5]]).to(FLOAT64)
    y, y_b = torch.tensor([0, 1]), torch.tensor([0, 1, 2])
    inner = snapshot(classifier.parameters(), torch.optim.Adam(classifier.parameters(), 0.1), 1,
                     "sgd")
    loss_bal, (gradient,) = omega_gradient(vector, lambda l_hat: (F.cross_entropy(l_hat, y),),
                                           classifier(z), z, inner, z_b, y_b)

    @torch.enable_grad()
    def stepped():
        copy = deepcopy(classifier)
        F.cross_entropy(copy(z) + vector.bias.detach(), y).backward()
        torch.optim.SGD(copy.parameters(), 0.1).step()
        return copy

    def balanced_loss():
        return F.cross_entropy(stepped()(z_b), y_b).item()
    assert stepped().weight.flatten().tolist() == pytest.approx([0.2437, -0.1450, 0.0013], abs=6e-5)
    assert stepped().bias.tolist() == pytest.approx([0.0063, 0.0175, -0.0238], abs=6e-5)
    assert loss_bal.item() == pytest.approx(0.9842, abs=6e-5)
    assert loss_bal.item() == pytest.approx(balanced_loss(), rel=1e-12)
    assert (1e4 * gradient).tolist() == pytest.approx([-5.5065, 10.2948, -4.7884], abs=6e-5)
    assert relative_difference([gradient], central_differences(vector, balanced_loss)) < 1e-6
    assert gradient.sum().abs() < 1e-15
