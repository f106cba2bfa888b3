"""Finished runs: what a folder holds, what its network says of its data, seeds folded together.

    run = load_run("runs/a_s0")              config, network, attractor; data when asked for
    groups = load_groups(folders)            runs that differ in the seed alone are one Group

Where numbers are judged (evaluate.py) and drawn (scripts/figures.py), they come from here. No
numbers of its own, no training, no plots.
"""
import math
import re
from functools import cached_property, lru_cache, partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

import data
import models
import run_folder
import settings
from attractor import BiasAttractor
from augment import Normalise
from evaluate import count, mean, mean_of_last, metrics, pseudo_labels, scores, thirds

LATER_FLAGS = {"ratio": None, "beta": None}          # older runs do not know them


@lru_cache(2)                                        # runs side by side mostly share their data
def load_data(name, data_dir, image_size):
    return data.load(name, data_dir, image_size)


def load_run(folder, device="cpu"):
    """The Run of a folder that a training script wrote."""
    folder = Path(folder)
    checkpoint = run_folder.load_checkpoint(folder)
    if checkpoint is None:
        raise settings.UserError(f"{folder} holds no run (there is no last.pt); name a folder that "
                                 f"a training script wrote")
    cfg = SimpleNamespace(**LATER_FLAGS | checkpoint["config"])
    num_classes = len(checkpoint["ema"]["classifier.weight"])
    model = models.build(cfg.model, num_classes, cfg.bn_momentum, cfg.wrn_quirk)
    predict, judged = model, checkpoint["history"]
    if "method" in checkpoint:                        # a run of baselines/train.py
        from baselines.train import METHODS
        method = METHODS[cfg.base][cfg.method]
        method.heads(model)
        predict, judged = partial(method.predict, model), method.judged(judged, cfg)
    try:
        model.load_state_dict(checkpoint["ema"])
    except RuntimeError:                              # names or shapes
        raise settings.UserError(f"{folder}: the weights in its checkpoint do not fit its flags; "
                                 f"the run is damaged, train it again") from None
    model.to(device, memory_format=torch.channels_last).eval()
    attractor = load_attractor(cfg, checkpoint, num_classes, device)
    return Run(folder, cfg, checkpoint["history"], judged, model, predict, attractor, device)


def load_attractor(cfg, checkpoint, num_classes, device):
    """None where training did not use one."""
    if cfg.method == "none" or "attractor" not in checkpoint:
        return None
    attractor = BiasAttractor(num_classes, cfg.hidden, cfg.attractor_input)
    attractor.load_state_dict(checkpoint["attractor"])
    return attractor.to(device)


