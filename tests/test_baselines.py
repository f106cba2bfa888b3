"""The comparison methods: constants, losses and samplers against hand-written ones; what a run of
each does and does not touch; plain bases equal the tutorials; exact resume; wrong input."""
import csv
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import augment
import baselines.train
import common
import data
import finished
import models
import train_fixmatch
import train_mixmatch
from baselines import supervised
from test_cli import run
from test_train_fixmatch import own_npz, same

TINY = "--image_size 8 --batch_size 6 --eval_every 3 --iters 6 --threads 1 --device cpu"
COUNTS = torch.tensor([1500, 899, 539, 323, 193, 116, 69, 41, 25, 15]).double()    # CIFAR-10, 100


def train(out, flags, main=baselines.train.main):
    status = main([*TINY.split(), *flags.split(), "--out", str(out)])
    return status or torch.load(out / "last.pt", weights_only=True)


def labels_only(out, flags):
    return train(out, f"--base supervised --method {flags}")


def stopped(train, out, flags, after):
    """The checkpoint of a run that a signal stops after so many iterations."""
    def see(self, step, losses):
        common.interrupt.wished = step == after - 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common.Watch, "see", see)
        assert train(out, flags) == 130
    common.interrupt.wished = False
    state = torch.load(out / "last.pt", weights_only=True)
    assert state["step"] == after
    return state


def rows_of(state):
    return [{k: v for k, v in row.items() if k != "it_per_s"} for row in state["history"]]


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
    """Row by row: m_y off the true class alone, 30 times all, weighted mean over the batch."""
    n = COUNTS.numpy()
    weights = 1e-4 / (1 - 0.9999 ** n)
    weights *= 10 / weights.sum()
    total = divisor = 0
    for row, y in zip(cosines, target):
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
    """4 of 5 iterations without weights are the first 4 of 10; row 5 shows the first difference."""
    short, long = (rows_of(labels_only(tmp_path / n, f"ldam --eval_every 1 --iters {n}"))
                   for n in ("5", "10"))
    assert same(short[:4], long[:4]) and short[4]["loss_x"] != long[4]["loss_x"]


@pytest.mark.parametrize("method", [supervised.LDAM, supervised.CRT])
def test_the_constants_go_where_the_method_goes(method):
    """The logits are on the device; a tensor that is a mere attribute would stay on the CPU."""
    run = SimpleNamespace(counts=COUNTS, cfg=SimpleNamespace(iters=10, crt_iters=5), device="meta")
    method = method(run).to("meta")
    tensors = [v for v in [*vars(method).values(), *method.buffers()] if torch.is_tensor(v)]
    assert tensors and all(t.is_meta for t in tensors)


# ---------------------------------------------------------------------------------------------
# samplers and bounds

SMALL = "--n1 12 --gamma_l 4 --m1 9 --gamma_u 3"


@pytest.fixture
def taken(monkeypatch):
    """(index, labels) of all training images that are looked at."""
    seen, take = [], data.Dataset.take
    def spy(self, index, labels=None):
        x, y = take(self, index, labels)
        seen.append((index, y.numpy()))
        return x, y
    monkeypatch.setattr(data.Dataset, "take", spy)
    return lambda: [np.concatenate(part) for part in zip(*seen)]


def small_split():
    dataset = data.load("synthetic", image_size=8)
    cfg = baselines.train.config(f"--base supervised --method vanilla {SMALL}".split())[0]
    return dataset, *data.split(dataset, cfg)


