"""Reports over finished runs: means over seeds, tables, CSV, predictions.

A run is evaluate.FinishedRun; `part` is a function that takes nested numbers from one, such as
`lambda run: run.last`. No network, no data, no plots.
"""
import csv
import io
import math
import re
import sys
from pathlib import Path

import torch

from support import UserError, checkpoint
from support.config import FREE, kind_of_device

LAST = 20                                            # evaluations whose mean is reported
REPORTED = ("bacc", "gm", "acc", "recall", "head", "middle", "tail")        # keys of that mean
SPLIT = ("gamma_l", "gamma_u", "reverse_u", "imbalance", "n1", "m1", "beta", "ratio", "split",
         "pool")                                     # flags that say which images are in which set
USED = {  # of evaluate.py, by what it is asked for: the flags that have an effect
    "--predict": ("csv",), "--test": ("gamma_t", "seed", "json"),
    "the table": ("pseudo", "json", "markdown", "csv", "unfinished")}


def check_combination(parser, args):
    """Refuse flags of evaluate.py that would have no effect. Returns a key of USED."""
    if args.predict is not None and args.test:
        parser.error("--predict and --test exclude each other; give one of them")
    asked = "--predict" if args.predict is not None else "--test" if args.test else "the table"
    for key in dict.fromkeys(key for keys in USED.values() for key in keys):
        value = getattr(args, key)
        if value is not None and value is not False and key not in USED[asked]:  # 0 is given
            where = "without --test" if asked == "the table" else f"together with {asked}"
            parser.error(f"--{key} has no effect {where}; leave it out")
    if args.json and args.markdown:
        parser.error("--json and --markdown exclude each other; give one of them")
    if asked == "--predict" and len(args.runs) > 1:
        parser.error("--predict takes one run at a time")
    if args.csv is not None and (Path(args.csv).is_dir() or not Path(args.csv).parent.is_dir()):
        parser.error(f"--csv {args.csv!r} is not a file in a folder that exists")
    return asked


def device_flag(p):
    p.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto",
                   help="where the networks predict (default: auto, a GPU if there is one)")


# ---------------------------------------------------------------------------------------------
# seeds of one setting


def load_all(folders, load_run, device="auto"):
    """The runs of these folders, each once; says on stderr which are not finished, and how far.

    load_run: evaluate.load_run
    """
    device = torch.device(kind_of_device(device))    # not that of a rank: one process reports
    places = [Path(folder).resolve() for folder in folders]
    for i, place in enumerate(places):
        if place in places[:i]:
            raise UserError(f"{folders[i]} is named twice; name every run once")
    runs = [load_run(folder, device) for folder in folders]
    for run in runs:
        if not is_finished(run):
            print(f"{run.folder}: not finished, {progress(run)}", file=sys.stderr)
    return runs


def iterations(run):
    """The iterations after which a run was evaluated; the last one always is."""
    return [row["iter"] for row in run.history]


def is_finished(run):
    return iterations(run)[-1:] == [run.cfg.iters]


def progress(run):
    return f"evaluated up to iteration {(iterations(run) or [0])[-1]:g} of {run.cfg.iters}"


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
        if first.name in ("", ".."):
            first = first.resolve()                       # `.` or `..`: use its real name
        seeds = ",".join(str(run.cfg.seed) for run in runs)
        ending = re.compile(r"_s\d+$")
        self.path = first if len(runs) == 1 else first.parent / (
            ending.sub(f"_s{seeds}", first.name) if ending.search(first.name)
            else f"{first.name} (seeds {seeds})")

    def mean(self, part):
        """part: a function of a run that gives nested numbers."""
        return fold([part(run) for run in self.runs], average)

    def deviation(self, part):
        """None where there is one seed only."""
        return fold([part(run) for run in self.runs], deviation) if len(self.runs) > 1 else None


