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
"""
from functools import partial

import torch
import torch.nn.functional as F

import data
import evaluate
import models
from attractor import build_attractor
from bilevel import omega_gradient
from support import config
from support.augment import Normalise, strong, weak
from support.distributed import average_gradients
from support.run import Run, launch


def flags(p):
    """The paper's numbers, on CIFAR-10; support/config.py has what other datasets change."""
    add = p.add_argument_group("FixMatch").add_argument
    add("--iters", type=int, default=250_000, help="updates of theta and phi")
    add("--batch_size", type=int, default=64, help="labeled and balanced images each, B and M")
    add("--batch_size_u", type=int, help="unlabeled images, U; None: as --batch_size")
    add("--lr", type=float, default=2e-3, help="learning rate of theta's and phi's Adam")
    add("--weight_decay", type=float, default=0.02, help="weights shrink by lr times this")
    add("--ema", type=float, default=0.999, help="decay of the averaged weights")
    add("--tau", type=float, default=0.95, help="confidence from which a pseudo-label counts")
    add("--labels", choices=("hard", "soft"), default="hard", help="hard: pseudo-labels from tau "
        "on; soft: of every image, its probabilities (ours)")
    add("--lambda_u", type=float, default=1.0, help="weight of the unlabeled loss")
    add("--n_strong", type=int, default=2, help="strong views of each unlabeled image, S")
    add("--ra_n", type=int, default=3, help="RandAugment: operations per image")
    add("--ra_m", type=lambda m: m if m == "random" else float(m), default=4.0, metavar="M",
        help="RandAugment: strength, 0 to 30, or `random`: drawn for each operation")


def l2ac_flags(p):
    add = p.add_argument_group("L2AC").add_argument
    add("--method", choices=("l2ac", "none"), default="l2ac", help="none: without it; other "
        "methods, and ablations of L2AC, run with `python -m baselines.train --method NAME`")
    add("--eta", type=float, default=1e-4, help="learning rate of omega's Adam")
    add("--omega_every", type=int, default=1, help="iterations between omega steps")
    add("--hidden", type=int, default=256, help="width of the attractor")
    add("--attractor_input", choices=("softmax", "l2"), default="softmax", help="its scaling")
    add("--pseudo_from", choices=("linear", "adaptive"), default="linear",
        help="which classifier makes pseudo-labels")
    add("--attractor", choices=("mlp", "vector"), default="mlp",
        help="ours, for comparison: vector, K numbers that are the same for all images")
    add("--attractor_start", choices=("zero", "prior"), default="zero",
        help="ours: prior, the bias of its output layer starts at the centred log class counts")


def fixmatch_loss(logits, y_l, target_u, mask, lambda_u):
    """L of Eq. 1 and its parts. logits (B+SU, K): labeled images, then S views of each other one.

    target_u: labels (U,), or probabilities (U, K);  mask (U,): 1 where they count, else 0.
    The unlabeled mean is over all views: an image below the threshold counts as zero, so a batch
    with few confident images has a small loss.
    """
    labeled, unlabeled = logits.split([len(y_l), len(logits) - len(y_l)])      # (B, K), (SU, K)
    views = len(unlabeled) // len(mask)                                        # S
    loss_x = F.cross_entropy(labeled, y_l)
    target = target_u.repeat_interleave(views, dim=0)                          # (SU,) or (SU, K)
    each = F.cross_entropy(unlabeled, target, reduction="none")                # (SU,)
    loss_u = (each.view(-1, views) * mask[:, None]).mean()
    return loss_x + lambda_u * loss_u, loss_x, loss_u


