"""FixMatch + L2AC, from the data to an evaluated model.

    python train_fixmatch.py                                   real digits, CPU, about a minute
    python train_fixmatch.py --method none                     the same with plain FixMatch
    python train_fixmatch.py --dataset cifar10 --scale mini    real images, one CPU core, minutes
    python train_fixmatch.py --dataset cifar10 --gamma_l 100 --gamma_u 1       the paper's run

FixMatch: label an unlabeled image by its weak view where the network is sure (p >= tau), and
train its strong views on that label. With few and skewed labels the network is surest of the
common classes, so it feeds on its own bias. L2AC puts the bias attractor (attractor.py) behind
the classifier for training and tunes it (bilevel.py) so that the linear classifier alone does
well on a class-balanced batch.

    theta  model.features      phi  model.classifier      omega  attractor
    B labeled, U unlabeled, M balanced images; S strong views; K classes; D features
    (with several ranks B, U, M are the sizes of the local batch: support/distributed.py)
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
from support.augment import Normalise, strong, weak
from support.distributed import mean_over_ranks
from support.run import Run, launch


def fixmatch_loss(logits, y_l, y_u, mask, lambda_u):
    """L of Eq. 1 and its parts. logits (B+SU, K): labeled rows, then S views of each image.

    The unlabeled mean is over all rows: an image below the threshold counts as zero, so a batch
    with few confident images has a small loss.
    """
    labeled, unlabeled = logits.split([len(y_l), len(logits) - len(y_l)])      # (B, K), (SU, K)
    views = len(unlabeled) // len(y_u)                                         # S
    loss_x = F.cross_entropy(labeled, y_l)
    rows = F.cross_entropy(unlabeled, y_u.repeat_interleave(views), reduction="none")    # (SU,)
    loss_u = (rows.view(-1, views) * mask[:, None]).mean()
    return loss_x + lambda_u * loss_u, loss_x, loss_u


def main(argv=None, on_step=None):
    # -------------------------------------------------------------------------------------- data
    cfg = config.read(argv, "fixmatch", __doc__)
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
    # resizable: no schedule depends on --iters, so --resume may change it
    start = run.open(dataset, index_l, index_u, resizable=True, parts={
        "model": model, "ema": ema.model, "attractor": attractor, "optimizer": optimizer,
        "omega_optimizer": omega_optimizer})
    for step in range(start, cfg.iters):
        omega_turn = cfg.method == "l2ac" and step % cfg.omega_every == 0
        loss_bal = omega_norm = None

        # 1) Batches and views: pure functions of (seed, step).
        x_l, y_l = dataset.take(stream_l.batch(step))         # (B, 3, H, W), (B,)
        x_u, true_u = dataset.take(stream_u.batch(step))      # (U, 3, H, W), (U,) for the log only
        x_l, x_w = view(x_l, rng("labeled view", step)), view(x_u, rng("weak view", step))
        x_s = strong(x_u.repeat_interleave(cfg.n_strong, dim=0), rng("strong view", step),
                     normalise, cfg.ra_n, cfg.ra_m, shard, cfg.no_flip)      # (SU, 3, H, W)
        if omega_turn or cfg.method == "single_level":
            x_b, y_b = dataset.take(stream_b.batch(step))     # (M, 3, H, W), (M,)
            x_b = view(x_b, rng("balanced view", step))

        # 2) Pseudo-labels: by the live network, with the batch's own BatchNorm statistics.
        with torch.no_grad(), models.frozen_bn_stats(model):
            logits_u = model.classifier(features(x_w))        # (U, K)
            if adaptive_labels:
                logits_u = logits_u + attractor(logits_u)     # Eq. 2
            confidence, y_u = logits_u.softmax(1).max(1)      # (U,), (U,)
            mask = (confidence >= cfg.tau).float()            # (U,)

        # 3) One forward pass over all rows of L; both levels use it.
        z = features(torch.cat([x_l, x_s]))                   # (B+SU, D)
        logits = model.classifier(z)                          # (B+SU, K)
        lower_loss = partial(fixmatch_loss, y_l=y_l, y_u=y_u, mask=mask,       # L as a function
                             lambda_u=cfg.lambda_u)                            # of l^, Eq. 3

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
        if run.after_step(step, judge, y_u, mask, true_u, loss=loss, loss_x=loss_x, loss_u=loss_u,
                          loss_bal=loss_bal, omega_grad=omega_norm):
            return 130                                        # exit code of an interrupted program
    run.finish(evaluate.mean_of_last(run.history), run.history)


if __name__ == "__main__":
    launch(main)
