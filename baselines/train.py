"""The comparison methods under the protocol of train_*.py: one loop, --base and --method.

    python -m baselines.train --base supervised --method ldam --dataset cifar10
    python -m baselines.train --base fixmatch --method none    = train_fixmatch.py --method none
    python -m baselines.train --base B --method M --help       the flags of B and M

The loop calls the hooks of `Method` (baselines/__init__.py) in the order base, labeled, refine,
supervised_loss, unlabeled_loss, extra_loss; predict at an evaluation, after_epoch where an epoch
ends. A method overrides those it needs. L2AC itself is in train_*.py; read those first.
"""
import sys
from functools import partial

import torch
import torch.nn.functional as F

import data
import evaluate
import models
from baselines import Batch, Context
from baselines.methods import METHODS
from support import config
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
    p = config.parser(__doc__)
    add = p.add_argument_group("baselines").add_argument
    add("--base", choices=tuple(methods), default="fixmatch", help="(default: fixmatch)")
    add("--method", default=own.__name__.lower() if own else "none",
        help="; ".join(f"{base}: {', '.join(table)}" for base, table in methods.items()))
    words = sys.argv[1:] if argv is None else argv
    chosen, _ = p.parse_known_args([word for word in words if word not in ("-h", "--help")])
    if chosen.method not in methods[chosen.base]:
        home = (f"it is one of train_{chosen.base}.py" if chosen.base in ("fixmatch", "mixmatch")
                and chosen.method in config.CORE_METHODS
                else f"choose from {', '.join(methods[chosen.base])}")
        p.error(f"--method {chosen.method} is not one of --base {chosen.base}; {home}")
    method = methods[chosen.base][chosen.method]
    config.BASE_FLAGS[chosen.base](p)
    method.flags(p)
    cfg = config.resolve(p, argv, chosen.base)
    method.check(cfg)
    return cfg, method


def unlabeled_part(loss, *args):
    """The unlabeled part of a loss of train_*.py as a function of the logits of unlabeled rows."""
    return lambda logits: loss(logits, *args)[2]


