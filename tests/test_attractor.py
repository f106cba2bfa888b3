"""The bias attractor: Eq. 2, its size, its initial output; the variants: a vector, and a start at
the prior."""
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import checkpoint, train

import data
import evaluate
import train_fixmatch
import train_mixmatch
from attractor import BiasAttractor, BiasVector, build_attractor
from support import config


@pytest.mark.parametrize("num_classes,size", [(10, 5386), (100, 51556)])
def test_number_of_parameters(num_classes, size):
    assert sum(p.numel() for p in BiasAttractor(num_classes).parameters()) == size


@pytest.mark.parametrize("norm", ["softmax", "l2"])
def test_eq_2_by_hand(norm):
    attractor, logits = BiasAttractor(4, 8, norm), torch.randn(6, 4)
    torch.nn.init.normal_(attractor.hidden.bias)               # they start at zero
    torch.nn.init.normal_(attractor.out.bias)
    a = (logits.exp() / logits.exp().sum(1, keepdim=True) if norm == "softmax"
         else logits / (logits ** 2).sum(1, keepdim=True).sqrt())
    hidden = (a @ attractor.hidden.weight.T + attractor.hidden.bias).clamp_min(0)
    expected = hidden @ attractor.out.weight.T + attractor.out.bias
    torch.testing.assert_close(attractor(logits), expected)


def test_with_a_zero_last_layer_it_adds_nothing():
    attractor = BiasAttractor(4)
    torch.nn.init.zeros_(attractor.out.weight)
    assert torch.equal(attractor(torch.randn(6, 4)), torch.zeros(6, 4))


@pytest.mark.parametrize("norm", ["softmax", "l2"])
def test_every_weight_of_a_new_attractor_gets_a_gradient(norm):
    attractor = BiasAttractor(4, 8, norm)
    (attractor(torch.randn(6, 4)) * torch.randn(6, 4)).sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in attractor.parameters())


def test_initial_output_is_small():
    torch.manual_seed(0)
    outputs = torch.stack([BiasAttractor(10, norm="l2")(torch.randn(200, 10)) for _ in range(20)])
    assert outputs.std().item() == pytest.approx(0.085, rel=0.15)


# ---------------------------------------------------------------------------------------------
# variants

COUNTS = torch.tensor(data.class_counts(1500, 10, 100))
PRIOR = [2.3059, 1.7940, 1.2824, 0.7704, 0.2554, -0.2537, -0.7732, -1.2937, -1.7884, -2.2992]


def built(kind="mlp", start="zero", norm="softmax"):
    torch.manual_seed(0)
    return build_attractor(SimpleNamespace(attractor=kind, attractor_start=start, hidden=16,
                                           attractor_input=norm), COUNTS)


@pytest.mark.parametrize("norm", ["softmax", "l2"])
def test_the_default_is_the_papers(norm):
    torch.manual_seed(0)
    paper, logits = BiasAttractor(10, 16, norm), torch.randn(6, 10)
    assert torch.equal(built(norm=norm)(logits), paper(logits))
    cfg = config.read([], "fixmatch")
    assert (cfg.attractor, cfg.attractor_start) == ("mlp", "zero")


def test_the_prior_start_of_the_mlp_is_in_its_last_bias_alone():
    ours, paper = built(start="prior").state_dict(), built().state_dict()
    assert ours.pop("out.bias").tolist() == pytest.approx(PRIOR, abs=6e-5)
    assert all(torch.equal(value, paper[key]) for key, value in ours.items())


@pytest.mark.parametrize("start,expected", [("zero", [0.0] * 10), ("prior", PRIOR)])
def test_the_vector_adds_the_same_to_every_image(start, expected):
    vector = built("vector", start)
    added = vector(torch.randn(4, 10))
    assert [row.tolist() for row in added] == [pytest.approx(expected, abs=6e-5)] * 4
    assert isinstance(vector, BiasVector) and [p.shape for p in vector.parameters()] == [(10,)]


@pytest.mark.parametrize("base", ["fixmatch", "mixmatch"])
@pytest.mark.parametrize("flags,eta", [
    ("--attractor vector", 1e-2), ("", 1e-4), ("--attractor_start prior", 1e-4),
    ("--attractor vector --eta 3e-4", 3e-4), ("--attractor vector --scale paper", 1e-4),
    ("--attractor vector --dataset cifar10", 1e-4),
    ("--attractor vector --dataset cifar10 --scale mini", 1e-2)])
def test_a_vector_has_another_eta_in_a_miniature(base, flags, eta):
    """1e-4 in 1,500 steps cannot reach the prior, which spans more than 2."""
    assert config.read(flags.split(), base).eta == eta


def centred(x):
    return x - x.mean()


@pytest.mark.parametrize("main", [train_fixmatch.main, pytest.param(
    train_mixmatch.main, marks=pytest.mark.slow)])
@pytest.mark.parametrize("flags", ["--attractor vector", "--attractor_start prior",
                                   "--attractor vector --attractor_start prior"])
def test_runs_start_where_the_flags_say_and_can_be_evaluated(tmp_path, main, flags):
    """One step of omega: Adam moves each number by eta, or by nothing. What log.csv and evaluate.py
    say that a vector adds is its centred value, the same for all images."""
    train(tmp_path, f"{flags} --inner sgd --eta 0.01 --iters 1 --eval_every 1", main)
    state = checkpoint(tmp_path)["attractor"]
    dataset, run = data.load("synthetic", image_size=8), evaluate.load_run(tmp_path)
    counts = np.bincount(dataset.labels[data.split(dataset, run.cfg)[0]])
    start = centred(np.log(counts)) if "prior" in flags else np.zeros(10)
    bias = state["bias" if "vector" in flags else "out.bias"].numpy()
    assert abs(bias - start).max() == pytest.approx(0.01, rel=0.01) and bias.any()
    assert all(torch.equal(value, state[key]) for key, value in run.attractor.state_dict().items())
    row, = run.history
    if "vector" in flags:
        assert [row[f"bias_{k}"] for k in range(10)] == pytest.approx(centred(bias), abs=1e-6)
        assert row["bias_varies"] == pytest.approx(0, abs=1e-5)
    else:
        assert row["bias_varies"] > 1e-5
    added = evaluate.bias_added(run.attractor, run.test_scores)
    assert evaluate.describe_bias(added, run.dataset.test_labels) == pytest.approx(
        {key: value for key, value in row.items() if key.startswith("bias_")}, abs=1e-5)
