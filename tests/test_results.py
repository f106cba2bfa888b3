"""The README's tables that scripts/collect.py does not write show the numbers of results/.

Of those that it writes: test_reproduce.py.
"""
import json
from collections import defaultdict

import pytest
from conftest import ROOT

FOLDERS = ("synthetic", "extra", "long", "lambda_u")
GROUPS = defaultdict(list)                               # (folder, name without seed): results
for path in sorted(p for f in FOLDERS for p in ROOT.glob(f"results/{f}/*.json")):
    GROUPS[path.parent.name, path.stem.rsplit("_s", 1)[0]].append(json.loads(path.read_text()))

CELLS = {  # (column, row) of a table: the results whose mean it shows
    ("10,000 iterations", "Vanilla"): ("long", "supervised_vanilla"),
    ("10,000 iterations", "FixMatch"): ("long", "fixmatch_none"),
    ("10,000 iterations", "w/ DARP"): ("long", "fixmatch_darp"),
    ("10,000 iterations", "w/ DASO"): ("long", "fixmatch_daso"),
    ("10,000 iterations", "w/ L2AC"): ("long", "fixmatch_l2ac"),
    ("lambda_u 7.5", "MixMatch"): ("lambda_u", "mixmatch_none_7.5"),
    ("lambda_u 7.5", "w/ L2AC"): ("lambda_u", "mixmatch_l2ac_7.5"),
    ("lambda_u 0", "MixMatch"): ("lambda_u", "mixmatch_none_0"),
    ("lambda_u 0", "w/ L2AC"): ("lambda_u", "mixmatch_l2ac_0"),
    ("bACC / GM", "all images with true labels, gamma_u 1"): ("extra",
                                                              "supervised_upper_bound_gu1"),
    ("bACC / GM", "all images with true labels, gamma_u 100"): ("extra",
                                                                "supervised_upper_bound_gu100"),
    ("bACC / GM", "Lee's pseudo-labels, gamma_u 1"): ("extra", "pseudolabel_gu1_none"),
    ("bACC / GM", "FixMatch w/ CReST, gamma 100"): ("extra", "gu100_crest"),
}


def markdown_cells(text):
    """{(column, row): cell} of all tables; a pair of names that occurs twice has the last one."""
    cells, heading = {}, None
    for line in text.splitlines():
        if not line.startswith("|"):
            heading = None
            continue
        row = [cell.strip().strip("*") for cell in line.strip("|").split("|")]
        heading = heading or row
        cells |= {(column, row[0]): cell for column, cell in zip(heading, row, strict=False)}
    return cells


@pytest.mark.parametrize("place", CELLS, ids=str)
def test_readme_shows_what_was_measured(place):
    """bACC / GM, rounded to a decimal."""
    result, = GROUPS[CELLS[place]]                       # one seed
    cells = markdown_cells((ROOT / "README.md").read_text())
    assert cells[place] == f"{result['bacc']:.1f} / {result['gm']:.1f}"


def test_results_are_of_one_setting_and_of_different_seeds():
    assert {folder for folder, _ in GROUPS} == set(FOLDERS)
    for results in GROUPS.values():
        assert len({r["seed"] for r in results}) == len(results)
    for folder in FOLDERS:
        same = {(r["scale"], r["recipe"], r["iters"]) for key, results in GROUPS.items()
                if key[0] == folder for r in results}
        assert len(same) == 1


def test_every_result_outside_the_synthetic_runs_is_shown():
    assert {key for key in GROUPS if key[0] != "synthetic"} == set(CELLS.values())
