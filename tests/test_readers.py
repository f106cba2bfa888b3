"""Archives in their real formats, folders of pictures of every kind, decoding ahead of use."""
import subprocess
import sys
import threading
from collections import Counter

import archives
import numpy as np
import pytest
import torch
from archives import G, noise, write_folder
from conftest import ROOT, TINY
from PIL import Image
from sklearn.datasets import load_digits

import data
from support import UserError, config, readers
from support.pictures import decode

# ---------------------------------------------------------------------------------------------
# archives


def test_cifar10(tmp_path, monkeypatch):
    path, x, y = archives.write_cifar10(tmp_path, monkeypatch)
    d = data.load("cifar10", tmp_path)
    order = np.concatenate([np.arange(i, 20, 5) for i in range(5)])
    assert np.array_equal(d.images.permute(0, 2, 3, 1).numpy(), x[order])
    assert d.labels.tolist() == y[order].tolist() and d.names[3] == "cat"
    assert np.array_equal(d.test_images.permute(0, 2, 3, 1).numpy(), x[:10])


@pytest.mark.parametrize("damage", [lambda b: b[:len(b) // 2], lambda b: b"", lambda b: b + b"x"],
                         ids=["cut", "empty", "longer"])
def test_a_broken_archive_is_named_in_one_sentence(tmp_path, monkeypatch, damage):
    path, _, _ = archives.write_cifar10(tmp_path, monkeypatch)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match="complete cifar-10-python.tar.gz") as error:
        data.load("cifar10", tmp_path)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_cifar100(tmp_path, monkeypatch):
    x, y, names = archives.write_cifar100(tmp_path, monkeypatch)
    d = data.load("cifar100", tmp_path)
    assert np.array_equal(d.images.permute(0, 2, 3, 1).numpy(), x)
    assert d.labels.tolist() == y.tolist() and d.names == names
    assert d.mean == (0.5071, 0.4867, 0.4408)


def test_stl10(tmp_path, monkeypatch):
    x, y = archives.write_stl10(tmp_path, monkeypatch)
    d = data.load("stl10", tmp_path, image_size=32)
    small = x.reshape(55, 32, 3, 32, 3, 3).mean((2, 4)).transpose(0, 3, 1, 2)   # means of 3 x 3
    assert abs(d.images.numpy() - small[np.r_[:20, 30:55]]).max() <= 0.5
    assert abs(d.test_images.numpy() - small[20:30]).max() <= 0.5
    assert d.labels.tolist() == y.tolist() + [-1] * 25 and d.names[7] == "monkey"
    assert d.test_labels.tolist() == list(range(10))
    (tmp_path / "stl10_binary/unlabeled_X.bin").write_bytes(b"short")        # once it is unpacked
    (tmp_path / "stl10_binary.tar.gz").unlink()
    with pytest.raises(UserError, match="complete stl10_binary.tar.gz"):
        data.load("stl10", tmp_path, image_size=32)


def test_sun397(tmp_path, monkeypatch):
    """In memory and from files; 50 pictures of each class are held out for testing."""
    archives.write_sun397(tmp_path, monkeypatch)
    for memory in (0, 2**30):
        monkeypatch.setattr(readers, "MEMORY", memory)
        d = data.load("sun397", tmp_path, image_size=8)
        assert torch.is_tensor(d.images) == (memory > 0)
        assert d.names == ["abbey", "beach", "cave/inside"]
        assert d.test_labels.tolist() == [0] * 50 + [1] * 50 + [2] * 50
        assert np.bincount(d.labels).tolist() == [3, 10, 6]
        labels = torch.cat([torch.from_numpy(d.labels), d.test_labels])
        grey = torch.cat([d.images[:], d.test_images[:]]).float().mean((1, 2, 3))
        number = (grey - 40 * labels).round()
        for k, n in enumerate(archives.SUN.values()):    # each picture once, in one of the two sets
            assert sorted(number[labels == k].tolist()) == list(range(n))

    for path in list((tmp_path / "SUN397/a/abbey").iterdir())[:5]:           # too few pictures
        path.unlink()
    with pytest.raises(UserError, match="class abbey has 48"):
        data.load("sun397", tmp_path, image_size=8)
    (tmp_path / "SUN397/ClassName.txt").unlink()
    with pytest.raises(UserError, match="sun397"):
        data.load("sun397", tmp_path, image_size=8)


def scikit_learns():
    """(images (1797, 8, 8) uint8, labels) by integer arithmetic: v / 16 of 255, rounded half up."""
    digits = load_digits()
    return ((510 * digits.images.astype(int) + 16) // 32).astype(np.uint8), digits.target


def test_digits_are_scikit_learns_with_a_test_set_of_40_a_class():
    d, (x, y) = data.load("digits"), scikit_learns()
    assert d.images.shape == (1397, 3, 8, 8) and d.test_images.shape == (400, 3, 8, 8)
    assert np.bincount(d.test_labels).tolist() == [40] * 10
    assert d.names == "zero one two three four five six seven eight nine".split()
    images, labels = torch.cat([d.images, d.test_images]).numpy(), [*d.labels, *d.test_labels]
    assert (images == images[:, :1]).all()                   # grey
    ours = Counter((a[0].tobytes(), int(k)) for a, k in zip(images, labels, strict=True))
    assert ours == Counter((a.tobytes(), int(k)) for a, k in zip(x, y, strict=True))
    train, test = ({a.tobytes() for a in x.numpy()} for x in (d.images, d.test_images))
    assert not train & test
    again = data.load("digits", image_size=16)               # the same ones, pixels doubled
    assert torch.equal(again.test_labels, d.test_labels)
    assert np.array_equal(again.test_images, np.kron(d.test_images, np.ones((2, 2), np.uint8)))


def test_colours_of_digits():
    shades = load_digits().images / 16
    for channel in range(3):
        assert data.BUILT_IN["digits"][1][channel] == pytest.approx(shades.mean(), abs=5e-5)
        assert data.BUILT_IN["digits"][2][channel] == pytest.approx(shades.std(), abs=5e-5)


@pytest.mark.parametrize("flags,unlabeled", [
    ("", [100] * 10), ("--pool union", [110, 108, 106, 105, 104, 104, 103, 102, 102, 102]),
    ("--scale paper", [100] * 10), ("--seed 7", [100] * 10)])
def test_default_split_of_digits(flags, unlabeled):
    """Two labels in the tail. No seed reaches the test images: they are not in images."""
    cfg = config.read(flags.split(), "fixmatch")
    d = data.load("digits", image_size=cfg.image_size)
    index_l, index_u = data.split(d, cfg)
    assert d.images.shape[2] == cfg.image_size == (32 if cfg.scale == "paper" else 16)
    assert d.count(index_l).tolist() == [10, 8, 6, 5, 4, 4, 3, 2, 2, 2]
    assert d.count(index_u).tolist() == unlabeled


@pytest.mark.slow
def test_only_digits_need_scikit_learn(tmp_path):
    """It takes a second to import."""
    code = (f"import sys, train_fixmatch, evaluate, baselines.train\n"
            f"train_fixmatch.main('{TINY} --iters 1 --out {tmp_path}/run'.split())\n"
            f"assert 'sklearn' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


# ---------------------------------------------------------------------------------------------
# single pictures


def picture(tmp_path, image, name="x.png", **save):
    image.save(tmp_path / name, **save)
    return decode(tmp_path / name, image.size[::-1])


def test_colour_is_left_as_it_is(tmp_path):
    x = noise(10, 14, 3)
    assert np.array_equal(picture(tmp_path, Image.fromarray(x)), x.transpose(2, 0, 1))


def test_grey_and_bits(tmp_path):
    x = noise(9, 9)
    assert np.array_equal(picture(tmp_path, Image.fromarray(x)), np.stack([x] * 3))
    bits = Image.fromarray(x > 127)
    assert bits.mode == "1"
    assert np.array_equal(picture(tmp_path, bits), np.stack([(x > 127) * 255] * 3))


def test_sixteen_bits_are_scaled_not_clipped(tmp_path):
    x = np.arange(0, 65536, 65535 / 80).round().astype(np.uint16).reshape(9, 9)
    for name in ("x.png", "x.tif"):
        ours = picture(tmp_path, Image.fromarray(x), name).astype(float)
        assert abs(ours - x / 65535 * 255).max() <= 0.5
    ours = picture(tmp_path, Image.fromarray((x / 65535).astype(np.float32)), "f.tif").astype(float)
    assert abs(ours - x / 65535 * 255).max() <= 0.51


def test_transparent_pixels_become_white(tmp_path):
    colour, alpha = noise(8, 8, 3), noise(8, 8, 1)
    expected = (colour * (alpha / 255.0) + 255 * (1 - alpha / 255.0)).transpose(2, 0, 1)
    ours = picture(tmp_path, Image.fromarray(np.concatenate([colour, alpha], 2)))
    assert abs(ours - expected).max() <= 1
    ours = picture(tmp_path, Image.fromarray(np.concatenate([colour[..., :1], alpha], 2), "LA"))
    assert abs(ours - expected[:1]).max() <= 1


def test_palettes(tmp_path):
    image = Image.fromarray(G.integers(0, 3, (8, 8), dtype=np.uint8), "P")
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    colours = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255]], np.uint8)
    expected = colours[np.asarray(image)].transpose(2, 0, 1)
    assert np.array_equal(picture(tmp_path, image), expected)
    assert np.array_equal(picture(tmp_path, image, "x.gif"), expected)
    ours = picture(tmp_path, image, transparency=1)          # green is see-through
    white = np.where((np.asarray(image) == 1), 255, expected)
    assert np.array_equal(ours, white)


