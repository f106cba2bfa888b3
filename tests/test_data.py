"""Class counts of the paper's settings, splits, streams of batches. Files: test_readers.py."""
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import data
from support import UserError, distributed


def long_tail(n_max, num_classes, gamma):
    """floor(n_max gamma^(-k / (K-1))) in whole numbers: the largest c with
    c^(K-1) gamma^k <= n_max^(K-1)."""
    power, counts = num_classes - 1, [n_max]
    for k in range(1, num_classes):
        counts.append(next(c for c in range(counts[-1], -1, -1)
                           if c ** power * gamma ** k <= n_max ** power))
    return counts


@pytest.mark.parametrize("n_max,num_classes,gammas", [
    (1500, 10, (50, 100, 150)), (3000, 10, (1, 50, 100, 150)), (450, 10, (10, 20)),
    (150, 100, (10, 20)), (300, 100, (10, 20))])
def test_long_tailed_counts(n_max, num_classes, gammas):
    """CIFAR-10, STL-10, CIFAR-100."""
    for gamma in gammas:
        expected = long_tail(n_max, num_classes, gamma)
        assert data.class_counts(n_max, num_classes, gamma) == expected
        assert data.class_counts(n_max, num_classes, gamma, reverse=True) == expected[::-1]


# ---------------------------------------------------------------------------------------------
# splits

NONE = dict(n1=None, m1=None, gamma_l=None, gamma_u=None)


def flags(**changes):
    return SimpleNamespace(**(dict(dataset="name", base="fixmatch", n1=30, m1=60, gamma_l=10,
                                   gamma_u=5, seed=0, reverse_u=False, imbalance="long",
                                   pool="disjoint", beta=None, ratio=None) | changes))


def like(sizes, unlabeled=0):
    """A dataset with `sizes` labeled images of each class in a random order, without any images."""
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    names = [f"name {k}" for k in range(len(sizes))]
    return data.Dataset(None, np.append(labels, [-1] * unlabeled).astype(int), None, None, names,
                        None, None)


def counted(dataset, **changes):
    """[labeled of each class], [unlabeled of each class], unlabeled without a label"""
    labeled, unlabeled = data.split(dataset, flags(**changes))
    assert len(set(labeled)) == len(labeled) and len(set(unlabeled)) == len(unlabeled)
    shared = set(labeled) & set(unlabeled)
    assert shared == (set(labeled) if changes.get("pool") == "union" else set())
    known = [[int((dataset.labels[i] == k).sum()) for k in range(dataset.num_classes)]
             for i in (labeled, unlabeled)]
    return *known, int((dataset.labels[unlabeled] == -1).sum())


@pytest.mark.parametrize("imbalance,labeled,rest", [
    ("long", long_tail(30, 10, 10), long_tail(60, 10, 5)),
    ("step", [30] * 5 + [3] * 5, [60] * 5 + [12] * 5)])
@pytest.mark.parametrize("reverse_u", [False, True])
@pytest.mark.parametrize("pool", ["disjoint", "union"])
def test_splits_of_a_labeled_dataset(pool, reverse_u, imbalance, labeled, rest):
    rest = rest[::-1] if reverse_u else rest
    if pool == "union":
        rest = [n + m for n, m in zip(labeled, rest, strict=True)]
    assert counted(like([90] * 10), pool=pool, reverse_u=reverse_u, imbalance=imbalance) == (
        labeled, rest, 0)


def test_images_of_a_class_are_drawn_by_seed():
    dataset = like([200] * 10)
    a, b, c = (data.split(dataset, flags(seed=seed)) for seed in (0, 0, 1))
    assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    # at most 30 of a class's 200 images: two seeds share at most 15 % of them on average
    assert len(set(a[0]) & set(c[0])) < 0.3 * len(a[0])


