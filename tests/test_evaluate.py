"""Metrics against scikit-learn and numbers by hand; the command line over finished runs."""
import csv
import json
import math
import os
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import sklearn.metrics
import torch
from conftest import stopped, train
from PIL import Image
from scipy import stats
from torch.nn.functional import one_hot

import data
import evaluate
from support.finished import FinishedRun


def first_pixel(x):
    """A stand-in for a network: the class is written in the first pixel."""
    return one_hot(x[:, 0, 0, 0].long(), 5).float()


@pytest.mark.parametrize("seed", range(3))
def test_against_scikit_learn(seed):
    """1234 images in batches of 250, the last one smaller."""
    g = np.random.default_rng(seed)
    y, predicted = g.integers(0, 5, 1234), g.integers(0, 5, 1234)
    predicted = np.where(g.random(1234) < 0.6, y, predicted)
    images = torch.from_numpy(predicted).view(-1, 1, 1, 1).expand(-1, 3, 2, 2)
    scores = evaluate.scores(first_pixel, images, normalise=lambda x: x)
    matrix = evaluate.confusion_matrix(torch.from_numpy(y), scores.argmax(1), 5)
    assert np.array_equal(matrix.numpy(), sklearn.metrics.confusion_matrix(y, predicted))
    m = evaluate.metrics(matrix)
    recall = sklearn.metrics.recall_score(y, predicted, average=None)
    assert m["recall"] == pytest.approx(100 * recall)
    assert m["bacc"] == pytest.approx(100 * sklearn.metrics.balanced_accuracy_score(y, predicted))
    assert m["acc"] == pytest.approx(100 * sklearn.metrics.accuracy_score(y, predicted))
    assert m["gm"] == pytest.approx(100 * math.prod(recall) ** (1 / 5))

    dataset = SimpleNamespace(test_images=images, test_labels=torch.from_numpy(y), num_classes=5)
    precision = sklearn.metrics.precision_score(y, predicted, average=None)
    assert m["precision"] == pytest.approx(100 * precision)
    columns = evaluate.on_test_set(first_pixel, dataset, lambda x: x)        # of log.csv
    assert columns == {key: m[key] for key in ("bacc", "gm", "acc")} | {
        f"{name}_{k}": m[name][k] for name in ("recall", "precision") for k in range(5)}


def test_gm_of_a_class_that_is_never_hit():
    """Its recall counts as 1 / (100 K), here 1 / 200: the root of 0.5 * 1 / 200 is 0.05."""
    m = evaluate.metrics(torch.tensor([[5, 5], [7, 0]]))
    assert m["gm"] == pytest.approx(5) and m["bacc"] == pytest.approx(25) and m["recall"] == [50, 0]


def test_a_class_without_test_images_is_left_out():
    m = evaluate.metrics(torch.tensor([[8, 2, 0], [5, 5, 0], [0, 0, 0]]))
    assert m["bacc"] == pytest.approx(65) and m["gm"] == pytest.approx(100 * math.sqrt(.4))
    assert math.isnan(m["recall"][2])


def test_bias_columns_against_a_loop():
    """What an attractor adds to a logit, less its mean over all logits, every class alike."""
    g = torch.Generator().manual_seed(0)
    W, y = torch.randn(5, 5, generator=g), torch.randint(5, (99,), generator=g)
    images = torch.randint(5, (99, 1, 1, 1), generator=g).expand(-1, 3, 2, 2)
    dataset = SimpleNamespace(test_images=images, test_labels=y, num_classes=5)
    columns = evaluate.on_test_set(first_pixel, dataset, lambda x: x, lambda logits: logits @ W.T)
    added = [[W[:, x] - W[:, x].mean() for x in images[y == k, 0, 0, 0]] for k in range(5)]
    mean, square = np.zeros(5), 0                            # above: the logits are 0 and 1
    for rows in added:
        mean += np.mean(rows, axis=0) / 5
        square += np.mean([(row ** 2).sum() for row in rows]) / 5
    assert [columns[f"bias_{k}"] for k in range(5)] == pytest.approx(mean, abs=1e-6)
    assert columns["bias_varies"] == pytest.approx(1 - (mean ** 2).sum() / square, abs=1e-5)