def test_cmyk(tmp_path):
    image = Image.new("CMYK", (16, 16), (0, 255, 255, 0))    # magenta and yellow ink: red
    ours = picture(tmp_path, image, "x.jpg", quality=100).astype(int)
    assert abs(ours - np.array([255, 0, 0])[:, None, None]).max() <= 2


@pytest.mark.parametrize("orientation,turn", [
    (1, lambda x: x), (2, lambda x: x[:, ::-1]), (3, lambda x: x[::-1, ::-1]),
    (6, lambda x: np.rot90(x, -1)), (8, lambda x: np.rot90(x))])
def test_exif_orientation(tmp_path, orientation, turn):
    x, exif = noise(12, 12, 3), Image.Exif()
    exif[0x0112] = orientation
    assert np.array_equal(picture(tmp_path, Image.fromarray(x), exif=exif),
                          turn(x).transpose(2, 0, 1))


def test_a_picture_is_squeezed_whole(tmp_path):
    """Left half black, right half white, whatever the shape: a crop would show less of one."""
    x = np.zeros((10, 40, 3), np.uint8)
    x[:, 20:] = 255
    for name in ("x.png", "x.jpg"):
        Image.fromarray(x).save(tmp_path / name)
        small = decode(tmp_path / name, (8, 8))
        assert small.shape == (3, 8, 8) and small[..., :3].max() < 30 and small[..., 5:].min() > 225


