"""The networks: sizes, wiring, BatchNorm handling; EMA and weight decay."""
import re
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models import get_model

import models
from support import UserError


@pytest.mark.parametrize("name,published", [("wrn-28-2", 1_467_610), ("wrn-28-10", 36_479_194)])
def test_wide_resnets_have_the_published_number_of_parameters(name, published):
    with torch.device("meta"):
        model = models.build(name, 10)
    assert sum(p.numel() for p in model.parameters()) == published


@pytest.mark.parametrize("name,head", [
    ("resnet18", "fc"), ("mobilenet_v3_small", "classifier.3"),
    *(pytest.param(name, head, marks=pytest.mark.slow) for name, head in (
        ("resnet50", "fc"), ("convnext_tiny", "classifier.2"), ("efficientnet_b0", "classifier.1"),
        ("vit_b_16", "heads.head"), ("googlenet", "fc")))])
def test_networks_of_torchvision(tmp_path, name, head):
    """Their weights from a file, by which both give the same logits; with another number of classes
    the classifier is new. Training draws no random numbers (dropout, stochastic depth)."""
    size = 64 if name == "vit_b_16" else 96
    options = {"image_size": size} if name == "vit_b_16" else {}
    theirs = get_model(name, **options).eval()
    torch.save(theirs.state_dict(), tmp_path / "weights.pt")
    flags = SimpleNamespace(model=name, bn_momentum=0.1, image_size=size, freeze=False,
                            weights=tmp_path / "weights.pt")
    ours, x = models.from_flags(flags, 1000), torch.randn(4, 3, size, size)
    torch.manual_seed(0)
    z = ours.features(x)                                      # in train mode
    assert z.shape == (4, theirs.get_submodule(head).in_features)
    assert torch.random.initial_seed() == 0 and torch.rand(1) == torch.rand(
        1, generator=torch.Generator().manual_seed(0))
    ours, few = models.from_flags(flags, 1000).eval(), models.from_flags(flags, 7).eval()
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(few.features(x), ours.features(x))
    assert few.classifier.weight.shape[0] == 7


def test_weights_of_imagenet_without_a_network(monkeypatch, tmp_path):
    """The message says which file is to be put where; there it is found."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    flags = SimpleNamespace(model="mobilenet_v3_small", bn_momentum=0.1, image_size=32,
                            weights="default", freeze=False)

    def fail(*args, **kwargs):
        raise OSError("no network")
    monkeypatch.setattr(torch.hub, "download_url_to_file", fail)
    with pytest.raises(UserError, match="put the file https.*mobilenet_v3_small.*into") as error:
        models.from_flags(flags, 3)
    url, place = re.search(r"put the file (\S+) into (\S+)", str(error.value)).groups()
    Path(place).mkdir(parents=True, exist_ok=True)
    theirs = get_model("mobilenet_v3_small")
    torch.save(theirs.state_dict(), Path(place, url.split("/")[-1]))
    ours = models.from_flags(flags, 3)
    assert torch.equal(ours.network.features[0][0].weight, theirs.features[0][0].weight)


@pytest.mark.parametrize("name", ["wrn-28", "wrn-27-2", "wrn-4-2", "wrn-28-0", "fcn_resnet50"])
def test_names_that_are_no_network(name):
    with pytest.raises(UserError, match=f"--model {name} "):
        models.build(name, 10)


def logits_by_hand(model, x, units):
    """WRN from its description, on the weights of `model`, in train mode. BN and activation come
    before each convolution; the very first unit's shortcut sees the activated tensor too."""
    def norm(x, bn):
        mean, var = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), keepdim=True, unbiased=False)
        x = (x - mean) / (var + 1e-5).sqrt() * bn.weight.view(-1, 1, 1) + bn.bias.view(-1, 1, 1)
        return torch.where(x > 0, x, 0.1 * x)
    x = F.conv2d(x, model.stem.weight, padding=1)
    for i, unit in enumerate(model.stages):
        stride = 2 if i in (units, 2 * units) else 1          # where stages 2 and 3 begin
        branch = norm(x, unit.bn1)
        shortcut = branch if i == 0 else x
        if unit.conv1.weight.shape[0] != x.shape[1]:
            shortcut = F.conv2d(shortcut, unit.shortcut.weight, stride=stride)
        branch = norm(F.conv2d(branch, unit.conv1.weight, stride=stride, padding=1), unit.bn2)
        x = shortcut + F.conv2d(branch, unit.conv2.weight, padding=1)
    return F.linear(norm(x, model.bn).mean((2, 3)), model.classifier.weight, model.classifier.bias)


