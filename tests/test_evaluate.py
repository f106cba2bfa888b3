"""Metrics against scikit-learn and hand-made numbers."""
import math

import numpy as np
import pytest
import sklearn.metrics
import torch

import evaluate


class Lookup(torch.nn.Module):
    """Predicts what is written in the first pixel."""

    def forward(self, x):
        return torch.nn.functional.one_hot(x[:, 0, 0, 0].long(), 5).float()


@pytest.mark.parametrize("seed", range(5))
def test_against_scikit_learn(seed):
    g = np.random.default_rng(seed)
    y, predicted = g.integers(0, 5, 1234), g.integers(0, 5, 1234)
    predicted = np.where(g.random(1234) < 0.6, y, predicted)
    images = torch.from_numpy(predicted).view(-1, 1, 1, 1).expand(-1, 3, 2, 2)
    matrix = evaluate.confusion_matrix(Lookup(), images, torch.from_numpy(y), 5, lambda x: x, 100)
    assert np.array_equal(matrix.numpy(), sklearn.metrics.confusion_matrix(y, predicted))
    m = evaluate.metrics(matrix)
    recall = sklearn.metrics.recall_score(y, predicted, average=None)
    assert m["recall"] == pytest.approx(100 * recall)
    assert m["bacc"] == pytest.approx(100 * sklearn.metrics.balanced_accuracy_score(y, predicted))
    assert m["acc"] == pytest.approx(100 * sklearn.metrics.accuracy_score(y, predicted))
    assert m["gm"] == pytest.approx(100 * math.prod(recall) ** (1 / 5))


def confusion_with_recalls(recalls, n=1000):
    """A diagonal of recalls, the misses one class further."""
    matrix = torch.diag(torch.tensor([r * n for r in recalls])).round()
    for k, r in enumerate(recalls):
        matrix[k, (k + 1) % len(recalls)] = n - matrix[k, k]
    return matrix


def test_gm_of_a_class_that_is_never_hit():
    m = evaluate.metrics(confusion_with_recalls([.9, .8, .7, .6, .5, .4, .3, .2, .1, 0]))
    assert m["gm"] == pytest.approx(22.697, abs=5e-4) and m["bacc"] == pytest.approx(45)


def test_the_floor_depends_on_the_number_of_classes():
    m = evaluate.metrics(confusion_with_recalls([1.0, 0.0]))
    assert m["gm"] == pytest.approx(100 * math.sqrt(1 / 200))


def test_a_class_without_test_images_is_left_out():
    m = evaluate.metrics(torch.tensor([[8, 2, 0], [5, 5, 0], [0, 0, 0]]))
    assert m["bacc"] == pytest.approx(65) and m["gm"] == pytest.approx(100 * math.sqrt(.4))
    assert math.isnan(m["recall"][2])


def test_mean_of_last_20_is_a_mean_of_gms():
    rows = [{"iter": i, "bacc": i, "gm": i * i, "acc": 1.0, "recall_0": i, "recall_1": 2}
            for i in range(50)]
    m = evaluate.mean_of_last(rows)
    assert m["bacc"] == pytest.approx(np.mean(range(30, 50)))
    assert m["gm"] == pytest.approx(np.mean(np.arange(30, 50) ** 2))
    assert m["recall"] == pytest.approx([39.5, 2])
