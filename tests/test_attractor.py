"""The bias attractor: Eq. 2, its size, its initial output."""
import pytest
import torch

from attractor import BiasAttractor


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
