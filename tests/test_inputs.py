"""Files from strangers: odd .npz files, folders and pictures are refused in one sentence, and what
is skipped is told in one line."""
import io
import os
import zipfile

import numpy as np
import pytest
import torch
from archives import arrays, noise, refusal, write_folder
from PIL import Image

import data
from support import pictures

# ---------------------------------------------------------------------------------------------
# .npz files


MAX = 2**63 - 1
BAD_NPZ = {
    "huge class": (dict(y_train=np.full(12, MAX)), "class number 9223372036854775807"),
    "one huge class": (dict(y_train=np.r_[np.arange(11) % 3, MAX]), "class number 92"),
    "one class too far": (dict(y_train=np.arange(12) + 1), "class number 12"),
    "huge test class": (dict(y_test=np.full(12, MAX)), "y_train lacks"),
    "uint64": (dict(y_train=np.full(12, 2**64 - 1, np.uint64)), "y_train"),
    "negative": (dict(y_test=np.full(12, -(2**63))), "y_test"),
    "bool": (dict(y_train=np.arange(12) % 2 == 0), "y_train"),
    "float": (dict(y_train=np.arange(12) / 6), "y_train"),
    "nan": (dict(y_train=np.full(12, np.nan)), "y_train"),
    "durations": (dict(y_train=(np.arange(12) % 3).astype("m8[s]")), "y_train"),
    "object": (dict(y_train=np.array([{}] * 12, object)), "allow_pickle"),
    "complex": (dict(y_train=np.arange(12) * 1j), "y_train"),
    "0-d label": (dict(y_train=np.array(3)), "y_train"),
    "2-d labels": (dict(y_train=np.zeros((12, 1), int)), "y_train"),
    "0-d image": (dict(x_train=np.array(3, np.uint8)), "x_train"),
    "no image": (dict(x_test=np.zeros((0, 9, 9, 3), np.uint8), y_test=np.zeros(0, int)), "x_test"),
    "structured": (dict(x_train=np.zeros(12, [("r", "u1"), ("g", "u1")])), "x_train"),
    "strings": (dict(x_test=np.array(["a"] * 12)), "x_test"),
    "0-d unlabeled": (dict(x_unlabeled=np.uint8(3)), "x_unlabeled"),
    "names of numbers": (dict(names=np.arange(3)), "names"),
    "names of bytes": (dict(names=np.array([b"a", b"b", b"c"])), "names"),
    "0-d names": (dict(names=np.array("abc")), "names"),
    "2-d names": (dict(names=np.array([["a", "b", "c"]])), "names"),
    "names of objects": (dict(names=np.array(["a", "b", None])), "allow_pickle"),
    "the same name twice": (dict(names=np.array(["a", "b", "a"])), "two classes are called 'a'"),
}


@pytest.mark.parametrize("case", BAD_NPZ)
def test_odd_members_of_an_npz_file(tmp_path, case):
    change, message = BAD_NPZ[case]
    np.savez(tmp_path / "own.npz", **arrays(**change))
    text = refusal(data.load, str(tmp_path / "own.npz"))
    assert "own.npz" in text and message in text


@pytest.mark.parametrize("dtype", ["uint8", "int8", ">i4", "uint64"])
def test_every_integer_type_can_hold_labels(tmp_path, dtype):
    np.savez(tmp_path / "own.npz", **arrays(y_train=(np.arange(12) % 3).astype(dtype)))
    d = data.load(str(tmp_path / "own.npz"))
    assert d.labels.tolist() == [0, 1, 2] * 4 and d.labels.dtype == np.int64