def test_resampling_takes_all_classes_equally_often(tmp_path, taken):
    labels_only(tmp_path, f"resampling {SMALL} --iters 20")           # 120 images: 12 rounds
    dataset, labeled, _ = small_split()
    index, y = taken()
    assert np.bincount(y).tolist() == [12] * 10
    assert np.array_equal(y, dataset.labels[index])
    times = {i: int((index == i).sum()) for i in labeled}
    assert sum(times.values()) == 120                                 # no unlabeled image
    for k in range(10):                                               # 12 / N_k each
        n = sum(dataset.labels[i] == k for i in labeled)
        own = {times[i] for i in labeled if dataset.labels[i] == k}
        assert own <= {12 // n, -(-12 // n)}


def test_vanilla_takes_labeled_images_alone(tmp_path, taken):
    dataset, labeled, _ = small_split()
    labels_only(tmp_path, f"vanilla {SMALL} --iters 12")              # 72 images
    index, y = taken()
    assert len(labeled) == 62 and sorted(index[:62]) == sorted(labeled)
    assert set(index) == set(labeled)
    assert np.array_equal(y, dataset.labels[index])


@pytest.mark.parametrize("pool", ["disjoint", "union"])
def test_upper_bound_takes_everything_with_true_labels(tmp_path, taken, pool):
    dataset, labeled, unlabeled = small_split()
    everything = sorted({*labeled, *unlabeled})
    labels_only(tmp_path, f"upper_bound {SMALL} --pool {pool} --iters 21")
    index, y = taken()
    assert 62 < len(everything) <= 126
    assert sorted(index[:len(everything)]) == everything and set(index) == set(everything)
    assert np.array_equal(y, dataset.labels[index])


def test_upper_bound_needs_true_labels(tmp_path, capsys):
    code, err = refused(f"--base supervised --method upper_bound --dataset {own_npz(tmp_path)} "
                        f"--model wrn-10-1", tmp_path / "run", capsys)
    assert code == 2 and err.count("\n") == 1 and "--method upper_bound" in err
    assert not (tmp_path / "run").exists()


def test_the_lower_bound_is_vanilla_by_another_name(tmp_path):
    a, b = (labels_only(tmp_path / m, m) for m in ("vanilla", "lower_bound"))
    assert same(a, b)


def test_methods_differ(tmp_path):
    states = [labels_only(tmp_path / m, m) for m in ("vanilla", "resampling", "upper_bound")]
    assert len({tuple(s["model"]["bn.running_mean"].tolist()) for s in states}) == 3


# ---------------------------------------------------------------------------------------------
# cRT

CRT = "crt --iters 4 --crt_iters 4 --eval_every 2"


@pytest.fixture(scope="module")
def crt(tmp_path_factory):
    """(vanilla, cRT between its stages, cRT at its end)"""
    folder = tmp_path_factory.mktemp("crt")
    between = stopped(labels_only, folder / "parts", CRT, after=4)
    return (labels_only(folder / "vanilla", "vanilla --iters 4 --eval_every 2"), between,
            labels_only(folder / "whole", CRT))


def test_crt_first_stage_is_vanilla(crt):
    vanilla, between, end = crt
    assert same(rows_of(vanilla), rows_of(between)) and same(rows_of(vanilla), rows_of(end)[:2])
    assert same(backbone(vanilla["ema"]), backbone(between["ema"]))
    assert same(between["ema"], between["model"])             # goes on from the averaged weights


def test_crt_classifier_starts_fresh(crt):
    vanilla, between, _ = crt
    weight = between["model"]["classifier.weight"]
    torch.manual_seed(0)
    start = models.build("wrn-10-1", 10).classifier.weight
    assert all(not torch.equal(weight, other) for other in
               (vanilla["ema"]["classifier.weight"], vanilla["model"]["classifier.weight"], start))
    assert weight.std().item() == pytest.approx(start.std().item(), rel=0.15)
    assert torch.equal(between["model"]["classifier.bias"], torch.zeros(10))
    assert between["optimizer"]["state"] == {}


def test_crt_second_stage_moves_the_classifier_alone(crt):
    _, between, end = crt
    assert end["step"] == 8
    for part in ("model", "ema"):
        assert same(backbone(between[part]), backbone(end[part]))
        assert all(not torch.equal(v, end[part][k]) for k, v in classifier(between[part]).items())


def test_crt_second_stage_by_hand(crt):
    """Features by running statistics, weights 1 / N_k, a new Adam, no decay."""
    _, between, end = crt
    cfg, _ = baselines.train.config(f"{TINY} --base supervised --method {CRT}".split())
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
        loss = -sum(weights[k] * row[k] for row, k in zip(log_p, y)) / weights[y].sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema = {k: cfg.ema * v + (1 - cfg.ema) * model.state_dict()[k] for k, v in ema.items()}
    assert close_but_for_rounding(classifier(end["model"]), model.state_dict())
    assert close_but_for_rounding(classifier(end["ema"]), ema)


def second_stage_mean(folder, iters):
    with open(folder / "log.csv") as file:
        rows = [r for r in csv.DictReader(file) if int(r["iter"]) > iters]
    return len(rows), np.mean([float(r["bacc"]) for r in rows])


@pytest.mark.parametrize("flags,evaluations", [("--eval_every 1", 20),
                                               ("--crt_iters 4 --eval_every 2", 2)])
def test_crt_result_is_the_mean_over_the_second_stage(tmp_path, flags, evaluations):
    labels_only(tmp_path, f"crt --iters 4 {flags}")
    result = json.loads((tmp_path / "result.json").read_text())
    count, mean = second_stage_mean(tmp_path, 4)
    assert count == evaluations == result["evaluations"]
    assert result["bacc"] == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize("after", [3, 5], ids=["first", "second"])
def test_crt_resumed_inside_a_stage(tmp_path, crt, after):
    stopped(labels_only, tmp_path, CRT, after)
    assert same(crt[2], labels_only(tmp_path, CRT + " --resume"))


def test_crt_stages_off_the_grid_of_evaluations(tmp_path):
    """The first stage is --iters long, whenever an evaluation may be due."""
    vanilla = labels_only(tmp_path / "vanilla", "vanilla --iters 4")
    end = labels_only(tmp_path / "crt", "crt --iters 4 --crt_iters 4")
    assert same(backbone(vanilla["ema"]), backbone(end["ema"]))


def test_crt_never_ends_with_an_untrained_classifier(tmp_path):
    """The switch may not fall on the last evaluation: what is saved is what was judged."""
    labels_only(tmp_path, "crt --iters 4 --crt_iters 1")
    agrees_with_the_log(tmp_path)


# ---------------------------------------------------------------------------------------------
# semi-supervised bases


@pytest.mark.parametrize("base,main,flags", [
    ("fixmatch", train_fixmatch.main, "--tau 0.2"),
    ("fixmatch", train_fixmatch.main, "--tau 0.2 --recipe official --n_strong 2"),
    ("mixmatch", train_mixmatch.main, ""), ("mixmatch", train_mixmatch.main, "--recipe official")])
def test_the_plain_base_is_the_tutorials(tmp_path, base, main, flags):
    theirs = train(tmp_path / "tutorial", f"--method none {flags}", main)
    ours = train(tmp_path / "baseline", f"--base {base} --method none {flags}")
    for part in ("model", "ema", "optimizer", "history", "step"):
        assert same(ours[part], theirs[part]), part
    a, b = (json.loads((tmp_path / n / "result.json").read_text())
            for n in ("tutorial", "baseline"))
    measured = {"sec_per_iter", "peak_memory_mb"}
    assert a.keys() == b.keys() and all(a[k] == b[k] for k in a.keys() - measured)


class PseudoLabelsByHand:
    """One pass over [x; u]; the target of u is the argmax of the very prediction it corrects."""

    def __init__(self, cfg):
        self.cfg, self.dataset = cfg, data.load("synthetic", image_size=8)
        index = data.split(self.dataset, cfg)
        self.streams = [data.IndexStream(i, 6, 0, name)
                        for i, name in zip(index, ("labeled", "unlabeled"))]
        torch.manual_seed(0)
        self.model = models.build("wrn-10-1", 10, 0.02)
        self.ema = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.optimizer = torch.optim.Adam(self.model.parameters(), cfg.lr)

    def iterate(self, step, ramp):
        """Returns how many of the 6 pseudo-labels count."""
        normalise = augment.Normalise(self.dataset.mean, self.dataset.std)
        (x, y), (u, _) = (self.dataset.take(s.batch(step)) for s in self.streams)
        x, u = (augment.weak(t, data.rng(0, f"{n} view", step), normalise)
                for t, n in ((x, "labeled"), (u, "weak")))
        log_p = self.model(torch.cat([x, u])).log_softmax(1)
        kept = [row.max() for row in log_p[6:] if row.max().exp() >= self.cfg.tau]
        loss = -sum(row[k] for row, k in zip(log_p, y)) / 6 - ramp * sum(kept) / 6
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
    state = train(tmp_path, flags)
    hand = PseudoLabelsByHand(baselines.train.config([*TINY.split(), *flags.split()])[0])
    kept = [hand.iterate(step, ramp) for step, ramp in enumerate((0, 1 / 1.6, 1, 1))]
    assert [6 * row["mask_rate"] for row in state["history"]] == pytest.approx(kept)
    assert all(0 < n < 6 for n in kept)                       # dividing by `kept` would differ
    assert close_but_for_rounding(state["model"], hand.model.state_dict())
    assert close_but_for_rounding(state["ema"], hand.ema)
    for key, value in hand.model.named_buffers():
        torch.testing.assert_close(state["model"][key], value, rtol=1e-3, atol=1e-5)


# ---------------------------------------------------------------------------------------------
# runs and their files

KINDS = {"vanilla": "--base supervised --method vanilla", "ldam": "--base supervised --method ldam",
         "pseudolabel": "--base pseudolabel --tau 0.2"}


@pytest.mark.parametrize("kind", KINDS)
def test_ten_and_resume_and_ten_equals_twenty(tmp_path, kind):
    flags = KINDS[kind] + " --iters 20 --eval_every 4"
    whole = train(tmp_path / "whole", flags)
    stopped(train, tmp_path / "parts", flags, after=10)
    assert same(whole, train(tmp_path / "parts", flags + " --resume"))


def agrees_with_the_log(folder):
    """evaluate.py on the checkpoint: the last row of log.csv, and result.json."""
    with open(folder / "log.csv") as file:
        last = list(csv.DictReader(file))[-1]
    judged = finished.load_run(folder)
    now, mean = judged.last, judged.reported
    for key in ("bacc", "gm", "acc"):
        assert now[key] == pytest.approx(float(last[key]), rel=1e-5)
    assert now["recall"] == pytest.approx([float(last[f"recall_{k}"]) for k in range(10)], rel=1e-5)
    result = json.loads((folder / "result.json").read_text())
    assert mean["bacc"] == pytest.approx(result["bacc"])


@pytest.mark.parametrize("flags", ["ldam --eval_every 2", CRT, "vanilla --recipe official"])
def test_evaluate_agrees_with_the_log(tmp_path, flags):
    labels_only(tmp_path, flags)
    agrees_with_the_log(tmp_path)


def test_evaluate_builds_the_network_that_was_trained(tmp_path):
    labels_only(tmp_path, "ldam")
    model = finished.load_run(tmp_path).model
    assert type(model.classifier) is supervised.CosineClassifier


def test_result_says_what_the_tutorials_say(tmp_path):
    train(tmp_path / "a", "--method none", train_fixmatch.main)
    labels_only(tmp_path / "b", "ldam")
    a, b = (json.loads((tmp_path / n / "result.json").read_text()) for n in "ab")
    assert a.keys() == b.keys() and (b["base"], b["method"]) == ("supervised", "ldam")


@pytest.mark.parametrize("first,then", [
    (train_fixmatch.main, baselines.train.main), (baselines.train.main, train_fixmatch.main)],
    ids=["tutorial first", "baseline first"])
def test_the_other_scripts_run_is_not_resumed_with_a_traceback(tmp_path, capsys, first, then):
    """Both scripts have the same default --out for plain FixMatch."""
    train(tmp_path, "--method none", first)
    before = {f.name: f.read_bytes() for f in tmp_path.iterdir()}
    argv = [*TINY.split(), "--method", "none", "--resume", "--out", str(tmp_path)]
    code, err = run(then, argv, capsys)
    assert code == 2 and err.count("\n") == 1 and "--out" in err
    assert before == {f.name: f.read_bytes() for f in tmp_path.iterdir()}


def refused(flags, out, capsys):
    return run(baselines.train.main, [*TINY.split(), *flags.split(), "--out", str(out)], capsys)


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


@pytest.mark.parametrize("flags", ["--base supervised --method ldam", "--base pseudolabel",
                                   "--base supervised --method crt --crt_iters 3"])
def test_schedules_forbid_another_length(tmp_path, capsys, flags):
    train(tmp_path, flags)
    code, err = refused(flags + " --iters 9 --resume", tmp_path, capsys)
    assert code == 2 and err.count("\n") == 1 and "--iters" in err


@pytest.mark.parametrize("flags,own", [
    ("", "--tau"), ("--base fixmatch", "--ra_m"), ("--base mixmatch", "--mix_alpha"),
    ("--base pseudolabel", "--tau"), ("--base supervised --method vanilla", "--iters"),
    ("--base supervised --method crt", "--crt_iters")])
@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_of_every_base(capsys, flags, own, word):
    with pytest.raises(SystemExit) as end:
        baselines.train.main([*flags.split(), word])
    text = capsys.readouterr().out
    assert end.value.code == 0 and all(w in text for w in (own, "--base", "ldam", "--dataset"))


def test_help_shows_no_flags_of_another_base(capsys):
    with pytest.raises(SystemExit):
        baselines.train.main("--base supervised --method vanilla --help".split())
    text = capsys.readouterr().out
    assert not any(f"\n  {flag} " in text for flag in ("--tau", "--mix_alpha", "--crt_iters"))
