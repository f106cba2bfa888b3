"""The paper's tables: which commands fill them, run those, put ours beside the paper's.

    python -m scripts.reproduce list --scale paper --table 1 --seeds 0 1 2    a command a line
    python -m scripts.reproduce run --scale mini --table 5 --seeds 0 1 2 --jobs 2
    python -m scripts.reproduce collect                 results/*, and the tables of README.md

Tables 1 to 8 are the paper's, `recipe` is ours; scripts/tables.py has their cells. A run that is
finished is not made again, one that was cut off is resumed. `collect`: see scripts/collect.py.
"""
import os
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import Queue
from threading import Lock

import torch

from scripts import tables
from scripts.collect import collect
from scripts.tables import BENCH, SCALES, test_file
from support import checkpoint, config

# ---------------------------------------------------------------------------------------------
# what it takes, in hours

MINI = {"supervised": 0.05, "fixmatch": 0.075, "mixmatch": 0.09}   # measured, one core of an EPYC
# At full size: the paper's FixMatch makes 19.6 iterations a second on an RTX 3090. Others in
# proportion to their image passes (forward 1, backward 2), to WRN-28-2's 0.214 and ResNet-34's 3.67
# billion multiplications an image, and to what a method adds.
PASSES = {"supervised": 192, "fixmatch": 640, "mixmatch": 704}
PASSES_SUN397 = {"supervised": 384, "fixmatch": 2176}    # batch 128 + 256, two strong views
COST = {"l2ac": 1.10, "single_level": 1.30, "abc": 1.2, "daso": 1.15, "darp": 1.05, "sar": 1.05}


def hours(cell, scale):
    if cell.dataset == "bench":
        return 0.3
    if scale == "mini":
        return MINI[cell.base]
    work = 250_000 * PASSES[cell.base]
    if cell.dataset == "sun397":
        work = 69_300 * PASSES_SUN397[cell.base] * 3.67 / 0.214
    return work * COST.get(cell.method, 1) / 640 / 19.6 / 3600


# ---------------------------------------------------------------------------------------------
# list, run


class Job:
    """One command, and the cells that need it."""

    def __init__(self, cell, scale, seed, runs):
        self.cell, self.cells, self.hours = cell, [cell], hours(cell, scale)
        self.command = cell.command(scale, seed, runs)
        self.folder = Path(cell.folder(scale, seed, runs))
        bench = cell.dataset == "bench"
        self.result = Path(runs) / BENCH if bench else self.folder / "result.json"

    @property
    def tests(self):
        return sorted({cell.test for cell in self.cells} - {""})

    @property
    def done(self):
        return self.result.exists() and all(test_file(self.folder, t).exists() for t in self.tests)

    def commands(self):
        """[(command, file for what it prints or None)]: training, then imbalanced test sets."""
        if self.cell.dataset == "bench":
            return [(self.command, self.result)]
        return [(self.command, None), *((f"python evaluate.py {self.folder} --test {t} --json",
                                         test_file(self.folder, t)) for t in self.tests)]


def jobs(numbers, scale, seeds, runs):
    """One for each different command, in the order of the tables."""
    found = {}
    for cell in (c for number in numbers for c in tables.TABLES[number] if c.runs):
        for seed in seeds[:1] if cell.dataset == "bench" else seeds:
            job = Job(cell, scale, seed, runs)
            if job.command in found:
                found[job.command].cells.append(cell)
            else:
                found[job.command] = job
    return list(found.values())


def to_file(command, output):
    """A shell line. The file appears when the command has ended well: it counts as done then."""
    if output is None:
        return command
    return f"mkdir -p {output.parent} && {command} > {output}.tmp && mv {output}.tmp {output}"


def show(wanted):
    """A command a line, fit for a scheduler; what it is for stands behind the #."""
    for job in wanted:
        line = " && ".join(to_file(*step) for step in job.commands())
        state, cell = f"about {job.hours:.2g} h", job.cell
        if job.done:
            line, state = f"# {line}", "done"
        print(f"{line}  # {state}; table {cell.table}, {cell.row.strip('*')}, {cell.column}")
    left = sum(job.hours for job in wanted if not job.done)
    print(f"# {len(wanted)} runs, {sum(job.done for job in wanted)} done, about {left:.3g} h left")


