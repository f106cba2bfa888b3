"""Training on image files: do the background threads keep up, does memory stay bounded?

    python -m scripts.bench_loader                  folders of 2,000 and 20,000 generated pictures
    python -m scripts.bench_loader --counts 200 400 --iters 3 --model wrn-10-1      a quick look

train_fixmatch.py (L2AC, two strong views) trains on each folder in a process of its own, with no
picture kept in memory. Waiting: the share of an iteration spent on waiting for pictures.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

import train_fixmatch
from support import cli, readers


def generate(folder, count, side):
    """PNG files of noise, which hardly compresses: ten classes; a tenth are test pictures."""
    g = np.random.default_rng(0)
    for part, number in (("train", count * 3 // 10), ("unlabeled", count * 6 // 10),
                         ("test", count // 10)):
        for i in range(number):
            place = folder / part / (f"class {i % 10}" if part != "unlabeled" else "")
            place.mkdir(parents=True, exist_ok=True)
            pixels = g.integers(0, 64, (side, side, 3), dtype=np.uint8) + np.uint8(19 * (i % 10))
            Image.fromarray(pixels).save(place / f"{i}.png")


class TimedPictures(readers.Pictures):
    """Pictures that record how long each collection takes."""
    waits = []

    def __getitem__(self, index):
        begin = time.perf_counter()
        rows = super().__getitem__(index)
        self.waits.append(time.perf_counter() - begin)
        return rows


def train_worker(args, folder, out):
    """One run, in a process of its own: writes its seconds per iteration and those of waiting."""
    readers.MEMORY, readers.Pictures = 0, TimedPictures
    times, waits = [], []

    def on_step(step, losses):
        times.append(time.perf_counter())
        waits.append(sum(TimedPictures.waits))
        TimedPictures.waits.clear()

    train_fixmatch.main([
        "--dataset", folder, "--model", args.model, "--batch_size", str(args.batch_size),
        "--image_size", str(args.image_size), "--iters", str(args.iters), "--eval_every",
        str(args.iters), "--device", "cpu", "--threads", "1", "--out", out], on_step)
    seconds = np.diff(times).tolist()                            # without the first iteration
    (Path(out) / "waits.json").write_text(json.dumps([seconds, waits[1:]]))


def measure_folder(args, count, scratch):
    folder, out = Path(scratch) / f"pictures {count}", Path(scratch) / f"run {count}"
    generate(folder, count, args.side)
    command = [sys.executable, "-m", "scripts.bench_loader", "--worker", str(folder), str(out)]
    for flag in ("model", "batch_size", "image_size", "iters"):
        command += [f"--{flag}", str(getattr(args, flag))]
    done = subprocess.run(command, stdout=subprocess.DEVNULL,
                          env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20)})   # see bench.py
    if done.returncode:
        sys.exit(done.returncode)                                # the run has said why
    seconds, waits = json.loads((out / "waits.json").read_text())
    return {"seconds": statistics.median(seconds), "waiting": sum(waits) / sum(seconds),
            "memory": json.loads((out / "result.json").read_text())["peak_memory_mb"]}


def main(argv=None):
    p = cli.Parser(description=cli.title(__doc__), allow_abbrev=False)
    p.add_argument("--counts", type=cli.number(int, 100), nargs="+", default=[2000, 20000])
    p.add_argument("--side", type=cli.number(int, 8), default=64, help="of a picture on file")
    p.add_argument("--model", default="wrn-16-2")
    p.add_argument("--batch_size", type=cli.number(int, 2), default=64)
    p.add_argument("--image_size", type=cli.number(int, 8, 1024), default=32)
    p.add_argument("--iters", type=cli.number(int, 3), default=15)
    p.add_argument("--json", action="store_true")
    p.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    if args.worker:
        return train_worker(args, *args.worker)
    with tempfile.TemporaryDirectory() as scratch:
        results = {count: measure_folder(args, count, scratch) for count in args.counts}
    if args.json:
        return print(json.dumps(results))
    print(f"{args.model}, batch {args.batch_size}, {args.side} px on file, {args.image_size} px in "
          f"the network, one thread, {args.iters - 1} iterations\n"
          f"{'pictures':>10}{'s/iteration':>13}{'waiting':>9}{'peak MB':>9}")
    for count, r in results.items():
        print(f"{count:>10}{r['seconds']:>13.3f}{r['waiting']:>9.1%}{r['memory']:>9.0f}")
    memory = [r["memory"] for r in results.values()]
    print(f"peak memory, largest / smallest: {max(memory) / min(memory):.2f}")


if __name__ == "__main__":
    cli.exit_cleanly(main)
