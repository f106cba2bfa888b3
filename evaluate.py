"""Numbers from predictions: recall per class, bACC, GM, accuracy, confusion matrix.

    python evaluate.py runs/a runs/b         the runs side by side; each folder knows its own data

bACC and GM are the arithmetic and the geometric mean of the recalls. No training, no plots.
"""
import argparse
import json
import sys
from pathlib import Path

import torch


@torch.no_grad()
def confusion_matrix(model, images, labels, num_classes, normalise, batch_size=500):
    """(K, K) counts, row = true class, column = predicted. images (T, 3, H, W) uint8."""
    model.eval()
    predicted = torch.cat([model(normalise(x)).argmax(1) for x in images.split(batch_size)])
    return torch.bincount(labels * num_classes + predicted,
                          minlength=num_classes ** 2).reshape(num_classes, num_classes)


def metrics(confusion):
    """dict of bacc, gm, acc and recall [K], in percent, from a confusion matrix (K, K)."""
    confusion = confusion.double().cpu()
    support, num_classes = confusion.sum(1), len(confusion)
    present = support > 0                                   # a class without a test image is left out
    recall = confusion.diagonal() / support.clamp_min(1)
    # One class never hit would make the geometric mean 0 whatever the others do: by the protocol
    # such a recall counts as 1 / (100 K).
    floored = recall.where(recall > 0, 1 / (100 * num_classes))[present]
    return {"bacc": 100 * recall[present].mean().item(),
            "gm": 100 * floored.log().mean().exp().item(),
            "acc": 100 * (confusion.diagonal().sum() / support.sum()).item(),
            "recall": (100 * recall).tolist()}


def columns(result):
    """`metrics` as flat columns of log.csv."""
    return ({key: result[key] for key in ("bacc", "gm", "acc")}
            | {f"recall_{k}": r for k, r in enumerate(result["recall"])})
