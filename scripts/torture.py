"""Kill a run again and again, resume it, and compare the result with that of an undisturbed run.

    python -m scripts.torture                            20 kills of FixMatch + L2AC, some minutes
    python -m scripts.torture --script train_mixmatch    or baselines.train
    python -m scripts.torture --processes 2 --kills 6    under torchrun; one rank is killed

The signal is SIGKILL, which a process cannot handle. It comes in turn while the program starts,
while it trains, and while it writes a checkpoint (as soon as last.pt.<...>.tmp exists; counted as
half-written if that file is left behind). Every tensor of last.pt, every cell of log.csv and every
field of result.json must be the same, except for measured times and memory: CLOCKS.
"""
import csv
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from support import cli, config

CLOCKS = {"seconds", "it_per_s", "sec_per_iter", "peak_memory_mb"}
RUN = ("--dataset synthetic --image_size 8 --model wrn-10-2 --batch_size 8 --iters 120 "
       "--eval_every 3 --threads 1 --device cpu --resume")
MORE = {"train_fixmatch": "--tau 0.2", "train_mixmatch": "", "baselines.train": "--tau 0.2"}
MOMENTS = ("training", "writing", "starting")


def launch_command(args, folder):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
                str(args.processes)] if args.processes > 1 else []
    return [sys.executable, *torchrun, "-m", args.script, *RUN.split(), *MORE[args.script].split(),
            "--out", str(folder)]


def start_run(args, folder, output):
    return subprocess.Popen(launch_command(args, folder), stdout=output, stderr=output,
                            env=os.environ | {"OMP_NUM_THREADS": "1"})


def wait_for(moment, process, folder, g):
    """Return when it is time to kill, or when the run has ended by itself."""
    settings, left = folder / "config.json", half_written(folder)
    stale = written(settings)
    if moment != "starting":
        while process.poll() is None and written(settings) == stale:
            time.sleep(0.01)                             # config.json is written before training
    until = time.time() + g.uniform(0, 5)
    while process.poll() is None and time.time() < until:
        time.sleep(0.001)
    while process.poll() is None and moment == "writing" and half_written(folder) <= left:
        pass


def half_written(folder):
    """Names of the files that are to become last.pt (checkpoint.write)."""
    return {path.name for path in folder.glob("last.pt.*.tmp")}


def written(path):
    """When the file was written, or None if there is none."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def workers(process):
    """Ids of the processes that torchrun has started, or of the process itself."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in children.read_text().split()] or [process.pid]


def kill(args, process, g):
    """Send SIGKILL; seconds until all processes of the run have ended."""
    begin = time.time()
    os.kill(g.choice(workers(process)) if args.processes > 1 else process.pid, signal.SIGKILL)
    process.wait(timeout=120)
    return time.time() - begin


def content(folder):
    """The files that a run has written, parsed."""
    state = torch.load(folder / "last.pt", weights_only=True)
    with open(folder / "log.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    result = json.loads((folder / "result.json").read_text())
    state["config"] = {k: v for k, v in state["config"].items() if k not in config.FREE}
    return {"last.pt": state, "log.csv": rows, "result.json": result}


def differences(a, b, where=""):
    """Paths of the entries in which two nested contents differ, bit for bit, except CLOCKS."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = (a.keys() | b.keys()) - CLOCKS
        return [d for k in keys for d in differences(a.get(k), b.get(k), f"{where}/{k}")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return [d for i, pair in enumerate(zip(a, b, strict=True))
                for d in differences(*pair, f"{where}/{i}")]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        equal = a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
    else:
        equal = a == b or (a != a and b != b)
    return [] if equal else [where]


def torture(args, folder, output):
    """Counter of kills, comparisons and failures."""
    g, happened, runs = random.Random(args.seed), Counter(), 0
    start_run(args, folder / "undisturbed", output).wait()
    undisturbed = content(folder / "undisturbed")
    while happened["kills"] < args.kills or (folder / f"{runs}").exists():
        run = folder / f"{runs}"
        process = start_run(args, run, output)
        if happened["kills"] < args.kills:
            moment = MOMENTS[happened["kills"] % 3]
            wait_for(moment, process, run, g)
            if process.poll() is None:
                took = kill(args, process, g)
                happened.update({"kills": 1, f"kills while {moment}": 1})
                half = moment == "writing" and bool(half_written(run))
                happened["half-written checkpoints"] += half
                happened["longest shutdown, s"] = max(round(took), happened["longest shutdown, s"])
                print(f"kill {happened['kills']}: {moment}, files "
                      f"{sorted(f.name for f in run.glob('*'))}", flush=True)
                continue
        if process.wait() != 0:
            happened["resumes that failed"] += 1
            break
        different = differences(content(run), undisturbed)
        happened.update({"runs compared": 1, "runs that differ": bool(different)})
        print(f"run {runs} is done; it differs in: {different or 'nothing'}", flush=True)
        runs += 1
    return happened


def main(argv=None):
    p = cli.Parser(description=cli.title(__doc__), allow_abbrev=False)
    p.add_argument("--kills", type=cli.number(int, 1), default=20)
    p.add_argument("--script", choices=tuple(MORE), default="train_fixmatch")
    p.add_argument("--processes", type=cli.number(int, 1, 8), default=1)
    p.add_argument("--seed", type=cli.number(int, 0), default=0, help="of the moments")
    args = p.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        output = open(Path(folder) / "output.txt", "w+b")
        happened = torture(args, Path(folder), output)
        if happened["resumes that failed"]:
            print(Path(output.name).read_text()[-2000:], file=sys.stderr)
    print(", ".join(f"{what}: {number}" for what, number in happened.items()))
    return int(bool(happened["runs that differ"] or happened["resumes that failed"]))


if __name__ == "__main__":
    cli.exit_cleanly(main)