def test_a_large_jpeg_keeps_its_mean(tmp_path):
    x = np.asarray(Image.fromarray(noise(6, 8, 3)).resize((800, 600), Image.Resampling.BICUBIC))
    Image.fromarray(x).save(tmp_path / "x.jpg", quality=95)
    small = decode(tmp_path / "x.jpg", (24, 32)).astype(float)
    blocks = x.reshape(24, 25, 32, 25, 3).mean((1, 3)).transpose(2, 0, 1)
    assert abs(small - blocks).mean() < 3


# ---------------------------------------------------------------------------------------------
# folders


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "own")


def test_folder(folder):
    (folder / "train/ape/notes.txt").write_text("not a picture")
    (folder / "train/ape/.hidden.png").write_text("not a picture either")
    d = data.load(str(folder), image_size=10)
    assert d.names == ["ape", "bee", "cow"] and d.images.shape == (36 + 45, 3, 10, 10)
    assert d.labels.tolist() == [0] * 12 + [1] * 12 + [2] * 12 + [-1] * 45
    assert d.test_labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert data.load(str(folder)).images.shape[2:] == (32, 32)
    first = sorted((folder / "train/ape").glob("ape_*"))[0]
    assert np.array_equal(d.images[0].numpy(), decode(first, (10, 10)))
    x = d.images[:36].numpy() / 255
    assert d.mean == pytest.approx(x.mean((0, 2, 3))) and d.std == pytest.approx(x.std((0, 2, 3)))


def test_class_folders_may_be_nested_and_the_test_set_may_lack_a_class(folder, capsys):
    (folder / "train/ape/more").mkdir()
    (folder / "train/ape/ape_0.jpeg").rename(folder / "train/ape/more/ape_0.jpeg")
    for path in (folder / "test/ape").iterdir():
        path.unlink()
    (folder / "test/ape").rmdir()
    d = data.load(str(folder), image_size=8)
    assert d.labels.tolist().count(0) == 12 and d.test_labels.tolist() == [1] * 4 + [2] * 4
    assert "no pictures of ape;" in capsys.readouterr().err