class Run:
    """A run as its last checkpoint left it; what takes a pass over images is computed once."""

    def __init__(self, folder, cfg, history, judged, model, predict, attractor, device):
        self.folder, self.cfg, self.device = folder, cfg, device
        self.history, self.judged = history, judged   # all evaluations, those that count
        self.model, self.predict, self.attractor = model, predict, attractor   # model: the EMA

    @cached_property
    def dataset(self):
        cfg = self.cfg
        return load_data(cfg.dataset, cfg.data_dir, cfg.image_size).to(self.device)

    @cached_property
    def split(self):
        return data.split(self.dataset, self.cfg)     # indices of labeled, of unlabeled images

    def counts(self, index):
        """Images per class [K] among those with this index."""
        return [int((self.dataset.labels[index] == k).sum())
                for k in range(self.dataset.num_classes)]

    @cached_property
    def normalise(self):
        return Normalise(self.dataset.mean, self.dataset.std, self.device)

    @cached_property
    def test_scores(self):
        return scores(self.predict, self.dataset.test_images, self.normalise)         # (T, K)

    def of_training(self, network, index):
        """What `network` makes of training images, seen without augmentation. (N,) -> (N, ..)"""
        chunks = np.array_split(index, -(-len(index) // 500))      # they may be many, or on file
        return torch.cat([scores(network, self.dataset.take(i)[0], self.normalise)
                          for i in chunks])

    @cached_property
    def last(self):
        """The last checkpoint on the test set; shares of classes in percent."""
        confusion = count(self.dataset.test_labels, self.test_scores.argmax(1),
                          self.dataset.num_classes)
        result = metrics(confusion)
        return result | thirds(result["recall"], self.counts(self.split[0])) | {
            "predicted": (100 * self.test_scores.softmax(1).mean(0)).tolist(),        # [K]
            "confusion": (100 * confusion / confusion.sum(1, keepdim=True)).tolist()}  # [K][K]

    @cached_property
    def reported(self):
        """The mean of the last 20 evaluations: the number that stands in tables."""
        if not self.judged:
            return self.last
        result = mean_of_last(self.judged)
        return result | thirds(result["recall"], self.counts(self.split[0]))

    @cached_property
    def pseudo(self):
        """`pseudo_labels` that the EMA model gives the unlabeled images, seen without augmentation.

        It is the model that is reported, and its guess does not depend on a draw or on neighbours
        in a batch. What the live model guessed from weak views while training is in log.csv.
        """
        index = self.split[1]
        index = index[self.dataset.labels[index] >= 0]
        if len(index) == 0:
            raise settings.UserError(f"the true labels of the unlabeled images of {self.folder} "
                                     f"are not known, so nothing can be said of pseudo-labels")
        labels = torch.from_numpy(self.dataset.labels[index]).to(self.device)         # (U,)
        tau = getattr(self.cfg, "tau", 0)             # MixMatch has none: every guess counts
        return pseudo_labels(self.of_training(self.predict, index), labels, tau)

    def numbers(self, pseudo=False):
        return ({"mean_of_last_20": self.reported, "last": self.last}
                | ({"pseudo": self.pseudo} if pseudo else {}))


# ---------------------------------------------------------------------------------------------
# seeds of one setting


def deviation(values):
    """The sample standard deviation."""
    centre = mean(values)
    return math.sqrt(sum((v - centre) ** 2 for v in values) / (len(values) - 1))


def fold(items, statistic):
    """Equally nested dicts and lists -> one of them, with a statistic in place of the numbers."""
    if isinstance(items[0], dict):
        return {key: fold([item[key] for item in items], statistic) for key in items[0]}
    if isinstance(items[0], list):
        return [fold(cells, statistic) for cells in zip(*items)]
    return statistic(items)


class Group:
    """Runs that differ in nothing but the seed."""

    def __init__(self, runs):
        self.runs, first = runs, runs[0].folder
        seeds = ",".join(str(run.cfg.seed) for run in runs)
        ending = re.compile(r"_s\d+$")
        self.path = first if len(runs) == 1 else first.with_name(
            ending.sub(f"_s{seeds}", first.name) if ending.search(first.name)
            else f"{first.name} (seeds {seeds})")

    def mean(self, part):
        """part: a function of a Run that gives nested numbers."""
        return fold([part(run) for run in self.runs], mean)

    def deviation(self, part):
        """None where there is one seed only."""
        return fold([part(run) for run in self.runs], deviation) if len(self.runs) > 1 else None


def grouped(runs):
    """Groups in the order of their first run. The same seed twice is not folded."""
    free = set(run_folder.FREE) - {"iters"} | {"seed"}
    groups = {}
    for run in runs:
        setting = tuple(sorted((k, str(float(v)) if type(v) is int else str(v))
                               for k, v in vars(run.cfg).items() if k not in free))
        copy = 0
        while run.cfg.seed in [r.cfg.seed for r in groups.get((setting, copy), [])]:
            copy += 1
        groups.setdefault((setting, copy), []).append(run)
    return [Group(members) for members in groups.values()]


def load_groups(folders):
    runs = [load_run(folder) for folder in folders]
    if len({tuple(run.dataset.names) for run in runs}) > 1:
        raise settings.UserError("the runs have different classes and cannot stand side by side; "
                                 "name those of one dataset at a time")
    return grouped(runs)
