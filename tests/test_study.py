"""The study of what the attractor learns: its mathematics, and which runs are compared."""
import numpy as np
import pytest

from scripts import study
from scripts.tables import TABLES

LINE = {"seed": 0, "bacc": 0, "gm": 0, "labels": [10, 8, 6, 5, 4, 4, 3, 2, 2, 2],
        "unlabeled": [100] * 10}
COUNTS, KEPT = np.array([70, 20, 10]), np.array([30, 10, 5]) / 64


def cell_of(number, row, column="gamma_u 1", base="fixmatch"):
    return next(cell for cell in TABLES[number]
                if (cell.row, cell.column, cell.base) == (row, column, base))


def test_effective_distribution():
    """Of 64 unlabeled images 30, 10, 5 are kept: pi + kept is 1.16875, 0.35625, 0.178125."""
    weight = np.array([1.16875, 0.35625, 0.178125])
    assert study.effective_distribution(COUNTS, KEPT) == pytest.approx(weight / weight.sum())


@pytest.mark.parametrize("x", [np.log([70, 20, 10]), np.log([0.5, 0.3, 0.2])])
def test_fit(x):
    added = np.array([4, 1, -5]) / 3 + 7                 # any constant may be added
    expected = np.polyfit(x, added, 1)[0], np.corrcoef(x, added)[0, 1] ** 2
    assert study.fit(added, x) == pytest.approx(expected)


def test_an_attractor_that_adds_what_is_predicted():
    log_eff = np.log(study.effective_distribution(COUNTS, KEPT))
    numbers = study.fits(log_eff, COUNTS, KEPT)
    assert (numbers["slope_eff"], numbers["r2_eff"]) == pytest.approx((1, 1))
    assert numbers["slope_n"] == pytest.approx(np.polyfit(np.log(COUNTS), log_eff, 1)[0])
    assert numbers["predicted"] == pytest.approx(numbers["slope_n"])


def test_pseudo_labels_of_a_run():
    """Ten classes with 10 % of the images each. With the first label 8 % of all images count, 3 of
    4 rightly, so 60 % of that class are found; with the last 2 %, half of them rightly; with the
    second 1 %, of which nothing is known."""
    line = LINE | {"kept": [0.08, 0.01] + [0.0] * 7 + [0.02],
                   "right": [0.75, None] + [None] * 7 + [0.5]}
    numbers = study.described(line)
    assert numbers["found_k"] == pytest.approx([60] + [0] * 8 + [10])
    assert (numbers["kept"], numbers["right"], numbers["tail"]) == pytest.approx((11, 70, 10 / 3))
    nothing = study.described(line | {"kept": [0.0] * 10, "right": [None] * 10})
    assert (nothing["kept"], nothing["tail"]) == (0, 0) and "right" not in nothing


def test_shares_of_a_reversed_set():
    """A class that is k times as frequent is found k times less often by the same labels. The tail
    are the classes with the fewest labels, wherever they stand: 3, 7 and 9 of ten."""
    line = LINE | {"unlabeled": [20] * 9 + [100], "labels": [9, 9, 9, 1, 9, 9, 9, 2, 9, 1],
                   "kept": [0.01] * 10, "right": [1.0] * 10}
    numbers = study.described(line)
    assert numbers["found_k"][0] / numbers["found_k"][-1] == pytest.approx(5)
    assert numbers["tail"] == pytest.approx(100 * 0.03 / (140 / 280))


def test_a_difference_is_paired_by_seed():
    ours = {0: {"bacc": 90.0}, 1: {"bacc": 80.0}, 2: {"bacc": 85.0}}
    theirs = {1: {"bacc": 79.0}, 0: {"bacc": 88.0}, 3: {"bacc": 0.0}}
    assert study.difference(ours, theirs) == "+1.5 ± 0.5 (2)"            # 2 and 1
    assert study.difference({0: ours[0]}, theirs) == ""


def test_what_is_subtracted_from_what(monkeypatch):
    """bACC by row and base: a difference names the pair that it comes from."""
    level = {"supervised": {"Vanilla": 10},
             "mixmatch": {"MixMatch": 21, "w/ ABC": 22, "**w/ L2AC**": 29},
             "fixmatch": {"FixMatch": 33, "w/ ABC": 38, "**w/ L2AC**": 47, "**L2AC**": 47}}
    monkeypatch.setattr(study, "runs_of", lambda cell: {
        seed: {"bacc": level[cell.base][cell.row]} for seed in range(2)})

    def gain_and_lead(row, base):
        cell = cell_of("1-digits", row, base=base)
        return [float(text.strip("*").split()[0]) if text else None
                for text in (study.gain(cell), study.lead(cell))]
    assert gain_and_lead("Vanilla", "supervised") == [None, None]
    assert gain_and_lead("FixMatch", "fixmatch") == [23, None]           # over the labels alone
    assert gain_and_lead("w/ ABC", "fixmatch") == [5, 9]
    assert gain_and_lead("w/ ABC", "mixmatch") == [1, 7]
    assert gain_and_lead("**w/ L2AC**", "mixmatch") == [8, None]
    assert study.lead_over_parts(cell_of("5-digits", "FixMatch", "gamma 5")).startswith("**+14.0")
