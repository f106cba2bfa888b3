"""Logit adjustment, the methods published after or beside L2AC, and the two ablations of L2AC:
losses and labels against numpy, three iterations by hand, what they are when switched off."""
from copy import deepcopy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from comparison import COUNTS, PI, Replay, build, cross_entropy, rows, softmax
from conftest import checkpoint, same, train

import models
import train_fixmatch
from attractor import BiasAttractor
from baselines import Batch, acr, adello, cdmad
from baselines.train import main, unlabeled_part
from train_fixmatch import fixmatch_loss

SMALL = "--iters 9 --gamma_u 100 --n1 100 --m1 100 --n_strong 2"
WEAK, STRONG = rows([2, 1, 0.5]), rows([1, 0, 0.5])
EQUAL, REVERSED = np.full(3, 1 / 3), PI[::-1].copy()


def plain_of(p, tau=0.95):
    """FixMatch's unlabeled loss with labels and mask of p, as the loop makes it."""
    confidence, y_u = p.max(1)
    return unlabeled_part(fixmatch_loss, y_u[:0], y_u, (confidence >= tau).double(), 1)


def run(out, flags, script=main):
    """(checkpoint, losses of each iteration)"""
    losses = []
    state = train(out, flags, script, lambda step, values: losses.append(
        {name: value.item() for name, value in values.items()}))
    return state, losses


# ---------------------------------------------------------------------------------------------
# logit adjustment


@pytest.mark.parametrize("name,labeled,unlabeled,test", [
    ("none", 0, 0, 0), ("la", 1, 0, 0), ("la_all", 1, 1, 0), ("la_post_hoc", 0, 0, -1)])
@pytest.mark.parametrize("counts", [COUNTS, rows(7, 7, 7)], ids=["skewed", "balanced"])
def test_where_log_shares_are_added(name, labeled, unlabeled, test, counts):
    """Two labeled images, two others of which one is sure enough, a test image. With balanced
    labels the shift is a constant and every variant is the base."""
    networks = [models.build("wrn-10-1", 3) for _ in range(2)]
    if name == "la_post_hoc":
        for network in networks:
            network.register_buffer("log_prior", torch.zeros(3))
    method = build(f"--method {name}", counts, model=networks[0],
                   ema=type("EMA", (), {"model": networks[1]}))
    log = np.log(counts.numpy() / counts.sum().item())
    logits, y = rows([2, 1, 0], [0, 1, 1]).requires_grad_(), torch.tensor([0, 2])
    loss = method.supervised_loss(logits, y, 0)
    shifted = logits.detach().numpy() + labeled * log
    assert loss.item() == pytest.approx(cross_entropy(shifted, y.numpy()).mean(), rel=1e-6)
    loss.backward()
    np.testing.assert_allclose(logits.grad, (softmax(shifted) - np.eye(3)[y]) / 2, rtol=1e-5)
    plain, views = plain_of(rows([0, 0, 4], [1, 0.5, 0]).softmax(1)), rows([0.5, 0, 1.5], [1, 0, 0])
    expected = cross_entropy(views.numpy() + unlabeled * log, np.array([2, 0]))[0] / 2
    assert method.unlabeled_loss(views, plain, None).item() == pytest.approx(expected, rel=1e-6)
    x = torch.randn(4, 3, 8, 8)
    for network in networks:
        network.eval()
        torch.testing.assert_close(method.predict(network, x),
                                   network(x) + test * torch.from_numpy(log).float())


def test_all_rows_is_an_attractor_that_stays_at_the_prior(tmp_path):
    """L2AC with eta = 0 and the K-vector that starts at the prior: the same losses."""
    flags = f"{SMALL} --iters 4 --tau 0.2"
    _, losses = run(tmp_path / "la", f"{flags} --method la_all")
    _, theirs = run(tmp_path / "l2ac", f"{flags} --attractor vector --attractor_start prior "
                    "--eta 0", train_fixmatch.main)
    for a, b in zip(losses, theirs, strict=True):
        assert a == pytest.approx({name: b[name] for name in a}, rel=1e-3)


# ---------------------------------------------------------------------------------------------
# CDMAD