def test_mean_of_last_20_is_a_mean_of_gms():
    rows = [{"iter": i, "bacc": i, "gm": i * i, "acc": 1.0, "recall_0": i, "recall_1": 2}
            for i in range(50)]
    m = evaluate.mean_of_last(rows)
    assert m["bacc"] == pytest.approx(np.mean(range(30, 50)))
    assert m["gm"] == pytest.approx(np.mean(np.arange(30, 50) ** 2))
    assert m["recall"] == pytest.approx([39.5, 2])


def test_thirds_by_the_number_of_labeled_images():
    recall, counts = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512], [5, 9, 9, 1, 2, 3, 4, 6, 7, 8]
    assert evaluate.thirds(recall, counts) == pytest.approx(      # order 1 2 9 | 8 7 0 6 | 5 4 3
        {"head": np.mean([2, 4, 512]), "middle": np.mean([256, 128, 1, 64]),
         "tail": np.mean([32, 16, 8])})
    assert evaluate.thirds([math.nan, 1.0, 2.0], [3, 2, 1])["middle"] == 1


def test_pseudo_labels_against_scikit_learn():
    g = np.random.default_rng(0)
    logits, y, tau = g.normal(0, 2, (300, 4)), g.integers(0, 4, 300), 0.7
    told = evaluate.pseudo_labels(torch.from_numpy(logits), torch.from_numpy(y), tau)
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    guess, kept = p.argmax(1), p.max(1) >= tau
    recall, precision, precision_kept = (
        100 * score(y[rows], guess[rows], average=None) for score, rows in (
            (sklearn.metrics.recall_score, kept >= 0), (sklearn.metrics.precision_score, kept >= 0),
            (sklearn.metrics.precision_score, kept)))
    expected = {"acc": 100 * (guess == y).mean(), "kept": 100 * kept.mean(),
                "acc_kept": 100 * (guess == y)[kept].mean(), "recall": recall,
                "precision": precision, "precision_kept": precision_kept,
                "kept_of": [100 * kept[y == k].mean() for k in range(4)]}
    for key, numbers in expected.items():
        assert told[key] == pytest.approx(numbers), key
    share = 100 * sklearn.metrics.confusion_matrix(y, guess, normalize="true")
    assert np.allclose(told["confusion"], share) and 0 < kept.sum() < 300


# ---------------------------------------------------------------------------------------------
# finished runs

SETTING = ("--n1 40 --m1 20 --gamma_l 20 --tau 0.2 --ema 0 --bn_momentum 0.5 "
           "--attractor_start prior --eval_every 2 --iters 4 --method ")
