"""Class counts of the paper's tables, what a split holds, streams as pure functions of the step."""
import io
import pickle
import tarfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import data

LONG = {  # (n_max, gamma): counts of the paper's settings for ten classes
    (1500, 50): "1500 971 628 407 263 170 110 71 46 30",
    (1500, 100): "1500 899 539 323 193 116 69 41 25 15",
    (1500, 150): "1500 859 492 282 161 92 53 30 17 10",
    (3000, 1): " ".join(["3000"] * 10),
    (3000, 50): "3000 1942 1257 814 527 341 221 143 92 60",
    (3000, 100): "3000 1798 1078 646 387 232 139 83 50 30",
    (3000, 150): "3000 1719 985 564 323 185 106 60 34 20",
    (450, 10): "450 348 269 208 161 125 96 75 58 45",
    (450, 20): "450 322 231 165 118 85 61 43 31 22",
}


@pytest.mark.parametrize("setting", LONG)
def test_long_tailed_counts(setting):
    n_max, gamma = setting
    expected = [int(n) for n in LONG[setting].split()]
    assert data.class_counts(n_max, 10, gamma) == expected
    assert data.class_counts(n_max, 10, gamma, reverse=True) == expected[::-1]


@pytest.mark.parametrize("n_max,gamma,total", [(150, 10, 5835), (150, 20, 4741), (300, 10, 11720),
                                               (300, 20, 9527)])
def test_totals_for_a_hundred_classes(n_max, gamma, total):
    assert sum(data.class_counts(n_max, 100, gamma)) == total


def test_step_counts():
    assert data.class_counts(1500, 10, 100, "step") == [1500] * 5 + [15] * 5
    assert data.class_counts(3000, 10, 100, "step", reverse=True) == [30] * 5 + [3000] * 5
    assert data.class_counts(9, 3, 3, "step") == [9, 3, 3]


def flags(**changes):
    return SimpleNamespace(**(dict(n1=30, m1=60, gamma_l=10, gamma_u=5, reverse_u=False,
                                   imbalance="long", split="random", pool="disjoint", seed=0)
                              | changes))


@pytest.fixture(scope="module")
def dataset():
    return data.load("synthetic")


def counts(dataset, index):
    return np.bincount(dataset.labels[index], minlength=10).tolist()


def test_disjoint_split(dataset):
    labeled, unlabeled = data.split(dataset, flags())
    assert counts(dataset, labeled) == data.class_counts(30, 10, 10)
    assert counts(dataset, unlabeled) == data.class_counts(60, 10, 5)
    assert not set(labeled) & set(unlabeled)


def test_union_split(dataset):
    labeled, unlabeled = data.split(dataset, flags(pool="union", reverse_u=True))
    assert set(labeled) < set(unlabeled)
    assert counts(dataset, unlabeled) == [n + m for n, m in zip(
        data.class_counts(30, 10, 10), data.class_counts(60, 10, 5, reverse=True))]
    assert len(set(unlabeled)) == len(unlabeled)


def test_random_split_depends_on_the_seed_and_first_does_not(dataset):
    same, other = (data.split(dataset, flags(seed=s))[0] for s in (0, 1))
    assert np.array_equal(same, data.split(dataset, flags())[0])
    assert not np.array_equal(same, other)
    first = data.split(dataset, flags(split="first", seed=5))[0]
    expected = [np.flatnonzero(dataset.labels == k)[:n]
                for k, n in enumerate(data.class_counts(30, 10, 10))]
    assert np.array_equal(first, np.concatenate(expected))


def test_take(dataset):
    x, y = dataset.take(np.array([5, 9999, 1000]))
    assert torch.equal(x, dataset.images[[5, 9999, 1000]]) and y.tolist() == [0, 9, 1]


def test_impossible_splits_say_why(dataset):
    with pytest.raises(data.DataError, match="class 0 .disk., which has 1000"):
        data.split(dataset, flags(n1=950))
    with pytest.raises(data.DataError, match="0 labeled"):
        data.split(dataset, flags(gamma_l=1000))
    with pytest.raises(data.DataError, match="--m1"):
        data.split(dataset, flags(m1=None))
    with pytest.raises(data.DataError, match="x_unlabeled"):
        data.split(dataset, flags(n1=None, m1=None, gamma_l=None, gamma_u=None))


