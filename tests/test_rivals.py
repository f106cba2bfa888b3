"""DARP, CReST, ABC, SaR, DASO: fixtures, reductions to the base method, independent solvers. The
whole run of all methods; fixtures of the others are in test_logit_adjustment.py, test_after.py."""
import json
from collections import deque
from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, checkpoint, exit_of, same, stopped, train
from scipy import optimize

import data
import evaluate
import models
from baselines import Context, abc_head, crest, darp, daso, sar, supervised
from baselines.methods import METHODS
from baselines.train import configure, main
from support.augment import Normalise, strong
from support.run import Run
from train_mixmatch import sharpen

# CIFAR-10, gamma_l = gamma_u = 100, N_1 = 1500, M_1 = 3000
N = torch.tensor(data.class_counts(1500, 10, 100), dtype=torch.float64)
M = torch.tensor(data.class_counts(3000, 10, 100), dtype=torch.float64)
SHORT = "--iters 9 --gamma_u 100 --n1 100 --m1 100"
BASES = {"fixmatch": "--tau 0.1 --n_strong 2", "mixmatch": ""}
EAGER = {  # flags with which a method acts within a few iterations
    "darp": "--darp_warm 0.2 --darp_period 3 --darp_outer 2", "crest": "--crest_generations 3",
    "crest+": "--crest_generations 3", "abc": "", "sar": "", "daso": "--daso_start 0.2",
    "la": "", "la_all": "", "la_post_hoc": "",
    "darp_crt": "--darp_warm 0.2 --darp_period 3 --darp_outer 2 --iters 5 --crt_iters 4",
    "cdmad": "", "flexda": "", "adello": "--tau 0.15", "acr": "--tau 0.15"}
OFF = {"crest": "--crest_generations 1", "sar": "--sar_start 1", "daso": "--daso_start 1",
       "darp": "--darp_warm 1"}
BASE = [pytest.param("fixmatch"), pytest.param("mixmatch", marks=pytest.mark.slow)]


def fast(*names):
    """All methods, only these not marked slow."""
    return [m if m in names else pytest.param(m, marks=pytest.mark.slow) for m in EAGER]


def on_bases(*names):
    """(base, method), only these methods on FixMatch not marked slow."""
    pairs = [(base, m) for base in BASES for m in EAGER if m in METHODS[base]]
    return [pytest.param(*pair, marks=() if pair in [("fixmatch", m) for m in names]
                         else pytest.mark.slow) for pair in pairs]


def flags_of(base, method, own=""):
    return f"{SHORT} --base {base} {BASES[base]} --method {method} {own}"


def close(ours, text, tolerance=6e-5):
    wanted = torch.tensor([float(x) for x in text.split()], dtype=torch.float64)
    assert torch.as_tensor(ours).sub(wanted).abs().max() < tolerance


# ---------------------------------------------------------------------------------------------
# fixtures


def test_abc_keep_rates():
    rates = abc_head.keep_rates(N)
    close(rates, "0.0100 0.0167 0.0278 0.0464 0.0777 0.1293 0.2174 0.3659 0.6000 1.0000")
    close(abc_head.annealed(rates, 250 / 500),
          "0.5050 0.5083 0.5139 0.5232 0.5389 0.5647 0.6087 0.6829 0.8000 1.0000")
    close(abc_head.annealed(rates, 499 / 500),
          "0.0120 0.0187 0.0298 0.0483 0.0796 0.1311 0.2190 0.3671 0.6008 1.0000")


def test_crest_shares_go_by_rank_and_not_by_the_number_of_the_class():
    text = "0.2154 0.2554 0.3012 0.3583 0.4260 0.5048 0.5994 0.7109 0.8431 1.0000"
    close(crest.shares(N.numpy()), text)
    mixed = np.random.default_rng(0).permutation(10)
    close(crest.shares(N.numpy()[mixed]), " ".join(np.array(text.split())[mixed]))


def test_alignment_targets():
    for generation, generations, text in [
            (0, 5, "0.4032 0.2417 0.1449 0.0868 0.0519 0.0312 0.0185 0.0110 0.0067 0.0040"),
            (2, 5, "0.3260 0.2221 0.1513 0.1031 0.0700 0.0478 0.0324 0.0219 0.0151 0.0103"),
            (4, 5, "0.2449 0.1896 0.1468 0.1136 0.0878 0.0681 0.0525 0.0405 0.0316 0.0245"),
            (0, 1, "0.4032 0.2417 0.1449 0.0868 0.0519 0.0312 0.0185 0.0110 0.0067 0.0040")]:
        close(crest.alignment_target(N, generation, generations), text)


def test_mitigating_vector():
    close(sar.mitigating_vector(N + M),
          "0.1510 0.1629 0.1938 0.2556 0.3659 0.5536 0.8722 1.4103 2.2818 3.7527")


def test_daso_blend_weights():
    close(daso.blend_weights(N + M, 1.5),
          "1.0000 0.7109 0.5054 0.3593 0.2552 0.1815 0.1288 0.0912 0.0652 0.0464")
    close(daso.blend_weights(N + M, 0.3),
          "1.0000 0.1815 0.0330 0.0060 0.0011 0.0002 0.0000 0.0000 0.0000 0.0000")


