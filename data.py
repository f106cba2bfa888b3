"""Which images, which labels, in which order.

A dataset is one uint8 tensor of images that stays on the device; a split is two arrays of indices
into it (labeled, unlabeled); a stream turns a step number into a batch of indices. Nothing here
keeps a position: every draw is a function of (seed, purpose, step), so a resumed run and every
process of a distributed run see the same batches.
No augmentation (augment.py), no networks, no losses, no torch.distributed.
"""
import zipfile
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck".split()
# Head and tail are pairs of look-alikes (disk and ring, square and frame, ...): what a biased
# classifier does to a rare class is to call it by the name of its common twin.
SHAPES = "disk square cross bars triangle diamond stripes saltire frame ring".split()
FACTS = {  # class names, per-channel mean and standard deviation of the training images
    "cifar10": (CIFAR10, (0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)),
    "synthetic": (SHAPES, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)),
}


class DataError(Exception):
    """One sentence for the user: which file or flag is wrong, and what to do."""


def rng(seed, purpose, *numbers):
    """A generator of its own for every (seed, purpose, numbers), e.g. rng(0, "strong", step)."""
    return np.random.default_rng((seed, zlib.crc32(purpose.encode()), *numbers))


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

    @property
    def num_classes(self):
        return len(self.names)

    def to(self, device):
        for part in ("images", "test_images", "test_labels"):
            setattr(self, part, getattr(self, part).to(device))
        return self

    def take(self, index, labels=None):
        """(B,) -> images (B, 3, H, W) uint8 and labels (B,), by default the true ones; on the
        device."""
        device = self.images.device
        labels = self.labels[index] if labels is None else labels
        i, y = (torch.from_numpy(a).to(device, non_blocking=device.type == "cuda")
                for a in (index, labels))
        return self.images[i], y


def load(name, data_dir="data", image_size=None):
    """`synthetic`, `cifar10` (an .npz in data_dir, else torchvision's download) or a path.npz."""
    archive = Path(data_dir) / f"{name}.npz"
    if name == "synthetic":
        arrays = synthetic(image_size or 16)
    elif name.endswith(".npz"):
        arrays = read_npz(name)
    elif name not in FACTS:
        raise DataError(f"--dataset {name}: not known; choose {', '.join(FACTS)} or a path to an "
                        f".npz file")
    else:
        arrays = read_npz(archive) if archive.exists() else read_torchvision(name, data_dir)
    names, mean, std = FACTS.get(name) or own_facts(arrays)
    if len(names) != arrays["y_train"].max() + 1:
        raise DataError(f"--dataset {name}: there are {len(names)} class names, but the labels go "
                        f"from 0 to {arrays['y_train'].max()}")
    images, unlabeled = arrays["x_train"], arrays.get("x_unlabeled")
    labels = arrays["y_train"].astype(np.int64)
    if unlabeled is not None:
        images = np.concatenate([images, unlabeled])
        labels = np.concatenate([labels, np.full(len(unlabeled), -1)])
    return Dataset(as_tensor(images, image_size), labels, as_tensor(arrays["x_test"], image_size),
                   torch.from_numpy(arrays["y_test"].astype(np.int64)), names, mean, std)


def as_tensor(images, size):
    """(N, H, W, 3) uint8 array -> (N, 3, size, size) uint8 tensor, shrunk by averaging areas."""
    x = torch.from_numpy(images).permute(0, 3, 1, 2)
    if size is None or x.shape[-2:] == (size, size):
        return x.contiguous()
    chunks = [F.interpolate(c.float(), (size, size), mode="area").round().to(torch.uint8)
              for c in x.split(10_000)]          # bounded memory: float is four times the bytes
    return torch.cat(chunks)


def own_facts(arrays):
    """Names and constants for data that FACTS does not know: measured on the training images."""
    x, num_classes = arrays["x_train"], int(arrays["y_train"].max()) + 1
    names = arrays.get("names", [f"class {k}" for k in range(num_classes)])
    share = np.stack([np.bincount(x[..., c].ravel(), minlength=256) for c in range(3)])
    share = share / share.sum(1, keepdims=True)                   # (3, 256) of each grey level
    mean = share @ np.arange(256) / 255
    std = np.sqrt((share * (np.arange(256) / 255 - mean[:, None]) ** 2).sum(1)).clip(1e-3)
    return [str(n) for n in names], tuple(mean.tolist()), tuple(std.tolist())


