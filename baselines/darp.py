"""DARP: change all pseudo-labels as little as possible so that they have given class counts.

    min_R  sum_m  KL(R_m || A_m) / H_m      rows of R sum to 1, column k to t_k

A are the stored predictions of all unlabeled images, trimmed (`trim`); H_m is the entropy of row m,
so confident rows change least. The optimum is R[m, k] ~ A[m, k] exp(-nu_k H_m), with one number
nu_k per class. Newton's method solves for all classes at once.

The target counts t follow the labeled proportions, or (--darp_estimate) an estimate from the
confusion matrix of a classifier that was trained on part of the labels.

Labels are refined from 0.4 of the run on, a share, so short runs refine too: from iteration 100,000
of 250,000. The official code's "epoch > 200" of 500 means iteration 100,500.
"""
import numpy as np
import torch
import torch.nn.functional as F

import data
import models
from baselines import LIKE_CIFAR10, Method, probabilities
from baselines.supervised import CRT
from support.augment import to_device, weak

WARM, DELTA, TINY = 0.4, 2.0, 1e-6


def trim(Q, t, delta=DELTA):
    """Q (N, K), t (K,) -> A (N, K). Each column keeps its delta t_k largest entries, scaled to sum
    to t_k; then rows are normalised."""
    order = Q.argsort(dim=0, descending=True, stable=True)                     # (N, K)
    first = torch.arange(len(Q), device=Q.device)[:, None] < (delta * t).long()
    kept = Q.double() * torch.zeros_like(first).scatter(0, order, first)
    A = kept * (t + TINY) / (kept.sum(0) + TINY) + TINY
    return A / A.sum(1, keepdim=True)


def column_roots(A, H, a, t, nu):
    """nu (K,) with sum_m A a exp(-nu H) = t, by Newton: the sum is convex and decreasing in nu.

    A (N, K), H (N, 1), a (N, 1), t (K,), nu (K,) the initial guess
    """
    for _ in range(30):
        mass = A * a * torch.exp(-nu * H)                                      # (N, K)
        # Far to the right of the root the slope vanishes, so steps are limited to 5.
        step = ((mass.sum(0) - t) / (mass * H).sum(0).clamp_min(1e-12)).clamp(-5, 5)
        nu = nu + step
        if step.abs().max() < 1e-3:
            break
    return nu


def refined(Q, t, outer=10, delta=DELTA):
    """R (N, K) from the stored predictions Q (N, K) and the target counts t (K,), in float64."""
    A = trim(Q, t, delta)
    H = -(A * (A + TINY).log()).sum(1, keepdim=True)                           # (N, 1)
    nu, guess = torch.ones_like(t), torch.zeros_like(t)      # where the official code starts
    for _ in range(outer):                       # alternate between rows and columns
        a = 1 / (A * torch.exp(-nu * H)).sum(1, keepdim=True)                  # (N, 1)
        nu = guess = column_roots(A, H, a, t, guess)
    R = A * torch.exp(-nu * H)                                                 # (N, K)
    return R / R.sum(1, keepdim=True)


def invert_confusion(p_held, y_held, p_u):
    """M^ = C^-1 b (K,) and whether it is usable. C[i, j]: mean p_i over held-out images of class j;
    b: sum of p over the unlabeled images. p_held (H, K), y_held (H,), p_u (N, K), float64."""
    C = torch.stack([p_held[y_held == j].mean(0) for j in range(p_held.shape[1])], dim=1)  # (K, K)
    M = torch.linalg.solve(C, p_u.sum(0))                                      # (K,)
    return M, bool((M >= 0).all() and torch.linalg.cond(C) < 100)


