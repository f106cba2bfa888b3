"""The training loops by hand, for the tests of the scripts."""
from copy import deepcopy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, train

import data
import models
import train_fixmatch
import train_mixmatch
from attractor import BiasAttractor, BiasVector
from bilevel import unrolled_gradient
from support import augment, config

# Decay, EMA and eta are large enough to be seen at once.
THREE = " --iters 3 --eval_every 1 --ema 0.5 --weight_decay 5 --eta 0.01"


def compare(replay_class, out, flags):
    """Three iterations of the script and ours: losses, then everything that has moved.

    Adam divides a gradient by its own size: where that is nearly 0, rounding decides, and in the
    first step that is all of omega's gradient. With a larger eps the numbers can be compared.
    """
    lr, betas, _, *rest = torch.optim.Adam.__init__.__defaults__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.Adam.__init__, "__defaults__", (lr, betas, 1e-3, *rest))
        flags, losses = flags + THREE + replay_class.flags, []
        state = train(out, flags, replay_class.script.main, lambda step, values: losses.append(
            {name: value.item() for name, value in values.items()}))
        replay = replay_class(flags)
        start = deepcopy(replay.state())
        for step, ours in enumerate(losses):
            assert ours == pytest.approx(replay.iterate(step), rel=1e-5), step
    assert len(losses) == 3
    for part, tensors in replay.state().items():
        for key, ours in state[part].items():
            if ours.is_floating_point():                      # BatchNorm also counts batches
                moved = (tensors[key] - start[part][key]).norm()
                assert (ours - tensors[key]).norm() <= 1e-4 * moved, (part, key)


class Replay:
    """L2AC again, slowly: a copy for every pass that must leave no trace, torch.optim as it comes,
    double backward for omega before the step, EMA and weight decay tensor by tensor.

    A subclass has batch(step): the inputs x of L, and the two parts of L as a function of l^.
    """

    def __init__(self, flags):
        self.cfg = cfg = config.read([*TINY.split(), *flags.split()], self.script.__name__[6:], "",
                                     self.script.flags, self.script.l2ac_flags)
        self.dataset = data.load("synthetic", image_size=8)
        labeled, unlabeled = data.split(self.dataset, cfg)
        self.streams = {"labeled": data.IndexStream(labeled, 6, cfg.seed, "labeled"),
                        "unlabeled": data.IndexStream(unlabeled, 6, cfg.seed, "unlabeled"),
                        "balanced": data.BalancedStream(labeled, self.dataset.labels, 6, cfg.seed)}
        self.normalise = augment.Normalise(self.dataset.mean, self.dataset.std)
        torch.manual_seed(cfg.seed)
        self.model = models.build("wrn-10-1", 10, 0.02)
        vector = cfg.attractor == "vector"
        self.attractor = BiasVector(10) if vector else BiasAttractor(10, norm=cfg.attractor_input)
        if cfg.attractor_start == "prior":
            logs = np.log(np.bincount(self.dataset.labels[labeled]))
            (self.attractor if vector else self.attractor.out).bias.data += torch.from_numpy(
                logs - logs.mean())
        self.ema = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.optimizer = torch.optim.Adam(self.model.parameters(), cfg.lr)
        self.omega_optimizer = torch.optim.Adam(self.attractor.parameters(), cfg.eta)

    def state(self):
        return {"model": self.model.state_dict(), "ema": self.ema,
                "attractor": self.attractor.state_dict()}

    def take(self, stream, step):
        return self.dataset.take(self.streams[stream].batch(step))

    def rng(self, purpose, step):
        return data.rng(self.cfg.seed, purpose, step)

    def weak(self, x, name, step):
        return augment.weak(x, self.rng(f"{name} view", step), self.normalise, self.cfg.no_flip)

    def guess(self, x):
        """Logits that pseudo-labels come from."""
        logits = deepcopy(self.model)(x).detach()
        adaptive = self.cfg.method == "l2ac" and self.cfg.pseudo_from == "adaptive"
        return logits + self.attractor(logits).detach() if adaptive else logits

    def iterate(self, step):
        """One iteration: its losses as on_step shows them."""
        cfg, (x, parts, lambda_u) = self.cfg, self.batch(step)

        def lower_loss(l_hat):
            loss_x, loss_u = parts(l_hat)
            return loss_x + lambda_u * loss_u
        z = self.model.features(x)
        l_hat = logits = self.model.classifier(z)
        if cfg.method == "l2ac":
            l_hat = logits + self.attractor(logits.detach()).detach()
        losses = dict(zip(("loss_x", "loss_u"), parts(l_hat), strict=True))
        before, optimizer = deepcopy((self.model, self.optimizer))
        self.optimizer.zero_grad()
        lower_loss(l_hat).backward()
        self.optimizer.step()
        if cfg.method == "l2ac" and step % cfg.omega_every == 0:
            x_b, y_b = self.take("balanced", step)
            z_b = deepcopy(self.model).features(self.weak(x_b, "balanced", step)).detach()
            losses["loss_bal"], gradient = unrolled_gradient(
                self.attractor, lower_loss, z, before.classifier, optimizer, z_b, y_b)
            for p, g in zip(self.attractor.parameters(), gradient, strict=True):
                p.grad = g
            self.omega_optimizer.step()
        for key, value in self.model.state_dict().items():
            self.ema[key] = cfg.ema * self.ema[key] + (1 - cfg.ema) * value
        for p in self.model.parameters():
            p.data *= 1 - cfg.lr * cfg.weight_decay
        return {name: value.item() for name, value in losses.items()}


