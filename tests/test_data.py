"""Class counts of the paper's settings, splits, streams of batches, .npz files."""
from types import SimpleNamespace

import conftest
import numpy as np
import pytest
import torch

import data
from support import UserError

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


HUNDRED = {  # the same for a hundred classes
    (150, 10): """
        150 146 143 139 136 133 130 127 124 121 118 116 113 110 108 105 103 101 98 96
        94 92 89 87 85 83 81 80 78 76 74 72 71 69 68 66 64 63 61 60
        59 57 56 55 53 52 51 50 49 47 46 45 44 43 42 41 40 39 38 38
        37 36 35 34 33 33 32 31 30 30 29 28 28 27 26 26 25 25 24 23
        23 22 22 21 21 20 20 19 19 18 18 18 17 17 16 16 16 15 15 15""",
    (150, 20): """
        150 145 141 136 132 128 125 121 117 114 110 107 104 101 98 95 92 89 87 84
        81 79 77 74 72 70 68 66 64 62 60 58 56 55 53 52 50 48 47 46
        44 43 42 40 39 38 37 36 35 34 33 32 31 30 29 28 27 26 25 25
        24 23 22 22 21 20 20 19 19 18 18 17 16 16 15 15 15 14 14 13
        13 12 12 12 11 11 11 10 10 10 9 9 9 8 8 8 8 7 7 7""",
    (300, 10): """
        300 293 286 279 273 267 260 254 249 243 237 232 226 221 216 211 206 202 197 192
        188 184 179 175 171 167 163 160 156 152 149 145 142 139 136 132 129 126 123 121
        118 115 112 110 107 105 102 100 98 95 93 91 89 87 85 83 81 79 77 76
        74 72 70 69 67 66 64 63 61 60 58 57 56 54 53 52 51 50 48 47
        46 45 44 43 42 41 40 39 38 37 36 36 35 34 33 32 32 31 30 30""",
    (300, 20): """
        300 291 282 273 265 257 250 242 235 228 221 215 208 202 196 190 184 179 174 168
        163 158 154 149 145 140 136 132 128 124 121 117 113 110 107 104 100 97 95 92
        89 86 84 81 79 76 74 72 70 68 66 64 62 60 58 56 55 53 51 50
        48 47 45 44 43 41 40 39 38 37 36 34 33 32 31 31 30 29 28 27
        26 25 25 24 23 22 22 21 20 20 19 19 18 17 17 16 16 15 15 15""",
}
TOTALS = {(1500, 50): 4196, (1500, 100): 3720, (1500, 150): 3496, (3000, 1): 30000,
          (3000, 50): 8397, (3000, 100): 7443, (3000, 150): 6996, (450, 10): 1835, (450, 20): 1528,
          (150, 10): 5835, (150, 20): 4741, (300, 10): 11720, (300, 20): 9527}


@pytest.mark.parametrize("setting", HUNDRED)
def test_a_hundred_classes(setting):
    expected = [int(n) for n in HUNDRED[setting].split()]
    assert data.class_counts(setting[0], 100, setting[1]) == expected
    assert data.class_counts(setting[0], 100, setting[1], reverse=True) == expected[::-1]


def test_totals():
    for (n_max, gamma), total in TOTALS.items():
        num_classes = 100 if (n_max, gamma) in HUNDRED else 10
        assert sum(data.class_counts(n_max, num_classes, gamma)) == total


def test_step_counts():
    assert data.class_counts(1500, 10, 100, "step") == [1500] * 5 + [15] * 5
    assert data.class_counts(3000, 10, 100, "step", reverse=True) == [30] * 5 + [3000] * 5
    assert data.class_counts(3000, 10, 1, "step") == [3000] * 10
    assert data.class_counts(9, 3, 3, "step") == [9, 3, 3]


def flags(**changes):
    return SimpleNamespace(**(dict(n1=30, m1=60, gamma_l=10, gamma_u=5, reverse_u=False,
                                   imbalance="long", split="random", pool="disjoint", seed=0,
                                   beta=None, ratio=None)
                              | changes))


@pytest.fixture(scope="module")
def dataset():
    return data.load("synthetic", image_size=8)


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
        data.class_counts(30, 10, 10), data.class_counts(60, 10, 5, reverse=True), strict=True)]
    assert len(set(unlabeled)) == len(unlabeled)


def test_random_split_depends_on_the_seed_and_first_does_not(dataset):
    same, other = (data.split(dataset, flags(seed=s))[0] for s in (0, 1))
    assert np.array_equal(same, data.split(dataset, flags())[0])
    assert not np.array_equal(same, other)
    first = data.split(dataset, flags(split="first", seed=5))[0]
    expected = [np.flatnonzero(dataset.labels == k)[:n]
                for k, n in enumerate(data.class_counts(30, 10, 10))]
    assert np.array_equal(first, np.concatenate(expected))


