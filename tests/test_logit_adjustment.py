"""Logit adjustment: the numbers of methods_after.md, section 1; one iteration and three by hand;
all rows = an attractor that is fixed at the prior; balanced labels = the base method. (Resume, and
that evaluate.py agrees with training: test_rivals.py.)"""
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import TINY, checkpoint, same, train
from replay import FixMatchReplay

import data
import evaluate
import train_fixmatch
import train_mixmatch
from attractor import BiasAttractor, BiasVector
from baselines import Method, logit_adjustment
from baselines.train import configure, main, unlabeled_part

PI = torch.tensor([70.0, 20.0, 10.0], dtype=torch.float64)       # counts, as the loop has them
TUTORIALS = {"fixmatch": train_fixmatch, "mixmatch": train_mixmatch}
BASES = {"fixmatch": "--tau 0.2 --n_strong 2", "mixmatch": ""}
BASE = [pytest.param("fixmatch"), pytest.param("mixmatch", marks=pytest.mark.slow)]
ONE = "--iters 1 --eval_every 1 "
VARIANTS = ("la", "la_all", "la_post_hoc")


def build(kind, counts=PI):
    """(method, its live network, its EMA)"""
    networks = Logits(), Logits()
    for network in networks:
        kind.heads(network)
    return kind(SimpleNamespace(counts=counts, device="cpu", model=networks[0],
                                ema=SimpleNamespace(model=networks[1]))), *networks


class Logits(torch.nn.Module):
    """A network whose input are its logits."""

    def __init__(self):
        super().__init__()
        self.classifier = torch.nn.Linear(2, 3)

    def forward(self, x):
        return x


def approx(values):
    return pytest.approx(values, abs=6e-5)


# ---------------------------------------------------------------------------------------------
# fixtures


@pytest.mark.parametrize("gamma,expected", [
    (100, "-0.9083 -1.4202 -1.9318 -2.4438 -2.9588 -3.4679 -3.9874 -4.5079 -5.0026 -5.5134"),
    (150, "-0.8462 -1.4036 -1.9609 -2.5175 -3.0780 -3.6376 -4.1891 -4.7582 -5.3262 -5.8568")])
def test_log_shares_of_cifar10(gamma, expected):
    counts = torch.tensor(data.class_counts(1500, 10, gamma), dtype=torch.float64)
    ours = logit_adjustment.log_prior(counts)
    assert ours.tolist() == approx([float(x) for x in expected.split()])
    assert ours.dtype == torch.float32                       # that of the logits


@pytest.mark.parametrize("y,plain,expected", [(2, 2.4076, 4.0632), (0, 0.4076, 0.1173)])
def test_labeled_loss_and_its_gradient(y, plain, expected):
    logits, target = torch.tensor([[2.0, 1.0, 0.0]], requires_grad=True), torch.tensor([y])
    assert Method(None).supervised_loss(logits, target, 0).item() == approx(plain)
    loss = build(logit_adjustment.LA)[0].supervised_loss(logits, target, 0)
    assert loss.item() == approx(expected)
    loss.backward()
    p = np.array([0.7, 0.2, 0.1]) * np.exp([2, 1, 0])
    assert logits.grad[0].tolist() == pytest.approx(p / p.sum() - np.eye(3)[y])
    if y == 2:
        assert logits.grad[0].tolist() == approx([0.8893, 0.0935, -0.9828])


def losses_by_part(kind, counts=PI):
    """(labeled, unlabeled) of two images each, of which one unlabeled one is sure enough; one
    strong view."""
    method, *_ = build(kind, counts)
    labeled, y_l = torch.tensor([[2.0, 1, 0], [0, 1, 1]]), torch.tensor([0, 2])
    confidence, y_u = torch.tensor([[0.0, 0, 4], [1, 0.5, 0]]).softmax(1).max(1)
    plain = unlabeled_part(train_fixmatch.fixmatch_loss, y_l[:0], y_u,
                           (confidence >= 0.95).float(), 1)
    parts = (method.supervised_loss(labeled, y_l, 0),
             method.unlabeled_loss(torch.tensor([[0.5, 0, 1.5], [1, 0, 0]]), plain, None))
    return [part.item() for part in parts]


