"""MixMatch + L2AC: the same sections in the same order as train_fixmatch.py; diff the two.

    python train_mixmatch.py                                   real digits, CPU, about a minute
    python train_mixmatch.py --method none                     the same with plain MixMatch
    python train_mixmatch.py --dataset cifar10 --gamma_l 100 --gamma_u 1       the paper's run

MixMatch: average the predictions for two weak views of an unlabeled image, sharpen the average into
a soft label, mix all images and labels pairwise (mixup), train on the mixtures: cross-entropy for
labeled rows, squared error for the others. Every guess counts. L2AC is the same as on FixMatch.

    theta  model.features      phi  model.classifier      omega  attractor
    B labeled, U unlabeled, M balanced images; K classes; D features (sizes of the local batch)
"""
from functools import partial

from support import config  # isort: skip (before torch, see support/__init__.py)

import torch
import torch.nn.functional as F

import data
import evaluate
import models
from attractor import build_attractor
from bilevel import omega_step, snapshot
from support.augment import Normalise, to_device, weak
from support.distributed import mean_over_ranks
from support.run import Run, launch


def sharpen(p, temperature):
    """(U, K) probabilities -> the same with the large ones larger."""
    powers = p ** (1 / temperature)
    return powers / powers.sum(1, keepdim=True)


def draw_mix(cfg, step, rows, device):
    """One mixup coefficient for the whole batch, and a partner for each row (N,)."""
    g = data.rng(cfg.seed, "mixup", step)
    share = g.beta(cfg.mix_alpha, cfg.mix_alpha)
    partner = to_device(g.permutation(rows), device)
    return max(share, 1 - share), partner                     # at least half stays the row's own


def mixup(x, q, share, partner):
    """x (N, 3, H, W), q (N, K): each row is `share` parts itself, the rest its partner (N,)."""
    return share * x + (1 - share) * x[partner], share * q + (1 - share) * q[partner]


def mixmatch_loss(logits, q, labeled, lambda_u):
    """L of Eq. 1 and its parts. logits, q (B+2U, K); the first `labeled` rows have labels.

    The squared error is a mean over rows and classes: lambda_u = 75 is meant for that scale.
    """
    sizes = [labeled, len(q) - labeled]
    (logits_x, logits_u), (q_x, q_u) = logits.split(sizes), q.split(sizes)
    loss_x = F.cross_entropy(logits_x, q_x)
    loss_u = F.mse_loss(logits_u.softmax(1), q_u)
    return loss_x + lambda_u * loss_u, loss_x, loss_u


