"""The networks: sizes, shapes, BatchNorm handling, the released code's wiring; EMA and decay."""
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import models
from support import UserError

CFG = SimpleNamespace(seed=3, model="wrn-10-1", bn_momentum=0.25, wrn_quirk=True, ema=0.5,
                      dtype="float32", compile=False)


def test_wrn_28_2_has_its_published_size():
    model = models.build("wrn-28-2", 10)
    assert sum(p.numel() for p in model.parameters()) == 1_467_610
    assert sum(isinstance(m, torch.nn.Conv2d) and m.kernel_size == (3, 3)
               for m in model.modules()) == 25
    assert model.classifier.weight.shape == (10, 128)


@pytest.mark.parametrize("name,size,width", [("wrn-10-1", 16, 64), ("wrn-16-2", 32, 128),
                                             ("wrn-10-3", 20, 192)])
def test_features_and_classifier(name, size, width):
    model, x = models.build(name, 7), torch.randn(4, 3, size, size)
    model.eval()
    z = model.features(x)
    assert z.shape == (4, width)
    torch.testing.assert_close(model(x), z @ model.classifier.weight.T + model.classifier.bias)


@pytest.mark.slow
def test_resnet34_is_torchvisions():
    from torchvision.models import resnet34
    ours, theirs = models.build("resnet34", 1000, 0.1), resnet34()
    assert sum(p.numel() for p in ours.parameters()) == 21_797_672       # its published size
    weights = {k.removeprefix("network."): v for k, v in ours.state_dict().items()}
    weights = {k.replace("classifier", "fc"): v for k, v in weights.items()}
    theirs.load_state_dict(weights, strict=False)                        # it also counts batches
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))
    z = ours.features(x)
    assert z.shape == (2, 512)
    torch.testing.assert_close(ours(x), z @ ours.classifier.weight.T + ours.classifier.bias)


def test_resnet34_and_its_running_statistics():
    model, x = models.build("resnet34", 5, 0.25), torch.randn(4, 3, 32, 32)
    expected = 0.25 * model.network.conv1(x).mean((0, 2, 3))             # from zero, by one batch
    with torch.no_grad(), models.frozen_bn_stats(model):
        frozen = model(x)
    assert not any(b.any() for n, b in model.named_buffers() if "mean" in n)
    torch.testing.assert_close(frozen, model(x))
    torch.testing.assert_close(model.network.bn1.running_mean, expected)


@pytest.mark.parametrize("name", ["wrn-28", "wrn-27-2", "wrn-4-2", "wrn-28-0", "resnet", "",
                                  "wrn-28-2x", "wrn-28-101"])
def test_names_that_are_no_network(name):
    with pytest.raises(UserError, match=f"--model {name} "):
        models.build(name, 10)


@pytest.mark.parametrize("momentum", [0.001, 0.1])
def test_bn_momentum_reaches_the_running_statistics(momentum):
    model, x = models.build("wrn-10-1", 5, momentum), torch.randn(8, 3, 16, 16)
    expected = momentum * model.stem(x).mean((0, 2, 3))        # from zero, by one batch
    model(x)
    torch.testing.assert_close(model.stages[0].bn1.running_mean, expected)


def test_frozen_bn_stats_uses_the_batch_and_leaves_the_buffers():
    model, x = models.build("wrn-10-1", 5, 0.1), torch.randn(8, 3, 16, 16)
    before = [b.clone() for b in model.buffers()]
    with torch.no_grad(), models.frozen_bn_stats(model):
        frozen = model(x)
    assert len(before) == 14
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
    torch.testing.assert_close(frozen, model(x))               # train mode, now with an update
    assert not any(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))


def plain_unit(u, x, quirk):
    """A unit written out from its definition, on the weights of `u`."""
    def norm(x, bn):
        mean, var = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), keepdim=True, unbiased=False)
        x = (x - mean) / (var + 1e-5).sqrt() * bn.weight.view(-1, 1, 1) + bn.bias.view(-1, 1, 1)
        return torch.maximum(x, 0.1 * x)
    out = x if quirk else norm(x, u.bn1)
    out = norm(F.conv2d(out, u.conv1.weight, stride=u.conv1.stride, padding=1), u.bn2)
    return F.conv2d(out, u.conv2.weight, padding=1) + F.conv2d(x, u.shortcut.weight, stride=2)