@pytest.mark.parametrize("step,blank", [(19, 0), (20, 1), (99, 1)])
def test_cdmad_subtracts_the_blank_logits(step, blank):
    """From a fifth of 100 iterations on. Soft labels of all images, two views of each."""
    b = np.array([[1.2, 0.1, -0.6]])
    method = build("--method cdmad --iters 100 --tau 0.3", features=lambda x: torch.from_numpy(b))
    batch = Batch(step, torch.zeros(6, 3, 8, 8), None, z_u=WEAK)
    batch.p = method.refine(WEAK.softmax(1), batch)
    q = softmax(WEAK.numpy() - blank * b)
    np.testing.assert_allclose(batch.p, q)
    loss = method.unlabeled_loss(STRONG.repeat(2, 1), None, batch).item()
    assert loss == pytest.approx(cross_entropy(STRONG.numpy(), q)[0])
    assert method.ctx.cfg.tau == 0


def test_the_blank_image_goes_alone():
    """In training by its own statistics, at test time by the running ones."""
    torch.manual_seed(0)
    network = models.build("wrn-10-1", 3, 0.1)
    for _ in range(3):
        network(torch.randn(20, 3, 8, 8))
    method = build("--method cdmad --iters 100", model=network, features=network.features)
    x, ones = torch.randn(4, 3, 8, 12), torch.ones(1, 3, 8, 12)
    with torch.no_grad():
        z_u, b = deepcopy(network).features(x), deepcopy(network)(ones)
        expected = (network.classifier(z_u) - b).softmax(1)
        p = method.refine(None, Batch(50, x, None, z_u=z_u))
        torch.testing.assert_close(p, expected)
        network.eval()
        torch.testing.assert_close(method.predict(network, x), network(x) - network(ones))
        assert not torch.allclose(network(ones), b, atol=1e-3)


# ---------------------------------------------------------------------------------------------
# FlexDA and ADELLO

Q = np.array([0.6, 0.3, 0.1])


def flexda_at(share, name="flexda", q=Q):
    """The method in iteration `share` of 1000, with this Q."""
    method = build(f"--method {name} --iters 1000 --tau 0.95")
    method.Q.copy_(torch.from_numpy(q))
    method.refine(rows([1, 0.5, 0]).softmax(1), Batch(round(1000 * share), None, None))
    return method


def target_prior(share, q=Q):
    powers = q ** (1 - 0.9 * share ** 2)
    return powers / powers.sum()


@pytest.mark.parametrize("share", [0, 0.25, 0.5, 1])
def test_flexda_losses(share):
    method, q_a = flexda_at(share), target_prior(share)
    loss = method.supervised_loss(rows([2, 1, 0]), torch.tensor([2]), 0).item()
    expected = cross_entropy(np.array([[2, 1, 0]]) + np.log(PI / q_a), np.array([2]))[0]
    assert loss == pytest.approx(expected, rel=1e-6)
    loss = method.unlabeled_loss(STRONG, plain_of(rows([1, 0, 0])), None).item()
    expected = cross_entropy(STRONG.numpy() + np.log(Q / q_a), np.array([0]))[0]
    assert loss == pytest.approx(expected, rel=1e-6)


def test_a_class_that_is_never_predicted_has_finite_shifts_and_temperature():
    method = build("--method adello --iters 1000")
    method.Q.copy_(rows(0.7, 0.3, 0))
    method.refine(rows([1, 0.5, 0]).softmax(1), Batch(method.start, None, None))
    assert all(x.isfinite().all() for x in (method.shift_l, method.shift_u, method.T))
    assert method.T != 1


def test_flexda_estimates_by_a_running_mean():
    """With the memory m each of n batches moves Q by 1/m of what is missing."""
    method, p = build("--method flexda --iters 250000"), torch.from_numpy(Q).repeat(4, 1)
    for step in range(100):
        shift = np.log(PI / target_prior(step / 250_000, method.Q.numpy()))    # Q of before
        method.refine(p, Batch(step, None, None))
        np.testing.assert_allclose(method.shift_l, shift, atol=1e-6)
    np.testing.assert_allclose(method.Q, Q + (EQUAL - Q) * (1 - 1 / 1000) ** 100, rtol=1e-6)