def like(sizes, unlabeled=0):
    """A dataset with `sizes` labeled images of each class, without any images."""
    labels = np.concatenate([np.repeat(np.arange(len(sizes)), sizes), np.full(unlabeled, -1)])
    names = [f"name {k}" for k in range(len(sizes))]
    return data.Dataset(None, labels, None, None, names, None, None)


def totals(dataset, **changes):
    """[labeled of each class], [unlabeled of each class], unlabeled without a label"""
    labeled, unlabeled = data.split(dataset, flags(**changes))
    known = dataset.labels[unlabeled]
    K = dataset.num_classes
    return (np.bincount(dataset.labels[labeled], minlength=K).tolist(),
            np.bincount(known[known >= 0], minlength=K).tolist(), int((known < 0).sum()))


CIFAR10 = dict(n1=1500, m1=3000, gamma_l=100)


@pytest.mark.parametrize("changes,expected", [
    (dict(gamma_u=100), "4500 2697 1617 969 580 348 208 124 75 45"),
    (dict(gamma_l=150, gamma_u=150), "4500 2578 1477 846 484 277 159 90 51 30"),
    (dict(gamma_u=1), "4500 3899 3539 3323 3193 3116 3069 3041 3025 3015"),
    (dict(gamma_u=100, reverse_u=True), "1530 949 622 462 425 503 715 1119 1823 3015")])
def test_union_pools_of_cifar10(changes, expected):
    _, unlabeled, _ = totals(like([5000] * 10), **CIFAR10 | changes, pool="union")
    assert unlabeled == [int(n) for n in expected.split()]


@pytest.mark.parametrize("gamma,disjoint,union", [(10, 11720, 17555), (20, 9527, 14268)])
def test_pools_of_cifar100(gamma, disjoint, union):
    setting = dict(n1=150, m1=300, gamma_l=gamma, gamma_u=gamma)
    cifar100 = like([500] * 100)
    assert sum(totals(cifar100, **setting)[1]) == disjoint
    assert sum(totals(cifar100, **setting, pool="union")[1]) == union


def test_step_imbalance():
    labeled, unlabeled, _ = totals(like([5000] * 10), **CIFAR10, gamma_u=100, imbalance="step")
    assert labeled == [1500] * 5 + [15] * 5 and unlabeled == [3000] * 5 + [30] * 5
    assert (sum(labeled), sum(unlabeled)) == (7575, 15150)
    labeled, unlabeled, _ = totals(like([5000] * 10), **CIFAR10, gamma_u=1, imbalance="step")
    assert (sum(labeled), sum(unlabeled)) == (7575, 30000)


@pytest.mark.parametrize("gamma,labels", [(10, 1835), (20, 1528)])
def test_stl10_takes_the_whole_unlabeled_split(gamma, labels):
    stl10 = like([500] * 10, unlabeled=100_000)
    setting = dict(n1=450, gamma_l=gamma, m1=None, gamma_u=None)
    labeled, known, unknown = totals(stl10, **setting)
    assert sum(labeled) == labels and sum(known) == 0 and unknown == 100_000
    labeled, known, unknown = totals(stl10, **setting, pool="union")
    assert sum(known) + unknown == 100_000 + labels


def test_label_ratio_on_cifar10():
    """N_1 + M_1 are the 5,000 images of the first class; every class keeps a labeled image."""
    setting = dict(n1=None, m1=None, gamma_l=100, gamma_u=100)
    labeled, unlabeled, _ = totals(like([5000] * 10), **setting, beta=0.01)
    assert labeled == [50, 30, 18, 11, 6, 4, 2, 1, 1, 1]          # by hand: 29.97, 17.97, ...
    assert unlabeled[0] == 4950 and unlabeled[-1] == 50           # 49.5, half up
    for beta, first, last in ((0.05, 250, 3), (0.1, 500, 5), (0.2, 1000, 10), (0.3, 1500, 15)):
        labeled, unlabeled, _ = totals(like([5000] * 10), **setting, beta=beta)
        assert (labeled[0], labeled[-1], unlabeled[0]) == (first, last, 5000 - first)


@pytest.mark.parametrize("beta,first,last", [(0.05, 25, 3), (0.1, 50, 5), (0.2, 100, 10),
                                             (0.4, 200, 20), (0.6, 300, 30)])
