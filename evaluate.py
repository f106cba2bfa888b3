"""Numbers from predictions: recall per class, bACC, GM, accuracy, confusion, pseudo-labels.

    python evaluate.py runs/a runs/b         the runs side by side; a folder knows its own data
    python evaluate.py runs/a_s0 runs/a_s1   seeds of one setting become mean and deviation
    python evaluate.py runs/b_s0 runs/b_s1 --unfinished            even if they are not finished
    python evaluate.py runs/a --pseudo       and how good the pseudo-labels are
    python evaluate.py runs/a --test longtail --gamma_t 10         on an imbalanced test set
    python evaluate.py runs/a --predict PATH --csv out.csv         label pictures

bACC and GM are the arithmetic and the geometric mean of the recalls. Head, middle and tail are
thirds of the classes, ordered by the number of labeled images. No training, no plots; tables and
means over seeds are in support/report.py.
"""
import math
from argparse import Namespace
from functools import cached_property, lru_cache, partial
from pathlib import Path

# before torch, see support/__init__.py
from support import UserError, checkpoint, checks, cli, readers, report  # isort: skip

import numpy as np
import torch

import data
import models
from attractor import build_attractor
from baselines.methods import METHODS
from support.augment import Normalise

# ---------------------------------------------------------------------------------------------
# metrics


@torch.no_grad()
def scores(predict, images, normalise, batch_size=250):
    """(T, K) of images (T, 3, H, W) uint8, in memory or on file.

    predict: (N, 3, H, W) -> scores (N, K), e.g. a model in eval mode.
    """
    return torch.cat([predict(normalise(x)) for x in images.split(batch_size)])


def confusion_matrix(labels, predicted, num_classes):
    """(K, K) counts, row = true class, column = predicted, from labels (T,), predicted (T,)."""
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