def main(argv=None, on_step=None, own=None):
    # -------------------------------------------------------------------------------------- data
    cfg, method_class = configure(argv, own)
    run = Run(cfg, on_step)
    device, shard = run.device, (run.rank, run.size)
    dataset, index_l, index_u = data.load_split(cfg, device)
    K = dataset.num_classes
    normalise = Normalise(dataset.mean, dataset.std, device)
    stream_l = data.IndexStream(index_l, cfg.batch_size, cfg.seed, "labeled", shard)
    stream_u = data.IndexStream(index_u, cfg.batch_size_u, cfg.seed, "unlabeled", shard)
    dataset.read_ahead(stream_l, stream_u)
    rng = partial(data.rng, cfg.seed)
    view = partial(weak, normalise=normalise, shard=shard, no_flip=cfg.no_flip)

    # -------------------------------------------------------------------------- model, optimizer
    model, ema, features = models.build_with_ema(cfg, K, device, method_class.heads)
    optimizer = torch.optim.Adam(model.parameters(), cfg.lr, fused=True)
    counts = dataset.count(index_l).double()                  # (K,)
    method = method_class(Context(cfg, device, shard, dataset, index_l, index_u, stream_l, counts,
                                  normalise, model, ema, optimizer, features)).to(device)

    def judge():
        """What the method predicts with the EMA on the test set; maybe the end of an epoch."""
        columns = evaluate.on_test_set(partial(method.predict, ema.model), dataset, normalise)
        if run.ends_epoch(step + 1):
            method.after_epoch(step + 1)
        return columns

    # -------------------------------------------------------------------------------------- loop
    start = run.open(dataset, index_l, index_u, milestones=method.milestones, parts={
        "model": model, "ema": ema.model, "optimizer": optimizer, "method": method})
    for step in range(start, cfg.iters):
        base = method.base(step)

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
            y_u = mask = true_u = torch.zeros(0, device=device)                # no unlabeled images
            plain, lambda_u = torch.sum, 0                    # no unlabeled rows

        elif base == "pseudolabel":                           # Lee 2013: its own view's argmax
            batch.z, target = features(torch.cat([batch.x_l, x_w])), y_l       # (B+U, D)
            logits = model.classifier(batch.z)                # (B+U, K)
            batch.z_u = batch.z[len(y_l):].detach()           # (U, D)
            p = method.refine(logits[len(y_l):].detach().softmax(1), batch)    # (U, K)
            confidence, y_u = p.max(1)                        # (U,), (U,)
            mask = (confidence >= cfg.tau).float()
            now, end = method.schedule(step)
            lambda_u = cfg.lambda_u * min(1, now / (0.4 * end))
            plain = unlabeled_part(fixmatch_loss, y_l[:0], y_u, mask, 1)

        elif base == "fixmatch":
            x_s = strong(batch.x_u.repeat_interleave(cfg.n_strong, dim=0), rng("strong view", step),
                         normalise, cfg.ra_n, cfg.ra_m, shard, cfg.no_flip)    # (SU, 3, H, W)
            with torch.no_grad(), models.frozen_bn_stats(model):
                batch.z_u = features(x_w)                     # (U, D)
                p = method.refine(model.classifier(batch.z_u).softmax(1), batch)   # (U, K)
                confidence, y_u = p.max(1)                    # (U,), (U,)
                mask = (confidence >= cfg.tau).float()
            batch.z, target = features(torch.cat([batch.x_l, x_s])), y_l       # (B+SU, D)
            logits, lambda_u = model.classifier(batch.z), cfg.lambda_u         # (B+SU, K)
            plain = unlabeled_part(fixmatch_loss, y_l[:0], y_u, mask, 1)

        else:                                                 # MixMatch
            x_v = view(batch.x_u, rng("second weak view", step))
            with torch.no_grad(), models.frozen_bn_stats(model):
                batch.z_u, z_v = features(x_w), features(x_v)                  # (U, D) each
                guess = sum(model.classifier(z).softmax(1) for z in (batch.z_u, z_v)) / 2
                q_u = method.refine(sharpen(guess, cfg.temperature), batch)    # (U, K)
            sizes = len(y_l), len(q_u), len(q_u)
            x, q = mixup(run.join_ranks(batch.x_l, x_w, x_v),
                         run.join_ranks(F.one_hot(y_l, K).float(), q_u, q_u),
                         *draw_mix(cfg, step, run.size * sum(sizes), device))
            x, q = run.local_rows(x, *sizes), run.local_rows(q, *sizes)        # (B+2U, ...) each
            y_u, mask = q_u.argmax(1), torch.ones_like(q_u[:, 0])              # every guess counts
            batch.z, target = features(x), q[:len(y_l)]       # (B+2U, D), (B, K)
            logits = model.classifier(batch.z)                # (B+2U, K)
            now, end = method.schedule(step)
            lambda_u = cfg.lambda_u * now / end
            plain = unlabeled_part(mixmatch_loss, q[len(y_l):], 0, 1)

        # 3) One step.
        loss_x = method.supervised_loss(logits[:len(y_l)], target, step)
        loss_u = method.unlabeled_loss(logits[len(y_l):], plain, batch)
        loss = loss_x + lambda_u * loss_u + method.extra_loss(batch)
        run.backward(loss, model)
        optimizer.step()

        # 4) EMA first, then weight decay of the live weights: the order of the protocol. Not in a
        #    network that a method has frozen (eval mode).
        ema.update()
        if model.training:
            models.decay_weights(model, cfg)

        # 5) Log, evaluation, checkpoint, stop request.
        if run.after_step(step, judge, y_u, mask, true_u, loss=loss, loss_x=loss_x, loss_u=loss_u):
            return 130

    judged = method.judged(run.history, cfg)
    run.finish(evaluate.mean_of_last(judged), judged)


if __name__ == "__main__":
    launch(main)
