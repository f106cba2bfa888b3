"""The comparison methods under the protocol of train_*.py: one loop, --base and --method.

    python -m baselines.train --base supervised --method ldam --dataset cifar10
    python -m baselines.train --base fixmatch --method none    = train_fixmatch.py --method none
    python -m baselines.train --base B --method M --help       the flags of B and M

The loop calls the hooks of `Method` (baselines/__init__.py) in the order base, labeled, refine,
adapt, supervised_loss, unlabeled_loss, extra_loss; predict at an evaluation, after_epoch where an
epoch ends. A method overrides those it needs. L2AC itself is in train_*.py; read those first.
"""
import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

import data
import evaluate
import models
import train_fixmatch
import train_mixmatch
from baselines import Batch, Context
from baselines.methods import METHODS
from support import UserError, config
from support.augment import Normalise, strong, weak
from support.run import Run, launch
from train_fixmatch import fixmatch_loss
from train_mixmatch import draw_mix, mixmatch_loss, mixup, sharpen


def configure(argv=None, own=None):
    """(cfg, class of the method). The flags depend on base and method: these two are read first.

    own: a Method of your own, which --method then names by default
    """
    methods = {base: table | ({own.__name__.lower(): own} if own else {})
               for base, table in METHODS.items()}

    def choice(p):
        p.prog = f"python -m {importable(own.__module__) if own else 'baselines.train'}"
        add = p.add_argument_group("comparison").add_argument
        add("--base", choices=tuple(methods), default="fixmatch", help="what the method builds on")
        add("--method", help="; ".join(f"{base}: {', '.join(methods[base])}" for base in methods))

    p = config.parser(__doc__)
    choice(p)
    words = sys.argv[1:] if argv is None else argv
    chosen, _ = p.parse_known_args([word for word in words if word not in ("-h", "--help")])
    plain = "vanilla" if chosen.base == "supervised" else "none"
    name = chosen.method or (own.__name__.lower() if own else plain)
    if name not in methods[chosen.base]:
        raise UserError(f"--method {name} is not one of --base {chosen.base}; choose from "
                        f"{', '.join(methods[chosen.base])} (l2ac is train_*.py)")
    method = methods[chosen.base][name]
    script = train_mixmatch if chosen.base == "mixmatch" else train_fixmatch
    cfg = config.read(argv, chosen.base, __doc__, choice, script.flags, method.flags,
                      lambda p: p.set_defaults(base=chosen.base, method=name))
    method.check(cfg)
    cfg.method_class = f"{importable(method.__module__)}:{method.__qualname__}"    # for evaluate.py
    return cfg, method


def importable(module):
    """The name under which a module can be imported, also if it is the one that is being run."""
    main = sys.modules["__main__"]
    running = main.__spec__.name if main.__spec__ else Path(getattr(main, "__file__", "")).stem
    return running if module == "__main__" else module


def unlabeled_part(loss, *args):
    """The unlabeled part of a loss of train_*.py as a function of the logits of unlabeled rows."""
    return lambda logits: loss(logits, *args)[2]


