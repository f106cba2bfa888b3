"""Numbers from predictions: recall per class, bACC, GM, accuracy, confusion matrix.

    python evaluate.py runs/a runs/b         the runs side by side; a folder knows its own data

bACC and GM are the arithmetic and the geometric mean of the recalls. No training, no plots.
"""
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch


@torch.no_grad()
def confusion_matrix(predict, images, labels, num_classes, normalise, batch_size=500):
    """(K, K) counts, row = true class, column = predicted. images (T, 3, H, W) uint8.

    predict: (N, 3, H, W) -> scores (N, K), e.g. a model in eval mode.
    """
    predicted = torch.cat([predict(normalise(x)).argmax(1) for x in images.split(batch_size)])
    cells = torch.bincount(labels * num_classes + predicted, minlength=num_classes ** 2)
    return cells.reshape(num_classes, num_classes)


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


def on_test_set(predict, dataset, normalise):
    """`metrics` of a model on the test images of a data.Dataset."""
    return metrics(confusion_matrix(predict, dataset.test_images, dataset.test_labels,
                                    dataset.num_classes, normalise))


def columns(result):
    """`metrics` as flat columns of log.csv."""
    return ({key: result[key] for key in ("bacc", "gm", "acc")}
            | {f"recall_{k}": r for k, r in enumerate(result["recall"])})


def mean_of_last(history, n=20):
    """`metrics` averaged over the last n evaluations (rows of log.csv): the reported number.

    The mean of the GMs, not the GM of the mean recalls.
    """
    last = history[-n:]
    mean = {key: sum(row[key] for row in last) / len(last)
            for key in last[0] if key in ("bacc", "gm", "acc") or key.startswith("recall_")}
    recall = [value for key, value in mean.items() if key.startswith("recall_")]
    return {key: mean[key] for key in ("bacc", "gm", "acc")} | {"recall": recall}


# ---------------------------------------------------------------------------------------------
# finished runs; the siblings are imported here, so that the numbers above need torch alone


def load_run(folder, device="cpu"):
    """(config, dataset, what predicts, evaluations that count) of a run folder."""
    import common
    import data
    import models
    folder = Path(folder)
    checkpoint = common.load_checkpoint(folder)
    if checkpoint is None:
        raise common.UserError(f"{folder} holds no run (there is no last.pt); name a folder that "
                               f"a training script wrote")
    cfg = SimpleNamespace(**checkpoint["config"])
    dataset = data.load(cfg.dataset, cfg.data_dir, cfg.image_size)
    model = models.build(cfg.model, dataset.num_classes, cfg.bn_momentum, cfg.wrn_quirk)
    predict, judged = model, checkpoint["history"]
    if "method" in checkpoint:                        # a run of baselines/train.py
        from baselines.train import METHODS
        method = METHODS[cfg.base][cfg.method]
        method.heads(model)
        predict, judged = partial(method.predict, model), method.judged(judged, cfg)
    model.load_state_dict(checkpoint["ema"])
    model.to(device, memory_format=torch.channels_last).eval()
    return cfg, dataset.to(device), predict, judged


def judge(folder):
    """(folder, class names, metrics now, metrics over the last 20 evaluations) of a run folder."""
    from augment import Normalise
    cfg, dataset, predict, judged = load_run(folder)
    now = on_test_set(predict, dataset, Normalise(dataset.mean, dataset.std))
    return str(folder), dataset.names, now, mean_of_last(judged) if judged else now


def table(judged):
    """Lines of text: a column per run, the reported means first, then the last checkpoint."""
    names = judged[0][1]
    titles = [Path(folder).name for folder, *_ in judged]
    rows = [("", titles)]
    for heading, i in (("mean of the last 20 evaluations", 3), ("last checkpoint", 2)):
        rows.append((heading, [""] * len(judged)))
        rows += [(f"  {label}", [f"{run[i][key]:.2f}" for run in judged])
                 for label, key in (("bACC", "bacc"), ("GM", "gm"), ("accuracy", "acc"))]
        rows += [(f"  recall {name}", [f"{run[i]['recall'][k]:.1f}" for run in judged])
                 for k, name in enumerate(names)]
    width = [max(len(title), 8) + 2 for title in titles]
    return [f"{label:<32}" + "".join(f"{c:>{w}}" for c, w in zip(cells, width))
            for label, cells in rows]


def main(argv=None):
    import common
    p = common.Parser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    p.add_argument("runs", nargs="+", help="run folders")
    p.add_argument("--json", action="store_true", help="the numbers as JSON instead of a table")
    args = p.parse_args(argv)
    judged = [judge(folder) for folder in args.runs]
    if len({tuple(names) for _, names, *_ in judged}) > 1:
        p.error("the runs have different classes and cannot stand in one table; name them apart")
    if args.json:
        print(common.to_json({folder: {"classes": names, "last": now, "mean_of_last_20": mean}
                              for folder, names, now, mean in judged}))
    else:
        print("\n".join(table(judged)))


if __name__ == "__main__":
    from common import exit_cleanly
    from data import DataError
    exit_cleanly(main, DataError)
