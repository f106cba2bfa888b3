"""image -> features -> logits: wide residual networks, and ResNet-34 for large images.

Every network here has `features(x)` (N, D) and a linear `classifier`, because L2AC needs the two
apart: theta is what makes the features, phi = (W, b) is the classifier.

No attractor, no EMA, no losses.
"""
import re
from argparse import ArgumentTypeError
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn


class Norm(nn.BatchNorm2d):
    """BatchNorm with a fixed momentum; the step counter that nobody would read is left out."""

    def __init__(self, channels, momentum):
        super().__init__(channels, momentum=momentum)
        self.num_batches_tracked = None


def activate(x):
    return F.leaky_relu(x, 0.1)


class Unit(nn.Module):
    """Pre-activation residual unit: BN, act, conv, BN, act, conv, plus the shortcut.

    first:  the very first unit; its shortcut sees the activated tensor too.
    quirk:  the released L2AC code's first unit of stages 2 and 3: the activated tensor is computed
            and not used, the raw one goes into the convolution. Their first BN is dead: left out.
    """

    def __init__(self, c_in, c_out, stride, momentum, first=False, quirk=False):
        super().__init__()
        self.first = first
        self.bn1 = None if quirk else Norm(c_in, momentum)
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
                stages.append(Unit(c_in, widths[s + 1], stride, bn_momentum,
                                   first=s == u == 0, quirk=quirk and s > 0 and u == 0))
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
        from torchvision.models import resnet34
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


def network(name):
    """An argparse type: the name of a network that `build` can build."""
    if name == "resnet34":
        return name
    match = re.fullmatch(r"wrn-(\d+)-(\d+)", name)
    depth, width = map(int, match.groups()) if match else (0, 0)
    if not (10 <= depth <= 1000 and (depth - 4) % 6 == 0 and 1 <= width <= 100):
        raise ArgumentTypeError(f"{name} is neither resnet34 nor wrn-d-w with d = 10, 16, 22, ...")
    return name


def build(name, num_classes, bn_momentum=0.001, quirk=False):
    if name == "resnet34":
        return ResNet34(num_classes, bn_momentum)
    _, depth, width = network(name).split("-")
    return WideResNet(int(depth), int(width), num_classes, bn_momentum, quirk)


def share_statistics(model):
    """Norm -> SyncBatchNorm: several processes on CUDA normalise by the whole batch. Untested."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    for m in model.modules():
        if isinstance(m, nn.SyncBatchNorm):                    # it insists on a step counter
            m.register_buffer("num_batches_tracked", torch.tensor(0), persistent=False)
    return model


def running_statistics(model):
    """BatchNorm's running means and variances, the only buffers that training moves."""
    return [b for b in model.buffers() if b.is_floating_point()]


def feature_pass(model, device, dtype="float32", compiled=False):
    """model.features as a function, with autocast and torch.compile where they are asked for."""
    network = torch.compile(model.features, dynamic=False) if compiled else model.features

    def features(x):
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
            z = network(x)
        return z.float()            # (N, D) float32 from here on: classifier, losses, omega step
    return features


@contextmanager
def frozen_bn_stats(model):
    """Train-mode passes (batch statistics) that leave the running statistics as they are.

    For the passes that only look: pseudo-labels and the balanced batch. `eval()` would not do, it
    normalises by the running statistics.
    """
    norms = [m for m in model.modules() if isinstance(m, (nn.BatchNorm2d, nn.SyncBatchNorm))]
    for m in norms:
        m.track_running_stats = False
    try:
        yield
    finally:
        for m in norms:
            m.track_running_stats = True