def test_darp_target_counts():
    t = darp.labeled_proportions(N, 11163)
    close(t, "4501.2 2697.7 1617.4 969.3 579.2 348.1 207.1 123.0 75.0 45.0", 0.06)
    assert (2 * t).long().tolist() == [9002, 5395, 3234, 1938, 1158, 696, 414, 246, 150, 90]
    close(darp.labeled_proportions(N, 7443),
          "3001.2 1798.7 1078.4 646.3 386.2 232.1 138.1 82.0 50.0 30.0", 0.06)


@pytest.mark.parametrize("constants", [
    supervised.margins, supervised.effective_number_weights, supervised.inverse_frequency_weights,
    abc_head.keep_rates, sar.mitigating_vector, lambda n: daso.blend_weights(n, 1.5),
    lambda n: darp.labeled_proportions(n, 7443), lambda n: crest.alignment_target(n, 1, 3)])
def test_constants_go_with_the_counts_and_not_with_the_number_of_the_class(constants):
    mixed = torch.from_numpy(np.random.default_rng(0).permutation(10))
    assert N[mixed].argmin() != 9
    torch.testing.assert_close(constants(N[mixed]), constants(N)[mixed])


@pytest.mark.parametrize("flags,expected", [
    ("cifar10 --gamma_u 100", (1.5, 10, 10)), ("cifar10 --gamma_u 1", (0.3, 10, 10)),
    ("cifar10 --gamma_u 100 --reverse_u", (0.3, 10, 10)), ("cifar100", (0.3, 100, 20)),
    ("stl10", (0.3, 100, 20))])
def test_defaults_that_depend_on_the_data(flags, expected):
    daso_cfg, darp_cfg = (configure(f"--method {m} --dataset {flags}".split())[0]
                          for m in ("daso", "darp"))
    assert (daso_cfg.daso_td, darp_cfg.darp_period, darp_cfg.darp_outer) == expected


# ---------------------------------------------------------------------------------------------
# the whole run: reductions, resume, files


@pytest.mark.parametrize("base", BASE)
@pytest.mark.parametrize("method", OFF)
def test_a_method_that_is_switched_off_equals_its_base(finished, base, method):
    ours, plain = (checkpoint(finished(flags)) for flags in
                   (flags_of(base, method, OFF[method]), flags_of(base, "none")))
    assert all(same(ours[part], plain[part]) for part in ("model", "ema", "optimizer", "history"))


@pytest.mark.parametrize("base,method", on_bases(*EAGER.keys() - {"la", "la_all", "flexda"}))
def test_switched_on_it_differs_and_resumes_exactly(tmp_path, finished, base, method):
    flags = flags_of(base, method, EAGER[method])
    whole, plain = checkpoint(finished(flags)), checkpoint(finished(flags_of(base, "none")))
    weights = {k: whole["model"][k] for k in plain["model"]}
    assert same(weights, plain["model"]) == (method == "la_post_hoc")          # only its judgement
    assert not same(whole["history"], plain["history"])
    # After 7 of 9: within an epoch, a window of DASO, a period of DARP, the last CReST generation,
    # the stage of cRT.
    stopped(tmp_path, flags, after=7, main=main)
    assert same(whole, train(tmp_path, flags + " --resume", main))


@pytest.mark.parametrize("method", fast("sar"))
def test_evaluations_change_nothing(tmp_path, finished, monkeypatch, method):
    """The end of an epoch is not every evaluation: those at the end of a run are denser."""
    flags = flags_of("fixmatch", method, EAGER[method])
    few = checkpoint(finished(flags))
    monkeypatch.setattr(Run, "is_evaluated", lambda self, done: True)
    many = train(tmp_path, flags, main)
    assert [row["iter"] for row in many["history"]] == list(range(1, 10))
    assert same([many[part] for part in ("model", "ema", "optimizer", "method")],
                [few[part] for part in ("model", "ema", "optimizer", "method")])
    rows = {row["iter"]: row for row in many["history"]}
    assert same([rows[row["iter"]] for row in few["history"]], few["history"])


@pytest.mark.parametrize("method", fast(*EAGER.keys() - {"la", "la_all", "flexda"}))
def test_evaluate_agrees_with_training(finished, method):
    folder = finished(flags_of("fixmatch", method, EAGER[method]))
    run, last = evaluate.load_run(folder), checkpoint(folder)["history"][-1]
    assert run.last["bacc"] == pytest.approx(last["bacc"])
    assert run.last["recall"] == pytest.approx([last[f"recall_{k}"] for k in range(10)])
    result = json.loads((folder / "result.json").read_text())
    assert run.reported["gm"] == pytest.approx(result["gm"])


@pytest.mark.parametrize("flags,named", [
    ("--method crest --gamma_u 1", "--crest_anyway"),
    ("--method crest+ --reverse_u", "--gamma_u"), ("--method darp --darp_warm 2", "--darp_warm"),
    ("--method daso --daso_td 0", "--daso_td"), ("--method abc --darp_warm 0.2", "--darp_warm"),
    ("--method crest --crest_generations 0", "--crest_generations"),
    ("--method crest --crest_generations 5 --iters 4", "--crest_generations"),
    ("--base supervised --method darp", "--method"), ("--base mixmatch --method acr", "--method"),
    ("--method cdmad --model resnet34", "--cdmad_bn")])
