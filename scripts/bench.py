"""Cost of L2AC: seconds, dispatched operations and memory per iteration; speed of augmentation.

    python -m scripts.bench                 WRN-28-2 at the paper's batch, one thread, some minutes
    python -m scripts.bench --device cuda   the same on a GPU
    python -m scripts.bench --model wrn-10-1 --image_size 16      a quick look
    python -m scripts.bench --rivals        all methods on FixMatch, for 10 and for 100 classes
    python -m scripts.bench --json          seconds per iteration: none, l2ac, full_unroll, bare;
                                            ratio_a_b and its spread_a_b: a's time by b's;
                                            images per second: strong_per_s, pil_per_s;
                                            operations: ops_*; peak memory in MB: memory_*

The iterations are those of train_fixmatch.py itself, on synthetic images. The candidates take turns
(scripts/timing.py); a ratio is the median over the rounds of the ratio within a round.
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
from baselines.methods import METHODS
from scripts import full_unroll
from scripts.timing import by_round, repeated, share_memory, spread, take_turns
from support import augment, cli, config

RATIOS = (("l2ac", "none"), ("l2ac", "bare"), ("full_unroll", "none"))
MAINS = {"none": train_fixmatch.main, "l2ac": train_fixmatch.main, "full_unroll": full_unroll.main}


def training_flags(args, method, iters, out):
    text = (f"--dataset synthetic --scale paper --model {args.model} --batch_size "
            f"{args.batch_size} --image_size {args.image_size} --n_strong 2 --device {args.device} "
            f"--threads 1 --iters {iters} --eval_every {iters} --overwrite")
    text += "" if method == "full_unroll" else f" --method {method}"
    return [*text.split(), "--out", out]


class Enough(Exception):
    """Ends a run from within its on_step."""


def training(args, method, iters, more=()):
    """A function of on_step: the first iterations of a training run."""
    def run(on_step):
        def stop_in_time(step, losses):
            on_step()
            if step + 1 == iters:
                raise Enough                             # before the evaluation
        main = MAINS.get(method, baselines.main)
        with tempfile.TemporaryDirectory() as out, contextlib.suppress(Enough):
            main([*training_flags(args, method, iters, out), *more], stop_in_time)
    return run


class OperationCounter(TorchDispatchMode):
    operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        return func(*args, **(kwargs or {}))


def count_operations(args, method):
    """Operations per iteration: a run of four minus a run of two, so that the set-up cancels.

    On the smallest images, because the number of operations does not depend on their size.
    """
    totals, small = [], argparse.Namespace(**vars(args) | {"image_size": 8, "device": "cpu"})
    for iters in (2, 4):
        with OperationCounter() as counter, contextlib.redirect_stdout(io.StringIO()):
            training(small, method, iters)(lambda: None)
        totals.append(counter.operations)
    return (totals[1] - totals[0]) / 2


def bare_passes(args):
    """A function that makes the network passes of an L2AC iteration and nothing else."""
    model = models.build(args.model, 10).to(args.device, memory_format=torch.channels_last)
    b, size = args.batch_size, args.image_size
    rows, weak, balanced = (torch.randn(n, 3, size, size, device=args.device).to(
        memory_format=torch.channels_last) for n in (3 * b, b, b))
    y = torch.randint(10, (3 * b,), device=args.device)

    def passes():
        with torch.no_grad(), models.frozen_bn_stats(model):
            model(weak)
            model(balanced)
        torch.autograd.grad(F.cross_entropy(model(rows), y), list(model.parameters()))
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


def measure_costs(args):
    """{candidate: list of seconds}"""
    size, count, n = args.image_size, 2 * args.batch_size, 1 + args.iters
    images = np.random.default_rng(0).integers(0, 256, (count, size, size, 3), np.uint8)
    batch = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous().to(args.device)
    normalise = augment.Normalise((0.5, 0.5, 0.5), (0.25, 0.25, 0.25), args.device)
    strong_view, steps = pil_pipeline(size), itertools.count()
    runs = {method: training(args, method, n) for method in ("none", "l2ac")}
    runs["bare"] = repeated(bare_passes(args), n)
    runs["full_unroll"] = training(args, "full_unroll", min(n, 4))     # four times as slow
    runs["strong"] = repeated(lambda: augment.strong(batch, data.rng(0, "bench", next(steps)),
                                                     normalise), n)
    runs["pil"] = repeated(lambda: [strong_view(x) for x in images], n)
    return take_turns(runs, args.device)


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

COMPARED = (*METHODS["fixmatch"], "l2ac", "full_unroll")
COUNTS = {10: (1500, 3000, 100), 100: (150, 300, 10)}    # N_1, M_1, gamma of the paper
AT_ONCE = 3                                              # each holds the memory of a run, 2 GB


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
    t = darp.labeled_proportions(counts, total)
    times = take_turns({"": repeated(lambda: darp.refined(Q, t, outer), 4)}, "cpu")[""]
    return statistics.median(times) / period


def measure_rivals(args):
    """{(method, K): seconds per iteration}, in rounds of FixMatch and some others"""
    # DARP refines in the first iteration (not timed), DASO blends from the start, and CReST does
    # not end a generation, which happens four times in a whole run. ACR does not yet count classes.
    # darp_crt: the first stage; in the second the network makes one pass without gradients.
    refine = "--darp_warm 0 --darp_period 999"
    more = {"darp": refine, "darp_crt": refine, "daso": "--daso_start 0",
            "crest": "--crest_generations 1", "crest+": "--crest_generations 1"}
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        for K in COUNTS:
            split = noise_dataset(folder, K, args.image_size)
            for i in range(1, len(COMPARED), AT_ONCE):
                chosen = ("none", *COMPARED[i:i + AT_ONCE])
                times = take_turns({
                    method: training(args, method, min(1 + args.iters, 4)
                                     if method == "full_unroll" else 1 + args.iters,
                                     [*more.get(method, "").split(), *split])
                    for method in chosen}, args.device)
                seconds = result.setdefault(("none", K), statistics.median(times["none"]))
                result |= {(method, K): seconds * statistics.median(by_round(t, times["none"]))
                           for method, t in times.items()}
            refining = refinement_seconds(K)
            result |= {(m, K): result[m, K] + refining for m in ("darp", "darp_crt")}
    return result


def describe(args):
    return (f"{args.model}, batch {args.batch_size}, {args.image_size} px, {args.device}, one "
            f"thread, torch {torch.__version__}, median of {args.iters} iterations (full_unroll: "
            f"{min(args.iters, 3)})")


def rivals_table(args, r):
    lines = [f"{describe(args)}, on FixMatch",
             f"{'':<12}{'s/it, K=10':>12}{'/ none':>8}{'s/it, K=100':>13}{'/ none':>8}"]
    for m in COMPARED:
        lines.append(f"{m:<12}{r[m, 10]:>12.3f}{r[m, 10] / r['none', 10]:>8.2f}"
                     f"{r[m, 100]:>13.3f}{r[m, 100] / r['none', 100]:>8.2f}")
    return "\n".join(lines)


def cost_table(args, r):
    """spread: half of the rounds have a ratio within this much of the median"""
    lines = [describe(args), f"{'':<14}{'s/iteration':>12}{'operations':>12}{'peak MB':>9}"]
    for m in (*MAINS, "bare"):
        more = f"{r[f'ops_{m}']:>12.0f}{r[f'memory_{m}']:>9.0f}" if m in MAINS else ""
        lines.append(f"{m:<14}{r[m]:>12.4f}{more}")
    for a, b in RATIOS:
        lines.append(f"{a} / {b}{r[f'ratio_{a}_{b}']:>{26 - len(a + b) - 3}.3f}, spread "
                     f"{r[f'spread_{a}_{b}']:.1%}")
    lines.append(f"strong views {r['strong_per_s']:.0f} images/s, torchvision on PIL images "
                 f"{r['pil_per_s']:.0f}: {r['strong_per_s'] / r['pil_per_s']:.1f} times")
    return "\n".join(lines)


def main(argv=None):
    p = cli.Parser(description=cli.title(__doc__), allow_abbrev=False)
    p.add_argument("--model", default="wrn-28-2")
    p.add_argument("--batch_size", type=cli.number(int, 2), default=64)
    p.add_argument("--image_size", type=cli.number(int, 8, 1024), default=32)
    p.add_argument("--iters", type=cli.number(int, 1), default=20,
                   help="iterations of every candidate (default: 20)")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--rivals", action="store_true",
                   help="all methods on FixMatch, for 10 and for 100 classes")
    p.add_argument("--json", action="store_true")
    args = p.parse_args(argv)
    config.kind_of_device(args.device)               # refuses a GPU that is not there
    torch.set_num_threads(1)
    share_memory()
    if args.rivals:
        r = measure_rivals(args)
        print(json.dumps({f"{m} {K}": t for (m, K), t in r.items()}) if args.json
              else rivals_table(args, r))
        return
    times = measure_costs(args)
    middle = {name: statistics.median(t) for name, t in times.items()}
    result = {name: middle[name] for name in (*MAINS, "bare")}
    for a, b in RATIOS:
        ratios = by_round(times[a], times[b])
        result |= {f"ratio_{a}_{b}": statistics.median(ratios), f"spread_{a}_{b}": spread(ratios)}
    result |= {f"{name}_per_s": 2 * args.batch_size / middle[name] for name in ("strong", "pil")}
    result |= {f"ops_{m}": count_operations(args, m) for m in MAINS}
    result |= {f"memory_{m}": peak_memory(args, m) for m in MAINS}
    print(json.dumps(result) if args.json else cost_table(args, result))


if __name__ == "__main__":
    cli.exit_cleanly(main)
