"""Archives in their real formats, .npz files, folders of pictures of every kind."""
import os
import shutil
from collections import Counter

import archives
import numpy as np
import pytest
import torch
from archives import noise, write_folder
from PIL import Image
from sklearn.datasets import load_digits

import data
from scripts.report import read_unknown
from support import UserError, readers


def channels_last(x):
    return x.permute(0, 2, 3, 1).numpy()


def test_cifar10(tmp_path, monkeypatch):
    x, y = archives.write_cifar10(tmp_path, monkeypatch)
    d = data.load("cifar10", tmp_path)
    order = np.concatenate([np.arange(i, 20, 5) for i in range(5)])
    assert np.array_equal(channels_last(d.images), x[order])
    assert d.labels.tolist() == y[order].tolist() and d.names[3] == "cat"
    assert np.array_equal(channels_last(d.test_images), x[:10])
    np.savez(tmp_path / "cifar10.npz", x_train=x, y_train=y, x_test=x[:10], y_test=y[:10])
    assert np.array_equal(channels_last(data.load("cifar10", tmp_path).images), x)


def test_a_broken_archive_without_a_network(tmp_path, monkeypatch):
    archives.write_cifar10(tmp_path, monkeypatch)
    path = tmp_path / "cifar-10-python.tar.gz"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match=path.name):
        data.load("cifar10", tmp_path)


def test_stl10(tmp_path, monkeypatch):
    x, y = archives.write_stl10(tmp_path, monkeypatch)
    d = data.load("stl10", tmp_path, image_size=32)
    small = x.reshape(55, 32, 3, 32, 3, 3).mean((2, 4)).transpose(0, 3, 1, 2)   # means of 3 x 3
    assert abs(d.images.numpy() - small[np.r_[:20, 30:55]]).max() <= 0.5
    assert abs(d.test_images.numpy() - small[20:30]).max() <= 0.5
    assert d.labels.tolist() == y.tolist() + [-1] * 25 and d.names[7] == "monkey"
    assert d.test_labels.tolist() == list(range(10))


def test_sun397(tmp_path, monkeypatch):
    """50 pictures of each class are held out for testing; each is in one of the two sets."""
    archives.write_sun397(tmp_path, monkeypatch)
    d = data.load("sun397", tmp_path, image_size=8)
    assert d.names == ["abbey", "beach", "cave/inside"]
    assert [*np.bincount(d.labels), *np.bincount(d.test_labels)] == [3, 10, 6, 50, 50, 50]
    labels = torch.cat([torch.from_numpy(d.labels), d.test_labels])
    grey = torch.cat([d.images, d.test_images]).float().mean((1, 2, 3))
    number = (grey - 40 * labels).round()
    for k, n in enumerate(archives.SUN.values()):
        assert sorted(number[labels == k].tolist()) == list(range(n))


def test_gtsrb(tmp_path, monkeypatch):
    archives.write_gtsrb(tmp_path, monkeypatch)
    for _ in range(2):                                       # unpacked, then as it lies there
        d = data.load("gtsrb", tmp_path, image_size=8)
        tracks, labels = np.arange(172) // 2, np.arange(172) // 4
        assert d.labels.tolist() == labels.tolist()
        assert len(d.names) == 43 and (d.names[14], d.names[38]) == ("stop", "keep right")
        grey = np.arange(172) % 4 + 5 * labels
        assert d.images[:, 0, 4, 4].tolist() == grey.tolist()
        assert d.test_labels.tolist() == list(range(42, -1, -1))
        assert d.test_images[:, 2, 0, 0].tolist() == [5 * k for k in range(42, -1, -1)]
        assert len(set(zip(tracks, d.tracks, strict=True))) == len(set(d.tracks)) == 86


@pytest.mark.parametrize("part", ["Training_Images", "Test_GT"])
@pytest.mark.parametrize("damage", [0, 300, "a byte"])       # gone, cut off, flipped
def test_a_broken_gtsrb_archive_leaves_nothing_behind(tmp_path, monkeypatch, part, damage):
    archives.write_gtsrb(tmp_path, monkeypatch)
    path = tmp_path / f"GTSRB_Final_{part}.zip"
    blob = bytearray(path.read_bytes())
    blob[100] ^= 1                                           # in the first file's content
    path.write_bytes(blob if damage == "a byte" else blob[:damage])
    if not damage:
        path.unlink()
    with pytest.raises(UserError, match="--dataset gtsrb: .*GTSRB_Final_.*download failed"):
        data.load("gtsrb", tmp_path)
    assert not (tmp_path / "gtsrb").exists()


