"""Reports over finished runs: seeds folded together, tables, CSV, predictions.

A run is evaluate.FinishedRun; `part` is a function that takes nested numbers from one, such as
`lambda run: run.last`. No network, no data, no plots.
"""
import csv
import io
import math
import re
from pathlib import Path

from support import UserError, checkpoint
from support.config import FREE

# ---------------------------------------------------------------------------------------------
# seeds of one setting


def average(values):
    return sum(values) / len(values) if values else math.nan


def deviation(values):
    """The sample standard deviation."""
    centre = average(values)
    return math.sqrt(sum((v - centre) ** 2 for v in values) / (len(values) - 1))


def fold(items, statistic):
    """Equally nested dicts and lists -> one of them, with a statistic in place of the numbers."""
    if isinstance(items[0], dict):
        return {key: fold([item[key] for item in items], statistic) for key in items[0]}
    if isinstance(items[0], list):
        return [fold(cells, statistic) for cells in zip(*items, strict=True)]
    return statistic(items)


class Group:
    """Runs that differ in nothing but the seed."""

    def __init__(self, runs):
        self.runs, first = runs, runs[0].folder
        seeds = ",".join(str(run.cfg.seed) for run in runs)
        ending = re.compile(r"_s\d+$")
        self.path = first if len(runs) == 1 else first.with_name(
            ending.sub(f"_s{seeds}", first.name) if ending.search(first.name)
            else f"{first.name} (seeds {seeds})")

    def mean(self, part):
        """part: a function of a Run that gives nested numbers."""
        return fold([part(run) for run in self.runs], average)

    def deviation(self, part):
        """None where there is one seed only."""
        return fold([part(run) for run in self.runs], deviation) if len(self.runs) > 1 else None


def grouped(runs):
    """Groups in the order of their first run. The same seed twice is not folded."""
    if len({tuple(run.cfg.dataset_info["names"]) for run in runs}) > 1:
        raise UserError("the runs have different classes and cannot stand side by side; name those "
                        "of one dataset at a time")
    free = set(FREE) - {"iters"} | {"seed"}
    groups = {}
    for run in runs:
        setting = tuple(sorted((k, str(float(v)) if type(v) is int else str(v))
                               for k, v in vars(run.cfg).items() if k not in free))
        copy = 0
        while run.cfg.seed in [r.cfg.seed for r in groups.get((setting, copy), [])]:
            copy += 1
        groups.setdefault((setting, copy), []).append(run)
    return [Group(members) for members in groups.values()]


# ---------------------------------------------------------------------------------------------
# tables

SECTIONS = {"mean_of_last_20": "mean of the last 20 evaluations", "last": "last checkpoint",
            "pseudo": "pseudo-labels, last checkpoint"}
MEASURES = {"bacc": "bACC", "gm": "GM", "acc": "accuracy", "head": "recall of the head",
            "middle": "recall of the middle", "tail": "recall of the tail", "kept": "kept by tau",
            "acc_kept": "accuracy of the kept", "recall": "recall", "precision": "precision",
            "kept_of": "kept of", "precision_kept": "precision, kept"}


def table_rows(numbers, names):
    """Run.numbers -> {(section, measure): number}: the rows of every table."""
    rows = {}
    for section, heading in SECTIONS.items():
        for key, label in MEASURES.items():
            value = numbers.get(section, {}).get(key)
            if isinstance(value, list):
                rows |= {(heading, f"{label} {name}"): v
                         for name, v in zip(names, value, strict=True)}
            elif value is not None:
                rows[heading, label] = value
    return rows


def format_cell(value, spread):
    if math.isnan(value):                             # e.g. the precision of a class never guessed
        return "-"
    return f"{value:.2f}" if spread is None else f"{value:.2f} ± {spread:.2f}"


def format_table(groups, part, names, markdown=False):
    """Lines of text: a column per group, a row per measure, sections below one another."""
    means = [table_rows(group.mean(part), names) for group in groups]
    spreads = [table_rows(group.deviation(part) or {}, names) for group in groups]
    rows, section = [["", *(group.path.name for group in groups)]], None
    for row in means[0]:
        if row[0] != section:
            section = row[0]
            rows.append([section, *[""] * len(groups)])
        rows.append([f"  {row[1]}", *(format_cell(mean[row], spread.get(row))
                                      for mean, spread in zip(means, spreads, strict=True))])
    if markdown:
        rule = "|---|" + "--:|" * len(groups)
        lines = ["| " + " | ".join(c.strip() for c in row) + " |" for row in rows]
        return [lines[0], rule, *lines[1:]]
    width = [max(len(row[i]) for row in rows) + 2 for i in range(1, len(rows[0]))]
    return [f"{first:<33}" + "".join(f"{c:>{w}}" for c, w in zip(cells, width, strict=True))
            for first, *cells in rows]


def confusion_lines(group, part, names):
    """Lines of text: of each true class, how many percent are called what."""
    short = [name[:6] for name in names]
    lines = ["", f"{group.path.name}: percent of a true class (row) that is called (column)"]
    lines.append(" " * 12 + "".join(f"{name:>7}" for name in short))
    for name, row in zip(names, group.mean(part)["confusion"], strict=True):
        lines.append(f"{name[:12]:<12}" + "".join(f"{value:7.1f}" for value in row))
    return lines


def write_csv(path, groups, part, names):
    """The rows of the table; a column per group, and one for its deviation where it has one."""
    columns = {"section": {}, "measure": {}}
    for group in groups:
        columns[group.path.name] = table_rows(group.mean(part), names)
        if len(group.runs) > 1:
            columns[f"{group.path.name} std"] = table_rows(group.deviation(part), names)
    rows = [[*row, *(f"{c[row]:.6g}" for c in list(columns.values())[2:])]
            for row in table_rows(groups[0].mean(part), names)]
    checkpoint.write(Path(path), csv_text([list(columns), *rows], "\r\n").encode())


def csv_text(rows, line_end):
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator=line_end).writerows(rows)
    return text.getvalue()


def as_dict(groups, part, names):
    return {str(group.path): {"runs": [str(run.folder) for run in group.runs], "classes": names}
            | group.mean(part) | ({"std": group.deviation(part)} if len(group.runs) > 1 else {})
            for group in groups}


def write_predictions(out, files, labels, probabilities):
    """Of each picture its file, label and probability; to the screen where `out` is None."""
    rows = [[file, label, f"{p:.4f}"]
            for file, label, p in zip(files, labels, probabilities, strict=True)]
    text = csv_text([["file", "label", "probability"], *rows], "\n")
    if out is None:
        return print(text, end="")
    checkpoint.write(Path(out), text.encode())
    print(f"{len(files)} predictions in {out}")