def claim(shape):
    """A header of an .npy file that promises this shape, and nothing behind it."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return file.getvalue()


DAMAGE = {
    "huge shape": claim((10**6, 10**6, 10**3, 3)), "larger than any": claim((2**62, 2**62, 3)),
    "negative shape": claim((-5, 9, 9, 3)), "nothing behind": claim((12, 9, 9, 3)),
    "no array": b"hello", "empty": b"", "header only": b"\x93NUMPY",
    "header of nonsense": b"\x93NUMPY\x01\x00\x06\x00((((((",
    "nested header": b"\x93NUMPY\x01\x00\x40\x1f" + b"(" * 8000,
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_members_of_an_npz_file(tmp_path, case):
    np.savez(tmp_path / "own.npz", **{k: v for k, v in arrays().items() if k != "x_train"})
    with zipfile.ZipFile(tmp_path / "own.npz", "a") as file:
        file.writestr("x_train.npy", DAMAGE[case])
    assert "own.npz" in refusal(data.load, str(tmp_path / "own.npz"))


@pytest.mark.parametrize("field,value", [(6, 1), (8, 99)], ids=["encrypted", "unknown method"])
def test_npz_files_that_zipfile_cannot_open(tmp_path, field, value):
    """A field of the first member's headers: flags (bit 0: encrypted), method of compression."""
    path = tmp_path / "own.npz"
    np.savez(path, **arrays())
    blob = bytearray(path.read_bytes())
    blob[blob.index(b"PK\x03\x04") + field] = blob[blob.index(b"PK\x01\x02") + field + 2] = value
    path.write_bytes(blob)
    assert "own.npz cannot be read" in refusal(data.load, str(path))


def test_arrays_of_unknown_names_are_told_and_not_read(tmp_path, capsys):
    np.savez(tmp_path / "own.npz", **arrays(x_unlabelled=np.array([{}], object)))
    data.load(str(tmp_path / "own.npz"))
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "x_unlabelled" in err and "own.npz" in err


# ---------------------------------------------------------------------------------------------
# folders


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "own", each=3, unlabeled=1, test=1)


def test_what_is_skipped_is_told_in_one_line(folder, tmp_path, capsys):
    plain = data.load(str(folder), image_size=8)
    assert capsys.readouterr().err == ""
    one = (folder / "train/ape/ape_0.jpeg").read_bytes()
    (tmp_path / "far").mkdir()
    for path in ("train/ape/.git/a.jpg", "train/ape/sub/.thumbnails/a.jpg", "test/.cache/a.jpg",
                 "train/ape/__MACOSX/a.jpg", "train/bee/.a.jpg", "unlabeled/.trash/a.jpg",
                 "train/beside.jpg", "train/ape/a.h\neic", "train/ape/b.HEIC", "test/ape/notes",
                 "../far/a.jpg", "val/ape/a.jpg"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(one)
    (folder / "train/ape/broken.png").symlink_to(folder / "nowhere.png")
    (folder / "train/ape/far").symlink_to(tmp_path / "far")
    (folder / "train/bee/round").symlink_to(folder / "train")
    os.mkfifo(folder / "train/bee/pipe.png")
    d = data.load(str(folder), image_size=8)
    assert torch.equal(d.images, plain.images) and d.fingerprint == plain.fingerprint
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith(f"{folder}: skipped ")
    for words in ("hidden: 6 (.a.jpg, .cache, .git, ...)",
                  "beside the class folders: 1 (beside.jpg)", "of another format: 3 (",
                  "broken link: 1 (broken.png)", "linked folder: 2 (far, round)",
                  "no regular file: 1 (pipe.png)", "beside train, test and unlabeled: 1 (val)"):
        assert words in err, words


def test_unreadable_folders(folder, monkeypatch, capsys):
    """Root may read everything, so the system's answer is made up."""
    (folder / "train/ape/secret").mkdir()
    closed, scandir = [folder / "train/ape/secret"], os.scandir

    def refuse(path):
        if os.fspath(path) == str(closed[0]):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)
    monkeypatch.setattr(os, "scandir", refuse)
    data.load(str(folder), image_size=8)
    assert "unreadable folder: 1 (secret)" in capsys.readouterr().err
    closed[0] = folder / "train/bee"
    assert "train/bee cannot be read (Permission denied)" in refusal(data.load, str(folder))


