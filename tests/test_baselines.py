"""The loop of the baselines and the supervised methods: constants, losses and samplers against
hand-written ones; which images a run uses; plain bases equal the tutorials; resume; wrong input."""
import csv
import json
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import (
    TINY,
    checkpoint,
    exit_of,
    files,
    log_rows,
    own_npz,
    same,
    stopped,
    train,
)

import data
import evaluate
import models
import train_fixmatch
import train_mixmatch
from baselines import Method, supervised
from baselines.train import configure, main
from support import augment

COUNTS = torch.tensor([1500, 899, 539, 323, 193, 116, 69, 41, 25, 15]).double()    # CIFAR-10, 100
SUPERVISED = "--base supervised --method "


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def backbone(weights):
    return {k: v for k, v in weights.items() if not k.startswith("classifier")}


def classifier(weights):
    return {k: v for k, v in weights.items() if k.startswith("classifier")}


def close_but_for_rounding(ours, theirs):
    """Adam divides a gradient by its own size: where that is nearly 0, rounding decides."""
    a, b = (torch.cat([s[k].flatten() for k in ours]) for s in (ours, theirs))
    return ((a - b).abs() < 2e-5).float().mean() > 0.99


# ---------------------------------------------------------------------------------------------
# constants


@pytest.mark.parametrize("ours,expected", [
    (supervised.margins(COUNTS),
     "0.1581 0.1797 0.2042 0.2321 0.2640 0.2998 0.3414 0.3889 0.4401 0.5000"),
    (supervised.effective_number_weights(COUNTS),
     "0.0431 0.0698 0.1144 0.1889 0.3140 0.5205 0.8730 1.4671 2.4042 4.0050"),
    (supervised.effective_number_weights(COUNTS, 0.999),
     "0.0751 0.0984 0.1400 0.2114 0.3324 0.5327 0.8751 1.4525 2.3632 3.9190"),
    (supervised.inverse_frequency_weights(COUNTS),
     "0.0401 0.0670 0.1117 0.1864 0.3120 0.5191 0.8726 1.4686 2.4084 4.0141")],
    ids=["LDAM margins", "DRW weights", "beta 0.999", "cRT weights"])
def test_constants_for_cifar10(ours, expected):
    assert ours.tolist() == pytest.approx([float(x) for x in expected.split()], abs=5.1e-5)


# ---------------------------------------------------------------------------------------------
# LDAM


def test_cosine_classifier_against_numpy():
    torch.manual_seed(0)
    layer, z = supervised.CosineClassifier(5, 3).double(), 4 * torch.randn(7, 5).double()
    weight, ours = layer.weight.detach().numpy(), layer(z)
    assert layer.bias is None and weight.shape == (3, 5)
    for i in range(7):
        for k in range(3):
            a, b = z[i].numpy(), weight[k]
            assert ours[i, k].item() == pytest.approx(a @ b / np.sqrt((a @ a) * (b @ b)), rel=1e-12)


def ldam_by_hand(cosines, target, weighted):
    """Row by row: margin m_y off the true class only, scale 30, weighted mean over the batch."""
    n = COUNTS.numpy()
    weights = 1e-4 / (1 - 0.9999 ** n)
    weights *= 10 / weights.sum()
    total = divisor = 0
    for row, y in zip(cosines, target, strict=True):
        logits = 30 * row
        logits[y] = 30 * (row[y] - 0.5 * (15 / n[y]) ** 0.25)
        weight = weights[y] if weighted else 1
        total += weight * (np.log(np.exp(logits).sum()) - logits[y])
        divisor += weight
    return total / divisor


@pytest.mark.parametrize("step,iters,weighted", [(0, 100, False), (79, 100, False), (80, 100, True),
                                                 (99, 100, True), (199_999, 250_000, False),
                                                 (200_000, 250_000, True)])
