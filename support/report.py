"""Finished runs: what a folder holds, and tables over several of them. Metrics: evaluate.py"""
import csv
import json
import sys
from argparse import Namespace
from functools import cached_property, partial
from importlib import import_module
from os.path import commonprefix
from pathlib import Path

import numpy as np
import torch

import data
import evaluate
import models
from attractor import build_attractor
from support import UserError, config, readers
from support.augment import Normalise
from support.run import check_data, load_checkpoint
from train_fixmatch import flags, l2ac_flags


def load_run(folder, device="cpu"):
    """The FinishedRun of a folder that a training script wrote."""
    state = load_checkpoint(folder)
    if state is None:
        raise UserError(f"{folder} holds no run (there is no last.pt); name a folder that a "
                        f"training script wrote")
    p = config.parser("")
    flags(p)
    l2ac_flags(p)
    # a flag that did not exist when the run was made has its default
    cfg = Namespace(**vars(p.parse_args([])) | state["config"])
    num_classes = len(cfg.dataset_info["names"])
    model = models.build(cfg.model, num_classes, cfg.bn_momentum, cfg.image_size)
    predict, counted, omega = model, state["history"], state.get("attractor", {})
    if "method" in state:                            # a run of baselines/train.py
        module, name = cfg.method_class.split(":")
        method = getattr(import_module(module), name)
        method.heads(model)
        predict, counted = partial(method.predict, model), method.reported(counted, cfg)
        omega = {name.removeprefix("attractor."): x for name, x in state["method"].items()
                 if name.startswith("attractor.")}
    model.load_state_dict(state["ema"])
    model.to(device, memory_format=torch.channels_last).eval()
    attractor = None
    if omega and cfg.method != "none":
        attractor = build_attractor(num_classes, cfg.attractor, cfg.hidden, cfg.attractor_input)
        attractor.load_state_dict(omega)
        attractor.to(device)
    return FinishedRun(folder, cfg, state["history"], counted, model, predict, attractor, device)


