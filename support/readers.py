"""Where images come from: archives by way of torchvision, .npz files, folders of pictures.

A reader returns a dict of x_train, y_train, x_test, y_test and, where there are any, x_unlabeled
and names. x is an array of images (N, H, W, 3) uint8 or, for folders, an object array of N paths,
which `open_images` decodes into memory if they fit and otherwise when they are needed.
What comes from a file is checked here, before anything is computed from it. Which images are
labeled and in which order they come is data.py's business.
"""
import hashlib
import os
import pickle
import sys
import tarfile
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torchvision import datasets

from support import UserError
from support.config import DATA_DIR
from support.pictures import Pictures, Skipped, as_paths, list_classes, list_pictures

MEMORY = 2**30       # bytes: pictures that take more than this once decoded stay files
ARCHIVES = {"cifar10": "cifar-10-python.tar.gz", "cifar100": "cifar-100-python.tar.gz",
            "stl10": "stl10_binary.tar.gz", "sun397": "SUN397.tar.gz"}
# Raised without a network, in a read-only folder, and by files that are truncated or corrupt.
BROKEN_ARCHIVE = (OSError, RuntimeError, EOFError, KeyError, ValueError, tarfile.TarError,
                  pickle.UnpicklingError, zlib.error)


def find_path(path, cwd):
    """A path that leads nowhere from here starts in cwd."""
    there = Path(cwd, path)
    return str(there) if not Path(path).exists() and there.exists() else path


# ---------------------------------------------------------------------------------------------
# .npz files and archives


def read_npz(path):
    """x_train (N, H, W, 3) uint8 (grey: (N, H, W) or (N, H, W, 1)), y_train (N,) class numbers
    from 0, x_test, y_test, optional x_unlabeled, names (K,) str."""
    arrays = load_npz(path, "--dataset", ("x_train", "y_train", "x_test", "y_test"),
                      ("x_unlabeled", "names"))
    for key in [k for k in arrays if k.startswith("x_")]:
        arrays[key] = check_images(arrays[key], f"--dataset: {key} in {path}")
        if arrays[key].shape[1:] != arrays["x_train"].shape[1:]:
            raise UserError(f"--dataset: {key} in {path} has images of another size than x_train; "
                            f"resize them")
    if "names" in arrays:
        names = arrays["names"]
        if names.dtype.kind != "U" or names.ndim != 1:
            raise UserError(f"--dataset: names in {path} is {names.dtype} {names.shape}, it must "
                            f"be one str for each class")
        arrays["names"] = names.tolist()
    return check_labels(arrays, path)