def read_npz(path):
    """x_train (N, H, W, 3) uint8, y_train (N,), x_test, y_test, optional x_unlabeled, names."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"--dataset: {path} cannot be read as an .npz file ({error}); "
                        f"data.read_npz says what it must hold") from None
    check_arrays(arrays, path)
    return arrays


def check_arrays(arrays, path):
    missing = [k for k in ("x_train", "y_train", "x_test", "y_test") if k not in arrays]
    if missing:
        raise DataError(f"--dataset: {path} lacks the array {missing[0]}; "
                        f"data.read_npz says what it must hold")
    for key in [k for k in arrays if k.startswith("x_")]:
        x = arrays[key]
        if x.dtype != np.uint8 or x.ndim != 4 or x.shape[3] != 3 or len(x) == 0:
            raise DataError(f"--dataset: {key} in {path} is {x.dtype} {x.shape}, "
                            f"it must be uint8 (N, H, W, 3) with N > 0")
        if min(x.shape[1:3]) < 8:
            raise DataError(f"--dataset: {key} in {path} has images of {x.shape[1]} x {x.shape[2]} "
                            f"pixels, they must have at least 8 x 8")
        if x.shape[1:] != arrays["x_train"].shape[1:]:
            raise DataError(f"--dataset: {key} in {path} has images of another size than x_train")
    for part in ("train", "test"):
        x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
        if y.shape != (len(x),) or not np.issubdtype(y.dtype, np.integer) or y.min() < 0:
            raise DataError(f"--dataset: y_{part} in {path} must be {len(x)} class numbers "
                            f"from 0, one per image, it is {y.dtype} {y.shape}")
    if arrays["y_test"].max() > arrays["y_train"].max():
        raise DataError(f"--dataset: y_test in {path} has classes that y_train lacks")
    empty = np.flatnonzero(np.bincount(arrays["y_train"]) == 0)
    if len(empty):
        raise DataError(f"--dataset: y_train in {path} has no image of class {empty[0]}; "
                        f"number the classes from 0 without a gap")


def read_torchvision(name, data_dir):
    from torchvision import datasets
    try:
        train, test = (datasets.CIFAR10(data_dir, train=t, download=True) for t in (True, False))
    except Exception as error:  # no network, a broken archive, a read-only folder, ...
        raise DataError(f"--dataset {name}: no {data_dir}/{name}.npz and the download failed "
                        f"({type(error).__name__}); put cifar-10-python.tar.gz or {name}.npz into "
                        f"{data_dir}/, or use --dataset synthetic, which needs no file") from None
    return {"x_train": train.data, "y_train": np.array(train.targets),
            "x_test": test.data, "y_test": np.array(test.targets)}


def synthetic(size=16, per_class=1000, per_class_test=100):
    """Ten shapes of random colour, place, size and tilt on a noisy ground. Always the same data."""
    def images(n, purpose):
        x = np.concatenate([draw_shape(s, n, size, rng(0, purpose, s)) for s in range(10)])
        return x, np.repeat(np.arange(10), n)
    (x, y), (x_test, y_test) = images(per_class, "train"), images(per_class_test, "test")
    return {"x_train": x, "y_train": y, "x_test": x_test, "y_test": y_test}


def draw_shape(shape, n, size, g):
    """n images (n, size, size, 3) uint8 of one shape."""
    def uniform(lo, hi, *dims):
        return g.uniform(lo, hi, (n, *(dims or (1, 1))))
    v, u = np.mgrid[-1:1:size * 1j, -1:1:size * 1j]                       # rows, columns
    u, v = u - uniform(-.35, .35), v - uniform(-.35, .35)                 # place   (n, size, size)
    tilt, scale = uniform(-.4, .4), uniform(.5, .75)                     # radians; half-width
    u, v = ((u * np.cos(tilt) + v * np.sin(tilt)) / scale,
            (v * np.cos(tilt) - u * np.sin(tilt)) / scale)
    r, box, a, b = np.hypot(u, v), np.maximum(abs(u), abs(v)), abs(u + v) / 1.4, abs(u - v) / 1.4
    # How far outside the shape a point is, in units of its half-width; negative inside.
    outside = [r - 1, box - .9, np.maximum(np.minimum(abs(u), abs(v)) - .3, box - 1),
               np.maximum(abs(abs(v) - .6) - .25, box - .95),
               np.maximum(abs(u) * 1.7 - v - .8, v - .8), abs(u) + abs(v) - 1.15,
               np.maximum(abs(v - .7 * np.round(v / .7)) - .18, box - .95),
               np.maximum(np.minimum(a, b) - .3, r - 1.2), abs(box - .65) - .3,
               abs(r - .68) - .34][shape]
    ink = np.clip(.5 - outside * scale * size / 2, 0, 1)[..., None]       # soft edge of one pixel
    ground, colour = uniform(.15, .85, 1, 1, 3), uniform(-.4, .4, 1, 1, 3)
    colour += .2 * np.sign(colour.sum(-1, keepdims=True))                # some contrast for all
    x = ground + ink * colour + g.normal(0, .14, (n, size, size, 3))
    return (x.clip(0, 1) * 255).astype(np.uint8)


# ---------------------------------------------------------------------------------------------
# splits


def class_counts(n_max, num_classes, gamma, imbalance="long", reverse=False):
    """Images per class. long: n_max * gamma^(-k/(K-1)), truncated; step: second half n_max/gamma.

    (The paper prints the exponent without its minus sign.)
    """
    last = int(n_max / gamma)    # by division: the power may fall a hair below a whole number
    if imbalance == "step":
        counts = [int(n_max) if k < num_classes // 2 else last for k in range(num_classes)]
    else:
        counts = [int(n_max * gamma ** (-k / (num_classes - 1))) for k in range(num_classes - 1)]
        counts.append(last)
    return counts[::-1] if reverse else counts


def matched(cfg):
    """Whether the flags say that labeled and unlabeled set are distributed alike."""
    return cfg.gamma_u is not None and cfg.gamma_l == cfg.gamma_u and not cfg.reverse_u


def split(dataset, cfg):
    """(labeled, unlabeled) index arrays into dataset.images, by the data flags.

    With none of --n1, --gamma_l, --m1, --gamma_u the data is taken as it is. --split `random`
    draws the images of a class by seed, `first` takes them in file order (the released code);
    with --pool `union` the unlabeled set holds the labeled images too.
    """
    wanted = {flag: getattr(cfg, flag) is not None for flag in ("n1", "gamma_l", "m1", "gamma_u")}
    if not any(wanted.values()):
        return split_as_it_is(dataset, cfg.pool)
    if not all(wanted.values()):
        missing = next(flag for flag in wanted if not wanted[flag])
        raise DataError(f"--{missing} is missing: --n1, --gamma_l, --m1, --gamma_u make a split "
                        f"together")
    num_classes, labeled, unlabeled = dataset.num_classes, [], []
    n_counts = class_counts(cfg.n1, num_classes, cfg.gamma_l, cfg.imbalance)
    m_counts = class_counts(cfg.m1, num_classes, cfg.gamma_u, cfg.imbalance, cfg.reverse_u)
    for k, (n, m) in enumerate(zip(n_counts, m_counts)):
        members = np.flatnonzero(dataset.labels == k)
        if n < 1 or n + m > len(members):
            raise DataError(f"--n1, --gamma_l, --m1, --gamma_u ask for {n} labeled and {m} "
                            f"unlabeled images of class {k} ({dataset.names[k]}), which has "
                            f"{len(members)}; at least 1 must be labeled")
        if cfg.split == "random":
            members = rng(cfg.seed, "split", k).permutation(members)
        labeled.append(members[:n])
        unlabeled.append(members[0 if cfg.pool == "union" else n:n + m])
    return np.concatenate(labeled), np.concatenate(unlabeled)


def split_as_it_is(dataset, pool):
    labeled, unlabeled = np.flatnonzero(dataset.labels >= 0), np.flatnonzero(dataset.labels < 0)
    if len(unlabeled) == 0:
        raise DataError("--dataset: there is no x_unlabeled in it, so give --n1, --gamma_l, --m1 "
                        "and --gamma_u to set labeled images aside as unlabeled")
    return labeled, np.concatenate([labeled, unlabeled]) if pool == "union" else unlabeled


# ---------------------------------------------------------------------------------------------
# streams


class IndexStream:
    """Endless passes over `indices`, reshuffled each pass. batch(step) needs no earlier batch."""

    def __init__(self, indices, batch_size, seed, purpose):
        self.indices, self.batch_size = np.asarray(indices), batch_size
        # The pass in hand and the next one; a cache, not a state.
        self.order = lru_cache(2)(
            lambda epoch: rng(seed, purpose, epoch).permutation(self.indices))

    def at(self, positions):
        """The images at these ascending positions of the endless sequence. (P,) -> (P,)"""
        epochs, offsets = np.divmod(positions, len(self.indices))
        return np.concatenate([self.order(int(e))[offsets[epochs == e]]
                               for e in np.unique(epochs)])

    def batch(self, step):
        return self.at(np.arange(step * self.batch_size, (step + 1) * self.batch_size))


class BalancedStream:
    """Class-aware sampling: classes in shuffled rounds, the images of a class in shuffled rounds.

    In every round each class comes once, so class k's image of round c is simply the c-th of its
    own endless sequence: the batch is a function of the step here too.
    """

    def __init__(self, indices, labels, batch_size, seed):
        self.classes = IndexStream(np.unique(labels), batch_size, seed, "round")
        self.members = {k: IndexStream(indices[labels == k], 1, seed, f"class {k}")
                        for k in self.classes.indices}

    def batch(self, step):
        size = self.classes.batch_size
        rounds = np.arange(step * size, (step + 1) * size) // len(self.members)
        classes = self.classes.batch(step)                                               # (M,)
        images = np.empty_like(classes)
        for k in np.unique(classes):
            images[classes == k] = self.members[k].at(rounds[classes == k])
        return images
