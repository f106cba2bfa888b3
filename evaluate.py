"""Numbers from predictions: recall per class, bACC, GM, accuracy, confusion, pseudo-labels.

    python evaluate.py runs/a runs/b         the runs side by side; a folder knows its own data
    python evaluate.py runs/a_s0 runs/a_s1   seeds of one setting become mean and deviation
    python evaluate.py runs/a --pseudo       and how good the pseudo-labels are
    python evaluate.py runs/a --test longtail --gamma_t 10         on an imbalanced test set
    python evaluate.py runs/a --predict PATH --csv out.csv         label pictures

bACC and GM are the arithmetic and the geometric mean of the recalls. Head, middle and tail are
thirds of the classes, ordered by the number of labeled images. No training, no plots.
"""
import csv
import io
import math
from pathlib import Path

import torch


@torch.no_grad()
def scores(predict, images, normalise, batch_size=250):
    """(T, K) of images (T, 3, H, W) uint8, in memory or on file.

    predict: (N, 3, H, W) -> scores (N, K), e.g. a model in eval mode.
    """
    return torch.cat([predict(normalise(x)) for x in images.split(batch_size)])


def count(labels, predicted, num_classes):
    """(K, K) counts, row = true class, column = predicted, from labels (T,), predicted (T,)."""
    cells = torch.bincount(labels * num_classes + predicted, minlength=num_classes ** 2)
    return cells.reshape(num_classes, num_classes)


def confusion_matrix(predict, images, labels, num_classes, normalise, batch_size=500):
    """(K, K) counts of the class with the highest score."""
    predicted = scores(predict, images, normalise, batch_size).argmax(1)
    return count(labels, predicted, num_classes)


def metrics(confusion):
    """dict of bacc, gm, acc and recall [K], in percent, from a confusion matrix (K, K)."""
    confusion = confusion.cpu().double()           # in this order: mps has no float64
    support, num_classes = confusion.sum(1), len(confusion)
    present = support > 0                             # a class without a test image has no recall
    recall = confusion.diagonal() / support
    # A class that is never hit would make the geometric mean 0 whatever the others do: by the
    # protocol its recall counts as 1 / (100 K).
    floored = recall.where(recall > 0, 1 / (100 * num_classes))
    return {"bacc": 100 * recall[present].mean().item(),
            "gm": 100 * floored[present].log().mean().exp().item(),
            "acc": 100 * (confusion.diagonal().sum() / support.sum()).item(),
            "recall": (100 * recall).tolist()}


@torch.no_grad()
def bias_added(attractor, logits, labels):
    """(K, K): what the attractor adds, on average over images of class `row`, to logit `column`.

    Less its mean over the K logits: a constant added to all of them changes no probability.
    """
    delta = attractor(logits)                                                  # (T, K)
    delta = delta - delta.mean(1, keepdim=True)
    return torch.stack([delta[labels == k].mean(0) for k in range(delta.shape[1])])


def on_test_set(predict, dataset, normalise, attractor=None):
    """`metrics` of a model on the test images of a data.Dataset.

    With an attractor also `bias` [K]: what it adds to the logit of the right answer, by class.
    """
    logits, labels = scores(predict, dataset.test_images, normalise), dataset.test_labels
    result = metrics(count(labels, logits.argmax(1), dataset.num_classes))
    if attractor is not None:
        result["bias"] = bias_added(attractor, logits, labels).diagonal().tolist()
    return result


def columns(result):
    """`on_test_set` as flat columns of log.csv."""
    return ({key: result[key] for key in ("bacc", "gm", "acc")}
            | {f"{key}_{k}": value for key in ("recall", "bias")
               for k, value in enumerate(result.get(key, []))})


def mean_of_last(history, n=20):
    """`metrics` averaged over the last n evaluations (rows of log.csv): the reported number.

    The mean of the GMs, not the GM of the mean recalls.
    """
    last = history[-n:]
    mean = {key: sum(row[key] for row in last) / len(last)
            for key in last[0] if key in ("bacc", "gm", "acc") or key.startswith("recall_")}
    recall = [value for key, value in mean.items() if key.startswith("recall_")]
    return {key: mean[key] for key in ("bacc", "gm", "acc")} | {"recall": recall}


def mean(values):
    return sum(values) / len(values) if values else math.nan


def thirds(recall, counts):
    """Mean recall of the classes with the most, the fewest and the middling labeled images.

    recall, counts [K]. Head and tail have K/3 classes, rounded; the middle has the rest. Ties go
    by class number. A class without a test image is left out.
    """
    order, n = sorted(range(len(counts)), key=lambda k: -counts[k]), round(len(counts) / 3)
    parts = {"head": order[:n], "middle": order[n:-n], "tail": order[-n:]}
    return {name: mean([recall[k] for k in part if not math.isnan(recall[k])])
            for name, part in parts.items()}