# ---------------------------------------------------------------------------------------------
# streams


def test_index_stream_shows_every_image_once_per_pass():
    stream = data.IndexStream(np.arange(100, 123), 5, seed=3, purpose="x")
    sequence = np.concatenate([stream.batch(s) for s in range(46)])          # ten passes of 23
    for epoch in sequence.reshape(10, 23):
        assert sorted(epoch) == list(range(100, 123))
    assert not np.array_equal(sequence[:23], sequence[23:46])


def test_a_batch_larger_than_the_dataset():
    assert sorted(data.IndexStream(np.arange(3), 9, 0, "x").batch(4)) == [0] * 3 + [1] * 3 + [2] * 3


@pytest.mark.parametrize("kind", ["index", "balanced"])
def test_streams_are_pure_functions_of_the_step(kind):
    def make():
        if kind == "index":
            return data.IndexStream(np.arange(17), 4, seed=1, purpose="x")
        return data.BalancedStream(np.arange(17), np.arange(17) % 3, 4, seed=1)
    used = make()
    forward = [used.batch(s) for s in range(20)]
    for step in (19, 3, 11, 0):            # in any order, by a fresh stream or a used one
        assert np.array_equal(make().batch(step), forward[step])
        assert np.array_equal(used.batch(step), forward[step])


def test_balanced_stream_is_class_aware():
    labels = np.repeat(np.arange(5), [50, 20, 7, 3, 1])
    index = np.arange(1000, 1081)
    stream = data.BalancedStream(index, labels, 7, seed=0)
    drawn = np.concatenate([stream.batch(s) for s in range(50)])             # 350 = 70 rounds
    classes = labels[drawn - 1000]
    assert all(sorted(r) == [0, 1, 2, 3, 4] for r in classes.reshape(70, 5))
    for k, n in enumerate([50, 20, 7, 3, 1]):          # within a class, too, in shuffled rounds
        images = drawn[classes == k]
        for start in range(0, 70 - n + 1, n):
            assert len(set(images[start:start + n])) == n


def test_purposes_and_seeds_give_unrelated_draws():
    draws = {tuple(data.rng(s, p, t).integers(1000, size=4))
             for s in (0, 1) for p in ("a", "b") for t in (0, 1)}
    assert len(draws) == 8


# ---------------------------------------------------------------------------------------------
# readers


def arrays(n=20, size=12, classes=4):
    g = np.random.default_rng(0)
    return {"x_train": g.integers(0, 256, (n, size, size, 3), dtype=np.uint8),
            "y_train": np.arange(n) % classes,
            "x_test": g.integers(0, 256, (n, size, size, 3), dtype=np.uint8),
            "y_test": np.arange(n) % classes}


def test_npz_round_trip(tmp_path):
    a = arrays() | {"x_unlabeled": arrays(30)["x_train"]}
    np.savez(tmp_path / "own.npz", **a)
    d = data.load(str(tmp_path / "own.npz"))
    assert d.images.shape == (50, 3, 12, 12) and d.images.dtype == torch.uint8
    assert np.array_equal(d.images[:20].permute(0, 2, 3, 1).numpy(), a["x_train"])
    assert d.labels.tolist() == a["y_train"].tolist() + [-1] * 30
    assert d.num_classes == 4 and d.mean == pytest.approx(a["x_train"].mean((0, 1, 2)) / 255)
    assert d.std == pytest.approx(a["x_train"].std((0, 1, 2)) / 255)
    labeled, unlabeled = data.split(d, flags(n1=None, m1=None, gamma_l=None, gamma_u=None))
    assert labeled.tolist() == list(range(20)) and unlabeled.tolist() == list(range(20, 50))


def test_npz_in_the_data_folder_stands_for_cifar10(tmp_path):
    np.savez(tmp_path / "cifar10.npz", **arrays(size=32, classes=10))
    d = data.load("cifar10", tmp_path, image_size=16)
    assert d.names[3] == "cat" and d.images.shape == (20, 3, 16, 16)
    x = np.load(tmp_path / "cifar10.npz")["x_train"].astype(float)
    means = x.reshape(20, 16, 2, 16, 2, 3).mean((2, 4)).transpose(0, 3, 1, 2)
    assert abs(d.images.numpy() - means).max() <= 0.5


