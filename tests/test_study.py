"""The study of what the attractor learns: its mathematics, and its tables are those of results/."""
import re
import statistics

import numpy as np
import pytest
from conftest import ROOT

from scripts import collect, finished, rankings, study, tables

PAGES = [(ROOT / "docs" / f"{name}.md").read_text() for name in ("attractor", "results", "after")]


def test_effective_distribution():
    """Of 64 unlabeled images 30, 10, 5 are kept: by hand."""
    pi_eff = study.effective_distribution(np.array([70, 20, 10]), np.array([30, 10, 5]) / 64)
    assert pi_eff == pytest.approx([0.6862, 0.2092, 0.1046], abs=5e-5)


@pytest.mark.parametrize("x, slope, r2", [
    (np.log([70, 20, 10]), 1.4524, 0.8794), (np.log([0.5, 0.3, 0.2]), 3.2181, 0.9357)])
def test_fit(x, slope, r2):
    added = np.array([4, 1, -5]) / 3                     # mean of (1,0,-1), (2,0,-2), (1,1,-2)
    assert study.fit(added, x) == pytest.approx((slope, r2), abs=5e-5)
    assert np.polyfit(x, added + 7, 1)[0] == pytest.approx(slope, abs=5e-5)      # any constant


def test_predicted_slope():
    """Of an attractor that adds log pi_eff, on log N_k; counts as above."""
    counts, kept = np.array([70, 20, 10]), np.array([30, 10, 5]) / 64
    log_eff = np.log(study.effective_distribution(counts, kept))
    numbers = study.fits(log_eff, counts, kept)
    assert numbers["predicted"] == pytest.approx(np.polyfit(np.log(counts), log_eff, 1)[0])
    assert numbers["slope_n"] == pytest.approx(numbers["predicted"])
    assert (numbers["slope_eff"], numbers["r2_eff"]) == pytest.approx((1, 1))


def test_pseudo_labels_by_class():
    """A class of 100 among 1,000 unlabeled images: 8 % of all count with its label, 3 of 4 of these
    are right, so 60 % of its images are found. A class without a label finds none."""
    cell = next(c for c in tables.TABLES["attractor"]
                if (c.dataset, c.column, c.row) == ("digits", "gamma_u 1", "FixMatch"))
    kept, precision = [0.08] + [0.0] * 9, [0.75] + [float("nan")] * 9
    numbers = study.described(cell, {"seed": 0, "bacc": 0, "gm": 0, "course": {
        "kept": [kept] * 11, "precision": [precision] * 11}})
    assert numbers["found_k"] == pytest.approx([60] + [0] * 9)
    assert (numbers["kept"], numbers["right"]) == pytest.approx((8, 75))


def test_difference_is_paired_by_seed():
    ours = [{"seed": s, "bacc": b} for s, b in ((0, 90.0), (1, 80.0), (2, 85.0))]
    theirs = [{"seed": s, "bacc": b} for s, b in ((1, 79.0), (0, 88.0), (3, 0.0))]
    assert rankings.difference(ours, theirs) == "**+1.5 ± 0.5** (2)"    # 2 and 1
    assert rankings.difference(theirs, ours) == "**-1.5 ± 0.5** (2)"
    assert rankings.difference(ours[:1], theirs) == ""


def table(name):
    return next(place[2].strip() for place in map(collect.block(name).search, PAGES) if place)


def test_the_pages_show_the_results():
    found = collect.read_results(ROOT / "results")
    for name, text in study.written_tables(study.study(found), found).items():
        assert table(name) == text, name


def digits(column, **rows):
    """Results of some rows of Table 1 on digits, two seeds each."""
    names = {(c.base, c.method, "prior" in c.row): c.name for c in tables.TABLES["1-digits"]
             if c.column == column}
    return {("mini", names[row.split("_")[0], row.split("_")[1], False]): {
        seed: result | {"seed": seed} for seed, result in enumerate(results)}
        for row, results in rows.items()}