def test_ldam_loss_against_numpy(step, iters, weighted):
    g = np.random.default_rng(0)
    cosines, target = g.uniform(-1, 1, (16, 10)), g.integers(10, size=16)
    method = supervised.LDAM(SimpleNamespace(counts=COUNTS, device="cpu",
                                             cfg=SimpleNamespace(iters=iters)))
    ours = method.supervised_loss(torch.from_numpy(cosines).float(), torch.from_numpy(target), step)
    assert ours.item() == pytest.approx(ldam_by_hand(cosines, target, weighted), rel=1e-5)
    assert abs(ldam_by_hand(cosines, target, True) - ldam_by_hand(cosines, target, False)) > 1e-2


def test_ldam_weights_come_late_in_a_run(tmp_path):
    """The first 4 of 5 iterations equal those of a run of 10; the fifth has class weights."""
    short, long = ([], [])
    for losses, iters in ((short, 5), (long, 10)):
        train(tmp_path / str(iters), f"{SUPERVISED}ldam --iters {iters} --eval_every {iters}", main,
              lambda step, values, losses=losses: losses.append(values["loss_x"].item()))
    assert short[:4] == long[:4] and short[4] != long[4]


@pytest.mark.parametrize("method", [supervised.LDAM, supervised.CRT])
def test_constants_are_on_the_device_of_the_logits(method):
    ctx = SimpleNamespace(counts=COUNTS, cfg=SimpleNamespace(iters=10, crt_iters=5), device="meta")
    method = method(ctx).to("meta")
    tensors = [v for v in [*vars(method).values(), *method.buffers()] if torch.is_tensor(v)]
    assert tensors and all(t.is_meta for t in tensors)


# ---------------------------------------------------------------------------------------------
# samplers and bounds

SMALL = "--n1 12 --gamma_l 4 --m1 9 --gamma_u 3"


@pytest.fixture
def taken(monkeypatch):
    """Function: (indices, labels) of all training images that were used so far."""
    seen, take = [], data.Dataset.take

    def spy(self, index, labels=None):
        x, y = take(self, index, labels)
        seen.append((index, y.numpy()))
        return x, y
    monkeypatch.setattr(data.Dataset, "take", spy)
    return lambda: [np.concatenate(part) for part in zip(*seen, strict=True)]


def small_split():
    dataset = data.load("synthetic", image_size=8)
    cfg, _ = configure(f"{SUPERVISED}vanilla {SMALL}".split())
    return dataset, *data.split(dataset, cfg)