def test_label_ratio_on_stl10(beta, first, last):
    """beta = N_1 / 500; the paper names 25 and 3 for 5 %."""
    labeled, known, unknown = totals(like([500] * 10, 1000), n1=None, m1=None, gamma_l=10,
                                     gamma_u=None, beta=beta)
    assert (labeled[0], labeled[-1], sum(known), unknown) == (first, last, 0, 1000)


def test_ratio_divides_every_class_alike():
    """SUN397 without its test images: classes of 50 to 2,311 pictures, M_k / N_k = 2."""
    none = dict(n1=None, m1=None, gamma_l=None, gamma_u=None)
    assert totals(like([50, 2311, 51]), **none, ratio=2) == ([16, 770, 17], [34, 1541, 34], 0)
    with pytest.raises(UserError, match="--ratio"):
        data.split(like([50, 60]), flags(ratio=2))
    with pytest.raises(UserError, match="class 1 .name 1."):
        data.split(like([50, 2]), flags(**none, ratio=2))


def test_take(dataset):
    x, y = dataset.take(np.array([5, 9999, 1000]))
    assert torch.equal(x, dataset.images[[5, 9999, 1000]]) and y.tolist() == [0, 9, 1]


def test_impossible_splits_name_the_reason(dataset):
    with pytest.raises(UserError, match="class 0 .disk., which has 1000"):
        data.split(dataset, flags(n1=950))
    with pytest.raises(UserError, match="0 labeled"):
        data.split(dataset, flags(gamma_l=1000))
    with pytest.raises(UserError, match="--m1"):
        data.split(dataset, flags(m1=None))
    with pytest.raises(UserError, match="x_unlabeled"):
        data.split(dataset, flags(n1=None, m1=None, gamma_l=None, gamma_u=None))


# ---------------------------------------------------------------------------------------------
# streams


def test_index_stream_yields_every_image_once_per_epoch():
    stream = data.IndexStream(np.arange(100, 123), 5, seed=3, purpose="x")
    sequence = np.concatenate([stream.batch(s) for s in range(46)])          # ten epochs of 23
    for epoch in sequence.reshape(10, 23):
        assert sorted(epoch) == list(range(100, 123))
    assert not np.array_equal(sequence[:23], sequence[23:46])


def test_a_batch_larger_than_the_dataset():
    assert sorted(data.IndexStream(np.arange(3), 9, 0, "x").batch(4)) == [0] * 3 + [1] * 3 + [2] * 3


LABELS = np.arange(40) % 3


def index_stream(batch_size, shard=(0, 1)):
    return data.IndexStream(np.arange(7, 24), batch_size, seed=1, purpose="x", shard=shard)


def balanced_stream(batch_size, shard=(0, 1)):
    return data.BalancedStream(np.arange(7, 24), LABELS, batch_size, seed=1, shard=shard)


@pytest.mark.parametrize("make", [index_stream, balanced_stream])
def test_streams_are_pure_functions_of_the_step(make):
    used = make(4)
    forward = [used.batch(s) for s in range(20)]
    for step in (19, 3, 11, 0):            # in any order, by a fresh stream or a used one
        assert np.array_equal(make(4).batch(step), forward[step])
        assert np.array_equal(used.batch(step), forward[step])