def test_digits_are_scikit_learns_with_a_test_set_of_40_a_class():
    d, digits = data.load("digits"), load_digits()
    x = (510 * digits.images.astype(int) + 16) // 32         # v / 16 of 255, rounded half up
    test = [data.rng(0, "test", k).permutation(np.flatnonzero(digits.target == k))[:40]
            for k in range(10)]                              # all results rest on this draw
    assert np.array_equal(d.test_images[:, 0], x[np.sort(test).ravel()])
    images, labels = torch.cat([d.images, d.test_images]).numpy(), [*d.labels, *d.test_labels]
    assert (images == images[:, :1]).all()                   # grey
    ours = Counter((a[0].tobytes(), int(k)) for a, k in zip(images, labels, strict=True))
    theirs = zip(x.astype(np.uint8), digits.target, strict=True)
    assert ours == Counter((a.tobytes(), int(k)) for a, k in theirs)
    again = data.load("digits", image_size=16)               # the same ones, pixels doubled
    assert np.array_equal(again.test_images, np.kron(d.test_images, np.ones((2, 2), np.uint8)))
    shades = digits.images / 16
    assert d.mean == pytest.approx([shades.mean()] * 3, abs=5e-5)
    assert d.std == pytest.approx([shades.std()] * 3, abs=5e-5)


def save(path, **changes):
    """300 images of three classes."""
    x, y = noise(300, 9, 7, 3), np.arange(300) % 3
    arrays = dict(x_train=x, y_train=y, x_test=x[::-1][:12], y_test=y[:12]) | changes
    np.savez(path, **{key: value for key, value in arrays.items() if value is not None})
    return arrays


@pytest.mark.parametrize("dtype", ["int64", "uint8", ">i4", "uint64"])
def test_npz(tmp_path, dtype):
    arrays = save(tmp_path / "own.npz", y_train=(np.arange(300) % 3).astype(dtype),
                  x_unlabeled=noise(5, 9, 7, 3), names=np.array(["a", "b", "c"]))
    d = data.load(str(tmp_path / "own.npz"))
    x = np.concatenate([arrays["x_train"], arrays["x_unlabeled"]])
    assert np.array_equal(channels_last(d.images), x) and d.names == ["a", "b", "c"]
    assert np.array_equal(channels_last(d.test_images), arrays["x_test"])
    assert d.labels.tolist() == [0, 1, 2] * 100 + [-1] * 5 and d.labels.dtype == np.int64
    x = x / 255
    assert d.mean == pytest.approx(x.mean((0, 1, 2)))
    assert d.std == pytest.approx(x.std((0, 1, 2)))


@pytest.mark.parametrize("change,named", [
    (dict(y_test=None), "y_test"), (dict(x_train=np.zeros((300, 9, 7, 3))), "x_train"),
    (dict(x_test=noise(12, 9, 7, 4)), "x_test"), (dict(x_test=noise(12, 9, 8, 3)), "x_test"),
    (dict(x_unlabeled=noise(0, 9, 7, 3)), "x_unlabeled"), (dict(y_train=np.arange(9)), "y_train"),
    (dict(y_train=np.arange(300) / 100), "y_train"), (dict(y_test=-np.ones(12, int)), "y_test"),
    (dict(y_train=np.arange(300) % 3 * 2), "y_train"), (dict(y_test=np.arange(12)), "y_test"),
    (dict(y_train=np.zeros(300, int), y_test=np.zeros(12, int)), "1 class"),
    (dict(names=np.array(["a", "b"])), "2 name"),
    (dict(names=np.array(list("aba"))), "2 name"),
    (dict(names=np.array(["a", "b", None])), "allow_pickle")])
def test_wrong_npz(tmp_path, change, named):
    save(tmp_path / "own.npz", **change)
    with pytest.raises(UserError, match=f"own.npz.*{named}"):
        data.load(str(tmp_path / "own.npz"))
    os.truncate(tmp_path / "own.npz", 9999)
    with pytest.raises(UserError, match="own.npz"):
        data.load(str(tmp_path / "own.npz"))


def test_an_unknown_dataset():
    with pytest.raises(UserError, match="cifar11.*digits, synthetic, cifar10"):
        data.load("cifar11")


def picture(tmp_path, image, name="x.png", **save):
    image.save(tmp_path / name, **save)
    return readers.decode(tmp_path / name, image.size[::-1])


