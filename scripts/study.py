"""The study of docs/attractor.md: what the attractor learns, from the runs of table `attractor`.

    python -m scripts.reproduce run --table attractor --seeds 0 1 2 3 4 --jobs 2
    python -m scripts.reproduce collect
    python -m scripts.study             assets/study.png, and two tables of docs/attractor.md;
                                        more of table 1 on digits in docs/results.md, after.md

The loss weighs class k by pi_k of the labels plus lambda_u times the share kept_k of the unlabeled
images that count with pseudo-label k. If the adaptive classifier fits the posterior under this
effective distribution and the linear one that under the uniform one, then by Bayes' rule the
attractor adds log pi_eff,k to logit k of every image, up to a constant. So what it adds is compared
with log N_k and with log pi_eff,k: least squares over the K classes, both sides centred.
"""
import statistics

import numpy as np
from matplotlib import pyplot as plt

import data
from scripts import collect, drawing, finished, rankings, tables
from support import checkpoint, config

METHODS = {"FixMatch": drawing.BLUE, "w/ LA, labeled rows": drawing.GREEN,
           "w/ LA, all rows": drawing.YELLOW, "w/ L2AC, vector": drawing.SKY,
           "**w/ L2AC**": drawing.ORANGE, "w/ L2AC, prior start (ours)": drawing.PURPLE}


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


def described(cell, result):
    """What the study says of one run; the attractor's numbers only where there is one."""
    course, counts = result["course"], labeled_counts(cell)
    numbers = {"seed": result["seed"], "bacc": result["bacc"], "gm": result["gm"]}
    if "kept" in course and course["kept"][-1][0] is not None:
        kept, precision = (np.array(course[key][-1], dtype=float) for key in ("kept", "precision"))
        right = np.nansum(kept * precision) / kept.sum()
        numbers |= {"kept": 100 * kept.sum(), "right": 100 * right,
                    "kept_k": 100 * kept, "precision_k": 100 * precision}
    if "bias" in course:
        added, pi_eff = np.array(course["bias"][-1]), effective_distribution(counts, kept)
        numbers["slope_n"], numbers["r2_n"] = fit(added, np.log(counts))
        numbers["slope_eff"], numbers["r2_eff"] = fit(added, np.log(pi_eff))
        numbers |= {"varies": 100 * course["bias_varies"][-1], "bias": added,
                    "log_eff": np.log(pi_eff) - np.log(pi_eff).mean(),
                    "slopes": [fit(np.array(b), np.log(counts))[0] for b in course["bias"][:-1]]}
    return numbers


def study(found):
    """{(dataset, column): {row: [numbers of each seed]}}"""
    result = {}
    for cell in tables.TABLES["attractor"]:
        seeds = collect.by_seed(cell, "mini", found)
        result.setdefault((cell.dataset, cell.column), {})[cell.row] = [
            described(cell, r) for _, r in sorted(seeds.items()) if "course" in r]
    return result


def cell_text(runs, key, form):
    """Mean and, of several seeds, standard deviation."""
    values = [run[key] for run in runs if key in run and np.isfinite(run[key])]
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{form}}{spread}"


def markdown(result):
    columns = {"kept %": ("kept", ".0f"), "right %": ("right", ".1f"),
               "slope on log N": ("slope_n", ".2f"), "R²": ("r2_n", ".2f"),
               "slope on log pi_eff": ("slope_eff", ".2f"), "R² ": ("r2_eff", ".2f"),
               "varies %": ("varies", ".0f")}
    lines = [f"| | | {' | '.join(columns)} |", "|---|---|" + "--:|" * len(columns)]
    for (dataset, column), rows in result.items():
        for row, runs in rows.items():
            if row in METHODS and runs:
                cells = [cell_text(runs, *how) for how in columns.values()]
                lines.append(f"| {dataset}, {column} | {row} ({len(runs)}) | {' | '.join(cells)} |")
    return "\n".join(lines)


PAIRS = (("FixMatch", "Labels alone"), ("**w/ L2AC**", "FixMatch"),
         ("**w/ L2AC**", "w/ LA, labeled rows"), ("**w/ L2AC**", "w/ LA, all rows"),
         ("**w/ L2AC**", "w/ L2AC, vector"), ("w/ L2AC, prior start (ours)", "**w/ L2AC**"),
         ("w/ L2AC, prior start (ours)", "w/ LA, all rows"))


