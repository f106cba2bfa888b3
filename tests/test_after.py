"""Logit adjustment, the methods published after or beside L2AC, and the two ablations of L2AC:
losses and labels against numpy, three iterations by hand, what they are when switched off."""
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from comparison import COUNTS, PI, build, cross_entropy, rows, softmax
from conftest import checkpoint, same, train
from replay import FixMatch, compare

import models
from baselines import Batch, acr, adello, cdmad
from baselines.train import main, unlabeled_part
from train_fixmatch import fixmatch_loss

SMALL = "--iters 9 --gamma_u 100 --n1 100 --m1 100 --n_strong 2"
EQUAL, REVERSED = np.full(3, 1 / 3), PI[::-1].copy()


# ---------------------------------------------------------------------------------------------
# logit adjustment


@pytest.mark.parametrize("name,labeled,unlabeled,test", [
    ("none", 0, 0, 0), ("la", 1, 0, 0), ("la_all", 1, 1, 0), ("la_post_hoc", 0, 0, -1)])
def test_where_log_shares_are_added(name, labeled, unlabeled, test):
    """Two labeled images, two others of which one is sure enough, test images."""
    networks = [models.build("wrn-10-1", 3) for _ in range(2)]
    if name == "la_post_hoc":
        for network in networks:
            network.register_buffer("log_prior", torch.zeros(3))
    method = build(f"--method {name}", model=networks[0],
                   ema=type("EMA", (), {"model": networks[1]}))
    log = np.log(PI)
    logits, y = rows([2, 1, 0], [0, 1, 1]).requires_grad_(), torch.tensor([0, 2])
    loss = method.supervised_loss(logits, y, 0)
    shifted = logits.detach().numpy() + labeled * log
    assert loss.item() == pytest.approx(cross_entropy(shifted, y.numpy()).mean(), rel=1e-6)
    loss.backward()
    np.testing.assert_allclose(logits.grad, (softmax(shifted) - np.eye(3)[y]) / 2, rtol=1e-5)
    plain = unlabeled_part(fixmatch_loss, y[:0], torch.tensor([2, 0]), rows(1, 0), 1)
    views = rows([0.5, 0, 1.5], [1, 0, 0])
    expected = cross_entropy(views.numpy() + unlabeled * log, np.array([2, 0]))[0] / 2
    assert method.unlabeled_loss(views, plain, None).item() == pytest.approx(expected, rel=1e-6)
    x = torch.randn(4, 3, 8, 8)
    for network in networks:
        network.eval()
        torch.testing.assert_close(method.predict(network, x),
                                   network(x) + test * torch.from_numpy(log).float())


# ---------------------------------------------------------------------------------------------
# CDMAD


def test_cdmad_predicts_by_the_difference_to_a_blank_image():
    network = models.build("wrn-10-1", 3).eval()
    x, ones = torch.randn(4, 3, 8, 12), torch.ones(1, 3, 8, 12)
    expected = network(x) - network(ones)
    torch.testing.assert_close(cdmad.CDMAD.predict(network, x), expected)


# ---------------------------------------------------------------------------------------------
# FlexDA and ADELLO


def test_a_class_that_is_never_predicted_has_finite_shifts_and_temperature():
    method = build("--method adello --iters 1000")
    method.Q.copy_(rows(0.7, 0.3, 0))
    method.refine(rows([1, 0.5, 0]).softmax(1), Batch(method.start, None, None))
    assert all(x.isfinite().all() for x in (method.shift_l, method.shift_u, method.T))
    assert method.T != 1


def test_flexda_estimates_by_a_running_mean():
    """With the memory m each of n batches moves Q by 1/m of what is missing."""
    method, Q = build("--method flexda --iters 250000"), np.array([0.6, 0.3, 0.1])
    for step in range(100):
        method.refine(torch.from_numpy(Q).repeat(4, 1), Batch(step, None, None))
    np.testing.assert_allclose(method.Q, Q + (EQUAL - Q) * (1 - 1 / 1000) ** 100, rtol=1e-6)


def test_adello_soft_loss():
    """One image below tau, one above, which adds nothing; two views."""
    method = build("--method adello --iters 1000")
    T, shift = 1.3, np.array([0.3, -0.1, 0.2])
    method.T, method.shift_u = torch.tensor(T).double(), torch.from_numpy(shift)
    p = softmax(np.array([[1, 0.5, 0], [9, 0, 0]]))
    strong = np.array([[1, 0, 0.5], [0, 1, 0], [5, 1, 2], [0, 7, 0]])
    batch = Batch(500, None, torch.tensor([2]), p=torch.from_numpy(p), mask=rows(0, 1),
                  z=torch.cat([torch.zeros(1, 3), torch.from_numpy(strong)]))
    target = p[:1] ** (1 / T)
    target = np.repeat(target / target.sum(), 2, axis=0)
    expected = cross_entropy((strong[:2] + shift) / T, target).sum() / 4
    assert method.extra_loss(batch).item() == pytest.approx(expected, rel=1e-6)


