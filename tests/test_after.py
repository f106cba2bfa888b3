"""CDMAD, FlexDA and ADELLO, ACR, DARP followed by cRT: the numbers of methods_after.md, three
iterations by hand, what they are when switched off. (Resume, and that evaluate.py agrees with
training: test_rivals.py.)"""
from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, checkpoint, same, train
from replay import FixMatchReplay

import data
import evaluate
import models
from baselines import acr, adello, cdmad, darp, supervised
from baselines.darp_crt import DARPThenCRT
from baselines.train import configure, main, unlabeled_part
from support import augment
from train_fixmatch import fixmatch_loss

COUNTS = torch.tensor([70.0, 20.0, 10.0], dtype=torch.float64)
CIFAR = dict(mean=(0.4914, 0.4822, 0.4465), std=(0.2471, 0.2435, 0.2616))
LONG = {gamma: torch.tensor(data.class_counts(3000, 10, gamma), dtype=torch.float64)
        for gamma in (100, 150, 1)}
SMALL = "--iters 9 --gamma_u 100 --n1 100 --m1 100 --n_strong 2"
TRAINED = ("loss_x", "loss_u", "mask_rate", "pseudo_acc")


def approx(values, tolerance=6e-5):
    return pytest.approx(values, abs=tolerance)


def rows(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


class Heads(torch.nn.Module):
    """A network whose features are the logits of its heads, three each."""

    def __init__(self):
        super().__init__()
        self.classifier, self.auxiliary = (lambda z: z[..., :3]), (lambda z: z[..., 3:])
        self.norm = models.Norm(3, 0.1)
        cdmad.CDMAD.heads(self)

    def forward(self, x):
        return x


def method(kind, flags="", counts=COUNTS, features=None):
    """A method on three classes and 100 images, of which the first ten have labels."""
    cfg, _ = configure([*TINY.split(), *flags.split()])
    dataset = SimpleNamespace(num_classes=len(counts), labels=np.zeros(100),
                              test_images=torch.zeros(1, 3, 8, 8))
    ctx = SimpleNamespace(
        cfg=cfg, counts=counts, device="cpu", dataset=dataset, index_l=np.arange(10),
        index_u=np.arange(100), model=Heads(), ema=SimpleNamespace(model=Heads()),
        features=features, normalise=augment.Normalise(**CIFAR))
    return kind(ctx).double()


def batch(step, z_u, z_l=None, z_s=None, y_l=(2,), index_u=None):
    z = None if z_s is None else torch.cat([z_l, z_s])
    return SimpleNamespace(step=step, z_u=z_u, z=z, y_l=torch.tensor(y_l),
                           index_u=np.arange(50, 50 + len(z_u)) if index_u is None else index_u)


def plain_of(p, tau=0.95):
    """FixMatch's unlabeled loss with labels and mask of p, as the loop makes it."""
    confidence, y_u = p.max(1)
    return unlabeled_part(fixmatch_loss, y_u[:0], y_u, (confidence >= tau).double(), 1)


# ---------------------------------------------------------------------------------------------
# CDMAD: fixtures


WEAK, BLANK, STRONG = rows([2, 1, 0.5]), rows([1.2, 0.1, -0.6]), rows([1, 0, 0.5])


def cdmad_labels(step, blank=BLANK, flags=""):
    """(method, q) in a run of 100 iterations"""
    ours = method(cdmad.CDMAD, f"--method cdmad --iters 100 --tau 0.3 {flags}",
                  features=lambda x: blank)
    return ours, ours.refine(WEAK.softmax(1), batch(step, WEAK))


def test_cdmad_subtracts_the_blank_logits():
    ours, q = cdmad_labels(20)
    assert q[0].tolist() == approx([0.2894, 0.3199, 0.3907])
    assert WEAK.softmax(1)[0].tolist() == approx([0.6285, 0.2312, 0.1402])
    assert ours.unlabeled_loss(STRONG, plain_of(q), None).item() == approx(1.1955)
    assert ours.unlabeled_loss(STRONG.repeat(2, 1), None, None).item() == approx(1.1955)
    ours, q = cdmad_labels(20, flags="--cdmad_targets hard")
    assert ours.unlabeled_loss(STRONG, plain_of(q, 0.3), None).item() == approx(1.1803)


def test_cdmad_before_its_start_has_soft_labels_of_all_images():
    ours, q = cdmad_labels(19)
    assert torch.equal(q, WEAK.softmax(1)) and ours.ctx.cfg.tau == 0
    assert ours.unlabeled_loss(STRONG, None, None).item() == approx(0.9816)
    assert method(cdmad.CDMAD, "--method cdmad --iters 250000").start == 50_000
    hard, _ = configure("--method cdmad --cdmad_targets hard".split())
    assert hard.tau == 0.95


def test_cdmad_with_a_constant_answer_changes_nothing():
    _, q = cdmad_labels(20, rows([0.7, 0.7, 0.7]))
    torch.testing.assert_close(q, WEAK.softmax(1))


@pytest.mark.parametrize("image,expected", [
    ("ones", (1, 1, 1)), ("white", (2.0583, 2.1265, 2.1158)),
    ("black", (-1.9887, -1.9803, -1.7068))])
def test_cdmad_images(image, expected):
    ours = method(cdmad.CDMAD, f"--method cdmad --cdmad_image {image}")
    for network in (ours.ctx.model, ours.ctx.ema.model):
        assert network.blank.flatten().tolist() == approx(expected)


@pytest.fixture
def network():
    torch.manual_seed(0)
    model = models.build("wrn-10-1", 10, 0.1)
    cdmad.CDMAD.heads(model)
    for _ in range(3):
        model(torch.randn(20, 3, 8, 8))
    return model


@pytest.mark.parametrize("bn", ["batch1", "eval"])
def test_the_blank_image_goes_alone_and_leaves_no_trace(network, bn):
    """Without a process group a shared BatchNorm would raise."""
    ones, before = torch.ones(1, 3, 8, 8), deepcopy(network.state_dict())
    expected = deepcopy(network).train(bn == "batch1")(ones)
    assert not torch.allclose(expected, deepcopy(network).train(bn != "batch1")(ones), atol=1e-3)
    for norm in models.norms(network):
        norm.shared = True
    with models.frozen_bn_stats(network):
        b = cdmad.blank_logits(network, network.features, (8, 8), bn)
    torch.testing.assert_close(b, expected)
    assert same(before, network.state_dict())
    assert all(norm.shared and norm.training for norm in models.norms(network))


def test_cdmad_predicts_with_the_running_statistics(network):
    network.eval()
    x = torch.randn(4, 3, 12, 8)
    expected = network(x) - network(torch.ones(1, 3, 12, 8))
    torch.testing.assert_close(cdmad.CDMAD.predict(network, x), expected)


# ---------------------------------------------------------------------------------------------
# FlexDA and ADELLO: fixtures


Q, PI = rows(0.6, 0.3, 0.1), COUNTS / 100
SHIFTS = {  # t/T: Q_a, shift of labeled and of unlabeled rows, losses of one row each
    0: ("0.6 0.3 0.1", "0.1542 -0.4055 0", "0 0 0", 2.4365, 0.6803),
    0.5: ("0.5453 0.3187 0.1360", "0.2497 -0.4659 -0.3076", "0.0956 -0.0604 -0.3076", 2.7863,
          0.5424),
    1: ("0.3611 0.3370 0.3019", "0.6618 -0.5216 -1.1049", "0.5077 -0.1162 -1.1049", 3.8941,
        0.2762)}


def numbers(text):
    return [float(x) for x in text.split()]


def flexda_at(share, kind=adello.FlexDA, q=Q, flags=""):
    """The method in iteration `share` of 1000, with this Q."""
    name = kind.__name__.lower()
    ours = method(kind, f"--method {name} --iters 1000 --tau 0.95 {flags}")
    ours.Q.copy_(q)
    weak = rows([1, 0.5, 0])
    ours.refine(weak.softmax(1), batch(round(1000 * share), weak))
    return ours


@pytest.mark.parametrize("share", SHIFTS)
def test_flexda_shifts_and_losses(share):
    target, labeled, unlabeled, loss_x, loss_u = SHIFTS[share]
    ours = flexda_at(share)
    assert (Q.log() - ours.shift_u).exp().tolist() == approx(numbers(target))
    assert ours.shift_l.tolist() == approx(numbers(labeled))
    assert ours.shift_u.tolist() == approx(numbers(unlabeled))
    loss = ours.supervised_loss(rows([2, 1, 0]), torch.tensor([2]), 0)
    assert loss.item() == approx(loss_x)
    loss = ours.unlabeled_loss(STRONG, plain_of(rows([1, 0, 0])), None)
    assert loss.item() == approx(loss_u)


@pytest.mark.parametrize("share,alpha", [(0, 1), (0.25, 0.94375), (0.5, 0.775), (0.75, 0.49375),
                                         (1, 0.1)])
def test_exponent_of_the_target(share, alpha):
    _, shift = adello.shifts(PI, Q, share)
    target = Q.log() - shift                                  # log Q_a = alpha log Q + const
    slopes = (target[1:] - target[0]) / (Q[1:].log() - Q[0].log())
    assert slopes.tolist() == approx([alpha, alpha])


def test_a_class_that_is_never_predicted_has_finite_shifts_and_temperature():
    q = rows(0.7, 0.3, 0)
    assert all(shift.isfinite().all() for shift in adello.shifts(PI, q, 0.5))
    assert adello.temperature(q).isfinite()


def test_flexda_where_labels_and_unlabeled_images_are_alike_starts_as_fixmatch():
    ours, logits, y = flexda_at(0, q=PI), rows([2, 1, 0]), torch.tensor([2])
    assert ours.supervised_loss(logits, y, 0).item() == pytest.approx(
        F.cross_entropy(logits, y).item(), rel=1e-6)
    plain = plain_of(rows([1, 0, 0]))
    assert ours.unlabeled_loss(STRONG, plain, None).item() == pytest.approx(plain(STRONG).item())


@pytest.mark.parametrize("flag,T,loss", [("prior", 1.2719, 1.0788), ("none", 1, 1.0657)])
def test_adello_soft_loss(flag, T, loss):
    """One image below tau, one above, which adds nothing; two views."""
    ours = flexda_at(0.5, adello.ADELLO, flags=f"--adello_temperature {flag}")
    assert ours.T.item() == 1                                 # its start has been missed
    if flag == "prior":
        ours.T.copy_(adello.temperature(Q))
    assert ours.T.item() == approx(T)
    ours.p = rows([1, 0.5, 0], [9, 0, 0]).softmax(1)
    strong = torch.cat([STRONG.repeat(2, 1), rows([5, 1, 2], [0, 7, 0])])
    got = ours.extra_loss(batch(500, None, rows([0, 0, 0]), strong, index_u=()))
    assert got.item() == approx(loss / 2)
    assert ours.extra_loss(batch(190, None, index_u=())) == 0
    assert method(adello.ADELLO, "--method adello --iters 250000").start == 47_684


@pytest.mark.parametrize("flag", ["prior", "none"])
def test_adello_takes_its_temperature_once_and_before_the_update(flag):
    ours = method(adello.ADELLO, f"--method adello --iters 100 --adello_temperature {flag}")
    weak, expected = rows([4, 1, 0]), {}
    for step in range(30):
        expected[step] = adello.temperature(ours.Q).item() if flag == "prior" else 1
        ours.refine(weak.softmax(1), batch(step, weak))
        assert ours.T.item() == pytest.approx(1 if step < 19 else expected[19])
    assert flag == "none" or expected[18] < expected[19] < expected[29]


@pytest.mark.parametrize("counts,expected", [
    (LONG[100], 2.4839), (LONG[150], 2.8701), (LONG[1], 1),
    (LONG[100] / 2 + LONG[100].flip(0), 1.2258)])             # reversed, --pool union
def test_adello_temperature(counts, expected):
    assert adello.temperature(counts / counts.sum()).item() == approx(expected, 2e-3)


def test_flexda_estimates_by_a_running_mean():
    ours = method(adello.FlexDA, "--method flexda --iters 250000")
    p = Q.repeat(4, 1)
    ours.refine(p, batch(0, p))
    assert ours.Q.tolist() == approx([0.3336, 0.3333, 0.3331])
    assert ours.shift_l.tolist() == approx((PI * 3).log().tolist())            # Q of before
    for step in range(1, 1000):
        ours.refine(p, batch(step, p))
    assert ours.Q.tolist() == approx([0.5019, 0.3123, 0.1858])
    assert method(adello.FlexDA, "--method flexda --iters 900").memory == 10


@pytest.mark.parametrize("alpha,seen", [(1, 0.9), (0.5, 0.827), (0.1, 0.744)])
@pytest.mark.parametrize("flag", ["", "--adello_correct"])
def test_predictions_have_the_prior_of_the_target(flag, alpha, seen):
    """Two unit Gaussians at 1 and -1 with shares 0.9 and 0.1; p is the posterior under Q_a."""
    ours = method(adello.FlexDA, f"--method flexda --iters 100000 {flag}", rows(1, 1))
    ours.Q.copy_(rows(0.9, 0.1))
    x = torch.special.ndtri((torch.arange(1000) + 0.5) / 1000).double()
    x = torch.cat([(x + 1).repeat(9), x - 1])                                  # (10000,)
    logits = torch.stack([x, -x], 1) + alpha * ours.Q.log()
    p = ours.refine(logits.softmax(1), batch(round(1e5 * np.sqrt((1 - alpha) / 0.9)), x))
    assert torch.equal(p, logits.softmax(1))                  # labels are made of p as it is
    mean = (ours.Q - rows(0.9, 0.1)) * ours.memory + rows(0.9, 0.1)            # of this batch
    assert mean[0].item() == approx(0.9 if flag else seen, 1e-3)


# ---------------------------------------------------------------------------------------------
# ACR: fixtures


def strength(D):
    return (2 * D.softmax(0)[0]).item()


@pytest.mark.parametrize("w,expected,c", [
    ("consistent", (0, 0.7844, 3.1389), 0.0761), ("uniform", (0.7858, 0, 0.7858), 0.8144),
    ("reversed", (3.1389, 0.7844, 0), 1.7571)])
def test_acr_distances(w, expected, c):
    """Against the anchors of the labels; the unlabeled counts are rounded differently."""
    counts = torch.tensor(data.class_counts(1500, 10, 100), dtype=torch.float64)
    M = {"consistent": LONG[100], "uniform": LONG[1], "reversed": LONG[100].flip(0)}[w]
    D = acr.distances(M / M.sum(), acr.anchors(counts))
    assert D.tolist() == approx(expected, 2e-4) and strength(D) == approx(c)


def test_acr_strength():
    D = acr.distances(rows(0.5, 0.3, 0.2), acr.anchors(COUNTS))
    assert D.tolist() == approx([0.0886, 0.0696, 0.6554])
    assert strength(D) == approx(0.5342) and strength(D * 200 / 500) == approx(0.6160)
    a, w = acr.anchors(COUNTS).double(), rows(0.5, 0.3, 0.2)
    kl = [(w * (w / x).log()).sum() + (x * (x / w).log()).sum() for x in a]
    torch.testing.assert_close(D, torch.stack(kl) / 2, rtol=1e-6, atol=1e-6)
    assert acr.distances(rows(1, 0, 0), a).isfinite().all()


def test_acr_anchors_go_by_rank():
    assert acr.anchors(rows(20, 10, 70)).tolist() == [approx([0.2, 0.1, 0.7]), approx([1 / 3] * 3),
                                                      approx([0.2, 0.7, 0.1])]


@pytest.mark.parametrize("c,p1", [(0, "0.7361 0.0996 0.1643"), (2 / 3, "0.4698 0.1466 0.3836"),
                                  (1, "0.3294 0.1560 0.5145"), (2, "0.0736 0.1220 0.8044")])
def test_acr_labels_of_head_one(c, p1):
    ours, l1 = method(acr.ACR, "--method acr"), rows([3, 1, 1.5])
    ours.c.fill_(c)
    got = ours.refine(l1.softmax(1), batch(0, torch.cat([l1, rows([0, 0, 0])], 1)))
    assert got.argmax() == np.argmax(numbers(p1))
    assert got.sum().item() == approx(max(*numbers(p1), 0.7361))              # p1 or p0 is sure


@pytest.mark.parametrize("views", [1, 2])
def test_acr_losses_of_both_heads(views):
    ours = method(acr.ACR, f"--method acr --tau 0.95 --n_strong {views} --lambda_u 3")
    ours.c.fill_(0.5)
    weak = rows([5, 0, 0.5, 1, 0, 0], [2, 1.5, 1, 0.2, 0.1, 4.5])
    strong = rows([2, 0, 0, 0, 0, 1], [1, 1, 0, 0, 0.5, 1]).repeat_interleave(views, 0)
    p = ours.refine(weak[:, :3].softmax(1), batch(0, weak))
    assert (p.amax(1) >= 0.95).tolist() == [True, False] and p.argmax(1).tolist() == [0, 1]
    assert ours.mask.tolist() == [0, 1] and ours.y2.tolist() == [0, 2]
    assert ours.unlabeled_loss(strong[:, :3], plain_of(p), None).item() == approx(0.1198)
    got = ours.extra_loss(batch(0, weak, rows([2, 1, 0, 2, 1, 0]), strong))
    assert got.item() == approx(5.9241 + 3 * 0.3401, 3e-4)
    assert torch.equal(ours.predict(SimpleNamespace(features=lambda x: x, auxiliary=lambda z: -z),
                                    weak), -weak)


def test_acr_labels_of_head_two_are_head_ones():
    """softmax(l1 - 2 log pi) is sure of class 2; head 2 is unsure and prefers class 0."""
    ours = method(acr.ACR, "--method acr --tau 0.95")
    l1, l2 = rows([0, 0, 6]), rows([1, 0.5, 0])
    ours.refine(l1.softmax(1), batch(0, torch.cat([l1, l2], 1)))
    assert (ours.mask.tolist(), ours.y2.tolist()) == ([1], [2])


GUESSES = F.one_hot(torch.tensor([0, 0, 0, 1, 0, 2]), 3).double()


@pytest.mark.parametrize("presence,h,w", [
    (False, [2, 1, 0], (0.3367, 0.3333, 0.3300)), (True, [0, 1, 0], (0.3300, 0.3400, 0.3300))])
def test_acr_histogram(presence, h, w):
    sure, new = rows(1, 1, 1, 1, 0, 0), rows(1, 1, 0, 1, 1, 1)
    assert acr.histogram(GUESSES, sure * new, presence).tolist() == h
    ours = method(acr.ACR, "--method acr --iters 250000 --tau 0.95 --acr_histogram "
                  + ("presence" if presence else "count"))
    ours.estimate(GUESSES * (0.94 + 0.02 * sure[:, None]), new)
    assert ours.w.tolist() == approx(w)
    assert ours.D.tolist() == approx((acr.distances(ours.w, ours.anchors) / 500).tolist(), 1e-9)
    before = ours.w.clone(), ours.D.clone()
    ours.estimate(GUESSES * 0.94, new)                        # none is sure
    ours.estimate(GUESSES, torch.zeros(6))                    # all have labels
    assert torch.equal(ours.w, before[0]) and torch.equal(ours.D, before[1])


def test_acr_averages_its_distances_over_a_period():
    """1,500 steps: periods of three. c changes at their beginning, from the mean D of the last."""
    ours = method(acr.ACR, "--method acr --iters 1500 --eval_every 30 --tau 0.5")
    z, w, mean, steps = rows([0, 0, 0, 0, 0, 9]), np.full(3, 1 / 3), np.zeros(3), []
    a = np.array([[0.7, 0.2, 0.1], [1 / 3] * 3, [0.1, 0.2, 0.7]])
    for step in range(30, 42):
        if step % 3 == 0:
            mean, steps = np.sum(steps or [np.zeros(3)], axis=0) / 3, []
        ours.refine(z[:, :3].softmax(1), batch(step, z))
        assert ours.c.item() == pytest.approx(2 * np.exp(mean[0]) / np.exp(mean).sum())
        w = 0.9 * w + 0.1 * np.array([0, 0, 1])
        steps.append(((w - a) * np.log(w / a)).sum(1) / 2)


def test_acr_schedule_and_images_with_labels():
    """500 steps with an evaluation every 7: start at 7, periods of one step, memory of ten. Of two
    images the first has a label, so only the second, of class 2, is counted."""
    ours = method(acr.ACR, "--method acr --iters 500 --eval_every 7 --tau 0.5")
    z = rows([0, 0, 0, 9, 0, 0], [0, 0, 0, 0, 0, 9])
    w, a = np.full(3, 1 / 3), np.array([[0.7, 0.2, 0.1], [1 / 3] * 3, [0.1, 0.2, 0.7]])
    D = np.zeros(3)
    for step in range(10):
        c = 2 if step < 7 else 2 * np.exp(D[0]) / np.exp(D).sum()              # 2/3 at step 7
        ours.refine(z[:, :3].softmax(1), batch(step, z, index_u=np.array([3, 42])))
        assert ours.c.item() == pytest.approx(c)
        if step >= 7:
            w = 0.9 * w + 0.1 * np.array([0, 0, 1])
            D = ((w - a) * np.log(w / a)).sum(1) / 2
        assert ours.w.tolist() == pytest.approx(w) and ours.D.tolist() == pytest.approx(D)
    long = method(acr.ACR, "--method acr --iters 250000 --eval_every 500")
    assert (long.start, long.period, long.memory) == (3000, 500, 100)


# ---------------------------------------------------------------------------------------------
# three iterations by hand


class Replay(FixMatchReplay):
    """FixMatch by hand with other losses: subclasses have loss(step, logits of the weak views, of
    the labeled rows, of the strong views, labels), with those of all heads side by side."""
    second_head = False

    def __init__(self, flags):
        super().__init__(flags)
        if self.second_head:
            torch.manual_seed(0)
            self.model = models.build("wrn-10-1", 10, 0.02)
            self.model.auxiliary = torch.nn.Linear(64, 10)
            models.initialise(self.model.auxiliary)
            self.ema = {k: v.clone() for k, v in self.model.state_dict().items()}
            self.optimizer = torch.optim.Adam(self.model.parameters(), self.cfg.lr)
        index_l, _ = data.split(self.dataset, self.cfg)
        counts = np.bincount(self.dataset.labels[index_l])
        self.log_pi = torch.from_numpy(np.log(counts / counts.sum())).float()

    def heads(self, model, x):
        z = model.features(x)
        return [model.classifier(z), *([model.auxiliary(z)] if self.second_head else [])]

    def iterate(self, step):
        (x_l, y_l), (x_u, _) = self.take("labeled", step), self.take("unlabeled", step)
        with torch.no_grad():
            weak = self.heads(deepcopy(self.model), self.weak(x_u, "weak", step))
        x_s = augment.strong(x_u.repeat_interleave(2, 0), data.rng(0, "strong view", step),
                             self.normalise, 3, 4.0)
        logits = self.heads(self.model, torch.cat([self.weak(x_l, "labeled", step), x_s]))
        loss = self.loss(step, weak, [x[:6] for x in logits], [x[6:] for x in logits], y_l)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.average_and_decay()
        return {"loss": loss.item()}

    def masked(self, strong, y, kept):
        """Mean over all rows of H(y, strong) of images that are kept; two views."""
        rows = [F.cross_entropy(strong[2 * u + v][None], y[u][None]) for u in range(6)
                for v in (0, 1) if kept[u]]
        return sum(rows) / 12

    def soft(self, strong, targets, weights):
        return -sum(weights[r // 2] * (targets[r // 2] * strong[r].log_softmax(0)).sum()
                    for r in range(12)) / 12


class CDMADReplay(Replay):
    """The first of three iterations is before the start."""

    def loss(self, step, weak, labeled, strong, y_l):
        blank = deepcopy(self.model)(torch.ones(1, 3, 8, 8)).detach() if step else 0
        q = (weak[0] - blank).softmax(1)
        return F.cross_entropy(labeled[0], y_l) + self.soft(strong[0], q, torch.ones(6))


class ADELLOReplay(Replay):
    """L_c from the second of three iterations on."""
    Q, T = torch.full((10,), 0.1), None

    def loss(self, step, weak, labeled, strong, y_l):
        target = self.Q ** (1 - 0.9 * (step / 3) ** 2)
        target = target / target.sum()
        p, up = weak[0].softmax(1), (self.Q / target).log()
        kept = p.amax(1) >= self.cfg.tau
        loss = F.cross_entropy(labeled[0] + self.log_pi - target.log(), y_l)
        loss = loss + self.cfg.lambda_u * self.masked(strong[0] + up, p.argmax(1), kept)
        if step >= 1:
            if self.T is None:
                self.T = float(np.exp(-np.log(10 * self.Q.numpy()).mean()))
            loss = loss + self.soft((strong[0] + up) / self.T, (weak[0] / self.T).softmax(1),
                                    1 - kept.float())
        self.Q = 0.9 * self.Q + 0.1 * p.mean(0)
        return loss


class ACRReplay(Replay):
    """Start after the first iteration. No class has been seen then, so c is 2, 2/3, then by w."""
    second_head, w, D = True, np.full(10, 0.1), np.zeros(3)

    def loss(self, step, weak, labeled, strong, y_l):
        (l1, l2), tau, pi = weak, self.cfg.tau, self.log_pi.exp().double().numpy()
        reverse = np.empty(10)
        reverse[np.argsort(pi, kind="stable")] = -np.sort(-pi)
        self.c = c = 2 if step == 0 else 2 * np.exp(self.D[0]) / np.exp(self.D).sum()
        p0, p1, p12, p2 = (x.softmax(1) for x in (
            l1, l1 - c * self.log_pi, l1 - 2 * self.log_pi, l2))
        sure, self.D = p2.amax(1) >= tau, np.zeros(3)
        if step >= 1 and sure.any():
            h = np.bincount(p2.argmax(1)[sure], minlength=10) / sure.sum().item()
            self.w = 0.9 * self.w + 0.1 * h
            self.D = np.array([((self.w - a) * np.log(self.w / a)).sum() / 2
                               for a in (pi, np.full(10, 0.1), reverse)])
        keep1 = (p1.amax(1) >= tau) | (p0.amax(1) >= tau)
        keep2 = (p2.amax(1) >= tau) | (p12.amax(1) >= tau)
        return (F.cross_entropy(labeled[0], y_l)
                + F.cross_entropy(labeled[1] + 2 * self.log_pi, y_l)
                + self.cfg.lambda_u * (self.masked(strong[0], p1.argmax(1), keep1)
                                       + self.masked(strong[1], p12.argmax(1), keep2)))


@pytest.mark.parametrize("name,replay,tau", [
    ("cdmad", CDMADReplay, 0.2), ("adello", ADELLOReplay, 0.22), ("acr", ACRReplay, 0.26)])
def test_three_iterations_by_hand(tmp_path, name, replay, tau):
    flags = (f"--tau {tau} --n_strong 2 --iters 3 --eval_every 1 --ema 0.5 --weight_decay 5 "
             f"--lambda_u {1 if name == 'cdmad' else 2}")
    losses = []
    state = train(tmp_path, f"{flags} --method {name}", main,
                  lambda step, values: losses.append({"loss": values["loss"].item()}))
    if name != "cdmad":
        assert any(0 < row["mask_rate"] < 1 for row in state["history"])
    by_hand = replay(f"{flags} --method none")
    by_hand.compare(state | {"attractor": by_hand.attractor.state_dict()}, losses)
    if name == "adello":
        torch.testing.assert_close(state["method"]["Q"], by_hand.Q)
        assert state["method"]["T"].item() == pytest.approx(by_hand.T, rel=1e-5)
    if name == "acr":
        assert 2 / 3 < by_hand.c < 0.9                        # of a w that is not uniform
        assert state["method"]["c"].item() == pytest.approx(by_hand.c, rel=1e-4)
        assert state["method"]["w"].tolist() == pytest.approx(by_hand.w)
        assert state["method"]["D"].tolist() == pytest.approx(by_hand.D, rel=1e-4)


# ---------------------------------------------------------------------------------------------
# switched off


def switched_off(ours, plain):
    """Weights, moments and what the log says of training are those of the base method."""
    for part in ("model", "ema"):
        assert same({k: ours[part][k] for k in plain[part]}, plain[part])
    mine, theirs = ours["optimizer"]["state"], plain["optimizer"]["state"]
    assert same({k: mine[k] for k in theirs}, theirs)
    for a, b in zip(ours["history"], plain["history"], strict=True):
        assert same([a[key] for key in TRAINED], [b[key] for key in TRAINED])


def test_cdmad_with_hard_labels_before_its_start_is_fixmatch(tmp_path, finished, monkeypatch):
    """But for the subtraction at test time."""
    monkeypatch.setattr(cdmad, "START", 1)
    state = train(tmp_path, f"{SMALL} --tau 0.2 --method cdmad --cdmad_targets hard", main)
    switched_off(state, checkpoint(finished(f"{SMALL} --tau 0.2 --method none")))
    run, x = evaluate.load_run(tmp_path), torch.randn(4, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(run.predict(x), run.model(x) - run.model(torch.ones_like(x)))


def test_acr_without_its_second_head_and_strength_is_fixmatch(tmp_path, finished, monkeypatch):
    monkeypatch.setattr(acr, "STRENGTH", 0.0)
    monkeypatch.setattr(acr.ACR, "extra_loss", lambda self, batch: 0)
    state = train(tmp_path, f"{SMALL} --tau 0.2 --method acr", main)
    switched_off(state, checkpoint(finished(f"{SMALL} --tau 0.2 --method none")))
    assert not torch.allclose(state["method"]["w"], torch.tensor(0.1))         # it did estimate


def test_flexda_without_its_shifts_is_fixmatch(tmp_path, finished, monkeypatch):
    monkeypatch.setattr(adello, "shifts", lambda pi, Q, share: (torch.zeros_like(Q),) * 2)
    state = train(tmp_path, f"{SMALL} --tau 0.2 --method flexda", main)
    switched_off(state, checkpoint(finished(f"{SMALL} --tau 0.2 --method none")))
    assert not torch.allclose(state["method"]["Q"], torch.tensor(0.1))         # it did estimate


def test_adello_where_all_images_are_sure_is_flexda(tmp_path, finished):
    ours, plain = (checkpoint(finished(f"{SMALL} --tau 0 --method {m}"))
                   for m in ("adello", "flexda"))
    switched_off(ours, plain)
    assert torch.equal(ours["method"]["Q"], plain["method"]["Q"])


def test_flexda_starts_as_logit_adjustment_of_labeled_rows(tmp_path):
    """Q is uniform then: log(pi / Q) is log pi and a constant, log(Q / Q) is 0."""
    first = {}
    for name in ("flexda", "la", "none"):
        def note(step, values, name=name):
            first[name] = [values[key].item() for key in ("loss_x", "loss_u")]
        train(tmp_path / name, f"{SMALL} --iters 1 --tau 0.2 --method {name}", main, note)
    assert first["flexda"] == pytest.approx(first["la"], rel=1e-5)
    assert first["la"][0] != pytest.approx(first["none"][0], rel=1e-3)


# ---------------------------------------------------------------------------------------------
# DARP, then cRT


def test_crt_weights():
    weights = supervised.inverse_frequency_weights(COUNTS)
    assert weights.tolist() == approx([0.2609, 0.9130, 1.8261])
    cfg = SimpleNamespace(iters=20, crt_iters=4, darp_warm=0.5, base="fixmatch")
    ours = DARPThenCRT(SimpleNamespace(
        cfg=cfg, counts=COUNTS, device="cpu", index_u=np.arange(5),
        dataset=SimpleNamespace(num_classes=3, labels=np.zeros(5))))
    logits, y = rows([2, 1, 0]), torch.tensor([2])
    assert ours.base(0) == "fixmatch" and ours.start == 8 and ours.milestones == (16,)
    assert ours.supervised_loss(logits, y, 0).item() == approx(2.4076)
    ours.second_stage = True
    assert ours.supervised_loss(logits, y, 0).item() == approx(4.3965)
    assert ours.base(0) == "supervised"


FIRST = f"{SMALL} --tau 0.2 --iters 5 --darp_warm 0.4 --darp_period 2"


def test_the_first_stage_is_darp_and_the_second_leaves_the_network(finished):
    """The second starts from the first one's EMA, all of which but the classifier stays."""
    alone = checkpoint(finished(f"{FIRST} --method darp"))
    ours = checkpoint(finished(f"{FIRST} --method darp_crt --crt_iters 4"))
    assert same({k: ours["method"][k] for k in "QRt"}, {k: alone["method"][k] for k in "QRt"})
    for key, value in alone["ema"].items():
        for part in ("model", "ema"):
            assert torch.equal(ours[part][key], value) != key.startswith("classifier"), key
    in_common = [[row[key] for key in TRAINED] for row in ours["history"] if row["iter"] <= 5]
    assert same(in_common, [[row[key] for key in TRAINED] for row in alone["history"]])
    assert [row["loss_u"] for row in ours["history"]][-2:] == [0, 0]           # labels alone


def test_the_estimate_takes_a_share_of_the_first_stage(tmp_path, monkeypatch):
    asked = []

    def estimate(ctx, iters):
        asked.append(iters)
        return torch.full((10,), 24.2, dtype=torch.float64)
    monkeypatch.setattr(darp, "estimate_counts", estimate)
    train(tmp_path, f"{FIRST} --method darp_crt --crt_iters 4 --darp_estimate", main)
    assert asked == [5]