def test_resampling_takes_all_classes_equally_often(tmp_path, taken):
    train(tmp_path, f"{SUPERVISED}resampling {SMALL} --iters 20 --eval_every 20", main)
    dataset, labeled, _ = small_split()
    index, y = taken()                                                # 120 images: 12 rounds
    assert np.bincount(y).tolist() == [12] * 10
    assert np.array_equal(y, dataset.labels[index])
    times = {i: int((index == i).sum()) for i in labeled}
    assert sum(times.values()) == 120                                 # no unlabeled image
    for k in range(10):                                               # 12 / N_k each
        n = sum(dataset.labels[i] == k for i in labeled)
        own = {times[i] for i in labeled if dataset.labels[i] == k}
        assert own <= {12 // n, -(-12 // n)}


def test_vanilla_takes_only_labeled_images(tmp_path, taken):
    dataset, labeled, _ = small_split()
    train(tmp_path, f"{SUPERVISED}vanilla {SMALL} --iters 12 --eval_every 12", main)
    index, y = taken()                                                # 72 images
    assert len(labeled) == 62 and sorted(index[:62]) == sorted(labeled)
    assert set(index) == set(labeled)
    assert np.array_equal(y, dataset.labels[index])


@pytest.mark.parametrize("pool", [slow("disjoint"), "union"])
def test_upper_bound_takes_all_images_with_true_labels(tmp_path, taken, pool):
    dataset, labeled, unlabeled = small_split()
    both = sorted({*labeled, *unlabeled})
    train(tmp_path, f"{SUPERVISED}upper_bound {SMALL} --pool {pool} --iters 21 --eval_every 21",
          main)
    index, y = taken()
    assert 62 < len(both) <= 126
    assert sorted(index[:len(both)]) == both and set(index) == set(both)
    assert np.array_equal(y, dataset.labels[index])


def test_upper_bound_needs_true_labels(tmp_path, capsys):
    code, err = refused(f"{SUPERVISED}upper_bound --dataset {own_npz(tmp_path)} --model wrn-10-1",
                        tmp_path / "run", capsys)
    assert code == 2 and err.count("\n") == 1 and "--method upper_bound" in err
    assert not (tmp_path / "run").exists()


def test_lower_bound_is_vanilla(finished):
    a, b = (checkpoint(finished(SUPERVISED + m)) for m in ("vanilla", "lower_bound"))
    assert same(a, b)


@pytest.mark.slow
def test_methods_differ(finished):
    states = [checkpoint(finished(SUPERVISED + m))
              for m in ("vanilla", "resampling", "upper_bound")]
    assert len({tuple(s["model"]["bn.running_mean"].tolist()) for s in states}) == 3


# ---------------------------------------------------------------------------------------------
# cRT

CRT = f"{SUPERVISED}crt --iters 4 --crt_iters 4 --eval_every 2"


@pytest.fixture(scope="module")
def between_stages(tmp_path_factory):
    """Function: checkpoint of a cRT run that was stopped between its stages."""
    return cache(lambda: stopped(tmp_path_factory.mktemp("crt"), CRT, after=4, main=main))


@pytest.fixture
def crt(finished, between_stages):
    """Checkpoints: vanilla, cRT between its stages, cRT at its end."""
    return (checkpoint(finished(f"{SUPERVISED}vanilla --iters 4 --eval_every 2")),
            between_stages(), checkpoint(finished(CRT)))


def test_crt_first_stage_is_vanilla(crt):
    vanilla, between, end = crt
    assert same(log_rows(vanilla), log_rows(between))
    assert same(log_rows(vanilla), log_rows(end)[:2])
    assert same(backbone(vanilla["ema"]), backbone(between["ema"]))
    assert same(between["ema"], between["model"])             # goes on from the averaged weights


def test_crt_classifier_starts_from_new_weights(crt):
    vanilla, between, _ = crt
    weight = between["model"]["classifier.weight"]
    torch.manual_seed(0)
    start = models.build("wrn-10-1", 10).classifier.weight
    assert all(not torch.equal(weight, other) for other in
               (vanilla["ema"]["classifier.weight"], vanilla["model"]["classifier.weight"], start))
    assert weight.std().item() == pytest.approx(start.std().item(), rel=0.15)
    assert torch.equal(between["model"]["classifier.bias"], torch.zeros(10))
    assert between["optimizer"]["state"] == {}


def test_crt_second_stage_trains_only_the_classifier(crt):
    _, between, end = crt
    assert end["step"] == 8
    for part in ("model", "ema"):
        assert same(backbone(between[part]), backbone(end[part]))
        assert all(not torch.equal(v, end[part][k]) for k, v in classifier(between[part]).items())


def test_crt_weights_balance_the_classes_whatever_the_batches():
    """The official objective, -mean_i sum_k w_k Y_ik log p_ik; its mean over batches of any size is
    that over the dataset, in which every class has the same part."""
    counts, g = np.array([12, 6, 2]), np.random.default_rng(0)
    method = supervised.CRT(SimpleNamespace(counts=torch.tensor(counts).double(), device="cpu",
                                            cfg=SimpleNamespace(iters=10, crt_iters=5)))
    logits, y = g.normal(size=(20, 3)), np.repeat(np.arange(3), counts)
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    weights = (1 / counts) / (1 / counts).sum() * 3
    official = -np.mean(np.sum(log_p * np.eye(3)[y] * weights, axis=1))
    rows = -log_p[np.arange(20), y]
    assert official == pytest.approx(
        sum(rows[y == k].mean() for k in range(3)) * weights[0] * 12 / 20)

    def ours(size):
        batches = zip(*(torch.from_numpy(t).split(size) for t in (logits, y)), strict=True)
        return np.mean([method.supervised_loss(*batch, step=9).item() for batch in batches])
    assert ours(4) == pytest.approx(rows.mean())              # the first stage
    method.second_stage = True
    assert [ours(size) for size in (1, 4, 20)] == pytest.approx([official] * 3)


def test_crt_second_stage_by_hand(crt):
    """Features by running statistics, weights 1 / N_k, a new Adam, no weight decay."""
    _, between, end = crt
    cfg, _ = configure(f"{TINY} {CRT}".split())
    dataset = data.load("synthetic", image_size=8)
    labeled, _ = data.split(dataset, cfg)
    stream = data.IndexStream(labeled, 6, 0, "labeled")
    share = 1 / np.bincount(dataset.labels[labeled])
    weights = torch.tensor(share / share.sum() * 10).float()
    model = models.build("wrn-10-1", 10)
    model.load_state_dict(between["model"])
    model.eval()
    optimizer = torch.optim.Adam(model.classifier.parameters(), cfg.lr)
    ema = {k: v.clone() for k, v in classifier(between["ema"]).items()}
    for step in range(4, 8):
        x, y = dataset.take(stream.batch(step))
        x = augment.weak(x, data.rng(0, "labeled view", step),
                         augment.Normalise(dataset.mean, dataset.std))
        log_p = model(x).log_softmax(1)
        loss = -(log_p * torch.eye(10)[y] * weights).sum(1).mean()             # as in its code
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema = {k: cfg.ema * v + (1 - cfg.ema) * model.state_dict()[k] for k, v in ema.items()}
    assert close_but_for_rounding(classifier(end["model"]), model.state_dict())
    assert close_but_for_rounding(classifier(end["ema"]), ema)


def second_stage_mean(folder, iters):
    with open(folder / "log.csv") as file:
        rows = [r for r in csv.DictReader(file) if int(r["iter"]) > iters][-20:]
    return len(rows), np.mean([float(r["bacc"]) for r in rows])


@pytest.mark.parametrize("flags,evaluations", [
    (f"{SUPERVISED}crt --iters 4 --crt_iters 22 --eval_every 1", 20), (CRT, 2)])
@pytest.mark.slow
def test_crt_result_is_the_mean_over_the_second_stage(finished, flags, evaluations):
    result = json.loads((finished(flags) / "result.json").read_text())
    count, mean = second_stage_mean(finished(flags), 4)
    assert count == evaluations == result["evaluations"]
    assert result["bacc"] == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize("after", [3, 5], ids=["first", "second"])
def test_crt_resumed_inside_a_stage(tmp_path, crt, after):
    stopped(tmp_path, CRT, after, main)
    assert same(crt[2], train(tmp_path, CRT + " --resume", main))


@pytest.mark.parametrize("flags,stages", [
    ("--dataset cifar10", (250_000, 10_000)), ("--dataset sun397", (69_300, 4620)),
    ("--dataset cifar10 --scale mini", (2000, 1000)), ("", (1200, 600)), ("--iters 5", (5, 2)),
    ("--iters 1", (1, 1)), ("--iters 100 --eval_every 2", (100, 40)),
    ("--iters 9 --crt_iters 30", (9, 30))])
def test_crt_default_length_of_the_second_stage(flags, stages):
    """20 epochs, as in the protocol, but no more than half of the first stage."""
    cfg, _ = configure(f"{SUPERVISED}crt {flags}".split())
    assert (cfg.iters - cfg.crt_iters, cfg.crt_iters) == stages


def test_crt_stage_ends_between_evaluations(tmp_path):
    """The first stage has --iters iterations, whether or not an evaluation is due there."""
    vanilla = train(tmp_path / "vanilla", f"{SUPERVISED}vanilla --iters 4", main)
    end = train(tmp_path / "crt", f"{SUPERVISED}crt --iters 4 --crt_iters 4", main)
    assert same(backbone(vanilla["ema"]), backbone(end["ema"]))


def test_crt_saves_the_classifier_that_was_evaluated(tmp_path):
    """A second stage of one iteration: the last evaluation is not the one that resets it."""
    train(tmp_path, f"{SUPERVISED}crt --iters 4 --crt_iters 1", main)
    agrees_with_the_log(tmp_path)


# ---------------------------------------------------------------------------------------------
# semi-supervised bases


@pytest.mark.parametrize("base,tutorial,flags", [
    ("fixmatch", train_fixmatch.main, "--tau 0.2"),
    slow("fixmatch", train_fixmatch.main, "--tau 0.2 --recipe official --n_strong 2"),
    ("mixmatch", train_mixmatch.main, ""),
    slow("mixmatch", train_mixmatch.main, "--recipe official")])
def test_the_plain_base_equals_the_tutorial(tmp_path, base, tutorial, flags):
    theirs = train(tmp_path / "tutorial", f"--method none {flags}", tutorial)
    ours = train(tmp_path / "baseline", f"--base {base} --method none {flags}", main)
    for part in ("model", "ema", "optimizer", "history", "step"):
        assert same(ours[part], theirs[part]), part
    a, b = (json.loads((tmp_path / n / "result.json").read_text())
            for n in ("tutorial", "baseline"))
    measured = {"sec_per_iter", "peak_memory_mb"}
    assert a.keys() == b.keys() and all(a[k] == b[k] for k in a.keys() - measured)


@pytest.mark.parametrize("base", ["fixmatch", "mixmatch"])
def test_what_a_method_refines(tmp_path, base):
    """refine sees the features of the first weak view, and p; MixMatch: sharpened, of two views."""
    seen = []

    class Spy(Method):
        def refine(self, p, batch):
            seen.append((p, batch.z_u, batch.index_u))
            return p
    train(tmp_path, f"--base {base} --iters 1", partial(main, own=Spy))
    (p, z_u, index), dataset = seen[0], data.load("synthetic", image_size=8)
    torch.manual_seed(0)
    model, normalise = models.build("wrn-10-1", 10), augment.Normalise(dataset.mean, dataset.std)
    z = [model.features(augment.weak(dataset.take(index)[0], data.rng(0, view, 0), normalise))
         for view in ("weak view", "second weak view")]
    guess = [model.classifier(rows).softmax(1) for rows in z]
    squares = ((guess[0] + guess[1]) / 2) ** 2
    torch.testing.assert_close(z_u, z[0].detach())
    torch.testing.assert_close(p, guess[0].detach() if base == "fixmatch" else
                               (squares / squares.sum(1, keepdim=True)).detach())


class PseudoLabelsByHand:
    """One pass over [x; u]; the target of u is the argmax of the same prediction."""

    def __init__(self, cfg):
        self.cfg, self.dataset = cfg, data.load("synthetic", image_size=8)
        index = data.split(self.dataset, cfg)
        self.streams = [data.IndexStream(i, 6, 0, name)
                        for i, name in zip(index, ("labeled", "unlabeled"), strict=True)]
        torch.manual_seed(0)
        self.model = models.build("wrn-10-1", 10, 0.02)
        self.ema = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.optimizer = torch.optim.Adam(self.model.parameters(), cfg.lr)

    def iterate(self, step, ramp):
        """Returns how many of the 6 pseudo-labels are above the threshold."""
        normalise = augment.Normalise(self.dataset.mean, self.dataset.std)
        (x, y), (u, _) = (self.dataset.take(s.batch(step)) for s in self.streams)
        x, u = (augment.weak(t, data.rng(0, f"{n} view", step), normalise)
                for t, n in ((x, "labeled"), (u, "weak")))
        log_p = self.model(torch.cat([x, u])).log_softmax(1)
        kept = [row.max() for row in log_p[6:] if row.max().exp() >= self.cfg.tau]
        loss_x = -sum(row[k] for row, k in zip(log_p[:6], y, strict=True)) / 6
        loss = loss_x - ramp * sum(kept) / 6
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        for key, value in self.model.state_dict().items():
            self.ema[key] = self.cfg.ema * self.ema[key] + (1 - self.cfg.ema) * value
        for p in self.model.parameters():
            p.data *= 1 - self.cfg.lr * self.cfg.weight_decay
        return len(kept)


def test_pseudo_labels_by_hand(tmp_path):
    flags = "--base pseudolabel --iters 4 --eval_every 1 --tau 0.2"
    state = train(tmp_path, flags, main)
    hand = PseudoLabelsByHand(configure([*TINY.split(), *flags.split()])[0])
    kept = [hand.iterate(step, ramp) for step, ramp in enumerate((0, 1 / 1.6, 1, 1))]
    assert [6 * row["mask_rate"] for row in state["history"]] == pytest.approx(kept)
    assert all(0 < n < 6 for n in kept)                       # dividing by `kept` would differ
    assert close_but_for_rounding(state["model"], hand.model.state_dict())
    assert close_but_for_rounding(state["ema"], hand.ema)
    for key, value in hand.model.named_buffers():
        torch.testing.assert_close(state["model"][key], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("script,flags", [
    (train_fixmatch.main, ""), (main, "--base fixmatch"), (main, "--base pseudolabel")])
def test_a_confidence_of_exactly_tau_counts(tmp_path, monkeypatch, script, flags):
    """A classifier of zeros: all confidences are 1 / 10."""
    build = models.build

    def silent(*args):
        model = build(*args)
        torch.nn.init.zeros_(model.classifier.weight)
        return model
    monkeypatch.setattr(models, "build", silent)
    rates = [train(tmp_path / tau, f"--method none --iters 1 --tau {tau} {flags}", script)
             ["history"][0]["mask_rate"] for tau in ("0.1", "0.1001")]
    assert rates == [1, 0]


# ---------------------------------------------------------------------------------------------
# runs and their files


@pytest.mark.parametrize("flags", [slow(SUPERVISED + "vanilla"), SUPERVISED + "ldam",
                                   "--base pseudolabel --tau 0.2"])
@pytest.mark.slow
def test_a_stopped_run_resumes_exactly(tmp_path, finished, flags):
    flags += " --iters 10 --eval_every 4"                     # LDAM's weights start in iteration 8
    stopped(tmp_path, flags, after=5, main=main)
    assert same(checkpoint(finished(flags)), train(tmp_path, flags + " --resume", main))


def agrees_with_the_log(folder):
    """evaluate.py on the checkpoint: the last row of log.csv, and result.json."""
    with open(folder / "log.csv") as file:
        last = list(csv.DictReader(file))[-1]
    run = evaluate.load_run(folder)
    for key in ("bacc", "gm", "acc"):
        assert run.last[key] == pytest.approx(float(last[key]), rel=1e-5)
    recall = [float(last[f"recall_{k}"]) for k in range(10)]
    assert run.last["recall"] == pytest.approx(recall, rel=1e-5)
    result = json.loads((folder / "result.json").read_text())
    assert run.reported["bacc"] == pytest.approx(result["bacc"])


@pytest.mark.parametrize("flags", [SUPERVISED + "ldam", CRT,
                                   slow(SUPERVISED + "vanilla --recipe official")])
def test_evaluate_agrees_with_the_log(finished, flags):
    agrees_with_the_log(finished(flags))


def test_evaluate_builds_the_network_that_was_trained(finished):
    model = evaluate.load_run(finished(SUPERVISED + "ldam")).model
    assert type(model.classifier) is supervised.CosineClassifier


def test_result_has_the_keys_of_the_tutorials(tmp_path, finished):
    train(tmp_path, "--method none")
    a, b = (json.loads((folder / "result.json").read_text())
            for folder in (tmp_path, finished(SUPERVISED + "ldam")))
    assert a.keys() == b.keys() and (b["base"], b["method"]) == ("supervised", "ldam")


@pytest.mark.parametrize("first,then", [(train_fixmatch.main, main), (main, train_fixmatch.main)],
                         ids=["tutorial first", "baseline first"])
def test_a_run_of_the_other_script_is_not_resumed(tmp_path, capsys, first, then):
    """Both scripts have the same default --out for plain FixMatch."""
    train(tmp_path, "--method none", first)
    before = files(tmp_path)
    argv = [*TINY.split(), *"--iters 6 --method none --resume --out".split(), str(tmp_path)]
    code, err = exit_of(then, argv, capsys)
    assert code == 2 and err.count("\n") == 1 and "--out" in err
    assert before == files(tmp_path)


def refused(flags, out, capsys):
    argv = [*TINY.split(), "--iters", "6", *flags.split(), "--out", str(out)]
    return exit_of(main, argv, capsys)


WRONG = {  # flags: what the sentence must name
    "--base supervised": "--method none", "--base supervised --method none": "--method none",
    "--method nonsense": "--method nonsense", "--base nonsense": "--base",
    "--base fixmatch --method ldam": "--method ldam",
    "--base supervised --method crt --crt_iters 0": "--crt_iters",
    "--base supervised --method vanilla --crt_iters 5": "--crt_iters",
    "--base supervised --method vanilla --tau 0.9": "--tau",
    "--base mixmatch --tau 0.9": "--tau", "--base fixmatch --temperature 1": "--temperature",
    "--base pseudolabel --n_strong 2": "--n_strong", "--base pseudolabel --tau 2": "--tau",
    "--base fixmatch --omega_every 1": "--omega_every", "--method": "--method", "--base": "--base",
}


@pytest.mark.parametrize("flags", WRONG)
def test_wrong_flags_end_in_one_sentence(flags, tmp_path, capsys):
    code, err = refused(flags, tmp_path / "run", capsys)
    assert code == 2 and err.count("\n") == 1 and WRONG[flags] in err and "Traceback" not in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("flags", [SUPERVISED + "ldam", slow("--base pseudolabel"),
                                   slow(SUPERVISED + "crt --crt_iters 3")])
def test_schedules_forbid_another_length(finished, capsys, flags):
    before = files(finished(flags))
    code, err = refused(flags + " --iters 9 --resume", finished(flags), capsys)
    assert code == 2 and err.count("\n") == 1 and "--iters" in err
    assert before == files(finished(flags))


@pytest.mark.parametrize("flags,own", [
    ("", "--tau"), ("--base fixmatch", "--ra_m"), ("--base mixmatch", "--mix_alpha"),
    ("--base pseudolabel", "--tau"), ("--base supervised --method vanilla", "--iters"),
    ("--base supervised --method crt", "--crt_iters")])
@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_of_every_base(capsys, flags, own, word):
    with pytest.raises(SystemExit) as end:
        main([*flags.split(), word])
    text = capsys.readouterr().out
    assert end.value.code == 0 and all(w in text for w in (own, "--base", "ldam", "--dataset"))


def test_help_shows_no_flags_of_another_base(capsys):
    with pytest.raises(SystemExit):
        main("--base supervised --method vanilla --help".split())
    text = capsys.readouterr().out
    assert not any(f"\n  {flag} " in text for flag in ("--tau", "--mix_alpha", "--crt_iters"))
