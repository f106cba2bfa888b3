"""The Gaussian clusters of docs/tutorial.ipynb in the study of docs/attractor.md.

    python -m scripts.clusters          train: results/clusters.json, and the table
    python -m scripts.clusters --table  only the table of docs/attractor.md, from the file

Data, methods and training loop are the notebook's: its cells with the tag "definitions" are
executed. Six methods and the labels alone, three unlabeled sets, five seeds; about five minutes
on one core. What is measured is explained in scripts/study.py.
"""
import json
from types import SimpleNamespace

import numpy as np

from scripts import collect, finished, study
from support import checkpoint, cli, config

NOTEBOOK, RESULTS = "docs/tutorial.ipynb", "results/clusters.json"
SEEDS = range(5)
SETTINGS = {"gamma_u 100": dict(gamma_u=100), "gamma_u 1": dict(gamma_u=1),
            "gamma_u 100 reversed": dict(gamma_u=100, reverse=True)}
METHODS = {  # by the name of the table's row; n: the notebook's definitions
    "Labels alone": lambda n, data, seed: n.LabelsAlone(),
    "FixMatch": lambda n, data, seed: n.FixMatch(),
    "w/ LA, labeled rows": lambda n, data, seed: n.LogitAdjustment(data, rows=n.B),
    "w/ LA, all rows": lambda n, data, seed: n.LogitAdjustment(data),
    "w/ L2AC, vector": lambda n, data, seed: n.L2AC(data, seed, kind="vector",
                                                    eta=config.MINI_VECTOR["eta"]),
    "**w/ L2AC**": lambda n, data, seed: n.L2AC(data, seed),
    "w/ L2AC, prior start (ours)": lambda n, data, seed: n.L2AC(data, seed, start="prior")}


def sources(root, *tags):
    """The code cells of the notebook, in order; those with one of the tags, if any are given."""
    cells = json.loads((root / NOTEBOOK).read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"
            and (not tags or set(tags) & set(cell["metadata"].get("tags", ())))]


def execute(cells):
    """What the cells define, {name: value}."""
    names = {"__name__": "tutorial"}
    for cell in cells:
        exec(cell, names)
    return names


def record(setting, method, seed, data, result):
    """One run as a row of results/clusters.json; shares in percent."""
    numbers = {"setting": setting, "method": method, "seed": seed, "bacc": result["bacc"],
               "gm": result["gm"], "recall": result["recall"]}
    if result["kept"].any():
        numbers |= {"kept": 100 * float(result["kept"].sum()), "right": 100 * result["right"]}
    if "bias" in result:
        pi_eff = study.effective_distribution(data.n, result["kept"])
        for name, x in (("n", np.log(data.n)), ("eff", np.log(pi_eff))):
            numbers[f"slope_{name}"], numbers[f"r2_{name}"] = study.fit(result["bias"], x)
        numbers["varies"] = 100 * max(0.0, result["varies"])      # a vector: 0 up to rounding
    return numbers


def run(notebook, settings=SETTINGS, seeds=SEEDS):
    """A record of every run. The labels alone do not depend on the unlabeled set: once a seed."""
    for i, (setting, flags) in enumerate(settings.items()):
        for method, make in METHODS.items():
            for seed in seeds if i == 0 or method != "Labels alone" else ():
                data = notebook.make_data(seed, **flags)
                result = notebook.train(data, make(notebook, data, seed), seed)
                yield record(setting, method, seed, data, result)
                print(f"{setting}, {method}, seed {seed}: bACC {result['bacc']:.1f}", flush=True)


def markdown(records):
    columns = ("bACC / GM", *study.COLUMNS)
    lines = [f"| | | {' | '.join(columns)} |", "|---|---|" + "--:|" * len(columns)]
    for setting in SETTINGS:
        for method in METHODS:
            runs = [r for r in records if (r["setting"], r["method"]) == (setting, method)]
            if runs:
                both = " / ".join(study.cell_text(runs, key, ".1f") for key in ("bacc", "gm"))
                cells = [both, *(study.cell_text(runs, *how) for how in study.COLUMNS.values())]
                lines.append(f"| {setting} | {method} ({len(runs)}) | {' | '.join(cells)} |")
    return "\n".join(lines)


def write_page(root):
    """The table of docs/attractor.md, from results/clusters.json."""
    page = root / "docs" / "attractor.md"
    pages = {page: finished.read_text(page)}
    records = finished.read_json(root / RESULTS)["runs"]
    collect.write_table("clusters", markdown(records), pages)
    checkpoint.write(page, pages[page].encode())
    print(f"the table of {page} was written from {root / RESULTS}")


def main(argv=None):
    p = cli.Parser(description=cli.title(__doc__), allow_abbrev=False)
    p.add_argument("--table", action="store_true", help="train nothing, write the table only")
    if not p.parse_args(argv).table:
        notebook = SimpleNamespace(**execute(sources(collect.ROOT, "definitions")))
        checkpoint.write_json(collect.ROOT / RESULTS, {"runs": list(run(notebook))})
    write_page(collect.ROOT)


if __name__ == "__main__":
    cli.exit_cleanly(main)