def test_adello_soft_loss():
    """One image below tau, one above, which adds nothing; two views. Before its start there is
    none: 19 % of the run are 50,000 of 262,144 iterations."""
    method = flexda_at(0.5, "adello")
    T = method.T = torch.tensor(1.3).double()
    p = softmax(np.array([[1, 0.5, 0], [9, 0, 0]]))
    strong = np.array([[1, 0, 0.5], [0, 1, 0], [5, 1, 2], [0, 7, 0]])
    batch = Batch(500, None, torch.tensor([2]), p=torch.from_numpy(p), mask=rows(0, 1),
                  z=torch.cat([torch.zeros(1, 3), torch.from_numpy(strong)]))
    target = p[:1] ** (1 / T.item())
    logits = (strong[:2] + np.log(Q / target_prior(0.5))) / T.item()
    expected = cross_entropy(logits, np.repeat(target / target.sum(), 2, axis=0)).sum() / 4
    assert method.extra_loss(batch).item() == pytest.approx(expected, rel=1e-6)
    batch.step = 190                                          # of 191 = 1000 * 50,000 / 262,144
    assert method.extra_loss(batch) == 0


def test_adello_takes_its_temperature_once_and_before_the_update():
    """T = exp KL(uniform || Q) of the Q that 19 of 100 batches have made."""
    method, p = build("--method adello --iters 100"), softmax(np.array([[4, 1, 0]]))
    for step in range(30):
        method.refine(torch.from_numpy(p), Batch(step, None, None))
        q = p[0] + (EQUAL - p[0]) * 0.9 ** 19                 # a memory of ten steps
        T = np.exp((EQUAL * np.log(EQUAL / q)).sum())
        assert method.T.item() == pytest.approx(1 if step < 19 else T)


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


def test_acr_distances():
    for w in (np.array([0.5, 0.3, 0.2]), PI, EQUAL, REVERSED):
        ours = acr.distances(torch.from_numpy(w), acr.anchors(COUNTS).double())
        np.testing.assert_allclose(ours, divergences(w), rtol=1e-5, atol=1e-6)
    assert acr.distances(rows(1, 0, 0), acr.anchors(COUNTS)).isfinite().all()
    # the reverse goes by rank, not by the number of the class
    np.testing.assert_allclose(acr.anchors(rows(20, 10, 70)),
                               [[0.2, 0.1, 0.7], EQUAL, [0.2, 0.7, 0.1]], rtol=1e-6)