def main(argv=None, on_step=None, own=None):
    # -------------------------------------------------------------------------------------- data
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError("the comparison methods run in one process; start them without torchrun")
    cfg, method_class = configure(argv, own)
    run = Run(cfg, on_step)
    device = run.device
    dataset = data.from_flags(cfg).to(device)
    index_l, index_u = data.split(dataset, cfg)
    K = dataset.num_classes
    stream_l = data.IndexStream(index_l, cfg.batch_size, cfg.seed, "labeled")
    stream_u = data.IndexStream(index_u, cfg.batch_size_u, cfg.seed, "unlabeled")
    rng = partial(data.rng, cfg.seed)
    normalise = Normalise(dataset.mean, dataset.std, device)
    view = partial(weak, normalise=normalise, no_flip=cfg.no_flip)

    # -------------------------------------------------------------------------- model, optimizer
    torch.manual_seed(cfg.seed)               # initial weights; the loop draws nothing from here
    model = models.from_flags(cfg, K)
    method_class.heads(model)
    model = model.to(device, memory_format=torch.channels_last)
    features = models.feature_pass(model, device, cfg.dtype, cfg.compile)
    ema = models.EMA(model, cfg.ema)
    ctx = Context(cfg, device, dataset, index_l, index_u, stream_l,
                  dataset.count(index_l).double(), normalise, model, ema, features)
    method = method_class(ctx).to(device)
    ctx.optimizer = optimizer = torch.optim.Adam([*model.parameters(), *method.parameters()],
                                                 cfg.lr, fused=True)

    # -------------------------------------------------------------------------------------- loop
    start = run.open(
        dataset, index_l, index_u,
        parts={"model": model, "ema": ema.model, "optimizer": optimizer, "method": method},
        evaluate=partial(evaluate.on_test_set, partial(method.predict, ema.model), dataset,
                         normalise, method.attractor),
        milestones=method.milestones, after_epoch=method.after_epoch, reported=method.reported)
    for step in range(start, cfg.iters):
        base, (now, end) = method.base(step), method.schedule(step)

        # 1) Batches and weak views: pure functions of (seed, step).
        x_l, y_l = dataset.take(*method.labeled(step))        # (B, 3, H, W), (B,)
        batch = Batch(step, view(x_l, rng("labeled view", step)), y_l)
        if base != "supervised":
            batch.index_u = stream_u.batch(step)
            batch.x_u, true_u = dataset.take(batch.index_u)   # (U, 3, H, W), (U,) for the log only
            x_w = view(batch.x_u, rng("weak view", step))

        # 2) The base method: logits (N, K) of all its rows, target of the labeled ones, the loss
        #    `plain` of the others.
        #    Passes that only guess labels leave BatchNorm's running statistics alone.
        if base == "supervised":
            batch.z, target = features(batch.x_l), y_l
            logits = model.classifier(batch.z)                # (B, K)
            batch.y_u = batch.mask = true_u = torch.zeros(0, device=device)    # no unlabeled images
            plain, lambda_u = torch.sum, 0                    # no unlabeled rows

        elif base == "pseudolabel":                           # Lee 2013: its own view's argmax
            batch.z, target = features(torch.cat([batch.x_l, x_w])), y_l       # (B+U, D)
            logits = model.classifier(batch.z)                # (B+U, K)
            batch.z_u = batch.z[len(y_l):].detach()           # (U, D)
            batch.p = method.refine(logits[len(y_l):].detach().softmax(1), batch)      # (U, K)
            lambda_u = cfg.lambda_u * min(1, now / (0.4 * end))

        elif base == "fixmatch":
            x_s = strong(batch.x_u.repeat_interleave(cfg.n_strong, dim=0), rng("strong view", step),
                         normalise, cfg.ra_n, cfg.ra_m, cfg.no_flip)           # (SU, 3, H, W)
            with torch.no_grad(), models.frozen_bn_stats(model):
                batch.z_u = features(x_w)                     # (U, D)
                batch.p = method.refine(model.classifier(batch.z_u).softmax(1), batch)     # (U, K)
            batch.z, target = features(torch.cat([batch.x_l, x_s])), y_l       # (B+SU, D)
            logits, lambda_u = model.classifier(batch.z), cfg.lambda_u         # (B+SU, K)

        else:                                                 # MixMatch
            x_v = view(batch.x_u, rng("second weak view", step))
            with torch.no_grad(), models.frozen_bn_stats(model):
                batch.z_u, z_v = features(x_w), features(x_v)                  # (U, D) each
                guess = sum(model.classifier(z).softmax(1) for z in (batch.z_u, z_v)) / 2
                batch.p = method.refine(sharpen(guess, cfg.temperature), batch)    # (U, K)
            x = torch.cat([batch.x_l, x_w, x_v])              # (B+2U, 3, H, W)
            q = torch.cat([F.one_hot(y_l, K).float(), batch.p, batch.p])       # (B+2U, K)
            x, q = mixup(x, q, *draw_mix(rng("mixup", step), cfg.mix_alpha, len(x), device))
            batch.y_u, batch.mask = batch.p.argmax(1), torch.ones_like(batch.p[:, 0])  # all count
            batch.z, target = features(x), q[:len(y_l)]       # (B+2U, D), (B, K)
            logits = model.classifier(batch.z)                # (B+2U, K)
            lambda_u = cfg.lambda_u * now / end
            plain = unlabeled_part(mixmatch_loss, q[len(y_l):], 0, 1)

        if base in ("pseudolabel", "fixmatch"):
            confidence, batch.y_u = batch.p.max(1)            # (U,), (U,)
            hard, mask = cfg.labels == "hard", (confidence >= cfg.tau).float()
            target_u, batch.mask = (batch.y_u, mask) if hard else (batch.p, torch.ones_like(mask))
            plain = unlabeled_part(fixmatch_loss, y_l[:0], target_u, batch.mask, 1)

        # 3) One step.
        logits = method.adapt(logits)
        loss_x = method.supervised_loss(logits[:len(y_l)], target, step)
        loss_u = method.unlabeled_loss(logits[len(y_l):], plain, batch)
        loss = loss_x + lambda_u * loss_u + method.extra_loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        # 4) EMA first, then weight decay of the live weights: the order of the protocol. Not in a
        #    network that a method has frozen (eval mode).
        ema.update()
        if model.training or cfg.freeze:
            models.decay_weights(model, cfg.lr * cfg.weight_decay)

        # 5) Log, evaluation, checkpoint, stop request.
        run.after_step(step, batch.y_u, batch.mask, true_u, loss_x=loss_x, loss_u=loss_u,
                       loss_bal=batch.loss_bal)
    return run.finish()


if __name__ == "__main__":
    launch(main)
