"""Which images, which labels, in which order.

A dataset is one uint8 tensor of images that stays on the device, or files that are decoded ahead
of their use (support/pictures.py); a split is two arrays of indices into it (labeled, unlabeled); a
stream turns a step number into a batch of indices. Nothing here keeps a position: every draw is a
function of (seed, purpose, step), so a resumed run and every rank of a distributed run draw the
same global batches. A rank keeps its slice.
No files (support/readers.py), no augmentation (support/augment.py), no networks, no losses.
"""
import zlib
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import floor
from pathlib import Path

import numpy as np
import torch

from support import UserError, config, readers
from support.augment import to_device
from support.distributed import local_slice, rank0_first
from support.shapes import SHAPES, synthetic

CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck".split()
STL10 = "airplane bird car cat deer dog horse monkey ship truck".split()
BUILT_IN = {  # class names (None: the reader tells), mean and standard deviation per channel
    "digits": (None, (0.3053, 0.3053, 0.3053), (0.3760, 0.3760, 0.3760)),
    "synthetic": (SHAPES, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)),
    "cifar10": (CIFAR10, (0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)),
    "cifar100": (None, (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    "stl10": (STL10, (0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)),    # CIFAR-10's
    "sun397": (None, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),          # ImageNet's
}
HELD_OUT = {"digits": 40, "sun397": 50}    # test images of a class, where there is no test set


def rng(seed, purpose, *numbers):
    """A generator of its own for every (seed, purpose, numbers), e.g. rng(0, "strong", step)."""
    return np.random.default_rng((seed, zlib.crc32(purpose.encode()), *numbers))


# ---------------------------------------------------------------------------------------------
# datasets


@dataclass
class Dataset:
    images: torch.Tensor       # (N, 3, H, W) uint8, training images; those without a label last
    labels: np.ndarray         # (N,) int64, -1 where there is none
    test_images: torch.Tensor  # (T, 3, H, W) uint8; both may be Pictures on file
    test_labels: torch.Tensor  # (T,) int64
    names: list                # K class names
    mean: tuple                # per channel, of images in [0, 1]
    std: tuple

    @property
    def num_classes(self):
        return len(self.names)

    @cached_property
    def fingerprint(self):
        """Tells these data from others, on any device."""
        return readers.fingerprint(self.images, self.labels, self.test_images, self.test_labels,
                                   self.names)

    @property
    def info(self):
        """What one has to know to use a trained network without the dataset, or to recognise it."""
        return {"names": self.names, "mean": self.mean, "std": self.std,
                "size": tuple(self.images.shape[2:]), "fingerprint": self.fingerprint}

    def to(self, device):
        for part in ("images", "test_images", "test_labels"):
            setattr(self, part, getattr(self, part).to(device))
        return self

    def take(self, index, labels=None):
        """(B,) -> images (B, 3, H, W) uint8 and labels (B,), by default the true ones; on the
        device."""
        labels = self.labels[index] if labels is None else labels
        i, y = (to_device(a, self.images.device) for a in (index, labels))
        return self.images[i if torch.is_tensor(self.images) else index], y

    def count(self, index):
        """Images of each class among those with this index (N,) -> (K,) int64, on the CPU."""
        labels = self.labels[index]
        return torch.from_numpy(np.bincount(labels[labels >= 0], minlength=self.num_classes))

    def read_ahead(self, *streams):
        """Have the next batch of each stream decoded while the present one is in use."""
        if not torch.is_tensor(self.images):
            for stream in streams:
                stream.expect = self.images.expect


def load_split(cfg, device):
    """The dataset on the device, and the indices of its labeled and of its unlabeled images."""
    dataset = rank0_first(lambda: load(cfg.dataset, cfg.data_dir, cfg.image_size)).to(device)
    index_l, index_u = split(dataset, cfg)
    check_effect(dataset, cfg, index_u)
    return dataset, index_l, index_u


def load(name, data_dir=config.DATA_DIR, image_size=None, download=True, cwd=""):
    """One of BUILT_IN (an .npz in data_dir, else torchvision's reader), a path.npz or a folder.

    download: an archive may be downloaded and unpacked. cwd: where a relative path that does not
    exist here is looked up, the folder in which a finished run was started.
    """
    name = name if name in BUILT_IN else readers.find_path(name, cwd)
    archive = Path(readers.find_path(data_dir, cwd)) / f"{name}.npz"
    if name == "synthetic":
        arrays = synthetic(rng, image_size or 16)
    elif name == "digits":
        arrays = readers.read_digits()
    elif name in BUILT_IN:
        arrays = (readers.read_npz(archive) if archive.exists()
                  else readers.read_archive(name, archive.parent, download))
    elif name.endswith(".npz"):
        arrays = readers.read_npz(name)
    elif Path(name).is_dir():
        arrays = readers.read_folder(name)
    else:
        raise UserError(f"--dataset {name}: not known; choose {', '.join(BUILT_IN)} or a path to "
                        f"an .npz file or to a folder of pictures")
    if "x_test" not in arrays:
        arrays = hold_out_test(arrays, HELD_OUT[name])
    size = image_size and (image_size, image_size)
    parts = [arrays[key] for key in ("x_train", "x_unlabeled") if key in arrays]
    images, test_images = readers.open_images(parts, arrays["x_test"], size)
    names, mean, std = names_and_colours(name, arrays, images)
    labels = np.full(len(images), -1)
    labels[:len(parts[0])] = arrays["y_train"]
    return Dataset(images, labels, test_images,
                   torch.from_numpy(arrays["y_test"].astype(np.int64)), names, mean, std)


def hold_out_test(arrays, number):
    """Set images of each class aside for testing: the same ones whatever the seed."""
    x, y, test = arrays["x_train"], arrays["y_train"], []
    for k, name in enumerate(arrays["names"]):
        members = rng(0, "test", k).permutation(np.flatnonzero(y == k))
        if len(members) <= number:
            raise UserError(f"--dataset: class {name} has {len(members)} pictures, too few to "
                            f"hold out {number} of them for testing; complete the archive")
        test.append(np.sort(members[:number]))
    train, test = np.delete(np.arange(len(y)), np.concatenate(test)), np.concatenate(test)
    return arrays | {"x_train": x[train], "y_train": y[train], "x_test": x[test],
                     "y_test": y[test]}


def names_and_colours(name, arrays, images):
    """Class names, mean, std. For data that is not in BUILT_IN, mean and std are measured on the
    training images (in a folder of pictures: on 256 of them)."""
    num_classes = int(arrays["y_train"].max()) + 1
    names, mean, std = BUILT_IN.get(name, (None, None, None))
    names = list(names or arrays.get("names") or map("class {}".format, range(num_classes)))
    readers.check_names(names, num_classes, name)
    if mean is None:
        x = arrays["x_train"]                                                  # (N, H, W, 3)
        if x.dtype == object:
            some = np.unique(np.linspace(0, len(x) - 1, 256).astype(int))
            x = images[some].permute(0, 2, 3, 1).numpy()
        mean, std = readers.colours(x)
    return names, mean, std


# ---------------------------------------------------------------------------------------------
# splits


def class_counts(n_max, num_classes, gamma, imbalance="long", reverse=False, whole=int):
    """Images per class. long: n_max * gamma^(-k/(K-1)), truncated; step: second half n_max/gamma.

    (The paper prints the exponent without its minus sign.)
    """
    last = whole(n_max / gamma)  # by division: the power may fall a hair below a whole number
    if imbalance == "step":
        counts = [whole(n_max) if k < num_classes // 2 else last for k in range(num_classes)]
    else:
        counts = [whole(n_max * gamma ** (-k / (num_classes - 1))) for k in range(num_classes - 1)]
        counts.append(last)
    return counts[::-1] if reverse else counts


def at_least_one(x):
    """Round half up, for the label-ratio study: truncation would leave classes without a label."""
    return max(1, floor(x + 0.5))


def wanted_counts(dataset, cfg):
    """(N_k, M_k) by the data flags. M_k None: the unlabeled images are those without a label;
    both None: the data is taken as it is."""
    sizes = np.bincount(dataset.labels[dataset.labels >= 0]).tolist()
    n1, m1, whole = cfg.n1, cfg.m1, int
    given = {"n1": n1, "gamma_l": cfg.gamma_l, "m1": m1, "gamma_u": cfg.gamma_u}
    if cfg.ratio is not None:                        # every class is divided alike
        if any(value is not None for value in given.values()) or cfg.beta is not None:
            raise UserError("--ratio divides every class alike and does not go with --n1, "
                            "--gamma_l, --m1, --gamma_u or --beta; leave it or them out")
        labeled = [int(size / (1 + cfg.ratio)) for size in sizes]
        return labeled, [size - n for size, n in zip(sizes, labeled, strict=True)]
    if all(value is None for value in [*given.values(), cfg.beta]):
        return None, None
    own_pool = m1 is None and cfg.gamma_u is None and (dataset.labels < 0).any()
    if cfg.beta is not None:     # N_1 = beta of the first class, M_1 the rest of it
        whole, n1 = at_least_one, at_least_one(cfg.beta * sizes[0])
        m1 = sizes[0] - n1
        given |= {"n1": n1, "m1": m1}
    for flag in ("n1", "gamma_l") if own_pool else given:
        if given[flag] is None:
            raise UserError(f"--{flag} is missing: --n1, --gamma_l, --m1, --gamma_u make a split "
                            f"together (of data with unlabeled images, --n1 and --gamma_l)")
    n_counts = class_counts(n1, len(sizes), cfg.gamma_l, cfg.imbalance, whole=whole)
    return n_counts, None if own_pool else class_counts(
        m1, len(sizes), cfg.gamma_u, cfg.imbalance, cfg.reverse_u, whole)


def split(dataset, cfg):
    """(labeled, unlabeled) index arrays into dataset.images, by the data flags.

    With none of --n1, --gamma_l, --m1, --gamma_u, --beta, --ratio the data is taken as it is.
    --split `random` draws the images of a class by seed, `first` takes them in file order (the
    released code); with --pool `union` the unlabeled set holds the labeled images too.
    """
    n_counts, m_counts = wanted_counts(dataset, cfg)
    if m_counts is None:
        return split_with_own_pool(dataset, cfg, n_counts)
    labeled, unlabeled = [], []
    for k, (n, m) in enumerate(zip(n_counts, m_counts, strict=True)):
        members = draw_members(dataset, cfg, k, n, m)
        labeled.append(members[:n])
        unlabeled.append(members[0 if cfg.pool == "union" else n:])
    return np.concatenate(labeled), np.concatenate(unlabeled)


EFFECT = {"reverse_u": "it reverses an unlabeled set that --m1 and --gamma_u (above 1) make",
          "imbalance": "it needs --gamma_l or --gamma_u above 1, and at least three classes",
          "split": "it chooses among labeled images, and all of them are used"}


def check_effect(dataset, cfg, index_u):
    """Refuse flags that change nothing, because the run's records would be misleading, and flags
    that would silently drop the unlabeled images of the data."""
    counts, own = wanted_counts(dataset, cfg), np.flatnonzero(dataset.labels < 0)
    if not np.isin(own, index_u).all():
        flag = "--ratio" if cfg.ratio is not None else "--gamma_u"
        raise UserError(f"{flag} would leave out the {len(own)} unlabeled images of --dataset "
                        f"{cfg.dataset}; leave it out, or remove x_unlabeled (folder unlabeled)")
    default = {"reverse_u": False, "imbalance": "long"} | config.RECIPES[cfg.recipe]
    for flag, reason in EFFECT.items():
        plain = wanted_counts(dataset, type(cfg)(**vars(cfg) | {flag: default[flag]}))
        idle = counts == (None, None) if flag == "split" else counts == plain
        if getattr(cfg, flag) != default[flag] and idle:
            raise UserError(f"--{flag} changes nothing here: {reason}; leave it out")


def draw_members(dataset, cfg, k, n, m=0):
    """n + m images of class k."""
    members = np.flatnonzero(dataset.labels == k)
    if n < 1 or n + m > len(members):
        raise UserError(f"--n1, --gamma_l, --m1, --gamma_u (or --beta, --ratio) ask for {n} "
                        f"labeled and {m} unlabeled images of class {k} ({dataset.names[k]}), "
                        f"which has {len(members)}; at least 1 must be labeled")
    if cfg.split == "random":
        members = rng(cfg.seed, "split", k).permutation(members)
    return members[:n + m]


def split_with_own_pool(dataset, cfg, n_counts):
    """The unlabeled images are those that came without a label; n_counts None: all are used."""
    labeled, unlabeled = np.flatnonzero(dataset.labels >= 0), np.flatnonzero(dataset.labels < 0)
    if len(unlabeled) == 0:
        raise UserError("--dataset: there are no unlabeled images in it (x_unlabeled, a folder "
                        "unlabeled), so give --n1, --gamma_l, --m1 and --gamma_u, or --ratio, to "
                        "set labeled ones aside")
    if n_counts is not None:
        labeled = np.concatenate([draw_members(dataset, cfg, k, n)
                                  for k, n in enumerate(n_counts)])
    return labeled, np.concatenate([labeled, unlabeled]) if cfg.pool == "union" else unlabeled


# ---------------------------------------------------------------------------------------------
# streams


class Stream:
    """batch(step) is this rank's slice of indices(step), a pure function of the step. Where images
    are files (Dataset.read_ahead), it also announces this batch and the one after it."""
    expect, last = None, None

    def batch(self, step):
        batch = local_slice(self.indices(step), *self.shard)
        if self.expect:
            # assume the same stride as last time: the balanced batch may be needed only at every
            # tenth step
            stride = step - self.last if self.last is not None and self.last < step else 1
            self.expect(batch)
            self.expect(local_slice(self.indices(step + stride), *self.shard))
            self.last = step
        return batch


class IndexStream(Stream):
    """Endless passes over `members`, reshuffled each pass. A batch needs no earlier batch.

    shard: (rank, size)
    """

    def __init__(self, members, batch_size, seed, purpose, shard=(0, 1)):
        self.members, self.batch_size, self.shard = np.asarray(members), batch_size, shard
        # The current pass and the next one; a cache, not a state.
        self.order = lru_cache(2)(
            lambda epoch: rng(seed, purpose, epoch).permutation(self.members))

    def at(self, positions):
        """The images at these ascending positions of the endless sequence. (P,) -> (P,)"""
        epochs, offsets = np.divmod(positions, len(self.members))
        return np.concatenate([self.order(int(e))[offsets[epochs == e]]
                               for e in np.unique(epochs)])

    def indices(self, step):
        return self.at(np.arange(step * self.batch_size, (step + 1) * self.batch_size))


class BalancedStream(Stream):
    """Class-aware sampling: classes in shuffled rounds, the images of a class in shuffled rounds.

    In every round each class comes once, so class k's image of round c is simply the c-th of its
    own endless sequence: the batch is a function of the step here too.
    """

    def __init__(self, members, labels, batch_size, seed, shard=(0, 1)):
        """members: indices (N,) of images; labels: of all images of the dataset"""
        self.shard, labels = shard, labels[members]
        self.classes = IndexStream(np.unique(labels), batch_size, seed, "round")
        self.images = {k: IndexStream(members[labels == k], 1, seed, f"class {k}")
                       for k in self.classes.members}

    def indices(self, step):
        size = self.classes.batch_size
        rounds = np.arange(step * size, (step + 1) * size) // len(self.images)
        classes = self.classes.indices(step)                                             # (M,)
        batch = np.empty_like(classes)
        for k in np.unique(classes):
            batch[classes == k] = self.images[k].at(rounds[classes == k])
        return batch
