"""image -> features -> logits: wide residual networks, ResNet-34 for large images, and their EMA.

Every network here has `features(x)` (N, D) and a linear `classifier`, because L2AC needs the two
apart: theta is what makes the features, phi = (W, b) is the classifier.

No attractor, no losses.
"""
import re
from contextlib import contextmanager
from copy import deepcopy
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torchvision.models import resnet34

from support import UserError, distributed


class Norm(nn.BatchNorm2d):
    """BatchNorm with a fixed momentum, so without num_batches_tracked, which would not be read.

    shared: several ranks normalise by the statistics of the global batch, as one rank would. Unlike
    in torch's SyncBatchNorm, they can be differentiated twice and need no GPU.
    """
    shared = False

    def __init__(self, channels, momentum):
        super().__init__(channels, momentum=momentum)
        self.num_batches_tracked = None

    def forward(self, x):
        if not (self.shared and self.training):
            return super().forward(x)
        wide = x.to(self.running_mean.dtype)         # float32, also where autocast gives bfloat16
        local = torch.stack(torch.var_mean(wide, (0, 2, 3), correction=0))     # (2, C)
        within, means = distributed.stack_over_ranks(local).unbind(1)          # (ranks, C) each
        between, mean = torch.var_mean(means, 0, correction=0)                 # (C,) each
        var = within.mean(0) + between                                         # (C,)
        if self.track_running_stats:
            n = len(means) * x.numel() // len(mean)
            self.running_mean.lerp_(mean.detach(), self.momentum)
            self.running_var.lerp_(var.detach() * (n / (n - 1)), self.momentum)
        scale = self.weight * (var + self.eps).rsqrt()
        shift = self.bias - mean * scale
        return torch.addcmul(shift[:, None, None], wide, scale[:, None, None]).to(x.dtype)


activate = partial(F.leaky_relu, negative_slope=0.1)


class Unit(nn.Module):
    """Pre-activation residual unit: BN, act, conv, BN, act, conv, plus the shortcut.

    first:  the very first unit; its shortcut sees the activated tensor too.
    quirk:  the released L2AC code's wiring of units that change the number of channels: the
            convolution sees the raw tensor, so the first BN would have no effect and is left out.
            The very first unit is an exception and keeps it. At width 1 that unit does not change
            the channels; its shortcut then sees the raw tensor, like that of any other unit.
    """

    def __init__(self, c_in, c_out, stride, momentum, first=False, quirk=False):
        super().__init__()
        self.first = first and not (quirk and c_in == c_out)
        self.bn1 = None if quirk and c_in != c_out and not first else Norm(c_in, momentum)
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.bn2 = Norm(c_out, momentum)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.shortcut = (nn.Identity() if c_in == c_out and stride == 1
                         else nn.Conv2d(c_in, c_out, 1, stride, bias=False))

    def forward(self, x):
        out = x if self.bn1 is None else activate(self.bn1(x))
        shortcut = self.shortcut(out if self.first else x)
        return shortcut + self.conv2(activate(self.bn2(self.conv1(out))))


class WideResNet(nn.Module):
    """WRN-d-w: a 3x3 stem, three stages of (d-4)/6 units with 16w, 32w, 64w channels."""

    def __init__(self, depth, width, num_classes, bn_momentum=0.001, quirk=False):
        super().__init__()
        units, widths = (depth - 4) // 6, [16, 16 * width, 32 * width, 64 * width]
        self.stem = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)
        stages = []
        for s in range(3):
            for u in range(units):
                c_in, stride = (widths[s], 1 if s == 0 else 2) if u == 0 else (widths[s + 1], 1)
                stages.append(Unit(c_in, widths[s + 1], stride, bn_momentum, s == u == 0, quirk))
        self.stages = nn.Sequential(*stages)
        self.bn = Norm(widths[3], bn_momentum)
        self.classifier = nn.Linear(widths[3], num_classes)
        self.apply(initialise)

    def features(self, x):
        x = activate(self.bn(self.stages(self.stem(x))))                       # (N, D, H/4, W/4)
        return x.mean((2, 3))                                                  # (N, D)

    def forward(self, x):
        return self.classifier(self.features(x))                               # (N, K)