def test_a_linked_class_folder_is_followed(folder):
    plain = data.load(str(folder), image_size=8)
    (folder / "train/ape").rename(folder.parent / "ape")
    (folder / "train/ape").symlink_to(folder.parent / "ape")
    assert torch.equal(data.load(str(folder), image_size=8).images, plain.images)


def empty(path):
    for file in sorted(path.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()


def flatten(path):
    for file in path.glob("*/*"):
        file.rename(path / file.name)
    for sub in path.iterdir():
        if sub.is_dir():
            sub.rmdir()


@pytest.mark.parametrize("damage,message", [
    (lambda f: empty(f / "train"), "own/train holds no class folders;"),
    (lambda f: empty(f / "test"), "own/test holds no class folders;"),
    (lambda f: flatten(f / "train"), "own/train holds no class folders, skipped beside the class"),
    (lambda f: empty(f / "train/bee"), "own/train/bee holds no picture"),
    (lambda f: empty(f / "test/cow"), "own/test/cow holds no picture"),
    (lambda f: empty(f / "unlabeled"), "own/unlabeled holds no picture"),
    (lambda f: [(empty(f / p), (f / p).rmdir()) for p in ("train/bee", "train/cow", "test/bee",
                                                          "test/cow")], "one class only")])
def test_empty_folders_are_named(folder, damage, message):
    damage(folder)
    assert message in refusal(data.load, str(folder), image_size=8)


def test_a_folder_of_other_formats_says_so(folder):
    empty(folder / "train/bee")
    (folder / "train/bee/a.heic").write_bytes(b"x")
    text = refusal(data.load, str(folder), image_size=8)
    assert "train/bee holds no picture" in text and "of another format: 1 (.heic)" in text


# ---------------------------------------------------------------------------------------------
# pictures


def decode(path, size=(8, 8)):
    pictures.check_header(path)
    return pictures.decode(path, size)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.eps"])
def test_no_other_program_is_ever_started(tmp_path, name, monkeypatch):
    started = []
    monkeypatch.setattr("subprocess.check_call", lambda *args, **kw: started.append(args))
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *args, **kw: started.append(args))
    (tmp_path / name).write_bytes(EPS)
    for function in (pictures.check_header, lambda p: pictures.decode(p, (8, 8))):
        assert f"{name} cannot be read" in refusal(function, tmp_path / name)
    assert not started


def test_every_suffix_has_its_format(tmp_path):
    x = noise(9, 9)
    for suffix in pictures.SUFFIXES:
        Image.fromarray(x).save(tmp_path / f"x{suffix}")
        assert decode(tmp_path / f"x{suffix}").shape == (3, 8, 8)
    Image.fromarray(x).save(tmp_path / "y.png")               # PIL goes by the content
    assert decode((tmp_path / "y.png").rename(tmp_path / "y.jpg")).shape == (3, 8, 8)


def test_a_decompression_bomb_is_a_broken_picture(tmp_path, monkeypatch):
    Image.new("1", (600, 600)).save(tmp_path / "x.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    assert "x.png cannot be read" in refusal(decode, tmp_path / "x.png")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -0.1, 1.1, 255, 1e30])
def test_floats_that_are_no_grey_level(tmp_path, value):
    x = np.full((9, 9), 0.5, np.float32)
    Image.fromarray(x).save(tmp_path / "good.tif")
    x[3, 3] = value
    Image.fromarray(x).save(tmp_path / "x.tif")
    assert decode(tmp_path / "good.tif").tolist() == np.full((3, 8, 8), 128).tolist()
    assert "x.tif has pixels that are not from 0 to 1" in refusal(decode, tmp_path / "x.tif")


@pytest.mark.parametrize("value", [-1000, 70000, 2**31 - 1])
def test_integers_that_are_no_grey_level(tmp_path, value):
    Image.fromarray(np.array([[0, 65535], [500, value]], np.int32)).save(tmp_path / "x.tif")
    assert "x.tif has pixels that are not from 0 to 65535" in refusal(decode, tmp_path / "x.tif")
