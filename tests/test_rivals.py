"""DARP, CReST, ABC, SaR, DASO against general solvers, brute force and numbers worked out by hand;
switched off, they are the base method."""
from collections import deque
from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from comparison import at_work, build, cross_entropy, one_step, rows, softmax
from conftest import checkpoint, same, train
from scipy import optimize  # scikit-learn, which the digits come with, needs it

import data
import models
from baselines import Batch, crest, darp, daso, sar
from baselines.train import main
from support.augment import strong
from support.run import Run
from train_mixmatch import sharpen

SHORT = "--iters 9 --gamma_u 100 --n1 100 --m1 100 "
BASES = {"fixmatch": "--tau 0.1 --n_strong 2", "mixmatch": "--base mixmatch"}
SLOW_MIXMATCH = ["fixmatch", pytest.param("mixmatch", marks=pytest.mark.slow)]


# ---------------------------------------------------------------------------------------------
# runs


@pytest.mark.parametrize("base", SLOW_MIXMATCH)
@pytest.mark.parametrize("method", ["darp", "crest", "sar", "daso"])
def test_a_method_that_is_switched_off_equals_its_base(tmp_path, finished, monkeypatch, base,
                                                       method):
    monkeypatch.setattr(darp, "WARM", 1)
    monkeypatch.setattr(daso, "START", 1)
    monkeypatch.setattr(sar.SaR, "after_epoch", lambda self, done: None)
    off = " --crest_generations 1" if method == "crest" else ""
    ours = train(tmp_path, f"{SHORT} {BASES[base]} --method {method}{off}", main)
    plain = checkpoint(finished(f"{SHORT} {BASES[base]}"))
    assert all(same(ours[part], plain[part]) for part in ("model", "ema", "optimizer", "history"))


def test_evaluations_change_nothing(tmp_path, monkeypatch):
    """The end of an epoch is not every evaluation: those at the end of a run are denser."""
    few = train(tmp_path / "few", f"{SHORT} --tau 0.1 --method sar", main)
    monkeypatch.setattr(Run, "is_evaluated", lambda self, done: True)
    many = train(tmp_path / "many", f"{SHORT} --tau 0.1 --method sar", main)
    assert [row["iter"] for row in many["history"]] == list(range(1, 10))
    assert all(same(many[part], few[part]) for part in ("model", "ema", "optimizer", "method"))


# ---------------------------------------------------------------------------------------------
# DARP


def test_refinement_against_a_general_solver():
    """min sum_m KL(R_m || A_m) / H_m by SciPy's constrained minimiser, on 7 images of 3 classes."""
    torch.manual_seed(1)
    Q, t = torch.randn(7, 3).softmax(1), rows(4, 2, 1)
    A = darp.trim(Q, t, delta=10.0).numpy()                                    # keeps all rows
    H, ours = -(A * np.log(A)).sum(1), darp.refined(Q, t, outer=200, delta=10.0).numpy()

    def objective(r):
        r = r.reshape(7, 3)
        return ((r * np.log(r / A)).sum(1) / H).sum()
    sums = [{"type": "eq", "fun": lambda r: r.reshape(7, 3).sum(1) - 1},
            {"type": "eq", "fun": lambda r: r.reshape(7, 3).sum(0)[:2] - t.numpy()[:2]}]
    best = optimize.minimize(objective, A.ravel(), method="SLSQP", bounds=[(1e-9, 1)] * 21,
                             constraints=sums, options={"maxiter": 500, "ftol": 1e-14})
    assert best.success
    assert objective(ours.ravel()) == pytest.approx(best.fun, rel=1e-5)
    np.testing.assert_allclose(ours.ravel(), best.x, atol=1e-4)


def test_newton_against_bisection():
    """Column by column, from 0 and from an old root; rows of small entropy move slowly."""
    g = np.random.default_rng(0)
    A, H, a = g.dirichlet([.5, .5, .5], size=40), g.uniform(.05, .6, (40, 1)), np.ones((40, 1))
    t = A.sum(0) * [.6, 1.3, 2.5]
    roots = [optimize.brentq(lambda nu, k=k: (A[:, k] * np.exp(-nu * H[:, 0])).sum() - t[k],
                             -50, 50, xtol=1e-12) for k in range(3)]
    for guess in ([0., 0., 0.], [3., -9., 1.]):
        ours = darp.column_roots(*map(torch.from_numpy, (A, H, a, t)), torch.tensor(guess).double())
        np.testing.assert_allclose(ours, roots, atol=1e-5)


