"""Tables in docs/ that scripts/collect.py does not write show the numbers of results/.

Of those that it writes: test_reproduce.py.
"""
import json
import statistics
from collections import defaultdict

import pytest
from conftest import ROOT

import data

FOLDERS = ("extra", "long", "lambda_u", "second_half")
GROUPS = defaultdict(list)                               # (folder, name without seed): results
for path in sorted(p for f in FOLDERS for p in ROOT.glob(f"results/{f}/*.json")):
    GROUPS[path.parent.name, path.stem.rsplit("_s", 1)[0]].append(json.loads(path.read_text()))

RESULTS, LOG = "docs/results.md", "docs/log.md"
SHORT, LONG = "2,000 iterations", "10,000 iterations"
CELLS = {  # (page, column, row) of a table: the result that it shows, with one seed
    (LOG, LONG, "Vanilla"): "long/supervised_vanilla",
    (LOG, LONG, "FixMatch"): "long/fixmatch_none",
    (LOG, LONG, "w/ DARP"): "long/fixmatch_darp",
    (LOG, LONG, "w/ DASO"): "long/fixmatch_daso",
    (LOG, LONG, "w/ L2AC"): "long/fixmatch_l2ac",
    (LOG, SHORT, "Vanilla"): "second_half/cifar10_supervised_vanilla_gamma_l100",
    (LOG, SHORT, "FixMatch"): "second_half/cifar10_fixmatch_none_gamma_l100_gamma_u1",
    (LOG, SHORT, "w/ DARP"): "second_half/cifar10_fixmatch_darp_gamma_l100_gamma_u1_darp_estimate",
    (LOG, SHORT, "w/ DASO"): "second_half/cifar10_fixmatch_daso_gamma_l100_gamma_u1",
    (LOG, SHORT, "w/ L2AC"): "second_half/cifar10_fixmatch_l2ac_gamma_l100_gamma_u1",
    (LOG, "lambda_u 75", "MixMatch"): "second_half/cifar10_mixmatch_none_gamma_l100_gamma_u100",
    (LOG, "lambda_u 75", "w/ L2AC"): "second_half/cifar10_mixmatch_l2ac_gamma_l100_gamma_u100",
    (LOG, "lambda_u 7.5", "MixMatch"): "lambda_u/mixmatch_none_7.5",
    (LOG, "lambda_u 7.5", "w/ L2AC"): "lambda_u/mixmatch_l2ac_7.5",
    (LOG, "lambda_u 0", "MixMatch"): "lambda_u/mixmatch_none_0",
    (LOG, "lambda_u 0", "w/ L2AC"): "lambda_u/mixmatch_l2ac_0",
    (RESULTS, "bACC / GM", "all images with true labels, gamma_u 1"):
        "extra/supervised_upper_bound_gu1",
    (RESULTS, "bACC / GM", "all images with true labels, gamma_u 100"):
        "extra/supervised_upper_bound_gu100",
    (RESULTS, "bACC / GM", "Lee's pseudo-labels, gamma_u 1"): "extra/pseudolabel_gu1_none",
    (RESULTS, "bACC / GM", "FixMatch w/ CReST, gamma 100"): "extra/gu100_crest",
}


def markdown_cells(page):
    """{(column, row): cell} of all tables; a pair of names that occurs twice has the last one."""
    cells, heading = {}, None
    for line in (ROOT / page).read_text().splitlines():
        if not line.startswith("|"):
            heading = None
            continue
        row = [cell.strip().strip("*") for cell in line.strip("|").split("|")]
        heading = heading or row
        cells |= {(column, row[0]): cell for column, cell in zip(heading, row, strict=False)}
    return cells


@pytest.mark.parametrize("place", CELLS, ids=str)
def test_a_cell_shows_what_was_measured(place):
    """bACC / GM of seed 0, rounded to a decimal."""
    page, *names = place
    result = json.loads((ROOT / f"results/{CELLS[place]}_s0.json").read_text())
    assert markdown_cells(page)[tuple(names)] == f"{result['bacc']:.1f} / {result['gm']:.1f}"


@pytest.mark.parametrize("row,method", [("FixMatch", "none"), ("L2AC", "l2ac")])
def test_recalls_are_those_that_were_measured(row, method):
    """Means over the seeds, in whole percent."""
    paths = ROOT.glob(f"results/mini/cifar10_fixmatch_{method}_gamma_l100_gamma_u1_s*.json")
    recalls = zip(*(json.loads(path.read_text())["recall"] for path in paths), strict=True)
    cells = markdown_cells(RESULTS)
    for name, values, count in zip(data.CIFAR10, recalls, data.class_counts(1500, 10, 100),
                                   strict=True):
        assert cells[name, row] == f"{statistics.mean(values):.0f}"
        assert cells[name, "labeled images"] == str(count)


def test_results_are_of_one_setting_and_of_different_seeds():
    assert {folder for folder, _ in GROUPS} == set(FOLDERS)
    for results in GROUPS.values():
        assert len({r["seed"] for r in results}) == len(results)
    for folder in FOLDERS:
        same = {(r["scale"], r["recipe"], r["iters"]) for key, results in GROUPS.items()
                if key[0] == folder for r in results}
        assert len(same) == 1


def test_every_result_is_shown():
    assert {"/".join(key) for key in GROUPS} <= set(CELLS.values())
