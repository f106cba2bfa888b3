"""The training loops by hand, for the tests of the tutorials and of the comparison methods."""
from argparse import Namespace
from copy import deepcopy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import train

import data
import models
from attractor import BiasAttractor, BiasVector
from baselines.train import main
from bilevel import unrolled_gradient
from support import augment


def compare(replay_class, out, flags, script=main):
    """Three iterations of the script and ours: losses, then everything that has moved.

    Decay and EMA are large enough to be seen at once. Adam divides a gradient by its own size:
    where that is nearly 0, rounding decides, and in the first step that is all of omega's gradient.
    With a larger eps the numbers can be compared.
    """
    losses, (lr, betas, _, *rest) = [], torch.optim.Adam.__init__.__defaults__

    def on_step(step, values):
        losses.append({name: value.item() for name, value in values.items()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.Adam.__init__, "__defaults__", (lr, betas, 1e-3, *rest))
        state = train(out, f"--iters 3 --eval_every 1 --ema 0.5 --weight_decay 5 {flags}", script,
                      on_step)
        replay = replay_class(Namespace(**state["config"]))
        start = deepcopy(replay.state())
        for step, ours in enumerate(losses):
            assert ours == pytest.approx(replay.iterate(step), rel=1e-5), step
    assert len(losses) == 3
    for part, tensors in replay.state().items():
        for key, ours in state[part].items():
            if ours.is_floating_point():                      # BatchNorm also counts batches
                moved = (tensors[key] - start[part][key]).norm()
                assert (ours - tensors[key]).norm() <= 1e-4 * moved, (part, key)
    return state, replay


class Replay:
    """A base method, L2AC or one of its ablations again, slowly: a copy for every pass that must
    leave no trace, torch.optim as it comes, double backward for omega before the step, EMA and
    weight decay tensor by tensor.

    A subclass has batch(step): the inputs x of L, and a function l^ -> (L, loss_x, loss_u).
    """

    def __init__(self, cfg):
        self.cfg, self.joint = cfg, cfg.method in ("attractor", "single_level")
        self.dataset = data.load("synthetic", image_size=8)
        labeled, unlabeled = data.split(self.dataset, cfg)
        self.streams = {"labeled": data.IndexStream(labeled, 6, cfg.seed, "labeled"),
                        "unlabeled": data.IndexStream(unlabeled, 6, cfg.seed, "unlabeled"),
                        "balanced": data.BalancedStream(labeled, self.dataset.labels, 6, cfg.seed)}
        self.normalise = augment.Normalise(self.dataset.mean, self.dataset.std)
        counts = np.bincount(self.dataset.labels[labeled])
        log_pi = torch.from_numpy(np.log(counts / counts.sum()))
        self.log_pi = log_pi.float()
        torch.manual_seed(cfg.seed)
        self.model = models.build("wrn-10-1", 10, 0.02)
        if cfg.freeze:
            self.model.eval().requires_grad_(False).classifier.requires_grad_(True)
        self.add_heads()
        self.ema = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.optimizer = torch.optim.Adam(self.model.parameters(), cfg.lr)
        if "attractor" in cfg:
            vector = cfg.attractor == "vector"
            f = BiasVector(10) if vector else BiasAttractor(10, norm=cfg.attractor_input)
            if cfg.attractor_start == "prior":
                (f if vector else f.out).bias.data += log_pi - log_pi.mean()
            self.attractor = f
            eta = cfg.lr if self.joint else cfg.eta
            self.omega_optimizer = torch.optim.Adam(f.parameters(), eta)

    def state(self):
        state = {"model": self.model.state_dict(), "ema": self.ema}
        if self.joint:
            state["method"] = torch.nn.ModuleDict({"attractor": self.attractor}).state_dict()
        elif "attractor" in self.cfg:
            state["attractor"] = self.attractor.state_dict()
        return state

    def add_heads(self):
        """Those of the network beside its classifier."""

    def logits(self, z):
        return self.model.classifier(z)

    def adapt(self, logits):
        """l^ of all rows."""
        if self.joint:
            return logits + self.attractor(logits.detach())
        return logits + self.attractor(logits).detach() if self.cfg.method == "l2ac" else logits

    def take(self, stream, step):
        return self.dataset.take(self.streams[stream].batch(step))

    def rng(self, purpose, step):
        return data.rng(self.cfg.seed, purpose, step)

    def weak(self, x, name, step):
        return augment.weak(x, self.rng(f"{name} view", step), self.normalise, self.cfg.no_flip)

    def balanced(self, step):
        x, y = self.take("balanced", step)
        return self.weak(x, "balanced", step), y

    @torch.no_grad()
    def guess(self, x):
        """Logits that pseudo-labels come from, by the batch's own statistics."""
        logits = self.logits(deepcopy(self.model).features(x))
        adaptive = self.cfg.method == "l2ac" and self.cfg.pseudo_from == "adaptive"
        return logits + self.attractor(logits) if adaptive else logits

    def iterate(self, step):
        """One iteration: its losses as on_step shows them."""
        cfg, (x, lower) = self.cfg, self.batch(step)
        z = self.model.features(x)
        loss, loss_x, loss_u = lower(self.adapt(self.logits(z)))
        losses = {"loss_x": loss_x, "loss_u": loss_u}
        if cfg.method == "single_level":
            x_b, y_b = self.balanced(step)
            copy = {k: b.clone() for k, b in self.model.named_buffers()}
            losses["loss_bal"] = F.cross_entropy(
                torch.func.functional_call(self.model, copy, x_b), y_b)
            loss = loss + losses["loss_bal"]
        before, optimizer = deepcopy((self.model, self.optimizer))
        self.optimizer.zero_grad()
        if self.joint:
            self.omega_optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if self.joint:
            self.omega_optimizer.step()
        elif cfg.method == "l2ac" and step % cfg.omega_every == 0:
            x_b, y_b = self.balanced(step)
            z_b = deepcopy(self.model).features(x_b).detach()
            losses["loss_bal"], gradient = unrolled_gradient(
                self.attractor, lower, z, before.classifier, optimizer, z_b, y_b)
            for p, g in zip(self.attractor.parameters(), gradient, strict=True):
                p.grad = g
            self.omega_optimizer.step()
        for key, value in self.model.state_dict().items():
            self.ema[key] = cfg.ema * self.ema[key] + (1 - cfg.ema) * value
        for p in (p for p in self.model.parameters() if p.requires_grad):
            p.data *= 1 - cfg.lr * cfg.weight_decay
        return {name: value.item() for name, value in losses.items()}


class FixMatch(Replay):
    """With two strong views."""

    def batch(self, step):
        (x_l, y_l), (x_u, _) = self.take("labeled", step), self.take("unlabeled", step)
        x_s = augment.strong(x_u.repeat_interleave(2, 0), self.rng("strong view", step),
                             self.normalise, 3, 4.0, self.cfg.no_flip)
        return (torch.cat([self.weak(x_l, "labeled", step), x_s]),
                self.lower(step, y_l, self.weak(x_u, "weak", step)))

    def lower(self, step, y_l, x_w):
        """Guess labels; then the function of l^."""
        p = self.guess(x_w).softmax(1)
        confidence, y_u = p.max(1)

        def lower(l_hat):
            loss_x = F.cross_entropy(l_hat[:6], y_l)
            loss_u = self.masked(l_hat[6:], y_u, confidence >= self.cfg.tau)
            if self.cfg.labels == "soft":
                loss_u = self.soft(l_hat[6:], p, torch.ones(6))
            return loss_x + self.cfg.lambda_u * loss_u, loss_x, loss_u
        return lower

    def masked(self, strong, y, kept):
        """Mean over all strong views of H(y, strong), where images that are not kept count as 0."""
        each = F.cross_entropy(strong, y.repeat_interleave(2), reduction="none")
        return each[kept.repeat_interleave(2)].sum() / 12

    def soft(self, strong, q, weights):
        """Mean over all strong views of weight H(q, strong)."""
        return -sum(weights[r // 2] * (q[r // 2] * strong[r].log_softmax(0)).sum()
                    for r in range(12)) / 12


class MixMatch(Replay):
    """Mixup image by image, the losses written out."""

    def batch(self, step):
        (x_l, y_l), (x_u, _) = self.take("labeled", step), self.take("unlabeled", step)
        x_l, x_w, x_v = (self.weak(x, name, step) for x, name in (
            (x_l, "labeled"), (x_u, "weak"), (x_u, "second weak")))
        cfg, p = self.cfg, (self.guess(x_w).softmax(1) + self.guess(x_v).softmax(1)) / 2
        powers = p ** (1 / cfg.temperature)
        q_u = powers / powers.sum(1)[:, None]
        g = self.rng("mixup", step)
        share = g.beta(cfg.mix_alpha, cfg.mix_alpha)
        share, partner = max(share, 1 - share), g.permutation(18)
        x, q = torch.cat([x_l, x_w, x_v]), torch.cat([torch.eye(10)[y_l], q_u, q_u])
        x, q = (torch.stack([share * t[i] + (1 - share) * t[j] for i, j in enumerate(partner)])
                for t in (x, q))

        def lower(l_hat):
            loss_x = -(q[:6] * l_hat[:6].log_softmax(1)).sum() / 6
            loss_u = ((l_hat[6:].softmax(1) - q[6:]) ** 2).sum() / 10 / 12
            return loss_x + cfg.lambda_u * step / 3 * loss_u, loss_x, loss_u
        return x, lower
