"""Which images, which labels, in which order.

A dataset is one uint8 tensor of images; a split is two arrays of indices into it (labeled,
unlabeled); a stream turns a step number into a batch of indices. Nothing here keeps a position:
every draw is a function of (seed, purpose, step), so a resumed run draws the same batches.
No files (support/readers.py), no augmentation (support/augment.py), no networks, no losses.
"""
import zlib
from dataclasses import dataclass
from functools import cached_property
from math import floor

import numpy as np
import torch

from support import UserError, distributed, readers
from support.augment import to_device


def rng(seed, purpose, *numbers):
    """A generator of its own for every (seed, purpose, numbers), e.g. rng(0, "strong", step)."""
    return np.random.default_rng((seed, zlib.crc32(purpose.encode()), *numbers))


def view_rng(seed, purpose, step):
    """For the views of a batch: each rank has other images and makes its own draws."""
    # rank 0 draws what a single process would: NumPy takes a 0 at the end of a seed for nothing
    return rng(seed, purpose, step, distributed.rank())


# ---------------------------------------------------------------------------------------------
# datasets


@dataclass
class Dataset:
    images: torch.Tensor       # (N, 3, H, W) uint8, training images; those without a label last
    labels: np.ndarray         # (N,) int64, -1 where there is none
    test_images: torch.Tensor  # (T, 3, H, W) uint8
    test_labels: torch.Tensor  # (T,) int64
    names: list                # K class names
    mean: tuple                # per channel, of images in [0, 1]
    std: tuple
    tracks: np.ndarray = None  # (N,) or None: frames of one film have the same number
    device: torch.device = torch.device("cpu")

    @property
    def num_classes(self):
        return len(self.names)

    @cached_property
    def info(self):
        """What one has to know to use a trained network without the dataset, or to recognise it."""
        return {"names": list(self.names), "mean": list(self.mean), "std": list(self.std),
                "size": list(self.images.shape[2:]),
                "checksum": readers.checksum(self.images, self.labels, self.test_images,
                                             self.test_labels, self.names)}

    def to(self, device):
        """The same images, for a device. Large sets stay on the host, and only batches travel."""
        images, test_images = (x.to(device) if x.nbytes < 2**30 else x
                               for x in (self.images, self.test_images))
        return Dataset(images, self.labels, test_images, self.test_labels.to(device), self.names,
                       self.mean, self.std, self.tracks, torch.device(device))

    def take(self, index, labels=None):
        """(B,) -> images (B, 3, H, W) uint8 and labels (B,), by default the true ones."""
        labels = self.labels[index] if labels is None else labels
        images = self.images[to_device(index, self.images)]
        return images.to(self.device, non_blocking=True), to_device(labels, self.device)

    def count(self, index):
        """Images of each class among those with this index (N,) -> (K,) int64, on the CPU."""
        labels = self.labels[index]
        return torch.from_numpy(np.bincount(labels[labels >= 0], minlength=self.num_classes))


def load(name, data_dir="data", image_size=None, hold_out=0.2, skip_broken=False):
    """A built-in dataset, a path to an .npz file, or a folder of pictures: support/readers.py."""
    return Dataset(**readers.load(name, data_dir, image_size, hold_out, skip_broken, rng))


def from_flags(cfg):
    dataset = load(cfg.dataset, cfg.data_dir, cfg.image_size, cfg.hold_out, cfg.skip_broken)
    if cfg.weights and not cfg.model.startswith("wrn-"):     # torchvision's were trained so
        dataset.mean, dataset.std = readers.IMAGENET
    return dataset


# ---------------------------------------------------------------------------------------------
# splits


