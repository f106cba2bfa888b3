"""Numbers from predictions: recall per class, bACC, GM, accuracy, confusion, pseudo-labels.

    python evaluate.py runs                  all runs below a folder, a line each
    python evaluate.py runs/a runs/b         the runs side by side; a folder knows its own data
    python evaluate.py runs/a_s*             seeds of one setting become mean and deviation
    python evaluate.py runs/a_s* --against runs/b_s*               differences, paired by seed
    python evaluate.py runs/a --pseudo       and how good the pseudo-labels are
    python evaluate.py runs/a --test longtail --gamma_t 10         on an imbalanced test set
    python evaluate.py runs/a --predict PATH > out.csv             label pictures
    python evaluate.py runs/a --predict PATH --doubtful 20         which of them to look at

bACC and GM are the arithmetic and the geometric mean of the recalls. Head, middle and tail are
thirds of the classes, ordered by the number of labeled images. No training, no plots.
"""
import re
from pathlib import Path
from statistics import fmean

import torch

import data
from support import UserError, config, exit_cleanly

LAST = 20                                             # evaluations whose mean is reported


@torch.no_grad()
def scores(predict, images, normalise, batch_size=250):
    """(T, K) of images (T, 3, H, W) uint8.

    predict: (N, 3, H, W) -> scores (N, K), e.g. a model in eval mode.
    """
    return torch.cat([predict(normalise(x)) for x in images.split(batch_size)])


def confusion_matrix(labels, predicted, num_classes):
    """(K, K) counts, row = true class, column = predicted, from labels (T,), predicted (T,)."""
    cells = torch.bincount(labels * num_classes + predicted, minlength=num_classes ** 2)
    return cells.reshape(num_classes, num_classes)


def metrics(confusion):
    """dict of bacc, gm, acc, recall and precision [K], in percent, of a confusion matrix (K, K)."""
    confusion = confusion.cpu().double()
    per_class, num_classes = confusion.sum(1), len(confusion)
    present = per_class > 0                           # a class without a test image has no recall
    recall = confusion.diagonal() / per_class
    # A class that is never hit would make the geometric mean 0 whatever the others do: by the
    # protocol its recall counts as 1 / (100 K).
    floored = recall.where(recall > 0, 1 / (100 * num_classes))
    return {"bacc": 100 * recall[present].mean().item(),
            "gm": 100 * floored[present].log().mean().exp().item(),
            "acc": 100 * (confusion.diagonal().sum() / per_class.sum()).item(),
            "recall": (100 * recall).tolist(),
            "precision": (100 * confusion.diagonal() / confusion.sum(0)).tolist()}


@torch.no_grad()
def bias_added(attractor, logits):
    """(T, K): what the attractor adds to the logits (T, K) of each image.

    Less its mean over the K logits: a constant added to all of them changes no probability.
    """
    delta = attractor(logits)
    return delta - delta.mean(1, keepdim=True)


def mean_by_class(values, labels):
    """(K, K) mean over the images of class `row` of values (T, K); NaN without an image."""
    return torch.stack([values[labels == k].mean(0) for k in range(values.shape[1])])


def describe_bias(added, labels):
    """What `bias_added` (T, K) says in K + 1 numbers, every class of images counting alike.

    bias_k: the mean of column k. bias_varies: which share of the sum of squares differs from image
    to image; 0 if one and the same vector is added to all.
    """
    mean = mean_by_class(added, labels).nanmean(0)                             # (K,)
    square = mean_by_class(added ** 2, labels).nanmean(0).sum()
    return {f"bias_{k}": value for k, value in enumerate(mean.tolist())} | {
        "bias_varies": (1 - (mean ** 2).sum() / square).item()}


def on_test_set(predict, dataset, normalise, attractor=None):
    """`metrics` of a model on the test images of a data.Dataset, as columns of log.csv.

    With an attractor also what it adds to the logits.
    """
    logits, labels = scores(predict, dataset.test_images, normalise), dataset.test_labels
    result = metrics(confusion_matrix(labels, logits.argmax(1), dataset.num_classes))
    columns = {key: result[key] for key in ("bacc", "gm", "acc")}
    columns |= {f"{key}_{k}": value for key in ("recall", "precision")
                for k, value in enumerate(result[key])}
    if attractor is not None:
        columns |= describe_bias(bias_added(attractor, logits), labels)
    return columns


def mean_of_last(history):
    """`metrics`, and what the attractor adds, averaged over the last evaluations (rows of log.csv):
    the reported numbers. The mean of the GMs, not the GM of the mean recalls."""
    last = history[-LAST:]
    means = {key: fmean(row[key] for row in last) for key in last[0]}
    by_class = {name: [mean for key, mean in means.items() if re.fullmatch(rf"{name}_\d+", key)]
                for name in ("recall", "precision", "bias")}
    return {key: means[key] for key in ("bacc", "gm", "acc")} | {
        name: values for name, values in by_class.items() if values}


