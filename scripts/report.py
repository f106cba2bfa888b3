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
    A group is called by the words of this name that not all of them have."""
    groups = {}
    for run in runs:
        if run.cfg.dataset_info["names"] != runs[0].cfg.dataset_info["names"]:
            raise UserError("the runs have different classes and cannot stand side by side; name "
                            "those of one dataset at a time")
        name = str(run.folder.resolve()).removesuffix(f"_s{run.cfg.seed}")
        groups.setdefault(name, []).append(run)
    words = [re.split("[/_]", name) for name in groups]
    short = ["_".join(word for word in own if not all(word in others for others in words))
             or Path(name).name for name, own in zip(groups, words, strict=True)]
    return dict(zip(short if len({*short}) == len(groups) else groups, groups.values(),
                    strict=True))


def print_table(groups, part, title):
    """A column for each group, mean ± deviation over its seeds, and of two their difference.

    part: a function of a run that gives {row: number, or list of a number for each class}
    """
    first = next(iter(groups.values()))[0]
    columns = [{run.cfg.seed: part(run) for run in group} for group in groups.values()]
    keys = next(iter(columns[0].values()))
    rows = [(title, "", [*groups] + ["difference"] * (len(groups) == 2))]
    for key, label in (ROWS | BY_CLASS).items():
        if key in ROWS and key in keys:
            rows.append((label, "", cells(columns, lambda numbers, key=key: numbers[key])))
        elif key in keys:
            rows.append((f"{label} per class", "labels", [""] * len(rows[0][2])))
            for k, name in enumerate(first.cfg.dataset_info["names"]):
                rows.append((f"  {name}", first.labels_per_class[k],
                             cells(columns, lambda numbers, key=key, k=k: numbers[key][k])))
    width = [max(map(len, texts)) + 2 for texts in zip(*(row[2] for row in rows), strict=True)]
    for label, count, texts in rows:
        print(f"{label:<26.26}{count:>7}" + "".join(
            f"{text:>{w}}" for text, w in zip(texts, width, strict=True)))


def cells(columns, number):
    """Texts of a row. columns: {seed: numbers} of each group; number: which one of these

    Two groups: the second less the first. Seeds that both have are paired, with a 95 % t interval.
    """
    columns, texts = [{s: number(n) for s, n in column.items()} for column in columns], []
    for values in (list(column.values()) for column in columns):
        one = f"{values[0]:.2f}"
        several = f"{np.mean(values):.1f} ± {np.std(values, ddof=min(1, len(values) - 1)):.1f}"
        texts.append(one if len(values) == 1 else several)
    if len(columns) == 2:
        first, second = columns
        paired = [second[seed] - first[seed] for seed in first.keys() & second.keys()]
        texts.append(f"{np.mean([*second.values()]) - np.mean([*first.values()]):+.2f}")
        if len(paired) > 1:
            mean, half = t_interval(paired)
            texts[2] = f"{mean:+.1f} ± {half:.1f}" + " tied" * bool(abs(mean) <= half)
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
    print_table(groups, lambda run: run.reported, "mean of the last 20")
    if pseudo:
        print_table(groups, lambda run: run.pseudo, "\npseudo-labels")


def list_runs(folder):
    """A line for each run below a folder: bACC and GM as reported, or the last ones so far."""
    found = sorted(path.parent for path in Path(folder).rglob("config.json"))
    if not found:
        raise UserError(f"{folder} holds no run; name a folder that a training script wrote, or "
                        f"one that holds such folders")
    for place in found:
        numbers = {"bacc": "nan", "gm": "nan", "iter": 0}
        if (place / "result.json").exists():
            numbers = json.loads((place / "result.json").read_text())
        elif (place / "log.csv").exists():
            *_, numbers = csv.DictReader((place / "log.csv").read_text().splitlines())
        print(f"{float(numbers['bacc']):7.2f} {float(numbers['gm']):7.2f}  "
              f"{place.relative_to(folder)}" + f" (at {numbers.get('iter')})" * ("iter" in numbers))


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


def predict_pictures(run, path, out, doubtful, skip_broken):
    """Write the two likeliest labels of each picture at `path`, by the run's averaged network, or
    list the `doubtful` pictures that one should look at."""
    info = run.cfg.dataset_info
    if out and not Path(out).parent.is_dir():
        raise UserError(f"--csv {out}: there is no folder {Path(out).parent}; make it, or name one")
    names, (files, images) = info["names"], read_unknown(path, info["size"], skip_broken)
    p = evaluate.scores(run.predict, images, run.normalise).softmax(1).cpu()          # (N, K)
    top, guess = (x.tolist() for x in p.topk(2))                             # [N][2] each
    rows = [(file, names[a], f"{p_a:.4f}", names[b], f"{p_b:.4f}") for file, (a, b), (p_a, p_b)
            in zip(files, guess, top, strict=True)]
    columns = "file", "label", "probability", "second", "second_probability"
    if out:
        with open(out, "w", newline="", encoding="utf-8", errors="backslashreplace") as file:
            csv.writer(file, lineterminator="\n").writerows([columns, *rows])
        print(f"{len(files)} predictions in {out}")
    show = csv.writer(sys.stdout, lineterminator="\n").writerows
    if not out and not doubtful:
        show([columns, *rows])
    if doubtful:
        print("least certain:")
        show([columns, *sorted(rows, key=lambda row: float(row[2]))[:doubtful]])
        folders = [Path(file).parent.name for file in files]                 # <class>/picture
        wrong = [(file, names[a], f"{p[i, names.index(folder)]:.4f}", folder)
                 for i, (file, (a, _), folder) in enumerate(zip(files, guess, folders, strict=True))
                 if folder in names and folder != names[a]]
        print(f"the folder's label is contradicted, {len(wrong)} of "
              f"{sum(folder in names for folder in folders)}:")
        show([("file", "label", "probability_of_folder", "folder"),
              *sorted(wrong, key=lambda row: float(row[2]))[:doubtful]])