def main(argv=None, on_step=None):
    # -------------------------------------------------------------------------------------- data
    cfg = config.read(argv, "fixmatch", __doc__, flags, l2ac_flags)
    run = Run(cfg, on_step)
    device = run.device
    dataset = data.from_flags(cfg).to(device)
    index_l, index_u = data.split(dataset, cfg)
    K = dataset.num_classes
    stream_l = data.IndexStream(index_l, cfg.batch_size, cfg.seed, "labeled")
    stream_u = data.IndexStream(index_u, cfg.batch_size_u, cfg.seed, "unlabeled")
    stream_b = data.BalancedStream(index_l, dataset.labels, cfg.batch_size, cfg.seed)
    rng = partial(data.view_rng, cfg.seed)
    normalise = Normalise(dataset.mean, dataset.std, device)
    view = partial(weak, normalise=normalise, no_flip=cfg.no_flip)

    # ------------------------------------------------------------------------- model, optimizers
    torch.manual_seed(cfg.seed)               # initial weights; the loop draws nothing from here
    model = models.from_flags(cfg, K)
    model = model.to(device, memory_format=torch.channels_last)
    features = models.feature_pass(model, device, cfg.dtype, cfg.compile)
    ema = models.EMA(model, cfg.ema)
    counts = dataset.count(index_l) if cfg.attractor_start == "prior" else None
    attractor = build_attractor(K, cfg.attractor, cfg.hidden, cfg.attractor_input, counts)
    attractor = attractor.to(device)
    optimizer = torch.optim.Adam(model.parameters(), cfg.lr, fused=True)
    # Eq. 6 is plain descent, but its gradient carries the factor lr and comes out tiny: times
    # eta = 1e-4, omega would hardly move. Adam's steps have the size eta whatever the gradient's.
    omega_optimizer = torch.optim.Adam(attractor.parameters(), cfg.eta, fused=True)
    l2ac = cfg.method == "l2ac"

    # -------------------------------------------------------------------------------------- loop
    start = run.open(dataset, index_l, index_u, resizable=True, parts={
        "model": model, "ema": ema.model, "attractor": attractor, "optimizer": optimizer,
        "omega_optimizer": omega_optimizer},
        evaluate=partial(evaluate.on_test_set, ema.model, dataset, normalise,   # the EMA predicts
                         attractor if l2ac else None))
    for step in range(start, cfg.iters):
        loss_bal = None

        # 1) Batches and views: pure functions of (seed, step).
        x_l, y_l = dataset.take(stream_l.batch(step))         # (B, 3, H, W), (B,)
        x_u, true_u = dataset.take(stream_u.batch(step))      # (U, 3, H, W), (U,) for the log only
        x_l, x_w = view(x_l, rng("labeled view", step)), view(x_u, rng("weak view", step))
        x_s = strong(x_u.repeat_interleave(cfg.n_strong, dim=0), rng("strong view", step),
                     normalise, cfg.ra_n, cfg.ra_m, cfg.no_flip)               # (SU, 3, H, W)

        # 2) Pseudo-labels: by the live network, with the batch's own BatchNorm statistics.
        with torch.no_grad(), models.frozen_bn_stats(model):
            logits_u = model.classifier(features(x_w))        # (U, K)
            if l2ac and cfg.pseudo_from == "adaptive":
                logits_u = logits_u + attractor(logits_u)     # Eq. 2
            p = logits_u.softmax(1)                           # (U, K)
            confidence, y_u = p.max(1)                        # (U,), (U,)
            mask = (confidence >= cfg.tau).float()            # (U,)
        target_u, mask = (y_u, mask) if cfg.labels == "hard" else (p, torch.ones_like(mask))
        lower_loss = partial(fixmatch_loss, y_l=y_l, target_u=target_u, mask=mask,
                             lambda_u=cfg.lambda_u)

        # 3) Lower level: theta and phi make one step on L; omega is constant here.
        z = features(torch.cat([x_l, x_s]))                   # (B+SU, D)
        logits = model.classifier(z)                          # (B+SU, K)
        l_hat = logits + attractor(logits).detach() if l2ac else logits        # Eq. 2
        loss, loss_x, loss_u = lower_loss(l_hat)              # Eq. 3
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model)                              # over processes, if there are several
        optimizer.step()                                      # Eq. 4

        # 4) Upper level: how would L_bal have changed, had omega been different in that step?
        if l2ac and step % cfg.omega_every == 0:
            x_b, y_b = dataset.take(stream_b.batch(step))     # (M, 3, H, W), (M,)
            with torch.no_grad(), models.frozen_bn_stats(model):
                z_b = features(view(x_b, rng("balanced view", step)))          # (M, D)
            loss_bal = omega_gradient(attractor, lower_loss, logits, z, model.classifier,
                                      optimizer, z_b, y_b)    # Eq. 5
            average_gradients(attractor)
            omega_optimizer.step()                            # Eq. 6

        # 5) EMA first, then weight decay of the live weights: the order of the protocol.
        ema.update()
        models.decay_weights(model, cfg.lr * cfg.weight_decay)

        # 6) Log, evaluation, checkpoint, stop request.
        run.after_step(step, y_u, mask, true_u, loss_x=loss_x, loss_u=loss_u, loss_bal=loss_bal)
    return run.finish()


if __name__ == "__main__":
    launch(main)
