"""MixMatch + L2AC: the same sections in the same order as train_fixmatch.py; diff the two.

    python train_mixmatch.py                                   real digits, CPU, about a minute
    python train_mixmatch.py --method none                     the same with plain MixMatch
    python train_mixmatch.py --dataset cifar10 --gamma_l 100 --gamma_u 1       the paper's run

MixMatch: average the predictions for two weak views of an unlabeled image, sharpen the average into
a soft label, mix all images and labels pairwise (mixup), train on the mixtures: cross-entropy for
labeled images, squared error for the others. Every guess counts. L2AC is the same as on FixMatch.

    theta  model.features      phi  model.classifier      omega  attractor
    B labeled, U unlabeled, M balanced images; K classes; D features
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
from support.augment import Normalise, to_device, weak
from support.distributed import average_gradients
from support.run import Run, launch
from train_fixmatch import l2ac_flags


def flags(p):
    """The paper's numbers, on CIFAR-10; support/config.py has what other datasets change."""
    add = p.add_argument_group("MixMatch").add_argument
    add("--iters", type=int, default=250_000, help="updates of theta and phi")
    add("--batch_size", type=int, default=64, help="labeled and balanced images each, B and M")
    add("--batch_size_u", type=int, help="unlabeled images, U; None: as --batch_size")
    add("--lr", type=float, default=2e-3, help="learning rate of theta's and phi's Adam")
    add("--weight_decay", type=float, default=0.02, help="weights shrink by lr times this")
    add("--ema", type=float, default=0.999, help="decay of the averaged weights")
    add("--temperature", type=float, default=0.5, help="of the sharpening; 1 changes nothing")
    add("--mix_alpha", type=float, default=0.75, help="mixup coefficient: Beta(alpha, alpha)")
    add("--lambda_u", type=float, default=75.0,
        help="weight of the unlabeled loss at the end of the run")


def sharpen(p, temperature):
    """(U, K) probabilities -> the same with the large ones larger."""
    powers = p ** (1 / temperature)
    return powers / powers.sum(1, keepdim=True)


def draw_mix(rng, alpha, number, device):
    """One mixup coefficient for the whole batch, and a partner for each image (N,)."""
    share = rng.beta(alpha, alpha)
    partner = to_device(rng.permutation(number), device)
    return max(share, 1 - share), partner                     # at least half stays the image's own


def mixup(x, q, share, partner):
    """x (N, 3, H, W), q (N, K): each is `share` parts itself, the rest its partner (N,)."""
    return share * x + (1 - share) * x[partner], share * q + (1 - share) * q[partner]


def mixmatch_loss(logits, q, labeled, lambda_u):
    """L of Eq. 1 and its parts. logits, q (B+2U, K); the first `labeled` ones have labels.

    The squared error is a mean over images and classes: lambda_u = 75 is meant for that scale.
    """
    sizes = [labeled, len(q) - labeled]
    (logits_x, logits_u), (q_x, q_u) = logits.split(sizes), q.split(sizes)
    loss_x = F.cross_entropy(logits_x, q_x)
    loss_u = F.mse_loss(logits_u.softmax(1), q_u)
    return loss_x + lambda_u * loss_u, loss_x, loss_u


def main(argv=None, on_step=None):
    # -------------------------------------------------------------------------------------- data
    cfg = config.read(argv, "mixmatch", __doc__, flags, l2ac_flags)
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
    start = run.open(dataset, index_l, index_u, parts={
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
        x_v = view(x_u, rng("second weak view", step))        # (U, 3, H, W)

        # 2) Soft labels: by the live network, with each batch's own BatchNorm statistics. Mixup.
        with torch.no_grad(), models.frozen_bn_stats(model):
            logits_u = torch.stack([model.classifier(features(x)) for x in (x_w, x_v)])  # (2, U, K)
            if l2ac and cfg.pseudo_from == "adaptive":
                logits_u = logits_u + attractor(logits_u)     # Eq. 2
            q_u = sharpen(logits_u.softmax(2).mean(0), cfg.temperature)        # (U, K)
        x, q = torch.cat([x_l, x_w, x_v]), torch.cat([F.one_hot(y_l, K).float(), q_u, q_u])
        x, q = mixup(x, q, *draw_mix(rng("mixup", step), cfg.mix_alpha, len(q), device))
        lambda_u = cfg.lambda_u * step / cfg.iters            # linear ramp over the whole run
        lower_loss = partial(mixmatch_loss, q=q, labeled=len(y_l), lambda_u=lambda_u)

        # 3) Lower level: theta and phi make one step on L; omega is constant here.
        #    One pass: all images are mixtures of both kinds and should be normalised alike.
        z = features(x)                                       # (B+2U, D)
        logits = model.classifier(z)                          # (B+2U, K)
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
        y_u, mask = q_u.argmax(1), torch.ones(len(q_u), device=device)         # every guess counts
        run.after_step(step, y_u, mask, true_u, loss_x=loss_x, loss_u=loss_u, loss_bal=loss_bal)
    return run.finish()


if __name__ == "__main__":
    launch(main)
