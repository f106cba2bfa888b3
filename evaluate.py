"""Numbers from predictions: recall per class, bACC, GM, accuracy, confusion matrix.

    python evaluate.py runs/a runs/b         the runs side by side; a folder knows its own data
    python evaluate.py runs/a --test longtail --gamma_t 10         on an imbalanced test set
    python evaluate.py runs/a --predict PATH --csv out.csv         label pictures

bACC and GM are the arithmetic and the geometric mean of the recalls. No training, no plots.
"""
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch


@torch.no_grad()
def scores(predict, images, normalise, batch_size=500):
    """(T, K) of images (T, 3, H, W) uint8, in memory or on file.

    predict: (N, 3, H, W) -> scores (N, K), e.g. a model in eval mode.
    """
    return torch.cat([predict(normalise(x)) for x in images.split(batch_size)])


def confusion_matrix(predict, images, labels, num_classes, normalise, batch_size=500):
    """(K, K) counts, row = true class, column = predicted."""
    return count(labels, scores(predict, images, normalise, batch_size).argmax(1), num_classes)


def count(labels, predicted, num_classes):
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
    import data
    cfg, predict, judged = load_network(folder, device)
    dataset = data.load(cfg.dataset, cfg.data_dir, cfg.image_size)
    return cfg, dataset.to(device), predict, judged


def load_network(folder, device="cpu"):
    """(config, what predicts, evaluations that count): what can be had without the data."""
    import common
    import models
    folder = Path(folder)
    checkpoint = common.load_checkpoint(folder)
    if checkpoint is None:
        raise common.UserError(f"{folder} holds no run (there is no last.pt); name a folder that "
                               f"a training script wrote")
    cfg = SimpleNamespace(**checkpoint["config"])
    num_classes = len(checkpoint["ema"]["classifier.weight"])
    model = models.build(cfg.model, num_classes, cfg.bn_momentum, cfg.wrn_quirk)
    predict, judged = model, checkpoint["history"]
    if "method" in checkpoint:                        # a run of baselines/train.py
        from baselines.train import METHODS
        method = METHODS[cfg.base][cfg.method]
        method.heads(model)
        predict, judged = partial(method.predict, model), method.judged(judged, cfg)
    model.load_state_dict(checkpoint["ema"])
    model.to(device, memory_format=torch.channels_last).eval()
    return cfg, predict, judged


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
        raise data.DataError(f"--gamma_t {gamma:g} would leave a class without a test image, the "
                             f"smallest has {full}; choose a smaller one")
    if kind == "random":
        counts = data.rng(seed, "test counts").integers(counts[-1], full + 1, num_classes)
    return [i for m, n in zip(members, counts) for i in m[:n]]


def judge_on(folder, kind, gamma, seed):
    """(folder, {class name: test images}, metrics) of the last checkpoint on such a test set."""
    from augment import Normalise
    _, dataset, predict, _ = load_run(folder)
    index = choose_test(dataset.test_labels.numpy(), dataset.num_classes, kind, gamma, seed)
    predicted = scores(predict, dataset.test_images, Normalise(dataset.mean, dataset.std)).argmax(1)
    confusion = count(dataset.test_labels[index], predicted[index], dataset.num_classes)
    return folder, dict(zip(dataset.names, confusion.sum(1).tolist())), metrics(confusion)


def print_imbalanced(folders, kind, gamma, seed, as_json):
    from common import to_json
    judged = [judge_on(folder, kind, gamma, seed) for folder in folders]
    if as_json:
        return print(to_json({f: {"counts": counts} | m for f, counts, m in judged}))
    print(f"last checkpoint, {kind} test set: "
          + ", ".join(f"{name} {n}" for name, n in judged[0][1].items()))
    for folder, _, m in judged:
        print(f"bACC {m['bacc']:6.2f}  GM {m['gm']:6.2f}  ACC {m['acc']:6.2f}  {folder}")


def predict_pictures(folder, path, out):
    """Write file, label, probability of each picture at `path`, by the run's averaged network."""
    import csv
    import io
    import common
    import readers
    from augment import Normalise
    cfg, predict, _ = load_network(folder)
    if not hasattr(cfg, "facts"):
        raise common.UserError(f"the run in {folder} does not know its class names, it was made by "
                               f"an older version; train it again")
    files, images = readers.read_unknown(path, cfg.facts["size"])
    normalise = Normalise(cfg.facts["mean"], cfg.facts["std"])
    probability, label = scores(predict, images, normalise).softmax(1).max(1)
    text = io.StringIO(newline="")
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["file", "label", "probability"])
    rows.writerows([file, cfg.facts["names"][k], f"{p:.4f}"]
                   for file, k, p in zip(files, label.tolist(), probability.tolist()))
    if out is None:
        return print(text.getvalue(), end="")
    common.write(Path(out), lambda file: file.write(text.getvalue().encode()))
    print(f"{len(files)} predictions in {out}")


def main(argv=None):
    import common
    p = common.Parser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    p.add_argument("runs", nargs="+", help="run folders")
    p.add_argument("--json", action="store_true", help="the numbers as JSON instead of a table")
    p.add_argument("--test", choices=("longtail", "reversed", "random"),
                   help="the last checkpoints on an imbalanced test set")
    p.add_argument("--gamma_t", type=common.number(float, 1), default=10,
                   help="its imbalance (default: 10)")
    p.add_argument("--seed", type=common.number(int, 0), default=0,
                   help="which images are in it (default: 0)")
    p.add_argument("--predict", metavar="PATH", help="a picture, a folder of pictures, or an .npz "
                   "file with images x: a label and its probability for each")
    p.add_argument("--csv", metavar="FILE", help="where predictions go (default: the screen)")
    args = p.parse_args(argv)
    if args.predict:
        if len(args.runs) > 1:
            p.error("--predict takes one run at a time")
        return predict_pictures(args.runs[0], args.predict, args.csv)
    if args.test:
        return print_imbalanced(args.runs, args.test, args.gamma_t, args.seed, args.json)
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