# ---------------------------------------------------------------------------------------------
# ACR


def divergences(w):
    """(KL(w || a) + KL(a || w)) / 2 for the three anchors."""
    def kl(p, q):
        return (p * np.log(p / q)).sum()
    return np.array([(kl(w, a) + kl(a, w)) / 2 for a in (PI, EQUAL, REVERSED)])


def strength(D):
    """Of the shift: two times the first entry of softmax D."""
    return 2 * np.exp(D[0]) / np.exp(D).sum()


def test_the_reverse_of_acr_goes_by_rank_and_not_by_the_number_of_the_class():
    np.testing.assert_allclose(acr.anchors(rows(20, 10, 70)),
                               [[0.2, 0.1, 0.7], EQUAL, [0.2, 0.7, 0.1]], rtol=1e-6)
    assert acr.distances(rows(1, 0, 0), acr.anchors(COUNTS)).isfinite().all()


def test_acr_labels_of_both_heads():
    """They come from l1 - c log pi, at first with c = 2. For head 1 as sure as that or as l1; for
    head 2 the first one counts because l2 is sure, the second by itself."""
    method, shifted = build("--method acr --tau 0.95"), np.array([[1, 0, 0], [0, 9, 0], [0, 1, 0]])
    l1, l2 = 2 * np.log(PI) + shifted, np.array([[0, 0, 9], [0, 0, 0], [1, 0, 0]])
    z_u = torch.from_numpy(np.concatenate([l1, l2], 1))
    p = method.refine(torch.from_numpy(softmax(l1)), Batch(0, None, None, z_u=z_u))
    np.testing.assert_allclose(p.amax(1), np.maximum(softmax(l1), softmax(shifted)).max(1))
    assert method.mask.tolist() == [1, 1, 0] and method.y2.tolist() == [0, 1, 1]


@pytest.mark.parametrize("iters,start,period", [(1500, 30, 3), (500, 7, 1)])
def test_acr_schedule(iters, start, period):
    """It starts after an epoch at the earliest. c changes when a period of 0.2 % of the run begins,
    from the mean D of the last one (none at first: 2/3). Of two images, only the second, of class
    2, has no label, and it is sure in every second step."""
    method = build(f"--method acr --iters {iters} --eval_every {start} --tau 0.5")
    z = rows([0, 0, 0, 9, 0, 0], [0, 0, 0, 0, 0, 9])
    w, c, D = EQUAL, 2, []
    for step in range(start - 2, start + 4 * period):
        if step >= start and (step - start) % period == 0:
            c, D = strength(np.sum(D, axis=0) / period if D else np.zeros(3)), []
        z_u, sure = z * (step % 2), step % 2 == 1
        method.refine(z_u[:, :3].softmax(1), Batch(step, None, None, np.array([3, 42]), z_u=z_u))
        if step >= start and sure:
            w = 0.9 * w + 0.1 * np.array([0, 0, 1])           # a memory of ten steps at least
            D.append(divergences(w))
        assert method.c.item() == pytest.approx(c, rel=1e-6)
        assert method.w.tolist() == pytest.approx(w)
    long = build("--method acr --iters 250000 --eval_every 500")
    assert (long.start, long.period, long.memory) == (3000, 500, 100)


# ---------------------------------------------------------------------------------------------
# three iterations by hand


class CDMAD(FixMatch):
    """The first of three iterations is before the start."""

    def lower(self, step, y_l, x_w):
        blank = self.guess(torch.ones(1, 3, 8, 8)) if step else 0
        q = (self.guess(x_w) - blank).softmax(1)

        def lower(logits):
            loss_x = F.cross_entropy(logits[:6], y_l)
            loss_u = self.soft(logits[6:], q, torch.ones(6))
            return loss_x + self.cfg.lambda_u * loss_u, loss_x, loss_u
        return lower


class ADELLO(FixMatch):
    """L_c from the second of three iterations on; a memory of ten steps."""
    Q, T = torch.full((10,), 0.1), None

    def lower(self, step, y_l, x_w):
        target = self.Q ** (1 - 0.9 * (step / 3) ** 2)
        target = target / target.sum()
        weak, shift = self.guess(x_w), (self.Q / target).log()
        p = weak.softmax(1)
        kept = p.amax(1) >= self.cfg.tau
        if step == 1:
            self.T = float(np.exp(-np.log(10 * self.Q.numpy()).mean()))
        self.Q = 0.9 * self.Q + 0.1 * p.mean(0)

        def lower(logits):
            strong = logits[6:] + shift
            loss_x = F.cross_entropy(logits[:6] + self.log_pi - target.log(), y_l)
            loss_u = self.masked(strong, p.argmax(1), kept)
            loss = loss_x + self.cfg.lambda_u * loss_u
            if step >= 1:
                q = (weak / self.T).softmax(1)
                loss = loss + self.soft(strong / self.T, q, 1 - kept.float())
            return loss, loss_x, loss_u
        return lower


