"""Where images come from: archives by way of torchvision, .npz files, folders of pictures.

A reader returns a dict of x_train, y_train, x_test, y_test and, where there are any, x_unlabeled
and names. x is an array of images (N, H, W, 3) uint8 or, for folders, an object array of N paths,
which `open_images` decodes into memory if they fit and otherwise when they are needed.
Which images are labeled and in which order they come is data.py's business.
"""
import os
import pickle
import tarfile
import zipfile
import zlib
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torchvision import datasets

from support import UserError

MEMORY = 2**30       # bytes: pictures that take more than this once decoded stay files
SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"}
ARCHIVES = {"cifar10": "cifar-10-python.tar.gz", "cifar100": "cifar-100-python.tar.gz",
            "stl10": "stl10_binary.tar.gz", "sun397": "SUN397.tar.gz"}
# No network, a read-only folder; a file that is torn, mixed up or of another kind.
BROKEN_ARCHIVE = (OSError, RuntimeError, EOFError, KeyError, ValueError, tarfile.TarError,
                  pickle.UnpicklingError, zlib.error)
POOL = ThreadPoolExecutor(max(2, os.cpu_count() or 2), "pictures")      # PIL releases the GIL

# ---------------------------------------------------------------------------------------------
# .npz files and archives


def read_npz(path):
    """x_train (N, H, W, 3) uint8 (grey: (N, H, W) or (N, H, W, 1)), y_train (N,), x_test, y_test,
    optional x_unlabeled, names."""
    arrays = load_npz(path, "--dataset")
    missing = [k for k in ("x_train", "y_train", "x_test", "y_test") if k not in arrays]
    if missing:
        raise UserError(f"--dataset: {path} lacks the array {missing[0]}; "
                        f"readers.read_npz says what it must hold")
    for key in [k for k in arrays if k.startswith("x_")]:
        arrays[key] = check_images(arrays[key], f"--dataset: {key} in {path}")
        if arrays[key].shape[1:] != arrays["x_train"].shape[1:]:
            raise UserError(f"--dataset: {key} in {path} has images of another size than x_train")
    check_labels(arrays, path)
    return arrays


def load_npz(path, flag):
    try:
        with np.load(path, allow_pickle=False) as file:
            return {key: file[key] for key in file.files}
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{flag}: {path} cannot be read as an .npz file ({error}); write it with "
                        f"numpy.savez") from error


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
    for part in ("train", "test"):
        x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
        if y.shape != (len(x),) or not np.issubdtype(y.dtype, np.integer) or y.min() < 0:
            raise UserError(f"--dataset: y_{part} in {path} must be {len(x)} class numbers "
                            f"from 0, one per image, it is {y.dtype} {y.shape}")
    if arrays["y_test"].max() > arrays["y_train"].max():
        raise UserError(f"--dataset: y_test in {path} has classes that y_train lacks")
    empty = np.flatnonzero(np.bincount(arrays["y_train"]) == 0)
    if len(empty):
        names = dict(enumerate(arrays.get("names", ())))
        raise UserError(f"--dataset: y_train in {path} has no image of class {empty[0]} "
                        f"({names.get(empty[0], 'unnamed')}); number the classes from 0 without "
                        f"a gap")


def read_archive(name, data_dir):
    """A dataset of the paper, read and, where it is not there yet, downloaded by torchvision."""
    read = {"stl10": read_stl10, "sun397": read_sun397}.get(name, read_cifar)
    reader = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100,
              "stl10": datasets.STL10, "sun397": datasets.SUN397}[name]
    try:
        return read(reader, data_dir)
    except BROKEN_ARCHIVE as error:
        raise UserError(f"--dataset {name}: {data_dir} holds neither {name}.npz nor a complete "
                        f"{ARCHIVES[name]}, and the download failed ({type(error).__name__}); "
                        f"put one of them there (and delete what a broken one has left), or use "
                        f"--dataset synthetic, which needs no file") from error


def read_cifar(reader, data_dir):
    train, test = (reader(data_dir, train=t, download=True) for t in (True, False))
    return {"x_train": train.data, "y_train": np.array(train.targets),
            "x_test": test.data, "y_test": np.array(test.targets), "names": train.classes}


def read_stl10(reader, data_dir):
    train, test, rest = (reader(data_dir, split=s, download=True)
                         for s in ("train", "test", "unlabeled"))
    x = {f"x_{k}": s.data.transpose(0, 2, 3, 1)                        # (N, 96, 96, 3), a view
         for k, s in (("train", train), ("test", test), ("unlabeled", rest))}
    return x | {"y_train": train.labels, "y_test": test.labels}


def read_sun397(reader, data_dir):
    """All pictures; torchvision lists them in the order of the disk, here they are sorted."""
    sun = reader(data_dir, download=True)
    pairs = sorted(zip(map(str, sun._image_files), sun._labels, strict=True))
    paths, labels = zip(*pairs, strict=True)
    return {"x_train": as_paths(paths), "y_train": np.array(labels), "names": sun.classes}


# ---------------------------------------------------------------------------------------------
# folders of pictures


def as_paths(paths):
    array = np.empty(len(paths), object)
    array[:] = [str(p) for p in paths]
    return array


def list_pictures(path):
    """The pictures in a folder and its subfolders, sorted; headers read, so that a file that is no
    picture is found before anything else happens."""
    path = Path(path)
    found = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES
                   and not p.name.startswith(".") and p.is_file()) if path.is_dir() else [path]
    if not found:
        raise UserError(f"{path} holds no picture ({' '.join(sorted(SUFFIXES))}); fill it or "
                        f"remove it")
    for _ in POOL.map(check_header, found):
        pass
    return found


def check_header(path):
    try:
        Image.open(path).close()
    except Exception as error:                # PIL raises a dozen kinds
        raise broken(path, error) from error


