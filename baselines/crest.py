"""CReST and CReST+: train to the end, adopt pseudo-labels of rare classes, start again.

A biased classifier has low recall on rare classes, but high precision. A run consists of several
generations. After each one the labeled set becomes the original one plus, of the n_c unlabeled
images predicted as class c, the mu_c n_c most confident ones; the network starts from scratch.

    mu_c = (N_(K-1-r) / N_(0))^alpha      N_(0) >= ... >= N_(K-1) sorted; class c has N_c = N_(r)

CReST+ also aligns the pseudo-labels' distribution (progressive distribution alignment):

    p' ~ p pi / p~        pi ~ N^t        t = 1 .. 0.5 over the generations
                          p~: mean of the last 128 batches' predictions

Both steps assume that the unlabeled set is distributed like the labeled one.
"""
import sys

import numpy as np
import torch

import data
import models
from baselines import Method, matched, probabilities
from support.augment import to_device


def shares(counts, alpha=1 / 3):
    """mu (K,) from labeled counts (K,): 1 for the rarest class, least for the most frequent one."""
    descending = np.argsort(-counts, kind="stable")                # classes, most frequent first
    mu = np.empty(len(counts))
    mu[descending] = (np.sort(counts) / counts.max()) ** alpha     # place r gets N_(K-1-r)
    return mu


def select(predicted, confidence, mu):
    """Labels (N,) of the adopted images, -1 for the others. predicted, confidence (N,), mu (K,)."""
    labels = np.full(len(predicted), -1)
    for k, share in enumerate(mu):
        members = np.flatnonzero(predicted == k)
        ordered = members[np.argsort(-confidence[members], kind="stable")]     # surest first
        labels[ordered[:int(share * len(members))]] = k
    return labels


def alignment_target(counts, generation, generations, lowest=0.5):
    """pi (K,) ~ N^t, t from 1 in the first generation to `lowest` in the last."""
    t = 1 - (1 - lowest) * generation / max(1, generations - 1)
    return counts ** t / (counts ** t).sum()


class CReST(Method):
    @staticmethod
    def flags(p):
        p.add_argument("--crest_generations", type=int, default=5, help="equal parts of the run")

    @staticmethod
    def check(cfg):
        if cfg.gamma_u is not None and not matched(cfg):
            print(f"WARNING: --method {cfg.method} assumes that labeled and unlabeled images are "
                  f"distributed alike, and the flags say that they are not", file=sys.stderr)

    def __init__(self, ctx):
        super().__init__(ctx)
        parts, self.labels, self.begun = ctx.cfg.crest_generations, ctx.dataset.labels, 0
        self.milestones = tuple(ctx.cfg.iters * g // parts for g in range(1, parts))
        # label under which each image of the dataset was adopted, -1: it was not
        self.register_buffer("adopted", torch.full((len(self.labels),), -1))

    def generation(self, step):
        return sum(step >= start for start in self.milestones)

    def begin(self, generation):
        """The labeled stream of a generation, and the labels it goes with."""
        self.begun, ctx, adopted = generation, self.ctx, self.adopted.cpu().numpy()
        self.labels = np.where(adopted >= 0, adopted, ctx.dataset.labels)
        index = np.concatenate([ctx.index_l, ctx.index_u[adopted[ctx.index_u] >= 0]])
        self.stream = data.IndexStream(index, ctx.cfg.batch_size, ctx.cfg.seed,
                                       f"labeled {generation}")

    def labeled(self, step):
        if self.generation(step) > self.begun:           # also after --resume
            self.begin(self.generation(step))
        index = self.stream.batch(step)
        return index, self.labels[index]

    def schedule(self, step):
        bounds, g = (0, *self.milestones, self.ctx.cfg.iters), self.generation(step)
        return step - bounds[g], bounds[g + 1] - bounds[g]

    def after_epoch(self, done):
        if done not in self.milestones:
            return
        ctx = self.ctx
        # --pool union: images that have a label are not candidates, or they would use up the shares
        new = ctx.index_u[~np.isin(ctx.index_u, ctx.index_l)]                  # (N,)
        p = probabilities(ctx.ema.model, ctx, new)                             # (N, K)
        confidence, predicted = (t.numpy() for t in p.max(1))                  # (N,) each
        labels = select(predicted, confidence, shares(ctx.counts.numpy()))     # (N,)
        self.adopted[to_device(new, self.adopted)] = to_device(labels, self.adopted)
        self.restart(self.generation(done))

    def restart(self, generation):
        """New weights in the network and its EMA, a new state of the optimizer."""
        ctx, cfg = self.ctx, self.ctx.cfg
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(cfg.seed + 1000003 * generation)
            fresh = models.from_flags(cfg, len(ctx.counts))
        for network in (ctx.model, ctx.ema.model):
            network.load_state_dict(fresh.state_dict())
        ctx.optimizer.state.clear()

    @staticmethod
    def reported(history, cfg):
        """Evaluations of the last generation only."""
        start = cfg.iters * (cfg.crest_generations - 1) // cfg.crest_generations
        return [row for row in history if row["iter"] > start]


class CReSTPlus(CReST):
    def __init__(self, ctx):
        super().__init__(ctx)
        K = ctx.dataset.num_classes
        self.register_buffer("recent", torch.full((128, K), 1 / K))            # means of batches

    def refine(self, p, batch):
        target = alignment_target(self.ctx.counts, self.generation(batch.step),
                                  self.ctx.cfg.crest_generations)
        target = to_device(target.to(p.dtype).numpy(), p)                      # (K,)
        aligned = p * (target + 1e-6) / (self.recent.mean(0) + 1e-6)           # (U, K)
        self.recent[batch.step % 128] = p.mean(0)              # unaligned, for the next steps
        return aligned / aligned.sum(1, keepdim=True)

    def restart(self, generation):
        super().restart(generation)
        self.recent.fill_(1 / self.recent.shape[1])