@pytest.mark.parametrize("damage,message", [
    (lambda f: (f / "train/bee/bee_0.bmp").write_bytes(b""), "bee_0.bmp cannot be read"),
    (lambda f: (f / "unlabeled/x.png").write_text("text"), "x.png cannot be read"),
    (lambda f: (f / "test").rename(f / "tests"), "no folder test"),
    (lambda f: (f / "train").rename(f / "training"), "no folder train"),
    (lambda f: (f / "test/ape").rename(f / "test/apes"), "test/apes has no counterpart"),
    (lambda f: (f / "train/dog").mkdir(), "dog holds no picture"),
])
def test_a_wrong_folder_is_named(folder, damage, message):
    damage(folder)
    with pytest.raises(UserError, match=message) as error:
        data.load(str(folder), image_size=8)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["bee_1.PNG", "bee_7.jpg"])
def test_a_truncated_picture_is_named_when_it_is_read(folder, name):
    path = folder / "train/bee" / name
    path.write_bytes(path.read_bytes()[:-40])                # the header is intact
    with pytest.raises(UserError, match=f"{name} cannot be read"):
        data.load(str(folder), image_size=8)
    pictures = readers.Pictures(readers.as_paths([path]), (8, 8))
    with pytest.raises(UserError, match=f"{name} cannot be read"):
        pictures[np.array([0])]


# ---------------------------------------------------------------------------------------------
# decoding ahead


@pytest.fixture
def pictures(tmp_path):
    """40 files; picture i is grey level i."""
    for i in range(40):
        Image.new("L", (8, 8), i).save(tmp_path / f"{i:02}.png")
    return readers.Pictures(readers.as_paths(sorted(tmp_path.iterdir())), (8, 8))


def levels(x):
    return x[:, 0, 0, 0].tolist()


def test_pictures_look_like_a_tensor(pictures):
    assert pictures.shape == (40, 3, 8, 8) and len(pictures) == 40
    assert levels(pictures[np.array([7, 3, 3, 39])]) == [7, 3, 3, 39]
    assert levels(pictures[[5, 1]]) == [5, 1] and levels(pictures[35:]) == [35, 36, 37, 38, 39]
    assert [levels(x) for x in pictures.split(16)] == [list(range(16)), list(range(16, 32)),
                                                       list(range(32, 40))]
    assert levels(pictures.in_memory()) == list(range(40))


def test_no_more_pictures_are_held_than_needed(pictures):
    for step in range(30):
        index = np.arange(step, step + 4) % 40
        pictures.expect(index)
        pictures.expect((index + 1) % 40)
        assert levels(pictures[index]) == index.tolist() and len(pictures.begun) <= 24
    held = len(pictures.begun)
    list(pictures.split(5))
    assert len(pictures.begun) <= max(held, 24)


def test_expected_pictures_are_decoded_before_they_are_asked_for(pictures, monkeypatch):
    decoded, done = [], threading.Event()

    def watched(path, size):
        decoded.append(int(path[-6:-4]))
        if len(decoded) == 8:
            done.set()
        return decode(path, size)
    monkeypatch.setattr("support.pictures.decode", watched)
    stream = data.IndexStream(np.arange(40), 4, 0, "x")
    d = data.Dataset(pictures, np.zeros(40, int), pictures, None, ["a", "b"], None, None)
    d.read_ahead(stream)
    now, following = stream.indices(0), stream.indices(1)
    assert np.array_equal(stream.batch(0), now)
    assert done.wait(10) and sorted(decoded) == sorted([*now, *following])
    assert levels(d.take(now)[0]) == now.tolist() and len(decoded) == 8
    assert levels(d.take(stream.batch(1))[0]) == following.tolist()


def test_split_decodes_the_next_chunk_meanwhile(pictures):
    chunks = pictures.split(4)
    assert levels(next(chunks)) == [0, 1, 2, 3] and {4, 5, 6, 7} <= pictures.begun.keys()


def test_reading_ahead_learns_the_stride():
    """With --omega_every 10 a balanced batch is needed in every tenth iteration only."""
    asked = []
    stream = data.IndexStream(np.arange(40), 2, 0, "x")
    stream.expect = lambda index: asked.append(index.tolist())
    for step in (0, 10, 20):
        stream.batch(step)
    expected = [0, 1, 10, 20, 20, 30]
    assert asked == [stream.indices(s).tolist() for s in expected]


def test_a_picture_that_is_never_collected_is_dropped(pictures):
    pictures.expect(np.arange(4), batches=2)                 # room for eight
    pictures.expect(np.arange(10, 14), batches=2)
    pictures[np.arange(10, 14)]
    pictures.expect(np.arange(20, 24), batches=2)            # the collected ones go first
    assert sorted(pictures.begun) == [0, 1, 2, 3, 20, 21, 22, 23]
    pictures.expect(np.arange(30, 34), batches=2)
    assert sorted(pictures.begun) == [20, 21, 22, 23, 30, 31, 32, 33]