KINDS = [Method, logit_adjustment.LA, logit_adjustment.LAAll, logit_adjustment.LAPostHoc]
PARTS = [(0.6348, 0.2322), (0.9178, 0.2322), (0.9178, 0.6958), (0.6348, 0.2322)]


@pytest.mark.parametrize("kind,expected", list(zip(KINDS, PARTS, strict=True)))
def test_losses_of_both_parts(kind, expected):
    assert losses_by_part(kind) == approx(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_with_balanced_labels_every_variant_is_the_base(kind):
    counts = torch.full((3,), 7.0, dtype=torch.float64)
    assert losses_by_part(kind, counts) == pytest.approx(losses_by_part(Method), rel=1e-6)
    method, _, ema = build(kind, counts)
    scores = method.predict(ema, torch.tensor([[2.0, 1.0, 0.2]]))
    assert (scores[0] - scores[0, 1]).tolist() == pytest.approx([1, 0, -0.8])


def test_post_hoc_prediction():
    method, *networks = build(logit_adjustment.LAPostHoc)
    for network in networks:
        scores = method.predict(network, torch.tensor([[2.0, 1.0, 0.2]]))
        assert scores[0].tolist() == approx([2.3567, 2.6094, 2.5026]) and scores.argmax() == 1


# ---------------------------------------------------------------------------------------------
# the loop


def run(out, flags, script=main):
    """(checkpoint, losses of each iteration)"""
    losses = []
    state = train(out, flags, script, lambda step, values: losses.append(
        {name: values[name].item() for name in ("loss", "loss_x", "loss_u")}))
    return state, losses


def gradient(state):
    """Of theta and phi at the first step: Adam's mean of gradients is a tenth of it. (P,)"""
    moments = state["optimizer"]["state"]
    return torch.cat([moments[i]["exp_avg"].flatten() for i in sorted(moments)]) * 10


def close(a, b, tolerance=1e-4):
    """Whether two gradients are equal but for rounding."""
    return ((a - b).norm() < tolerance * b.norm()).item()


def shift_of(flags):
    """(10,) log N_k of the split that the flags make."""
    cfg, _ = configure([*TINY.split(), *flags.split()])
    dataset = data.load("synthetic", image_size=8)
    return torch.from_numpy(np.log(np.bincount(dataset.labels[data.split(dataset, cfg)[0]])))


class Replay(FixMatchReplay):
    """Plain FixMatch by hand, where log N_k is added to logits of the first `rows` rows of L."""
    rows_with_prior = 6

    def rows(self, step):
        x, plain = super().rows(step)
        shift = torch.zeros(len(x), 10)
        shift[:self.rows_with_prior] = shift_of("").float()
        return x, lambda logits: plain(logits + shift)


@pytest.mark.parametrize("method,rows", [
    ("la", 6), pytest.param("la_all", 18, marks=pytest.mark.slow),
    pytest.param("la_post_hoc", 0, marks=pytest.mark.slow)])
def test_three_iterations_by_hand(tmp_path, method, rows):
    """Pseudo-labels come from the plain logits, whichever rows are adjusted."""
    flags = "--tau 0.2 --n_strong 2 --iters 3 --eval_every 1 --ema 0.5 --weight_decay 5"
    state, losses = run(tmp_path, f"{flags} --method {method}")
    assert any(0 < row["mask_rate"] < 1 for row in state["history"])
    replay = Replay(f"{flags} --method none")
    replay.rows_with_prior = rows
    replay.compare(state | {"attractor": replay.attractor.state_dict()}, [
        {"loss": values["loss"]} for values in losses])


@pytest.mark.parametrize("base", BASE)
def test_which_rows_are_adjusted(tmp_path, base):
    """The first iteration, where all variants have the same logits and pseudo-labels."""
    flags = f"{ONE} --base {base} {BASES[base]} --method "
    first = {m: run(tmp_path / m, flags + m)[1][0] for m in ("none", *VARIANTS)}
    for part, adjusts in {"loss_x": ("la", "la_all"), "loss_u": ("la_all",)}.items():
        values = {m: first[m][part] for m in first}
        assert {m for m in values if values[m] != values["none"]} == set(adjusts)
        assert len({values[m] for m in adjusts}) == 1


def prior_start(zero_weight):
    """train_*.build_attractor: the MLP whose output bias is the centred log N_k, or that vector."""
    def build(cfg, counts):
        log = counts.double().log()
        attractor = BiasAttractor(10) if zero_weight else BiasVector(10)
        with torch.no_grad():
            (attractor.out if zero_weight else attractor).bias.copy_(log - log.mean())
            if zero_weight:
                attractor.out.weight.zero_()
        return attractor
    return build


@pytest.mark.parametrize("base", BASE)
def test_all_rows_is_an_attractor_that_stays_at_the_prior(tmp_path, monkeypatch, base):
    """LA on all rows, the K-vector and the MLP with a zero last weight that start at the prior:
    the same loss and gradient of theta and phi at the first step. With eta = 0 the vector's run
    goes on being the same."""
    script, flags = TUTORIALS[base], BASES[base]
    ours, losses = run(tmp_path / "la", f"{ONE} --base {base} {flags} --method la_all")
    plain, _ = run(tmp_path / "none", f"{ONE} --base {base} {flags}")
    assert not close(gradient(ours), gradient(plain), 1e-2)
    vector = f"{flags} --attractor vector --attractor_start prior"
    states = [run(tmp_path / "vector", ONE + vector, script.main)]
    for zero_weight in (False, True):
        monkeypatch.setattr(script, "build_attractor", prior_start(zero_weight))
        states.append(run(tmp_path / f"{zero_weight}", ONE + flags, script.main))
    for state, theirs in states:
        assert theirs[0] == pytest.approx(losses[0], rel=1e-5)
        assert close(gradient(state), gradient(ours))
    monkeypatch.undo()
    _, losses = run(tmp_path / "la all", f"--base {base} {flags} --method la_all")
    _, theirs = run(tmp_path / "fixed", f"{vector} --eta 0", script.main)
    assert len(losses) == 6
    for a, b in zip(losses, theirs, strict=True):
        assert a == pytest.approx(b, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES)
def test_runs_with_balanced_labels_are_the_base(tmp_path, base):
    flags = f"{ONE} --base {base} {BASES[base]} --gamma_l 1 --n1 20 --m1 20 --method "
    states = {m: run(tmp_path / m, flags + m) for m in ("none", *VARIANTS)}
    plain, losses = states.pop("none")
    for state, theirs in states.values():
        assert theirs[0] == pytest.approx(losses[0], rel=1e-5)
        assert close(gradient(state), gradient(plain), 1e-3)
        assert state["history"][0]["recall_3"] == plain["history"][0]["recall_3"]


@pytest.mark.parametrize("base", BASE)
def test_post_hoc_trains_the_plain_base_and_predicts_with_the_adjustment(finished, base):
    """Released code's recipe: weight decay acts on BatchNorm's buffers, but not on this one."""
    flags = (f"--base {base} {BASES[base]} --ema 0.5 --weight_decay 20 --wrn_quirk --decay_bn "
             "--iters 9 --method ")
    folder = finished(flags + "la_post_hoc")
    ours, plain = checkpoint(folder), checkpoint(finished(flags + "none"))
    assert same(ours["optimizer"], plain["optimizer"])
    expected = shift_of(f"--base {base}").log_softmax(0).float()               # log pi
    for part in ("model", "ema"):
        assert same({k: ours[part][k] for k in plain[part]}, plain[part])
        torch.testing.assert_close(ours[part]["log_prior"], expected, rtol=1e-6, atol=1e-6)
    trained = ("loss_x", "loss_u", "mask_rate", "pseudo_acc")
    for a, b in zip(ours["history"], plain["history"], strict=True):
        assert same([a[key] for key in trained], [b[key] for key in trained])
    finished_run, x = evaluate.load_run(folder), torch.randn(4, 3, 8, 8)
    torch.testing.assert_close(finished_run.predict(x), finished_run.model(x) - expected)
    assert finished_run.last["recall"] == pytest.approx(
        [ours["history"][-1][f"recall_{k}"] for k in range(10)])
