"""Numbers from predictions: recall per class, bACC, GM, accuracy, confusion, pseudo-labels.

    python evaluate.py runs                  all runs below a folder, a line each
    python evaluate.py runs/a runs/b         the runs side by side; a folder knows its own data
    python evaluate.py runs/a_s0 runs/a_s1   seeds of one setting become mean and deviation
    python evaluate.py runs/a --pseudo       and how good the pseudo-labels are
    python evaluate.py runs/a --test longtail --gamma_t 10         on an imbalanced test set
    python evaluate.py runs/a --predict PATH --csv out.csv         label pictures

bACC and GM are the arithmetic and the geometric mean of the recalls. Head, middle and tail are
thirds of the classes, ordered by the number of labeled images. First the metrics, then the command
line; what it prints is made in support/report.py. No training, no plots.
"""
import argparse
import math

import torch

from support import exit_cleanly


def average(values):
    return sum(values) / len(values) if values else math.nan


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
    """dict of bacc, gm, acc and recall [K], in percent, from a confusion matrix (K, K)."""
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
            "recall": (100 * recall).tolist()}


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
    columns |= {f"recall_{k}": value for k, value in enumerate(result["recall"])}
    if attractor is not None:
        columns |= describe_bias(bias_added(attractor, logits), labels)
    return columns


def mean_of_last(history, n=20):
    """`metrics` averaged over the last n evaluations (rows of log.csv): the reported number.

    The mean of the GMs, not the GM of the mean recalls.
    """
    last = history[-n:]
    means = {key: average([row[key] for row in last])
             for key in last[0] if key in ("bacc", "gm", "acc") or key.startswith("recall_")}
    recall = [value for key, value in means.items() if key.startswith("recall_")]
    return {key: means[key] for key in ("bacc", "gm", "acc")} | {"recall": recall}


def thirds(recall, counts):
    """Mean recall of the classes with the most (head), middling and fewest (tail) labeled images.

    recall, counts [K]. Head and tail have K/3 classes, rounded; the middle has the rest. Ties go
    by class number. A class without a test image is left out.
    """
    order, n = sorted(range(len(counts)), key=lambda k: -counts[k]), round(len(counts) / 3)
    parts = {"head": order[:n], "middle": order[n:-n], "tail": order[-n:]}
    return {name: average([recall[k] for k in part if not math.isnan(recall[k])])
            for name, part in parts.items()}


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