def test_trimming_by_hand():
    Q = torch.tensor([[.9, .1], [.8, .2], [.3, .7], [.6, .4]])
    A = darp.trim(Q, rows(1.5, 1.5)).numpy()
    # class 0 keeps rows 0, 1, 3 (sum 2.3), class 1 rows 1, 2, 3 (sum 1.3); each scaled to sum 1.5
    by_hand = np.array([[.9, 0], [.8, .2], [0, .7], [.6, .4]]) * [1.5 / 2.3, 1.5 / 1.3] + 1e-6
    np.testing.assert_allclose(A, by_hand / by_hand.sum(1, keepdims=True), atol=1e-5)
    # int(1.5 * 1.5) = 2 rows and int(1.5 * 1.2) = 1 row; row 3 is nowhere: uniform
    A = darp.trim(Q, rows(1.5, 1.2), delta=1.5).numpy()
    by_hand = np.array([[.9, 0], [.8, 0], [0, .7], [0, 0]]) * [1.5 / 1.7, 1.2 / .7] + 1e-6
    np.testing.assert_allclose(A, by_hand / by_hand.sum(1, keepdims=True), atol=1e-5)


def test_raw_predictions_are_stored_and_refined_ones_used():
    """Before 0.4 of five iterations Q fills and labels stay; from then on the batch gets rows of R,
    which change every ten iterations."""
    method = build("--iters 5 --method darp", rows(2, 1), index_u=np.array([5, 3, 8]))
    p = rows([.9, .1], [.4, .6])

    def refine(step, p, index):
        return method.refine(p, Batch(step, None, None, np.array(index)))
    assert torch.equal(refine(1, p, [8, 5]), p)
    assert torch.equal(method.Q, rows([.4, .6], [.5, .5], [.9, .1]))
    late = refine(2, p, [8, 5])
    # t = (2, 1) * 3 images / 3 labels
    torch.testing.assert_close(method.R.sum(0), rows(2, 1), atol=0.01, rtol=0)
    assert torch.equal(late, method.R[[2, 0]])
    # Between refreshes the batch gets old rows of R, whatever is predicted today.
    R = method.R.clone()
    assert torch.equal(refine(3, 1 - p, [3, 5]), R[[1, 0]]) and torch.equal(method.R, R)
    assert torch.equal(method.Q, torch.stack([1 - p[1], 1 - p[0], p[0]]))
    refine(11, p, [8, 5])
    assert torch.equal(method.R, R)
    refine(12, p, [8, 5])
    assert not torch.equal(method.R, R)


def test_the_confusion_estimate_recovers_known_counts():
    g = torch.Generator().manual_seed(0)
    C = torch.rand(4, 4, generator=g, dtype=torch.float64) + 3 * torch.eye(4)
    C /= C.sum(0)                                             # column j: mean prediction of class j
    counts, y = torch.tensor([40, 30, 20, 10]), torch.arange(4).repeat_interleave(5)
    true = torch.arange(4).repeat_interleave(counts)
    for p, usable in ((C.T, True), (0.01 * C.T + 0.99 * C.T.mean(0), False)):  # nearly alike
        estimate, good = darp.invert_confusion(p[y], y, p[true])
        assert good == usable and torch.allclose(estimate, counts.double())


@pytest.mark.parametrize("usable", [(2, 5, 9), ()])
def test_the_estimate_is_the_mean_of_the_usable_ones(monkeypatch, usable):
    """Ten estimates M = 1, 2, ..., 10 at class 0, else 1, on the way through SGD with lr 0.1, a
    tenth of it after 80 % and a hundredth after 90 %. If none is usable, the last one counts."""
    method, rates, calls = at_work(f"{SHORT} --method darp --pool union"), [], []
    step = torch.optim.SGD.step

    def spy(self):
        rates.append(self.param_groups[0]["lr"])
        step(self)

    def invert(p_held, y_held, p_u):
        calls.append(len(p_u))
        M = torch.ones(10, dtype=torch.float64)
        M[0] = len(calls)
        return M, len(calls) - 1 in usable
    monkeypatch.setattr(torch.optim.SGD, "step", spy)
    monkeypatch.setattr(darp, "invert_confusion", invert)
    new = len({*method.ctx.index_u} - {*method.ctx.index_l})
    method.ctx.cfg.darp_estimate = True
    ours = method.target_counts() - method.ctx.counts         # --pool union: these are known
    assert rates == pytest.approx([0.1] * 8 + [0.01, 0.001]) and calls == [new] * 10
    head = (3 + 6 + 10) / 3 if usable else 10
    assert ours.tolist() == pytest.approx([x * new / (head + 9) for x in [head] + [1] * 9])