class FixMatch(Replay):
    script, flags = train_fixmatch, " --tau 0.2 --n_strong 2"

    def batch(self, step):
        (x_l, y_l), (x_u, _) = self.take("labeled", step), self.take("unlabeled", step)
        views = self.cfg.n_strong
        confidence, y_u = self.guess(self.weak(x_u, "weak", step)).softmax(1).max(1)
        kept = (confidence >= self.cfg.tau).repeat_interleave(views)
        targets = y_u.repeat_interleave(views)
        x_s = augment.strong(x_u.repeat_interleave(views, 0), self.rng("strong view", step),
                             self.normalise, 3, 4.0, self.cfg.no_flip)

        def parts(l_hat):
            each = F.cross_entropy(l_hat[6:], targets, reduction="none")
            return F.cross_entropy(l_hat[:6], y_l), each[kept].sum() / (6 * views)
        return torch.cat([self.weak(x_l, "labeled", step), x_s]), parts, self.cfg.lambda_u


class MixMatch(Replay):
    """Mixup image by image, the losses written out."""
    script, flags = train_mixmatch, ""

    def batch(self, step):
        (x_l, y_l), (x_u, _) = self.take("labeled", step), self.take("unlabeled", step)
        x_l, x_w, x_v = (self.weak(x, name, step) for x, name in (
            (x_l, "labeled"), (x_u, "weak"), (x_u, "second weak")))
        squares = ((self.guess(x_w).softmax(1) + self.guess(x_v).softmax(1)) / 2) ** 2
        q_u = squares / squares.sum(1)[:, None]               # temperature 1/2
        g = self.rng("mixup", step)
        share = g.beta(0.75, 0.75)
        share, partner = max(share, 1 - share), g.permutation(18)
        x, q = torch.cat([x_l, x_w, x_v]), torch.cat([torch.eye(10)[y_l], q_u, q_u])
        x, q = (torch.stack([share * t[i] + (1 - share) * t[j] for i, j in enumerate(partner)])
                for t in (x, q))

        def parts(l_hat):
            return (-(q[:6] * l_hat[:6].log_softmax(1)).sum() / 6,
                    ((l_hat[6:].softmax(1) - q[6:]) ** 2).sum() / 10 / 12)
        return x, parts, self.cfg.lambda_u * step / 3