def test_wrong_flags_end_in_one_sentence(flags, named, tmp_path, capsys):
    argv = [*TINY.split(), *SHORT.split(), *flags.split(), "--out", str(tmp_path / "run")]
    code, err = exit_of(main, argv, capsys)
    assert code == 2 and err.count("\n") == 1 and named in err
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------------------------------
# DARP


def test_refined_labels_meet_rows_and_columns():
    torch.manual_seed(0)
    Q = (3 * torch.randn(3000, 10) + torch.linspace(2, -2, 10)).softmax(1)
    t = darp.labeled_proportions(N, 3000)
    errors = []
    for outer in (1, 2, 4, 10):
        R = darp.refined(Q, t, outer)
        assert (R.sum(1) - 1).abs().max() < 1e-12 and (R >= 0).all()
        errors.append((R.sum(0) - t).abs().max().item())
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1


def test_refinement_against_a_general_solver():
    """min sum_m KL(R_m || A_m) / H_m by SciPy's constrained minimiser, on 7 images of 3 classes."""
    torch.manual_seed(1)
    Q, t = torch.randn(7, 3).softmax(1), torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64)
    A = darp.trim(Q, t, delta=10.0)                                            # keeps all rows
    H, ours = darp.entropy(A).numpy(), darp.refined(Q, t, outer=200, delta=10.0).numpy()
    A = A.numpy()

    def objective(r):
        r = r.reshape(7, 3)
        return ((r * np.log(r / A)).sum(1) / H).sum()
    sums = [{"type": "eq", "fun": lambda r: r.reshape(7, 3).sum(1) - 1},
            {"type": "eq", "fun": lambda r: r.reshape(7, 3).sum(0)[:2] - t.numpy()[:2]}]
    best = optimize.minimize(objective, A.ravel(), method="SLSQP", bounds=[(1e-9, 1)] * 21,
                             constraints=sums, options={"maxiter": 500, "ftol": 1e-14})
    assert best.success
    assert objective(ours.ravel()) == pytest.approx(best.fun, rel=1e-6)
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
    A = darp.trim(Q, torch.tensor([1.0, 1.0], dtype=torch.float64), delta=2.0).numpy()
    # class 0 keeps rows 0, 1 (sum 1.7), class 1 rows 2, 3 (sum 1.1); each scaled to sum to 1
    by_hand = np.array([[.9 / 1.7, 0], [.8 / 1.7, 0], [0, .7 / 1.1], [0, .4 / 1.1]]) + 1e-6
    np.testing.assert_allclose(A, by_hand / by_hand.sum(1, keepdims=True), atol=1e-5)
    # int(1.5 * 1.5) = 2 rows and int(1.5 * 1.2) = 1 row; row 3 is nowhere: uniform
    A = darp.trim(Q, torch.tensor([1.5, 1.2], dtype=torch.float64), delta=1.5).numpy()
    by_hand = np.array([[.9, 0], [.8, 0], [0, .7], [0, 0]]) * [1.5 / 1.7, 1.2 / .7] + 1e-6
    np.testing.assert_allclose(A, by_hand / by_hand.sum(1, keepdims=True), atol=1e-5)


def test_raw_predictions_are_stored_and_refined_ones_used():
    """During warm-up Q fills and labels stay; from then on the batch gets rows of R."""
    cfg, _ = configure("--iters 20 --method darp --darp_warm 0.1".split())
    index_u = np.array([5, 3, 8])
    method = darp.DARP(SimpleNamespace(
        cfg=cfg, dataset=SimpleNamespace(num_classes=2, labels=np.zeros(9)), index_u=index_u,
        counts=torch.tensor([2.0, 1.0], dtype=torch.float64)))
    p = torch.tensor([[.9, .1], [.4, .6]])
    early = method.refine(p, SimpleNamespace(step=0, index_u=np.array([8, 5])))
    assert torch.equal(early, p)
    assert torch.equal(method.Q, torch.tensor([[.4, .6], [.5, .5], [.9, .1]]))
    late = method.refine(p, SimpleNamespace(step=2, index_u=np.array([8, 5])))
    torch.testing.assert_close(method.R.sum(0), torch.tensor([2.0, 1.0]), atol=0.01, rtol=0)
    assert torch.equal(late, method.R[[2, 0]])
    # Between refreshes the batch gets old rows of R, whatever is predicted today.
    R = method.R.clone()
    between = method.refine(1 - p, SimpleNamespace(step=3, index_u=np.array([3, 5])))
    assert torch.equal(between, R[[1, 0]]) and torch.equal(method.R, R)
    assert torch.equal(method.Q, torch.stack([1 - p[1], 1 - p[0], p[0]]))
    method.refine(p, SimpleNamespace(step=2 + 10, index_u=np.array([8, 5])))
    assert not torch.equal(method.R, R)                       # the next refresh


