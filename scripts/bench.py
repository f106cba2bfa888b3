"""What an iteration costs: seconds of CPU time, and how many times those of FixMatch.

    python -m scripts.bench                                 WRN-28-2, the paper's batch, minutes
    python -m scripts.bench --model wrn-10-1 --image_size 16          flags of the training scripts
    python -m scripts.bench --methods l2ac full_unroll abc darp --classes 10 100 --block 10 --json
    python -m scripts.bench --methods none:bfloat16 l2ac:bfloat16     against FixMatch in float32

A method and FixMatch train on noise, each in a process of its own with one thread. They take turns
of --block iterations, so a slow moment of the machine hits both: the ratio is the median over the
rounds of the ratios within a round. On a CPU the process's own time counts, on a GPU the clock's.
"""
import json
import multiprocessing
import os
import sys
import tempfile
import time
from functools import partial

import numpy as np
import torch

import data
import models
import train_fixmatch
from attractor import build_attractor
from baselines import darp, daso
from baselines import train as baselines
from scripts.full_unroll import full_unroll
from support import config, exit_cleanly
from support.augment import Normalise, strong, weak


def train_full_unroll(argv, on_step):
    """The loop of train_fixmatch.py with the whole network differentiated twice; no log."""
    cfg = config.read(argv, "fixmatch", "", train_fixmatch.flags, train_fixmatch.l2ac_flags)
    device = config.pick_device(cfg)
    dataset = data.from_flags(cfg).to(device)
    index_l, index_u = data.split(dataset, cfg)
    streams = [data.IndexStream(index_l, cfg.batch_size, 0, "labeled"),
               data.IndexStream(index_u, cfg.batch_size_u, 0, "unlabeled"),
               data.BalancedStream(index_l, dataset.labels, cfg.batch_size, 0)]
    normalise = Normalise(dataset.mean, dataset.std, device)
    model = models.build(cfg.model, dataset.num_classes, cfg.bn_momentum)
    model = model.to(device, memory_format=torch.channels_last)
    ema, attractor = models.EMA(model, cfg.ema), build_attractor(dataset.num_classes).to(device)
    optimizer = torch.optim.Adam(model.parameters(), cfg.lr, fused=True)
    omega_optimizer = torch.optim.Adam(attractor.parameters(), cfg.eta, fused=True)
    for step in range(cfg.iters):
        images, (y_l, _, y_b) = zip(*(dataset.take(s.batch(step)) for s in streams), strict=True)
        x_l, x_w, x_b = (weak(x, data.rng(0, "view", step), normalise) for x in images)
        x_s = strong(images[1].repeat_interleave(cfg.n_strong, dim=0), data.rng(0, "strong", step),
                     normalise, cfg.ra_n, cfg.ra_m)
        with models.frozen_bn_stats(model), torch.no_grad():
            confidence, y_u = model(x_w).softmax(1).max(1)
        lower_loss = partial(train_fixmatch.fixmatch_loss, y_l=y_l, target_u=y_u,
                             mask=(confidence >= cfg.tau).float(), lambda_u=cfg.lambda_u)
        logits = model(torch.cat([x_l, x_s]))
        with models.frozen_bn_stats(model):
            full_unroll(model, attractor, lower_loss, logits, optimizer, x_b, y_b)
        omega_optimizer.step()
        optimizer.step()
        ema.update()
        models.decay_weights(model, cfg.lr * cfg.weight_decay)
        on_step(step, {})


def train(pipe, method, argv, block):
    """A training run that reports the seconds of a block of iterations and waits for its turn."""
    clock = time.perf_counter if "cuda" in argv else time.process_time

    def on_step(step, losses):
        nonlocal began
        if step % block == 0:                            # the first iteration is a block of its own
            if "cuda" in argv:
                torch.cuda.synchronize()
            pipe.send(clock() - began)
            pipe.recv()
            began = clock()
    sys.stdout, began = open(os.devnull, "w"), clock()
    darp.WARM = daso.START = 0                           # what these do later in a run, at once
    main = {"none": train_fixmatch.main, "l2ac": train_fixmatch.main,
            "full_unroll": train_full_unroll}.get(method, baselines.main)
    exit_cleanly(lambda: main(argv, on_step))


def take_turns(methods, argv, block, rounds):
    """(rounds, methods) seconds of a block. argv: flags of the training scripts"""
    spawn, pipes, processes = multiprocessing.get_context("spawn"), [], []
    times = np.empty((rounds, len(methods)))
    try:
        for method in methods:
            pipe, theirs = spawn.Pipe()
            name, _, dtype = method.partition(":")
            flags = [*argv, "--method", name.replace("full_unroll", "l2ac")]
            flags += ["--dtype", dtype] if dtype else []
            processes.append(spawn.Process(target=train, args=(theirs, name, flags, block)))
            processes[-1].start()
            theirs.close()                               # so that we notice if the process ends
            pipe.recv()                                  # set-up and first iteration
            pipes.append(pipe)
        for i, j in np.ndindex(times.shape):
            pipes[j].send("your turn")
            times[i, j] = pipes[j].recv()
    except EOFError:
        sys.exit(2)                                      # the process has said why
    finally:
        for process in processes:
            process.kill()
    return times


def main(argv=None):
    p = config.Parser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    p.add_argument("--methods", nargs="+", default=["l2ac", "full_unroll"], metavar="NAME",
                   help="l2ac, full_unroll, those of baselines.train (default: l2ac full_unroll)")
    p.add_argument("--classes", nargs="+", type=int, choices=(10, 100), default=[10])
    p.add_argument("--block", type=int, default=5, help="iterations of a turn (5; for DARP 10)")
    p.add_argument("--rounds", type=int, default=5, help="(default: 5)")
    p.add_argument("--json", action="store_true", help="seconds by method and number of classes")
    args, flags = p.parse_known_args(argv)
    found = {}
    for K in args.classes:
        y = np.arange(45_000) % K
        x = np.random.default_rng(0).integers(0, 256, (len(y), 32, 32, 3), np.uint8)
        with tempfile.TemporaryDirectory() as folder:
            np.savez(f"{folder}/cifar{K}.npz", x_train=x, y_train=y, x_test=x[:9], y_test=y[:9])
            words = (f"--dataset cifar{K} --data_dir {folder} --gamma_u 100 --device cpu "
                     f"--threads 1 --out {folder}/run --overwrite").split() + flags
            for method in [method for method in args.methods if method != "none"]:
                none, own = take_turns(("none", method), words, args.block, args.rounds).T
                base = found.setdefault(f"none {K}", np.median(none) / args.block)
                found[f"{method} {K}"] = base * np.median(own / none)
    if args.json:
        return print(json.dumps(found, indent=1))
    print(f"{'method, classes':<20}{'s/iteration':>12}{'/ none':>9}")
    for name, seconds in found.items():
        print(f"{name:<20}{seconds:>12.4f}{seconds / found[f'none {name.split()[1]}']:>9.3f}")


if __name__ == "__main__":
    exit_cleanly(main)
