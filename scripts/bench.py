"""What an iteration costs: seconds of CPU time, and how many times those of FixMatch.

    python -m scripts.bench                                 WRN-28-2, the paper's batch, minutes
    python -m scripts.bench --model wrn-10-1 --image_size 16          flags of the training scripts
    python -m scripts.bench --methods l2ac darp --classes 10 100 --block 10 > results/bench.json
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

import train_fixmatch
from baselines import darp, daso
from baselines import train as baselines
from scripts.full_unroll import FullUnroll
from support import config, exit_cleanly


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
    ours = method in ("none", "l2ac")
    main = train_fixmatch.main if ours else partial(baselines.main, own=FullUnroll)
    exit_cleanly(lambda: main(argv, on_step))


def take_turns(methods, argv, block, rounds):
    """(rounds, methods) seconds of a block. argv: flags of the training scripts"""
    spawn, pipes, processes = multiprocessing.get_context("spawn"), [], []
    times = np.empty((rounds, len(methods)))
    try:
        for method in methods:
            pipe, theirs = spawn.Pipe()
            name, _, dtype = method.partition(":")
            flags = [*argv, "--method", name.replace("full_unroll", "fullunroll")]
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
    p.add_argument("--block", type=int, default=3, help="iterations of a turn (3; for DARP 10)")
    p.add_argument("--rounds", type=int, default=9, help="(default: 9)")
    args, flags = p.parse_known_args(argv)
    seconds = {}                                         # of an iteration
    for K in args.classes:
        y = np.arange(45_000) % K
        x = np.random.default_rng(0).integers(0, 256, (len(y), 32, 32, 3), np.uint8)
        with tempfile.TemporaryDirectory() as folder:
            np.savez(f"{folder}/cifar{K}.npz", x_train=x, y_train=y, x_test=x[:K], y_test=y[:K])
            words = (f"--dataset cifar{K} --data_dir {folder} --gamma_u 100 --device cpu "
                     f"--threads 1 --out {folder}/run --overwrite").split() + flags
            for method in args.methods:
                none, own = take_turns(("none", method), words, args.block, args.rounds).T
                base = seconds.setdefault(f"none {K}", np.median(none) / args.block)
                ratio = np.median(own / none)
                seconds[f"{method} {K}"] = base * ratio
                print(f"{method} {K}: {base * ratio:.4f} s, / none {ratio:.3f}", file=sys.stderr)
    print(json.dumps(seconds, indent=1))


if __name__ == "__main__":
    exit_cleanly(main)