def test_acr_estimates_from_sure_images_without_a_label():
    """Six images: the fifth and sixth are below tau, the third has a label."""
    method = build("--method acr --iters 250000 --tau 0.95")
    p2 = F.one_hot(torch.tensor([0, 0, 0, 1, 0, 2]), 3) * rows(0.96, 0.96, 0.96, 0.96, 0.94, 0.94
                                                               )[:, None]
    unknown = rows(1, 1, 0, 1, 1, 1)
    method.estimate(p2, unknown)
    w = EQUAL + (np.array([2, 1, 0]) / 3 - EQUAL) / 100       # a memory of 100 steps
    np.testing.assert_allclose(method.w, w, rtol=1e-6)
    np.testing.assert_allclose(method.D, divergences(w) / 500, rtol=1e-5, atol=1e-8)
    before = method.w.clone(), method.D.clone()
    method.estimate(p2 * 0.98, unknown)                       # none is sure
    method.estimate(p2, torch.zeros(6))                       # all have labels
    assert torch.equal(method.w, before[0]) and torch.equal(method.D, before[1])


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
    2, has no label."""
    method = build(f"--method acr --iters {iters} --eval_every {start} --tau 0.5")
    z = rows([0, 0, 0, 9, 0, 0], [0, 0, 0, 0, 0, 9])
    w, c, D = EQUAL, 2, []
    for step in range(start - 2, start + 4 * period):
        if step >= start and (step - start) % period == 0:
            c, D = strength(np.sum(D, axis=0) / period if D else np.zeros(3)), []
        method.refine(z[:, :3].softmax(1), Batch(step, None, None, np.array([3, 42]), z_u=z))
        if step >= start:
            w = 0.9 * w + 0.1 * np.array([0, 0, 1])           # a memory of ten steps at least
            D.append(divergences(w))
        assert method.c.item() == pytest.approx(c, rel=1e-6)
        assert method.w.tolist() == pytest.approx(w)
    long = build("--method acr --iters 250000 --eval_every 500")
    assert (long.start, long.period, long.memory) == (3000, 500, 100)


# ---------------------------------------------------------------------------------------------
# three iterations by hand


class Shifted(Replay):
    """Logit adjustment of the labeled rows. Pseudo-labels come from the plain logits."""

    def shift(self, logits):
        return torch.cat([self.log_pi.expand(6, 10), torch.zeros(12, 10)])

    def loss(self, step, x_l, y_l, x_w, x_s):
        p, logits = self.guess(x_w).softmax(1), self.model(torch.cat([x_l, x_s]))
        l_hat = logits + self.shift(logits)
        parts = {"loss_x": F.cross_entropy(l_hat[:6], y_l), "loss_u": self.masked(
            l_hat[6:], p.argmax(1), p.amax(1) >= self.cfg.tau)}
        return parts["loss_x"] + self.cfg.lambda_u * parts["loss_u"], parts


class Joint(Shifted):
    """Omega is trained by the same Adam; the attractor reads the logits, but passes no gradient
    back to them. The balanced batch leaves the running statistics as they are."""

    def prepare(self):
        self.attractor = BiasAttractor(10)
        return self.attractor.parameters()

    def shift(self, logits):
        hidden = F.relu(self.attractor.hidden(logits.detach().softmax(1)))
        return self.attractor.out(hidden)

    def loss(self, *batch):
        loss, parts = super().loss(*batch)
        if self.cfg.method == "single_level":
            copy = {k: b.clone() for k, b in self.model.named_buffers()}
            logits_b = torch.func.functional_call(self.model, copy, self.x_b)
            parts["loss_bal"] = F.cross_entropy(logits_b, self.y_b)
            loss = loss + parts["loss_bal"]
        return loss, parts

    def compare(self, state, losses):
        super().compare(state, losses)
        for key, value in self.attractor.state_dict().items():
            ours = state["method"][f"attractor.{key}"]
            assert ((ours - value).abs() < 2e-5).float().mean() > 0.98, key


class CDMAD(Replay):
    """The first of three iterations is before the start."""

    def loss(self, step, x_l, y_l, x_w, x_s):
        blank = self.guess(torch.ones(1, 3, 8, 8)) if step else 0
        q = (self.guess(x_w) - blank).softmax(1)
        logits = self.model(torch.cat([x_l, x_s]))
        loss_x = F.cross_entropy(logits[:6], y_l)
        loss_u = self.soft(logits[6:], q, torch.ones(6))
        return loss_x + loss_u, {"loss_x": loss_x, "loss_u": loss_u}


class ADELLO(Replay):
    """L_c from the second of three iterations on; a memory of ten steps."""
    Q, T = torch.full((10,), 0.1), None

    def loss(self, step, x_l, y_l, x_w, x_s):
        target = self.Q ** (1 - 0.9 * (step / 3) ** 2)
        target = target / target.sum()
        weak, logits = self.guess(x_w), self.model(torch.cat([x_l, x_s]))
        p, strong = weak.softmax(1), logits[6:] + (self.Q / target).log()
        kept = p.amax(1) >= self.cfg.tau
        loss_x = F.cross_entropy(logits[:6] + self.log_pi - target.log(), y_l)
        loss_u = self.masked(strong, p.argmax(1), kept)
        loss = loss_x + self.cfg.lambda_u * loss_u
        if step >= 1:
            if self.T is None:
                self.T = float(np.exp(-np.log(10 * self.Q.numpy()).mean()))
            loss = loss + self.soft(strong / self.T, (weak / self.T).softmax(1), 1 - kept.float())
        self.Q = 0.9 * self.Q + 0.1 * p.mean(0)
        return loss, {"loss_x": loss_x, "loss_u": loss_u}


class ACR(Replay):
    """Start after the first iteration. No class has been seen then, so c is 2, 2/3, then by w."""
    w, D = np.full(10, 0.1), np.zeros(3)

    def prepare(self):
        self.model.auxiliary = torch.nn.Linear(64, 10)
        models.initialise(self.model.auxiliary)
        return ()

    def loss(self, step, x_l, y_l, x_w, x_s):
        l1, l2 = self.guess(x_w), self.guess(x_w, "auxiliary")
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
        z = self.model.features(torch.cat([x_l, x_s]))
        one, two = self.model.classifier(z), self.model.auxiliary(z)
        loss_x, loss_u = F.cross_entropy(one[:6], y_l), self.masked(one[6:], p1.argmax(1), keep1)
        extra = F.cross_entropy(two[:6] + 2 * self.log_pi, y_l) + (
            self.cfg.lambda_u * self.masked(two[6:], p12.argmax(1), keep2))
        return (loss_x + self.cfg.lambda_u * loss_u + extra,
                {"loss_x": loss_x, "loss_u": loss_u})


@pytest.mark.parametrize("name,replay,tau", [
    ("la", Shifted, 0.2), ("attractor", Joint, 0.2), ("single_level", Joint, 0.2),
    ("cdmad", CDMAD, 0.2), ("adello", ADELLO, 0.22), ("acr", ACR, 0.26), ("acr", ACR, 0.2)])
def test_three_iterations_by_hand(tmp_path, name, replay, tau):
    flags = (f"--method {name} --tau {tau} --n_strong 2 --iters 3 --eval_every 1 --ema 0.5 "
             f"--weight_decay 5 --lambda_u {1 if name == 'cdmad' else 2}")
    state, losses = run(tmp_path, flags)
    by_hand = replay(flags)
    by_hand.compare(state, losses)
    if (name, tau) == ("acr", 0.2):
        assert by_hand.c > 0.667                              # of a w that is not uniform
        assert state["method"]["c"].item() == pytest.approx(by_hand.c, rel=1e-4)
    elif name != "cdmad":
        assert any(0 < row["kept"] < 1 for row in state["history"])


# ---------------------------------------------------------------------------------------------
# switched off


def switched_off(ours, plain):
    """Weights, moments and what the log says of training are those of the base method."""
    for part in ("model", "ema"):
        assert same({k: ours[part][k] for k in plain[part]}, plain[part])
    mine, theirs = ours["optimizer"]["state"], plain["optimizer"]["state"]
    assert same({k: mine[k] for k in theirs}, theirs)
    keys = ("loss_x", "loss_u", "kept", "right")
    for a, b in zip(ours["history"], plain["history"], strict=True):
        assert same([a[key] for key in keys], [b[key] for key in keys])


OFF = {  # what is replaced, by what
    "cdmad": [(cdmad, "START", 1)], "la_post_hoc": [],
    "flexda": [(adello, "shifts", lambda pi, Q, share: (0 * Q, 0 * Q))],
    "acr": [(acr, "STRENGTH", 0.0), (acr.ACR, "extra_loss", lambda self, batch: 0)]}


@pytest.mark.parametrize("name", OFF)
def test_a_method_that_is_switched_off_is_fixmatch(tmp_path, finished, monkeypatch, name):
    """CDMAD with hard labels and before its start; post-hoc adjustment, which trains nothing else;
    FlexDA without shifts; ACR without a shift and without the loss of its second head."""
    for replaced in OFF[name]:
        monkeypatch.setattr(*replaced)
    flags = f"{SMALL} --tau 0.2 --method {name}" + " --cdmad_targets hard" * (name == "cdmad")
    state = train(tmp_path, flags, main)
    switched_off(state, checkpoint(finished(f"{SMALL} --tau 0.2 --method none")))
    estimate = state["method"].get({"acr": "w", "flexda": "Q"}.get(name))
    assert estimate is None or not torch.allclose(estimate, torch.tensor(0.1))     # it did estimate


def test_adello_where_all_images_are_sure_is_flexda(finished):
    ours, plain = (checkpoint(finished(f"{SMALL} --tau 0 --method {m}"))
                   for m in ("adello", "flexda"))
    switched_off(ours, plain)
    assert torch.equal(ours["method"]["Q"], plain["method"]["Q"])


def test_the_attractor_of_the_ablations_starts_as_the_flags_say():
    bias = build("--method attractor --attractor vector --attractor_start prior").attractor.bias
    np.testing.assert_allclose(bias.detach(), np.log(PI) - np.log(PI).mean(), rtol=1e-6)


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
