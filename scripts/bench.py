"""Cost of L2AC: seconds, dispatched operations and memory per iteration; speed of augmentation.

    python -m scripts.bench                 WRN-28-2 at the paper's batch, one thread, some minutes
    python -m scripts.bench --model wrn-10-1 --image_size 16      a quick look
    python -m scripts.bench --rivals        all methods on FixMatch, for 10 and for 100 classes
    python -m scripts.bench --json          seconds per iteration: none, l2ac, full_unroll, bare;
                                            images per second: strong_per_s, pil_per_s;
                                            operations: ops_*; peak memory in MB: memory_*

The iterations are those of train_fixmatch.py itself, on synthetic images. The candidates take
turns, so that a busy machine slows all of them: compare the ratios, not the seconds.
"""
import argparse
import contextlib
import io
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision import transforms

import data
import models
import train_fixmatch
from baselines import darp
from baselines import train as baselines
from baselines.methods import SEMI_SUPERVISED
from scripts import full_unroll
from support import augment, config

MAINS = {"none": train_fixmatch.main, "l2ac": train_fixmatch.main, "full_unroll": full_unroll.main}


def training_flags(args, method, iters, out):
    text = (f"--dataset synthetic --scale paper --model {args.model} --batch_size "
            f"{args.batch_size} --image_size {args.image_size} --n_strong 2 --device cpu "
            f"--threads 1 --iters {iters} --eval_every {iters} --overwrite")
    text += "" if method == "full_unroll" else f" --method {method}"
    return [*text.split(), "--out", out]


class Enough(Exception):
    """Ends a run from within its on_step."""


def time_iterations(args, method, iters, more=()):
    """Seconds of each iteration of a short run; the first one is warm-up and left out."""
    times = []

    def on_step(step, losses):
        times.append(time.perf_counter())
        if len(times) == iters:
            raise Enough                                 # before the evaluation

    main = MAINS.get(method, baselines.main)
    with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(io.StringIO()):
        with contextlib.suppress(Enough):
            main([*training_flags(args, method, iters, out), *more], on_step)
    return np.diff(times).tolist()


class OperationCounter(TorchDispatchMode):
    operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        return func(*args, **(kwargs or {}))


def count_operations(args, method):
    """Operations per iteration: a run of four minus a run of two, so that the set-up cancels.

    On the smallest images, because the number of operations does not depend on their size.
    """
    totals, small = [], argparse.Namespace(**vars(args) | {"image_size": 8})
    for iters in (2, 4):
        with OperationCounter() as counter:
            time_iterations(small, method, iters)
        totals.append(counter.operations)
    return (totals[1] - totals[0]) / 2


def bare_passes(args):
    """A function that makes the network passes of an L2AC iteration and nothing else."""
    model = models.build(args.model, 10).to(memory_format=torch.channels_last)
    b, size = args.batch_size, args.image_size
    rows, weak, balanced = (torch.randn(n, 3, size, size).to(memory_format=torch.channels_last)
                            for n in (3 * b, b, b))
    y = torch.randint(10, (3 * b,))

    def passes():
        with torch.no_grad(), models.frozen_bn_stats(model):
            model(weak)
            model(balanced)
        F.cross_entropy(model(rows), y).backward()
        model.zero_grad()
    return passes


