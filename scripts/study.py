"""Which method is better, and what the attractor learns: numbers and tables from results/*.jsonl.

The loss weighs class k by pi_k of the labels plus lambda_u times the share kept_k of the unlabeled
images that count with pseudo-label k. If the adaptive classifier fits the posterior under this
effective distribution and the linear one that under the uniform one, then by Bayes' rule the
attractor adds log pi_eff,k to logit k of every image, up to a constant. So what it adds is compared
with log N_k and with log pi_eff,k: slopes by least squares over the K classes.
"""
from functools import partial

import numpy as np

from scripts.collect import cell_text, grid, runs_of, table_of
from scripts.report import t_interval
from scripts.tables import TABLES

LABELS_ONLY = "Labels only"
BASES = {"mixmatch": "MixMatch", "fixmatch": "FixMatch"}
L2AC, PRIOR, VECTOR = "**w/ L2AC**", "w/ L2AC, prior start (ours)", "w/ L2AC, vector"
LABELED, ALL, SINGLE = "w/ LA, labeled rows", "w/ LA, all rows", "w/ single-level ablation"
SOFT, SOFT_PRIOR, CDMAD, HARD = f"{L2AC}, soft", f"{PRIOR}, soft", "w/ CDMAD", "w/ CDMAD, hard"
SOFT_PAIRS = [(f"{row}, soft", row) for row in ("FixMatch", LABELED, ALL, SINGLE, L2AC, PRIOR)]
SOFT_PAIRS += [(CDMAD, HARD)]
REFERENCE = {"5": "**L2AC**", "5-digits": "**L2AC**", "soft": SOFT}      # L2AC in the other tables


def difference(ours, theirs):
    """**+2.3 ± 1.1**: difference in bACC, paired by seed, with its 95 % t interval, bold if this
    excludes 0. ours, theirs: {seed: line}"""
    values = [ours[seed]["bacc"] - theirs[seed]["bacc"] for seed in ours.keys() & theirs.keys()]
    if len(values) < 2:
        return ""
    mean, half = t_interval(values)
    bold = "**" if abs(mean) > max(half, 0.05) else ""   # not where 0.0 is shown
    return f"{bold}{mean:+.1f} ± {half:.1f}{bold}"


def beside(cell, row):
    """The runs of another row of the table, with the same base if it has one, in this column."""
    base = "supervised" if row == LABELS_ONLY else cell.base
    place = base, row, cell.column, cell.dataset
    return next((runs_of(other) for other in TABLES[cell.table] if place == (
        other.base, other.row, other.column, other.dataset)), {})


def gain(cell):
    """Of a method over its base, of a base over the labels only."""
    base = BASES.get(cell.base, LABELS_ONLY) if cell.row not in BASES.values() else LABELS_ONLY
    return "" if cell.row == base else difference(runs_of(cell), beside(cell, base))


def lead(cell):
    """Of L2AC over another row with the same base; on the test set as it is."""
    l2ac = REFERENCE.get(cell.table, L2AC)
    alone = cell.base == "supervised" or cell.row == l2ac or cell.test
    return "" if alone else difference(beside(cell, l2ac), runs_of(cell))


def marked(cell):
    """Our number and the paper's; an arrow if the row is above or below L2AC on the same base."""
    return cell_text(cell).replace(")", f"){arrow(lead(cell))}", 1)      # behind the seeds


def arrow(text):
    """Of a `difference`: whether what is subtracted is above or below, by the interval."""
    return {"**-": " ↑", "**+": " ↓"}.get(text[:3], "")


def labels(cell):
    """Of the unlabeled images how many count, of these how many are right, and of the images of the
    tail how many do both, in percent."""
    runs = [described(line) for line in runs_of(cell).values()]
    if not runs or "kept" not in runs[0]:
        return ""
    right = [run["right"] for run in runs if "right" in run]             # where any label counts
    kept, tail = (np.mean([run[key] for run in runs]) for key in ("kept", "tail"))
    return f"{kept:.0f} / {f'{np.mean(right):.1f}' if right else '–'} / {tail:.0f}"


def slopes(added, counts, kept):
    """Slopes of what the attractor adds (K,) on log N_k and on log pi_eff,k."""
    def slope(x):
        x = x - x.mean()
        return added @ x / (x @ x)
    log_eff = np.log(counts / counts.sum() + kept)                       # lambda_u is 1
    return {"slope_n": slope(np.log(counts)), "slope_eff": slope(log_eff),
            "log_eff": log_eff - log_eff.mean()}


def described(line):
    """What the tables say of a run: its pseudo-labels in percent, where it has some, and what the
    attractor adds, where there is one. The tail is the third of the classes with the fewest labels.
    """
    numbers = {key: line[key] for key in ("bacc", "labels")}
    if line.get("kept", [None])[0] is None:                              # labels only, cRT
        return numbers
    counts, unlabeled = np.array([line["labels"], line["unlabeled"]])    # (K,) each
    shares, tail = unlabeled / unlabeled.sum(), np.argsort(-counts, kind="stable")
    tail = tail[-round(len(tail) / 3):]
    kept, precision = np.array([line["kept"], line["right"]], dtype=float)
    right, known = kept * np.nan_to_num(precision), kept[~np.isnan(precision)].sum()
    numbers |= {"kept": 100 * kept.sum(), "tail": 100 * right[tail].sum() / shares[tail].sum()}
    numbers |= {"right": 100 * right.sum() / known} if known else {}
    if "bias" in line:
        bias = np.array(line["bias"])
        numbers |= slopes(bias, counts, kept) | {"bias": bias}
    return numbers


def study(*tables):
    """{title of a column: {row: [numbers of each of the first five seeds]}}: all rows have these
    on the digits."""
    result = {}
    for cell in (cell for table in tables for cell in TABLES[table]):
        result.setdefault(cell.title, {})[cell.row] = [
            described(line) for _, line in sorted(runs_of(cell).items())[:5]]
    return result


def slope_table():
    """Of what the attractor adds, on log N_k / on log pi_eff,k: means over seeds."""
    def text(runs):
        slopes = [(run["slope_n"], run["slope_eff"]) for run in runs]
        return "/".join(f"{slope:.2f}" for slope in np.mean(slopes, 0)) if slopes else ""
    columns = (L2AC, VECTOR, PRIOR, SOFT, SOFT_PRIOR)
    return grid([column.replace("w/ ", "") for column in columns],
                [[title, *(text(rows.get(row, ())) for row in columns)]
                 for title, rows in study("attractor", "soft").items()])


def soft_table():
    """bACC with soft labels (seeds), less that with hard ones; arrow: above or below CDMAD."""
    def text(cell, soft, hard):
        ours, theirs = beside(cell, soft), beside(cell, hard)
        if not ours:
            return "not run"
        mean = np.mean([line["bacc"] for line in ours.values()])
        mark = arrow(difference(beside(cell, CDMAD), ours))
        return f"{mean:.1f} ({len(ours)}) {difference(ours, theirs)}{mark}"
    cells = [cell for cell in TABLES["soft"] if cell.row == L2AC]
    return grid([cell.title for cell in cells],
                [[hard.removesuffix(", hard"), *(text(cell, soft, hard) for cell in cells)]
                 for soft, hard in SOFT_PAIRS])


WRITTEN = {number: partial(table_of, cells, marked) for number, cells in TABLES.items()}
WRITTEN |= {f"{kind} {number}": partial(table_of, cells, text) for number, cells in TABLES.items()
            for kind, text in (("leads", lead), ("gains", gain), ("labels", labels))}
WRITTEN |= {"slopes": slope_table, "soft": soft_table}