def mean_of_last(history, n=report.LAST):
    """`metrics` averaged over the last n evaluations (rows of log.csv): the reported number.

    The mean of the GMs, not the GM of the mean recalls.
    """
    last = history[-n:]
    means = {key: report.average([row[key] for row in last])
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
    return {name: report.average([recall[k] for k in part if not math.isnan(recall[k])])
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


# ---------------------------------------------------------------------------------------------
# finished runs


@lru_cache(2)                                        # runs side by side mostly share their data
def load_data(name, data_dir, image_size, cwd):
    return data.load(name, data_dir, image_size, download=False, cwd=cwd)


def load_run(folder, device="cpu"):
    """The FinishedRun of a folder that a training script wrote."""
    folder = Path(folder)
    state = checkpoint.load_checkpoint(folder)
    if state is None:
        raise UserError(f"{folder} holds no run (there is no last.pt); name a folder that a "
                        f"training script wrote")
    cfg = Namespace(**checks.saved_flags(state, folder, METHODS))
    num_classes = len(cfg.dataset_info["names"])
    model = models.build(cfg.model, num_classes, cfg.bn_momentum, cfg.wrn_quirk)
    predict, judged, attractor = model, state["history"], None
    if "method" in state:                             # a run of baselines/train.py
        method = METHODS[cfg.base][cfg.method]
        method.heads(model)
        predict, judged = partial(method.predict, model), method.judged(judged, cfg)
    elif cfg.method != "none":
        attractor = build_attractor(cfg, torch.ones(num_classes)).to(device)     # then restored
    checkpoint.load_part(folder, state, "ema", model)
    if attractor is not None:
        checkpoint.load_part(folder, state, "attractor", attractor)
    model.to(device, memory_format=torch.channels_last).eval()
    return FinishedRun(folder, cfg, state["history"], judged, model,
                       checks.finite(predict, folder), attractor, device)


class FinishedRun:
    """A run as its last checkpoint left it; what takes a pass over images is computed once."""

    def __init__(self, folder, cfg, history, judged, model, predict, attractor, device):
        self.folder, self.cfg, self.device = folder, cfg, device
        self.history, self.judged = history, judged   # all evaluations, those that count
        self.model, self.predict, self.attractor = model, predict, attractor   # model: the EMA

    @cached_property
    def dataset(self):
        cfg = self.cfg
        loaded = load_data(cfg.dataset, cfg.data_dir, cfg.image_size, cfg.cwd)
        checkpoint.check_data(vars(cfg), loaded.info, self.folder)
        return loaded.to(self.device)

    @cached_property
    def split(self):
        return data.split(self.dataset, self.cfg)     # indices of labeled, of unlabeled images

    @cached_property
    def normalise(self):
        info = self.cfg.dataset_info                  # not self.dataset: --predict has none
        return Normalise(info["mean"], info["std"], self.device)

    @cached_property
    def test_scores(self):
        return scores(self.predict, self.dataset.test_images, self.normalise)         # (T, K)

    def on_training_images(self, network, index):
        """What `network` makes of training images, seen without augmentation. (N,) -> (N, ..)"""
        chunks = np.array_split(index, -(-len(index) // 500))      # they may be many, or on file
        return torch.cat([scores(network, self.dataset.take(i)[0], self.normalise)
                          for i in chunks])

    @cached_property
    def last(self):
        """The last checkpoint on the test set; shares of classes in percent."""
        confusion = confusion_matrix(self.dataset.test_labels, self.test_scores.argmax(1),
                                     self.dataset.num_classes)
        result = metrics(confusion)
        return result | thirds(result["recall"], self.dataset.count(self.split[0]).tolist()) | {
            "predicted": (100 * self.test_scores.softmax(1).mean(0)).tolist(),        # [K]
            "confusion": (100 * confusion / confusion.sum(1, keepdim=True)).tolist()}  # [K][K]

    @cached_property
    def reported(self):
        """The mean of the last 20 evaluations: the number that the tables show."""
        if not self.judged:                           # none yet that counts
            return {key: self.last[key] for key in report.REPORTED}
        result = mean_of_last(self.judged)
        return result | thirds(result["recall"], self.dataset.count(self.split[0]).tolist())

    @cached_property
    def pseudo(self):
        """`pseudo_labels` that the EMA model gives the unlabeled images, seen without augmentation.

        It is the model that is reported, and its guess does not depend on a draw or on neighbours
        in a batch. What the live model guessed from weak views while training is in log.csv.
        """
        index = self.split[1]
        index = index[self.dataset.labels[index] >= 0]
        if len(index) == 0:
            raise UserError(f"--pseudo: the true labels of the unlabeled images of {self.folder} "
                            f"are not known; leave --pseudo out")
        labels = torch.from_numpy(self.dataset.labels[index]).to(self.device)         # (U,)
        tau = getattr(self.cfg, "tau", 0)             # MixMatch has none: every guess counts
        return pseudo_labels(self.on_training_images(self.predict, index), labels, tau)

    def numbers(self, pseudo=False):
        return ({"mean_of_last": self.reported, "last": self.last}
                | ({"pseudo": self.pseudo} if pseudo else {}))


# ---------------------------------------------------------------------------------------------
# imbalanced test sets, and pictures without a label


def choose_test(labels, num_classes, kind, gamma, seed):
    """Indices of an imbalanced test set. labels (T,): of all test images.

    longtail, reversed, random: the paper's Test-1, -2, -3. The paper does not define the last;
    here class counts are uniform between 1/gamma of the images and all of them.
    """
    members = [data.rng(seed, "test set", k).permutation((labels == k).nonzero()[0])
               for k in range(num_classes)]
    full = min(len(m) for m in members)
    if full == 0:
        raise UserError("--test needs test images of every class, and a class has none; add some, "
                        "or leave --test out")
    counts = data.class_counts(full, num_classes, gamma, reverse=kind == "reversed")
    if min(counts) < 1:
        raise UserError(f"--gamma_t {gamma:g}: a class would be left without a test image, the "
                        f"smallest has {full}; choose a smaller one")
    if kind == "random":
        counts = data.rng(seed, "test counts").integers(counts[-1], full + 1, num_classes)
    return [i for m, n in zip(members, counts, strict=True) for i in m[:n]]


def judge_on(run, kind, gamma_t, seed):
    """({class name: test images}, metrics) of the last checkpoint on what choose_test chooses."""
    dataset, predicted = run.dataset, run.test_scores.argmax(1)
    index = choose_test(dataset.test_labels.cpu().numpy(), dataset.num_classes, kind, gamma_t,
                        seed)
    confusion = confusion_matrix(dataset.test_labels[index], predicted[index], dataset.num_classes)
    return dict(zip(dataset.names, confusion.sum(1).tolist(), strict=True)), metrics(confusion)


def predict_pictures(run, path, out):
    """Write file, label, probability of each picture at `path`, by the run's averaged network."""
    info = run.cfg.dataset_info
    files, images = readers.read_unknown(path, info["size"])
    logits = scores(run.predict, images.to(run.device), run.normalise)                # (N, K)
    probability, label = logits.softmax(1).max(1)
    report.write_predictions(out, files, [info["names"][k] for k in label.tolist()],
                             probability.tolist())


# ---------------------------------------------------------------------------------------------


def main(argv=None):
    p = cli.Parser(description=cli.title(__doc__), allow_abbrev=False)
    add = p.add_argument
    add("runs", nargs="+", help="run folders; seeds of one setting are averaged in one column")
    add("--unfinished", action="store_true", help="average seeds that are not finished, too")
    add("--pseudo", action="store_true", help="also judge the pseudo-labels of the unlabeled set, "
        "made by the EMA model from images without augmentation (needs their true labels)")
    add("--json", action="store_true", help="the numbers as JSON instead of a table")
    add("--markdown", action="store_true", help="the table in Markdown")
    add("--test", choices=("longtail", "reversed", "random"),
        help="the last checkpoints on an imbalanced test set")
    add("--gamma_t", type=cli.number(float, 1), help="its imbalance (default: 10)")
    add("--seed", type=cli.number(int, 0), help="which images are in it (default: 0)")
    add("--predict", metavar="PATH", help="a picture, a folder of pictures, or an .npz file with "
        "images x: a label and its probability for each")
    add("--csv", metavar="FILE", help="write the table to a file as well; with --predict the "
        "predictions (default: the screen)")
    report.device_flag(p)
    args = p.parse_args(argv)
    mode = report.check_combination(p, args)
    runs = report.load_all(args.runs, load_run, args.device)
    if mode == "--predict":
        return predict_pictures(runs[0], args.predict, args.csv)
    if mode == "--test":
        made = dict(kind=args.test, gamma_t=args.gamma_t or 10, seed=args.seed or 0)
        judged = {str(run.folder): judge_on(run, **made) for run in runs}
        return report.print_imbalanced(judged, made, args.json)
    groups = report.grouped(runs, args.unfinished)
    report.tell_different_splits(groups)
    names, numbers = groups[0].runs[0].dataset.names, lambda run: run.numbers(args.pseudo)
    if args.csv is not None:
        report.write_csv(args.csv, groups, numbers, names)
    if args.json:
        return print(checkpoint.to_json(report.as_dict(groups, numbers, names)))
    print("\n".join(report.format_table(groups, numbers, names, args.markdown)))
    if args.pseudo and not args.markdown:
        for group in groups:
            print("\n".join(report.confusion_lines(group, lambda run: run.pseudo, names)))


if __name__ == "__main__":
    cli.exit_cleanly(main)