def write_cifar10_archive(folder, a):
    """cifar-10-python.tar.gz as it is distributed: pickled batches of rows R..G..B.."""
    def rows(x):
        return x.transpose(0, 3, 1, 2).reshape(len(x), -1)
    files = {f"data_batch_{i + 1}": {"data": rows(a["x_train"][i::5]),
                                     "labels": a["y_train"][i::5].tolist()} for i in range(5)}
    files["test_batch"] = {"data": rows(a["x_test"]), "labels": a["y_test"].tolist()}
    files["batches.meta"] = {"label_names": data.CIFAR10}
    with tarfile.open(folder / "cifar-10-python.tar.gz", "w:gz") as tar:
        for name, content in files.items():
            blob = pickle.dumps(content)
            info = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            info.size = len(blob)
            tar.addfile(info, io.BytesIO(blob))
    with tarfile.open(folder / "cifar-10-python.tar.gz") as tar:
        tar.extractall(folder, filter="data")


def test_cifar10_through_torchvision(tmp_path, monkeypatch):
    from torchvision.datasets import CIFAR10
    monkeypatch.setattr(CIFAR10, "_check_integrity", lambda self: True)   # the real one's md5
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *args: True)
    a = arrays(20, 32, 10)
    write_cifar10_archive(tmp_path, a)
    d = data.load("cifar10", tmp_path)
    order = np.concatenate([np.arange(i, 20, 5) for i in range(5)])
    assert np.array_equal(d.images.permute(0, 2, 3, 1).numpy(), a["x_train"][order])
    assert d.labels.tolist() == a["y_train"][order].tolist()
    assert np.array_equal(d.test_images.permute(0, 2, 3, 1).numpy(), a["x_test"])


@pytest.mark.parametrize("change,message", [
    (dict(x_train=None), "lacks the array x_train"),
    (dict(x_train=np.zeros((20, 12, 12, 3))), "must be uint8"),
    (dict(x_test=np.zeros((20, 12, 12), np.uint8)), "must be uint8"),
    (dict(x_test=np.zeros((20, 9, 9, 3), np.uint8)), "another size"),
    (dict(y_train=np.arange(19)), "20 class numbers"),
    (dict(y_train=np.arange(20) - 1), "20 class numbers"),
    (dict(y_train=np.zeros(20)), "20 class numbers"),
    (dict(y_test=np.arange(20)), "classes that y_train lacks"),
    (dict(y_train=np.arange(20) % 4 * 2), "no image of class 1"),
    (dict(names=np.array(["a", "b"])), "2 class names"),
    (dict(x_train=np.zeros((20, 12, 5, 3), np.uint8)), "at least 8 x 8"),
])
def test_wrong_npz_files_are_named(tmp_path, change, message):
    content = {k: v for k, v in (arrays() | change).items() if v is not None}
    np.savez(tmp_path / "own.npz", **content)
    with pytest.raises(data.DataError, match=message) as error:
        data.load(str(tmp_path / "own.npz"))
    assert "own.npz" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"no zip", None])
def test_unreadable_npz(tmp_path, content):
    if content is not None:
        (tmp_path / "own.npz").write_bytes(content)
    with pytest.raises(data.DataError, match="own.npz cannot be read"):
        data.load(str(tmp_path / "own.npz"))


def test_an_npy_file_is_no_npz(tmp_path):
    np.save(tmp_path / "own.npy", np.zeros(3))
    (tmp_path / "own.npy").rename(tmp_path / "own.npz")
    with pytest.raises(data.DataError, match="own.npz cannot be read"):
        data.load(str(tmp_path / "own.npz"))


def test_truncated_npz(tmp_path):
    np.savez(tmp_path / "own.npz", **arrays())
    whole = (tmp_path / "own.npz").read_bytes()
    (tmp_path / "own.npz").write_bytes(whole[:len(whole) // 2])
    with pytest.raises(data.DataError, match="cannot be read"):
        data.load(str(tmp_path / "own.npz"))


def test_synthetic_is_always_the_same_and_balanced(dataset):
    again = data.load("synthetic")
    assert torch.equal(dataset.images, again.images)
    assert np.bincount(dataset.labels).tolist() == [1000] * 10
    assert dataset.test_labels.bincount().tolist() == [100] * 10
    assert data.load("synthetic", image_size=32).images.shape[2:] == (32, 32)
