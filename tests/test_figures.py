"""What the figures show: the numbers in the artists, against log.csv, sklearn, hand-made runs."""
import csv
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import train
from sklearn.metrics import confusion_matrix

import data
from scripts import figures, study
from scripts.figures import Group
from scripts.tables import TABLES
from support.finished import FinishedRun


def made_up(method="none", seed=0, recall=(90, 50, 10), labels=(40, 8, 2), **flags):
    """A run of 100 iterations with epochs of 20, which is also evaluated at 95."""
    cfg = dict(base="fixmatch", method=method, seed=seed, dataset="toy", iters=100, eval_every=20,
               gamma_l=20.0, gamma_u=1.0, beta=None, ratio=None, imbalance="long", reverse_u=False,
               dataset_info={"names": ["$a$", "b", "c"]}) | flags
    history = [{"iter": i, "loss_x": 1, "loss_bal": 3, "bacc": i + 10 * seed}
               for i in (20, 40, 60, 80, 95, 100)]
    return SimpleNamespace(cfg=SimpleNamespace(**cfg), history=history, attractor=True,
                           labels_per_class=labels,
                           reported={"recall": recall, "bias": (-3, 2, 1)})


@pytest.fixture(scope="module")
def l2ac(tmp_path_factory):
    """A real run of six iterations."""
    folder = tmp_path_factory.mktemp("run") / "l2ac_s0"
    train(folder, "--n1 40 --m1 30 --gamma_l 20 --tau 0.2 --model wrn-10-1")
    return Group([FinishedRun(folder)])


def heights(bars):
    return [bar.get_height() for bar in bars]


def test_bars_by_class():
    two = Group([made_up(recall=(80, 50, 0)), made_up(seed=1, recall=(100, 70, 20))])
    only = Group([made_up("vanilla")])
    ax = figures.plt.figure().add_subplot()
    figures.recall_by_class(ax, [two, only])
    bars = next(c for c in ax.containers if hasattr(c, "patches"))
    assert heights(bars) == [90, 60, 10]
    whiskers = np.array([segment[:, 1] for segment in bars.errorbar[2][0].get_segments()])
    std = 20 / 2 ** 0.5                                  # of two numbers that are 20 apart
    ends = np.array([(90 - std, 100), (60 - std, 60 + std), (0, 10 + std)])
    assert whiskers == pytest.approx(ends)
    lines = next(c for c in ax.collections if c.get_label() == "labels only")
    assert [segment[0, 1] for segment in lines.get_segments()] == [90, 50, 10]


def test_runs_with_the_labels_only_stand_in_every_setting_with_their_labels():
    one, nine = (Group([made_up(gamma_u=gamma)]) for gamma in (1.0, 9.0))
    only, other = (Group([made_up("vanilla", gamma_l=gamma)]) for gamma in (20.0, 5.0))
    settings = figures.by_setting([only, other, one, nine])
    assert settings == {one.setting: [one, only], nine.setting: [nine, only]}


def test_curves_show_the_ends_of_epochs():
    losses, accuracy = figures.FIGURES["curves"]([Group([made_up(), made_up(seed=1)])]).axes
    line, = accuracy.lines
    assert line.get_xydata().T.tolist() == [[20, 40, 60, 80, 100], [25, 45, 65, 85, 105]]
    assert [list(line.get_ydata()) for line in losses.lines] == [[1] * 5, [3] * 5]
    _, accuracy = figures.curves([Group([made_up(eval_every=500)])]).axes      # none: the last row
    assert accuracy.lines[0].get_xydata().tolist() == [[100, 100]]


def test_confusion_and_distribution(l2ac):
    run = l2ac.first
    ax, = figures.FIGURES["confusion"]([l2ac]).axes
    matrix = confusion_matrix(run.dataset.test_labels, run.test_scores.argmax(1), normalize="true")
    assert [t.get_text() for t in ax.texts] == [f"{100 * v:.0f}" for v in matrix.ravel()]
    ax, = figures.distribution([l2ac]).axes
    assert heights(ax.containers[0]) == data.class_counts(40, 10, 20)
    assert heights(ax.containers[1]) == [30] * 10


def test_what_the_attractor_adds(l2ac):
    run, deltas = l2ac.first, {k: [] for k in range(10)}
    w = torch.load(run.folder / "last.pt", weights_only=True)["attractor"]
    for row, y in zip(run.test_scores, run.dataset.test_labels.tolist(), strict=True):
        hidden = (w["hidden.weight"] @ row.softmax(0) + w["hidden.bias"]).clamp_min(0)
        delta = w["out.weight"] @ hidden + w["out.bias"]
        deltas[y].append((delta - delta.mean()).numpy())
    by_hand = np.array([np.mean(deltas[k], axis=0) for k in range(10)])                # (10, 10)
    log_n = np.log(data.class_counts(40, 10, 20))
    training, end = figures.attractor([l2ac]).axes
    expected = np.vstack([by_hand, log_n - log_n.mean()])
    assert np.asarray(end.images[0].get_array()) == pytest.approx(expected, abs=1e-5)
    log = list(csv.DictReader((run.folder / "log.csv").read_text().splitlines()))
    for k, line in enumerate(training.lines[:10]):
        assert line.get_ydata() == pytest.approx([float(r[f"bias_{k}"]) for r in log], abs=1e-5)
    bars = figures.story([l2ac]).axes[1].patches
    means = [np.mean([float(r[f"bias_{k}"]) for r in log]) for k in range(10)]
    assert heights(bars) == pytest.approx(means, abs=1e-5)


def test_classes_are_ordered_by_their_labels():
    runs = Group([made_up(recall=(10, 90, 50), labels=(2, 40, 8))])
    top, below = figures.story([runs]).axes
    assert heights(top.patches) == [90, 50, 10] and heights(below.patches) == [2, 1, -3]
    assert [t.get_text() for t in below.get_xticklabels()] == ["b\n40", "c\n8", "$a$\n2"]


def test_the_study_shows_means_over_seeds(monkeypatch):
    def numbers(seed):
        return {"bacc": 80 + seed, "bias": np.full(10, seed), "labels": [1] * 10,
                "log_eff": np.zeros(10)}
    rows = {cell.row: [numbers(0), numbers(2)] for cell in TABLES["attractor"]}
    monkeypatch.setattr(study, "study", lambda *_: {"digits, a": rows, "digits, b": rows})
    accuracy, _, added, _ = figures.study_figure().axes
    assert [list(line.get_ydata()) for line in accuracy.lines[:2]] == [[80, 82], [81]]
    assert list(added.lines[0].get_ydata()) == [1] * 10


@pytest.mark.slow
@pytest.mark.filterwarnings("error::UserWarning", "error::RuntimeWarning")
def test_the_command_draws_every_figure(l2ac, tmp_path):
    train(tmp_path / "none", "--n1 40 --m1 30 --gamma_l 20 --method none --model wrn-10-1")
    figures.main([str(l2ac.first.folder), str(tmp_path / "none"), "--out", str(tmp_path / "all")])
    assert {path.stem for path in (tmp_path / "all").iterdir()} == figures.FIGURES.keys()
