"""The paper's tables: list the commands that fill them, run these, collect the results.

    python -m scripts.reproduce list --scale paper --table 1 --seeds 0 1 2    one command per line
    python -m scripts.reproduce run --scale mini --table 5 --seeds 0 1 2 --jobs 2
    python -m scripts.reproduce run --table 1-digits --seeds 0 1 2 3 4 --missing    fill the gaps
    python -m scripts.reproduce collect                 results/*, the tables of README.md and docs/

Tables 1 to 8 are the paper's, the others ours; their cells are in scripts/tables.py. Finished runs
are skipped, interrupted ones resumed, those of another process waited for. It is an error if a
folder holds a run other than its command's. `collect` is described in scripts/collect.py.
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

from scripts import finished, tables
from scripts.collect import ROOT, by_seed, collect, cost, read_results
from scripts.tables import BENCH, SCALES, test_set_file
from support import UserError, checkpoint, cli

try:
    import fcntl
except ImportError:                                      # Windows: there a run folder is not locked
    fcntl = None

# ---------------------------------------------------------------------------------------------
# estimated duration in hours

MINI = {"supervised": 0.02, "fixmatch": 0.04, "mixmatch": 0.05}    # measured, one core of an EPYC
# At full size: the paper's FixMatch makes 19.6 iterations per second on an RTX 3090. Others take
# time in proportion to their image passes (forward 1, backward 2), to the multiplications per image
# (WRN-28-2: 0.214 billion, ResNet-34: 3.67) and to the overhead of the method.
PASSES = {"supervised": 192, "fixmatch": 640, "mixmatch": 704}
PASSES_SUN397 = {"supervised": 384, "fixmatch": 2176}    # batch 128 + 256, two strong views
COST = {"l2ac": 1.10, "single_level": 1.30, "abc": 1.2, "daso": 1.15, "darp": 1.05, "sar": 1.05,
        "darp_crt": 1.06}


def hours(cell, scale):
    if cell.dataset == "bench":
        return 0.3
    if scale == "mini":
        return MINI[cell.base] * (0.35 if cell.dataset == "digits" else 1)   # smaller batches
    work = 250_000 * PASSES[cell.base]
    if cell.dataset == "sun397":
        work = 69_300 * PASSES_SUN397[cell.base] * 3.67 / 0.214
    return work * COST.get(cell.method, 1) / 640 / 19.6 / 3600


# ---------------------------------------------------------------------------------------------
# list, run


class Job:
    """One command, and the cells that need it."""

    def __init__(self, cell, scale, seed, runs):
        self.cell, self.cells, self.scale, self.seed = cell, [cell], scale, seed
        self.hours = hours(cell, scale)
        self.command = cell.command(scale, seed, runs)
        self.folder = Path(cell.folder(scale, seed, runs))
        bench = cell.dataset == "bench"
        self.result = Path(runs) / BENCH if bench else self.folder / "result.json"

    @property
    def tests(self):
        return sorted({cell.test for cell in self.cells} - {""})

    def has(self, output):
        """Whether the command with this output need not be called again."""
        file = output or self.result
        return file.exists() and (file == self.result or not finished.is_stale(file))

    @property
    def done(self):
        """Raises UserError where the folder holds another run, or damaged files."""
        if not self.result.exists():
            return False
        if self.cell.dataset == "bench":
            return bool(finished.check_bench(self.result))
        finished.read_run(self.folder, self.command)
        return self.tests == sorted(finished.read_tests(self.folder)[0].keys() & {*self.tests})

    def is_in(self, found):
        """Whether results/ already has it."""
        if self.cell.dataset == "bench":
            return all(cost(cell, found) for cell in self.cells)
        return all(self.seed in by_seed(cell, self.scale, found) for cell in self.cells)

    def commands(self):
        """[(command, file for its output or None)]: training, then imbalanced test sets."""
        if self.cell.dataset == "bench":
            return [(self.command, self.result)]
        return [(self.command, None), *(
            (f"python evaluate.py {self.folder} --test {kind} --json",
             test_set_file(self.folder, kind)) for kind in self.tests)]


def jobs(chosen, scale, seeds, runs):
    """One Job for each different command of the chosen tables, in their order."""
    found = {}
    for cell in (c for number in chosen for c in tables.TABLES[number] if c.runs_at(scale)):
        for seed in seeds[:1] if cell.dataset == "bench" else seeds:
            job = Job(cell, scale, seed, runs)
            if job.command in found:
                found[job.command].cells.append(cell)
            else:
                found[job.command] = job
    return list(found.values())


def to_file(command, output):
    """A shell line. The file appears only if the command succeeds; it then counts as done."""
    if output is None:
        return command
    return f"mkdir -p {output.parent} && {command} > {output}.tmp && mv {output}.tmp {output}"


def print_commands(wanted):
    """One shell line per job, with a comment that says what it is for."""
    left = done = 0
    for job in wanted:
        line = " && ".join(to_file(*step) for step in job.commands())
        state, cell = f"about {job.hours:.2g} h", job.cell
        try:
            if job.done:
                line, state, done = f"# {line}", "done", done + 1
            else:
                left += job.hours
        except UserError as error:
            line, state = f"# {line}", f"ERROR: {error}"
        print(f"{line}  # {state}; table {cell.table}, {cell.row.strip('*')}, {cell.column}")
    print(f"# {len(wanted)} runs, {done} done, about {left:.3g} h left")


BUSY = "under way elsewhere"
WAIT = 10                                                # seconds between looks at such a run


def in_use(folder):
    """Whether another process holds the lock of support/checkpoint.py."""
    if not fcntl or not folder.is_dir():
        return False
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass                                             # a file system without locks
    finally:
        os.close(handle)
    return False


class Workers:
    """Runs up to `count` jobs at a time and can stop all their processes."""

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

    def spawn(self, line, env):
        """Start a process, or return None after `terminate`. It has a session of its own, so that
        Ctrl-C reaches it only through `terminate`; on that signal a training run saves and ends."""
        with self.lock:
            if self.stopped:
                return None
            child = subprocess.Popen([sys.executable, *shlex.split(line)[1:]], text=True, env=env,
                                     stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                     start_new_session=True)
            self.children.append(child)
            return child

    def terminate(self):
        with self.lock:
            self.stopped = True
            for child in self.children:
                child.terminate()                        # no effect on those that have ended

    def execute(self, job):
        """Run the job's commands one after the other; the reason for a failure, '' if none, BUSY
        if another process works on it."""
        slot = self.slots.get()
        try:
            for line, output in job.commands():
                if job.has(output):
                    continue                             # e.g. trained, but test sets are missing
                if output is None and in_use(job.folder):
                    return BUSY
                child = self.spawn(line, self.environment(job, slot))
                if child is None:
                    return "stopped"
                print(f"{time.strftime('%H:%M')}  {line}", flush=True)
                printed, errors = child.communicate()
                if child.returncode:
                    last = (errors.strip().splitlines() or ["no message"])[-1]
                    if child.returncode == 2 and "is in use by another process" in last:
                        return BUSY                      # that process was a little faster
                    return f"exit code {child.returncode}: {last}"
                if output:
                    output.parent.mkdir(parents=True, exist_ok=True)
                    checkpoint.write(output, printed.encode())
            return ""
        except OSError as error:
            return str(error)
        finally:
            self.slots.put(slot)


def run_jobs(wanted, count):
    """Run those that are not done, `count` at a time; Ctrl-C and SIGTERM make them save and end."""
    todo, failed = [job for job in wanted if not job.done], 0
    print(f"{len(todo)} of {len(wanted)} runs to do, {count} at a time", flush=True)
    # The benchmark comes last, alone.
    for part, at_once in (([job for job in todo if job.cell.dataset != "bench"], count),
                          ([job for job in todo if job.cell.dataset == "bench"], 1)):
        workers, told = Workers(at_once), set()
        with ThreadPoolExecutor(at_once) as pool:
            try:
                while part:
                    part, reasons = run_once(part, workers, pool)
                    failed += reasons
                    for job in part:
                        if job.command not in told:
                            print(f"{BUSY}, waiting for it: {job.folder}", flush=True)
                        told.add(job.command)
                    time.sleep(WAIT if part else 0)
            except KeyboardInterrupt:
                workers.terminate()
                pool.shutdown(wait=False, cancel_futures=True)
                print("stopped; the same command continues from here", flush=True)
                return 1
    print(f"{failed} failed" if failed else "all done")
    return 1 if failed else 0


def run_once(part, workers, pool):
    """Each job once. Returns (those that another process works on, number of failures)."""
    busy, failed = [], 0
    futures = {pool.submit(workers.execute, job): job for job in part}
    for future in as_completed(futures):
        job, reason = futures[future], future.result()
        if reason == BUSY:
            busy.append(job)
        elif reason:
            failed += 1
            print(f"failed: {job.command}\n  {reason}", flush=True)
    return busy, failed


def main(argv=None):
    p = cli.Parser(description=cli.title(__doc__), allow_abbrev=False)
    add = p.add_argument
    add("action", choices=("list", "run", "collect"))
    names = tuple(tables.TABLES)
    add("--table", nargs="+", choices=names, metavar="N",
        help=f"{', '.join(names)} (default: all)")
    add("--scale", choices=SCALES, help="(default: mini)")
    add("--seeds", nargs="+", type=cli.number(int, 0, 2**31), help="(default: 0)")
    add("--jobs", type=cli.number(int, 1, 1024), help="of `run`: jobs at a time (default: 1)")
    add("--missing", action="store_true", default=None, help="only runs that results/ lacks")
    add("--runs", help="folder of the run folders (default: runs)")
    args = p.parse_args(argv)
    unused = {"collect": ("table", "scale", "seeds", "jobs", "missing"), "list": ("jobs",),
              "run": ()}
    for key in unused[args.action]:
        if getattr(args, key) is not None:
            p.error(f"--{key} has no effect on {args.action}; leave it out")
    runs = "runs" if args.runs is None else args.runs
    if Path(runs).exists() and not Path(runs).is_dir():
        p.error(f"--runs {runs} is not a folder")
    if args.action == "collect":
        if args.runs is not None and not Path(runs).is_dir():
            p.error(f"--runs {runs} is not a folder")
        return collect(runs)
    if runs != shlex.quote(runs):
        p.error(f"--runs {runs!r}: the commands are shell lines; give a name without spaces "
                f"and other special characters")
    wanted = jobs(args.table or names, args.scale or "mini", args.seeds or [0], runs)
    if args.missing:
        found = read_results(ROOT / "results")
        wanted = [job for job in wanted if not job.is_in(found)]
    if args.action == "list":
        return print_commands(wanted)
    for name in {"SIGTERM", "SIGHUP"} & set(dir(signal)):        # as Ctrl-C; Windows lacks SIGHUP
        signal.signal(getattr(signal, name), signal.default_int_handler)
    return run_jobs(wanted, args.jobs or 1)


if __name__ == "__main__":
    cli.exit_cleanly(main)