COUNTS = [*(int(40 * 20 ** (-k / 9)) for k in range(9)), 40 // 20]     # labeled images
LONG = [*(int(20 * 10 ** (-k / 9)) for k in range(9)), 20 // 10]       # test images, --gamma_t 10


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two seeds of FixMatch and of L2AC, and one of FixMatch that was stopped."""
    out = tmp_path_factory.mktemp("runs")
    for name in ("none_s0", "none_s1", "l2ac_s0", "l2ac_s1"):
        train(out / name, f"{SETTING}{name[:-3]} --seed {name[-1]}")
    stopped(out / "stopped", f"{SETTING}none --gamma_u 3", after=3)
    return out


def result(run):
    return json.loads((run / "result.json").read_text())


def table(capsys, *argv):
    """{first words of a line: the rest}"""
    evaluate.main([*map(str, argv)])
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 or "not finished" in line for line in lines)
    return {line[:26].strip(): line[26:].split() for line in lines}


def test_a_folder_of_runs_is_listed(runs, capsys):
    evaluate.main([str(runs)])
    _, *lines = capsys.readouterr().out.splitlines()                           # a head line
    lines.sort(key=lambda line: line.split()[3])
    for line, name in zip(lines, ("l2ac_s0", "l2ac_s1", "none_s0", "none_s1"), strict=False):
        told = result(runs / name)
        assert line.split() == [f"{told['bacc']:.2f}", f"{told['gm']:.2f}", "4", name]
    assert lines[4].split()[2:] == ["2", "stopped", "(of", "4)"]


def test_two_runs_side_by_side(runs, capsys):
    """Columns are named by what differs; labels per class; the second less the first."""
    rows = table(capsys, runs / "none_s0", runs / "l2ac_s0")
    none, l2ac = (result(runs / name) for name in ("none_s0", "l2ac_s0"))
    assert rows["mean of last evaluations"] == ["labels", "none", "l2ac", "difference"]
    assert np.abs(np.subtract(none["recall"], l2ac["recall"])).max() > 1
    for key, label in (("bacc", "bACC"), ("gm", "GM")):
        a, b = none[key], l2ac[key]
        assert rows[label] == [f"{a:.2f}", f"{b:.2f}", f"{b - a:+.2f}"]
    for k in range(10):
        a, b = none["recall"][k], l2ac["recall"][k]
        assert rows[f"recall {chr(97 + k)}"] == [
            str(COUNTS[k]), f"{a:.2f}", f"{b:.2f}", f"{b - a:+.2f}"]


def test_seeds_become_mean_and_deviation_and_their_difference_has_a_t_interval(runs, capsys):
    """Paired by seed, as in a t test; with two seeds it is 12.706 standard errors to both sides."""
    rows = table(capsys, runs / "l2ac_s0", runs / "l2ac_s1", "--against", runs / "none_s1",
                 runs / "none_s0")
    assert rows["mean of last evaluations"] == ["labels", "none", "l2ac", "difference"]
    theirs, ours = ([result(runs / f"{name}_s{s}") for s in (0, 1)] for name in ("none", "l2ac"))
    numbers = {"bACC": lambda run: run["bacc"], "GM": lambda run: run["gm"],
               "recall of the tail": lambda run: statistics.mean(run["recall"][7:])} | {
        f"recall {chr(97 + k)}": lambda run, k=k: run["recall"][k]
        for k in range(10)}
    for label, number in numbers.items():
        a, b = ([number(run) for run in side] for side in (ours, theirs))
        test = stats.ttest_rel(a, b)
        low, high = test.confidence_interval()
        if np.ptp(np.subtract(a, b)) == 0:
            equal = " ".join(rows[label]).split(" ± ")
            assert equal[-1] == ("0.0 tied" if a == b else "0.0")
            continue
        cells = [f"{statistics.mean(x):.1f} ± {statistics.stdev(x):.1f}" for x in (b, a)]
        cells.append(f"{(low + high) / 2:+.1f} ± {(high - low) / 2:.1f}")
        cells += ["tied"] if test.pvalue > 0.05 else []
        assert " ".join(rows[label]).endswith(" ".join(cells)), label
    assert rows["recall a"][0] == "40"


def test_an_unfinished_run_is_told(runs, capsys):
    rows = table(capsys, runs / "none_s0", runs / "stopped")
    assert rows["mean of last evaluations"] == ["labels", "none", "stopped", "difference"]
    assert any(key in f"{runs}/stopped: not finished" for key in rows)


def test_pseudo_labels_of_a_run(runs, capsys):
    """Against the classes that its network gives to the unlabeled images."""
    rows, run = table(capsys, runs / "l2ac_s0", "--pseudo"), FinishedRun(runs / "l2ac_s0")
    index = run.split[1]
    labels = run.dataset.labels[index]
    assert np.bincount(labels).tolist() == [20] * 10         # --m1 20, gamma_u 1
    with torch.no_grad():
        p = run.model(run.normalise(run.dataset.images[index])).softmax(1).numpy()
    assert rows["accuracy"] == [f"{100 * (p.argmax(1) == labels).mean():.2f}"]
    assert rows["kept by tau"] == [f"{100 * (p.max(1) >= 0.2).mean():.2f}"]
    run.cfg.labels = "soft"
    assert run.pseudo["kept"] == 100                         # every label counts
    with open(runs / "l2ac_s0/log.csv") as file:
        *_, last = csv.DictReader(file)
    assert run.last["bacc"] == pytest.approx(float(last["bacc"]))


@pytest.mark.parametrize("kind,expected", [
    ("longtail", LONG), ("reversed", LONG[::-1]), ("random", None)])
def test_imbalanced_test_sets(runs, capsys, kind, expected):
    evaluate.main([str(runs / "none_s0"), "--test", kind, "--gamma_t", "10"])
    out = capsys.readouterr().out
    counts, told = evaluate.on_imbalanced(FinishedRun(runs / "none_s0"), kind, 10)
    assert counts == expected or expected is None and 2 <= min(counts) < max(counts) <= 20
    assert f"bACC {told['bacc']:6.2f}" in out
    hits = [round(n * r / 100) for n, r in zip(counts, told["recall"], strict=True)]
    assert told["acc"] == pytest.approx(100 * sum(hits) / sum(counts))


def test_predictions_of_pictures(runs, tmp_path, capsys):
    """One file name is not UTF-8, one has a comma; lines end in LF alone."""
    x = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), dtype=np.uint8)
    pictures = tmp_path / "new"
    pictures.mkdir()
    for name, image in zip((b"a,b.png", b"\xff.png"), x, strict=True):
        Image.fromarray(image).save(pictures / os.fsdecode(name))
    evaluate.main([str(runs / "l2ac_s0"), "--predict", str(pictures)])
    text = capsys.readouterr().out
    assert "\r" not in text
    rows = list(csv.DictReader(text.splitlines()))
    assert [row["file"] for row in rows] == [f"{pictures}/a,b.png", rf"{pictures}/\xff.png"]
    run = FinishedRun(runs / "l2ac_s0")
    with torch.no_grad():
        p = run.model(run.normalise(torch.from_numpy(x).permute(0, 3, 1, 2))).softmax(1)
    for row, q in zip(rows, p, strict=True):
        assert row["label"] == run.cfg.dataset_info["names"][q.argmax()]
        assert float(row["probability"]) == pytest.approx(q.max().item(), abs=1e-4)
        second = sorted(q.tolist())[-2]
        assert row["second"] == run.cfg.dataset_info["names"][q.tolist().index(second)]
        assert float(row["second_probability"]) == pytest.approx(second, abs=1e-4)


def test_doubtful_pictures(runs, tmp_path, capsys):
    """Twelve pictures, of which six lie in folders that are named like classes."""
    x = np.random.default_rng(1).integers(0, 256, (12, 8, 8, 3), dtype=np.uint8)
    run = FinishedRun(runs / "l2ac_s0")
    names = run.cfg.dataset_info["names"]
    with torch.no_grad():
        p = run.model(run.normalise(torch.from_numpy(x).permute(0, 3, 1, 2))).softmax(1).numpy()
    paths = [tmp_path / ("elsewhere" if i < 6 else names[i % 4]) / f"{i:02}.png" for i in range(12)]
    for path, image in zip(paths, x, strict=True):
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(image).save(path)
    (tmp_path / "elsewhere/broken.png").write_text("text")
    evaluate.main(f"{run.folder} --predict {tmp_path} --doubtful 3 --skip_broken".split())
    out, err = capsys.readouterr()
    lines = list(csv.reader(out.splitlines()))
    assert "1 picture(s) cannot be read" in err and "elsewhere/broken.png" in err
    assert [line[0] for line in lines[1:4]] == [str(paths[i]) for i in p.max(1).argsort()[:3]]
    wrong = [i for i in range(6, 12) if p[i].argmax() != i % 4]
    wrong.sort(key=lambda i: p[i, i % 4])
    assert lines[5] == [f"{len(wrong)} of 12 contradict the name of their folder"]
    assert lines[7:] == [[str(paths[i]), names[p[i].argmax()], f"{p[i, i % 4]:.4f}", names[i % 4]]
                         for i in wrong[:3]]


def test_data_on_another_device_leave_the_first_alone():
    here = data.load("synthetic", image_size=8)
    there = here.to("meta")
    assert {there.device.type, there.images.device.type, there.test_images.device.type} == {"meta"}
    assert {here.device.type, here.images.device.type, here.test_images.device.type} == {"cpu"}
