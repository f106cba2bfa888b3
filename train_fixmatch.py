"""FixMatch + L2AC, from data to a judged model.

    python train_fixmatch.py                                   synthetic data, CPU, a minute or two
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
    (with several processes B, U, M are those of a process's slice of the batch: distributed.py)
"""
import torch
import torch.nn.functional as F

import common
import data
import distributed
import evaluate
import models
import run_folder
import settings
from attractor import BiasAttractor, adapt
from augment import Normalise, strong, weak
from bilevel import full_unroll, omega_gradient, remember
from distributed import average, average_, mine


def flags(p):
    g = p.add_argument_group("FixMatch")
    g.add_argument("--tau", type=settings.number(float, 0, 1),
                   help="confidence from which a pseudo-label counts *")
    g.add_argument("--lambda_u", type=settings.number(float, 0), default=1.0,
                   help="weight of the unlabeled loss (default: 1)")
    g.add_argument("--n_strong", type=settings.number(int, 1, 16),
                   help="strong views of each unlabeled image *")
    g.add_argument("--ra_n", type=settings.number(int, 0, 16), default=3,
                   help="RandAugment: operations per image (default: 3)")
    g.add_argument("--ra_m", type=strength, metavar="M",
                   help="RandAugment: strength, 0 to 30, or `random`: drawn for each operation *")


def strength(text):
    return text if text == "random" else settings.number(float, 0, 30)(text)


def config(argv=None):
    p = settings.parser(__doc__, models.network)
    settings.l2ac_flags(p)
    flags(p)
    return settings.resolve(p.parse_args(argv), "fixmatch")


def fixmatch_losses(logits, y_l, y_u, mask):
    """L_l and L_u / lambda_u of Eq. 1. logits (B+SU, K): labeled rows, then S views of each image.

    The unlabeled mean is over all rows: an image below the threshold counts as zero, so that few
    confident images make a small loss, not a loud one.
    """
    views = (len(logits) - len(y_l)) // len(y_u)                               # S
    loss_x = F.cross_entropy(logits[:len(y_l)], y_l)
    targets, kept = (t.repeat_interleave(views) for t in (y_u, mask))          # (SU,) each
    loss_u = F.cross_entropy(logits[len(y_l):], targets, reduction="none") * kept
    return loss_x, loss_u.mean()