def test_the_confusion_estimate_recovers_known_counts():
    g = torch.Generator().manual_seed(0)
    C = torch.rand(4, 4, generator=g, dtype=torch.float64) + 3 * torch.eye(4)
    C /= C.sum(0)                                             # column j: mean prediction of class j
    counts, y = torch.tensor([40, 30, 20, 10]), torch.arange(4).repeat_interleave(5)
    p_u = C.T[torch.arange(4).repeat_interleave(counts)]
    estimate, good = darp.invert_confusion(C.T[y], y, p_u)
    assert good and torch.allclose(estimate, counts.double())
    nearly_alike = 0.01 * C.T[y] + 0.99 * C.T[y].mean(0)      # condition number about 100 times
    assert not darp.invert_confusion(nearly_alike, y, p_u)[1]


@pytest.mark.parametrize("usable", [(2, 5, 9), ()])
@pytest.mark.slow
def test_the_estimate_is_the_mean_of_the_usable_ones(monkeypatch, usable):
    """Ten estimates M = 1, 2, ..., 10 at class 0, else 1, on the way through SGD with lr 0.1, a
    tenth of it after 80 % and a hundredth after 90 %."""
    method, rates, calls = at_work("--method darp --pool union --darp_warm 1"), [], []
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
    ours = darp.estimate_counts(method.ctx, method.ctx.cfg.iters)
    assert rates == pytest.approx([0.1] * 8 + [0.01, 0.001]) and calls == [new] * 10
    head = (3 + 6 + 10) / 3 if usable else 10
    assert ours.tolist() == pytest.approx([x * new / (head + 9) for x in [head] + [1] * 9])


def test_hold_out_never_takes_more_than_half_of_a_class():
    labels = np.repeat(np.arange(4), [100, 20, 5, 2])
    rows, held = darp.hold_out_labeled(labels, 0)
    assert np.bincount(labels[held]).tolist() == [10, 10, 2, 1]
    assert sorted([*rows, *held]) == list(range(127))


@pytest.mark.parametrize("pool,labeled", [
    pytest.param("disjoint", 0, marks=pytest.mark.slow), ("union", 1)])
@pytest.mark.slow
def test_estimated_targets_include_the_labeled_images_of_a_union_pool(tmp_path, capsys, pool,
                                                                      labeled):
    flags = f"{SHORT} --method darp --darp_warm 0.2 --darp_estimate --pool {pool}"
    t = train(tmp_path, flags, main)["method"]["t"]
    counts = data.class_counts(100, 10, 100)
    assert t.sum().item() == pytest.approx(sum(counts) * (1 + labeled), rel=1e-6)
    assert (t >= torch.tensor(counts) * labeled - 1e-6).all()
    assert "estimated counts" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------
# CReST


def test_selection_by_hand():
    predicted, confidence = np.array([0, 0, 0, 0, 1, 1, 2]), np.array([.5, .9, .7, .6, .3, .8, .4])
    labels = crest.select(predicted, confidence, np.array([0.5, 0.6, 1.0]))
    assert labels.tolist() == [-1, 0, 0, -1, -1, 1, 2]        # int(0.6 * 2) = 1 of class 1


def test_only_images_without_labels_are_ranked():
    """--pool union, perfect predictions, sure of the labeled images above all."""
    labels = np.repeat(np.arange(10), (N + M).long())
    place = np.arange(len(labels)) - np.searchsorted(labels, labels)           # within its class
    index_l = np.flatnonzero(place < N.numpy()[labels])
    sure = 1 + np.isin(np.arange(len(labels)), index_l)
    logits = torch.eye(10)[labels] * torch.from_numpy(sure)[:, None]
    ctx = SimpleNamespace(
        cfg=SimpleNamespace(crest_generations=2, iters=10, batch_size=2, seed=0), counts=N,
        index_l=index_l, index_u=np.random.default_rng(0).permutation(len(labels)), shard=(0, 1),
        ema=SimpleNamespace(model=lambda x: logits[x]), normalise=torch.from_numpy,
        dataset=SimpleNamespace(labels=labels, take=lambda index: (index, None),
                                read_ahead=lambda stream: None))
    method = crest.CReST(ctx)
    method.restart = lambda: None
    method.after_epoch(5)
    adopted = method.adopted.numpy()
    assert np.bincount(adopted[adopted >= 0]).tolist() == [
        646, 459, 324, 231, 164, 117, 83, 59, 42, 30]
    chosen = ctx.index_u[adopted >= 0]
    assert not np.isin(chosen, index_l).any()
    assert np.array_equal(labels[chosen], adopted[adopted >= 0])


def at_work(flags):
    """A method with a context of real parts, after three supervised steps of its network."""
    cfg, method = configure([*TINY.split(), *f"{SHORT} --seed 4 {flags}".split()])
    dataset = data.load("synthetic", image_size=8)
    index_l, index_u = data.split(dataset, cfg)
    model, ema, features = models.build_with_ema(cfg, 10, torch.device("cpu"), method.heads)
    optimizer = torch.optim.Adam(model.parameters(), cfg.lr)
    counts = torch.bincount(torch.from_numpy(dataset.labels[index_l])).double()
    stream = data.IndexStream(index_l, 6, 4, "labeled")
    method = method(Context(cfg, torch.device("cpu"), (0, 1), dataset, index_l, index_u, stream,
                            counts, Normalise(dataset.mean, dataset.std), model, ema, optimizer,
                            features))
    for step in range(3):
        one_step(method, model, optimizer, step)
        ema.update()
    return method