def load_npz(path, flag, needed, optional=()):
    """{name: array} of an .npz file that anybody may have written; nothing else in it is read."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in (*needed, *optional) if key in file.files}
            others = sorted(set(file.files) - arrays.keys())
    except Exception as error:                # numpy and zipfile raise a dozen kinds
        why = (str(error).splitlines() or [""])[0] or type(error).__name__
        raise UserError(f"{flag}: {path} cannot be read as an .npz file ({why}); write it with "
                        f"numpy.savez") from error
    for key in needed:
        if key not in arrays:
            raise UserError(f"{flag}: {path} lacks the array {key}; it must hold "
                            f"{', '.join(needed)}")
    for key, array in arrays.items():
        if not isinstance(array, np.ndarray):                    # numpy gives other files as bytes
            raise UserError(f"{flag}: {key} in {path} is not an array; write it with numpy.savez")
    Skipped({"of an unknown name": others} if others else {}).tell(path)
    return arrays


def check_images(x, what):
    """uint8, grey or colour -> (N, H, W, 3)"""
    x = x[..., None] if x.ndim == 3 else x
    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[3] not in (1, 3) or len(x) == 0:
        raise UserError(f"{what} is {x.dtype} {x.shape}, it must be uint8 (N, H, W, 3), or "
                        f"(N, H, W) if grey, with N > 0")
    if min(x.shape[1:3]) < 8:
        raise UserError(f"{what} has images of {x.shape[1]} x {x.shape[2]} pixels, they must "
                        f"have at least 8 x 8")
    return x if x.shape[3] == 3 else x.repeat(3, axis=3)


def check_labels(arrays, path):
    """Before they are counted: np.bincount allocates as many entries as the largest number."""
    for part in ("train", "test"):
        x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
        if y.shape != (len(x),) or y.dtype.kind not in "iu" or y.min() < 0:
            raise UserError(f"--dataset: y_{part} in {path} must be {len(x)} class numbers "
                            f"from 0, one per image, it is {y.dtype} {y.shape}")
    y_train, y_test = arrays["y_train"], arrays["y_test"]
    if y_train.max() >= len(y_train):
        raise UserError(f"--dataset: y_train in {path} has the class number {y_train.max()}, but "
                        f"only {len(y_train)} images; number the classes from 0 without a gap")
    if y_test.max() > y_train.max():
        raise UserError(f"--dataset: y_test in {path} has classes that y_train lacks; remove "
                        f"them or add training images")
    arrays |= {"y_train": y_train.astype(np.int64), "y_test": y_test.astype(np.int64)}
    empty = np.flatnonzero(np.bincount(arrays["y_train"]) == 0)
    if len(empty):
        names = dict(enumerate(arrays.get("names", ())))
        raise UserError(f"--dataset: y_train in {path} has no image of class {empty[0]} "
                        f"({names.get(empty[0], 'unnamed')}); number the classes from 0 without "
                        f"a gap")
    return arrays


def check_names(names, num_classes, dataset):
    if num_classes < 2:
        raise UserError(f"--dataset {dataset}: there is one class only; at least two classes are "
                        f"needed, add another one")
    if len(names) != num_classes:
        raise UserError(f"--dataset {dataset}: there are {len(names)} class names, but the labels "
                        f"go from 0 to {num_classes - 1}; give one name for each class")
    if len(set(names)) < num_classes:
        twice = next(n for n in names if names.count(n) > 1)
        raise UserError(f"--dataset {dataset}: two classes are called {twice!r}; give each a name "
                        f"of its own")


def read_archive(name, data_dir, download):
    """A dataset of the paper by way of torchvision, which unpacks it and, where it is not there
    yet, downloads it. download False: neither, nothing is written."""
    read = {"stl10": read_stl10, "sun397": read_sun397}.get(name, read_cifar)
    reader = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100,
              "stl10": datasets.STL10, "sun397": datasets.SUN397}[name]
    if not Path(data_dir).is_dir() and not (download and str(data_dir) == DATA_DIR):
        raise UserError(f"--data_dir {data_dir}: there is no such folder; correct it, or create it "
                        f"(mkdir -p {data_dir}) and put {ARCHIVES[name]} there"
                        + ", or have it downloaded" * download)
    try:
        return read(partial(reader, download=download), data_dir)
    except BROKEN_ARCHIVE as error:
        done = "the download failed" if download else "only training unpacks or downloads it"
        raise UserError(f"--dataset {name}: {data_dir} holds neither {name}.npz nor a complete "
                        f"{ARCHIVES[name]}{'' if download else ', unpacked'}, and {done} "
                        f"({type(error).__name__}); "
                        f"put one of them there (and delete what a broken one has left), or use "
                        f"--dataset digits, which needs no file") from error


def read_digits():
    """The 1,797 handwritten digits inside scikit-learn, 8 x 8 pixels of 17 grey levels."""
    from sklearn.datasets import load_digits
    digits = load_digits()
    x = (digits.images * 255 / 16).round().astype(np.uint8)[..., None].repeat(3, axis=3)
    names = "zero one two three four five six seven eight nine".split()
    return {"x_train": x, "y_train": digits.target, "names": names}


def read_cifar(reader, data_dir):
    train, test = (reader(data_dir, train=t) for t in (True, False))
    return {"x_train": train.data, "y_train": np.array(train.targets),
            "x_test": test.data, "y_test": np.array(test.targets), "names": train.classes}


def read_stl10(reader, data_dir):
    train, test, rest = (reader(data_dir, split=s)
                         for s in ("train", "test", "unlabeled"))
    x = {f"x_{k}": s.data.transpose(0, 2, 3, 1)                        # (N, 96, 96, 3), a view
         for k, s in (("train", train), ("test", test), ("unlabeled", rest))}
    return x | {"y_train": train.labels, "y_test": test.labels}


def read_sun397(reader, data_dir):
    """All pictures; torchvision lists them in the order of the disk, here they are sorted."""
    sun = reader(data_dir)
    pairs = sorted(zip(map(str, sun._image_files), sun._labels, strict=True))
    paths, labels = zip(*pairs, strict=True)
    return {"x_train": as_paths(paths), "y_train": np.array(labels), "names": sun.classes}


# ---------------------------------------------------------------------------------------------
# folders of pictures


def read_folder(folder):
    """train/<class>/*, test/<class>/*, optional unlabeled/*."""
    folder, skipped = Path(folder), Skipped()
    for part in ("train", "test"):
        if not (folder / part).is_dir():
            raise UserError(f"--dataset {folder}: there is no folder {part} in it; it must hold "
                            f"train/<class>/ and test/<class>/ with pictures, unlabeled/ if you "
                            f"have some")
    train, test = (list_classes(folder / part, skipped) for part in ("train", "test"))
    strange = sorted(test.keys() - train.keys())
    if strange:
        raise UserError(f"--dataset {folder}: test/{strange[0]} has no counterpart; name its "
                        f"folders as those in train/")
    missing = sorted(train.keys() - test.keys())
    if missing:
        print(f"--dataset {folder}: test/ has no pictures of {', '.join(missing)}; bACC and GM "
              f"leave out what is not tested", file=sys.stderr)
    names, arrays = list(train), {"names": list(train)}
    for part, classes in (("train", train), ("test", test)):
        arrays[f"x_{part}"] = as_paths([p for files in classes.values() for p in files])
        arrays[f"y_{part}"] = np.repeat([names.index(name) for name in classes],
                                        [len(files) for files in classes.values()])
    if (folder / "unlabeled").is_dir():
        arrays["x_unlabeled"] = as_paths(list_pictures(folder / "unlabeled", skipped))
    others = {p.name for p in folder.iterdir()} - {"train", "test"}
    others -= {"unlabeled"} if "x_unlabeled" in arrays else set()
    if others:
        skipped.add("beside train, test and unlabeled", *others)
    skipped.tell(folder)
    return arrays


def read_unknown(path, size):
    """Images to predict: (names, (N, 3, H, W)); from a picture, a folder, or an .npz's array x."""
    if not Path(path).exists():
        raise UserError(f"--predict {path}: there is no such file or folder; correct the path")
    if Path(path).suffix == ".npz":
        x = load_npz(path, "--predict", ("x",))["x"]
        x = as_tensor(check_images(x, f"--predict: x in {path}"), size)
        return [str(i) for i in range(len(x))], x
    skipped = Skipped()
    files = as_paths(list_pictures(path, skipped))
    skipped.tell(path)
    return files.tolist(), Pictures(files, size)


# ---------------------------------------------------------------------------------------------
# from arrays and files to (N, 3, H, W) uint8


def open_images(train, test, size):
    """train: arrays that are joined, test: one array -> images and test images (N, 3, H, W)."""
    if train[0].dtype != object:
        return torch.cat([as_tensor(x, size) for x in train]), as_tensor(test, size)
    train, test = Pictures(np.concatenate(train), size), Pictures(test, size)
    if np.prod(train.shape) + np.prod(test.shape) <= MEMORY:
        return train.in_memory(), test.in_memory()
    return train, test


def as_tensor(images, size):
    """(N, H, W, 3) uint8 array -> (N, 3, *size) uint8 tensor, resized by averaging areas."""
    x = torch.from_numpy(images).permute(0, 3, 1, 2)
    if size is None or x.shape[2:] == size:
        return x.contiguous()
    chunks = x.split(max(1, 30_000_000 // x[0].numel()))   # float takes four times the bytes
    return torch.cat([F.interpolate(c.float(), size, mode="area").round().to(torch.uint8)
                      for c in chunks])


def colours(x):
    """(mean, std) of each channel of images (N, H, W, 3) uint8, in [0, 1]."""
    share = np.stack([np.bincount(x[..., c].ravel(), minlength=256) for c in range(3)])
    share = share / share.sum(1, keepdims=True)               # (3, 256) of each grey level
    level = np.arange(256) / 255
    mean = share @ level
    std = np.sqrt((share * (level - mean[:, None]) ** 2).sum(1)).clip(1e-3)
    return tuple(mean.tolist()), tuple(std.tolist())


def fingerprint(*parts):
    """A digest of images, labels and names: of arrays and tensors their contents, wherever they
    are; of pictures on file the relative paths and sizes, because decoding all of them would
    take as long as an epoch."""
    digest = hashlib.blake2b(digest_size=16)
    files = [path for part in parts if isinstance(part, Pictures) for path in part.paths]
    root = os.path.commonpath(files) if files else ""            # they may be moved together
    for part in parts:
        if isinstance(part, Pictures):
            part = [(path[len(root):], os.path.getsize(path)) for path in part.paths]
        if isinstance(part, list):
            part = np.frombuffer(ascii(part).encode(), np.uint8)
        part = part.numpy(force=True) if torch.is_tensor(part) else part
        digest.update(f"{part.dtype} {part.shape}".encode())     # where one part ends
        digest.update(np.ascontiguousarray(part))
    return digest.hexdigest()