def test_hold_out_never_takes_more_than_half_of_a_class():
    labels = np.repeat(np.arange(4), [100, 20, 5, 2])
    kept, held = darp.hold_out_labeled(labels, 0)
    assert np.bincount(labels[held]).tolist() == [10, 10, 2, 1]
    assert sorted([*kept, *held]) == list(range(127))


# ---------------------------------------------------------------------------------------------
# CReST


def test_shares_go_by_rank_and_not_by_the_number_of_the_class():
    """Place r of the descending counts has the share (N_(K-1-r) / N_(0))^(1/3)."""
    descending = np.array(data.class_counts(1500, 10, 100))
    expected = (descending[::-1] / 1500) ** (1 / 3)
    np.testing.assert_allclose(crest.shares(descending), expected)
    mixed = np.random.default_rng(0).permutation(10)
    np.testing.assert_allclose(crest.shares(descending[mixed]), expected[mixed])


def test_selection_by_hand():
    predicted, confidence = np.array([0, 0, 0, 0, 1, 1, 2]), np.array([.5, .9, .7, .6, .3, .8, .4])
    labels = crest.select(predicted, confidence, np.array([0.5, 0.9, 1.0]))
    assert labels.tolist() == [-1, 0, 0, -1, -1, 1, 2]        # int(0.9 * 2) = 1 of class 1


@pytest.mark.parametrize("name", ["crest", "crest+"])
def test_a_restart_is_a_fresh_build(name):
    """What the EMA (not the live network) predicts is adopted; then network, EMA, optimizer and
    ring buffer are those of a run that begins."""
    method = at_work(f"{SHORT} --seed 4 --method {name} --crest_generations 3 --pool union "
                     "--lr 0.05 --ema 0.9")
    ctx = method.ctx
    new = ctx.index_u[~np.isin(ctx.index_u, ctx.index_l)]
    x = ctx.normalise(ctx.dataset.take(new)[0])

    def adopted_from(network):
        with torch.no_grad():
            confidence, y = deepcopy(network).eval()(x).softmax(1).max(1)
        labels = np.full(len(ctx.dataset.labels), -1)
        labels[new] = crest.select(y.numpy(), confidence.numpy(), crest.shares(ctx.counts.numpy()))
        return labels
    expected = adopted_from(ctx.ema.model)
    assert not np.array_equal(expected, adopted_from(ctx.model)) and (expected >= 0).any()
    method.after_epoch(3)
    assert np.array_equal(method.adopted, expected)

    torch.manual_seed(4 + 1000003)
    fresh = models.build("wrn-10-1", 10, ctx.cfg.bn_momentum)
    assert same(dict(ctx.model.state_dict()), dict(fresh.state_dict()))
    assert same(dict(ctx.ema.model.state_dict()), dict(fresh.state_dict()))
    assert ctx.optimizer.state == {}
    if name == "crest+":
        assert torch.equal(method.recent, torch.full((128, 10), 0.1))
    one_step(method, ctx.model, ctx.optimizer, 3)
    ctx.ema.update()
    assert not torch.equal(ctx.ema.model.stem.weight, fresh.stem.weight)       # it trails again

    # The labeled images of this generation, adopted ones under the labels predicted for them; the
    # next selection starts from the original ones.
    labels = np.where(expected >= 0, expected, ctx.dataset.labels)
    index, y = (np.concatenate(part) for part in zip(*map(method.labeled, [3, 4, 5] * 66),
                                                     strict=True))
    stream = data.IndexStream([*ctx.index_l, *new[expected[new] >= 0]], 6, 4, "labeled 1")
    assert set(index) == {i for step in (3, 4, 5) for i in stream.batch(step)}
    assert np.array_equal(y, labels[index]) and (y != ctx.dataset.labels[index]).any()
    expected, first = adopted_from(ctx.ema.model), expected
    method.after_epoch(6)
    assert np.array_equal(method.adopted, expected) and ((first >= 0) & (expected < 0)).any()


def test_the_ramp_of_mixmatch_starts_again_with_each_generation():
    """lambda_u grows with the first of these numbers over the second: two generations of eight
    iterations, and of seven, whose first one has three."""
    method = build("--base mixmatch --method crest --gamma_u 100 --crest_generations 2 --iters 8")
    assert [method.schedule(step) for step in range(8)] == [(i, 4) for i in [0, 1, 2, 3] * 2]
    method = build("--base mixmatch --method crest --gamma_u 100 --crest_generations 2 --iters 7")
    assert [method.schedule(step) for step in (2, 3, 6)] == [(2, 3), (0, 4), (3, 4)]