@pytest.mark.parametrize("quirk", [False, True])
def test_first_unit_of_stage_two(quirk):
    unit = models.build("wrn-10-2", 5, quirk=quirk).stages[1]
    x = torch.randn(4, 32, 8, 8)
    torch.testing.assert_close(unit(x), plain_unit(unit, x, quirk), rtol=1e-4, atol=1e-5)


def released_logits(model, x, units):
    """The released network from its description, on the weights of `model`, in train mode. A unit
    that keeps its channels: identity, and BN, act, conv, BN, act, conv. One that changes them takes
    its input as it is for convolution and 1x1 shortcut, in the first stage activated."""
    def norm(x, bn):
        mean, var = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), keepdim=True, unbiased=False)
        x = (x - mean) / (var + 1e-5).sqrt() * bn.weight.view(-1, 1, 1) + bn.bias.view(-1, 1, 1)
        return torch.where(x > 0, x, 0.1 * x)
    x = F.conv2d(x, model.stem.weight, padding=1)
    for i, unit in enumerate(model.stages):
        c_out, c_in = unit.conv1.weight.shape[:2]
        stage, stride = i // units, 2 if i >= units and i % units == 0 else 1
        if c_in == c_out:
            branch, shortcut = norm(x, unit.bn1), x
        else:
            branch = norm(x, unit.bn1) if stage == 0 else x
            shortcut = F.conv2d(branch, unit.shortcut.weight, stride=stride)
        branch = norm(F.conv2d(branch, unit.conv1.weight, stride=stride, padding=1), unit.bn2)
        x = shortcut + F.conv2d(branch, unit.conv2.weight, padding=1)
    return F.linear(norm(x, model.bn).mean((2, 3)), model.classifier.weight, model.classifier.bias)


