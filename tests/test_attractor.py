"""The bias attractor: Eq. 2, what it reads and where it starts; the variants."""
import numpy as np
import pytest
import torch

from attractor import BiasAttractor, BiasVector, build_attractor


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


@pytest.mark.parametrize("attractor", [BiasAttractor(4), BiasAttractor(4, norm="l2"),
                                       BiasVector(4)])
def test_theta_and_phi_are_not_trained_through_it(attractor):
    """l^ = l + attractor(l) depends on l through the identity alone; omega gets a gradient."""
    logits, r = torch.randn(6, 4, requires_grad=True), torch.randn(6, 4)
    (r * (logits + attractor(logits))).sum().backward()
    assert torch.equal(logits.grad, r)
    assert all(p.grad.abs().sum() > 0 for p in attractor.parameters())


def test_the_start_is_small():
    """Xavier: hidden weights have variance 2 / (K + 256), those of the output the same. A unit of a
    normalised input has E relu^2 = 1 / (K + 256), times 256 units and 2 / (K + 256): the output has
    a standard deviation of sqrt(512) / (K + 256) = 0.085 for K = 10."""
    torch.manual_seed(0)
    outputs = torch.stack([BiasAttractor(10, norm="l2")(torch.randn(200, 10)) for _ in range(20)])
    assert outputs.std().item() == pytest.approx(512 ** 0.5 / 266, rel=0.1)
    assert abs(outputs.mean().item()) < 0.02


def test_the_default_is_the_papers():
    torch.manual_seed(0)
    paper = BiasAttractor(10, 256, "softmax")
    torch.manual_seed(0)
    ours, logits = build_attractor(10), torch.randn(6, 10)
    assert torch.equal(ours(logits), paper(logits))
    # two layers of a width of 256, with biases
    assert sum(p.numel() for p in ours.parameters()) == 10 * 256 + 256 + 256 * 10 + 10


def test_a_vector_is_the_same_for_all_images():
    vector = build_attractor(3, "vector")
    assert torch.equal(vector(torch.randn(5, 3)), torch.zeros(5, 3))
    vector.bias.data = torch.tensor([1.0, 2, 3])
    assert vector(torch.randn(2, 3)).tolist() == [[1, 2, 3], [1, 2, 3]]


@pytest.mark.parametrize("kind", ["mlp", "vector"])
def test_a_start_at_the_prior(kind):
    """log N_k less its mean. The rest of the network is as it would be without."""
    counts = np.array([1500, 400, 15])
    expected = np.log(counts / np.prod(counts.astype(float)) ** (1 / 3))
    torch.manual_seed(0)
    plain = build_attractor(3, kind, 16)
    torch.manual_seed(0)
    prior, logits = build_attractor(3, kind, 16, counts=torch.from_numpy(counts)), torch.randn(5, 3)
    difference = (prior(logits) - plain(logits)).detach().numpy()
    np.testing.assert_allclose(difference, np.tile(expected, (5, 1)), atol=1e-6)