class ACR(FixMatch):
    """Start after the first iteration. No class has been seen then, so c is 2, 2/3, then by w."""
    w, D = np.full(10, 0.1), np.zeros(3)

    def add_heads(self):
        self.model.auxiliary = torch.nn.Linear(64, 10)
        models.initialise(self.model.auxiliary)

    def logits(self, z):
        """Both heads, one beside the other."""
        return torch.cat([self.model.classifier(z), self.model.auxiliary(z)], 1)

    def lower(self, step, y_l, x_w):
        l1, l2 = self.guess(x_w).split(10, 1)
        tau, pi = self.cfg.tau, self.log_pi.exp().double().numpy()
        reverse = np.empty(10)
        reverse[np.argsort(pi, kind="stable")] = -np.sort(-pi)
        c = self.c = 2 if step == 0 else strength(self.D)
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

        def lower(logits):
            one, two = logits.split(10, 1)
            loss_x = F.cross_entropy(one[:6], y_l)
            loss_u = self.masked(one[6:], p1.argmax(1), keep1)
            loss_x2 = F.cross_entropy(two[:6] + 2 * self.log_pi, y_l)
            loss_u2 = self.masked(two[6:], p12.argmax(1), keep2)
            return loss_x + loss_x2 + self.cfg.lambda_u * (loss_u + loss_u2), loss_x, loss_u
        return lower


@pytest.mark.parametrize("name,replay,tau", [
    ("attractor", FixMatch, 0.2), ("single_level", FixMatch, 0.2),
    ("attractor --attractor vector --attractor_start prior", FixMatch, 0.2),
    ("cdmad", CDMAD, 0.2), ("adello", ADELLO, 0.22), ("acr", ACR, 0.26), ("acr", ACR, 0.2)])
def test_three_iterations_by_hand(tmp_path, name, replay, tau):
    state, by_hand = compare(
        replay, tmp_path, f"--method {name} --tau {tau} --n_strong 2 --lambda_u 2")
    if (name, tau) == ("acr", 0.2):
        assert by_hand.c > 0.667                              # of a w that is not uniform
        assert state["method"]["c"].item() == pytest.approx(by_hand.c, rel=1e-4)
    elif name == "cdmad":
        assert all(row["kept"] == 1 for row in state["history"])               # whatever tau is
    else:
        assert any(0 < row["kept"] < 1 for row in state["history"])


# ---------------------------------------------------------------------------------------------
# switched off


OFF = {  # what is replaced, by what
    "cdmad": [(cdmad, "START", 1)], "la_post_hoc": [],
    "flexda": [(adello, "shifts", lambda pi, Q, share: (0 * Q, 0 * Q))],
    "acr": [(acr, "STRENGTH", 0.0), (acr.ACR, "extra_loss", lambda self, batch: 0)]}


@pytest.mark.parametrize("name", OFF)
def test_a_method_that_is_switched_off_is_fixmatch(tmp_path, finished, monkeypatch, name):
    """CDMAD with hard labels and before its start; post-hoc adjustment, which trains nothing else;
    FlexDA without shifts; ACR without a shift and without the loss of its second head. Weights,
    moments and what the log says of training are those of the base method."""
    for replaced in OFF[name]:
        monkeypatch.setattr(*replaced)
    flags = f"{SMALL} --tau 0.2 --method {name}" + " --labels hard" * (name == "cdmad")
    ours = train(tmp_path, flags, main)
    plain = checkpoint(finished(f"{SMALL} --tau 0.2 --method none"))
    for part in ("model", "ema"):
        assert same({k: ours[part][k] for k in plain[part]}, plain[part])
    moments = plain["optimizer"]["state"]
    assert same({k: ours["optimizer"]["state"][k] for k in moments}, moments)
    keys = ("loss_x", "loss_u", "kept", "right")
    for a, b in zip(ours["history"], plain["history"], strict=True):
        assert same([a[key] for key in keys], [b[key] for key in keys])
    estimate = ours["method"].get({"acr": "w", "flexda": "Q"}.get(name))
    assert estimate is None or not torch.allclose(estimate, torch.tensor(0.1))     # it did estimate


# ---------------------------------------------------------------------------------------------
# DARP, then cRT

FIRST = f"{SMALL} --tau 0.2 --iters 5"


def test_the_first_stage_is_darp_and_the_second_leaves_the_network(finished):
    """The second starts from the first one's EMA, all of which but the classifier stays."""
    alone = checkpoint(finished(f"{FIRST} --method darp"))
    ours = checkpoint(finished(f"{FIRST} --method darp_crt --crt_iters 4"))
    assert same({k: ours["method"][k] for k in "QRt"}, {k: alone["method"][k] for k in "QRt"})
    for key, value in alone["ema"].items():
        for part in ("model", "ema"):
            assert torch.equal(ours[part][key], value) != key.startswith("classifier"), key
    assert [row["loss_u"] for row in ours["history"]][-2:] == [0, 0]           # labels alone
    assert build("--method darp_crt --iters 20 --crt_iters 4").start == 8      # 0.4 of 20, not 24