class Workers:
    """Runs jobs, some at a time; knows the processes under way, so that all can be stopped."""

    def __init__(self, count):
        self.slots, self.children, self.lock, self.stopped = Queue(), [], Lock(), False
        for slot in range(count):
            self.slots.put(slot)

    def environment(self, job, slot):
        env, gpus = dict(os.environ), torch.cuda.device_count()
        if gpus > 1:                                     # one each; untested on CUDA
            visible = env.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
            env["CUDA_VISIBLE_DEVICES"] = visible.split(",")[slot % gpus]
        if "--threads 1 " in job.command:
            env["OMP_NUM_THREADS"] = "1"                 # evaluate.py too
        return env

    def start(self, line, env):
        """A process in a session of its own: Ctrl-C reaches it once, through `stop`, and it saves.
        None after `stop`."""
        with self.lock:
            if self.stopped:
                return None
            child = subprocess.Popen([sys.executable, *shlex.split(line)[1:]], text=True, env=env,
                                     stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                     start_new_session=True)
            self.children.append(child)
            return child

    def stop(self):
        with self.lock:
            self.stopped = True
            for child in self.children:
                child.terminate()                        # no effect on those that have ended

    def execute(self, job):
        """The job's commands one after the other; '' or the sentence that says why one failed."""
        slot = self.slots.get()
        try:
            for line, output in job.commands():
                if line == job.command and job.result.exists():
                    continue                             # trained; the test sets are missing
                child = self.start(line, self.environment(job, slot))
                if child is None:
                    return "stopped"
                print(f"{time.strftime('%H:%M')}  {line}", flush=True)
                printed, errors = child.communicate()
                if child.returncode:
                    last = (errors.strip().splitlines() or ["no message"])[-1]
                    return f"exit code {child.returncode}: {last}"
                if output:
                    output.parent.mkdir(parents=True, exist_ok=True)
                    checkpoint.write(output, printed.encode())
            return ""
        except OSError as error:
            return str(error)
        finally:
            self.slots.put(slot)


def run(wanted, count):
    """All that is not done, `count` at a time. Ctrl-C and SIGTERM stop them; they save."""
    todo, failed = [job for job in wanted if not job.done], 0
    print(f"{len(todo)} of {len(wanted)} runs to do, {count} at a time", flush=True)
    # What is timed runs alone, at the end.
    for part, at_once in (([job for job in todo if job.cell.dataset != "bench"], count),
                          ([job for job in todo if job.cell.dataset == "bench"], 1)):
        workers = Workers(at_once)
        with ThreadPoolExecutor(at_once) as pool:
            try:
                futures = {pool.submit(workers.execute, job): job for job in part}
                for future in as_completed(futures):
                    if future.result():
                        failed += 1
                        print(f"failed: {futures[future].command}\n  {future.result()}", flush=True)
            except KeyboardInterrupt:
                workers.stop()
                pool.shutdown(wait=False, cancel_futures=True)
                print("stopped; the same command goes on from here", flush=True)
                return 1
    print(f"{failed} failed" if failed else "all done")
    return 1 if failed else 0


def main(argv=None):
    p = config.Parser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    add = p.add_argument
    add("action", choices=("list", "run", "collect"))
    every = tuple(tables.TABLES)
    add("--table", nargs="+", choices=every, default=every, metavar="N",
        help=f"{', '.join(every)} (default: all)")
    add("--scale", choices=SCALES, default="mini", help="(default: mini)")
    add("--seeds", nargs="+", type=config.number(int, 0, 2**31), default=[0], help="(default: 0)")
    add("--jobs", type=config.number(int, 1, 1024), default=1, help="at a time (default: 1)")
    add("--runs", default="runs", help="folder of the run folders (default: runs)")
    args = p.parse_args(argv)
    if args.action == "collect":
        unused = [f"--{key}" for key in ("table", "scale", "seeds", "jobs")
                  if getattr(args, key) != p.get_default(key)]
        if unused:
            p.error(f"collect takes all there is; leave out {unused[0]}")
        if args.runs != p.get_default("runs") and not Path(args.runs).is_dir():
            p.error(f"--runs {args.runs} is no folder")
        return collect(args.runs)
    if args.runs != shlex.quote(args.runs):
        p.error(f"--runs {args.runs!r}: commands are lines of a shell, give a name without spaces "
                f"and the like")
    wanted = jobs(args.table, args.scale, args.seeds, args.runs)
    if args.action == "list":
        return show(wanted)
    for end in (signal.SIGTERM, signal.SIGHUP):          # as Ctrl-C
        signal.signal(end, signal.default_int_handler)
    return run(wanted, args.jobs)


if __name__ == "__main__":
    config.exit_cleanly(main)