class ResNet34(nn.Module):
    """torchvision's, its last layer taken off and its BatchNorm replaced by ours."""

    def __init__(self, num_classes, bn_momentum=0.001):
        super().__init__()
        self.network = resnet34(norm_layer=partial(Norm, momentum=bn_momentum))
        self.classifier = nn.Linear(self.network.fc.in_features, num_classes)
        self.network.fc = nn.Identity()
        initialise(self.classifier)

    def features(self, x):
        return self.network(x)                                                 # (N, 512)

    def forward(self, x):
        return self.classifier(self.features(x))                               # (N, K)


def initialise(module):
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    elif isinstance(module, nn.Linear):
        nn.init.xavier_normal_(module.weight)
        nn.init.zeros_(module.bias)


def build(name, num_classes, bn_momentum=0.001, quirk=False):
    if name == "resnet34":
        return ResNet34(num_classes, bn_momentum)
    match = re.fullmatch(r"wrn-(\d+)-(\d+)", name)
    depth, width = map(int, match.groups()) if match else (0, 0)
    if not (10 <= depth <= 1000 and (depth - 4) % 6 == 0 and 1 <= width <= 100):
        raise UserError(f"--model {name} is neither resnet34 nor wrn-d-w with d = 10, 16, 22, "
                        f"..., 1000 and w = 1 to 100; choose one of these")
    return WideResNet(depth, width, num_classes, bn_momentum, quirk)


def build_with_ema(cfg, num_classes, device, heads=None):
    """The network on the device, its EMA, and the function that makes features.

    heads: changes the classifiers of the new network, for methods that have others
    """
    torch.manual_seed(cfg.seed)               # initial weights; the loop draws nothing from here
    model = build(cfg.model, num_classes, cfg.bn_momentum, cfg.wrn_quirk)
    if heads:
        heads(model)
    for norm in norms(model):
        norm.shared = distributed.size() > 1
    model = model.to(device, memory_format=torch.channels_last)
    return model, EMA(model, cfg.ema), feature_pass(model, device, cfg.dtype, cfg.compile)


class EMA:
    """A copy of the model whose weights and BatchNorm statistics trail those of the live one."""

    # torch's AveragedModel would also do, but it reads a counter back from the device at each step.
    def __init__(self, model, decay):
        self.model = deepcopy(model).eval().requires_grad_(False)
        self.average = get_ema_multi_avg_fn(decay)
        self.trail, self.live = ([t for t in m.state_dict().values() if t.is_floating_point()]
                                 for m in (self.model, model))

    def update(self):
        self.average(self.trail, self.live, None)    # trail <- decay * trail + (1 - decay) * live


@torch.no_grad()
def decay_weights(model, cfg):
    """Decoupled weight decay, after the optimizer's step and after the EMA has seen it."""
    tensors = list(model.parameters()) + (running_statistics(model) if cfg.decay_bn else [])
    torch._foreach_mul_(tensors, 1 - cfg.lr * cfg.weight_decay)   # one launch for all


def running_statistics(model):
    """BatchNorm's running means and variances, the only buffers that training moves."""
    return [b for name, b in model.named_buffers() if "running_" in name]


def feature_pass(model, device, dtype="float32", compiled=False):
    """model.features as a function, with autocast and torch.compile where they are asked for.

    Compiled on CUDA, a pass is recorded as a CUDA graph and launched as one. Not with several
    ranks: their BatchNorm exchanges messages in between. A graph writes its result to the same
    memory each time, hence the copy.
    """
    network, graphs = model.features, compiled and device.type == "cuda" and distributed.size() == 1
    if compiled:
        network = torch.compile(network, dynamic=False, mode="reduce-overhead" if graphs else None)

    def features(x):
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
            z = network(x)
        # (N, D) float32 from here on: classifier, losses, omega step
        return z.to(torch.float32, copy=graphs)
    return features


@contextmanager
def frozen_bn_stats(model):
    """Train-mode passes (batch statistics) that leave the running statistics as they are.

    For pseudo-labels and the balanced batch. `eval()` would not do: it normalises by the running
    statistics.
    """
    frozen = norms(model)
    for norm in frozen:
        norm.track_running_stats = False
    try:
        yield
    finally:
        for norm in frozen:
            norm.track_running_stats = True


def norms(model):
    return [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