def pil_pipeline(size):
    """The steps of augment.strong, one image at a time: torchvision on PIL images."""
    steps = transforms.Compose([
        transforms.RandAugment(3, 4), transforms.RandomCrop(size, padding=size // 8),
        transforms.RandomHorizontalFlip(), transforms.ToTensor(),
        transforms.Normalize((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))])

    def strong_view(array):                              # (H, W, 3) uint8
        x = steps(Image.fromarray(array))
        top, left = np.random.randint(size, size=2)
        x[:, max(0, top - size // 4):top + size // 4, max(0, left - size // 4):left + size // 4] = 0
        return x
    return strong_view


def seconds(function):
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def measure_costs(args):
    """{candidate: list of seconds}; the candidates take turns."""
    times = defaultdict(list)
    size, count = args.image_size, 2 * args.batch_size
    images = np.random.default_rng(0).integers(0, 256, (count, size, size, 3), np.uint8)
    batch = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
    normalise = augment.Normalise((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    strong_view, passes = pil_pipeline(size), bare_passes(args)
    passes()                                             # warm-up
    for turn in range(args.rounds):
        for method in MAINS:
            times[method] += time_iterations(args, method, 1 + args.iters)
            times["bare"] += [seconds(passes) for _ in range(args.iters)]
        for i in range(20):
            g = data.rng(turn, "bench", i)
            times["strong"].append(seconds(partial(augment.strong, batch, g, normalise)))
        times["pil"] += [seconds(lambda: [strong_view(x) for x in images]) for _ in range(5)]
    return times


def peak_memory(args, method):
    """MB, in a process of its own.

    malloc is told to return freed blocks of over 1 MB to the system; otherwise the peak would
    depend on how it happens to reuse memory.
    """
    with tempfile.TemporaryDirectory() as out:
        script = "scripts.full_unroll" if method == "full_unroll" else "train_fixmatch"
        subprocess.run([sys.executable, "-m", script, *training_flags(args, method, 2, out)],
                       check=True, stdout=subprocess.DEVNULL, cwd=Path(__file__).parent.parent,
                       env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20)})
        return json.loads((Path(out) / "result.json").read_text())["peak_memory_mb"]


# ---------------------------------------------------------------------------------------------
# all methods on FixMatch

COMPARED = (*SEMI_SUPERVISED, "l2ac", "full_unroll")
COUNTS = {10: (1500, 3000, 100), 100: (150, 300, 10)}    # N_1, M_1, gamma of the paper


def noise_dataset(folder, num_classes, size):
    """Write an .npz of noise with the paper's numbers of images; the flags that split it."""
    n1, m1, gamma = COUNTS[num_classes]
    counts = np.add(data.class_counts(n1, num_classes, gamma),
                    data.class_counts(m1, num_classes, gamma))
    y, g = np.repeat(np.arange(num_classes), counts), np.random.default_rng(0)
    x = g.integers(0, 256, (len(y), size, size, 3), np.uint8)
    path = f"{folder}/noise{num_classes}.npz"
    np.savez(path, x_train=x, y_train=y, x_test=x[:9], y_test=y[:9])
    return f"--dataset {path} --n1 {n1} --m1 {m1} --gamma_l {gamma} --gamma_u {gamma}".split()


def refinement_seconds(num_classes):
    """Seconds per iteration that DARP spends on refinement: one refinement at the paper's size, on
    predictions as varied as in the middle of a run, divided by the iterations between two."""
    n1, m1, gamma = COUNTS[num_classes]
    total = sum(data.class_counts(m1, num_classes, gamma))
    counts = torch.tensor(data.class_counts(n1, num_classes, gamma), dtype=torch.float64)
    g = torch.Generator().manual_seed(0)
    Q = (3 * torch.randn(total, num_classes, generator=g)).softmax(1)
    outer, period = (10, 10) if num_classes == 10 else (20, 100)
    t = darp.due_numbers(counts, total)
    return min(seconds(lambda: darp.refined(Q, t, outer)) for _ in range(3)) / period


def measure_rivals(args):
    """{(method, K): seconds per iteration}; the methods take turns.

    The minimum over iterations: the methods differ by less than iterations of one method do.
    """
    times = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        split = {K: noise_dataset(folder, K, args.image_size) for K in COUNTS}
        for turn, K, method in itertools.product(range(args.rounds), COUNTS, COMPARED):
            if turn and method == "full_unroll":
                continue                                 # four times as slow; once is enough
            # DARP refines in the first iteration (not timed), DASO blends from the start, and CReST
            # does not end a generation, which happens four times in a whole run.
            more = {"darp": "--darp_warm 0 --darp_period 999", "daso": "--daso_start 0",
                    "crest": "--crest_generations 1", "crest+": "--crest_generations 1"}
            times[method, K] += time_iterations(args, method, 1 + args.iters,
                                                [*more.get(method, "").split(), *split[K]])
    return {(method, K): min(t) + (refinement_seconds(K) if method == "darp" else 0)
            for (method, K), t in times.items()}


def rivals_table(args, r):
    lines = [f"{args.model}, batch {args.batch_size}, {args.image_size} px, one thread, "
             f"fastest of {args.rounds * args.iters} iterations (full_unroll: {args.iters}), "
             f"on FixMatch",
             f"{'':<12}{'s/it, K=10':>12}{'/ none':>8}{'s/it, K=100':>13}{'/ none':>8}"]
    for m in COMPARED:
        lines.append(f"{m:<12}{r[m, 10]:>12.3f}{r[m, 10] / r['none', 10]:>8.2f}"
                     f"{r[m, 100]:>13.3f}{r[m, 100] / r['none', 100]:>8.2f}")
    return "\n".join(lines)


def cost_table(args, r):
    lines = [f"{args.model}, batch {args.batch_size}, {args.image_size} px, one thread, "
             f"torch {torch.__version__}, median of {args.rounds * args.iters} iterations",
             f"{'':<14}{'s/iteration':>12}{'/ none':>8}{'operations':>12}{'peak MB':>9}"]
    for m in MAINS:
        lines.append(f"{m:<14}{r[m]:>12.3f}{r[m] / r['none']:>8.2f}{r[f'ops_{m}']:>12.0f}"
                     f"{r[f'memory_{m}']:>9.0f}")
    lines.append(f"{'bare passes':<14}{r['bare']:>12.3f}{r['bare'] / r['none']:>8.2f}")
    lines.append(f"l2ac / bare passes {r['l2ac'] / r['bare']:.3f}")
    lines.append(f"strong views {r['strong_per_s']:.0f} images/s, torchvision on PIL images "
                 f"{r['pil_per_s']:.0f}: {r['strong_per_s'] / r['pil_per_s']:.1f} times")
    return "\n".join(lines)


def main(argv=None):
    p = config.Parser(description=config.title(__doc__), allow_abbrev=False)
    p.add_argument("--model", default="wrn-28-2")
    p.add_argument("--batch_size", type=config.number(int, 2), default=64)
    p.add_argument("--image_size", type=config.number(int, 8, 1024), default=32)
    p.add_argument("--rounds", type=config.number(int, 1), default=3, help="turns per candidate")
    p.add_argument("--iters", type=config.number(int, 1), default=2, help="iterations per turn")
    p.add_argument("--rivals", action="store_true",
                   help="all methods on FixMatch, for 10 and for 100 classes")
    p.add_argument("--json", action="store_true")
    args = p.parse_args(argv)
    torch.set_num_threads(1)
    if args.rivals:
        r = measure_rivals(args)
        print(json.dumps({f"{m} {K}": t for (m, K), t in r.items()}) if args.json
              else rivals_table(args, r))
        return
    middle = {name: statistics.median(t) for name, t in measure_costs(args).items()}
    result = {name: middle[name] for name in (*MAINS, "bare")}
    result |= {f"{name}_per_s": 2 * args.batch_size / middle[name] for name in ("strong", "pil")}
    result |= {f"ops_{m}": count_operations(args, m) for m in MAINS}
    result |= {f"memory_{m}": peak_memory(args, m) for m in MAINS}
    print(json.dumps(result) if args.json else cost_table(args, result))


if __name__ == "__main__":
    config.exit_cleanly(main)
