"""image -> features -> logits: wide residual networks, those of torchvision, and their EMA.

Every network here has `features(x)` (N, D) and a linear `classifier`, because L2AC needs the two
apart: theta is what makes the features, phi = (W, b) is the classifier.
"""
import re
from contextlib import contextmanager
from copy import deepcopy
from difflib import get_close_matches
from functools import partial

import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torchvision.ops import StochasticDepth

from support import UserError, weights

activate = partial(F.leaky_relu, negative_slope=0.1)


class Unit(nn.Module):
    """Pre-activation residual unit: BN, act, conv, BN, act, conv, plus the shortcut.

    first: the very first unit; its shortcut sees the activated tensor too.
    """

    def __init__(self, c_in, c_out, stride, momentum, first=False):
        super().__init__()
        self.first = first
        self.bn1 = nn.BatchNorm2d(c_in, momentum=momentum)
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(c_out, momentum=momentum)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.shortcut = (nn.Identity() if c_in == c_out and stride == 1
                         else nn.Conv2d(c_in, c_out, 1, stride, bias=False))

    def forward(self, x):
        out = activate(self.bn1(x))
        shortcut = self.shortcut(out if self.first else x)
        return shortcut + self.conv2(activate(self.bn2(self.conv1(out))))


class WideResNet(nn.Module):
    """WRN-d-w: a 3x3 stem, three stages of (d-4)/6 units with 16w, 32w, 64w channels."""

    def __init__(self, depth, width, num_classes, bn_momentum=0.001):
        super().__init__()
        units, widths = (depth - 4) // 6, [16, 16 * width, 32 * width, 64 * width]
        self.stem = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)
        stages = []
        for s in range(3):
            for u in range(units):
                c_in, stride = (widths[s], 1 if s == 0 else 2) if u == 0 else (widths[s + 1], 1)
                stages.append(Unit(c_in, widths[s + 1], stride, bn_momentum, first=s == u == 0))
        self.stages = nn.Sequential(*stages)
        self.bn = nn.BatchNorm2d(widths[3], momentum=bn_momentum)
        self.classifier = nn.Linear(widths[3], num_classes)
        self.apply(initialise)

    def features(self, x):
        x = activate(self.bn(self.stages(self.stem(x))))                       # (N, D, H/4, W/4)
        return x.mean((2, 3))                                                  # (N, D)

    def forward(self, x):
        return self.classifier(self.features(x))                               # (N, K)


class Torchvision(nn.Module):
    """A classifier of torchvision. Its last linear layer becomes phi, what is before it theta.

    Dropout and stochastic depth are off: every draw of a run is a function of its step.
    """

    def __init__(self, name, num_classes, bn_momentum=0.001, image_size=None):
        super().__init__()
        options = {"image_size": image_size} if image_size and name.startswith("vit_") else {}
        self.network = torchvision.models.get_model(name, weights=None, **options)
        self.network.aux_logits = False                       # Inception's and GoogLeNet's
        linear = [key for key, m in self.network.named_modules() if isinstance(m, nn.Linear)]
        if not linear:
            raise UserError(f"--model {name} has no linear classifier, which L2AC needs; choose "
                            f"another one, e.g. resnet18")
        self.head = linear[-1]                                # its name, for support/weights.py
        width = self.network.get_submodule(self.head).in_features
        self.network.set_submodule(self.head, nn.Identity())
        self.classifier = nn.Linear(width, num_classes)
        initialise(self.classifier)
        for module in self.modules():
            if isinstance(module, (nn.Dropout, StochasticDepth)):
                module.p = 0.0
        for norm in norms(self):
            norm.momentum = bn_momentum

    def features(self, x):
        return self.network(x)                                                 # (N, D)

    def forward(self, x):
        return self.classifier(self.features(x))                               # (N, K)


def initialise(module):
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    elif isinstance(module, nn.Linear):
        nn.init.xavier_normal_(module.weight)
        nn.init.zeros_(module.bias)


def build(name, num_classes, bn_momentum=0.001, image_size=None):
    """image_size: of a vision transformer, which is made for one size"""
    match = re.fullmatch(r"wrn-(\d+)-(\d+)", name)
    depth, width = map(int, match.groups()) if match else (0, 0)
    if depth >= 10 and (depth - 4) % 6 == 0 and width > 0:
        return WideResNet(depth, width, num_classes, bn_momentum)
    known = torchvision.models.list_models(module=torchvision.models)          # classifiers
    if name not in known:
        near = ", ".join(get_close_matches(name, ["wrn-28-2", *known], 5, 0.4)) or "resnet18"
        raise UserError(f"--model {name} is neither wrn-d-w with d = 10, 16, 22, ... and w = 1, 2, "
                        f"... nor a classifier of torchvision; near it are {near}")
    return Torchvision(name, num_classes, bn_momentum, image_size)


def from_flags(cfg, num_classes):
    """The network of a run. --freeze fixes theta, BatchNorm's statistics included."""
    model = build(cfg.model, num_classes, cfg.bn_momentum, cfg.image_size)
    if cfg.weights:
        weights.load(model, cfg.weights, cfg.model)
    if cfg.freeze:
        model.eval().requires_grad_(False)
        model.classifier.requires_grad_()
    return model


class EMA:
    """A copy of the model whose weights and BatchNorm statistics trail those of the live one."""

    # torch's AveragedModel would also do, but it reads a counter back from the device at each step.
    def __init__(self, model, decay):
        self.model = deepcopy(model).eval().requires_grad_(False)
        if not model.training:                                # --freeze: these never change
            self.model.features = weights.remembered(self.model.features)
        self.average = get_ema_multi_avg_fn(decay)
        self.trail, self.live = ([t for t in m.state_dict().values() if t.is_floating_point()]
                                 for m in (self.model, model))

    def update(self):
        self.average(self.trail, self.live, None)    # trail <- decay * trail + (1 - decay) * live


@torch.no_grad()
def decay_weights(model, rate):
    """Decoupled weight decay, after the optimizer's step and after the EMA has seen it."""
    for p in model.parameters():
        if p.requires_grad:                                   # not what --freeze fixes
            p.mul_(1 - rate)


def feature_pass(model, device, dtype="float32", compiled=False):
    """model.features as a function, with autocast and torch.compile where they are asked for.

    Compiled on CUDA, a pass is recorded as a CUDA graph and launched as one. A graph writes its
    result to the same memory each time, hence the copy.
    """
    network, graphs = model.features, compiled and device.type == "cuda"
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
    """Train-mode passes (batch statistics) that leave the running statistics as they are, for
    pseudo-labels and the balanced batch. `eval()` would normalise by the running statistics."""
    for norm in norms(model):
        norm.track_running_stats = False
    try:
        yield
    finally:
        for norm in norms(model):
            norm.track_running_stats = True


def norms(model):
    return [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
