"""What evaluate.py prints: tables over finished runs, labels of pictures."""
import csv
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import torch

import evaluate
from support import UserError, readers

ROWS = {"bacc": "bACC", "gm": "GM", "acc": "accuracy", "head": "recall of the head",
        "middle": "recall of the middle", "tail": "recall of the tail", "kept": "kept by tau",
        "acc_kept": "right of the kept"}
BY_CLASS = {"recall": "recall", "precision": "precision", "kept_of": "kept",
            "precision_kept": "precision, kept"}
# Student's t, two-sided 95 %, for two to ten seeds; for more the last one is on the safe side
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def t_interval(differences):
    """Mean and half the width of its 95 % t interval, of at least two paired differences."""
    n, error = len(differences), np.std(differences, ddof=1) / len(differences) ** 0.5
    return np.mean(differences), T_95[min(n - 2, 8)] * error


def grouped(runs):
    """{name: runs}: seeds of one setting together, by the names of their folders without _s<seed>.
    A group is called by the words of this name that not all of them have, or by its method."""
    groups = {}
    for run in runs:
        if run.cfg.dataset_info["names"] != runs[0].cfg.dataset_info["names"]:
            raise UserError("the runs have different classes and cannot stand side by side; name "
                            "those of one dataset at a time")
        name = str(run.folder.resolve()).removesuffix(f"_s{run.cfg.seed}")
        groups.setdefault(name, []).append(run)
    words = [re.split("[/_]", name) for name in groups]
    short = ["_".join(word for word in own if not all(word in others for others in words))
             or groups[name][0].cfg.method for name, own in zip(groups, words, strict=True)]
    return dict(zip(short if len({*short}) == len(groups) else groups, groups.values(),
                    strict=True))


def print_table(groups, part, title):
    """A column for each group, mean ± deviation over its seeds, and of two their difference.

    part: a function of a run that gives {row: number, or list of a number for each class}
    """
    def rows_of(run):                                     # {(title, number of labels): number}
        numbers, names = part(run), run.cfg.dataset_info["names"]
        rows = {(label, ""): numbers[key] for key, label in ROWS.items() if key in numbers}
        return rows | {(f"{label} {name}", run.labels_per_class[k]): numbers[key][k]
                       for key, label in BY_CLASS.items() if key in numbers
                       for k, name in enumerate(names)}
    columns = [{run.cfg.seed: rows_of(run) for run in group} for group in groups.values()]
    lines = [((title, "labels"), [*groups] + ["difference"] * (len(groups) == 2))]
    for row in next(iter(columns[0].values())):
        lines.append((row, cells([{seed: rows[row] for seed, rows in column.items()}
                                  for column in columns])))
    width = [max(map(len, texts)) + 2 for texts in zip(*(texts for _, texts in lines), strict=True)]
    for (label, count), texts in lines:
        print(f"{label:<26.26}{count:>7}" + "".join(
            f"{text:>{w}}" for text, w in zip(texts, width, strict=True)))


def cells(columns):
    """Texts of a row. columns: {seed: number} of each group. Of two groups also the second less the
    first, with a 95 % t interval if they have two seeds or more in common, which are paired."""
    values = [[*column.values()] for column in columns]
    texts = [f"{np.mean(numbers):.1f} ± {np.std(numbers, ddof=1):.1f}" if len(numbers) > 1 else
             f"{numbers[0]:.2f}" for numbers in values]
    if len(columns) == 2:
        first, second = columns
        paired = [second[seed] - first[seed] for seed in first.keys() & second.keys()]
        mean, half = t_interval(paired) if len(paired) > 1 else (0, np.nan)
        tied = " tied" * bool(abs(mean) <= half)
        texts.append(f"{mean:+.1f} ± {half:.1f}{tied}" if half >= 0 else
                     f"{np.mean(values[1]) - np.mean(values[0]):+.2f}")
    return ["-" if "nan" in text else text for text in texts]      # a class that is never guessed