def difference_table(result):
    titles = [f"{dataset}, {column}" for dataset, column in result]
    lines = [f"| | {' | '.join(titles)} |", "|---|" + "--:|" * len(titles)]
    for pair in PAIRS:
        names = (row.strip("*").removeprefix("w/ ").removesuffix(" (ours)") for row in pair)
        cells = (rankings.difference(*(rows[row] for row in pair)) for rows in result.values())
        lines.append(f"| {' − '.join(names)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(result):
    """For each setting of the digits: bACC of the methods, and what the attractor adds by class."""
    settings = [key for key in result if key[0] == "digits"]
    figure, axes = plt.subplots(2, len(settings), figsize=(drawing.WIDTH, 5.2), sharey="row")
    for (above, below), key in zip(axes.T, settings, strict=True):
        rows = result[key]
        for i, (row, colour) in enumerate(METHODS.items()):
            values = [run["bacc"] for run in rows[row]]
            above.plot([i] * len(values), values, ".", color=colour, alpha=0.5)
            if values:
                above.plot(i, np.mean(values), "_", color=colour, markersize=16, markeredgewidth=3)
        for row, style in (("Labels alone", ":"), ("All true labels", "--")):
            values = [run["bacc"] for run in rows[row]]
            if values:
                above.axhline(np.mean(values), color="grey", linestyle=style, linewidth=1,
                              label=row)
        above.set(title=key[1], xticks=[], xlim=(-0.7, len(METHODS) - 0.3))
        draw_bias(below, rows, next(c for c in tables.TABLES["attractor"]
                                    if (c.dataset, c.column) == key))
    axes[0, 0].set_ylabel("bACC: seeds, mean")
    axes[1, 0].set_ylabel("added to a logit")
    handles = [plt.Line2D([], [], color=c, marker="_", linestyle="", markersize=12,
                          markeredgewidth=3, label=row.strip("*").removeprefix("w/ "))
               for row, c in METHODS.items()]
    lines, labels = axes[0, 0].get_legend_handles_labels()
    below_lines, below_labels = axes[1, 0].get_legend_handles_labels()
    figure.legend([*handles, *lines, *below_lines],
                  [*(h.get_label() for h in handles), *labels, *below_labels],
                  loc="outside lower center", ncols=4)
    return figure


def draw_bias(ax, rows, cell):
    """What the attractors add at the end, beside the two distributions it could follow."""
    counts = labeled_counts(cell)
    ax.axhline(0, color="black", linewidth=0.6)
    ax.plot(np.log(counts) - np.log(counts).mean(), "--", color="black", linewidth=1,
            label=r"$\ln N_k$, centred")
    for row in ("**w/ L2AC**", "w/ L2AC, prior start (ours)", "w/ L2AC, vector"):
        if not rows[row]:
            continue
        ax.plot(np.mean([run["bias"] for run in rows[row]], axis=0), ".-", color=METHODS[row])
        if row == "**w/ L2AC**":
            ax.plot(np.mean([run["log_eff"] for run in rows[row]], axis=0), color="grey",
                    linewidth=3, alpha=0.5, label=r"$\ln \pi_{eff,k}$ of L2AC, centred")
    ax.set(xlabel="class", xticks=range(0, 10, 3))


def written_tables(result, found):
    """{name of its place in docs/: Markdown}"""
    return {"study": markdown(result), "differences": difference_table(result),
            **rankings.written_tables(found)}


def main(argv=None):
    p = config.Parser(description=config.title(__doc__), allow_abbrev=False)
    p.parse_args(argv)
    found = collect.read_results(collect.ROOT / "results")
    result = study(found)
    pages = {path: finished.read_text(path) for name in ("attractor", "results", "after")
             for path in [collect.ROOT / "docs" / f"{name}.md"]}
    for name, text in written_tables(result, found).items():
        collect.write_table(name, text, pages)
    for path, text in pages.items():
        checkpoint.write(path, text.encode())
    with plt.rc_context(drawing.STYLE):
        draw(result).savefig(collect.ROOT / "assets" / "study.png")
    print(f"{', '.join(map(str, pages))} and assets/study.png written")


if __name__ == "__main__":
    config.exit_cleanly(main)
