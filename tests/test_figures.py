"""What the figures show: numbers of evaluate.py, log.csv and of counts by hand; what they lack."""
import csv
import json
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import confusion_matrix

import baselines.train
import data
import evaluate
import finished
import settings
import train_fixmatch
from scripts import drawing, figures, training_figures
from scripts.drawing import plt

TINY = ("--image_size 8 --batch_size 6 --eval_every 3 --iters 6 --threads 1 --device cpu --n1 40 "
        "--m1 60 --gamma_l 20").split()
SEMI = [*TINY, "--tau", "0.2"]                       # so that some pseudo-labels count at once


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two seeds of FixMatch, one of L2AC, both bounds."""
    out = tmp_path_factory.mktemp("runs")
    for method, seed in (("none", 0), ("none", 1), ("l2ac", 0)):
        train_fixmatch.main([*SEMI, "--method", method, "--seed", str(seed), "--out",
                             str(out / f"{method}_s{seed}")])
    for method in ("lower_bound", "upper_bound"):
        baselines.train.main([*TINY, "--base", "supervised", "--method", method, "--out",
                              str(out / method)])
    return out


@pytest.fixture(scope="module")
def groups(folder):
    return finished.load_groups([folder / n for n in ("none_s0", "none_s1", "l2ac_s0",
                                                      "lower_bound", "upper_bound")])


@pytest.fixture(autouse=True)
def close():
    yield
    plt.close("all")


def log_of(folder):
    with open(folder / "log.csv") as file:
        return {key: np.array([float(row[key]) for row in rows]) for rows in
                [list(csv.DictReader(file))] for key in rows[0]}


def recalls(folder):
    """(10,) of the reported mean, straight from log.csv: both evaluations are among the last 20."""
    log = log_of(folder)
    return np.array([log[f"recall_{k}"].mean() for k in range(10)])


def heights(container):
    return [bar.get_height() for bar in container]


def test_recall_shows_the_reported_numbers(groups, folder):
    ax, = figures.recall(groups).axes
    none, l2ac = [c for c in ax.containers if hasattr(c, "patches")]
    seeds = np.array([recalls(folder / f"none_s{s}") for s in (0, 1)])
    assert heights(none) == pytest.approx(seeds.mean(0), rel=1e-4)
    assert heights(l2ac) == pytest.approx(recalls(folder / "l2ac_s0"), rel=1e-4)
    bars = none.errorbar[2][0].get_segments()
    assert [(b[1, 1] - b[0, 1]) / 2 for b in bars] == pytest.approx(seeds.std(0, ddof=1), abs=1e-4)
    drawn = {lines.get_label(): lines for lines in ax.collections}
    for label, name in (("Lower bound", "lower_bound"), ("Upper bound", "upper_bound")):
        shown = [segment[0, 1] for segment in drawn[label].get_segments()]
        assert shown == pytest.approx(recalls(folder / name), rel=1e-4)
    labels = [text.get_text() for text in ax.get_xticklabels()]
    assert labels[0] == "disk\n40" and labels[9] == "ring\n2"


def test_figures_and_the_command_line_agree(groups, folder, capsys):
    evaluate.main([str(folder / f"none_s{s}") for s in (0, 1)] + ["--json", "--pseudo"])
    told, = json.loads(capsys.readouterr().out).values()
    def bars_of(figure):
        return heights(figure.axes[0].patches[:10])
    assert bars_of(figures.recall(groups)) == pytest.approx(told["mean_of_last_20"]["recall"])
    assert bars_of(figures.predicted(groups)) == pytest.approx(told["last"]["predicted"])
    assert bars_of(figures.pseudo_recall(groups)) == pytest.approx(told["pseudo"]["recall"])
    for figure, section in ((figures.confusion, "last"), (figures.pseudo_confusion, "pseudo")):
        shown = [text.get_text() for text in figure(groups).axes[0].texts]
        assert shown == [f"{v:.0f}" for row in told[section]["confusion"] for v in row]


def guesses(run, images):
    with torch.no_grad():
        return run.model(run.normalise(images))


def test_confusion_against_scikit_learn(groups):
    run = groups[1].runs[0]
    ax = figures.confusion(groups).axes[1]
    predicted = guesses(run, run.dataset.test_images).argmax(1)
    matrix = 100 * confusion_matrix(run.dataset.test_labels, predicted, normalize="true")
    assert ax.get_title() == "L2AC" and len(ax.texts) == 100
    assert [t.get_text() for t in ax.texts] == [f"{v:.0f}" for v in matrix.ravel()]


def test_predicted_distribution_is_a_mean_of_probabilities(groups):
    run = groups[1].runs[0]
    logits = guesses(run, run.dataset.test_images).double().numpy()
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    bars = figures.predicted(groups).axes[0].patches[10:20]
    assert heights(bars) == pytest.approx(100 * p.mean(0), rel=1e-4)


def test_distribution_shows_the_split(groups):
    ax, = figures.distribution(groups).axes
    assert heights(ax.containers[0]) == data.class_counts(40, 10, 20)
    assert heights(ax.containers[1]) == [60] * 10


def test_imbalanced_tests_show_the_test_sets(groups):
    long, back, chance = (heights(ax.patches) for ax in figures.imbalanced_tests(groups).axes)
    assert long == data.class_counts(100, 10, 10) == back[::-1]
    assert all(10 <= n <= 100 for n in chance) and chance not in (long, back)


def test_curves_show_the_log(groups, folder):
    losses, accuracy = figures.curves(groups).axes
    log = log_of(folder / "l2ac_s0")
    lines = {line.get_label(): line.get_ydata() for line in losses.lines + accuracy.lines}
    assert lines["L2AC, lower"] == pytest.approx(log["loss_x"] + log["loss_u"], rel=1e-4)
    assert lines["L2AC, upper"] == pytest.approx(log["loss_bal"], rel=1e-4)
    assert lines["L2AC"] == pytest.approx(log["bacc"], rel=1e-4)
    both = [log_of(folder / f"none_s{s}")["bacc"] for s in (0, 1)]
    assert lines["FixMatch"] == pytest.approx(np.mean(both, 0), rel=1e-4)
    upper, labeled = figures.losses(groups).axes[0].lines
    assert labeled.get_ydata() == pytest.approx(log["loss_x"], rel=1e-4)
    assert upper.get_ydata() == pytest.approx(log["loss_bal"], rel=1e-4)


def bias_by_hand(run):
    """(10, 10) with loops, from the weights in the checkpoint."""
    w = {k: v.double().numpy() for k, v in torch.load(run.folder / "last.pt")["attractor"].items()}
    logits = guesses(run, run.dataset.test_images).double().numpy()
    total, seen = np.zeros((10, 10)), np.zeros(10)
    for row, y in zip(logits, run.dataset.test_labels):
        p = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        hidden = np.maximum(w["mlp.0.weight"] @ p + w["mlp.0.bias"], 0)
        delta = w["mlp.2.weight"] @ hidden + w["mlp.2.bias"]
        total[y] += delta - delta.mean()
        seen[y] += 1
    return total / seen[:, None]


def test_what_the_attractor_adds(groups, folder):
    over_time, end = figures.attractor(groups).axes
    by_hand, log = bias_by_hand(groups[1].runs[0]), log_of(folder / "l2ac_s0")
    shown = end.images[0].get_array()
    assert np.asarray(shown[:10]) == pytest.approx(by_hand, abs=1e-5)
    assert end.texts[0].get_text() == f"{by_hand[0, 0]:.1f}"
    counts = np.log(data.class_counts(40, 10, 20))
    assert np.asarray(shown[10]) == pytest.approx(counts - counts.mean())
    for k, line in enumerate(over_time.lines[:10]):
        assert line.get_ydata() == pytest.approx(log[f"bias_{k}"], rel=1e-4, abs=1e-6)
        assert line.get_ydata()[-1] == pytest.approx(by_hand[k, k], abs=1e-5)
    assert not any(key.startswith("bias") for key in log_of(folder / "none_s0"))
    story = figures.story(groups).axes[1]
    assert heights(story.patches) == pytest.approx(np.diagonal(by_hand), abs=1e-5)


def test_views_begin_with_the_images_themselves(groups):
    run = groups[0].runs[0]
    strip = figures.views(groups).axes[0].images[0].get_array()               # (40, 100, 3)
    first = run.split[0][run.dataset.labels[run.split[0]] == 3][0]
    image = run.dataset.images[first].permute(1, 2, 0).numpy() / 255
    assert strip.shape == (40, 100, 3)
    assert np.asarray(strip[1:9, 31:39]) == pytest.approx(image, abs=1e-5)
    assert np.asarray(strip[11:19, 31:39]) != pytest.approx(image, abs=1e-2)


def test_tsne_is_repeatable_and_shows_true_classes(groups):
    run = groups[0].runs[0]
    place, y = figures.embed(run, 80)
    again, _ = figures.embed(run, 80)
    assert place.shape == (80, 2) and np.array_equal(place, again)
    everything = run.dataset.labels[np.concatenate(run.split)]
    assert (np.bincount(y, minlength=10) <= np.bincount(everything, minlength=10)).all()


def test_the_command_draws_every_figure(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(figures.FIGURES, "tsne", partial(figures.tsne, points=60))
    runs = [str(folder / n) for n in ("none_s0", "l2ac_s0", "lower_bound", "upper_bound")]
    assert figures.main([*runs, "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().err == ""
    for name in figures.FIGURES:
        path = tmp_path / f"{name}.png"
        assert path.stat().st_size < 200_000 and Image.open(path).width == 1350


@pytest.mark.parametrize("kind,start", [("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_formats_for_papers(folder, tmp_path, kind, start):
    figures.main([str(folder / "none_s0"), "--out", str(tmp_path), "--format", kind, "--only",
                  "recall"])
    assert (tmp_path / f"recall.{kind}").read_bytes().startswith(start)


def test_what_is_missing_is_said_in_a_sentence_and_the_rest_is_drawn(folder, tmp_path, capsys):
    wanted = ["story", "recall", "curves", "losses", "attractor", "confusion", "pseudo_recall"]
    runs = [str(folder / "none_s0"), "--out", str(tmp_path)]
    assert figures.main([*runs, "--only", *wanted]) == 0
    said = dict(line.split(": ", 1) for line in capsys.readouterr().err.splitlines())
    assert said.keys() == {"story", "recall", "curves", "losses", "attractor"}
    assert "attractor" in said["story"] and "upper loss" in said["losses"]
    assert "drawn without" in said["recall"]
    assert {p.stem for p in tmp_path.iterdir()} == {"recall", "curves", "confusion",
                                                    "pseudo_recall"}
    assert figures.main([*runs, "--only", "attractor"]) == 2


def test_no_true_labels(tmp_path, capsys):
    g = np.random.default_rng(0)
    x, y = g.integers(0, 256, (60, 8, 8, 3), np.uint8), np.arange(60) % 3
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_test=x, y_test=y, x_unlabeled=x)
    train_fixmatch.main([*SEMI[:-8], *"--tau 0.2 --model wrn-10-1 --dataset".split(),
                         str(tmp_path / "own.npz"), "--out", str(tmp_path / "run")])
    wanted = ["distribution", "recall", "pseudo_confusion", "pseudo_recall", "views", "attractor"]
    figures.main([str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--only", *wanted])
    said = dict(line.split(": ", 1) for line in capsys.readouterr().err.splitlines())
    assert said.keys() == {"distribution", "recall", "pseudo_confusion", "pseudo_recall"}
    assert all("true labels" in said[name] for name in said.keys() - {"recall"})
    assert {p.stem for p in (tmp_path / "out").iterdir()} == {"distribution", "recall", "views",
                                                             "attractor"}
    with pytest.raises(settings.UserError, match="true labels"):
        evaluate.main([str(tmp_path / "run"), "--pseudo"])


def test_an_older_run_without_bias_columns(folder, tmp_path, capsys):
    shutil.copytree(folder / "l2ac_s0", tmp_path / "old")
    state = torch.load(tmp_path / "old/last.pt", weights_only=True)
    state["history"] = [{k: v for k, v in row.items() if not k.startswith("bias")}
                        for row in state["history"]]
    torch.save(state, tmp_path / "old/last.pt")
    figures.main([str(tmp_path / "old"), "--out", str(tmp_path), "--only", "attractor"])
    assert capsys.readouterr().err.count("no columns bias_k") == 1
    assert (tmp_path / "attractor.png").exists()


def test_a_method_keeps_its_colour(groups, folder):
    apart = finished.load_groups([folder / "l2ac_s0"])
    assert drawing.looks(groups)[1] == drawing.looks(apart)[0] == ("L2AC", drawing.VERMILLION, 0)
    colours = [drawing.look_of_method(*m)[1] for m in (
        ("fixmatch", "none"), ("fixmatch", "l2ac"), ("mixmatch", "none"), ("mixmatch", "l2ac"),
        ("supervised", "lower_bound"), ("supervised", "upper_bound"))]
    assert len(set(colours)) == 6


def test_labels_alone_belong_to_every_setting_with_these_labels(groups):
    class Stub:
        def __init__(self, **changed):
            cfg = type(groups[0].runs[0].cfg)(**vars(groups[0].runs[0].cfg) | changed)
            self.runs = [type("Run", (), {"cfg": cfg})]
    semi = [Stub(gamma_u=1.0), Stub(gamma_u=9.0)]
    lower = Stub(base="supervised", method="lower_bound", gamma_u=1.0)
    upper = Stub(base="supervised", method="upper_bound", gamma_u=9.0)
    panels = list(drawing.by_setting([lower, upper, *semi]).values())
    assert sorted(map(len, panels)) == [2, 3] and all(lower in p for p in panels)
    assert next(p for p in panels if upper in p)[1:] == [semi[1], lower]


def test_the_mixmatch_ramp_in_the_lower_loss():
    cfg = type("C", (), dict(base="mixmatch", lambda_u=75.0, eval_every=10, iters=100))
    row = {"iter": 50, "loss_x": 1.0, "loss_u": 0.01}
    assert training_figures.lower_loss(cfg)(row) == pytest.approx(1 + 75 * 0.45 * 0.01)
