"""The Gaussian clusters of docs/tutorial.ipynb in the study of docs/attractor.md.

    python -m scripts.clusters          results/clusters.jsonl; about five minutes on one core

Data, methods and training loop are the notebook's: its cells with the tag "definitions" are
executed. `python -m scripts.reproduce collect` writes the table; scripts/study.py explains it.
"""
import json
from types import SimpleNamespace

from scripts import study
from scripts.collect import RESULTS, ROOT, grid, mean_text, read_lines, write_lines

SETTINGS = {"gamma_u 100": dict(gamma_u=100), "gamma_u 1": dict(gamma_u=1),
            "gamma_u 100 reversed": dict(gamma_u=100, reverse=True)}


def definitions():
    """The names that the notebook defines."""
    names = {"__name__": "tutorial"}
    for cell in json.loads((ROOT / "docs/tutorial.ipynb").read_text(encoding="utf-8"))["cells"]:
        if "definitions" in cell["metadata"].get("tags", ()):
            exec("".join(cell["source"]), names)
    return SimpleNamespace(**names)


def run(n, setting, seed):
    """Lines of results/clusters.jsonl; shares in percent. n: the notebook's definitions"""
    data = n.make_data(seed, **SETTINGS[setting])
    methods = {study.LABELS_ONLY: n.LabelsAlone(), "FixMatch": n.FixMatch(),
               study.LABELED: n.LogitAdjustment(data, rows=n.B),
               study.ALL: n.LogitAdjustment(data),
               study.VECTOR: n.L2AC(data, seed, kind="vector", eta=1e-2),
               study.L2AC: n.L2AC(data, seed), study.PRIOR: n.L2AC(data, seed, start="prior")}
    for name, method in methods.items():
        if name == study.LABELS_ONLY and setting != "gamma_u 100":   # the unlabeled set is not used
            continue
        result = n.train(data, method, seed)
        line = {"setting": setting, "method": name, "seed": seed}
        line |= {key: result[key] for key in ("bacc", "gm", "recall")}
        if result["kept"].any():
            line |= {"kept": 100 * float(result["kept"].sum()), "right": 100 * result["right"]}
        if "bias" in result:
            fits = study.fits(result["bias"], data.n, result["kept"])
            line |= {key: fits[key] for key in ("slope_n", "r2_n", "slope_eff", "r2_eff")}
            line["varies"] = 100 * max(0.0, result["varies"])        # a vector: 0 up to rounding
        yield line


def markdown():
    rows = {}
    for line in read_lines(RESULTS / "clusters.jsonl"):
        rows.setdefault((line["setting"], line["method"]), []).append(line)
    return grid(("bACC / GM", *study.COLUMNS), [
        [setting, f"{method} ({len(runs)})",
         " / ".join(mean_text([run[key] for run in runs]) for key in ("bacc", "gm")),
         *study.measured(runs)] for (setting, method), runs in rows.items()], heads=2)


if __name__ == "__main__":
    notebook = definitions()
    write_lines(RESULTS / "clusters.jsonl", [line for setting in SETTINGS for seed in range(5)
                                             for line in run(notebook, setting, seed)])
