"""Small files of the real formats: archives of every dataset, folders of pictures."""
import hashlib
import io
import pickle
import tarfile
import zipfile

import numpy as np
from PIL import Image
from torchvision import datasets

from support.readers import CIFAR10

G = np.random.default_rng(0)
SUN = {"/a/abbey": 53, "/b/beach": 60, "/c/cave/inside": 56}         # class: pictures


def noise(*shape):
    return G.integers(0, 256, shape, dtype=np.uint8)


def no_network(monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("no network")
    monkeypatch.setattr("torchvision.datasets.utils._urlretrieve", fail)


def write_tar(folder, monkeypatch, reader, archive, files):
    """files: {name: bytes}. torchvision's reader is told their checksums, and has no network."""
    no_network(monkeypatch)
    with tarfile.open(folder / archive, "w:gz", compresslevel=1) as tar:
        for name, blob in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(blob)
            tar.addfile(info, io.BytesIO(blob))
    md5 = hashlib.md5((folder / archive).read_bytes()).hexdigest()
    monkeypatch.setattr(reader, "_DATASET_MD5" if reader is datasets.SUN397 else "tgz_md5", md5)
    sums = {name.split("/")[-1]: hashlib.md5(blob).hexdigest() for name, blob in files.items()}
    for part in ("train_list", "test_list"):                 # SUN397 has none
        listed = [[name, sums[name]] for name, _ in getattr(reader, part, [])]
        monkeypatch.setattr(reader, part, listed, raising=False)
    meta = {"filename": "batches.meta", "key": "label_names", "md5": sums.get("batches.meta")}
    monkeypatch.setattr(reader, "meta", meta, raising=False)                 # CIFAR's only


def write_cifar10(folder, monkeypatch):
    """(images (20, 32, 32, 3), labels); the first 10 images are also the test set."""
    x, y = noise(20, 32, 32, 3), np.arange(20) % 10

    def batch(x, y):                        # rows of all red, all green, all blue values
        rows = x.transpose(0, 3, 1, 2).reshape(len(x), -1)
        return pickle.dumps({"data": rows, "labels": y.tolist()})
    files = {f"data_batch_{i + 1}": batch(x[i::5], y[i::5]) for i in range(5)}
    files |= {"test_batch": batch(x[:10], y[:10]),
              "batches.meta": pickle.dumps({"label_names": CIFAR10})}
    files = {f"cifar-10-batches-py/{name}": blob for name, blob in files.items()}
    write_tar(folder, monkeypatch, datasets.CIFAR10, "cifar-10-python.tar.gz", files)
    return x, y


def write_stl10(folder, monkeypatch):
    """(images (55, 96, 96, 3), labels): 20 labeled images, 10 test images, 25 without a label."""
    x, y = noise(55, 96, 96, 3), np.arange(20) % 10

    def binary(x):                          # all red, all green, all blue, each column by column
        return x.transpose(0, 3, 2, 1).tobytes()
    files = {"train_X.bin": binary(x[:20]), "train_y.bin": (y + 1).astype(np.uint8).tobytes(),
             "test_X.bin": binary(x[20:30]), "test_y.bin": bytes(range(1, 11)),
             "unlabeled_X.bin": binary(x[30:])}
    files = {f"stl10_binary/{name}": blob for name, blob in files.items()}
    write_tar(folder, monkeypatch, datasets.STL10, "stl10_binary.tar.gz", files)
    return x, y


def write_sun397(folder, monkeypatch):
    """SUN397/<letter>/<class>/sun_*.jpg, picture i of class k of grey level 40 k + i."""
    def jpeg(level):
        file = io.BytesIO()
        Image.fromarray(np.full((9, 12, 3), level, np.uint8)).save(file, "JPEG")
        return file.getvalue()
    files = {f"SUN397{c}/sun_{c[1]}{i:03}.jpg": jpeg(40 * k + i)
             for k, (c, n) in enumerate(SUN.items()) for i in range(n)}
    files["SUN397/ClassName.txt"] = "\n".join([*SUN, ""]).encode()
    write_tar(folder, monkeypatch, datasets.SUN397, "SUN397.tar.gz", files)


def write_gtsrb(folder, monkeypatch):
    """43 classes of two tracks with two frames of grey level 5 k + 2 track + frame; a test picture
    of each, in another order."""
    def ppm(level):
        file = io.BytesIO()
        Image.fromarray(np.full((9, 12, 3), level, np.uint8)).save(file, "PPM")
        return file.getvalue()
    images, test = "GTSRB/Final_Training/Images", "GTSRB/Final_Test/Images"
    train = {f"{images}/{k:05}/{t:05}_{f:05}.ppm": ppm(5 * k + 2 * t + f)
             for k in range(43) for t in range(2) for f in range(2)}
    header, order = "Filename;Width;Height;Roi.X1;Roi.Y1;Roi.X2;Roi.Y2;ClassId", range(42, -1, -1)
    table = [f"{i:05}.ppm;12;9;1;1;10;8;{k}" for i, k in enumerate(order)]
    for part, files in {
            "Training_Images": train | {f"{images}/00000/GT-00000.csv": header.encode()},
            "Test_Images": {f"{test}/{i:05}.ppm": ppm(5 * k) for i, k in enumerate(order)},
            "Test_GT": {"GT-final_test.csv": "\r\n".join([header, *table]).encode()}}.items():
        with zipfile.ZipFile(folder / f"GTSRB_Final_{part}.zip", "w") as archive:
            for name, blob in files.items():
                archive.writestr(name, blob)
    no_network(monkeypatch)


def write_folder(root, each=4, unlabeled=5, test=2):
    """PNG files of noise in three classes, of several sizes; returns {path: (H, W, 3)}."""
    pictures = {}
    for part, count in (("train", each), ("test", test), ("unlabeled", unlabeled)):
        for name in ("ape", "bee", "cow"):
            place = root / part / (name if part != "unlabeled" else "")
            place.mkdir(parents=True, exist_ok=True)
            for i in range(count):
                path = place / f"{name}_{i}.png"
                pictures[path] = noise(9 + i % 5, 12, 3)
                Image.fromarray(pictures[path]).save(path)
    return pictures
