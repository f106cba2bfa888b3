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
from scripts import collect, drawing, finished, tables
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


def difference(ours, theirs):
    """Mean difference in bACC at equal seeds, ± standard error; bold beyond two of them."""
    ours, theirs = ({run["seed"]: run["bacc"] for run in runs} for runs in (ours, theirs))
    values = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    if len(values) < 2:
        return ""
    mean, error = statistics.mean(values), statistics.stdev(values) / len(values) ** 0.5
    mark = "**" if abs(mean) > 2 * error else ""
    return f"{mark}{mean:+.1f} ± {error:.1f}{mark} ({len(values)})"


def difference_table(result):
    titles = [f"{dataset}, {column}" for dataset, column in result]
    lines = [f"| | {' | '.join(titles)} |", "|---|" + "--:|" * len(titles)]
    for pair in PAIRS:
        names = (row.strip("*").removeprefix("w/ ").removesuffix(" (ours)") for row in pair)
        cells = (difference(*(rows[row] for row in pair)) for rows in result.values())
        lines.append(f"| {' − '.join(names)} | {' | '.join(cells)} |")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------
# Table 1: differences between methods, and their pseudo-labels

TAIL = slice(-3, None)                                   # the three classes with the fewest labels
AFTER = ("none", "la", "la_all", "la_post_hoc", "l2ac", "darp_crt", "cdmad", "adello", "acr")
BASES = {"supervised": "Vanilla", "mixmatch": "MixMatch", "fixmatch": "FixMatch"}


def table_of(number, cell_of):
    """A Markdown table with the rows and columns of a table. cell_of: Cell -> text"""
    cells = tables.TABLES[number]
    columns = list(dict.fromkeys(cell.column for cell in cells))
    lines = [f"| | {' | '.join(columns)} |", "|---|" + "--:|" * len(columns)]
    for i in range(0, len(cells), len(columns)):
        texts, row = [cell_of(cell) for cell in cells[i:i + len(columns)]], cells[i].row.strip("*")
        if any(texts):
            name = f"{BASES[cells[i].base]} {row}" if row.startswith("w/") else row
            lines.append(f"| {name} | {' | '.join(texts)} |")
    return "\n".join(lines)


def compared(number, found, pair):
    """Differences in bACC between rows of a table.

    pair: Cell -> (row, row to be subtracted), of the cell's base and column, or None
    """
    def runs(cell, row):
        base = "supervised" if row == "Vanilla" else cell.base
        other = next(c for c in tables.TABLES[number]
                     if (c.base, c.row, c.column) == (base, row, cell.column))
        return collect.by_seed(other, "mini", found).values()

    def text(cell):
        rows = pair(cell)
        return difference(*(runs(cell, row) for row in rows)) if rows else ""
    return table_of(number, text)


def over_its_base(cell):
    """A method over its base, a base over the labels alone."""
    reference = "Vanilla" if cell.row in BASES.values() else BASES[cell.base]
    return (cell.row, reference) if cell.row != reference else None


def l2ac_over(cell):
    alone = cell.base == "supervised" or cell.row in ("**w/ L2AC**", *BASES.values())
    return None if alone else ("**w/ L2AC**", cell.row)


def l2ac_over_its_parts(cell):
    return None if cell.row == "**L2AC**" else ("**L2AC**", cell.row)


def label_table(number, found):
    """The pseudo-labels of the reported evaluations, in percent: how many unlabeled images count,
    how many of these have the right label, and how many images of the tail do both."""
    def text(cell):
        runs = [r["course"] for r in collect.by_seed(cell, "mini", found).values()]
        kept, precision = (np.array([run[key][-1] for run in runs], dtype=float)
                           for key in ("kept", "precision"))         # (seeds, K)
        if not np.isfinite(kept).all() or not kept.size:             # labels alone; cRT's stage
            return ""
        right = np.nan_to_num(precision) * kept          # no precision where a class has no label
        tail = right[:, TAIL].sum(1).mean() / unlabeled_shares(cell)[TAIL].sum()
        return (f"{100 * kept.sum(1).mean():.0f} / {100 * (right.sum(1) / kept.sum(1)).mean():.1f}"
                f" / {100 * tail:.0f}")
    return table_of(number, text)


def accuracy_table(number, found, methods):
    """bACC of some methods on FixMatch."""
    def text(cell):
        runs = list(collect.by_seed(cell, "mini", found).values())
        if cell.base != "fixmatch" or cell.method not in methods or not runs:
            return ""
        return f"{cell_text(runs, 'bacc', '.1f')} ({len(runs)})"
    return table_of(number, text)


def unlabeled_shares(cell):
    """(K,) share of each class in the unlabeled set."""
    flags = finished.configuration(cell.command("mini", 0))
    counts = np.array(data.class_counts(flags["m1"], 10, flags["gamma_u"],
                                        reverse=flags["reverse_u"]))
    return counts / counts.sum()


# ---------------------------------------------------------------------------------------------


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
            "gains": compared("1-digits", found, over_its_base),
            "leads": compared("1-digits", found, l2ac_over),
            "parts": compared("5-digits", found, l2ac_over_its_parts),
            "labels": label_table("1-digits", found),
            "labels of parts": label_table("5-digits", found),
            "after": accuracy_table("1-digits", found, AFTER)}


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