def main(argv=None):
    # ------------------------------------------------------------------------------- setup, data
    cfg = config(argv)
    device = settings.pick_device(cfg)
    shard = distributed.start(device)
    dataset = distributed.in_turn(
        lambda: data.load(cfg.dataset, cfg.data_dir, cfg.image_size)).to(device)
    index_l, index_u = data.split(dataset, cfg)
    cfg.facts = dataset.facts                 # for prediction without the dataset
    folder, checkpoint = run_folder.open_run(cfg, schedule=False)
    normalise = Normalise(dataset.mean, dataset.std, device)
    stream_l = data.IndexStream(index_l, cfg.batch_size, cfg.seed, "labeled")
    stream_u = data.IndexStream(index_u, cfg.batch_size_u, cfg.seed, "unlabeled")
    stream_b = data.BalancedStream(index_l, dataset.labels[index_l], cfg.batch_size, cfg.seed)
    dataset.read_ahead(stream_l, stream_u, stream_b, part=mine)

    # ------------------------------------------------------------------------ model, optimizers
    torch.manual_seed(cfg.seed)               # initial weights; the loop draws nothing from here
    K = dataset.num_classes
    model = models.build(cfg.model, K, cfg.bn_momentum, cfg.wrn_quirk)
    attractor = BiasAttractor(K, cfg.hidden, cfg.attractor_input).to(device)
    if distributed.size() > 1 and device.type == "cuda":
        model = models.share_statistics(model)
    model = model.to(device, memory_format=torch.channels_last)
    ema = common.EMA(model, cfg.ema)
    joint = cfg.method in ("attractor", "single_level")       # ablations: omega trained on L itself
    adaptive_labels = cfg.method != "none" and (
        cfg.pseudo_from == "adaptive" or cfg.pseudo_from == "auto" and data.matched(cfg))
    optimizer = torch.optim.Adam(model.parameters(), cfg.lr, fused=True)
    # Eq. 6 is plain descent, but its gradient carries the factor lr and comes out tiny: times
    # eta = 1e-4, omega would hardly move. Adam's steps have the size eta whatever the gradient's.
    omega_optimizer = torch.optim.Adam(attractor.parameters(), cfg.lr if joint else cfg.eta,
                                       fused=True)
    # What omega is differentiated through: the step of phi, or (full_unroll) of every weight.
    unrolled = model if cfg.method == "full_unroll" else model.classifier
    statistics = models.running_statistics(model)
    decayed = list(model.parameters()) + (statistics if cfg.decay_bn else [])
    features = models.feature_pass(model, device, cfg.dtype, cfg.compile)

    # ------------------------------------------------------------------------------------ resume
    tally = common.Tally(device)
    parts = {"model": model, "ema": ema.model, "attractor": attractor, "optimizer": optimizer,
             "omega_optimizer": omega_optimizer, "tally": tally}
    start, seconds, history = run_folder.restore(folder, checkpoint, parts, cfg)

    def save(step):
        watch.check(step, model, ema.model, attractor)        # a checkpoint is always a good one
        run_folder.save_checkpoint(folder, parts, step=step, seconds=progress.seconds,
                                   history=history, config=vars(cfg))

    # ------------------------------------------------------------------------------- both levels
    def view(x, purpose, step):
        return weak(x, data.rng(cfg.seed, purpose, step), normalise, shard)

    def move_omega(gradient):
        for p, g in zip(attractor.parameters(), gradient):
            p.grad = g
        omega_optimizer.step()                                # Eq. 6
        return torch.nn.utils.get_total_norm(gradient)

    def upper_level(lower_loss, logits, z, inner, x_b, y_b):
        """Judge the step of phi that omega brings about on a balanced batch, and move omega."""
        with torch.no_grad(), models.frozen_bn_stats(model):
            z_b = features(x_b)                               # (M, D)
        loss_bal, gradient = omega_gradient(attractor, lower_loss, logits, z, inner, z_b, y_b,
                                            average)
        return loss_bal, move_omega(gradient)

    # -------------------------------------------------------------------------------------- loop
    common.print_start(cfg, dataset, index_l, index_u, model, device)
    progress = common.Progress(start, cfg.iters, seconds)
    watch = common.Watch()
    for step in range(start, cfg.iters):
        omega_turn = cfg.method in ("l2ac", "full_unroll") and step % cfg.omega_every == 0

        # 1) Batches and views: pure functions of (seed, step).
        x_l, y_l = dataset.take(mine(stream_l.batch(step)))   # (B, 3, H, W), (B,)
        x_u, true_u = dataset.take(mine(stream_u.batch(step)))   # (U, 3, H, W), (U,) for the log
        x_l, x_w = view(x_l, "labeled view", step), view(x_u, "weak view", step)
        x_s = strong(x_u.repeat_interleave(cfg.n_strong, dim=0),              # (SU, 3, H, W)
                     data.rng(cfg.seed, "strong view", step), normalise, cfg.ra_n, cfg.ra_m, shard)
        if omega_turn or cfg.method == "single_level":
            x_b, y_b = dataset.take(mine(stream_b.batch(step)))  # (M, 3, H, W), (M,)
            x_b = view(x_b, "balanced view", step)

        # 2) Pseudo-labels: by the live network, with the batch's own BatchNorm statistics.
        with torch.no_grad(), models.frozen_bn_stats(model):
            logits_u = model.classifier(features(x_w))        # (U, K)
            if adaptive_labels:
                logits_u = adapt(logits_u, attractor)
            confidence, y_u = logits_u.softmax(1).max(1)      # (U,), (U,)
            mask = (confidence >= cfg.tau).float()            # (U,)

        # 3) One forward pass over all rows of L; both levels use it.
        z = features(torch.cat([x_l, x_s]))                   # (B+SU, D)
        logits = model.classifier(z)                          # (B+SU, K)

        def lower_loss(l_hat):                                # L as a function of l^, Eq. 3
            loss_x, loss_u = fixmatch_losses(l_hat, y_l, y_u, mask)
            return loss_x + cfg.lambda_u * loss_u

        loss_bal = omega_norm = torch.zeros((), device=device)
        if omega_turn:
            inner = remember(unrolled.parameters(), optimizer, step + 1, cfg.inner)
            # The released code's order: omega first, judged on a virtual step of phi.
            if cfg.omega_order == "before" and cfg.method == "l2ac":
                loss_bal, omega_norm = upper_level(lower_loss, logits, z, inner, x_b, y_b)

        # 4) Lower level: theta and phi make one step on L. omega is a constant here (only the
        #    ablations train it on L).
        l_hat = logits
        if cfg.method != "none":
            with torch.set_grad_enabled(joint):
                delta = attractor(logits)                     # (B+SU, K)
            l_hat = logits + delta                            # Eq. 2
        loss_x, loss_u = fixmatch_losses(l_hat, y_l, y_u, mask)
        loss = loss_x + cfg.lambda_u * loss_u                 # Eq. 3
        if cfg.method == "single_level":                      # Eq. 5 added to Eq. 3, weight 1
            with models.frozen_bn_stats(model):
                loss_bal = F.cross_entropy(model.classifier(features(x_b)), y_b)
            loss = loss + loss_bal
        if omega_turn and cfg.method == "full_unroll":
            with models.frozen_bn_stats(model):
                loss_bal, gradient, lower_gradient = full_unroll(
                    model, attractor, lower_loss, logits, inner, x_b, y_b, average)
            omega_norm = move_omega(gradient)
            for p, g in zip(model.parameters(), lower_gradient):
                p.grad = torch.empty_like(p).copy_(g)         # in p's memory layout, for Adam
        else:
            loss.backward()
        average_([p.grad for p in (*model.parameters(), *attractor.parameters())
                  if p.grad is not None] + statistics)        # over processes
        optimizer.step()                                      # Eq. 4
        optimizer.zero_grad()
        if joint:
            omega_optimizer.step()
            omega_optimizer.zero_grad()

        # 5) Upper level, the paper's order: omega is judged at (theta', phi'(omega)).
        if omega_turn and cfg.omega_order == "after" and cfg.method == "l2ac":
            loss_bal, omega_norm = upper_level(lower_loss, logits, z, inner, x_b, y_b)

        # 6) EMA first, then the live weights shrink: the order of the protocol.
        ema.update()
        with torch.no_grad():
            torch._foreach_mul_(decayed, 1 - cfg.lr * cfg.weight_decay)

        # 7) Bookkeeping, without reading anything back from the device.
        tally.add(loss_x, loss_u, y_u, mask, true_u, loss_bal, omega_norm,
                  omega_turn or cfg.method == "single_level")
        watch.see(step, torch.stack([loss_x, loss_u, loss_bal, omega_norm]).detach())
        done = step + 1
        if progress.due():
            progress.show(done, tally.averages())

        # 8) Evaluate the EMA of the linear classifier; save.
        due = done % cfg.eval_every == 0
        stop = distributed.any_of(common.interrupt.wished)
        if due or done == cfg.iters:
            progress.pause()
            result = evaluate.on_test_set(ema.model, dataset, normalise,
                                          attractor if cfg.method != "none" else None)
            history.append({"iter": done} | tally.averages() | evaluate.columns(result)
                           | {"it_per_s": (done - start) / (progress.seconds - seconds)})
            if due:                 # a last row off the grid is dropped if the run is made longer
                tally.reset()
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

    run_folder.finish(cfg, folder, evaluate.mean_of_last(history), min(20, len(history)),
                      progress.seconds, device)


if __name__ == "__main__":
    common.interrupt.listen()
    settings.exit_cleanly(main, data.DataError)