def one_step(method, model, optimizer, step):
    x, y = method.ctx.dataset.take(*method.labeled(step))
    logits = model.classifier(model.features(method.ctx.normalise(x)))
    batch = SimpleNamespace(step=step, index_u=method.ctx.index_u[:6])
    method.refine(logits.detach().softmax(1), batch)
    optimizer.zero_grad()
    F.cross_entropy(logits, y).backward()
    optimizer.step()


@pytest.mark.parametrize("name", ["crest", "crest+"])
def test_a_restart_is_a_fresh_build(name):
    """What the EMA (not the live network) predicts is adopted; then network, EMA, optimizer and
    ring buffer are those of a run that begins."""
    method = at_work(f"--method {name} --crest_generations 3 --pool union --lr 0.05 --ema 0.9")
    ctx = method.ctx
    new = np.flatnonzero(~np.isin(ctx.index_u, ctx.index_l))
    x = ctx.normalise(ctx.dataset.take(ctx.index_u[new])[0])

    def adopted_from(network):
        with torch.no_grad():
            confidence, y = deepcopy(network).eval()(x).softmax(1).max(1)
        labels = np.full(len(ctx.index_u), -1)
        labels[new] = crest.select(y.numpy(), confidence.numpy(), crest.shares(method.counts))
        return labels
    expected = adopted_from(ctx.ema.model)
    assert not np.array_equal(expected, adopted_from(ctx.model)) and (expected >= 0).any()
    method.after_epoch(3)
    assert np.array_equal(method.adopted, expected)

    torch.manual_seed(4 + 1000003)
    fresh = models.build("wrn-10-1", 10, ctx.cfg.bn_momentum)
    optimizer = torch.optim.Adam(fresh.parameters(), ctx.cfg.lr)
    assert same(dict(ctx.model.state_dict()), dict(fresh.state_dict()))
    assert same(dict(ctx.ema.model.state_dict()), dict(fresh.state_dict()))
    if name == "crest+":
        assert torch.equal(method.recent, torch.full((128, 10), 0.1))
    for step in (3, 4):                                       # the next steps agree bit for bit
        for network, adam in ((ctx.model, ctx.optimizer), (fresh, optimizer)):
            one_step(method, network, adam, step)
        ctx.ema.update()
    assert same(dict(ctx.model.state_dict()), dict(fresh.state_dict()))
    assert same(ctx.optimizer.state_dict(), optimizer.state_dict())
    assert not torch.equal(ctx.ema.model.stem.weight, ctx.ema.live[0])         # it trails again

    # The labeled images of this generation, adopted ones under the labels predicted for them; the
    # next selection starts from the original ones.
    labels = ctx.dataset.labels.copy()
    labels[ctx.index_u[expected >= 0]] = expected[expected >= 0]
    index, y = (np.concatenate(part) for part in zip(*map(method.labeled, range(3, 200)),
                                                     strict=True))
    assert set(index) == {*ctx.index_l, *ctx.index_u[expected >= 0]}
    assert np.array_equal(y, labels[index]) and (y != ctx.dataset.labels[index]).any()
    expected, first = adopted_from(ctx.ema.model), expected
    method.after_epoch(6)
    assert np.array_equal(method.adopted, expected) and ((first >= 0) & (expected < 0)).any()


def test_the_ramp_of_mixmatch_starts_again_with_each_generation(tmp_path):
    losses = []
    train(tmp_path, f"{SHORT} --base mixmatch --method crest --crest_generations 2 --iters 8 "
          f"--eval_every 4 --lambda_u 40", main, lambda step, values: losses.append(
              [values[name].item() for name in ("loss", "loss_x", "loss_u")]))
    weights = [(loss - loss_x) / loss_u for loss, loss_x, loss_u in losses]
    assert weights == pytest.approx(2 * [0, 10, 20, 30], rel=1e-3, abs=1e-3)


def test_generations_start_again_with_more_labels(tmp_path):
    flags = (f"{SHORT} --method crest --crest_generations 2 --iters 8 --eval_every 2 --pool union")
    state = train(tmp_path, flags, main)
    cfg, _ = configure([*TINY.split(), *flags.split()])
    index_l, index_u = data.split(data.load("synthetic", image_size=8), cfg)
    adopted = state["method"]["adopted"].numpy()
    assert state["method"]["_extra_state"] == 1 and (adopted >= 0).any()
    assert not (adopted[np.isin(index_u, index_l)] >= 0).any()
    # Adam has made only the steps of the second generation.
    assert {int(s["step"]) for s in state["optimizer"]["state"].values()} == {4}
    assert json.loads((tmp_path / "result.json").read_text())["evaluations"] == 2