def test_progressive_alignment_by_hand():
    """The target is N^0.75 in the middle of three generations, here of three iterations."""
    method, p = build("--method crest+ --gamma_u 100 --crest_generations 3 --iters 9",
                      rows(8, 2)), rows([.9, .1], [.5, .5])
    mean = np.array([.5, .5])                                 # of 128 batches, uniform at first
    for step, t in ((0, 1), (4, .75), (8, .5)):
        expected = p.numpy() * np.array([8, 2]) ** t / mean
        np.testing.assert_allclose(method.refine(p, Batch(step, None, None)),
                                   expected / expected.sum(1, keepdims=True), rtol=1e-4)
        mean = mean + (p.mean(0).numpy() - .5) / 128


# ---------------------------------------------------------------------------------------------
# ABC


def test_abc_loss_by_hand():
    """In the third of four epochs: b = 1/4, 1/2, 1; for pseudo-labels half way from 1."""
    B, U, step, g = 20, 300, 8, np.random.default_rng(0)
    torch.manual_seed(0)
    head = torch.nn.Linear(4, 3).double()
    method = build("--method abc --seed 5 --eval_every 3 --iters 12", rows(8, 4, 2),
                   model=SimpleNamespace(auxiliary=head))
    y, z_u, z = g.integers(3, size=B), 15 * g.normal(size=(U, 4)), g.normal(size=(B + 2 * U, 4))
    ours = method.extra_loss(Batch(step, None, torch.from_numpy(y), z_u=torch.from_numpy(z_u),
                                   z=torch.from_numpy(z)))

    weight, bias = (t.detach().numpy() for t in (head.weight, head.bias))
    p, q = softmax(z @ weight.T + bias), softmax(z_u @ weight.T + bias)
    draw_l, draw_u = (data.rng(5, f"ABC {name}", step).random(n, dtype="float32")
                      for name, n in (("labeled", B), ("unlabeled", U)))
    # the weight of every row, and its target; two strong views of each image
    sure, kept = q.max(1) >= 0.95, draw_u < np.array([.625, .75, 1])[q.argmax(1)]
    weights = np.concatenate([(draw_l < np.array([.25, .5, 1])[y]) / B,
                              np.repeat(sure & kept, 2) / U])
    targets = np.concatenate([np.eye(3)[y], np.repeat(q, 2, axis=0)])
    assert 0 < (sure & kept).sum() < sure.sum() < U
    each = cross_entropy(z @ weight.T + bias, targets)
    assert ours.item() == pytest.approx((weights * each).sum(), rel=1e-6)

    # Its gradient in closed form, sum (p - target) z^T: the targets are constants.
    r = weights[:, None] * (p - targets)
    ours.backward()
    np.testing.assert_allclose(head.weight.grad.numpy(), r.T @ z, rtol=1e-6)
    np.testing.assert_allclose(head.bias.grad.numpy(), r.sum(0), rtol=1e-6)
    network = SimpleNamespace(features=lambda x: x, auxiliary=lambda z: -z)
    assert torch.equal(method.predict(network, torch.ones(2, 3)), -torch.ones(2, 3))


def test_abc_on_mixmatch_looks_at_unmixed_views():
    """Labeled views and two strong views of each unlabeled image in passes of their own, in train
    mode; running statistics stay."""
    method = at_work(f"{SHORT} --seed 4 --base mixmatch --method abc")
    ctx, before = method.ctx, deepcopy(dict(method.ctx.model.named_buffers()))
    x_u, _ = ctx.dataset.take(ctx.index_u[:3])
    x_l = torch.randn(4, 3, 8, 8)
    z_l, z_s = method.unmixed(Batch(7, x_l, None, x_u=x_u))
    assert same(dict(ctx.model.named_buffers()), before)
    torch.testing.assert_close(z_l, deepcopy(ctx.model).features(x_l))
    views = strong(x_u[[0, 0, 1, 1, 2, 2]], data.rng(4, "strong view", 7), ctx.normalise)
    torch.testing.assert_close(z_s, deepcopy(ctx.model).features(views))


# ---------------------------------------------------------------------------------------------
# SaR


