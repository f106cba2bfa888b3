"""The study of what the attractor learns: its mathematics, and its tables are those of results/."""
import re
import statistics

import numpy as np
import pytest
from conftest import ROOT

from scripts import collect, study, tables

PAGE = (ROOT / "docs" / "attractor.md").read_text()


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


def test_difference_is_paired_by_seed():
    ours = [{"seed": s, "bacc": b} for s, b in ((0, 90.0), (1, 80.0), (2, 85.0))]
    theirs = [{"seed": s, "bacc": b} for s, b in ((1, 79.0), (0, 88.0), (3, 0.0))]
    assert study.difference(ours, theirs) == "**+1.5 ± 0.5** (2)"    # 2 and 1
    assert study.difference(theirs, ours) == "**-1.5 ± 0.5** (2)"
    assert study.difference(ours[:1], theirs) == ""


def table(name):
    return collect.block(name).search(PAGE)[2].strip()


def test_the_page_shows_the_results():
    result = study.study(collect.read_results(ROOT / "results"))
    assert table("study") == study.markdown(result)
    assert table("differences") == study.difference_table(result)


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