def thirds(recall, counts):
    """Mean recall of the classes with the most (head), middling and fewest (tail) labeled images.

    recall, counts [K]. Head and tail have K/3 classes, rounded; the middle has the rest. Ties go
    by class number. A class without a test image is left out.
    """
    order, n = sorted(range(len(counts)), key=lambda k: -counts[k]), round(len(counts) / 3)
    ordered = torch.tensor(recall, dtype=torch.float64)[order]                 # (K,)
    parts = {"head": ordered[:n], "middle": ordered[n:-n], "tail": ordered[-n:]}
    return {name: part.nanmean().item() for name, part in parts.items()}


def pseudo_labels(logits, labels, tau):
    """How good the pseudo-labels of logits (U, K) are, for images whose true labels (U,) we know.

    In percent: `acc`, `recall` and `precision` of all of them; which share reaches tau, of all
    images (`kept`) and of each true class (`kept_of`); `acc_kept`, `precision_kept` of these.
    """
    confidence, guess = logits.softmax(1).max(1)                               # (U,), (U,)
    kept, num_classes = confidence >= tau, logits.shape[1]
    every, sure = (confusion_matrix(labels[i], guess[i], num_classes).cpu().double()  # (K, K)
                   for i in (torch.ones_like(kept), kept))
    shares = {"acc": every.diagonal().sum() / every.sum(), "kept": sure.sum() / every.sum(),
              "acc_kept": sure.diagonal().sum() / sure.sum(),
              "recall": every.diagonal() / every.sum(1),
              "precision": every.diagonal() / every.sum(0), "kept_of": sure.sum(1) / every.sum(1),
              "precision_kept": sure.diagonal() / sure.sum(0),
              "confusion": every / every.sum(1, keepdim=True)}
    return {key: (100 * share).tolist() for key, share in shares.items()}


# ---------------------------------------------------------------------------------------------
# imbalanced test sets


def choose_test(labels, num_classes, kind, gamma):
    """Indices of an imbalanced test set. labels (T,): of all test images.

    longtail, reversed, random: the paper's Test-1, -2, -3. The last is not defined there; here
    class counts are uniform between 1/gamma of the images and all of them.
    """
    members = [data.rng(0, "test set", k).permutation((labels == k).nonzero()[0])
               for k in range(num_classes)]
    full = min(len(m) for m in members)
    if not 1 <= gamma <= full:
        raise UserError(f"--gamma_t {gamma:g}: each class must keep a test image, the smallest has "
                        f"{full}; choose from 1 to that, or leave --test out")
    counts = data.class_counts(full, num_classes, gamma, reverse=kind == "reversed")
    if kind == "random":
        counts = data.rng(0, "test counts").integers(counts[-1], full + 1, num_classes)
    return [i for m, n in zip(members, counts, strict=True) for i in m[:n]]


def on_imbalanced(run, kind, gamma):
    """(test images per class [K], metrics) of a support.finished.FinishedRun, its last checkpoint,
    on what choose_test chooses."""
    labels, K = run.dataset.test_labels, run.dataset.num_classes
    index = choose_test(labels.cpu().numpy(), K, kind, gamma)
    confusion = confusion_matrix(labels[index], run.test_scores.argmax(1)[index], K)
    return confusion.sum(1).tolist(), metrics(confusion)


# ---------------------------------------------------------------------------------------------
# the command line


def main(argv=None):
    from scripts import report  # here: both import this file
    from support.finished import FinishedRun
    p = config.Parser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    add = p.add_argument
    add("runs", nargs="+", help="run folders; seeds of one setting are averaged in one column")
    add("--against", nargs="+", default=[], metavar="RUN", help="other runs, with the same seeds: "
        "differences with their 95 %% t intervals")
    add("--pseudo", action="store_true", help="also the pseudo-labels of the unlabeled images")
    add("--test", choices=("longtail", "reversed", "random"),
        help="the last checkpoints on an imbalanced test set")
    add("--gamma_t", type=float, default=10.0, help="its imbalance (default: 10)")
    add("--predict", metavar="PATH", help="a picture, a folder of pictures, or an .npz file with "
        "images x: the two likeliest labels of each")
    add("--doubtful", type=int, default=0, metavar="N", help="of these pictures, list the N least "
        "certain, and, in folders that are named like classes, the N most contradicted")
    add("--skip_broken", action="store_true", help="leave out pictures that cannot be read")
    args = p.parse_args(argv)
    if len(args.runs) == 1 and not (Path(args.runs[0]) / "last.pt").exists():
        return report.list_runs(args.runs[0])
    runs = [FinishedRun(folder) for folder in [*args.against, *args.runs]]
    if args.predict or args.doubtful:
        report.predict_pictures(runs, args.predict, args.doubtful, args.skip_broken)
    elif args.test:
        report.grouped(runs)                          # they must have the same classes
        for run in runs:
            counts, result = on_imbalanced(run, args.test, args.gamma_t)
            print(f"bACC {result['bacc']:6.2f}  GM {result['gm']:6.2f}  ACC {result['acc']:6.2f}  "
                  f"{run.folder}")
        print(f"test images per class: {', '.join(map(str, counts))}")
    else:
        report.print_reported(runs, args.pseudo, paired=bool(args.against))


if __name__ == "__main__":
    exit_cleanly(main)