def grouped(runs, unfinished=False):
    """Groups in the order of their first run. Two runs of one seed are not averaged.

    unfinished: whether runs that were evaluated at different iterations may be averaged
    """
    first = runs[0].cfg
    for cfg in (run.cfg for run in runs):
        if cfg.dataset_info["names"] != first.dataset_info["names"]:
            raise UserError("the runs have different classes and cannot stand side by side; name "
                            "those of one dataset at a time")
        if cfg.dataset != first.dataset and cfg.dataset_info != first.dataset_info:
            raise UserError(f"--dataset {first.dataset} and --dataset {cfg.dataset} cannot stand "
                            f"side by side; name the runs of one dataset at a time")
    free = set(FREE) - {"iters", "dataset_info"} | {"seed"}
    groups = {}
    for run in runs:
        # a default of 5 and 5.0 from the command line are one setting
        setting = tuple(sorted((k, str(float(v)) if type(v) is int else str(v))
                               for k, v in vars(run.cfg).items() if k not in free))
        copy = 0
        while run.cfg.seed in [r.cfg.seed for r in groups.get((setting, copy), [])]:
            copy += 1
        groups.setdefault((setting, copy), []).append(run)
    for members in groups.values():
        if len(members) > 1 and not unfinished:
            check_equal_length(members)
    return [Group(members) for members in groups.values()]


def tell_different_splits(groups):
    """One line on stderr where the columns were not trained on the same images."""
    splits = [{key: getattr(group.runs[0].cfg, key) for key in SPLIT}
              | {"seed": sorted(run.cfg.seed for run in group.runs)} for group in groups]
    unequal = [f"--{key}" for key in splits[0] if any(s[key] != splits[0][key] for s in splits)]
    if unequal:
        print(f"the columns differ in {', '.join(unequal)}, so they were not trained on the same "
              f"images", file=sys.stderr)


def check_equal_length(runs):
    for run in runs:
        if not is_finished(run):
            raise UserError(f"{run.folder} is not finished ({progress(run)}) and would be averaged "
                            f"with other seeds; finish it with --resume, leave it out, or ask for "
                            f"--unfinished")
        if iterations(run) != iterations(runs[0]):
            raise UserError(f"{runs[0].folder} and {run.folder} were evaluated at different "
                            f"iterations ({len(runs[0].history)} and {len(run.history)} times) and "
                            f"would be averaged; leave one out, or ask for --unfinished")


# ---------------------------------------------------------------------------------------------
# tables

SECTIONS = {"mean_of_last": "", "last": "last checkpoint",       # the first: heading_of_mean
            "pseudo": "pseudo-labels, last checkpoint"}
MEASURES = {"bacc": "bACC", "gm": "GM", "acc": "accuracy", "head": "recall of the head",
            "middle": "recall of the middle", "tail": "recall of the tail", "kept": "kept by tau",
            "acc_kept": "accuracy of the kept", "recall": "recall", "precision": "precision",
            "kept_of": "kept of", "precision_kept": "precision, kept"}


def evaluations(run):
    """How many evaluations the reported mean is over."""
    return min(LAST, len(run.judged))


def heading_of_mean(groups):
    """Says how many evaluations the columns average, one by one where they differ."""
    counts = {label: sorted({evaluations(run) for run in group.runs})
              for label, group in zip(labels(groups), groups, strict=True)}
    if all(numbers == [0] for numbers in counts.values()):
        return "no evaluation yet: last checkpoint"
    texts = {label: " to ".join(map(str, dict.fromkeys((numbers[0], numbers[-1]))))
             for label, numbers in counts.items()}
    if len(set(texts.values())) == 1:
        return f"mean of the last {next(iter(texts.values()))} evaluations"
    each = ", ".join(f"{label}: {text}" for label, text in texts.items())
    return f"mean of the last evaluations ({each})"


def labels(groups):
    """A heading for each group: its name, or its whole path where two have the same name; and how
    far it is, if it has not ended."""
    names = [group.path.name for group in groups]
    paths = [str(group.path) for group in groups]
    told = []
    for i, group in enumerate(groups):
        everything = ", ".join(str(run.folder) for run in group.runs)
        label = next((x[i] for x in (names, paths) if x.count(x[i]) == 1), everything)
        late = [run for run in group.runs if not is_finished(run)]
        told.append(label + (f" (not finished: {progress(late[0])})" if late else ""))
    return told


