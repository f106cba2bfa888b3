"""Small files of the real formats: archives of CIFAR, STL-10 and SUN397, folders of pictures."""
import hashlib
import io
import pickle
import tarfile

import numpy as np
import pytest
from PIL import Image
from torchvision import datasets

import data
from support import UserError

G = np.random.default_rng(0)
MODES = ["RGB", "L", "P", "RGBA", "LA", "1", "I;16", "CMYK"]
SUN = {"/a/abbey": 53, "/b/beach": 60, "/c/cave/inside": 56}         # class: pictures


def noise(*shape):
    return G.integers(0, 256, shape, dtype=np.uint8)


def arrays(**changes):
    """Of a small .npz file with three classes."""
    x, y = noise(12, 9, 9, 3), np.arange(12) % 3
    return dict(x_train=x, y_train=y, x_test=x[::-1], y_test=y) | changes


def refusal(function, *args, **kwargs):
    """The one sentence of a user error."""
    with pytest.raises(UserError) as error:
        function(*args, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


def no_network(monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("no network")
    monkeypatch.setattr("torchvision.datasets.utils._urlretrieve", fail)


def write_tar(path, files):
    """files: {name: bytes}. Returns the checksum of the archive and those of the files."""
    with tarfile.open(path, "w:gz", compresslevel=1) as tar:
        for name, blob in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(blob)
            tar.addfile(info, io.BytesIO(blob))
    sums = {name.split("/")[-1]: hashlib.md5(blob).hexdigest() for name, blob in files.items()}
    return hashlib.md5(path.read_bytes()).hexdigest(), sums


def expect_sums(monkeypatch, reader, archive, sums):
    """Let torchvision's reader accept the checksums of the small archive."""
    monkeypatch.setattr(reader, "tgz_md5", archive)
    for part in ("train_list", "test_list"):
        listed = [[name, sums[name]] for name, _ in getattr(reader, part)]
        monkeypatch.setattr(reader, part, listed)
    if hasattr(reader, "meta"):
        monkeypatch.setattr(reader, "meta", reader.meta | {"md5": sums[reader.meta["filename"]]})


def pickled(x, y, key):
    """A CIFAR batch: rows of all red, all green, all blue values."""
    return pickle.dumps({"data": x.transpose(0, 3, 1, 2).reshape(len(x), -1), key: y.tolist()})


def write_cifar10(folder, monkeypatch):
    """(archive, images (20, 32, 32, 3), labels); the first 10 images are also the test set."""
    no_network(monkeypatch)
    x, y = noise(20, 32, 32, 3), np.arange(20) % 10
    files = {f"data_batch_{i + 1}": pickled(x[i::5], y[i::5], "labels") for i in range(5)}
    files |= {"test_batch": pickled(x[:10], y[:10], "labels"),
              "batches.meta": pickle.dumps({"label_names": data.CIFAR10})}
    files = {f"cifar-10-batches-py/{name}": blob for name, blob in files.items()}
    path = folder / "cifar-10-python.tar.gz"
    expect_sums(monkeypatch, datasets.CIFAR10, *write_tar(path, files))
    return path, x, y


def write_cifar100(folder, monkeypatch):
    """(images (200, 32, 32, 3), labels, class names); the first 100 are also the test set."""
    no_network(monkeypatch)
    x, y, names = noise(200, 32, 32, 3), np.arange(200) % 100, [f"thing {k}" for k in range(100)]
    files = {"train": pickled(x, y, "fine_labels"),
             "test": pickled(x[:100], y[:100], "fine_labels"),
             "meta": pickle.dumps({"fine_label_names": names})}
    files = {f"cifar-100-python/{name}": blob for name, blob in files.items()}
    sums = write_tar(folder / "cifar-100-python.tar.gz", files)
    expect_sums(monkeypatch, datasets.CIFAR100, *sums)
    return x, y, names


def write_stl10(folder, monkeypatch):
    """(images (55, 96, 96, 3), labels): 20 labeled images, 10 test images, 25 without a label."""
    no_network(monkeypatch)
    x, y = noise(55, 96, 96, 3), np.arange(20) % 10

    def binary(x):                          # all red, all green, all blue, each column by column
        return x.transpose(0, 3, 2, 1).tobytes()
    files = {"train_X.bin": binary(x[:20]), "train_y.bin": (y + 1).astype(np.uint8).tobytes(),
             "test_X.bin": binary(x[20:30]), "test_y.bin": bytes(range(1, 11)),
             "unlabeled_X.bin": binary(x[30:])}
    files = {f"stl10_binary/{name}": blob for name, blob in files.items()}
    sums = write_tar(folder / "stl10_binary.tar.gz", files)
    expect_sums(monkeypatch, datasets.STL10, *sums)
    return x, y


def write_sun397(folder, monkeypatch):
    """SUN397/<letter>/<class>/sun_*.jpg, picture i of class k of grey level 40 k + i."""
    no_network(monkeypatch)

    def jpeg(level):
        file = io.BytesIO()
        Image.fromarray(np.full((9, 12, 3), level, np.uint8)).save(file, "JPEG")
        return file.getvalue()
    files = {f"SUN397{c}/sun_{c[1]}{i:03}.jpg": jpeg(40 * k + i)
             for k, (c, n) in enumerate(SUN.items()) for i in range(n)}
    files["SUN397/ClassName.txt"] = "".join(f"{c}\n" for c in SUN).encode()
    archive, _ = write_tar(folder / "SUN397.tar.gz", files)
    monkeypatch.setattr(datasets.SUN397, "_DATASET_MD5", archive)


def write_folder(root, classes=("ape", "bee", "cow"), each=12, unlabeled=15, test=4):
    """Pictures of mixed sizes, modes and formats; the class sets the brightness."""
    for part, count in (("train", each), ("test", test), ("unlabeled", unlabeled)):
        for k, name in enumerate(classes):
            place = root / part / (name if part != "unlabeled" else "")
            place.mkdir(parents=True, exist_ok=True)
            for i in range(count):
                h, w = G.integers(9, 40, 2)
                x = (noise(h, w, 3) // 4 + 60 * k).astype(np.uint8)
                mode = MODES[i % len(MODES)]
                suffix = {"CMYK": "jpg", "I;16": "png"}.get(mode, ("png", "PNG")[i % 2])
                if mode == "RGB":
                    suffix = ("jpeg", "bmp", "webp")[k]
                image = (Image.fromarray(x[..., 0].astype(np.uint16) * 257) if mode == "I;16"
                         else Image.fromarray(x).convert(mode))
                image.save(place / f"{name}_{i}.{suffix}")
    return root
