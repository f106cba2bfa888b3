"""Which method is better, and by how much: differences between rows of Table 1 and of the ablation,
and the pseudo-labels behind them, on digits and on CIFAR-10. Also the methods after L2AC.

`python -m scripts.study` writes these tables to docs/. Differences are paired by seed, because
runs of a seed share their images. One counts if it exceeds two standard errors.
"""
import numpy as np

import data
from scripts import collect, finished, tables

TAIL = slice(-3, None)                                   # the three classes with the fewest labels
AFTER = ("none", "la", "la_all", "la_post_hoc", "l2ac", "darp_crt", "cdmad", "adello", "acr")
BASES = {"supervised": "Vanilla", "mixmatch": "MixMatch", "fixmatch": "FixMatch"}


def difference(ours, theirs):
    """Mean difference in bACC, paired by seed, ± standard error; bold beyond two of them."""
    ours, theirs = ({run["seed"]: run["bacc"] for run in runs} for runs in (ours, theirs))
    values = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    return f"{collect.difference_text(values)} ({len(values)})" if len(values) > 1 else ""


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


def end_of(course):
    """Over the reported evaluations, by class: labels that count, those of known precision, those
    that are right. (3, K) shares of the unlabeled images

    In older files a class has no precision if it had no label in one of these evaluations; that of
    the last epoch takes its place, if there is one.
    """
    kept, precision = (np.array(course[key], dtype=float) for key in ("kept", "precision"))
    precision = np.where(np.isfinite(precision[-1]), precision[-1], precision[-2])
    known = np.where(np.isfinite(precision), kept[-1], 0)
    return np.array([kept[-1], known, known * np.nan_to_num(precision)])


def label_table(number, found):
    """The pseudo-labels of the reported evaluations, in percent: how many unlabeled images count,
    how many of these have the right label, and how many images of the tail do both."""
    def text(cell):
        runs = [end_of(r["course"]) for r in collect.by_seed(cell, "mini", found).values()]
        if not runs or not np.isfinite(runs).all():                  # labels alone; cRT's stage
            return ""
        kept, known, right = np.stack(runs, axis=1)                  # (seeds, K) each
        some = known.sum(1) > 0                          # seeds in which any label counts
        precise = (right[some].sum(1) / known[some].sum(1)).mean() if some.any() else np.nan
        tail = right[:, TAIL].sum(1).mean() / unlabeled_shares(cell)[TAIL].sum()
        return (f"{100 * kept.sum(1).mean():.0f} / {100 * precise:.1f} / {100 * tail:.0f}"
                ).replace("nan", "–")
    return table_of(number, text)


def accuracy_table(number, found, methods):
    """bACC / GM of some methods on FixMatch."""
    def text(cell):
        shown = cell.base == "fixmatch" and cell.method in methods
        return collect.ours(cell, "mini", found) if shown else ""
    return table_of(number, text)


def unlabeled_shares(cell):
    """(K,) share of each class in the unlabeled set."""
    flags = finished.configuration(cell.command("mini", 0))
    counts = np.array(data.class_counts(flags["m1"], 10, flags["gamma_u"],
                                        reverse=flags["reverse_u"]))
    return counts / counts.sum()


def written_tables(found):
    """{name of its place in docs/: Markdown}"""
    written = {}
    for suffix, end in (("-digits", ""), ("", " on cifar10")):
        one, five = f"1{suffix}", f"5{suffix}"
        written |= {f"gains{end}": compared(one, found, over_its_base),
                    f"leads{end}": compared(one, found, l2ac_over),
                    f"labels{end}": label_table(one, found),
                    f"parts{end}": compared(five, found, l2ac_over_its_parts),
                    f"labels of parts{end}": label_table(five, found),
                    f"after{end}": accuracy_table(one, found, AFTER)}
    return written
