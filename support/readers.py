"""Where images come from: archives by way of torchvision, .npz files, folders of pictures.

A reader returns x_train, y_train, x_test, y_test and, where there are any, x_unlabeled, names and
track (N,): frames of one film, nearly the same picture, have the same number. x is (N, H, W, 3)
uint8 or an array of N paths: pictures are decoded once, into an array that is mapped into memory.
"""
import csv
import hashlib
import os
import sys
import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from PIL import Image, ImageOps
from torchvision import datasets
from torchvision.datasets.utils import download_and_extract_archive

from support import UserError

CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck".split()
STL10 = "airplane bird car cat deer dog horse monkey ship truck".split()
GTSRB = [*(f"{speed} km/h" for speed in (20, 30, 50, 60, 70, 80)), "end: 80 km/h", "100 km/h",
         "120 km/h", "no passing", "no truck passing", "priority here", "priority road", "yield",
         "stop", "no vehicles", "no trucks", "no entry", "danger", "curve left", "curve right",
         "double curve", "bumpy road", "slippery road", "road narrows", "road works",
         "traffic lights", "pedestrians", "children", "bicycles", "ice or snow", "wild animals",
         "end: all limits", "turn right", "turn left", "ahead only", "ahead or right",
         "ahead or left", "keep right", "keep left", "roundabout", "end: no passing",
         "end: truck passing"]
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)                  # mean, std
BUILT_IN = {  # class names (None: the reader knows them), mean and standard deviation per channel
    "digits": (None, (0.3053, 0.3053, 0.3053), (0.3760, 0.3760, 0.3760)),
    "synthetic": ("abcdefghij", (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)),
    "cifar10": (CIFAR10, (0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)),
    "cifar100": (None, (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    "stl10": (STL10, (0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)),    # CIFAR-10's
    "sun397": (None, *IMAGENET),
    "gtsrb": (GTSRB, (0.3403, 0.3121, 0.3214), (0.2724, 0.2608, 0.2669)),
}
HELD_OUT = {"digits": 40, "sun397": 50}    # test images of a class, where there is no test set
ARCHIVES = {"cifar10": "cifar-10-python.tar.gz", "cifar100": "cifar-100-python.tar.gz",
            "stl10": "stl10_binary.tar.gz", "sun397": "SUN397.tar.gz",
            "gtsrb": "GTSRB_Final_{Training_Images,Test_Images,Test_GT}.zip"}
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")


def load(name, data_dir, image_size, hold_out, skip_broken, rng):
    """The fields of data.Dataset. hold_out: a share, if there is no test set; rng: data.rng"""
    path, data_dir = Path(name), Path(data_dir)
    archive = data_dir / f"{name}.npz"
    if name == "synthetic":
        arrays = make_synthetic(rng, image_size or 16)
    elif name == "digits":
        arrays = read_digits()
    elif name in BUILT_IN:
        arrays = read_npz(archive) if archive.exists() else read_archive(name, data_dir)
    elif path.suffix == ".npz":
        arrays = read_npz(path)
    elif path.is_dir():
        arrays = read_folder(path)
    else:
        raise UserError(f"--dataset {name}: that is no .npz file and no folder; name one, or one "
                        f"of {', '.join(BUILT_IN)}")
    num_classes = int(arrays["y_train"].max()) + 1
    names, mean, std = BUILT_IN.get(name, (None, None, None))
    names = list(map(str, names or arrays.get("names", [f"class {k}" for k in range(num_classes)])))
    if num_classes < 2 or len(names) != num_classes or len(set(names)) != num_classes:
        raise UserError(f"--dataset {name}: it has {num_classes} class(es) and {len(set(names))} "
                        f"name(s); at least two classes are needed, each with its own name")
    if "x_test" not in arrays:
        arrays = hold_out_test(arrays, HELD_OUT.get(name, hold_out), rng)
        if name not in HELD_OUT:
            print(f"{name}: there is no test set, so {hold_out:.0%} of each class, "
                  f"{len(arrays['x_test']):,} images, are held out (--hold_out)", file=sys.stderr)
    parts = [arrays[key] for key in ("x_train", "x_unlabeled", "x_test") if key in arrays]
    labels = np.append(arrays["y_train"], [-1] * len(arrays.get("x_unlabeled", []))).astype(int)
    test_labels, tracks = arrays["y_test"].astype(np.int64), arrays.get("track")
    if parts[0].dtype == object:
        images, readable = decode_once(np.concatenate(parts), image_size or 32, data_dir,
                                       skip_broken)
        tracks = tracks if tracks is None else tracks[readable[:len(tracks)]]
        labels, test_labels = labels[readable[:len(labels)]], test_labels[readable[len(labels):]]
        if lost := set(names) - {names[k] for k in labels[labels >= 0]}:
            raise UserError(f"--dataset {name}: there is no readable picture in train/{min(lost)}")
    else:
        images = torch.cat([as_tensor(x, image_size and (image_size, image_size)) for x in parts])
    if untested := [names[k] for k in range(num_classes) if k not in test_labels]:
        print(f"WARNING: bACC leaves out {', '.join(untested)}: no test image", file=sys.stderr)
    if mean is None:
        some = images[evenly(len(labels), 500)].float() / 255                  # (n, 3, H, W)
        mean = some.mean((0, 2, 3)).tolist()
        std = some.std((0, 2, 3), correction=0).clamp_min(1e-3).tolist()
    return {"images": images[:len(labels)], "labels": labels, "test_images": images[len(labels):],
            "test_labels": torch.from_numpy(test_labels), "names": names, "mean": mean, "std": std,
            "tracks": tracks}


def hold_out_test(arrays, number, rng):
    """Set images aside for testing, the same whatever the seed. number: of each class, or a share
    of it, at least one image but not the last one; of tracks, whose frames stay together."""
    y, test = arrays["y_train"], []
    track = arrays.get("track", np.arange(len(y)))
    for k in np.unique(y).tolist():
        members = np.flatnonzero(y == k)
        tracks = np.unique(track[members])
        n = number if number >= 1 else min(max(1, round(number * len(tracks))), len(tracks) - 1)
        test.append(members[np.isin(track[members], rng(0, "test", k).permutation(tracks)[:n])])
    test = np.concatenate(test)
    train = np.delete(np.arange(len(y)), test)
    kept = {key: arrays[key][train] for key in ("x_train", "y_train", "track") if key in arrays}
    return arrays | kept | {"x_test": arrays["x_train"][test], "y_test": y[test]}


def as_tensor(images, size):
    """(N, H, W, 3) uint8 array -> (N, 3, *size) uint8 tensor, resized by averaging areas."""
    x = torch.from_numpy(images).permute(0, 3, 1, 2)
    if size is None or x.shape[2:] == size:
        return x.contiguous()
    resize = torch.nn.AdaptiveAvgPool2d(size)
    return torch.cat([resize(chunk.float()).round().to(torch.uint8) for chunk in x.split(1000)])


def evenly(number, most):
    return np.unique(np.linspace(0, number - 1, most).astype(int))


def checksum(images, labels, test_images, test_labels, names):
    """Tells these data from others, on any device: of all labels and at most 2,000 images a set."""
    digest = hashlib.blake2b(ascii((names, images.shape, test_images.shape)).encode())
    for x, y in ((images, labels), (test_images, test_labels)):
        digest.update(x[evenly(len(x), 2000)].contiguous().numpy(force=True))
        digest.update(torch.as_tensor(y).numpy(force=True))
    return digest.hexdigest()[:32]


def read_npz(path, flag="--dataset", needed=("x_train", "y_train")):
    """x_train (N, H, W, 3) or (N, H, W) uint8, y_train (N,) class numbers from 0, optional x_test,
    y_test, x_unlabeled, names (K,) str, track (N,)."""
    try:
        with np.lib.npyio.NpzFile(path) as file:
            if "y_train" in needed and {"x_test", "y_test"} & {*file.files}:
                needed = (*needed, "x_test", "y_test")
            arrays = {key: file[key] for key in sorted({*needed, *file.files})}
    except Exception as error:                # numpy and zipfile raise a dozen kinds
        raise UserError(f"{flag} {path}: it cannot be read ({error}); write {', '.join(needed)} "
                        f"into it with numpy.savez") from error
    for key in sorted(arrays.keys() & {"x", "x_train", "x_test", "x_unlabeled"}):
        x = arrays[key][..., None] if arrays[key].ndim == 3 else arrays[key]
        if (x.dtype != np.uint8 or x.ndim != 4 or x.shape[3] not in (1, 3) or len(x) == 0
                or x.shape[1:3] != arrays.get("x_train", x).shape[1:3]):
            raise UserError(f"{flag} {path}: {key} is {x.dtype} {arrays[key].shape}, it must be "
                            f"uint8 (N, H, W, 3), or (N, H, W) if grey, all of one size")
        arrays[key] = x if x.shape[3] == 3 else x.repeat(3, axis=3)
    for key in [key for key in needed if key.startswith("y")]:
        y, n = arrays[key], len(arrays[key.replace("y", "x")])
        if (y.shape != (n,) or y.dtype.kind not in "iu" or y.min() < 0
                or y.max() >= len(np.unique(arrays["y_train"]))):
            raise UserError(f"--dataset {path}: {key} must hold {n} whole numbers, one per "
                            f"image, from 0 to K - 1, and y_train each of these")
    return arrays


def make_synthetic(rng, size, each=1000, each_test=100):
    """For the tests: ten gratings, each of its own direction, of random colour and on noise."""
    def draw(n, purpose):
        g, y = rng(0, purpose), np.arange(10).repeat(n)                        # (10n,)
        phase, colour = g.uniform(0, 6.28, (10 * n, 1, 1)), g.uniform(-50, 50, (10 * n, 1, 1, 3))
        angle, (v, u) = y[:, None, None] * np.pi / 10, np.mgrid[:size, :size] * 12 / size
        wave = np.sin(u * np.cos(angle) + v * np.sin(angle) + phase)           # (10n, H, W)
        x = 128 + wave[..., None] * colour + g.normal(0, 20, (10 * n, size, size, 3))
        return {f"x_{purpose}": x.clip(0, 255).astype(np.uint8), f"y_{purpose}": y}
    return draw(each, "train") | draw(each_test, "test")


def read_digits():
    """The 1,797 handwritten digits inside scikit-learn, 8 x 8 pixels of 17 grey levels."""
    from sklearn.datasets import load_digits  # takes a second to import
    digits = load_digits()
    x = (digits.images * 255 / 16).round().astype(np.uint8)[..., None].repeat(3, axis=3)
    names = "zero one two three four five six seven eight nine".split()
    return {"x_train": x, "y_train": digits.target, "names": names}


def read_archive(name, data_dir):
    """A dataset of the paper, by torchvision, which downloads what is not there."""
    def read(**part):
        return getattr(datasets, name.upper())(data_dir, download=True, **part)
    try:
        if name == "sun397":                  # sorted: torchvision lists in the order of the disk
            sun = read()
            order = np.argsort([str(path) for path in sun._image_files])
            return {"x_train": np.array(sun._image_files, object)[order],
                    "y_train": np.array(sun._labels)[order], "names": sun.classes}
        if name == "stl10":
            parts = {part: read(split=part) for part in ("train", "test", "unlabeled")}
            return ({f"x_{part}": stl.data.transpose(0, 2, 3, 1) for part, stl in parts.items()}
                    | {f"y_{part}": stl.labels for part, stl in parts.items()})
        if name == "gtsrb":
            return read_gtsrb(data_dir)
        train, test = read(train=True), read(train=False)
        return {"x_train": train.data, "y_train": np.array(train.targets), "x_test": test.data,
                "y_test": np.array(test.targets), "names": train.classes}
    except (OSError, RuntimeError, zipfile.BadZipFile) as error:
        raise UserError(f"--dataset {name}: {data_dir} holds neither {name}.npz nor a complete "
                        f"{ARCHIVES[name]}, and the download failed ({type(error).__name__}); put "
                        f"one of them there, or use --dataset digits, which needs none") from error


def read_gtsrb(data_dir):
    """Traffic signs: 43 classes, a natural long tail. A track is about 30 frames of one sign."""
    top = data_dir / "gtsrb"
    if not top.exists():                      # unpacked elsewhere first: it is whole or not there
        data_dir.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=data_dir) as scratch:
            for part in ("Training_Images", "Test_Images", "Test_GT"):
                download_and_extract_archive(
                    "https://sid.erda.dk/public/archives/daaeac0d7ce1152aea9b61d9f1e19370/"
                    f"GTSRB_Final_{part}.zip", data_dir, Path(scratch, "new"))
            os.rename(Path(scratch, "new"), top)
    train = sorted(top.glob("GTSRB/Final_Training/Images/*/*.ppm"))    # <class>/<track>_<frame>
    with open(top / "GT-final_test.csv") as file:
        test = list(csv.DictReader(file, delimiter=";"))
    labels = [int(path.parent.name) for path in train]
    return {"x_train": np.array(train, object), "y_train": np.array(labels),
            "x_test": np.array([top / "GTSRB/Final_Test/Images" / row["Filename"] for row in test],
                               object),
            "y_test": np.array([int(row["ClassId"]) for row in test]),
            "track": np.array([int(path.name[:5]) + 10**5 * k
                               for path, k in zip(train, labels, strict=True)])}


def list_pictures(top, skipped):
    """The pictures in a folder and its subfolders, sorted. The other files go to `skipped`."""
    paths = sorted(Path(folder, name) for folder, _, files in os.walk(top) for name in files)
    pictures = [path for path in paths if path.suffix.lower() in SUFFIXES and path.is_file()
                and not any(part.startswith(".") for part in path.relative_to(top).parts)]
    if not pictures:
        raise UserError(f"{top} holds no picture ({' '.join(SUFFIXES)}); name a folder with some")
    skipped += set(paths) - set(pictures)
    return pictures


def read_folder(folder):
    """train/<class>/*, optional test/<class>/* and unlabeled/*."""
    arrays, skipped = {}, []
    for part in ("train", "test") if (folder / "test").exists() else ("train",):
        classes = {path.name: list_pictures(path, skipped)
                   for path in sorted((folder / part).glob("[!.]*")) if path.is_dir()}
        if not classes:
            raise UserError(f"--dataset {folder}: there is no folder {part}/<class> in it; it must "
                            f"hold train/<class>/ and, if you have them, test/<class>/, unlabeled/")
        names = arrays.setdefault("names", list(classes))       # those in train
        for name in classes.keys() - set(names):
            raise UserError(f"--dataset {folder}: there is a folder test/{name}, but no "
                            f"train/{name}; the classes must have the same names")
        arrays[f"x_{part}"] = np.array(sum(classes.values(), []), object)
        arrays[f"y_{part}"] = np.array([names.index(k) for k in classes for _ in classes[k]])
    if (folder / "unlabeled").is_dir():
        arrays["x_unlabeled"] = np.array(list_pictures(folder / "unlabeled", skipped), object)
    if skipped:
        print(f"{len(skipped):,} file(s) are no pictures: {min(skipped)}, ...", file=sys.stderr)
    return arrays


def decode(path, size):
    """A picture -> (3, *size) uint8. It is squeezed: a crop might cut off what it shows."""
    with Image.open(path) as image:
        image.draft(None, size[::-1])         # a large JPEG is shrunk while it is being decoded
        image = ImageOps.exif_transpose(image)
    if image.mode[0] in "IF":                 # 16 bits, or floats from 0 to 1: PIL would clip
        levels = np.asarray(image, np.float64) * (255 if image.mode == "F" else 1 / 257)
        image = Image.fromarray(levels.round().clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:           # what is transparent becomes white
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    image = image.convert("RGB").resize(size[::-1], Image.Resampling.BILINEAR)  # antialiased
    return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))