def test_methods_are_compared_with_their_base_and_with_l2ac():
    found = digits("gamma_u 1", supervised_vanilla=[{"bacc": 70.0}, {"bacc": 72.0}],
                   fixmatch_none=[{"bacc": 80.0}, {"bacc": 84.0}],
                   fixmatch_abc=[{"bacc": 81.0}, {"bacc": 84.0}],
                   fixmatch_l2ac=[{"bacc": 91.0}, {"bacc": 92.0}])
    gains = rankings.compared("1-digits", found, rankings.over_its_base).splitlines()[2:]
    assert gains == ["| FixMatch |  |  | **+11.0 ± 1.0** (2) |  |",       # 10 and 12
                     "| FixMatch w/ ABC |  |  | +0.5 ± 0.5 (2) |  |",
                     "| FixMatch w/ L2AC |  |  | **+9.5 ± 1.5** (2) |  |"]
    leads = rankings.compared("1-digits", found, rankings.l2ac_over).splitlines()[2:]
    assert leads == ["| FixMatch w/ ABC |  |  | **+9.0 ± 1.0** (2) |  |"]


def test_pseudo_labels_by_hand():
    """Ten classes with 10 % of the images each; 5 of 10 points are kept of the first, all right, 2
    of the last, half of them right."""
    kept, precision = [0.05] + [0.0] * 8 + [0.02], [1.0] + [None] * 8 + [0.5]
    run = {"course": {"kept": [[0.9] * 10, kept], "precision": [[0.9] * 10, precision]}}
    none = {"course": {"kept": [[0.0] * 10] * 2, "precision": [[None] * 10] * 2}}
    found = digits("gamma_u 1", fixmatch_daso=[none], fixmatch_abc=[run])
    assert rankings.label_table("1-digits", found).splitlines()[-2:] == [
        "| FixMatch w/ DASO |  |  | 0 / – / 0 |  |",
        "| FixMatch w/ ABC |  |  | 7 / 85.7 / 3 |  |"]                 # 0.06 of 0.07; 0.01 of 0.3
    reverse = next(c for c in tables.TABLES["1-digits"] if "--reverse_u" in c.flags)
    assert rankings.unlabeled_shares(reverse)[-1] == max(rankings.unlabeled_shares(reverse)) > 0.15


def test_precision_is_that_of_all_labels_of_the_evaluations():
    """A class has no precision in an evaluation without a label of it: 3 of 4 are right, not none
    of them. An older file has no mean there; the last epoch's precision takes its place."""
    rows = [{"iter": i, "recall_0": 1.0, "kept_0": kept, "precision_0": precision}
            for i, kept, precision in ((1, 0.5, 0.5), (2, 0.3, 2 / 3), (3, 0.0, float("nan")),
                                       (4, 0.1, 1.0))]
    course = finished.course(rows, {"iters": 4, "evaluations": 3, "recall": [1.0]})
    assert course["kept"][-1] == [0.1333] and course["precision"][-1] == [0.75]
    older = {"kept": [[0.1, 0.2, 0.3]] * 2, "precision": [[0.9, 0.5, None], [0.8, None, None]]}
    assert rankings.end_of(older) == pytest.approx(np.array(
        [[0.1, 0.2, 0.3], [0.1, 0.2, 0.0], [0.08, 0.1, 0.0]]))


def test_a_cell_of_the_page_by_hand():
    """FixMatch - labels alone at gamma_u 1, from the files."""
    cells = [cell for cell in tables.TABLES["attractor"]
             if (cell.dataset, cell.column) == ("digits", "gamma_u 1")]
    found = collect.read_results(ROOT / "results")
    labels, fixmatch = (collect.by_seed(cell, "mini", found) for cell in cells[:2])
    gains = [fixmatch[s]["bacc"] - labels[s]["bacc"] for s in sorted(fixmatch)]
    row = next(line for line in table("differences").splitlines() if "Labels alone" in line)
    mean, error = map(float, re.findall(r"([+-]?[\d.]+) ± ([\d.]+)", row.split("|")[4])[0])
    assert mean == pytest.approx(statistics.mean(gains), abs=0.05)
    assert error == pytest.approx(statistics.stdev(gains) / len(gains) ** 0.5, abs=0.05)