def print_reported(runs, pseudo=False, paired=False):
    """paired: there must be an interval, of two methods"""
    groups = grouped(runs)
    seeds = [[run.cfg.seed for run in group] for group in groups.values()]
    if paired and (len(seeds) != 2 or len({*seeds[0]} & {*seeds[1]}) < 2):
        raise UserError("--against: an interval needs one method on each side and two seeds or "
                        "more that both have, e.g. runs/a_s* --against runs/b_s*")
    for run in runs:
        at = run.history[-1]["iter"] if run.history else 0
        if at < run.cfg.iters:
            print(f"{run.folder}: not finished, evaluated up to {at} of {run.cfg.iters}")
    print_table(groups, lambda run: run.reported, "mean of last evaluations")
    if pseudo:
        print_table(groups, lambda run: run.pseudo, "\npseudo-labels")


def list_runs(folder):
    """A line for each run below a folder: bACC and GM as reported, or the last ones so far."""
    found = sorted(path.parent for path in Path(folder).rglob("config.json"))
    if not found:
        raise UserError(f"{folder} holds no run; name a folder that a training script wrote")
    print("   bACC      GM    iters  run")
    for place in found:
        iters = json.loads((place / "config.json").read_text())["iters"]
        numbers = {"bacc": "nan", "gm": "nan", "iter": 0}
        if (place / "result.json").exists():
            numbers = json.loads((place / "result.json").read_text()) | {"iter": iters}
        elif (place / "log.csv").exists():
            *_, numbers = csv.DictReader((place / "log.csv").read_text().splitlines())
        print(f"{float(numbers['bacc']):7.2f} {float(numbers['gm']):7.2f} {numbers['iter']:>8}  "
              f"{place.relative_to(folder)}" + f" (of {iters})" * (int(numbers["iter"]) < iters))


# ---------------------------------------------------------------------------------------------
# predictions


def read_unknown(path, size, skip_broken=False):
    """Images to predict: (names, (N, 3, *size)); from a picture, a folder, or an .npz's array x."""
    path, size = Path(path), tuple(size)
    if not path.exists():
        raise UserError(f"--predict {path}: there is no such file or folder; correct the path")
    if path.suffix == ".npz":
        x = readers.read_npz(path, "--predict", ["x"])["x"]
        return [str(i) for i in range(len(x))], readers.as_tensor(x, size)
    files = readers.list_pictures(path, []) if path.is_dir() else [path]
    names, chunks = [os.fsencode(f).decode("utf-8", "backslashreplace") for f in files], []
    broken = readers.decode_all(files, size, chunks.append, skip_broken)
    return np.delete(names, broken).tolist(), torch.from_numpy(np.concatenate(chunks))


def predict_pictures(runs, path, doubtful, skip_broken):
    """Print the two likeliest labels of each picture at `path`, by the run's averaged network, or
    of the `doubtful` pictures that one should look at."""
    if len(runs) > 1 or not path or doubtful < 0:
        raise UserError("--predict takes one run, and --doubtful goes with --predict PATH")
    run, names = runs[0], runs[0].cfg.dataset_info["names"]
    files, images = read_unknown(path, run.cfg.dataset_info["size"], skip_broken)
    p = evaluate.scores(run.predict, images, run.normalise).softmax(1).cpu()          # (N, K)
    top, guess = (x.tolist() for x in p.topk(2))                             # [N][2] each
    rows = [(file, names[a], f"{p_a:.4f}", names[b], f"{p_b:.4f}") for file, (a, b), (p_a, p_b)
            in zip(files, guess, top, strict=True)]
    show = csv.writer(sys.stdout, lineterminator="\n").writerows
    least = sorted(rows, key=lambda row: float(row[2]))[:doubtful] if doubtful else rows
    show([("file", "label", "probability", "second", "second_probability"), *least])
    folders = [Path(file).parent.name for file in files]                     # <class>/picture
    if doubtful and {*folders} & {*names}:
        wrong = [(file, names[a], f"{p[i, names.index(folder)]:.4f}", folder)
                 for i, (file, (a, _), folder) in enumerate(zip(files, guess, folders, strict=True))
                 if folder in names and folder != names[a]]
        print(f"\n{len(wrong)} of {len(files)} contradict the name of their folder")
        show([("file", "label", "probability_of_folder", "folder"),
              *sorted(wrong, key=lambda row: float(row[2]))[:doubtful]])
