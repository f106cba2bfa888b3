"""What the figures show: numbers of evaluate.py and log.csv, counts by hand; what is missing."""
import csv
import json
import resource
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import exit_of, files, stopped, train
from PIL import Image
from sklearn.metrics import confusion_matrix

import baselines.train
import data
import evaluate
from scripts import drawing, figures, training_figures
from scripts.drawing import plt
from support import UserError, report

slow = pytest.mark.slow
SETTING = "--n1 40 --m1 30 --gamma_l 20 "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two seeds of FixMatch, one of L2AC, both bounds."""
    out = tmp_path_factory.mktemp("runs")
    for name in ("none_s0", "none_s1", "l2ac_s0"):
        train(out / name, f"{SETTING} --tau 0.2 --method {name[:-3]} --seed {name[-1]}")
    for name in ("lower_bound", "upper_bound"):
        train(out / name, f"{SETTING} --base supervised --method {name}", baselines.train.main)
    return out


def load_groups(*folders):
    return report.grouped([evaluate.load_run(folder) for folder in folders])


@pytest.fixture(scope="module")
def groups(folder):
    return load_groups(*(folder / name for name in ("none_s0", "none_s1", "l2ac_s0", "lower_bound",
                                                    "upper_bound")))


@pytest.fixture(autouse=True)
def close():
    yield
    plt.close("all")


def log_of(folder):
    with open(folder / "log.csv") as file:
        return {key: np.array([float(row[key]) for row in rows]) for rows in
                [list(csv.DictReader(file))] for key in rows[0]}


def recalls(folder):
    """(10,) means of log.csv, whose two rows are the last 20 evaluations."""
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


@slow
def test_figures_and_the_command_line_agree(groups, folder, capsys):
    evaluate.main([str(folder / f"none_s{s}") for s in (0, 1)] + ["--json", "--pseudo"])
    told, = json.loads(capsys.readouterr().out).values()

    def bars_of(figure):
        return heights(figure.axes[0].patches[:10])
    assert bars_of(figures.recall(groups)) == pytest.approx(told["mean_of_last"]["recall"])
    assert bars_of(figures.predicted(groups)) == pytest.approx(told["last"]["predicted"])
    assert bars_of(figures.pseudo_recall(groups)) == pytest.approx(told["pseudo"]["recall"])
    for figure, section in ((figures.confusion, "last"), (figures.pseudo_confusion, "pseudo")):
        shown = [text.get_text() for text in figure(groups).axes[0].texts]
        assert shown == [f"{v:.0f}" for row in told[section]["confusion"] for v in row]


def guesses(run, images):
    with torch.no_grad():
        return run.model(run.normalise(images))


@slow
def test_confusion_against_scikit_learn(groups):
    run = groups[1].runs[0]
    ax = figures.confusion(groups).axes[1]
    predicted = guesses(run, run.dataset.test_images).argmax(1)
    matrix = 100 * confusion_matrix(run.dataset.test_labels, predicted, normalize="true")
    assert ax.get_title() == "L2AC" and len(ax.texts) == 100
    assert [t.get_text() for t in ax.texts] == [f"{v:.0f}" for v in matrix.ravel()]


@slow
def test_predicted_distribution_is_a_mean_of_probabilities(groups):
    run = groups[1].runs[0]
    logits = guesses(run, run.dataset.test_images).double().numpy()
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    bars = figures.predicted(groups).axes[0].patches[10:20]
    assert heights(bars) == pytest.approx(100 * p.mean(0), rel=1e-4)


@slow
def test_distribution_shows_the_split(groups):
    ax, = figures.distribution(groups).axes
    assert heights(ax.containers[0]) == data.class_counts(40, 10, 20)
    assert heights(ax.containers[1]) == [30] * 10


@slow
def test_imbalanced_tests_show_the_test_sets(groups):
    long, back, chance = (heights(ax.patches) for ax in figures.imbalanced_tests(groups).axes)
    assert long == data.class_counts(20, 10, 10) == back[::-1]
    assert all(2 <= n <= 20 for n in chance) and chance not in (long, back)


@slow
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
    state = torch.load(run.folder / "last.pt", weights_only=True)["attractor"]
    w = {name: tensor.double().numpy() for name, tensor in state.items()}
    logits = guesses(run, run.dataset.test_images).double().numpy()
    total, seen = np.zeros((10, 10)), np.zeros(10)
    for row, y in zip(logits, run.dataset.test_labels, strict=True):
        p = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        hidden = np.maximum(w["hidden.weight"] @ p + w["hidden.bias"], 0)
        delta = w["out.weight"] @ hidden + w["out.bias"]
        total[y] += delta - delta.mean()
        seen[y] += 1
    return total / seen[:, None]


@slow
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
        assert line.get_ydata()[-1] == pytest.approx(by_hand[:, k].mean(), abs=1e-5)
    assert not any(key.startswith("bias") for key in log_of(folder / "none_s0"))
    story = figures.story(groups).axes[1]
    assert heights(story.patches) == pytest.approx(np.diagonal(by_hand), abs=1e-5)


@slow
@pytest.mark.parametrize("flags", ["--attractor vector", "--attractor vector --eta 0",
                                   "--attractor vector --attractor_start prior"])
def test_a_vector_adds_the_same_to_all_classes_of_images(tmp_path, flags):
    """Also one that is still zero everywhere."""
    train(tmp_path / "run", f"{SETTING} --tau 0.2 {flags}")
    argv = [str(tmp_path / "run"), "--out", str(tmp_path), "--only", "attractor", "story"]
    assert figures.main(argv) == 0
    omega = torch.load(tmp_path / "run/last.pt", weights_only=True)["attractor"]["bias"].numpy()
    _, end = figures.attractor(load_groups(tmp_path / "run")).axes
    shown = np.asarray(end.images[0].get_array())
    assert shown[:10] == pytest.approx(np.tile(omega - omega.mean(), (10, 1)), abs=1e-6)


@slow
def test_views_begin_with_the_images_themselves(groups):
    run = groups[0].runs[0]
    strip = figures.views(groups).axes[0].images[0].get_array()               # (40, 100, 3)
    first = run.split[0][run.dataset.labels[run.split[0]] == 3][0]
    image = run.dataset.images[first].permute(1, 2, 0).numpy() / 255
    assert strip.shape == (40, 100, 3)
    assert np.asarray(strip[1:9, 31:39]) == pytest.approx(image, abs=1e-5)
    assert np.asarray(strip[11:19, 31:39]) != pytest.approx(image, abs=1e-2)


@slow
def test_tsne_is_repeatable_and_shows_true_classes(groups):
    run = groups[0].runs[0]
    place, y = figures.embed(run, 80)
    again, _ = figures.embed(run, 80)
    assert place.shape == (80, 2) and np.array_equal(place, again)
    everything = run.dataset.labels[np.concatenate(run.split)]
    assert (np.bincount(y, minlength=10) <= np.bincount(everything, minlength=10)).all()


@slow
def test_the_command_draws_every_figure(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(figures.FIGURES, "tsne", partial(figures.tsne, points=60))
    runs = [str(folder / n) for n in ("none_s0", "l2ac_s0", "lower_bound", "upper_bound")]
    assert figures.main([*runs, "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().err == ""
    for name in figures.FIGURES:
        path = tmp_path / f"{name}.png"
        assert path.stat().st_size < 200_000 and Image.open(path).width == 1350


@slow
@pytest.mark.parametrize("kind,start", [("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_formats_for_papers(folder, tmp_path, kind, start):
    figures.main([str(folder / "none_s0"), "--out", str(tmp_path), "--format", kind, "--only",
                  "recall"])
    assert (tmp_path / f"recall.{kind}").read_bytes().startswith(start)


@slow
def test_what_is_missing_is_named_and_the_rest_is_drawn(folder, tmp_path, capsys):
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


@slow
def test_no_true_labels(tmp_path, capsys):
    g = np.random.default_rng(0)
    x, y = g.integers(0, 256, (60, 8, 8, 3), np.uint8), np.arange(60) % 3
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_test=x, y_test=y, x_unlabeled=x)
    train(tmp_path / "run", f"--tau 0.2 --model wrn-10-1 --dataset {tmp_path / 'own.npz'}")
    wanted = ["distribution", "recall", "pseudo_confusion", "pseudo_recall", "views", "attractor"]
    figures.main([str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--only", *wanted])
    said = dict(line.split(": ", 1) for line in capsys.readouterr().err.splitlines())
    assert said.keys() == {"distribution", "recall", "pseudo_confusion", "pseudo_recall"}
    assert all("true labels" in said[name] for name in said.keys() - {"recall"})
    assert {p.stem for p in (tmp_path / "out").iterdir()} == {"distribution", "recall", "views",
                                                             "attractor"}
    with pytest.raises(UserError, match="true labels"):
        evaluate.main([str(tmp_path / "run"), "--pseudo"])


@slow
def test_a_run_that_was_stopped_before_its_first_evaluation(tmp_path, capsys):
    stopped(tmp_path / "run", SETTING, after=1)
    wanted = ["recall", "curves", "losses", "attractor"]
    assert figures.main([str(tmp_path / "run"), "--out", str(tmp_path), "--only", *wanted]) == 0
    said = dict(line.split(": ", 1) for line in capsys.readouterr().err.splitlines())
    assert "upper loss" in said["losses"] and "upper loss" in said["curves"]
    assert {p.stem for p in tmp_path.glob("*.png")} == {"recall", "curves", "attractor"}


@slow
@pytest.mark.parametrize("base", ["mixmatch", "supervised --method vanilla"])
def test_runs_of_other_bases_have_views_and_curves(tmp_path, base):
    """MixMatch has no flags for RandAugment, a supervised run no weight of an unlabeled loss."""
    train(tmp_path / "run", f"{SETTING} --base {base}", baselines.train.main)
    assert figures.main([str(tmp_path / "run"), "--out", str(tmp_path), "--only", "views",
                         "curves"]) == 0


NASTY = ["$", "_", "\\", "a$b$c_{", "x" * 200, "$\\frac{$", "a_b^c"]


@pytest.fixture(scope="module")
def nasty(tmp_path_factory):
    """A run on classes with such names, of which the last has no test image, the others five."""
    folder, g, K = tmp_path_factory.mktemp("nasty"), np.random.default_rng(0), len(NASTY)
    x, y = g.integers(0, 256, (12 * K, 8, 8, 3), np.uint8), np.arange(12 * K) % K
    np.savez(folder / "own.npz", x_train=x, y_train=y, x_test=x[:5 * K - 5],
             y_test=np.arange(5 * K - 5) % (K - 1), names=np.array(NASTY))
    train(folder / "run", f"--tau 0.2 --model wrn-10-1 --dataset {folder / 'own.npz'} --n1 6 "
                          f"--m1 3 --gamma_l 2 --gamma_u 1")
    return folder / "run"


@pytest.mark.slow
def test_names_are_drawn_as_they_are(nasty, tmp_path):
    """In figures that hold a class without test images, too."""
    assert figures.main([str(nasty), "--out", str(tmp_path), "--only", "recall"]) == 0
    group, = load_groups(nasty)
    ticks = figures.recall([group]).axes[0].get_xticklabels()
    shown = [tick._preprocess_math(tick.get_text().split("\n")[0]) for tick in ticks]
    assert [math for _, math in shown] == [False] * len(NASTY)
    expected = [name if len(name) <= 20 else "x" * 12 + "…" + "x" * 7 for name in NASTY]
    assert [text for text, _ in shown] == expected


@slow
def test_few_or_no_test_images_of_a_class(nasty, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(figures.FIGURES, "tsne", partial(figures.tsne, points=30))
    assert figures.main([str(nasty), "--out", str(tmp_path)]) == 0
    said = dict(line.split(": ", 1) for line in capsys.readouterr().err.splitlines())
    assert said.keys() == {"imbalanced_tests", "recall", "predicted"}        # the bounds
    assert "needs 10 test images" in said["imbalanced_tests"] and "--" not in said[
        "imbalanced_tests"]
    assert {p.stem for p in tmp_path.iterdir()} == figures.FIGURES.keys() - {"imbalanced_tests"}


@pytest.mark.slow
def test_a_figure_survives_a_failed_write(folder, tmp_path, capsys):
    argv = [str(folder / "none_s0"), "--out", str(tmp_path), "--only", "curves"]
    assert figures.main(argv) == 0
    before, (soft, hard) = files(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
    try:
        code, err = exit_of(figures.main, argv, capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 2 and "curves.png" in err and files(tmp_path) == before


@pytest.mark.slow
def test_unfinished_seeds_are_not_drawn_as_one_curve(folder, tmp_path, capsys):
    stopped(tmp_path / "none_s2", f"{SETTING} --tau 0.2 --method none --seed 2", after=4)
    argv = [str(folder / "none_s0"), str(tmp_path / "none_s2"), "--out", str(tmp_path / "figures")]
    code, err = exit_of(figures.main, argv, capsys)
    assert code == 2 and "none_s2 is not finished" in err and not (tmp_path / "figures").exists()
    assert figures.main([*argv, "--only", "curves", "--unfinished"]) == 0


def stub(base="fixmatch", method="none", gamma_u=1.0):
    """A group as far as names, colours and settings are concerned."""
    cfg = SimpleNamespace(base=base, method=method, n1=40, m1=60, gamma_l=20.0, gamma_u=gamma_u,
                          imbalance="long", beta=None, reverse_u=False, ratio=None)
    return SimpleNamespace(runs=[SimpleNamespace(cfg=cfg)], path=SimpleNamespace(name="folder"))


def test_a_method_keeps_its_colour():
    l2ac = stub(method="l2ac")
    together, alone = drawing.looks([stub(), l2ac, stub("mixmatch")]), drawing.looks([l2ac])
    assert together[1] == alone[0] == ("L2AC", drawing.VERMILLION, 0)
    colours = [drawing.look_of_method(*m)[1] for m in (
        ("fixmatch", "none"), ("fixmatch", "l2ac"), ("mixmatch", "none"), ("mixmatch", "l2ac"),
        ("supervised", "lower_bound"), ("supervised", "upper_bound"))]
    assert len(set(colours)) == 6


def test_equal_names_are_told_apart_by_setting_or_folder():
    names = [look.name for look in drawing.looks([stub(), stub(gamma_u=9.0)])]
    assert names == [rf"FixMatch, $\gamma_l=20$, $\gamma_u={g}$" for g in (1, 9)]
    looks = drawing.looks([stub(), stub()])
    assert [look.name for look in looks] == ["FixMatch (folder)"] * 2
    assert [look.turn for look in looks] == [0, 1]                   # another hatch, another dash


def test_supervised_runs_belong_to_every_setting_with_the_same_labels():
    semi = [stub(gamma_u=1.0), stub(gamma_u=9.0)]
    lower, upper = stub("supervised", "lower_bound"), stub("supervised", "upper_bound", gamma_u=9.0)
    panels = list(drawing.by_setting([lower, upper, *semi]).values())
    assert sorted(map(len, panels)) == [2, 3] and all(lower in p for p in panels)
    assert next(p for p in panels if upper in p)[1:] == [semi[1], lower]


@pytest.mark.parametrize("base,expected", [
    ("mixmatch", 1 + 75 * 0.45 * 0.01), ("pseudolabel", 1 + 75 * 0.01), ("fixmatch", 1 + 75 * 0.01),
    ("supervised", 1)])
def test_the_ramp_in_the_lower_loss(base, expected):
    """Iterations 41 to 50 of 100: MixMatch's ramp is at 45 %, that of pseudo-labels over."""
    cfg = SimpleNamespace(base=base, eval_every=10, iters=100)
    if base != "supervised":
        cfg.lambda_u = 75.0
    row = {"iter": 50, "loss_x": 1.0, "loss_u": 0.01}
    assert training_figures.lower_loss_of(cfg)(row) == pytest.approx(expected)


def test_the_ramp_of_pseudo_labels_ends_after_40_percent_of_the_run():
    cfg = SimpleNamespace(base="pseudolabel", eval_every=10, iters=100, lambda_u=2.0)
    loss = training_figures.lower_loss_of(cfg)
    assert loss({"iter": 20, "loss_x": 1.0, "loss_u": 3.0}) == pytest.approx(1 + 2 * (15 / 40) * 3)
    # an evaluation between two ends of an epoch averages over iterations 10 to 14
    assert loss({"iter": 14, "loss_x": 1.0, "loss_u": 3.0}) == pytest.approx(1 + 2 * (12 / 40) * 3)