def class_counts(n_max, num_classes, gamma, imbalance="long", reverse=False, as_int=int):
    """Images per class. long: n_max * gamma^(-k/(K-1)), truncated; step: second half n_max/gamma.

    (The paper prints the exponent without its minus sign.)
    """
    last = as_int(n_max / gamma)  # by division: the power may fall a hair below a whole number
    if imbalance == "step":
        counts = [as_int(n_max) if k < num_classes // 2 else last for k in range(num_classes)]
    else:
        counts = [as_int(n_max * gamma ** (-k / (num_classes - 1))) for k in range(num_classes - 1)]
        counts.append(last)
    return counts[::-1] if reverse else counts


def at_least_one(x):
    return max(1, floor(x + 0.5))                    # half is rounded up


def wanted_counts(dataset, cfg):
    """(N_k, M_k) by the data flags. M_k None: the unlabeled images are those without a label;
    both None: the data is taken as it is."""
    sizes = np.bincount(dataset.labels[dataset.labels >= 0]).tolist()
    K, n1, m1, as_int = len(sizes), cfg.n1, cfg.m1, int
    if cfg.ratio is not None:                        # every class is divided alike
        labeled = [int(size / (1 + cfg.ratio)) for size in sizes]
        return labeled, [size - n for size, n in zip(sizes, labeled, strict=True)]
    if cfg.beta is not None:     # N_1 = beta of the first class, M_1 the rest of it; not truncated,
        as_int, n1 = at_least_one, at_least_one(cfg.beta * sizes[0])
        m1 = sizes[0] - n1       # which would leave classes without a label
    if n1 is None and cfg.gamma_l is None and m1 is None and cfg.gamma_u is None:
        return None, None
    own_pool = cfg.m1 is None and cfg.gamma_u is None and (
        cfg.base == "supervised" or (dataset.labels < 0).any())
    needed = {"n1": n1, "gamma_l": cfg.gamma_l} | (
        {} if own_pool else {"m1": m1, "gamma_u": cfg.gamma_u})
    if missing := [f"--{flag}" for flag, value in needed.items() if value is None]:
        raise UserError(f"{missing[0]} is missing: --n1, --gamma_l, --m1, --gamma_u make a split "
                        f"together (of data with unlabeled images, --n1 and --gamma_l)")
    n_counts = class_counts(n1, K, cfg.gamma_l, cfg.imbalance, as_int=as_int)
    return n_counts, None if own_pool else class_counts(
        m1, K, cfg.gamma_u, cfg.imbalance, cfg.reverse_u, as_int)


def split(dataset, cfg):
    """(labeled, unlabeled) index arrays into dataset.images, by the data flags.

    Images of a class are drawn by seed. With --pool union the unlabeled set holds the labeled
    images too, as in the released code.
    """
    labeled, unlabeled = np.flatnonzero(dataset.labels >= 0), np.flatnonzero(dataset.labels < 0)
    n_counts, m_counts = wanted_counts(dataset, cfg)
    if m_counts is not None and len(unlabeled) > 0:
        raise UserError(f"--m1, --gamma_u or --ratio would leave out the {len(unlabeled)} "
                        f"unlabeled images of --dataset {cfg.dataset}; leave these flags out")
    if n_counts is not None:
        members = [draw_members(dataset, cfg.seed, k, n, m) for k, (n, m) in enumerate(
            zip(n_counts, m_counts or [0] * len(n_counts), strict=True))]
        labeled = np.concatenate([i[:n] for i, n in zip(members, n_counts, strict=True)])
    if m_counts is not None:
        unlabeled = np.concatenate([i[0 if cfg.pool == "union" else n:]
                                    for i, n in zip(members, n_counts, strict=True)])
    if len(unlabeled) == 0 and cfg.base != "supervised":
        raise UserError(f"--dataset {cfg.dataset}: there are no unlabeled images; add --ratio 2 to "
                        f"take two thirds of each class for that, or train on the labels only with "
                        f"`python -m baselines.train --base supervised`")
    if m_counts is None and cfg.pool == "union":
        unlabeled = np.concatenate([labeled, unlabeled])
    return labeled, unlabeled


def draw_members(dataset, seed, k, n, m):
    """n + m images of class k: first one of each track, then a second one of each, and so on."""
    members = np.flatnonzero(dataset.labels == k)
    if n < 1 or m < 0 or n + m > len(members):
        raise UserError(f"--n1, --gamma_l, --m1, --gamma_u (or --beta, --ratio) ask for {n} "
                        f"labeled and {m} unlabeled images of class {k} ({dataset.names[k]}), "
                        f"which has {len(members)}; at least 1 must be labeled")
    drawn = rng(seed, "split", k).permutation(members)
    if dataset.tracks is not None:
        tracks = dataset.tracks[drawn].tolist()
        earlier = [tracks[:i].count(track) for i, track in enumerate(tracks)]
        drawn = drawn[np.argsort(earlier, kind="stable")]
    return drawn[:n + m]


# ---------------------------------------------------------------------------------------------
# streams


class IndexStream:
    """Endless passes over `members`, reshuffled each pass. A batch needs no earlier batch."""

    def __init__(self, members, batch_size, seed, purpose):
        self.members, self.batch_size = np.asarray(members), batch_size
        self.seed, self.purpose, self.orders = seed, purpose, {}

    def order(self, epoch):
        """The members as pass number `epoch` shuffles them. Two passes are kept, for speed only."""
        if epoch not in self.orders:
            shuffled = rng(self.seed, self.purpose, epoch).permutation(self.members)
            self.orders = {e: o for e, o in self.orders.items() if e == epoch - 1}
            self.orders[epoch] = shuffled
        return self.orders[epoch]

    def at(self, positions):
        """The images at these ascending positions of the endless sequence. (P,) -> (P,)"""
        epochs, offsets = np.divmod(positions, len(self.members))
        return np.concatenate([self.order(int(e))[offsets[epochs == e]]
                               for e in np.unique(epochs)])

    def indices(self, step):
        """(B,) indices: the whole batch of a step, of all ranks."""
        return self.at(np.arange(step * self.batch_size, (step + 1) * self.batch_size))

    def batch(self, step):
        """(B,) indices: this rank's slice of the batch of a step."""
        return distributed.local(self.indices(step))


class BalancedStream:
    """Class-aware sampling: classes in shuffled rounds, the images of a class in shuffled rounds.

    In every round each class comes once, so class k's image of round c is simply the c-th of its
    own endless sequence: the batch is a function of the step here too.
    """

    def __init__(self, members, labels, batch_size, seed):
        """members: indices (N,) of images; labels: of all images of the dataset"""
        labels = labels[members]
        self.classes = IndexStream(np.unique(labels), batch_size, seed, "round")
        self.images = {k: IndexStream(members[labels == k], 1, seed, f"class {k}")
                       for k in self.classes.members}

    def batch(self, step):
        """(M,) indices: this rank's slice of the batch of a step."""
        size = self.classes.batch_size
        rounds = np.arange(step * size, (step + 1) * size) // len(self.images)
        classes = self.classes.indices(step)                                             # (M,)
        batch = np.empty_like(classes)
        for k in np.unique(classes):
            batch[classes == k] = self.images[k].at(rounds[classes == k])
        return distributed.local(batch)