@pytest.mark.parametrize("make", [index_stream, balanced_stream])
@pytest.mark.parametrize("size", [2, 3])
def test_local_batches_of_all_ranks_make_up_the_global_batch(make, size):
    """In the order of ranks, and the same batch that a single rank draws."""
    alone, ranks = make(6), [make(6, shard=(rank, size)) for rank in range(size)]
    for step in range(8):                  # 48 images: the stream passes the end of an epoch
        local = [rank.batch(step) for rank in ranks]
        assert all(len(batch) == 6 // size for batch in local)
        assert np.array_equal(np.concatenate(local), alone.batch(step))
        assert all(np.array_equal(rank.indices(step), alone.batch(step)) for rank in ranks)


def test_ranks_read_their_own_slice_ahead():
    """A rank announces its slices of this batch and of the next one, not the global batches."""
    announced, stream = [], index_stream(6, shard=(1, 3))
    stream.expect = announced.append
    stream.batch(0)
    expected = [index_stream(6).batch(step)[2:4] for step in (0, 1)]
    assert np.array_equal(announced, expected)


def test_balanced_stream_is_class_aware():
    sizes = [50, 20, 7, 3, 1]
    labels = np.full(1081, -1)             # of the whole dataset: the members come last
    labels[1000:] = np.repeat(np.arange(5), sizes)
    stream = data.BalancedStream(np.arange(1000, 1081), labels, 7, seed=0)
    drawn = np.concatenate([stream.batch(s) for s in range(50)])             # 350 = 70 rounds
    classes = labels[drawn]
    assert all(sorted(r) == [0, 1, 2, 3, 4] for r in classes.reshape(70, 5))
    for k, n in enumerate(sizes):          # within a class, too, in shuffled rounds
        images = drawn[classes == k]
        for start in range(0, 70 - n + 1, n):
            assert len(set(images[start:start + n])) == n


def test_purposes_and_seeds_give_unrelated_draws():
    draws = {tuple(data.rng(s, p, t).integers(1000, size=4))
             for s in (0, 1) for p in ("a", "b") for t in (0, 1)}
    assert len(draws) == 8


# ---------------------------------------------------------------------------------------------
# .npz files and the synthetic dataset


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


def test_npz_in_the_data_folder_replaces_the_cifar10_archive(tmp_path):
    np.savez(tmp_path / "cifar10.npz", **arrays(size=32, classes=10))
    d = data.load("cifar10", tmp_path, image_size=16)
    assert d.names[3] == "cat" and d.images.shape == (20, 3, 16, 16)
    x = np.load(tmp_path / "cifar10.npz")["x_train"].astype(float)
    means = x.reshape(20, 16, 2, 16, 2, 3).mean((2, 4)).transpose(0, 3, 1, 2)
    assert abs(d.images.numpy() - means).max() <= 0.5


@pytest.mark.parametrize("change,message", [
    (dict(x_train=None), "lacks the array x_train"),
    (dict(x_train=np.zeros((20, 12, 12, 3))), "must be uint8"),
    (dict(x_test=np.zeros((20, 12, 12, 2), np.uint8)), "must be uint8"),
    (dict(x_test=np.zeros((20, 12), np.uint8)), "must be uint8"),
    (dict(x_test=np.zeros((20, 9, 9, 3), np.uint8)), "another size"),
    (dict(y_train=np.arange(19)), "20 class numbers"),
    (dict(y_train=np.arange(20) - 1), "20 class numbers"),
    (dict(y_train=np.zeros(20)), "20 class numbers"),
    (dict(y_test=np.arange(20)), "classes that y_train lacks"),
    (dict(y_train=np.arange(20) % 4 * 2), "no image of class 1"),
    (dict(y_train=np.arange(20) % 4 * 2, names=np.array(["a", "b"])), "class 1 .b."),
    (dict(names=np.array(["a", "b"])), "2 class names"),
    (dict(y_train=np.zeros(20, int), y_test=np.zeros(20, int)), "at least two classes"),
    (dict(x_train=np.zeros((20, 12, 5, 3), np.uint8)), "at least 8 x 8"),
])
def test_a_wrong_npz_file_is_named(tmp_path, change, message):
    content = {k: v for k, v in (arrays() | change).items() if v is not None}
    np.savez(tmp_path / "own.npz", **content)
    with pytest.raises(UserError, match=message) as error:
        data.load(str(tmp_path / "own.npz"))
    assert "own.npz" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"no zip", None])
def test_unreadable_npz(tmp_path, content):
    if content is not None:
        (tmp_path / "own.npz").write_bytes(content)
    with pytest.raises(UserError, match="own.npz cannot be read"):
        data.load(str(tmp_path / "own.npz"))


def test_an_npy_file_is_not_an_npz_file(tmp_path):
    np.save(tmp_path / "own.npy", np.zeros(3))
    (tmp_path / "own.npy").rename(tmp_path / "own.npz")
    with pytest.raises(UserError, match="own.npz cannot be read"):
        data.load(str(tmp_path / "own.npz"))


def test_truncated_npz(tmp_path):
    np.savez(tmp_path / "own.npz", **arrays())
    whole = (tmp_path / "own.npz").read_bytes()
    (tmp_path / "own.npz").write_bytes(whole[:len(whole) // 2])
    with pytest.raises(UserError, match="cannot be read"):
        data.load(str(tmp_path / "own.npz"))


def test_synthetic_is_always_the_same_and_balanced():
    first, again = conftest.synthetic(data.rng, 8), conftest.synthetic(data.rng, 8)
    assert all(np.array_equal(first[key], again[key]) for key in first)
    assert np.bincount(first["y_train"]).tolist() == [1000] * 10
    assert np.bincount(first["y_test"]).tolist() == [100] * 10
    assert first["x_train"].shape == (10_000, 8, 8, 3)


def test_synthetic_has_the_size_that_is_asked_for():
    assert data.load("synthetic", image_size=9).images.shape == (10_000, 3, 9, 9)