def test_progressive_alignment_by_hand():
    """The target is N^0.75 in the middle of three generations; step 1 runs with restored state."""
    cfg = SimpleNamespace(crest_generations=3, batch_size=2, seed=0, iters=9)
    ctx = SimpleNamespace(
        cfg=cfg, counts=torch.tensor([8.0, 2.0], dtype=torch.float64), shard=(0, 1),
        index_l=np.array([0]), index_u=np.array([1]), dataset=SimpleNamespace(
            num_classes=2, labels=np.zeros(2, int), read_ahead=lambda stream: None))
    method, restored = crest.CReSTPlus(ctx), crest.CReSTPlus(ctx)
    method.generation += 1
    p = torch.tensor([[.9, .1], [.5, .5]])
    target = np.array([8, 2]) ** .75 / (8 ** .75 + 2 ** .75)
    expected = p.numpy() * target / .5
    expected /= expected.sum(1, keepdims=True)
    ours = method.refine(p, SimpleNamespace(step=0))
    np.testing.assert_allclose(ours, expected, rtol=1e-4)
    restored.load_state_dict(method.state_dict())
    mean = (127 * np.array([.5, .5]) + p.mean(0).numpy()) / 128       # the next step's divisor
    expected = p.numpy() * target / mean
    np.testing.assert_allclose(restored.refine(p, SimpleNamespace(step=1)),
                               expected / expected.sum(1, keepdims=True), rtol=1e-4)


# ---------------------------------------------------------------------------------------------
# ABC


def test_with_all_kept_abc_is_a_plain_second_head():
    g = torch.Generator().manual_seed(0)
    logits, y, ones = torch.randn(5, 3, generator=g), torch.tensor([0, 1, 2, 0, 1]), torch.ones(3)
    draw = torch.rand(5, generator=g)
    assert abc_head.thinned_loss(logits, y, ones, draw) == F.cross_entropy(logits, y)
    q = torch.tensor([[.97, .02, .01], [.1, .8, .1]])         # only the first one is sure enough
    rows = torch.randn(4, 3, generator=g)                     # two views of each
    log_p = rows.double().log_softmax(1).numpy()
    by_hand = -sum((q[0].numpy() * log_p[v]).sum() for v in (0, 1)) / 2
    assert abc_head.consistency_loss(rows, q, ones, draw[:2]).item() == pytest.approx(by_hand)


def test_thinning_balances_the_classes():
    y = torch.arange(10).repeat_interleave(N.long())
    draw = torch.rand(len(y), generator=torch.Generator().manual_seed(0))
    kept = torch.bincount(y[draw < abc_head.keep_rates(N)[y]], minlength=10).double()
    assert (kept - 15).abs().max() < 4 * np.sqrt(15)          # 15 expected of every class
    loss = abc_head.thinned_loss(torch.zeros(len(y), 10), y, abc_head.keep_rates(N), draw)
    assert loss.item() == pytest.approx(kept.sum().item() * np.log(10) / len(y), rel=1e-5)


def test_abc_loss_by_hand():
    """Rank 1 of 2 in the third of four epochs: b = 1/4, 1/2, 1; pseudo-labels: half way from 1."""
    B, U, step, g = 20, 300, 8, np.random.default_rng(0)
    torch.manual_seed(0)
    cfg = SimpleNamespace(base="fixmatch", seed=5, eval_every=3, iters=12)
    head = torch.nn.Linear(4, 3).double()
    method = abc_head.ABC(SimpleNamespace(
        cfg=cfg, device="cpu", shard=(1, 2), model=SimpleNamespace(auxiliary=head),
        counts=torch.tensor([8.0, 4.0, 2.0], dtype=torch.float64)))
    y, z_u, z = g.integers(3, size=B), 15 * g.normal(size=(U, 4)), g.normal(size=(B + 2 * U, 4))
    ours = method.extra_loss(SimpleNamespace(step=step, y_l=torch.from_numpy(y),
                                             z_u=torch.from_numpy(z_u), z=torch.from_numpy(z)))

    weight, bias = (t.detach().numpy() for t in (head.weight, head.bias))

    def log_softmax(rows):
        logits = rows @ weight.T + bias
        return logits - np.log(np.exp(logits).sum(1, keepdims=True))
    draw_l, draw_u = (data.rng(5, purpose, step).random(2 * n, dtype="float32")[n:]
                      for purpose, n in (("ABC labeled", B), ("ABC unlabeled", U)))
    log_p, q = log_softmax(z), np.exp(log_softmax(z_u))
    sure, kept = 0, []
    loss = -sum(log_p[i, y[i]] for i in range(B) if draw_l[i] < [.25, .5, 1][y[i]]) / B
    for u in range(U):
        if q[u].max() >= 0.95:
            sure += 1
            if draw_u[u] < [.625, .75, 1][q[u].argmax()]:
                kept.append(u)
                loss -= sum(q[u] @ log_p[B + 2 * u + view] for view in (0, 1)) / U
    assert 0 < len(kept) < sure < U
    assert ours.item() == pytest.approx(loss, rel=1e-6)

    # Its gradient in closed form, sum (p - target) z^T: the targets are constants.
    r = np.zeros((B + 2 * U, 3))
    for i in range(B):
        if draw_l[i] < [.25, .5, 1][y[i]]:
            r[i] = (np.exp(log_p[i]) - np.eye(3)[y[i]]) / B
    for u in kept:
        for row in (B + 2 * u, B + 2 * u + 1):
            r[row] = (np.exp(log_p[row]) - q[u]) / U
    ours.backward()
    np.testing.assert_allclose(head.weight.grad.numpy(), r.T @ z, rtol=1e-6)
    np.testing.assert_allclose(head.bias.grad.numpy(), r.sum(0), rtol=1e-6)


