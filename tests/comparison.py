"""What the tests of the comparison methods share: a method without its loop."""
from types import SimpleNamespace

import numpy as np
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