def table_rows(numbers, names, of_mean):
    """Run.numbers -> {(section, measure): number}: the rows of every table."""
    rows = {}
    for section, heading in (SECTIONS | {"mean_of_last": of_mean}).items():
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
    heading = heading_of_mean(groups)
    means = [table_rows(group.mean(part), names, heading) for group in groups]
    spreads = [table_rows(group.deviation(part) or {}, names, heading) for group in groups]
    rows, section = [["", *labels(groups)]], None
    for row in means[0]:
        if row[0] != section:
            section = row[0]
            rows.append([section, *[""] * len(groups)])
        rows.append([f"  {row[1]}", *(format_cell(mean[row], spread.get(row))
                                      for mean, spread in zip(means, spreads, strict=True))])
    if markdown:
        rule = "|---|" + "--:|" * len(groups)
        lines = ["| " + " | ".join(c.strip().replace("|", "\\|") for c in row) + " |"
                 for row in rows]
        return [lines[0], rule, *lines[1:]]
    width = [max(len(row[i]) for row in rows) + 2 for i in range(1, len(rows[0]))]
    longest = max(33, *(len(row[0]) for row in rows if row[1]))
    return [f"{first:<{longest}}" + "".join(f"{c:>{w}}" for c, w in zip(cells, width, strict=True))
            for first, *cells in rows]


def confusion_lines(group, part, names):
    """Lines of text: the percentage of each true class that gets each label."""
    short = [name[:6] for name in names]
    lines = ["", f"{labels([group])[0]}: percent of a true class (row) that is called (column)"]
    lines.append(" " * 12 + "".join(f"{name:>7}" for name in short))
    for name, row in zip(names, group.mean(part)["confusion"], strict=True):
        lines.append(f"{name[:12]:<12}" + "".join(f"{value:7.1f}" for value in row))
    return lines


def write_csv(path, groups, part, names):
    """The rows of the table; a column per group, and one for its deviation where it has one."""
    heads, columns, heading = ["section", "measure"], [], heading_of_mean(groups)
    for label, group in zip(labels(groups), groups, strict=True):
        heads.append(label)
        columns.append(table_rows(group.mean(part), names, heading))
        if len(group.runs) > 1:
            heads.append(f"{label} std")
            columns.append(table_rows(group.deviation(part), names, heading))
    rows = [[*row, *(f"{column[row]:.6g}" for column in columns)] for row in columns[0]]
    checkpoint.write(Path(path), csv_text([heads, *rows], "\r\n").encode())


def csv_text(rows, line_end):
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator=line_end).writerows(rows)
    return text.getvalue()


def as_dict(groups, part, names):
    paths = [str(group.path) for group in groups]
    keys = paths if len(set(paths)) == len(paths) else labels(groups)
    return {key: {"runs": [str(run.folder) for run in group.runs], "classes": names,
                  "finished": all(map(is_finished, group.runs)),
                  "evaluations": [evaluations(run) for run in group.runs]}
            | group.mean(part) | ({"std": group.deviation(part)} if len(group.runs) > 1 else {})
            for key, group in zip(keys, groups, strict=True)}


def print_imbalanced(judged, made, as_json):
    """judged: {folder: ({class name: test images}, metrics)}; made: kind, gamma_t, seed"""
    if as_json:
        return print(checkpoint.to_json({folder: made | {"counts": counts} | m
                                         for folder, (counts, m) in judged.items()}))
    test_sets = [counts for counts, _ in judged.values()]
    if any(counts != test_sets[0] for counts in test_sets):
        raise UserError("the runs have different test sets and cannot stand side by side; name "
                        "those of one dataset at a time, or ask for --json")
    print(f"last checkpoint, {made['kind']} test set: "
          + ", ".join(f"{name} {n}" for name, n in test_sets[0].items()))
    for folder, (_, m) in judged.items():
        print(f"bACC {m['bacc']:6.2f}  GM {m['gm']:6.2f}  ACC {m['acc']:6.2f}  {folder}")


def write_predictions(out, files, labels, probabilities):
    """Of each picture its file, label and probability; to the screen where `out` is None."""
    rows = [[file, label, f"{p:.4f}"]
            for file, label, p in zip(files, labels, probabilities, strict=True)]
    text = csv_text([["file", "label", "probability"], *rows], "\n")
    if out is None:
        return print(text, end="")
    checkpoint.write(Path(out), text.encode())
    print(f"{len(files)} predictions in {out}")
