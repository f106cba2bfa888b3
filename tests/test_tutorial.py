"""docs/tutorial.ipynb runs from top to bottom, and what its text claims holds; the table of
docs/attractor.md on the Gaussian clusters shows the runs of results/clusters.json."""
import json
import re
import statistics
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from conftest import ROOT

from scripts import clusters, collect, study

slow = pytest.mark.slow
RUNS = json.loads((ROOT / clusters.RESULTS).read_text())["runs"]
BY_RUN = {(r["setting"], r["method"], r["seed"]): r for r in RUNS}
SAME, UNIFORM, REVERSED = clusters.SETTINGS
SETTING_OF = {"same": SAME, "uniform": UNIFORM, "reversed": REVERSED}    # the notebook's names
METHOD_OF = {"labels alone": "Labels alone", "FixMatch": "FixMatch",
             "LA, labeled rows": "w/ LA, labeled rows", "LA, all rows": "w/ LA, all rows",
             "L2AC": "**w/ L2AC**", "L2AC, prior start": "w/ L2AC, prior start (ours)"}


def executed(*tags):
    """What the notebook's code cells define; their figures are closed instead of shown."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plt, "show", lambda: plt.close("all"))
        patch.setattr(plt, "rcParams", plt.rcParams.copy())
        patch.syspath_prepend(ROOT)                        # restores sys.path at the end
        return clusters.execute(clusters.sources(ROOT, *tags))


@pytest.fixture(scope="module")
def quick():
    """All but the training."""
    return executed("definitions", "quick")


@pytest.fixture(scope="module")
def notebook():
    return executed()


# ---------------------------------------------------------------------------------------------
# the claims, as functions of get(setting, method) -> {"bacc", "head", ..., "slope_n", ...}


def above(key, better, worse, *settings):
    return lambda get: all(get(s, better)[key] > get(s, worse)[key] for s in settings)


def r2_of_eff_above(setting):
    return lambda get: get(setting, "L2AC")["r2_eff"] > get(setting, "L2AC")["r2_n"]


ALL = ("same", "uniform", "reversed")
CLAIMS = {  # the table of section 11
    "same: FixMatch is above labels alone on the head":
        above("head", "FixMatch", "labels alone", "same"),
    "same: FixMatch is below labels alone on the tail":
        above("tail", "labels alone", "FixMatch", "same"),
    "same: L2AC is above FixMatch on the tail": above("tail", "L2AC", "FixMatch", "same"),
    "same: L2AC is above labels alone on the tail": above("tail", "L2AC", "labels alone", "same"),
    "same: LA on all rows is above L2AC in bACC": above("bacc", "LA, all rows", "L2AC", "same"),
    "same: LA on all rows is above LA on labeled rows in bACC":
        above("bacc", "LA, all rows", "LA, labeled rows", "same"),
    "reversed: LA on all rows is below labels alone in bACC":
        lambda get: get("same", "labels alone")["bacc"] > get("reversed", "LA, all rows")["bacc"],
    "all three settings: L2AC is above FixMatch in bACC": above("bacc", "L2AC", "FixMatch", *ALL),
    "all three settings: L2AC is above LA on labeled rows in bACC":
        above("bacc", "L2AC", "LA, labeled rows", *ALL),
    "L2AC's slope on log N_k is lower for uniform than for same":
        lambda get: get("uniform", "L2AC")["slope_n"] < get("same", "L2AC")["slope_n"],
    "uniform: what L2AC adds fits log pi_eff better than log N_k": r2_of_eff_above("uniform"),
    "reversed: what L2AC adds fits log pi_eff better than log N_k": r2_of_eff_above("reversed"),
    "same: the prior start is above L2AC in bACC":
        above("bacc", "L2AC, prior start", "L2AC", "same"),
    "uniform: the prior start is above L2AC in bACC":
        above("bacc", "L2AC, prior start", "L2AC", "uniform"),
    "reversed: the prior start is above L2AC in bACC":
        above("bacc", "L2AC, prior start", "L2AC", "reversed"),
}


def stored(seed, setting, method):
    """A run of results/clusters.json; head and tail are three classes each."""
    r = BY_RUN[SETTING_OF[setting], METHOD_OF[method], seed]
    return r | {"head": statistics.mean(r["recall"][:3]), "tail": statistics.mean(r["recall"][-3:])}


def claimed():
    """{claim: seeds on which the notebook says that it holds}"""
    cells = json.loads((ROOT / clusters.NOTEBOOK).read_text())["cells"]
    text = "".join(next(c["source"] for c in cells if "## 11" in "".join(c["source"])))
    return {re.sub(r"[*`$]", "", row): int(n)
            for row, n in re.findall(r"^\| (.+) \| (\d) of 5 \|$", text, re.M)}


def test_the_notebook_says_on_how_many_seeds_a_claim_holds():
    assert claimed().keys() == CLAIMS.keys()
    for claim, holds in CLAIMS.items():
        seeds = [holds(lambda setting, method, s=s: stored(s, setting, method)) for s in range(5)]
        assert sum(seeds) == claimed()[claim], claim


@slow
def test_what_the_text_claims_holds_in_the_notebook(notebook):
    """On seed 0, which the plots show: every claim of five seeds that the file says holds on it."""
    def get(setting, method):
        data, found = notebook["settings"][setting]
        r = dict(found[method])
        if "bias" in r:
            pi_eff = study.effective_distribution(data.n, r["kept"])
            r["slope_n"], r["r2_n"] = study.fit(r["bias"], np.log(data.n))
            r["slope_eff"], r["r2_eff"] = study.fit(r["bias"], np.log(pi_eff))
            log_eff = notebook["log_effective"](data, r["kept"])
            assert notebook["slope"](r["bias"], log_eff) == pytest.approx(r["slope_eff"])
        return r
    for claim, holds in CLAIMS.items():
        if claimed()[claim] == 5:
            assert holds(get), claim
    for (setting, (_, found)) in notebook["settings"].items():
        for method in ("FixMatch", "L2AC"):               # the same runs, up to the platform
            assert abs(found[method]["bacc"] - stored(0, setting, method)["bacc"]) < 5


@slow
def test_what_the_text_says_of_seed_0(notebook):
    results = notebook["results"]
    kept, right = results["FixMatch"]["kept"], results["FixMatch"]["right"]
    assert right > 0.95 and kept[-3:].sum() < 0.02 < 0.5 < kept[:3].sum()
    assert results["FixMatch"]["middle"] > results["labels alone"]["middle"]
    assert results["labels alone"]["head"] > 95 and 10 < results["labels alone"]["tail"] < 30
    l2ac, n = results["L2AC"], notebook["data"].n
    assert l2ac["kept"][-3:].sum() > kept[-3:].sum() and l2ac["recall"][-1] < 10
    assert l2ac["varies"] < 0.1 and 0 < study.fit(l2ac["bias"], np.log(n))[0] < 1
    assert study.fit(l2ac["bias"], np.log(n))[1] > 0.8


# ---------------------------------------------------------------------------------------------
# cells without training


def test_omega_gradient_agrees_with_finite_differences(quick):
    assert quick["gradient"].dtype == quick["differences"].dtype == torch.float64
    assert len(quick["gradient"]) == 178 and quick["differences"].norm() > 1e-6
    assert torch.allclose(quick["gradient"], quick["differences"], rtol=1e-3, atol=1e-9)
    assert quick["error"] < 1e-4


def test_exercises_accept_the_solutions_and_nothing_else(quick):
    assert quick["solutions"] == [True] * 3
    for number, name in enumerate(("post_hoc", "vector_gradient", "predicted_slope"), 1):
        check, solution = quick[f"check_{number}"], quick[f"{name}_solution"]
        assert check(solution) and not check(quick[name])              # not answered yet
        assert not check(lambda *args, solve=solution: 1.1 * solve(*args))
    assert not quick["check_1"](lambda logits, counts: logits + counts.log())
    assert not quick["check_2"](lambda p, w, u: (w[:, None] * p * u).sum(0))
    assert quick["check_1"](lambda logits, counts: logits - (counts / counts.sum()).log())


def test_the_data_of_the_clusters(quick):
    assert quick["data"].n.tolist() == [200, 119, 71, 43, 25, 15, 9, 5, 3, 2]
    reverse, uniform = quick["make_data"](reverse=True), quick["make_data"](gamma_u=1)
    assert reverse.m.tolist() == quick["data"].m.tolist()[::-1] and set(uniform.m) == {1000}
    for other in (reverse, uniform):                      # the labels and the test set are the same
        assert torch.equal(other.x_l, quick["data"].x_l)
        assert torch.equal(other.x_t, quick["data"].x_t)
    assert torch.bincount(quick["data"].y_u).tolist() == quick["data"].m.tolist()
    assert torch.bincount(quick["data"].y_t).tolist() == [200] * 10


def test_logit_adjustment_and_the_prior_start(quick):
    data, logits = quick["data"], torch.zeros(quick["B"] + 5, 10)
    log_pi = torch.tensor(data.n / data.n.sum(), dtype=torch.float32).log()
    rows = quick["LogitAdjustment"](data, rows=quick["B"]).adapt(logits)
    assert torch.equal(rows[:quick["B"]], log_pi.expand(quick["B"], 10)) and not rows[-5:].any()
    assert torch.equal(quick["LogitAdjustment"](data).adapt(logits), log_pi.expand_as(logits))
    bias = quick["L2AC"](data, start="prior").attractor.out.bias.detach()
    assert torch.allclose(bias, log_pi - log_pi.mean(), atol=1e-5)
    x_b, y_b = quick["L2AC"](data).balanced_batch()
    assert torch.bincount(y_b).tolist() == [6] * 10 and len(x_b) == 60


def test_every_method_trains(quick, capsys):
    """A record of each method after a few steps."""
    few = clusters.execute(clusters.sources(ROOT, "definitions"))
    few["ITERS"] = 10
    records = list(clusters.run(SimpleNamespace(**few), {SAME: clusters.SETTINGS[SAME]}, [0]))
    assert [r["method"] for r in records] == list(clusters.METHODS)
    for r in records:
        assert 0 <= r["bacc"] <= 100 and ("slope_eff" in r) == ("L2AC" in r["method"])


# ---------------------------------------------------------------------------------------------
# results/clusters.json and its table


def test_results_hold_every_run_once():
    expected = {(s, m, seed) for s in clusters.SETTINGS for m in clusters.METHODS
                for seed in range(5) if s == SAME or m != "Labels alone"}
    assert BY_RUN.keys() == expected and len(RUNS) == len(expected)
    for r in RUNS:
        assert r["bacc"] == pytest.approx(statistics.mean(r["recall"]))


def test_the_page_shows_the_table_of_the_results():
    page = (ROOT / "docs/attractor.md").read_text()
    (_, table), = collect.block("clusters").findall(page)
    assert table == clusters.markdown(RUNS) + "\n"


@pytest.mark.parametrize("setting", clusters.SETTINGS)
@pytest.mark.parametrize("method", ["FixMatch", "w/ LA, all rows", "**w/ L2AC**"])
def test_cells_are_means_and_deviations_over_the_seeds(setting, method):
    """By numpy, from the page as it stands."""
    page = (ROOT / "docs/attractor.md").read_text()
    lines = collect.block("clusters").findall(page)[0][1].splitlines()
    heading = [cell.strip() for cell in lines[0].split("|")]
    row, = (line for line in lines if line.startswith(f"| {setting} | {method} (5) |"))
    cells = dict(zip(heading[3:], (cell.strip() for cell in row.split("|")[3:]), strict=True))
    runs = [r for r in RUNS if r["setting"] == setting and r["method"] == method]

    def text(key, digits):
        values = [r[key] for r in runs]
        return f"{np.mean(values):.{digits}f} ± {np.std(values, ddof=1):.{digits}f}"
    assert cells["bACC / GM"] == f"{text('bacc', 1)} / {text('gm', 1)}"
    assert cells["right %"] == text("right", 1)
    if "L2AC" in method:
        assert cells["slope on log N"] == text("slope_n", 2)
        assert cells["slope on log pi_eff"] == text("slope_eff", 2)


# ---------------------------------------------------------------------------------------------
# the file itself


def test_the_notebook_is_committed_with_its_outputs():
    path = ROOT / clusters.NOTEBOOK
    cells = json.loads(path.read_text())["cells"]
    outputs = [out for c in cells if c["cell_type"] == "code" for out in c["outputs"]]
    assert sum("image/png" in out.get("data", {}) for out in outputs) == 5
    assert not any(out["output_type"] == "error" for out in outputs)
    assert path.stat().st_size < 500_000 and not any("execution" in c["metadata"] for c in cells)
    counts = [c["execution_count"] for c in cells if c["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert all(len(line.rstrip("\n")) <= 100 for c in cells if c["cell_type"] == "code"
               for line in c["source"])


def test_links_of_the_notebook_lead_somewhere():
    cells = json.loads((ROOT / clusters.NOTEBOOK).read_text())["cells"]
    text = "".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert targets and all((ROOT / "docs" / target).exists() for target in targets)
