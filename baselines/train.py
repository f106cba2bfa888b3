"""The comparison methods under the protocol of the two tutorials: one loop, --base and --method.

    python -m baselines.train --base supervised --method ldam --dataset cifar10
    python -m baselines.train --base fixmatch --method none    = train_fixmatch.py --method none
    python -m baselines.train --base B --method M --help       the flags of B and M

The methods are strangers to this loop: it calls what `Method` (baselines/__init__.py) offers, in
the order labeled, refine, supervised_loss, extra_loss, after_epoch, predict, and a method overrides
the calls it needs. L2AC itself is in the tutorials; read those first.
"""
import sys
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F

import common
import data
import distributed
import evaluate
import models
import run_folder
import settings
import train_fixmatch
import train_mixmatch
from augment import Normalise, strong, weak
from baselines import Method, abc_head, crest, darp, daso, sar, supervised
from distributed import average_, gather, mine
from train_fixmatch import fixmatch_losses
from train_mixmatch import draw_mix, mixmatch_losses, mixup, own_rows, sharpen

SUPERVISED = {"vanilla": Method, "lower_bound": Method, "upper_bound": supervised.UpperBound,
              "resampling": supervised.Resampling, "ldam": supervised.LDAM, "crt": supervised.CRT}
SEMI_SUPERVISED = {"none": Method, "darp": darp.DARP, "crest": crest.CReST,
                   "crest+": crest.CReSTPlus, "abc": abc_head.ABC, "sar": sar.SaR,
                   "daso": daso.DASO}
METHODS = {"supervised": SUPERVISED, "pseudolabel": {"none": Method},
           "fixmatch": SEMI_SUPERVISED, "mixmatch": SEMI_SUPERVISED}


def pseudolabel_flags(p):
    g = p.add_argument_group("pseudo-labels")
    g.add_argument("--tau", type=settings.number(float, 0, 1),
                   help="confidence from which a pseudo-label counts *")
    g.add_argument("--lambda_u", type=settings.number(float, 0), default=1.0,
                   help="weight of the unlabeled loss after its ramp (default: 1)")


BASE_FLAGS = {"supervised": lambda p: None, "pseudolabel": pseudolabel_flags,
              "fixmatch": train_fixmatch.flags, "mixmatch": train_mixmatch.flags}


def config(argv=None):
    """The flags depend on base and method, so these two are read first."""
    p = settings.parser(__doc__, models.network)
    add = p.add_argument_group("baselines").add_argument
    add("--base", choices=tuple(METHODS), default="fixmatch", help="(default: fixmatch)")
    add("--method", default="none",
        help="; ".join(f"{base}: {', '.join(methods)}" for base, methods in METHODS.items()))
    words = sys.argv[1:] if argv is None else argv
    chosen, _ = p.parse_known_args([word for word in words if word not in ("-h", "--help")])
    if chosen.method not in METHODS[chosen.base]:
        p.error(f"--method {chosen.method} is not one of --base {chosen.base}, which has "
                f"{', '.join(METHODS[chosen.base])}")
    method = METHODS[chosen.base][chosen.method]
    BASE_FLAGS[chosen.base](p)
    method.flags(p)
    cfg = settings.resolve(p.parse_args(argv), chosen.base)
    method.check(cfg)
    return cfg, method