def test_colour_and_grey(tmp_path):
    x = noise(10, 14, 3)
    assert np.array_equal(picture(tmp_path, Image.fromarray(x)), x.transpose(2, 0, 1))
    x = x[..., 0]
    assert np.array_equal(picture(tmp_path, Image.fromarray(x)), np.stack([x] * 3))


def test_sixteen_bits_and_floats_are_scaled_not_clipped(tmp_path):
    x = np.arange(0, 65536, 65535 / 80).round().astype(np.uint16).reshape(9, 9)
    floats = Image.fromarray((x / 65535).astype(np.float32))
    for name, image in (("x.png", Image.fromarray(x)), ("f.tif", floats)):
        assert abs(picture(tmp_path, image, name) - x / 65535 * 255).max() <= 0.51


def test_transparent_pixels_become_white(tmp_path):
    colour, alpha = noise(8, 8, 3), noise(8, 8, 1)
    expected = (colour * (alpha / 255.0) + 255 * (1 - alpha / 255.0)).transpose(2, 0, 1)
    ours = picture(tmp_path, Image.fromarray(np.concatenate([colour, alpha], 2)))
    assert abs(ours - expected).max() <= 1
    number = noise(8, 8) % 2
    palette = Image.fromarray(number, "P")
    palette.putpalette([255, 0, 0, 0, 0, 255])               # red, and see-through blue
    ours = picture(tmp_path, palette, transparency=1)
    assert np.array_equal(ours, np.stack([np.full((8, 8), 255), 255 * number, 255 * number]))


@pytest.mark.parametrize("orientation,turn", [
    (1, lambda x: x), (2, lambda x: x[:, ::-1]), (3, lambda x: x[::-1, ::-1]),
    (6, lambda x: np.rot90(x, -1)), (8, lambda x: np.rot90(x))])
def test_exif_orientation(tmp_path, orientation, turn):
    x, exif = noise(12, 12, 3), Image.Exif()
    exif[0x0112] = orientation
    assert np.array_equal(picture(tmp_path, Image.fromarray(x), exif=exif),
                          turn(x).transpose(2, 0, 1))


def test_a_large_jpeg_is_squeezed_whole(tmp_path):
    x = np.asarray(Image.fromarray(noise(6, 8, 3)).resize((800, 600), Image.Resampling.BICUBIC))
    Image.fromarray(x).save(tmp_path / "x.jpg", quality=95)
    small = readers.decode(tmp_path / "x.jpg", (24, 20)).astype(float)
    blocks = x.reshape(24, 25, 20, 40, 3).mean((1, 3)).transpose(2, 0, 1)
    assert abs(small - blocks).mean() < 3


@pytest.fixture
def folder(tmp_path):
    write_folder(tmp_path / "own")
    return tmp_path / "own"


def load(folder, size=10):
    return data.load(str(folder), folder.parent / "data", size)