def hold_out_labeled(labels, seed, most=10):
    """(rows to train on, held-out rows) of labels (N,): of each class up to `most` are held out, at
    most half of it but at least one."""
    held = [data.rng(seed, "DARP hold-out", k).permutation(np.flatnonzero(labels == k))
            [:max(1, min(most, (labels == k).sum() // 2))] for k in np.unique(labels)]
    held = np.concatenate(held)
    return np.setdiff1d(np.arange(len(labels)), held), held


@torch.enable_grad()                             # it is called from refine, under no_grad
def estimate_counts(ctx, iters, times=10):
    """M^ (K,), by a plain classifier that is trained on the labeled images that are not held out,
    for 16 % of the iterations of the run (in the reference 40,000 of 250,000). About ten estimates
    are made on the way; the result is the mean of the usable ones."""
    cfg, labels = ctx.cfg, ctx.dataset.labels[ctx.index_l]
    rows, held = hold_out_labeled(labels, cfg.seed)
    stream = data.IndexStream(ctx.index_l[rows], 128, cfg.seed, "DARP estimate")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(cfg.seed)
        model = models.build(cfg.model, ctx.dataset.num_classes, 0.1, cfg.image_size)
    model = model.to(ctx.device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4)
    steps, estimates = max(times, round(0.16 * iters)), []
    new = np.setdiff1d(ctx.index_u, ctx.index_l)             # --pool union: the others have labels
    print(f"\nDARP: {steps:,} iterations of a classifier that estimates class counts", flush=True)
    for step in range(steps):
        if step in (int(0.8 * steps), int(0.9 * steps)):
            optimizer.param_groups[0]["lr"] /= 10
        x, y = ctx.dataset.take(stream.batch(step))
        x = weak(x, data.rng(cfg.seed, "DARP view", step), ctx.normalise, no_flip=cfg.no_flip)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % (steps // times) == 0:
            model.eval()
            p_held, p_u = (probabilities(model, ctx, i).double() for i in (ctx.index_l[held], new))
            estimates.append(invert_confusion(p_held, torch.from_numpy(labels[held]), p_u))
            model.train()
    usable = [M for M, good in estimates if good]
    M = torch.stack(usable).mean(0) if usable else estimates[-1][0].clamp_min(1)
    print(f"\nDARP: estimated counts {M.round().int().tolist()} ({len(usable)} of "
          f"{len(estimates)} estimates are usable)")
    return M * len(new) / M.sum()


class DARP(Method):
    @staticmethod
    def flags(p):
        p.add_argument("--darp_estimate", action="store_true", help="estimate the unlabeled "
                       "distribution instead of taking the labeled one")

    def __init__(self, ctx):
        super().__init__(ctx)
        K, N = ctx.dataset.num_classes, len(ctx.index_u)
        self.rows = np.full(len(ctx.dataset.labels), -1)     # place of each image in Q and R
        self.rows[ctx.index_u] = np.arange(N)
        self.start = round(WARM * self.schedule(0)[1])
        # iterations between refinements, alternations in one
        self.period, self.outer = (10, 10) if ctx.cfg.dataset in LIKE_CIFAR10 else (100, 20)
        self.register_buffer("Q", torch.full((N, K), 1 / K))       # latest raw predictions
        self.register_buffer("R", torch.full((N, K), 1 / K))       # latest refined ones
        self.register_buffer("t", torch.zeros(K, dtype=torch.float64))

    def target_counts(self):
        """t (K,)."""
        ctx = self.ctx
        if not ctx.cfg.darp_estimate:
            return ctx.counts * len(ctx.index_u) / ctx.counts.sum()
        known = ctx.counts if ctx.cfg.pool == "union" else torch.zeros_like(ctx.counts)
        return estimate_counts(ctx, self.schedule(0)[1]) + known

    def refine(self, p, batch):
        rows = to_device(self.rows[batch.index_u], p)                          # (U,)
        self.Q[rows] = p
        since = batch.step - self.start
        if since < 0:
            return p
        if since == 0:
            self.t.copy_(self.target_counts())
        if since % self.period == 0:
            self.R.copy_(refined(self.Q, self.t, self.outer))
        return self.R[rows]                      # (U, K)


class DARPThenCRT(DARP, CRT):
    """FixMatch with DARP's pseudo-labels for --iters iterations, then cRT's second stage from its
    EMA. (The official one mixes its images and leaves BatchNorm in train mode.)"""

    @staticmethod
    def flags(p):
        DARP.flags(p)
        CRT.flags(p)

    def schedule(self, step):
        """The first stage's: DARP's shares are of its length."""
        return step, self.ctx.cfg.iters - self.ctx.cfg.crt_iters

    def base(self, step):
        base = super().base(step)
        return base if step < self.first_stage else "supervised"