def pseudo_labels(logits, labels, tau):
    """How good the guesses are that logits (U, K) make of images whose true labels (U,) we know.

    In percent: `acc`, `recall` and `precision` of all guesses, `kept` (as sure as tau) of all
    images and `kept_of` each true class, `acc_kept` and `precision_kept` of those that are kept.
    """
    confidence, guess = logits.softmax(1).max(1)                               # (U,), (U,)
    kept, num_classes = confidence >= tau, logits.shape[1]
    every, sure = (count(labels[i], guess[i], num_classes).cpu().double()      # (K, K) each
                   for i in (torch.ones_like(kept), kept))
    shares = {"acc": every.diagonal().sum() / every.sum(), "kept": sure.sum() / every.sum(),
              "acc_kept": sure.diagonal().sum() / sure.sum(),
              "recall": every.diagonal() / every.sum(1),
              "precision": every.diagonal() / every.sum(0), "kept_of": sure.sum(1) / every.sum(1),
              "precision_kept": sure.diagonal() / sure.sum(0),
              "confusion": every / every.sum(1, keepdim=True)}
    return {key: (100 * share).tolist() for key, share in shares.items()}


# ---------------------------------------------------------------------------------------------
# tables; finished.py is imported where it is needed, so that the numbers above need torch alone

SECTIONS = {"mean_of_last_20": "mean of the last 20 evaluations", "last": "last checkpoint",
            "pseudo": "pseudo-labels, last checkpoint"}
MEASURES = {"bacc": "bACC", "gm": "GM", "acc": "accuracy", "head": "recall of the head",
            "middle": "recall of the middle", "tail": "recall of the tail", "kept": "kept by tau",
            "acc_kept": "accuracy of the kept", "recall": "recall", "precision": "precision",
            "kept_of": "kept of", "precision_kept": "precision, kept"}


def rows_of(numbers, names):
    """Run.numbers -> {(section, measure): number}: the rows of every table."""
    rows = {}
    for section, heading in SECTIONS.items():
        for key, label in MEASURES.items():
            value = numbers.get(section, {}).get(key)
            if isinstance(value, list):
                rows |= {(heading, f"{label} {name}"): v for name, v in zip(names, value)}
            elif value is not None:
                rows[heading, label] = value
    return rows


def cell(value, spread):
    if math.isnan(value):                             # e.g. the precision of a class never guessed
        return "-"
    return f"{value:.2f}" if spread is None else f"{value:.2f} ± {spread:.2f}"


def table(groups, part, names, markdown=False):
    """Lines of text: a column per group, a row per measure, sections below one another."""
    means = [rows_of(group.mean(part), names) for group in groups]
    spreads = [rows_of(group.deviation(part) or {}, names) for group in groups]
    rows, section = [["", *(group.path.name for group in groups)]], None
    for row in means[0]:
        if row[0] != section:
            section = row[0]
            rows.append([section, *[""] * len(groups)])
        rows.append([f"  {row[1]}", *(cell(m[row], s.get(row)) for m, s in zip(means, spreads))])
    if markdown:
        rule = "|---|" + "--:|" * len(groups)
        lines = ["| " + " | ".join(c.strip() for c in row) + " |" for row in rows]
        return [lines[0], rule, *lines[1:]]
    width = [max(len(row[i]) for row in rows) + 2 for i in range(1, len(rows[0]))]
    return [f"{row[0]:<33}" + "".join(f"{c:>{w}}" for c, w in zip(row[1:], width)) for row in rows]


def confusion_lines(group, names):
    """Lines of text: of each true class, how many percent are called what."""
    short = [name[:6] for name in names]
    lines = ["", f"{group.path.name}: percent of a true class (row) that is called (column)"]
    lines.append(" " * 12 + "".join(f"{name:>7}" for name in short))
    for name, row in zip(names, group.mean(lambda run: run.pseudo)["confusion"]):
        lines.append(f"{name[:12]:<12}" + "".join(f"{value:7.1f}" for value in row))
    return lines


def write_csv(path, groups, part, names):
    """The rows of the table; a column per group, and one for its deviation where it has one."""
    columns = {"section": {}, "measure": {}}
    for group in groups:
        columns[group.path.name] = rows_of(group.mean(part), names)
        if len(group.runs) > 1:
            columns[f"{group.path.name} std"] = rows_of(group.deviation(part), names)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for row in rows_of(groups[0].mean(part), names):
            writer.writerow([*row, *(f"{c[row]:.6g}" for c in list(columns.values())[2:])])


def as_dict(groups, part, names):
    return {str(group.path): {"runs": [str(run.folder) for run in group.runs], "classes": names}
            | group.mean(part) | ({"std": group.deviation(part)} if len(group.runs) > 1 else {})
            for group in groups}


# ---------------------------------------------------------------------------------------------
# imbalanced test sets, and pictures without a label