def test_abc_counts_a_confidence_of_exactly_its_tau():
    rows = torch.zeros(2, 2)                                  # H = log 2 of every target
    for confidence, kept in ((.95, 1), (.9499, 0)):
        q = torch.tensor([[confidence, 1 - confidence]])
        loss = abc_head.consistency_loss(rows, q, torch.ones(2), torch.zeros(1))
        assert loss.item() == pytest.approx(2 * kept * np.log(2))


def test_abc_on_mixmatch_looks_at_unmixed_views():
    """Labeled views and two strong views of each unlabeled image in passes of their own, in train
    mode; running statistics stay."""
    method = at_work("--base mixmatch --method abc")
    ctx, before = method.ctx, deepcopy(dict(method.ctx.model.named_buffers()))
    x_u, _ = ctx.dataset.take(ctx.index_u[:3])
    x_l = torch.randn(4, 3, 8, 8)
    z_l, z_s = method.unmixed(SimpleNamespace(step=7, x_l=x_l, x_u=x_u))
    assert same(dict(ctx.model.named_buffers()), before)
    torch.testing.assert_close(z_l, deepcopy(ctx.model).features(x_l))
    views = strong(x_u[[0, 0, 1, 1, 2, 2]], data.rng(4, "strong view", 7), ctx.normalise)
    torch.testing.assert_close(z_s, deepcopy(ctx.model).features(views))


def test_abc_predicts_with_its_own_head(finished):
    folder = finished(flags_of("fixmatch", "abc", EAGER["abc"]))
    run, ema = evaluate.load_run(folder), checkpoint(folder)["ema"]
    assert not same(ema["auxiliary.weight"], ema["classifier.weight"])
    x = torch.randn(4, 3, 8, 8)
    z = run.model.features(x)
    by_hand = z @ ema["auxiliary.weight"].T + ema["auxiliary.bias"]
    torch.testing.assert_close(run.predict(x), by_hand)


# ---------------------------------------------------------------------------------------------
# SaR, DASO


def sar_method(temperature=None):
    cfg = SimpleNamespace(sar_start=0.0, iters=10)
    if temperature:
        cfg.temperature = temperature
    return sar.SaR(SimpleNamespace(cfg=cfg, index_u=np.arange(4), dataset=SimpleNamespace(
        num_classes=3, labels=np.zeros(4))))


def test_sar_counts_the_newest_raw_predictions_of_seen_images():
    method = sar_method()
    p = torch.tensor([[.5, .3, .2], [.6, .3, .1], [.1, .2, .7]])
    assert torch.equal(method.refine(p, SimpleNamespace(index_u=np.array([0, 1, 2]))), p)
    method.refine(p[2:], SimpleNamespace(index_u=np.array([1])))      # image 1 changes its mind
    method.after_epoch(1)
    counts = np.array([1., 1., 2.])                           # class 1: never, counts as 1
    beta = (counts.mean() - 1) / counts.mean()
    v = (1 - beta) / (1 - beta ** counts)
    np.testing.assert_allclose(method.v, 3 * v / v.sum(), rtol=1e-6)
    refined = method.refine(p, SimpleNamespace(index_u=np.array([0, 1, 2])))
    expected = p.numpy() * v
    np.testing.assert_allclose(refined, expected / expected.sum(1, keepdims=True), rtol=1e-5)
    assert method.newest.tolist() == [0, 0, 2, -1]
    refined = method.refine(torch.tensor([[.38, .2, .42]]), SimpleNamespace(index_u=np.array([3])))
    assert refined.argmax() == 0 and method.newest.tolist() == [0, 0, 2, 2]    # as it was predicted


def test_sar_on_mixmatch_acts_before_the_sharpening():
    method, p = sar_method(0.5), torch.tensor([[.5, .3, .2]])
    method.v.copy_(torch.tensor([.5, 1., 1.5]))
    ours = method.refine(sharpen(p, 0.5), SimpleNamespace(index_u=np.array([0])))
    weighted = p * method.v
    torch.testing.assert_close(ours, sharpen(weighted / weighted.sum(1, True), 0.5))


def daso_method(features, start=0.02):
    cfg = SimpleNamespace(daso_td=1.5, daso_start=start, iters=100, base="fixmatch")
    model = SimpleNamespace(classifier=SimpleNamespace(in_features=2))
    ema = SimpleNamespace(model=SimpleNamespace(features=features))
    return daso.DASO(SimpleNamespace(cfg=cfg, model=model, ema=ema,
                                     dataset=SimpleNamespace(num_classes=3)))


