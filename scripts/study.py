"""The study of docs/attractor.md: what the attractor learns, from the runs of table `attractor`.

    python -m scripts.reproduce run --table attractor --seeds 0 1 2 3 4 --jobs 2
    python -m scripts.reproduce collect
    python -m scripts.study             assets/study*.png, and two tables of docs/attractor.md; in
                                        docs/results.md and after.md the tables of rankings.py

The loss weighs class k by pi_k of the labels plus lambda_u times the share kept_k of the unlabeled
images that count with pseudo-label k. If the adaptive classifier fits the posterior under this
effective distribution and the linear one that under the uniform one, then by Bayes' rule the
attractor adds log pi_eff,k to logit k of every image, up to a constant. So what it adds is compared
with log N_k and with log pi_eff,k: least squares over the K classes, both sides centred. The
figures are in study_figures.py.
"""
import statistics

import numpy as np
from matplotlib import pyplot as plt

import data
from scripts import collect, drawing, finished, rankings, study_figures, tables
from scripts.study_figures import METHODS
from support import checkpoint, cli

COLUMNS = {  # of the table: the number, and how it is printed
    "kept %": ("kept", ".0f"), "right %": ("right", ".1f"),
    "slope on log N": ("slope_n", ".2f"), "R²": ("r2_n", ".2f"),
    "slope on log pi_eff": ("slope_eff", ".2f"), "R² ": ("r2_eff", ".2f"),
    "varies %": ("varies", ".0f")}


def fit(added, x):
    """Slope and R^2 of `added` (K,) on x (K,), both less their mean."""
    added, x = added - added.mean(), x - x.mean()
    product, square = added @ x, added @ added
    return product / (x @ x), product ** 2 / (x @ x) / square if square else np.nan


def effective_distribution(counts, kept, lambda_u=1.0):
    """pi_eff (K,) of labeled images N_k (K,) and kept shares (K,)."""
    weight = counts / counts.sum() + lambda_u * kept
    return weight / weight.sum()


def labeled_counts(cell):
    flags = finished.configuration(cell.command("mini", 0))
    return np.array(data.class_counts(flags["n1"], 10, flags["gamma_l"]))


def fits(added, counts, kept):
    """Slope and R^2 of what the attractor adds (K,) on log N_k and on log pi_eff,k; `predicted` is
    the slope on log N_k that it has if it adds log pi_eff."""
    log_n, log_eff = np.log(counts), np.log(effective_distribution(counts, kept))
    (slope_n, r2_n), (slope_eff, r2_eff) = fit(added, log_n), fit(added, log_eff)
    return {"slope_n": slope_n, "r2_n": r2_n, "slope_eff": slope_eff, "r2_eff": r2_eff,
            "predicted": fit(log_eff, log_n)[0], "log_eff": log_eff - log_eff.mean()}


def described(cell, result):
    """What the study says of one run; the attractor's numbers only where there is one."""
    course, counts = result["course"], labeled_counts(cell)
    numbers = {"seed": result["seed"], "bacc": result["bacc"], "gm": result["gm"]}
    if "kept" not in course or course["kept"][-1][0] is None:            # no unlabeled images
        return numbers
    kept = np.array(course["kept"], dtype=float)                         # (11, K)
    _, known, right = rankings.end_of(course)                            # (K,) each
    numbers |= {"kept": 100 * kept[-1].sum(),
                "right": 100 * right.sum() / known.sum() if known.any() else np.nan,
                "known_k": known, "right_k": right,
                "found_k": 100 * right / rankings.unlabeled_shares(cell)}
    if "bias" in course:
        moments = [fits(np.array(b), counts, k) for b, k in zip(course["bias"], kept, strict=True)]
        varies = 100 * np.array(course["bias_varies"])
        numbers |= moments[-1] | {"bias": np.array(course["bias"][-1]), "varies": varies[-1],
                                  "tenths": moments[:-1], "varies_tenths": varies[:-1]}
    return numbers


def study(found):
    """{(dataset, column): {row: [numbers of each seed]}}"""
    result = {}
    for cell in tables.TABLES["attractor"]:
        seeds = collect.by_seed(cell, "mini", found)
        result.setdefault((cell.dataset, cell.column), {})[cell.row] = [
            described(cell, r) for _, r in sorted(seeds.items())]
    return result


def cell_text(runs, key, form):
    """Mean and, of several seeds, standard deviation."""
    values = [run[key] for run in runs if key in run and np.isfinite(run[key])]
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{form}}{spread}"


def markdown(result):
    lines = [f"| | | {' | '.join(COLUMNS)} |", "|---|---|" + "--:|" * len(COLUMNS)]
    for (dataset, column), rows in result.items():
        for row, runs in rows.items():
            if row in METHODS and runs:
                cells = [cell_text(runs, *how) for how in COLUMNS.values()]
                lines.append(f"| {dataset}, {column} | {row} ({len(runs)}) | {' | '.join(cells)} |")
    return "\n".join(lines)


PAIRS = (("FixMatch", "Labels alone"), ("**w/ L2AC**", "FixMatch"),
         ("**w/ L2AC**", "w/ LA, labeled rows"), ("**w/ L2AC**", "w/ LA, all rows"),
         ("**w/ L2AC**", "w/ L2AC, vector"), ("w/ L2AC, vector", "w/ LA, all rows"),
         ("w/ L2AC, prior start (ours)", "**w/ L2AC**"),
         ("w/ L2AC, prior start (ours)", "w/ LA, all rows"))


def difference_table(result):
    titles = [f"{dataset}, {column}" for dataset, column in result]
    lines = [f"| | {' | '.join(titles)} |", "|---|" + "--:|" * len(titles)]
    for pair in PAIRS:
        names = (row.strip("*").removeprefix("w/ ").removesuffix(" (ours)") for row in pair)
        cells = (rankings.difference(*(rows[row] for row in pair)) for rows in result.values())
        lines.append(f"| {' − '.join(names)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def written_tables(result, found):
    """{name of its place in docs/: Markdown}"""
    return {"study": markdown(result), "differences": difference_table(result),
            **rankings.written_tables(found)}


def main(argv=None):
    p = cli.Parser(description=cli.title(__doc__), allow_abbrev=False)
    p.parse_args(argv)
    found = collect.read_results(collect.ROOT / "results")
    result = study(found)
    pages = {path: finished.read_text(path) for name in ("attractor", "results", "after")
             for path in [collect.ROOT / "docs" / f"{name}.md"]}
    for name, text in written_tables(result, found).items():
        collect.write_table(name, text, pages)
    for path, text in pages.items():
        checkpoint.write(path, text.encode())
    counts = {(cell.dataset, cell.column): labeled_counts(cell)
              for cell in tables.TABLES["attractor"]}
    with plt.rc_context(drawing.STYLE):
        for name, figure in study_figures.draw(result, counts).items():
            drawing.save_figure(figure, collect.ROOT / "assets" / f"{name}.png")
            plt.close(figure)
    print(f"{', '.join(map(str, pages))} and assets/study*.png written")


if __name__ == "__main__":
    cli.exit_cleanly(main)