@pytest.mark.parametrize("depth,width", [(10, 1), (16, 1), (10, 2), (16, 3)])
def test_the_released_wiring(depth, width):
    torch.manual_seed(0)
    model = models.build(f"wrn-{depth}-{width}", 5, quirk=True).double()
    with torch.no_grad():
        for norm in (m for m in model.modules() if isinstance(m, models.Norm)):
            norm.weight.uniform_(0.5, 2)
            norm.bias.uniform_(-1, 1)
    x = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(model(x), released_logits(model, x, (depth - 4) // 6))
    dead = [i for i, unit in enumerate(model.stages) if unit.bn1 is None]
    assert dead == [(depth - 4) // 6, (depth - 4) // 3]       # the first units of stages 2 and 3


@pytest.mark.parametrize("width", [1, 2])
def test_the_first_shortcut_sees_the_activated_tensor(width):
    unit = models.build(f"wrn-10-{width}", 5).stages[0]
    torch.nn.init.zeros_(unit.conv2.weight)
    x = torch.randn(4, 16, 8, 8)
    torch.testing.assert_close(unit(x), unit.shortcut(F.leaky_relu(unit.bn1(x), 0.1)))


def test_weights_depend_on_the_seed():
    def weights(seed):
        torch.manual_seed(seed)
        return models.build("wrn-10-1", 5).stem.weight
    assert torch.equal(weights(0), weights(0)) and not torch.equal(weights(0), weights(1))


# ---------------------------------------------------------------------------------------------
# BatchNorm over ranks; test_distributed.py has two of them


@pytest.fixture
def lone_rank(monkeypatch):
    """What Norm computes for several ranks, with a single one that sends nothing."""
    monkeypatch.setattr(models.distributed, "stack_over_ranks", lambda x: x[None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_statistics_are_batchnorms(lone_rank, dtype):
    """Autocast gives bfloat16: statistics in float32, output as it came, also in memory."""
    torch.manual_seed(0)
    norm, plain = models.Norm(6, 0.3), torch.nn.BatchNorm2d(6, momentum=0.3)
    norm.shared = True
    x = torch.randn(4, 6, 5, 5, dtype=dtype).contiguous(memory_format=torch.channels_last)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        ours, theirs = norm(x), plain(x.float()).to(dtype)
    assert ours.dtype == dtype and ours.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(norm.running_mean, plain.running_mean)
    torch.testing.assert_close(norm.running_var, plain.running_var)
    torch.testing.assert_close(norm.eval()(x), plain.eval()(x.float()).to(dtype))


def test_shared_statistics_of_a_large_mean(lone_rank):
    """The mean of squares minus the square of the mean would lose all digits of the variance."""
    norm, x = models.Norm(6, 1.0), torch.randn(8, 6, 5, 5, dtype=torch.float64) + 3000
    norm.shared = True
    norm(x.float())
    torch.testing.assert_close(norm.running_var.double(), x.float().double().var((0, 2, 3)),
                               rtol=1e-4, atol=0)


@pytest.mark.parametrize("size", [1, 2])
def test_statistics_are_shared_where_there_are_several_ranks(monkeypatch, size):
    """In the network and its EMA, which has a checkpoint's names whatever the number of ranks."""
    monkeypatch.setattr(models.distributed, "size", lambda: size)
    model, ema, _ = models.build_with_ema(CFG, 5, torch.device("cpu"))
    for network in (model, ema.model):
        norms = [m for m in network.modules() if isinstance(m, torch.nn.BatchNorm2d)]
        assert len(norms) == 5 and all(m.shared == (size > 1) for m in norms)
        assert network.state_dict().keys() == models.build("wrn-10-1", 5,
                                                           quirk=True).state_dict().keys()


# ---------------------------------------------------------------------------------------------
# EMA, weight decay, prepare


@pytest.mark.parametrize("device, ranks, mode", [
    ("cuda", 1, "reduce-overhead"), ("cuda", 2, None), ("cpu", 1, None)])
def test_compiled_passes(monkeypatch, device, ranks, mode):
    """CUDA graphs on one GPU only, and what they return is not overwritten by the next pass."""
    asked, memory = {}, torch.zeros(2, 64)

    def record(network, **options):                  # a CUDA graph has one memory for its results
        asked.update(options)
        return lambda x: memory.copy_(network(x).detach())
    monkeypatch.setattr(torch, "compile", record)
    monkeypatch.setattr(models.distributed, "size", lambda: ranks)
    model = models.build("wrn-10-1", 10)
    features = models.feature_pass(model, torch.device(device), compiled=True)
    assert asked == {"dynamic": False, "mode": mode}
    first, second = torch.rand(2, 2, 3, 8, 8)
    if mode:
        z = features(first)
        features(second)
        torch.testing.assert_close(z, model.features(first))


def test_ema_has_its_closed_form_and_covers_bn_statistics():
    model, decay = models.build("wrn-10-1", 3, 0.1), 0.9
    ema = models.EMA(model, decay)
    expected = {k: v.clone() for k, v in model.state_dict().items()}
    for _ in range(4):
        model(torch.randn(4, 3, 8, 8))                       # moves the running statistics
        with torch.no_grad():
            for p in model.parameters():
                p += torch.randn_like(p)
        ema.update()
        for key, value in model.state_dict().items():
            expected[key] = decay * expected[key] + (1 - decay) * value
    for key, value in ema.model.state_dict().items():
        torch.testing.assert_close(value, expected[key])
    assert any("running_var" in key for key in expected)
    assert not ema.model.training and not any(p.requires_grad for p in ema.model.parameters())


@pytest.mark.parametrize("decay_bn", [False, True])
def test_weight_decay(decay_bn):
    model = models.build("wrn-10-1", 3, 0.1)
    model(torch.randn(4, 3, 8, 8))
    before = deepcopy(model.state_dict())
    models.decay_weights(model, SimpleNamespace(lr=0.1, weight_decay=2, decay_bn=decay_bn))
    for key, value in model.state_dict().items():
        kept = 1 if "running" in key and not decay_bn else 0.8
        torch.testing.assert_close(value, kept * before[key])


def test_prepare():
    """The seed decides on the weights, other heads are averaged too, features are the network's."""
    def heads(model):
        model.second = torch.nn.Linear(64, 2)
    model, ema, features = models.build_with_ema(CFG, 5, torch.device("cpu"), heads)
    torch.manual_seed(3)
    expected = models.build("wrn-10-1", 5, 0.25, quirk=True)
    heads(expected)
    for network in (model, ema.model):
        assert network.state_dict().keys() == expected.state_dict().keys()
        assert all(torch.equal(v, expected.state_dict()[k])
                   for k, v in network.state_dict().items())
    x = torch.randn(4, 3, 8, 8)
    torch.testing.assert_close(features(x), expected.features(x))
    torch.testing.assert_close(model.bn.running_mean, expected.bn.running_mean)
    torch.nn.init.zeros_(model.second.weight)
    ema.update()
    torch.testing.assert_close(ema.model.second.weight, expected.second.weight / 2)