def test_labeled_images_come_from_as_many_tracks_as_they_are():
    """Class 0: 40 tracks of 5 frames for 30 labels, a frame each; the last class: 3 labels, 2
    tracks of 100. No image is lost or taken twice: `counted` sees to that."""
    dataset = like([200] * 10)
    dataset.tracks = np.empty(2000, int)
    dataset.tracks[np.argsort(dataset.labels)] = np.r_[np.r_[:1800] // 5,
                                                      np.r_[:200] // 100 + 1000]
    labeled, _ = data.split(dataset, flags())
    tracks = [dataset.tracks[labeled[dataset.labels[labeled] == k]] for k in range(10)]
    assert [len(set(t)) for t in tracks] == [*long_tail(30, 10, 10)[:9], 2]
    assert counted(dataset) == (long_tail(30, 10, 10), long_tail(60, 10, 5), 0)


@pytest.mark.parametrize("pool", ["disjoint", "union"])
def test_the_datasets_own_unlabeled_images(pool):
    """STL-10: all of them are taken, and as many labeled ones as the flags say. Without flags the
    data is taken as it is."""
    stl10 = like([500] * 10, unlabeled=1000)
    expected = long_tail(450, 10, 20)
    also = expected if pool == "union" else [0] * 10
    setting = NONE | dict(n1=450, gamma_l=20, pool=pool)
    assert counted(stl10, **setting) == (expected, also, 1000)
    also = [500] * 10 if pool == "union" else [0] * 10
    assert counted(stl10, **NONE, pool=pool) == ([500] * 10, also, 1000)


def test_label_ratio():
    """N_1 = beta of the first class, M_1 the rest; rounded half up, at least one labeled image."""
    labeled, unlabeled, _ = counted(like([5000] * 10), **NONE | dict(gamma_l=100, gamma_u=100),
                                    beta=0.01)
    assert labeled == [50, 30, 18, 11, 6, 4, 2, 1, 1, 1]          # by hand: 29.97, 17.97, ...
    assert unlabeled[0] == 4950 and unlabeled[-1] == 50           # 49.5, half up
    # STL-10: the paper names 25 and 3 for 5 %; 2.5, half up
    labeled, *rest = counted(like([500] * 10, 1000), **NONE | dict(gamma_l=10), beta=0.05)
    assert (labeled[0], labeled[-1]) == (25, 3) and rest == [[0] * 10, 1000]


def test_ratio_divides_every_class_alike():
    """SUN397: M_k / N_k = 2, and every image is used."""
    assert counted(like([50, 2311, 51]), **NONE, ratio=2) == ([16, 770, 17], [34, 1541, 34], 0)


@pytest.mark.parametrize("dataset,changes,named", [
    (like([90] * 10), dict(n1=80), "80 labeled and 60 unlabeled images of class 0 .name 0."),
    (like([90] * 10), dict(gamma_l=100), "0 labeled"),            # 30 / 100 of the last class
    (like([50, 2]), NONE | dict(ratio=2), "class 1 .name 1."),
    (like([90] * 10), dict(m1=None), "--m1 is missing"),
    (like([90] * 10), NONE, "no unlabeled images"),
    (like([90] * 10, unlabeled=5), {}, "leave out the 5 unlabeled")])
def test_impossible_splits_name_the_reason(dataset, changes, named):
    with pytest.raises(UserError, match=named):
        data.split(dataset, flags(**changes))


def test_labels_only_need_no_unlabeled_images():
    for changes, labeled in ((NONE, [9, 9]), (NONE | dict(n1=8, gamma_l=2), [8, 4])):
        assert counted(like([9, 9]), **changes, base="supervised")[:2] == (labeled, [0, 0])


def test_take_and_count():
    dataset = data.load("synthetic", image_size=8)            # 1,000 of each class, in order
    index = np.array([5, 9999, 1000])
    for d in (dataset, dataset.to("cpu")):
        x, y = d.take(index)
        assert torch.equal(x, dataset.images[[5, 9999, 1000]]) and y.tolist() == [0, 9, 1]
    assert dataset.take(index, np.array([3, 1, 4]))[1].tolist() == [3, 1, 4]
    assert like([2, 3], unlabeled=4).count(np.arange(9)).tolist() == [2, 3]


# ---------------------------------------------------------------------------------------------
# streams


def test_index_stream_yields_every_image_once_per_epoch():
    stream = data.IndexStream(np.arange(100, 123), 5, seed=3, purpose="x")
    sequence = np.concatenate([stream.batch(s) for s in range(46)])          # ten epochs of 23
    for epoch in sequence.reshape(10, 23):
        assert sorted(epoch) == list(range(100, 123))
    assert len({tuple(epoch) for epoch in sequence.reshape(10, 23)}) == 10
    # a batch that is larger than the dataset
    assert sorted(data.IndexStream(np.arange(3), 9, 0, "x").batch(4)) == [0] * 3 + [1] * 3 + [2] * 3


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


@pytest.mark.parametrize("make", [
    partial(data.IndexStream, np.arange(7, 24), 6, 1, "x"),
    partial(data.BalancedStream, np.arange(7, 24), np.arange(40) % 3, 6, 1)])
def test_batches_are_functions_of_the_step_and_ranks_share_them(make, monkeypatch):
    used = make()
    forward = [used.batch(s) for s in range(20)]
    for step in (19, 3, 11, 0):            # in any order, by a fresh stream or a used one
        assert np.array_equal(make().batch(step), forward[step])
        assert np.array_equal(used.batch(step), forward[step])
    monkeypatch.setattr(distributed, "size", lambda: 3)
    slices = []
    for rank in range(3):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        slices.append(make().batch(4))
    assert np.array_equal(np.concatenate(slices), forward[4])


def test_draws(monkeypatch):
    """Seeds, purposes and steps give unrelated ones; so do ranks, but rank 0 draws as if alone."""
    draws = {tuple(data.rng(s, p, t).integers(1000, size=4))
             for s in (0, 1) for p in ("a", "b") for t in (0, 1)}
    assert len(draws) == 8
    assert tuple(data.view_rng(1, "b", 1).integers(1000, size=4)) in draws
    monkeypatch.setattr(distributed, "rank", lambda: 1)
    assert tuple(data.view_rng(1, "b", 1).integers(1000, size=4)) not in draws