def decode_all(paths, size, write, skip_broken):
    """Pass chunks of pictures (n, 3, H, W) uint8 to `write`. Returns the numbers of those that
    cannot be read; without skip_broken these are all named in an error."""
    broken = []
    with ThreadPoolExecutor() as pool:        # PIL releases the GIL
        for i in range(0, len(paths), 256):
            chunk = [pool.submit(decode, path, size) for path in paths[i:i + 256]]
            broken += [i + j for j, future in enumerate(chunk) if future.exception()]
            good = [future.result() for future in chunk if not future.exception()]
            if good and (skip_broken or not broken):
                write(np.stack(good))
    message = ", ".join(str(paths[i]) for i in broken[:10]) + ", ..." * (len(broken) > 10)
    message = f"{len(broken):,} picture(s) cannot be read ({message})"
    if broken and (len(broken) == len(paths) or not skip_broken):
        raise UserError(f"{message}; remove or mend them, or add --skip_broken to leave them out")
    if broken:
        print(f"{message} and are left out", file=sys.stderr)
    return broken


def decode_once(paths, size, data_dir, skip_broken):
    """Images (N, 3, size, size) uint8, mapped from a file, which is another one if a picture
    changes, and of which paths they are: a mask, all True unless broken ones are skipped."""
    files = [(os.path.abspath(p), os.path.getsize(p), os.path.getmtime(p)) for p in paths]
    key = hashlib.blake2b(ascii((files, size, skip_broken)).encode(), digest_size=16).hexdigest()
    cache = data_dir / "cache" / key          # a folder, which is whole or not there
    if not cache.exists():
        print(f"decoding {len(paths):,} pictures into {cache}: once", file=sys.stderr)
        cache.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=cache.parent) as scratch:
            new = Path(scratch, "new")
            new.mkdir()
            with open(new / "images", "wb") as file:
                broken = decode_all(paths, (size, size), file.write, skip_broken)
            np.save(new / "broken.npy", np.array(broken, int))
            if not cache.exists():            # another run may have been faster
                os.rename(new, cache)
    readable = np.ones(len(paths), bool)
    readable[np.load(cache / "broken.npy")] = False
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nobody writes
    images = np.memmap(cache / "images", mode="r").reshape(-1, 3, size, size)
    return torch.from_numpy(images), readable
