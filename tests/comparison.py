"""What the tests of the comparison methods share: a method without its loop, and the loop of
FixMatch by hand."""
from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import TINY
from torch import nn

import data
import models
from baselines import Batch, Context
from baselines.train import configure
from support import augment


def rows(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def softmax(x):
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


def cross_entropy(logits, q):
    """-sum q log softmax of each row, in numpy; q (N, K), or labels (N,)."""
    q = np.eye(logits.shape[1])[q] if q.ndim == 1 else q
    return -(q * np.log(softmax(logits))).sum(1)


COUNTS = rows(70, 20, 10)
PI = np.array([0.7, 0.2, 0.1])


class Heads(nn.Module):
    """A network whose input are its features, and the logits of two heads, three each."""
    classifier, auxiliary = staticmethod(lambda z: z[..., :3]), staticmethod(lambda z: z[..., 3:])
    features = forward = staticmethod(lambda x: x)


def build(flags, counts=COUNTS, **parts):
    """The method of these flags on 100 images, of which the first ten have labels."""
    cfg, kind = configure([*TINY.split(), *flags.split()])
    dataset = SimpleNamespace(num_classes=len(counts), labels=np.zeros(100, int))
    ctx = dict(cfg=cfg, device="cpu", dataset=dataset, index_l=np.arange(10), stream=None,
               index_u=np.arange(100), counts=counts, model=Heads(), features=None,
               ema=SimpleNamespace(model=Heads()))
    return kind(SimpleNamespace(**ctx | parts)).double()


def at_work(flags):
    """The method of these flags with a context of real parts, after three steps of its network."""
    cfg, kind = configure([*TINY.split(), *flags.split()])
    dataset = data.load("synthetic", image_size=8)
    index_l, index_u = data.split(dataset, cfg)
    torch.manual_seed(cfg.seed)
    model = models.build("wrn-10-1", 10, cfg.bn_momentum)
    kind.heads(model)
    ema, optimizer = models.EMA(model, cfg.ema), torch.optim.Adam(model.parameters(), cfg.lr)
    method = kind(Context(
        cfg, torch.device("cpu"), dataset, index_l, index_u,
        data.IndexStream(index_l, 6, cfg.seed, "labeled"), dataset.count(index_l).double(),
        augment.Normalise(dataset.mean, dataset.std), model, ema, model.features, optimizer))
    for step in range(3):
        one_step(method, model, optimizer, step)
        ema.update()
    return method


def one_step(method, model, optimizer, step):
    """A step on the labeled images, which also shows their predictions to the method."""
    x, y = method.ctx.dataset.take(*method.labeled(step))
    x = method.ctx.normalise(x)
    z = model.features(x)
    logits = model.classifier(z)
    method.refine(logits.detach().softmax(1),
                  Batch(step, x, y, method.ctx.index_u[:6], z_u=z.detach()))
    optimizer.zero_grad()
    F.cross_entropy(logits, y).backward()
    optimizer.step()


def close_but_for_rounding(ours, theirs, keys):
    """Adam divides a gradient by its own size: where that is nearly 0, rounding decides."""
    a, b = (torch.cat([state[k].flatten() for k in keys]) for state in (ours, theirs))
    return ((a - b).abs() < 2e-5).float().mean() > 0.99


class Replay:
    """FixMatch by hand, with two strong views: a copy of the network for every pass that must leave
    no trace, torch.optim.Adam as it comes, EMA and weight decay tensor by tensor.

    A subclass has loss(step, x_l, y_l, x_w, x_s): L, and the parts of it that the loop logs.
    """
    def __init__(self, flags):
        self.cfg, _ = configure([*TINY.split(), *flags.split()])
        self.dataset = data.load("synthetic", image_size=8)
        labeled, unlabeled = data.split(self.dataset, self.cfg)
        self.streams = (data.IndexStream(labeled, 6, 0, "labeled"),
                        data.IndexStream(unlabeled, 6, 0, "unlabeled"),
                        data.BalancedStream(labeled, self.dataset.labels, 6, 0))
        self.normalise = augment.Normalise(self.dataset.mean, self.dataset.std)
        counts = np.bincount(self.dataset.labels[labeled])
        self.log_pi = torch.from_numpy(np.log(counts / counts.sum())).float()
        torch.manual_seed(0)
        self.model = models.build("wrn-10-1", 10, 0.02)
        beside = self.prepare()
        self.ema = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.optimizer = torch.optim.Adam([*self.model.parameters(), *beside], self.cfg.lr)

    def prepare(self):
        """Add heads to the network; returns parameters that are trained beside it."""
        return ()

    def weak(self, x, name, step):
        return augment.weak(x, data.rng(0, f"{name} view", step), self.normalise)

    def guess(self, x, head="classifier"):
        """Logits by the batch's own statistics, without a trace."""
        with torch.no_grad():
            model = deepcopy(self.model)
            return getattr(model, head)(model.features(x))

    def masked(self, strong, y, kept):
        """Mean over all strong views of H(y, strong), where images that are not kept count as 0."""
        each = [F.cross_entropy(strong[2 * u + v][None], y[u][None])
                for u in range(6) for v in (0, 1) if kept[u]]
        return sum(each) / 12

    def soft(self, strong, q, weights):
        """Mean over all strong views of weight H(q, strong)."""
        return -sum(weights[r // 2] * (q[r // 2] * strong[r].log_softmax(0)).sum()
                    for r in range(12)) / 12

    def iterate(self, step):
        (x_l, y_l), (x_u, _), (x_b, self.y_b) = (self.dataset.take(s.batch(step))
                                                 for s in self.streams)
        self.x_b = self.weak(x_b, "balanced", step)
        x_s = augment.strong(x_u.repeat_interleave(2, 0), data.rng(0, "strong view", step),
                             self.normalise, 3, 4.0)
        loss, parts = self.loss(step, self.weak(x_l, "labeled", step), y_l,
                                self.weak(x_u, "weak", step), x_s)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        for key, value in self.model.state_dict().items():
            self.ema[key] = self.cfg.ema * self.ema[key] + (1 - self.cfg.ema) * value
        for p in self.model.parameters():
            p.data *= 1 - self.cfg.lr * self.cfg.weight_decay
        return {name: torch.as_tensor(value).item() for name, value in parts.items()}

    def compare(self, state, losses):
        """Iterate as often as on_step was called; then all has to agree with the checkpoint."""
        for step, ours in enumerate(losses):
            assert ours == pytest.approx(self.iterate(step), rel=1e-4), step
        weights = [name for name, _ in self.model.named_parameters()]
        statistics = [name for name in self.ema if "running" in name]
        for part, theirs in (("model", self.model.state_dict()), ("ema", self.ema)):
            assert close_but_for_rounding(state[part], theirs, weights), part
            for key in statistics:
                torch.testing.assert_close(state[part][key], theirs[key], rtol=1e-3, atol=1e-5)