def choose_test(labels, num_classes, kind, gamma, seed):
    """Indices of a test set with unequal classes. labels (T,) array of a test set with equal ones.

    longtail, reversed, random: the paper's Test-1, -2, -3; of the last it says no more than the
    name, here class counts are uniform between 1/gamma of the images and all of them.
    """
    import data
    members = [data.rng(seed, "test set", k).permutation((labels == k).nonzero()[0])
               for k in range(num_classes)]
    full = min(len(m) for m in members)
    counts = data.class_counts(full, num_classes, gamma, reverse=kind == "reversed")
    if min(counts) < 1:
        raise data.DataError(f"--gamma_t {gamma:g}: a class would be left without a test image, "
                             f"the smallest has {full}; choose a smaller one")
    if kind == "random":
        counts = data.rng(seed, "test counts").integers(counts[-1], full + 1, num_classes)
    return [i for m, n in zip(members, counts) for i in m[:n]]


def judge_on(folder, kind, gamma, seed):
    """(folder, {class name: test images}, metrics) of the last checkpoint on such a test set."""
    from finished import load_run
    run = load_run(folder)
    dataset, predicted = run.dataset, run.test_scores.argmax(1)
    index = choose_test(dataset.test_labels.numpy(), dataset.num_classes, kind, gamma, seed)
    confusion = count(dataset.test_labels[index], predicted[index], dataset.num_classes)
    return folder, dict(zip(dataset.names, confusion.sum(1).tolist())), metrics(confusion)


def print_imbalanced(folders, kind, gamma, seed, as_json):
    from run_folder import to_json
    judged = [judge_on(folder, kind, gamma, seed) for folder in folders]
    if as_json:
        return print(to_json({f: {"counts": counts} | m for f, counts, m in judged}))
    print(f"last checkpoint, {kind} test set: "
          + ", ".join(f"{name} {n}" for name, n in judged[0][1].items()))
    for folder, _, m in judged:
        print(f"bACC {m['bacc']:6.2f}  GM {m['gm']:6.2f}  ACC {m['acc']:6.2f}  {folder}")


def predict_pictures(folder, path, out):
    """Write file, label, probability of each picture at `path`, by the run's averaged network."""
    import readers
    import run_folder
    import settings
    from augment import Normalise
    from finished import load_run
    run = load_run(folder)
    cfg = run.cfg
    if not hasattr(cfg, "facts"):
        raise settings.UserError(f"the run in {folder} does not know its class names, it was made "
                                 f"by an older version; train it again")
    files, images = readers.read_unknown(path, cfg.facts["size"])
    normalise = Normalise(cfg.facts["mean"], cfg.facts["std"])
    probability, label = scores(run.predict, images, normalise).softmax(1).max(1)
    text = io.StringIO(newline="")
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["file", "label", "probability"])
    rows.writerows([file, cfg.facts["names"][k], f"{p:.4f}"]
                   for file, k, p in zip(files, label.tolist(), probability.tolist()))
    if out is None:
        return print(text.getvalue(), end="")
    run_folder.write(Path(out), text.getvalue().encode())
    print(f"{len(files)} predictions in {out}")


def main(argv=None):
    import finished
    import run_folder
    import settings
    p = settings.Parser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    add = p.add_argument
    add("runs", nargs="+", help="run folders; seeds of one setting are folded into one column")
    add("--pseudo", action="store_true", help="also judge the pseudo-labels of the unlabeled set, "
        "made by the EMA model from images without augmentation (needs their true labels)")
    add("--json", action="store_true", help="the numbers as JSON instead of a table")
    add("--markdown", action="store_true", help="the table in Markdown")
    add("--test", choices=("longtail", "reversed", "random"),
        help="the last checkpoints on an imbalanced test set")
    add("--gamma_t", type=settings.number(float, 1), default=10, help="its imbalance (default: 10)")
    add("--seed", type=settings.number(int, 0), default=0,
        help="which images are in it (default: 0)")
    add("--predict", metavar="PATH", help="a picture, a folder of pictures, or an .npz file with "
        "images x: a label and its probability for each")
    add("--csv", metavar="FILE", help="write the table to a file as well; with --predict the "
        "predictions (default: the screen)")
    args = p.parse_args(argv)
    if args.predict:
        if len(args.runs) > 1:
            p.error("--predict takes one run at a time")
        return predict_pictures(args.runs[0], args.predict, args.csv)
    if args.test:
        return print_imbalanced(args.runs, args.test, args.gamma_t, args.seed, args.json)
    groups, part = finished.load_groups(args.runs), lambda run: run.numbers(args.pseudo)
    names = groups[0].runs[0].dataset.names
    if args.csv:
        write_csv(args.csv, groups, part, names)
    if args.json:
        print(run_folder.to_json(as_dict(groups, part, names)))
    else:
        print("\n".join(table(groups, part, names, args.markdown)))
    if args.pseudo and not (args.json or args.markdown):
        print("\n".join(line for group in groups for line in confusion_lines(group, names)))


if __name__ == "__main__":
    from data import DataError
    from settings import exit_cleanly
    exit_cleanly(main, DataError)
