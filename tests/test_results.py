"""Tables in docs/ that scripts/collect.py does not write show the numbers of results/.

Of those that it writes: test_reproduce.py.
"""
import json
import re
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


# ---------------------------------------------------------------------------------------------
# what the front page says


SETTINGS = ("gamma_l5_gamma_u5", "gamma_l10_gamma_u10", "gamma_l5_gamma_u1",
            "gamma_l5_gamma_u5_reverse_u")
ON_CIFAR10 = ("gamma_l100_gamma_u100", "gamma_l150_gamma_u150", "gamma_l100_gamma_u1",
              "gamma_l100_gamma_u100_reverse_u")
FRONT = " ".join((ROOT / "README.md").read_text().split())


def by_seed(name):
    runs = (json.loads(path.read_text()) for path in ROOT.glob(f"results/mini/{name}_s[0-9].json"))
    return {run["seed"]: run for run in runs}


def gains(better, worse, settings=SETTINGS):
    """[(mean difference in bACC, beyond two standard errors)], one for each setting."""
    found = []
    for setting in settings:
        a, b = (by_seed(name.replace("*", setting)) for name in (better, worse))
        values = [a[s]["bacc"] - b[s]["bacc"] for s in a.keys() & b.keys()]
        mean = statistics.mean(values)
        found.append((mean, abs(mean) > 2 * statistics.stdev(values) / len(values) ** 0.5))
    return found


def said(sentence):
    """The numbers that stand at # in a sentence of README.md."""
    pattern = re.escape(sentence).replace(r"\#", r"(\d+(?:\.\d+)?)")
    return [float(number) for number in re.search(pattern, FRONT).groups()]


def rounded(values):
    return [round(value, 1) for value in values]


@pytest.mark.parametrize("sentence,better,worse,settings", [
    ("L2AC above FixMatch by # to #, in every", "digits_fixmatch_l2ac_*", "digits_fixmatch_none_*",
     SETTINGS),
    ("of the labeled rows of a batch by # to #", "digits_fixmatch_l2ac_*", "digits_fixmatch_la_*",
     SETTINGS),
    ("(three seeds) L2AC is # to # above FixMatch", "cifar10_fixmatch_l2ac_*",
     "cifar10_fixmatch_none_*", ON_CIFAR10)])
def test_a_gain_of_the_front_page_is_measured_in_every_setting(sentence, better, worse, settings):
    found = gains(better, worse, settings)
    means = [mean for mean, _ in found]
    assert all(sure and mean > 0 for mean, sure in found)
    assert said(sentence) == rounded([min(means), max(means)])


def test_other_differences_of_the_front_page():
    l2ac, prior = "digits_fixmatch_l2ac_*", "digits_fixmatch_l2ac_*_attractor_startprior"
    alone = [gains("digits_fixmatch_none_*", f"digits_supervised_vanilla_{s.split('_gamma_u')[0]}",
                   [s])[0] for s in SETTINGS]
    assert all(sure for _, sure in alone)
    assert said("labels alone by # to # bACC") == rounded([min(alone)[0], max(alone)[0]])
    assert not any(sure for _, sure in gains(l2ac, "digits_fixmatch_la_all_*"))
    start = [mean for mean, sure in gains(prior, l2ac) if sure]
    assert said("gains # to # more in two settings and loses in none") == rounded(sorted(start))
    on_mixmatch = [mean for mean, sure in gains(*(n.replace("fixmatch", "mixmatch")
                                                  for n in (l2ac, prior))) if sure]
    assert said("(on MixMatch it loses # in one)") == rounded(on_mixmatch)
    two = gains("digits_fixmatch_single_level_*", l2ac, [SETTINGS[0], SETTINGS[3]])
    assert all(sure for _, sure in two)
    assert said("is better than L2AC, by # and #") == rounded(sorted(mean for mean, _ in two))
    later = [g for name in ("cdmad", "adello") for g in gains(f"digits_fixmatch_{name}_*", l2ac)]
    assert all(sure for _, sure in later)
    assert said("better by # to # in all four") == rounded([min(later)[0], max(later)[0]])
    l2ac = "cifar10_fixmatch_l2ac_*"
    la = [g for m in ("la", "la_all") for g in gains(f"cifar10_fixmatch_{m}_*", l2ac, ON_CIFAR10)]
    assert min(mean for mean, sure in la if sure) > 0                # level or above, never below
    assert said("is level with L2AC or up to # above it") == rounded([max(la)[0]])


def test_recalls_of_the_front_page():
    """gamma_u 1, means over the seeds; the labels get rarer from 0 to 9."""
    l2ac, fixmatch, labels = ([statistics.mean(r["recall"][k] for r in by_seed(name).values())
                               for k in range(10)] for name in (
        "digits_fixmatch_l2ac_gamma_l5_gamma_u1", "digits_fixmatch_none_gamma_l5_gamma_u1",
        "digits_supervised_vanilla_gamma_l5"))
    assert said("but # points below them on the digit 8") == [round(labels[8] - fixmatch[8])]
    tail = [l2ac[k] - fixmatch[k] for k in (7, 8, 9)]
    assert said("L2AC is # to # points above FixMatch") == [round(min(tail)), round(max(tail))]