def broken(path, error):
    return UserError(f"{path} cannot be read as a picture ({type(error).__name__}); remove or "
                     f"replace it")


def list_classes(folder):
    """{class name: its pictures}, sorted by name."""
    classes = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    return {p.name: list_pictures(p) for p in classes}


def read_folder(folder):
    """train/<class>/*, test/<class>/*, optional unlabeled/*."""
    folder = Path(folder)
    for part in ("train", "test"):
        if not (folder / part).is_dir():
            raise UserError(f"--dataset {folder}: there is no folder {part} in it; it must hold "
                            f"train/<class>/ and test/<class>/ with pictures, unlabeled/ if you "
                            f"have some")
    train, test = (list_classes(folder / part) for part in ("train", "test"))
    strange = sorted(test.keys() - train.keys())
    if strange or not test:
        raise UserError(f"--dataset {folder}: test/{strange[0] if strange else '<class>'} has no "
                        f"counterpart; name its folders as those in train/")
    names, arrays = list(train), {"names": list(train)}
    for part, classes in (("train", train), ("test", test)):
        arrays[f"x_{part}"] = as_paths([p for files in classes.values() for p in files])
        arrays[f"y_{part}"] = np.repeat([names.index(name) for name in classes],
                                        [len(files) for files in classes.values()])
    if (folder / "unlabeled").is_dir():
        arrays["x_unlabeled"] = as_paths(list_pictures(folder / "unlabeled"))
    return arrays


def read_unknown(path, size):
    """Images to predict: (names, (N, 3, H, W)); from a picture, a folder, or an .npz's array x."""
    if not Path(path).exists():
        raise UserError(f"--predict {path}: there is no such file or folder")
    if Path(path).suffix == ".npz":
        arrays = load_npz(path, "--predict")
        if "x" not in arrays:
            raise UserError(f"--predict {path}: it must hold an array x of images (N, H, W, 3)")
        x = as_tensor(check_images(arrays["x"], f"--predict: x in {path}"), size)
        return [str(i) for i in range(len(x))], x
    files = as_paths(list_pictures(path))
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
    """(N, H, W, 3) uint8 array -> (N, 3, *size) uint8 tensor, shrunk by averaging areas."""
    x = torch.from_numpy(images).permute(0, 3, 1, 2)
    if size is None or x.shape[2:] == size:
        return x.contiguous()
    chunks = x.split(max(1, 30_000_000 // x[0].numel()))   # float takes four times the bytes
    return torch.cat([F.interpolate(c.float(), size, mode="area").round().to(torch.uint8)
                      for c in chunks])


def decode(path, size):
    """A picture of any size and mode -> (3, H, W) uint8.

    The whole picture is squeezed into the shape of the network's input, as arrays are: a centre
    crop would keep the proportions, but may cut off what the picture shows.
    """
    image = to_rgb(open_picture(path, size))
    image = image.resize(size[::-1], Image.Resampling.BILINEAR)            # antialiased; (W, H)
    return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))


def open_picture(path, size):
    try:
        with Image.open(path) as image:
            image.draft(None, size[::-1])     # a large JPEG is shrunk while it is being decoded
            return ImageOps.exif_transpose(image)
    except Exception as error:                # PIL raises a dozen kinds
        raise broken(path, error) from error


def to_rgb(image):
    """More than 8 bits are scaled down (PIL would clip them); what is transparent becomes white."""
    if image.mode[0] in "IF":                 # 16 bits, or floats from 0 to 1
        levels = np.asarray(image, np.float64) * (255 if image.mode == "F" else 1 / 257)
        image = Image.fromarray(levels.round().clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


class Pictures:
    """Files in the guise of a uint8 tensor (N, 3, H, W), decoded by background threads.

    `expect(index)` begins, `[index]` collects; what was not expected is decoded then. At most
    `capacity` pictures are held, which bounds the memory: collected ones go first, then the oldest.
    """

    def __init__(self, paths, size):
        self.paths, self.size, self.device = paths, size or (32, 32), torch.device("cpu")
        self.shape = (len(paths), 3, *self.size)
        self.begun, self.capacity = OrderedDict(), 0           # index -> future; next to go first

    def __len__(self):
        return len(self.paths)

    def to(self, device):
        self.device = torch.device(device)
        return self

    def expect(self, index, batches=6):
        """index (B,). batches: now and next of three streams, of this size or less."""
        self.capacity = max(self.capacity, batches * len(index))
        for i in index.tolist():
            if i not in self.begun:
                self.begun[i] = POOL.submit(decode, self.paths[i], self.size)
            self.begun.move_to_end(i)
        while len(self.begun) > self.capacity:
            self.begun.popitem(last=False)[1].cancel()

    def __getitem__(self, index):
        index = np.arange(len(self))[index]
        self.expect(index, batches=1)
        rows = torch.from_numpy(np.stack([self.begun[i].result() for i in index.tolist()]))
        for i in index.tolist():
            self.begun.move_to_end(i, last=False)
        if self.device.type == "cuda":
            rows = rows.pin_memory()          # so that the copy does not wait for the GPU's queue
        return rows.to(self.device, non_blocking=self.device.type == "cuda")

    def split(self, size):
        """As torch's, but one after the other, the next one being decoded meanwhile."""
        chunks = np.split(np.arange(len(self)), range(size, len(self), size))
        for now, following in zip(chunks, [*chunks[1:], chunks[-1]], strict=True):
            self.expect(now, batches=2)
            self.expect(following, batches=2)
            yield self[now]

    def in_memory(self):
        whole = torch.empty(self.shape, dtype=torch.uint8)
        for place, chunk in zip(whole.split(1000), self.split(1000), strict=True):
            place.copy_(chunk)
        return whole