def main(argv=None, on_step=None):
    # -------------------------------------------------------------------------------------- data
    cfg = config.read(argv, "mixmatch", __doc__)
    run = Run(cfg, on_step)
    device, shard = run.device, (run.rank, run.size)
    dataset, index_l, index_u = data.load_split(cfg, device)
    normalise = Normalise(dataset.mean, dataset.std, device)
    stream_l = data.IndexStream(index_l, cfg.batch_size, cfg.seed, "labeled", shard)
    stream_u = data.IndexStream(index_u, cfg.batch_size_u, cfg.seed, "unlabeled", shard)
    stream_b = data.BalancedStream(index_l, dataset.labels, cfg.batch_size, cfg.seed, shard)
    dataset.read_ahead(stream_l, stream_u, stream_b)
    rng = partial(data.rng, cfg.seed)
    view = partial(weak, normalise=normalise, shard=shard, no_flip=cfg.no_flip)

    # ------------------------------------------------------------------------- model, optimizers
    model, ema, features = models.build_with_ema(cfg, dataset.num_classes, device)
    attractor = build_attractor(cfg, dataset.count(index_l)).to(device)
    adaptive_labels = config.adaptive_labels(cfg)
    joint = cfg.method in ("attractor", "single_level")       # ablations: omega trained on L itself
    optimizer = torch.optim.Adam([*model.parameters(), *(attractor.parameters() if joint else ())],
                                 cfg.lr, fused=True)
    # Eq. 6 is plain descent, but its gradient carries the factor lr and comes out tiny: times
    # eta = 1e-4, omega would hardly move. Adam's steps have the size eta whatever the gradient's.
    omega_optimizer = torch.optim.Adam(attractor.parameters(), cfg.eta, fused=True)

    def upper_level(lower_loss, logits, z, inner, x_b, y_b):
        """Evaluate the step of phi that omega causes, on a balanced batch, and update omega."""
        with torch.no_grad(), models.frozen_bn_stats(model):
            z_b = features(x_b)                               # (M, D)
        return omega_step(attractor, omega_optimizer, lower_loss, logits, z, inner, z_b, y_b,
                          mean_over_ranks)

    judge = partial(evaluate.on_test_set, ema.model, dataset, normalise,       # the EMA predicts
                    attractor if cfg.method != "none" else None)

    # -------------------------------------------------------------------------------------- loop
    start = run.open(dataset, index_l, index_u, parts={
        "model": model, "ema": ema.model, "attractor": attractor, "optimizer": optimizer,
        "omega_optimizer": omega_optimizer})
    for step in range(start, cfg.iters):
        omega_turn = cfg.method == "l2ac" and step % cfg.omega_every == 0
        loss_bal = omega_norm = None

        # 1) Batches and views: pure functions of (seed, step).
        x_l, y_l = dataset.take(stream_l.batch(step))         # (B, 3, H, W), (B,)
        x_u, true_u = dataset.take(stream_u.batch(step))      # (U, 3, H, W), (U,) for the log only
        x_l, x_w = view(x_l, rng("labeled view", step)), view(x_u, rng("weak view", step))
        x_v = view(x_u, rng("second weak view", step))        # (U, 3, H, W)
        if omega_turn or cfg.method == "single_level":
            x_b, y_b = dataset.take(stream_b.batch(step))     # (M, 3, H, W), (M,)
            x_b = view(x_b, rng("balanced view", step))

        # 2) Soft labels: by the live network, with each batch's own BatchNorm statistics.
        with torch.no_grad(), models.frozen_bn_stats(model):
            guesses = [model.classifier(features(x)) for x in (x_w, x_v)]      # (U, K) each
            if adaptive_labels:
                guesses = [logits_u + attractor(logits_u) for logits_u in guesses]     # Eq. 2
            q_u = sharpen(sum(g.softmax(1) for g in guesses) / 2, cfg.temperature)       # (U, K)

        # 3) Mixup, then one forward pass over all rows of L; both levels use it. One pass, because
        #    all rows are mixtures of both kinds and should be normalised alike.
        y = F.one_hot(y_l, dataset.num_classes).float()       # (B, K)
        x, q = run.join_ranks(x_l, x_w, x_v), run.join_ranks(y, q_u, q_u)      # rows of all ranks
        x, q = mixup(x, q, *draw_mix(cfg, step, len(q), device))
        x = run.local_rows(x, len(x_l), len(x_w), len(x_v))   # (B+2U, 3, H, W)
        q = run.local_rows(q, len(x_l), len(x_w), len(x_v))   # (B+2U, K)
        z = features(x)                                       # (B+2U, D)
        logits = model.classifier(z)                          # (B+2U, K)
        lambda_u = cfg.lambda_u * step / cfg.iters            # linear ramp over the whole run
        lower_loss = partial(mixmatch_loss, q=q, labeled=len(y_l),             # L as a function
                             lambda_u=lambda_u)                                # of l^, Eq. 3

        if omega_turn:
            inner = snapshot(model.classifier.parameters(), optimizer, step + 1, cfg.inner)
            if cfg.omega_order == "before":                   # the released code's order
                loss_bal, omega_norm = upper_level(lower_loss, logits, z, inner, x_b, y_b)

        # 4) Lower level: theta and phi make one step on L.
        if cfg.method == "none":
            l_hat = logits
        elif joint:
            l_hat = logits + attractor(logits.detach())       # Eq. 2
        else:
            l_hat = logits + attractor(logits.detach()).detach()   # Eq. 2; omega is constant here
        loss, loss_x, loss_u = lower_loss(l_hat)
        if cfg.method == "single_level":                      # Eq. 5 added to Eq. 3, weight 1
            with models.frozen_bn_stats(model):
                loss_bal = F.cross_entropy(model.classifier(features(x_b)), y_b)
            loss = loss + loss_bal
        run.backward(loss, model, attractor)                  # gradients, averaged over ranks
        optimizer.step()                                      # Eq. 4

        # 5) Upper level, the paper's order: omega is judged at (theta', phi'(omega)).
        if omega_turn and cfg.omega_order == "after":
            loss_bal, omega_norm = upper_level(lower_loss, logits, z, inner, x_b, y_b)

        # 6) EMA first, then weight decay of the live weights: the order of the protocol.
        ema.update()
        models.decay_weights(model, cfg)

        # 7) Log, evaluation, checkpoint, stop request.
        y_u, mask = q_u.argmax(1), torch.ones_like(q_u[:, 0])  # (U,) each: every guess counts
        if run.after_step(step, judge, y_u, mask, true_u, loss=loss, loss_x=loss_x, loss_u=loss_u,
                          loss_bal=loss_bal, omega_grad=omega_norm):
            return 130                                        # exit code of an interrupted program
    run.finish(evaluate.mean_of_last(run.history), run.history)


if __name__ == "__main__":
    launch(main)