def test_daso_without_a_complete_window_does_not_blend():
    assert daso.blend_weights(torch.zeros(3), 0.3).tolist() == [0, 0, 0]


def test_queues_are_first_in_first_out(monkeypatch):
    monkeypatch.setattr(daso, "QUEUE", 4)
    method, queues = daso_method(lambda x: x), [deque(maxlen=4) for _ in range(3)]
    g = torch.Generator().manual_seed(0)
    for _ in range(6):
        x, y = torch.randn(5, 2, generator=g), torch.randint(2, (5,), generator=g)
        method.push(x, y)
        for row, k in zip(x, y, strict=True):
            queues[k].append(row)
    for k in range(2):
        torch.testing.assert_close(method.centres[k], torch.stack(list(queues[k])).mean(0))
    assert torch.equal(method.centres[2], torch.zeros(2))     # no image of class 2 came


def test_blending_and_alignment_by_hand():
    method = daso_method(lambda x: x)
    centres = torch.tensor([[2., 0.], [0., 1.], [-3., 0.]])
    batch = SimpleNamespace(step=1, x_l=centres, y_l=torch.arange(3), z_u=torch.tensor([[1., 1.]]))
    p = torch.tensor([[.2, .5, .3]])
    assert torch.equal(method.refine(p, batch), p)            # before the start
    assert method.histogram.tolist() == [0, 1, 0]             # a window of two, this one ends it
    method.histogram.copy_(torch.tensor([8., 1., 0.]))
    batch.step = 2
    cosine = np.array([1, 1, -1]) / np.sqrt(2)
    q = np.exp(cosine / .05) / np.exp(cosine / .05).sum()
    v = (1 / 8) ** (1 / 1.5)                                  # of class 1 = argmax p
    blended = (1 - v) * p[0].numpy() + v * q
    np.testing.assert_allclose(method.refine(p, batch)[0].numpy(), blended, rtol=1e-4)
    batch.z = torch.cat([torch.zeros(3, 2), torch.tensor([[1., 0.], [0., 1.]])])
    rows = np.array([[1, 0, -1], [0, 1, 0]]) / .05            # cosines of the two strong views
    log_p = rows - np.log(np.exp(rows).sum(1, keepdims=True))
    assert method.extra_loss(batch).item() == pytest.approx(-(q * log_p).sum(1).mean(), rel=1e-4)


def test_daso_has_no_alignment_loss_on_mixmatch():
    """All rows are mixtures there; the labels are blended all the same."""
    method = daso_method(lambda x: x)
    method.ctx.cfg.base, method.histogram[0] = "mixmatch", 1.
    batch = SimpleNamespace(step=2, x_l=torch.eye(2), y_l=torch.arange(2), z=torch.ones(6, 2),
                            z_u=torch.tensor([[0., 1.]]))
    assert method.refine(torch.tensor([[.8, .1, .1]]), batch).argmax() == 1
    assert method.extra_loss(batch) == 0


def softmax(rows):
    return np.exp(rows) / np.exp(rows).sum(1, keepdims=True)


def test_eight_steps_of_daso_by_hand():
    """Four unlabeled images, two strong views of each, blending from the third step on; a window
    of two steps. Queues as lists, windows as lists of labels."""
    method, g = daso_method(lambda x: x), np.random.default_rng(1)
    queues, window, m, moved = [[], [], []], [], np.zeros(3), 0

    def cosines(z):
        rows = []
        for row in z:
            centres = [np.mean(queue, axis=0) if queue else np.zeros(2) for queue in queues]
            rows.append([row @ c / max(np.linalg.norm(row) * np.linalg.norm(c), 1e-12) / .05
                         for c in centres])
        return np.array(rows)
    for step in range(8):
        x_l, y_l, z_u = g.normal(size=(3, 2)), g.integers(3, size=3), g.normal(size=(4, 2))
        z, p = g.normal(size=(3 + 8, 2)), g.dirichlet([3, 2, 1], size=4)
        batch = SimpleNamespace(step=step, **{k: torch.from_numpy(v) for k, v in (
            ("x_l", x_l), ("y_l", y_l), ("z_u", z_u), ("z", z))})
        batch.x_l, batch.z_u, batch.z = batch.x_l.float(), batch.z_u.float(), batch.z.float()
        refined = method.refine(torch.from_numpy(p).float(), batch).numpy()
        batch.z.requires_grad_()
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
            log_p = np.log(softmax(cosines(z[3:])))
            by_hand = -sum(q[i] @ log_p[2 * i + view] for i in range(4) for view in (0, 1)) / 8
            assert loss.item() == pytest.approx(by_hand, rel=1e-4)
            gradient, = torch.autograd.grad(loss, batch.z)
            assert (gradient[:3] == 0).all() and (gradient[3:] != 0).any()
        else:
            assert loss == 0
        np.testing.assert_allclose(refined, blended, rtol=1e-4, atol=1e-6)
        window += blended.argmax(1).tolist()
        if step % 2:
            m, window = np.bincount(window, minlength=3).astype(float), []
        assert method.histogram.tolist() == m.tolist()
    assert moved > 3                         # a histogram of labels that are not blended differs