def test_sar_counts_the_newest_raw_predictions_of_seen_images():
    method, p = build("--method sar"), rows([.5, .3, .2], [.6, .3, .1], [.1, .2, .7])

    def refine(p, *index):
        return method.refine(p, Batch(0, None, None, np.array(index)))
    assert torch.equal(refine(p, 0, 1, 2), p)
    refine(p[2:], 1)                                          # image 1 changes its mind
    method.after_epoch(1)
    counts = np.array([1., 1., 2.])                           # class 1: never, counts as 1
    beta = (counts.mean() - 1) / counts.mean()
    v = (1 - beta) / (1 - beta ** counts)
    np.testing.assert_allclose(method.v, 3 * v / v.sum(), rtol=1e-6)
    expected = p.numpy() * v
    np.testing.assert_allclose(refine(p, 0, 1, 2), expected / expected.sum(1, keepdims=True),
                               rtol=1e-5)
    assert method.newest[:4].tolist() == [0, 0, 2, -1]
    refined = refine(rows([.38, .2, .42]), 3)
    assert refined.argmax() == 0 and method.newest[:4].tolist() == [0, 0, 2, 2]    # as predicted


def test_sar_on_mixmatch_acts_before_the_sharpening():
    method, p = build("--base mixmatch --method sar --temperature 0.5"), rows([.5, .3, .2])
    method.v.copy_(rows(.5, 1., 1.5))
    ours = method.refine(sharpen(p, 0.5), Batch(0, None, None, np.array([0])))
    weighted = p * method.v
    torch.testing.assert_close(ours, sharpen(weighted / weighted.sum(1, True), 0.5))


# ---------------------------------------------------------------------------------------------
# DASO


def daso_method(flags=""):
    """T_d = 1.5, as gamma_l = gamma_u; blending from the third of 100 steps on, a window of two
    steps; D = 2."""
    return build(f"--method daso --gamma_l 100 --gamma_u 100 --iters 100 {flags}",
                 model=SimpleNamespace(classifier=SimpleNamespace(in_features=2)))


def test_daso_has_no_alignment_loss_on_mixmatch():
    """All rows are mixtures there; the labels are blended all the same, after the first window."""
    method, p = daso_method("--base mixmatch"), rows([.8, .1, .1])
    batch = Batch(2, torch.eye(2).double(), torch.arange(2), z=torch.ones(6, 2), z_u=rows([0., 1.]))
    assert torch.equal(method.refine(p, batch), p)
    method.histogram[0] = 1.
    assert method.refine(p, batch).argmax() == 1
    assert method.extra_loss(batch) == 0


def test_eight_steps_of_daso_by_hand(monkeypatch):
    """Four unlabeled images, two strong views of each. Queues of four features, windows as lists
    of labels."""
    monkeypatch.setattr(daso, "QUEUE", 4)
    method, g = daso_method(), np.random.default_rng(1)
    queues, window, m, moved = [deque(maxlen=4) for _ in range(3)], [], np.zeros(3), 0

    def cosines(z):
        centres = [np.mean(queue, axis=0) if queue else np.zeros(2) for queue in queues]
        return np.array([[row @ c / max(np.linalg.norm(row) * np.linalg.norm(c), 1e-12) / .05
                          for c in centres] for row in z])
    for step in range(8):
        x_l, y_l, z_u = g.normal(size=(3, 2)), g.integers(3, size=3), g.normal(size=(4, 2))
        z, p = g.normal(size=(3 + 8, 2)), g.dirichlet([3, 2, 1], size=4)
        batch = Batch(step, torch.from_numpy(x_l), torch.from_numpy(y_l),
                      z_u=torch.from_numpy(z_u), z=torch.from_numpy(z).requires_grad_())
        with torch.no_grad():
            refined = method.refine(torch.from_numpy(p), batch).numpy()
        loss = method.extra_loss(batch)

        for row, k in zip(x_l, y_l, strict=True):
            queues[k].append(row)
        blended = p.copy()
        if step >= 2:
            q = softmax(cosines(z_u))
            for i, k in enumerate(p.argmax(1)):
                v = (m[k] / m.max()) ** (1 / 1.5)
                blended[i] = (1 - v) * p[i] + v * q[i]
            moved += (blended.argmax(1) != p.argmax(1)).sum()
            by_hand = cross_entropy(cosines(z[3:]), np.repeat(q, 2, axis=0)).mean()
            assert loss.item() == pytest.approx(by_hand, rel=1e-6)
            gradient, = torch.autograd.grad(loss, batch.z)
            assert (gradient[:3] == 0).all() and (gradient[3:] != 0).any()
        else:
            assert loss == 0
        np.testing.assert_allclose(refined, blended, rtol=1e-6, atol=1e-9)
        window += blended.argmax(1).tolist()
        if step % 2:
            m, window = np.bincount(window, minlength=3).astype(float), []
        assert method.histogram.tolist() == m.tolist()
    assert all(len(queue) == 4 for queue in queues) and method.pushed.max() > 8
    assert moved > 3                         # a histogram of labels that are not blended differs


