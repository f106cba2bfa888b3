"""The training loops by hand, for the tests of the scripts."""
from copy import deepcopy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import TINY

import data
import models
from attractor import BiasAttractor, BiasVector
from bilevel import reference_gradient, snapshot
from support import augment, config


class Replay:
    """The loop of L2AC again, slowly: a copy for every pass that must leave no trace, plain
    torch.optim, double backward for omega, EMA and weight decay tensor by tensor.

    A subclass has rows(step): the inputs x of L, and L as a function of l^ in bilevel.py's form.
    """

    def __init__(self, flags, base="fixmatch"):
        self.cfg = config.read([*TINY.split(), *flags.split()], base)
        self.dataset = data.load("synthetic", image_size=8)
        labeled, unlabeled = data.split(self.dataset, self.cfg)
        self.streams = {"labeled": data.IndexStream(labeled, 6, 0, "labeled"),
                        "unlabeled": data.IndexStream(unlabeled, 6, 0, "unlabeled"),
                        "balanced": data.BalancedStream(labeled, self.dataset.labels, 6, 0)}
        self.normalise = augment.Normalise(self.dataset.mean, self.dataset.std)
        torch.manual_seed(0)
        self.model = models.build("wrn-10-1", 10, 0.02)
        vector = self.cfg.attractor == "vector"
        self.attractor = BiasVector(10) if vector else BiasAttractor(10)
        if self.cfg.attractor_start == "prior":
            logs = np.log(np.bincount(self.dataset.labels[labeled]))
            (self.attractor if vector else self.attractor.out).bias.data += torch.from_numpy(
                logs - logs.mean())
        self.ema = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.joint = self.cfg.method in ("attractor", "single_level")
        self.optimizer = torch.optim.Adam(self.model.parameters(), self.cfg.lr)
        self.omega_optimizer = torch.optim.Adam(self.attractor.parameters(),
                                                self.cfg.lr if self.joint else self.cfg.eta)

    def take(self, stream, step):
        return self.dataset.take(self.streams[stream].batch(step))

    def weak(self, x, name, step):
        return augment.weak(x, data.rng(0, f"{name} view", step), self.normalise)

    def logits(self, x):
        """Those that pseudo-labels come from."""
        logits = deepcopy(self.model)(x).detach()
        adaptive = self.cfg.pseudo_from == "adaptive"
        return logits + self.attractor(logits).detach() if adaptive else logits

    def stepped_classifier(self, lower_loss, logits):
        """The classifier after the step that it makes on L by itself."""
        loss, = lower_loss(logits + self.attractor(logits.detach()))
        copy = deepcopy(self.model)
        optimizer = torch.optim.Adam(copy.parameters(), self.cfg.lr)
        optimizer.load_state_dict(deepcopy(self.optimizer.state_dict()))
        if self.cfg.inner == "sgd":
            optimizer = torch.optim.SGD(copy.parameters(), self.cfg.lr)
        gradient = torch.autograd.grad(loss, list(self.model.classifier.parameters()),
                                       retain_graph=True)
        for p, g in zip(copy.classifier.parameters(), gradient, strict=True):
            p.grad = g
        optimizer.step()
        return copy.classifier

    def upper(self, lower_loss, z, inner, classifier, x_b, y_b):
        """Omega's step; L_bal of the given classifier on the features of the network as it is."""
        z_b = deepcopy(self.model).features(x_b).detach()
        _, gradient = reference_gradient(self.attractor, lower_loss, z, inner, z_b, y_b)
        for p, g in zip(self.attractor.parameters(), gradient, strict=True):
            p.grad = g
        self.omega_optimizer.step()
        return F.cross_entropy(classifier(z_b), y_b).item()

    def iterate(self, step):
        """One iteration: its losses as on_step shows them."""
        cfg, (x, lower_loss), (x_b, y_b) = self.cfg, self.rows(step), self.take("balanced", step)
        x_b = self.weak(x_b, "balanced", step)
        z = self.model.features(x)
        logits = self.model.classifier(z)
        omega_turn = cfg.method == "l2ac" and step % cfg.omega_every == 0
        inner = snapshot(self.model.classifier.parameters(), self.optimizer, step + 1, cfg.inner)
        upper = lower_loss, z, inner, self.stepped_classifier(lower_loss, logits), x_b, y_b
        losses = {}
        if omega_turn and cfg.omega_order == "before":
            losses["loss_bal"] = self.upper(*upper)
        delta = self.attractor(logits.detach())
        if cfg.method == "none":
            delta = torch.zeros_like(delta)
        loss, = lower_loss(logits + delta.detach())
        if cfg.method == "single_level":                      # a copy of the running statistics
            statistics = {k: b.clone() for k, b in self.model.named_buffers()}
            loss_bal = F.cross_entropy(torch.func.functional_call(self.model, statistics, x_b), y_b)
            losses["loss_bal"], loss = loss_bal.item(), loss + loss_bal
        losses["loss"] = loss.item()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if self.joint:
            self.omega_optimizer.zero_grad()
            lower_loss(logits.detach() + delta)[0].backward()
            self.omega_optimizer.step()
        if omega_turn and cfg.omega_order == "after":
            losses["loss_bal"] = self.upper(*upper)
        self.average_and_decay()
        return losses

    def average_and_decay(self):
        for key, value in self.model.state_dict().items():
            self.ema[key] = self.cfg.ema * self.ema[key] + (1 - self.cfg.ema) * value
        for p in self.model.parameters():
            p.data *= 1 - self.cfg.lr * self.cfg.weight_decay

    def compare(self, state, losses):
        """Iterate as often as on_step was called; then all has to agree with the checkpoint."""
        for step, ours in enumerate(losses):
            theirs = self.iterate(step)
            assert {k: ours[k] for k in ours.keys() & {"loss", "loss_bal"}} == pytest.approx(
                theirs, rel=1e-4), step
        statistics = [k for k, _ in self.model.named_buffers()]
        phi = [k for k in self.ema if k.startswith("classifier")]
        theta = [k for k in self.ema if k not in (*statistics, *phi)]
        live, omega = self.model.state_dict(), self.attractor.state_dict()
        for name, keys, ours, theirs in (
                ("theta", theta, state["model"], live), ("phi", phi, state["model"], live),
                ("theta, EMA", theta, state["ema"], self.ema),
                ("phi, EMA", phi, state["ema"], self.ema),
                ("omega", list(omega), state["attractor"], omega)):
            a, b = (torch.cat([tensors[k].flatten() for k in keys]) for tensors in (ours, theirs))
            # Adam divides a gradient by its own size: where that is nearly 0, rounding decides.
            within = 0.2 * self.cfg.eta if name == "omega" and not self.joint else 2e-5
            assert ((a - b).abs() < within).float().mean() > 0.99, name
        for key in statistics:
            for ours, theirs in ((state["model"], live), (state["ema"], self.ema)):
                torch.testing.assert_close(ours[key], theirs[key], rtol=1e-3, atol=1e-5)


class FixMatchReplay(Replay):
    def rows(self, step):
        (x_l, y_l), (x_u, _) = self.take("labeled", step), self.take("unlabeled", step)
        views = self.cfg.n_strong
        confidence, y_u = self.logits(self.weak(x_u, "weak", step)).softmax(1).max(1)
        kept = (confidence >= self.cfg.tau).repeat_interleave(views)
        targets = y_u.repeat_interleave(views)
        x_s = augment.strong(x_u.repeat_interleave(views, 0), data.rng(0, "strong view", step),
                             self.normalise, 3, 4.0)

        def lower_loss(l_hat):
            rows = F.cross_entropy(l_hat[6:], targets, reduction="none")
            loss_u = rows[kept].sum() / (6 * views)
            return (F.cross_entropy(l_hat[:6], y_l) + self.cfg.lambda_u * loss_u,)
        return torch.cat([self.weak(x_l, "labeled", step), x_s]), lower_loss