def main(argv=None):
    # ------------------------------------------------------------------------------- setup, data
    cfg, method_class = config(argv)
    device = settings.pick_device(cfg)
    shard = distributed.start(device)
    dataset = distributed.in_turn(
        lambda: data.load(cfg.dataset, cfg.data_dir, cfg.image_size)).to(device)
    index_l, index_u = data.split(dataset, cfg)
    cfg.facts = dataset.facts                 # for prediction without the dataset
    normalise = Normalise(dataset.mean, dataset.std, device)
    stream_l = data.IndexStream(index_l, cfg.batch_size, cfg.seed, "labeled")
    stream_u = data.IndexStream(index_u, cfg.batch_size_u, cfg.seed, "unlabeled")
    dataset.read_ahead(stream_l, stream_u)

    # -------------------------------------------------------------------------- model, optimizer
    torch.manual_seed(cfg.seed)               # initial weights; the loop draws nothing from here
    K = dataset.num_classes
    model = models.build(cfg.model, K, cfg.bn_momentum, cfg.wrn_quirk)
    method_class.heads(model)
    if distributed.size() > 1 and device.type == "cuda":
        model = models.share_statistics(model)
    model = model.to(device, memory_format=torch.channels_last)
    ema = common.EMA(model, cfg.ema)
    optimizer = torch.optim.Adam(model.parameters(), cfg.lr, fused=True)
    statistics = models.running_statistics(model)
    decayed = list(model.parameters()) + (statistics if cfg.decay_bn else [])
    features = models.feature_pass(model, device, cfg.dtype, cfg.compile)
    counts = torch.bincount(torch.from_numpy(dataset.labels[index_l]), minlength=K)
    method = method_class(SimpleNamespace(
        cfg=cfg, device=device, dataset=dataset, index_l=index_l, index_u=index_u,
        stream_l=stream_l, counts=counts.double(), normalise=normalise, model=model, ema=ema,
        optimizer=optimizer, features=features)).to(device)

    # ------------------------------------------------------------------------------------ resume
    folder, checkpoint = run_folder.open_run(cfg)
    tally = common.Tally(device)
    parts = {"model": model, "ema": ema.model, "optimizer": optimizer, "tally": tally,
             "method": method}
    start, seconds, history = run_folder.restore(folder, checkpoint, parts, cfg)

    def save(step):
        watch.check(step, model, ema.model, method)           # a checkpoint is always a good one
        run_folder.save_checkpoint(folder, parts, step=step, seconds=progress.seconds,
                                   history=history, config=vars(cfg))

    # -------------------------------------------------------------------------------------- loop
    def view(x, purpose, step):
        return weak(x, data.rng(cfg.seed, purpose, step), normalise)

    common.print_start(cfg, dataset, index_l, index_u, model, device)
    progress = common.Progress(start, cfg.iters, seconds)
    watch = common.Watch()
    for step in range(start, cfg.iters):
        # 1) Batches and weak views: pure functions of (seed, step). `batch` is the whole batch, the
        #    same in every process (mixup pairs any of its rows), `own` is this process's slice.
        batch, own = SimpleNamespace(step=step), SimpleNamespace(step=step)
        x_l, batch.y_l = dataset.take(*method.labeled(step))  # (B, 3, H, W), (B,)
        batch.x_l = view(x_l, "labeled view", step)
        own.x_l, own.y_l = x_l, y_l = mine(batch.x_l), mine(batch.y_l)
        if cfg.base == "supervised":
            y_u, mask, true_u = torch.zeros(3, 0, device=device)               # of no image
        else:
            batch.index_u = stream_u.batch(step)
            batch.x_u, true_u = dataset.take(batch.index_u)   # (U, 3, H, W), (U,) for the log only
            own.x_u, true_u = mine(batch.x_u), mine(true_u)
            x_w = view(batch.x_u, "weak view", step)

        # 2) The base method: logits (N, K) of all its rows, target of the labeled ones, loss_u.
        #    Passes that only guess labels leave BatchNorm's running statistics alone. A method
        #    refines the guesses for the whole batch, so that it learns the same in every process.
        if cfg.base == "supervised":
            z, target, loss_u, lambda_u = features(x_l), y_l, torch.zeros((), device=device), 0
            logits = model.classifier(z)                      # (B, K)

        elif cfg.base == "pseudolabel":                       # Lee 2013: its own view's argmax
            z = features(torch.cat([x_l, mine(x_w)]))         # (B+U, D)
            logits, target = model.classifier(z), y_l         # (B+U, K)
            own.z_u = z[len(y_l):].detach()                   # (U, D)
            batch.z_u, p = gather(own.z_u), gather(logits[len(y_l):].detach().softmax(1))
            p = mine(method.refine(p, batch))                 # (U, K)
            confidence, y_u = p.max(1)                        # (U,), (U,)
            mask = (confidence >= cfg.tau).float()
            _, loss_u = fixmatch_losses(logits, y_l, y_u, mask)
            now, end = method.schedule(step)
            lambda_u = cfg.lambda_u * min(1, now / (0.4 * end))

        elif cfg.base == "fixmatch":
            x_s = strong(own.x_u.repeat_interleave(cfg.n_strong, dim=0),      # (SU, 3, H, W)
                         data.rng(cfg.seed, "strong view", step), normalise, cfg.ra_n, cfg.ra_m,
                         shard)
            with torch.no_grad(), models.frozen_bn_stats(model):
                own.z_u = features(mine(x_w))                 # (U, D)
                batch.z_u, p = gather(own.z_u), gather(model.classifier(own.z_u).softmax(1))
                p = mine(method.refine(p, batch))             # (U, K)
                confidence, y_u = p.max(1)                    # (U,), (U,)
                mask = (confidence >= cfg.tau).float()
            z = features(torch.cat([x_l, x_s]))               # (B+SU, D)
            logits, target = model.classifier(z), y_l         # (B+SU, K)
            _, loss_u = fixmatch_losses(logits, y_l, y_u, mask)
            lambda_u = cfg.lambda_u

        else:                                                 # MixMatch
            x_v = view(batch.x_u, "second weak view", step)
            with torch.no_grad(), models.frozen_bn_stats(model):
                own.z_u, z_v = features(mine(x_w)), features(mine(x_v))       # (U, D) each
                guess = sum(model.classifier(z).softmax(1) for z in (own.z_u, z_v)) / 2
                batch.z_u, q_u = gather(own.z_u), gather(sharpen(guess, cfg.temperature))
                q_u = method.refine(q_u, batch)               # (U, K)
            x, q = mixup(torch.cat([batch.x_l, x_w, x_v]),    # (B+2U, 3, H, W), (B+2U, K)
                         torch.cat([F.one_hot(batch.y_l, K).float(), q_u, q_u]),
                         *draw_mix(cfg, step, len(batch.y_l) + 2 * len(q_u), device))
            x, q = own_rows(x, len(y_l)), own_rows(q, len(y_l))
            y_u = mine(q_u).argmax(1)
            mask = torch.ones(len(y_u), device=device)        # every guess counts
            z = features(x)                                   # (B+2U, D)
            logits, target = model.classifier(z), q[:len(y_l)]                 # (B+2U, K), (B, K)
            _, loss_u = mixmatch_losses(logits, q, len(y_l))
            now, end = method.schedule(step)
            lambda_u = cfg.lambda_u * now / end

        # 3) One step.
        loss_x = method.supervised_loss(logits[:len(y_l)], target, step)
        own.z = z
        loss = loss_x + lambda_u * loss_u + method.extra_loss(own)
        loss.backward()
        average_([p.grad for p in model.parameters() if p.grad is not None]
                 + (statistics if model.training else []))    # over processes
        optimizer.step()
        optimizer.zero_grad()

        # 4) EMA first, then the live weights shrink: the order of the protocol. A method that
        #    freezes the network (eval mode) does not want it shrunk either.
        ema.update()
        if model.training:
            with torch.no_grad():
                torch._foreach_mul_(decayed, 1 - cfg.lr * cfg.weight_decay)

        # 5) Bookkeeping, without reading anything back from the device.
        zero = torch.zeros((), device=device)
        tally.add(loss_x, loss_u, y_u, mask, true_u, zero, zero, False)
        watch.see(step, torch.stack([loss_x, loss_u, loss]).detach())
        done = step + 1
        if progress.due():
            progress.show(done, tally.averages())

        # 6) Evaluate what the method predicts with the EMA; save.
        stop = distributed.any_of(common.interrupt.wished)
        if done % cfg.eval_every == 0 or done == cfg.iters or done in method.milestones:
            progress.pause()
            result = evaluate.on_test_set(partial(method.predict, ema.model), dataset, normalise)
            history.append({"iter": done} | tally.averages() | evaluate.columns(result)
                           | {"it_per_s": (done - start) / (progress.seconds - seconds)})
            tally.reset()
            method.after_epoch(done)
            save(done)
            run_folder.write_log(folder, history)
            progress.row(history[-1])
            progress.begin()
        elif stop:
            progress.pause()
            save(done)
        if stop and done < cfg.iters:
            print(f"\nstopped after iteration {done}; the same command with --resume goes on")
            return 130

    last = method.judged(history, cfg)
    run_folder.finish(cfg, folder, evaluate.mean_of_last(last), len(last), progress.seconds, device)


if __name__ == "__main__":
    common.interrupt.listen()
    settings.exit_cleanly(main, data.DataError)