class FinishedRun:
    """A run as its last checkpoint left it; what takes a pass over images is computed once."""

    def __init__(self, folder, cfg, history, counted, model, predict, attractor, device):
        self.folder, self.cfg, self.device = Path(folder), cfg, torch.device(device)
        self.history, self.counted = history, counted      # all evaluations, those that count
        self.model, self.predict, self.attractor = model, predict, attractor   # model: the EMA
        self.labels_per_class = cfg.dataset_info["labels"]

    @cached_property
    def dataset(self):
        loaded = data.from_flags(self.cfg)
        check_data(self.cfg.dataset_info, loaded.info, self.folder)
        return loaded.to(self.device)

    @cached_property
    def split(self):
        return data.split(self.dataset, self.cfg)     # indices of labeled, of unlabeled images

    @cached_property
    def normalise(self):
        info = self.cfg.dataset_info                  # --predict needs no dataset
        return Normalise(info["mean"], info["std"], self.device)

    @cached_property
    def test_scores(self):
        return evaluate.scores(self.predict, self.dataset.test_images, self.normalise)   # (T, K)

    def on_training_images(self, network, index):
        """What `network` makes of training images, seen without augmentation. (N,) -> (N, ..)"""
        return torch.cat([evaluate.scores(network, self.dataset.take(i)[0], self.normalise)
                          for i in np.array_split(index, -(-len(index) // 500))])

    @cached_property
    def last(self):
        """The last checkpoint on the test set; shares of classes in percent."""
        confusion = evaluate.confusion_matrix(self.dataset.test_labels, self.test_scores.argmax(1),
                                              self.dataset.num_classes)
        result = evaluate.metrics(confusion)
        return result | evaluate.thirds(result["recall"], self.labels_per_class) | {
            "predicted": (100 * self.test_scores.softmax(1).mean(0)).tolist(),        # [K]
            "confusion": (100 * confusion / confusion.sum(1, keepdim=True)).tolist()}  # [K][K]

    @cached_property
    def reported(self):
        """The mean of the last 20 evaluations: the number that the tables show."""
        if not self.counted:                          # none yet that counts
            return self.last
        result = evaluate.mean_of_last(self.counted)
        return result | evaluate.thirds(result["recall"], self.labels_per_class)

    @property
    def bias(self):
        """(K,) what the attractor adds to the logits, mean of the last 20 evaluations."""
        return np.mean([[row[f"bias_{k}"] for k in range(len(self.labels_per_class))]
                        for row in self.counted[-20:]], axis=0)

    @cached_property
    def pseudo(self):
        """`pseudo_labels` of the EMA model for the unlabeled images without augmentation."""
        index = self.split[1][self.dataset.labels[self.split[1]] >= 0]
        if len(index) == 0:
            raise UserError(f"--pseudo: the true labels of the unlabeled images of {self.folder} "
                            f"are not known; leave --pseudo out")
        labels = torch.from_numpy(self.dataset.labels[index]).to(self.device)         # (U,)
        tau = 0 if self.cfg.base == "mixmatch" else self.cfg.tau    # MixMatch: every guess counts
        return evaluate.pseudo_labels(self.on_training_images(self.predict, index), labels, tau)


# ---------------------------------------------------------------------------------------------
# tables

ROWS = {"bacc": "bACC", "gm": "GM", "acc": "accuracy", "head": "recall of the head",
        "middle": "recall of the middle", "tail": "recall of the tail", "kept": "kept by tau",
        "acc_kept": "right of the kept"}
BY_CLASS = {"recall": "recall", "precision": "precision", "kept_of": "kept",
            "precision_kept": "precision, kept"}


def grouped(runs):
    """{name: runs}: seeds of one setting together, by the names of their folders without _s<seed>,
    from where these begin to differ."""
    groups = {}
    for run in runs:
        if run.cfg.dataset_info["names"] != runs[0].cfg.dataset_info["names"]:
            raise UserError("the runs have different classes and cannot stand side by side; name "
                            "those of one dataset at a time")
        name = str(run.folder.resolve()).removesuffix(f"_s{run.cfg.seed}")
        groups.setdefault(name, []).append(run)
    common = commonprefix(list(groups))
    begin = max(common.rfind("/"), common.rfind("_") if len(groups) > 1 else 0) + 1
    names = [name[begin:] for name in groups]
    common = commonprefix([name[::-1] for name in names])[::-1] if len(names) > 1 else ""
    end = len(common) - common.find("_") if "_" in common else 0      # flags that all of them have
    short = [name[:len(name) - end] for name in names]
    return dict(zip(short if all(short) else names, groups.values(), strict=True))


def print_table(groups, part, title):
    """A column for each group, mean ± deviation over its seeds; the difference if there are two.

    part: a function of a run that gives {row: number, or list of a number for each class}
    """
    first = next(iter(groups.values()))[0]
    columns = [[part(run) for run in group] for group in groups.values()]
    rows = [(title, "", [*groups] + ["difference"] * (len(groups) == 2))]
    for key, label in (ROWS | BY_CLASS).items():
        if key in ROWS and key in columns[0][0]:
            rows.append((label, "", cells([[n[key] for n in column] for column in columns])))
        elif key in columns[0][0]:
            rows.append((f"{label} per class", "labels", [""] * len(rows[0][2])))
            for k, name in enumerate(first.cfg.dataset_info["names"]):
                rows.append((f"  {name}", first.labels_per_class[k],
                             cells([[n[key][k] for n in column] for column in columns])))
    width = [max(map(len, texts)) + 2 for texts in zip(*(row[2] for row in rows), strict=True)]
    for label, count, texts in rows:
        print(f"{label:<26.26}{count:>7}" + "".join(
            f"{text:>{w}}" for text, w in zip(texts, width, strict=True)))


def cells(columns):
    """Texts of a row. columns: the numbers of each group's seeds"""
    means = [np.mean(values) for values in columns]
    texts = ["-" if mean != mean else f"{mean:.2f}" for mean in means]       # nan: never guessed
    for i, values in enumerate(columns):
        if len(values) > 1 and means[i] == means[i]:
            texts[i] += f" ± {np.std(values, ddof=1):.2f}"
    if len(means) == 2:
        texts.append(f"{means[1] - means[0]:+.2f}".replace("+nan", "-"))
    return texts


# Student's t, two-sided 95 %, for two to ten seeds; for more the last one is on the safe side
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def t_interval(differences):
    """Mean and half the width of its 95 % t interval, of at least two paired differences."""
    n, error = len(differences), np.std(differences, ddof=1) / len(differences) ** 0.5
    return np.mean(differences), T_95[min(n - 2, 8)] * error


def print_differences(ours, theirs):
    """bACC, GM and recalls of two methods, paired by seed: ours less theirs with its interval."""
    names, first = list(grouped([*ours, *theirs])), ours[0]
    a, b = ({run.cfg.seed: run.reported for run in runs} for runs in (ours, theirs))
    seeds = sorted(a.keys() & b.keys())
    if len(seeds) < 2 or len(a) < len(ours) or len(b) < len(theirs):
        raise UserError(f"--against: an interval needs two seeds or more that both methods have, "
                        f"each once, here are {len(seeds)}; name the runs of one method on each "
                        f"side, e.g. runs/a_s* --against runs/b_s*")
    print(f"{f'seeds {seeds[0]} to {seeds[-1]}: {len(seeds)}':<26.26}{'labels':>7}{names[0]:>20.19}"
          f"{names[-1]:>20.19}  difference, 95 % t interval")
    rows = [(label, "", lambda run, key=key: run[key]) for key, label in ROWS.items()
            if key in first.reported]
    rows += [(f"  {name}", first.labels_per_class[k], lambda run, k=k: run["recall"][k])
             for k, name in enumerate(first.cfg.dataset_info["names"])]
    for label, labels, number in rows:
        x, y = ([number(runs[seed]) for seed in seeds] for runs in (a, b))
        mean, half = t_interval([i - j for i, j in zip(x, y, strict=True)])
        print(f"{label:<26.26}{labels:>7}{np.mean(x):>20.2f}{np.mean(y):>20.2f}"
              f"{mean:>+9.2f} ± {half:.2f}{'  tied' if abs(mean) <= half else ''}")


def print_reported(runs, pseudo):
    for run in runs:
        at = run.history[-1]["iter"] if run.history else 0
        if at < run.cfg.iters:
            print(f"{run.folder}: not finished, evaluated up to {at} of {run.cfg.iters}")
    print_table(grouped(runs), lambda run: run.reported, "mean of the last 20")
    if pseudo:
        print_table(grouped(runs), lambda run: run.pseudo, "\npseudo-labels")


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


def predict_pictures(run, path, out, doubtful, skip_broken):
    """Write the two likeliest labels of each picture at `path`, by the run's averaged network, or
    list the `doubtful` pictures that one should look at."""
    info = run.cfg.dataset_info
    if out and not Path(out).parent.is_dir():
        raise UserError(f"--csv {out}: there is no folder {Path(out).parent}; make it, or name one")
    names, (files, images) = info["names"], readers.read_unknown(path, info["size"], skip_broken)
    p = evaluate.scores(run.predict, images, run.normalise).softmax(1).cpu()          # (N, K)
    top, guess = p.topk(2)                                                   # (N, 2) each
    rows = [(file, names[a], f"{p_a:.4f}", names[b], f"{p_b:.4f}") for file, (a, b), (p_a, p_b)
            in zip(files, guess.tolist(), top.tolist(), strict=True)]
    if out or not doubtful:
        file = sys.stdout if not out else open(out, "w", newline="", encoding="utf-8",
                                               errors="backslashreplace")    # names of any bytes
        header = ("file", "label", "probability", "second", "second_probability")
        csv.writer(file, lineterminator="\n").writerows([header, *rows])
        if out:
            file.close()
            print(f"{len(files)} predictions in {out}")
    if doubtful:
        print("least certain: probability, label, probability, second choice, file")
        for i in top[:, 0].argsort()[:doubtful].tolist():
            file, a, p_a, b, p_b = rows[i]
            print(f"  {p_a} {a:<20} {p_b} {b:<20} {file}")
        labels = [(i, names.index(Path(file).parent.name)) for i, file in enumerate(files)
                  if Path(file).parent.name in names]                        # <class>/picture
        wrong = sorted((p[i, k].item(), i) for i, k in labels if guess[i, 0] != k)
        if labels:
            print(f"label contradicted, {len(wrong)} of {len(labels)}: probability, label of the "
                  f"folder, probability, label predicted, file")
        for p_k, i in wrong[:doubtful]:
            file, a, p_a, *_ = rows[i]
            print(f"  {p_k:.4f} {Path(file).parent.name:<20} {p_a} {a:<20} {file}")
