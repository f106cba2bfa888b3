"""A finished run, as its folder holds it: network, attractor, evaluations. Metrics: evaluate.py"""
from argparse import Namespace
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path

import numpy as np
import torch

import data
import evaluate
import models
from attractor import build_attractor
from support import UserError, config
from support.augment import Normalise
from support.run import check_data, load_checkpoint
from train_fixmatch import flags, l2ac_flags


class FinishedRun:
    """A run as its last checkpoint left it; what takes a pass over images is computed once."""

    def __init__(self, folder):
        state = load_checkpoint(folder)
        if state is None:
            raise UserError(f"{folder} holds no run (there is no last.pt); name a folder that a "
                            f"training script wrote")
        p = config.parser("")
        flags(p)
        l2ac_flags(p)
        # a flag that did not exist when the run was made has its default
        cfg = Namespace(**vars(p.parse_args([])) | state["config"])
        info, num_classes = cfg.dataset_info, len(cfg.dataset_info["names"])
        model = models.build(cfg.model, num_classes, cfg.bn_momentum, cfg.image_size)
        self.folder, self.cfg = Path(folder), cfg
        self.device = device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.labels_per_class = info["labels"]
        self.normalise = Normalise(info["mean"], info["std"], device)
        self.history = self.counted = state["history"]    # all evaluations, those that count
        self.model = self.predict = model                 # the EMA
        omega = state["attractor"] if cfg.method == "l2ac" else {}
        if "method" in state:                             # a run of baselines/train.py
            module, name = cfg.method_class.split(":")
            method = getattr(import_module(module), name)
            method.heads(model)
            self.predict = partial(method.predict, model)
            self.counted = method.reported(self.history, cfg)
            omega = {name.removeprefix("attractor."): x for name, x in state["method"].items()
                     if name.startswith("attractor.")}
        model.load_state_dict(state["ema"])
        model.to(device, memory_format=torch.channels_last).eval()
        self.attractor = None
        if omega:
            self.attractor = build_attractor(num_classes, cfg.attractor, cfg.hidden,
                                             cfg.attractor_input)
            self.attractor.load_state_dict(omega)
            self.attractor.to(device)

    @cached_property
    def dataset(self):
        loaded = data.from_flags(self.cfg)
        check_data(self.cfg.dataset_info, loaded.info, self.folder)
        return loaded.to(self.device)

    @cached_property
    def split(self):
        return data.split(self.dataset, self.cfg)     # indices of labeled, of unlabeled images

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
            "confusion": (100 * confusion / confusion.sum(1, keepdim=True)).tolist()}  # [K][K]

    @cached_property
    def reported(self):
        """The mean of the last 20 evaluations: the number that the tables show."""
        if not self.counted:                          # none yet that counts
            return self.last
        result = evaluate.mean_of_last(self.counted)
        return result | evaluate.thirds(result["recall"], self.labels_per_class)

    @cached_property
    def pseudo(self):
        """`pseudo_labels` of the EMA model for the unlabeled images without augmentation."""
        index = self.split[1][self.dataset.labels[self.split[1]] >= 0]
        if len(index) == 0:
            raise UserError(f"--pseudo: the true labels of the unlabeled images of {self.folder} "
                            f"are not known; leave --pseudo out")
        labels = torch.from_numpy(self.dataset.labels[index]).to(self.device)         # (U,)
        tau = self.cfg.tau * (self.cfg.base != "mixmatch" and self.cfg.labels == "hard")    # or all
        return evaluate.pseudo_labels(self.on_training_images(self.predict, index), labels, tau)
