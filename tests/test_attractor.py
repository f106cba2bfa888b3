"""The bias attractor: Eq. 2, what is detached, its size."""
import pytest
import torch

from attractor import BiasAttractor, adapt


@pytest.mark.parametrize("num_classes,size", [(10, 5386), (100, 51556)])
def test_number_of_parameters(num_classes, size):
    assert sum(p.numel() for p in BiasAttractor(num_classes).parameters()) == size


@pytest.mark.parametrize("norm", ["softmax", "l2"])
def test_eq_2_by_hand(norm):
    attractor, logits = BiasAttractor(4, 8, norm), torch.randn(6, 4)
    first, _, second = attractor.mlp
    a = (logits.exp() / logits.exp().sum(1, keepdim=True) if norm == "softmax"
         else logits / (logits ** 2).sum(1, keepdim=True).sqrt())
    hidden = (a @ first.weight.T + first.bias).clamp_min(0)
    expected = logits + hidden @ second.weight.T + second.bias
    torch.testing.assert_close(adapt(logits, attractor), expected)


def test_with_a_zero_last_layer_it_is_the_identity():
    attractor, logits = BiasAttractor(4), torch.randn(6, 4)
    torch.nn.init.zeros_(attractor.mlp[2].weight)
    assert torch.equal(adapt(logits, attractor), logits)


@pytest.mark.parametrize("norm", ["softmax", "l2"])
def test_no_gradient_goes_through_its_input(norm):
    attractor, logits = BiasAttractor(4, 8, norm), torch.randn(6, 4, requires_grad=True)
    weight = torch.randn(6, 4)
    (adapt(logits, attractor) * weight).sum().backward()
    assert torch.equal(logits.grad, weight)                    # that of the identity path alone
    assert all(p.grad.abs().sum() > 0 for p in attractor.parameters())


def test_initial_output_is_small():
    torch.manual_seed(0)
    outputs = torch.stack([BiasAttractor(10, norm="l2")(torch.randn(200, 10)) for _ in range(20)])
    assert outputs.std().item() == pytest.approx(0.085, rel=0.15)