def test_folder(tmp_path, capsys):
    written = write_folder(tmp_path / "own", each=200)       # of 615, 500 make mean and std
    d = load(tmp_path / "own")
    for part, images in (("train", d.images[:600]), ("unlabeled", d.images[600:]),
                         ("test", d.test_images)):
        paths = sorted(path for path in written if f"/{part}/" in str(path))
        expected = [np.asarray(Image.fromarray(written[path]).resize(
            (10, 10), Image.Resampling.BILINEAR)) for path in paths]
        assert np.array_equal(channels_last(images), expected)
    assert d.names == ["ape", "bee", "cow"] and d.test_labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert d.labels.tolist() == [0] * 200 + [1] * 200 + [2] * 200 + [-1] * 15
    x = d.images[[i * 614 // 499 for i in range(500)]].numpy() / 255
    assert d.mean == pytest.approx(x.mean((0, 2, 3))) and d.std == pytest.approx(x.std((0, 2, 3)))
    assert capsys.readouterr().err.count("\n") == 1          # decoding, and nothing was skipped


def test_pictures_are_decoded_once(folder, monkeypatch):
    first = load(folder)
    with monkeypatch.context() as patch:
        patch.setattr(readers, "decode", None)
        monkeypatch.chdir(folder.parent)                     # the same files by another path
        again = data.load("own", "data", 10)
    assert torch.equal(again.images, first.images) and again.info == first.info
    assert load(folder, size=None).images.shape[2:] == (32, 32)
    path = folder / "train/ape/ape_0.png"
    size = path.stat().st_size
    Image.new("RGB", (9, 9), "red").save(path)
    path.write_bytes(path.read_bytes().ljust(size, b"0"))    # of the same size; only its time tells
    changed = load(folder)
    assert changed.images[0].unique().tolist() == [0, 255]
    assert torch.equal(changed.images[1:], first.images[1:]) and changed.info != first.info
    assert len(list((folder.parent / "data/cache").iterdir())) == 3           # no temporaries


def test_nested_linked_hidden_and_other_files(folder, tmp_path, capsys):
    plain = load(folder)
    (folder / "train/bee").rename(tmp_path / "bee")
    (folder / "train/bee").symlink_to(tmp_path / "bee")
    (folder / "train/cow/deep/er").mkdir(parents=True)
    (folder / "train/cow/cow_3.png").rename(folder / "train/cow/deep/er/cow_3.PNG")
    for name in ("train/ape/.hidden.png", "train/ape/.git/a.png", "test/.git/a.png",
                 "train/ape/notes.txt", "unlabeled/Thumbs.db"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("no picture")
    capsys.readouterr()
    shutil.rmtree(folder / "test/ape")                       # a class may lack test pictures
    d = load(folder)
    assert torch.equal(d.images, plain.images) and np.array_equal(d.labels, plain.labels)
    assert d.test_labels.tolist() == [1, 1, 2, 2]
    assert "4 file" in capsys.readouterr().err


@pytest.mark.parametrize("damage,named", [
    (lambda f: shutil.rmtree(f / "test") or (f / "test").mkdir(), "no folder test"),
    (lambda f: (f / "train").rename(f / "training"), "no folder train"),
    (lambda f: shutil.rmtree(f / "train") or (f / "train").mkdir(), "no folder train"),
    (lambda f: (f / "test/ape").rename(f / "test/apes"), "test/apes"),
    (lambda f: (f / "train/dog").mkdir(), "train/dog holds no picture"),
    (lambda f: [path.unlink() for path in (f / "unlabeled").iterdir()], "unlabeled holds no"),
    (lambda f: [shutil.rmtree(f / p) for p in ("train/ape", "train/bee", "test/ape", "test/bee")],
     "1 class")])
def test_wrong_folder(folder, damage, named):
    damage(folder)
    with pytest.raises(UserError, match=named):
        load(folder)


def test_all_broken_pictures_are_named(folder):
    paths = [folder / "train/ape/ape_1.png", folder / "unlabeled/a.jpg", folder / "test/cow/b.tif"]
    paths[0].write_bytes(paths[0].read_bytes()[:-40])        # the header is intact
    paths[1].write_text("text")
    paths[2].write_bytes(b"")
    with pytest.raises(UserError, match="^3 picture") as error:
        load(folder)
    assert all(str(path) in str(error.value) for path in paths)
    for i in range(300):
        (folder / f"unlabeled/z{i}.png").write_text("text")
    with pytest.raises(UserError, match="^303 picture") as error:
        load(folder)
    assert str(error.value).count(str(folder)) == 10
    assert not list((folder.parent / "data/cache").iterdir())


def test_broken_pictures_can_be_left_out(folder, monkeypatch, capsys):
    """One of each part; labels keep their pictures. From the cache the second time."""
    whole = load(folder)
    for path in ("train/bee/bee_0.png", "unlabeled/ape_1.png", "test/cow/cow_1.png"):
        (folder / path).write_text("text")
    for decode in (readers.decode, None):
        monkeypatch.setattr(readers, "decode", decode)
        d = data.load(str(folder), folder.parent / "data", 10, skip_broken=True)
        first = 200 if len(whole.labels) > 200 else np.flatnonzero(whole.labels == 1)[0]
        unlabeled = np.flatnonzero(whole.labels == -1)[0] + 1
        assert torch.equal(d.images, whole.images[np.delete(np.arange(len(whole.labels)),
                                                            [first, unlabeled])])
        assert d.labels.tolist() == np.delete(whole.labels, [first, unlabeled]).tolist()
        assert torch.equal(d.test_images, whole.test_images[:-1])
        assert d.test_labels.tolist() == whole.test_labels.tolist()[:-1]
    assert "3 picture(s) cannot be read" in capsys.readouterr().err
    for path in (folder / "train/bee").iterdir():
        path.write_text("text")
    monkeypatch.undo()
    with pytest.raises(UserError, match="no readable picture in train/bee"):
        data.load(str(folder), folder.parent / "data", 10, skip_broken=True)


@pytest.mark.parametrize("share,held", [(0.2, [4, 1, 1, 0]), (0.5, [10, 2, 1, 0])])
def test_a_share_is_held_out_where_there_is_no_test_set(tmp_path, capsys, share, held):
    """Of classes of 20, 4, 2 images and one: at least one, never the last. Each image is in one of
    the sets, whatever the seed."""
    x, y = noise(27, 8, 8, 3), np.repeat(range(4), (20, 4, 2, 1))
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y, track=np.arange(27))
    d = data.load(str(tmp_path / "own.npz"), hold_out=share)
    assert np.bincount(d.test_labels, minlength=4).tolist() == held
    told = capsys.readouterr().err
    assert f"{share:.0%} of each class, {sum(held)} images" in told
    assert told.endswith("leaves out class 3: no test image\n")
    both = torch.cat([d.images, d.test_images])
    assert sorted(map(bytes, both.permute(0, 2, 3, 1).numpy())) == sorted(map(bytes, x))
    assert np.array_equal(channels_last(d.images), x[d.tracks])
    assert d.labels.tolist() == y[d.tracks].tolist()


def test_held_out_tracks_are_whole(tmp_path):
    """Four tracks of five frames in each class: one of them is held out."""
    y, track = np.repeat([0, 1], 20).astype(np.uint8), np.repeat(range(8), 5)
    np.savez(tmp_path / "own.npz", x_train=noise(40, 8, 8, 3), y_train=y, track=track)
    d = data.load(str(tmp_path / "own.npz"))
    assert np.bincount(d.test_labels).tolist() == [5, 5]
    assert np.bincount(d.tracks, minlength=8).tolist().count(5) == 6


def test_a_class_number_may_fill_its_type(tmp_path):
    np.savez(tmp_path / "own.npz", x_train=noise(512, 8, 8, 3), x_test=noise(1, 8, 8, 3),
             y_train=np.arange(512).astype(np.uint8), y_test=np.zeros(1, np.uint8))
    assert data.load(str(tmp_path / "own.npz")).num_classes == 256


def test_read_unknown(folder, tmp_path):
    files, x = read_unknown(folder / "test", [10, 10])
    assert torch.equal(x, load(folder).test_images)
    assert files == sorted(str(path) for path in (folder / "test").rglob("*.png"))
    one, image = read_unknown(files[3], (10, 10))
    assert one == files[3:4] and torch.equal(image, x[3:4])
    grey = noise(4, 20, 30)
    np.savez(tmp_path / "x.npz", x=grey, x_test=grey, y_test=range(4))         # more is no harm
    names, x = read_unknown(tmp_path / "x.npz", (10, 15))
    means = grey.reshape(4, 10, 2, 15, 2).mean((2, 4))
    assert names == ["0", "1", "2", "3"] and abs(x.numpy() - means[:, None]).max() <= 0.5
    os.rename(files[0], os.fsencode(folder / "test") + b"/caf\xe9.png")      # Latin-1, not UTF-8
    names, _ = read_unknown(folder / "test", (8, 8))
    assert str(folder / "test/caf\\xe9.png").encode() in [name.encode() for name in names]


@pytest.mark.parametrize("make", [
    lambda p: p / "nothing.png", lambda p: (p / "empty").mkdir() or p / "empty",
    lambda p: (p / "x.png").write_text("text") and p / "x.png",
    lambda p: np.savez(p / "y.npz", y=np.zeros(3)) or p / "y.npz",
    lambda p: np.savez(p / "z.npz", x=np.zeros((3, 9, 9, 3))) or p / "z.npz"],
    ids=["nothing", "empty folder", "text", "no x", "floats"])
def test_what_cannot_be_predicted(tmp_path, make):
    path = make(tmp_path)
    with pytest.raises(UserError, match=path.name):
        read_unknown(path, (8, 8))


def test_checksum_tells_data_apart():
    images, test = (torch.from_numpy(noise(n, 3, 8, 8)) for n in (30, 8))
    own = dict(images=images, labels=np.r_[np.arange(20) % 4, np.full(10, -1)], test_images=test,
               test_labels=torch.arange(8) % 4, names=["a", "b", "c", "d"])
    others = [dict(images=255 - images), dict(images=torch.cat([images[:-1], images[-1:] ^ 1])),
              dict(images=images.flip(0)), dict(images=images.mT), dict(images=images[:-1]),
              dict(labels=np.roll(own["labels"], 1)), dict(test_images=test.flip(0)),
              dict(test_labels=own["test_labels"].flip(0)), dict(names=list("abdc")),
              dict(images=images[:-1], test_images=torch.cat([images[-1:], test]))]
    sums = {readers.checksum(**own | other) for other in [{}, *others]}
    assert len(sums) == 1 + len(others)
    layout = dict(images=images.clone(memory_format=torch.channels_last))
    assert readers.checksum(**own | layout) == readers.checksum(**own)