@pytest.mark.parametrize("depth,width", [(10, 1), (16, 2)])
def test_wiring(depth, width):
    torch.manual_seed(0)
    model = models.build(f"wrn-{depth}-{width}", 5).double()
    for norm in models.norms(model):
        nn.init.uniform_(norm.weight, 0.5, 2)
        nn.init.uniform_(norm.bias, -1, 1)
    x = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(model(x), logits_by_hand(model, x, (depth - 4) // 6))


@pytest.mark.parametrize("name,first", [
    ("wrn-10-1", "stages.0.bn1"), pytest.param("resnet34", "network.bn1", marks=pytest.mark.slow)])
def test_running_statistics(name, first):
    """A frozen pass normalises by its batch, as any pass in train mode, and leaves no trace."""
    model, x = models.build(name, 5, 0.25), torch.randn(4, 3, 32, 32)
    stem = model.stem if name.startswith("wrn") else model.network.conv1
    expected = 0.25 * stem(x).mean((0, 2, 3))                 # from zero, by one batch
    before = deepcopy(model.state_dict())
    with torch.no_grad(), models.frozen_bn_stats(model):
        frozen = model(x)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    torch.testing.assert_close(frozen, model(x))
    torch.testing.assert_close(model.get_submodule(first).running_mean, expected)
    assert not any(torch.equal(b, before[key]) for key, b in model.named_buffers())
    assert {norm.momentum for norm in models.norms(model)} == {0.25}


def test_bfloat16_passes():
    """8 bits of mantissa, so a few parts in a thousand after a few layers, and float32 again."""
    model, x = models.build("wrn-10-1", 10), torch.randn(16, 3, 8, 8)
    exact, z = (models.feature_pass(model, torch.device("cpu"), dtype)(x)
                for dtype in ("float32", "bfloat16"))
    assert z.dtype == torch.float32 and 1e-4 < ((z - exact).norm() / exact.norm()) < 0.03


def test_a_compiled_pass_on_cuda_returns_memory_of_its_own(monkeypatch):
    """A CUDA graph has one memory for its results; the next pass must not change this one's."""
    memory, model = torch.zeros(2, 64), models.build("wrn-10-1", 10)
    monkeypatch.setattr(torch, "compile", lambda network, **options: lambda x: memory.copy_(
        network(x).detach()))
    features = models.feature_pass(model, torch.device("cuda"), compiled=True)
    first, second = torch.rand(2, 2, 3, 8, 8)
    z = features(first)
    features(second)
    torch.testing.assert_close(z, model.features(first))


def test_ema_and_weight_decay_have_their_closed_forms():
    """The EMA covers weights and running statistics: after n updates with values w_i it is
    0.9^n w_0 + 0.1 sum_i 0.9^(n-i) w_i. Decay shrinks weights, not statistics."""
    model = models.build("wrn-10-1", 3, 0.1)
    ema, states = models.EMA(model, 0.9), [deepcopy(model.state_dict())]
    for _ in range(4):
        model(torch.randn(4, 3, 8, 8))                        # moves the running statistics
        for p in model.parameters():
            p.data += torch.randn_like(p)
        ema.update()
        states.append(deepcopy(model.state_dict()))
    assert not ema.model.training and not any(p.requires_grad for p in ema.model.parameters())
    weights = [0.9 ** 4, *(0.1 * 0.9 ** (4 - i) for i in range(1, 5))]
    for key, value in ema.model.state_dict().items():
        if value.is_floating_point():                         # BatchNorm also counts batches
            expected = sum(w * state[key] for w, state in zip(weights, states, strict=True))
            torch.testing.assert_close(value, expected)
    models.decay_weights(model, 0.2)
    for key, value in model.state_dict().items():
        kept = 1 if "running" in key or "num_batches" in key else 0.8
        torch.testing.assert_close(value, kept * states[-1][key])


def test_the_average_of_a_frozen_network_computes_a_batch_once():
    passes, model, x = [], models.build("wrn-10-1", 4).eval(), torch.randn(2, 3, 3, 16, 16)
    expected = [model.features(batch) for batch in x]
    for average, times in ((models.EMA(model, 0.9), 2), (models.EMA(model.train(), 0.9), 4)):
        del passes[:]
        next(average.model.children()).register_forward_hook(lambda *_: passes.append(1))
        for i in (0, 1, 1, 0):
            assert torch.equal(average.model.features(x[i]), expected[i])
        assert len(passes) == times
