"""The study of what the attractor learns: its mathematics, and which runs are compared."""
import numpy as np
import pytest
from scipy import stats

from scripts import study
from scripts.tables import TABLES

LINE = {"bacc": 0, "labels": [10, 8, 6, 5, 4, 4, 3, 2, 2, 2], "unlabeled": [100] * 10}


def cell_of(number, row, column="gamma_u 1", base="fixmatch"):
    return next(cell for cell in TABLES[number]
                if (cell.row, cell.column, cell.base) == (row, column, base))


@pytest.mark.parametrize("added", [[4, 1, -5], np.log([1.16875, 0.35625, 0.178125]) + 7])
def test_slopes(added):
    """Of 64 unlabeled images 30, 10, 5 are kept: pi + kept is 1.16875, 0.35625, 0.178125. Any
    constant may be added."""
    added, counts = np.array(added), np.array([70, 20, 10])
    numbers = study.slopes(added, counts, np.array([30, 10, 5]) / 64)
    for key, x in (("n", np.log(counts)), ("eff", np.log([1.16875, 0.35625, 0.178125]))):
        assert numbers[f"slope_{key}"] == pytest.approx(np.polyfit(x, added, 1)[0])


def test_pseudo_labels_of_a_run():
    """Ten classes with 10 % of the images each. With the first label 8 % of all images count, 3 of
    4 rightly; with the last 2 %, half of them rightly, so 10 % of that class, and of the tail 1 of
    30 %, are found; with the second 1 %, of which nothing is known."""
    line = LINE | {"kept": [0.08, 0.01] + [0.0] * 7 + [0.02], "right": [0.75] + [None] * 8 + [0.5]}
    numbers = study.described(line)
    assert (numbers["kept"], numbers["right"], numbers["tail"]) == pytest.approx((11, 70, 10 / 3))
    nothing = study.described(line | {"kept": [0.0] * 10, "right": [None] * 10})
    assert (nothing["kept"], nothing["tail"]) == (0, 0) and "right" not in nothing


def test_the_tail_has_the_fewest_labels():
    """Here the classes 3, 7 and 9 with 140 of 280 images; 3 % of all images count as theirs."""
    line = LINE | {"unlabeled": [20] * 9 + [100], "labels": [9, 9, 9, 1, 9, 9, 9, 2, 9, 1],
                   "kept": [0.01] * 10, "right": [1.0] * 10}
    assert study.described(line)["tail"] == pytest.approx(100 * 0.03 / (140 / 280))


def test_a_difference_is_paired_by_seed():
    ours = {0: {"bacc": 90.0}, 1: {"bacc": 80.0}, 2: {"bacc": 85.0}}
    theirs = {1: {"bacc": 79.0}, 0: {"bacc": 88.0}, 3: {"bacc": 0.0}}
    assert study.difference(ours, theirs) == "+1.5 ± 6.4"   # 2 and 1; tan(0.475 pi) / 2
    assert study.difference({0: ours[0]}, theirs) == ""


def test_a_difference_is_bold_if_the_t_test_says_so():
    def text(values):
        return study.difference({i: {"bacc": v} for i, v in enumerate(values)},
                                {i: {"bacc": 0} for i in range(len(values))})
    for seed in range(60):                               # 18 of these are bold
        g = np.random.default_rng(seed)
        values = g.normal(1, 1, g.integers(2, 7))
        test = stats.ttest_1samp(values, 0)
        mean, half = map(float, text(values).strip("*").split(" ± "))
        assert text(values).endswith("**") == (test.pvalue < 0.05)
        assert [mean - half, mean + half] == pytest.approx([*test.confidence_interval()], abs=0.11)
    assert "*" not in text([0.041, 0.04, 0.042])         # would read **+0.0 ± 0.0**


def test_what_is_subtracted_from_what(monkeypatch):
    """bACC by row and base: a difference names the pair that it comes from."""
    level = {"supervised": {"Labels only": 10},
             "mixmatch": {"MixMatch": 21, "w/ ABC": 22, "**w/ L2AC**": 29},
             "fixmatch": {"FixMatch": 33, "w/ ABC": 38, "**w/ L2AC**": 47, "**L2AC**": 47}}
    monkeypatch.setattr(study, "runs_of", lambda cell: {
        seed: {"bacc": level[cell.base][cell.row]} for seed in range(2)})

    def gain_and_lead(row, base):
        cell = cell_of("1-digits", row, base=base)
        return [float(text.strip("*").split()[0]) if text else None
                for text in (study.gain(cell), study.lead(cell))]
    assert gain_and_lead("Labels only", "supervised") == [None, None]
    assert gain_and_lead("FixMatch", "fixmatch") == [23, 14]             # over labels only
    assert gain_and_lead("w/ ABC", "fixmatch") == [5, 9]
    assert gain_and_lead("w/ ABC", "mixmatch") == [1, 7]
    assert gain_and_lead("**w/ L2AC**", "mixmatch") == [8, None]
    assert study.lead(cell_of("5-digits", "FixMatch", "gamma 5")).startswith("**+14.0")
