"""The paper's tables: which commands fill them, run those, put ours beside the paper's.

    python -m scripts.reproduce list --scale paper --table 1 --seeds 0 1 2    a command a line
    python -m scripts.reproduce run --scale mini --table 5 --seeds 0 1 2 --jobs 2
    python -m scripts.reproduce collect                 results/*, and the tables of README.md

Tables 1 to 8 are the paper's, `recipe` is ours; scripts/tables.py has their cells. A run that is
finished is not made again, one that was cut off is resumed. Numbers are read from results/ alone,
where `collect` copies what finished runs say, so a clone without runs collects the same tables.
"""
import csv
import io
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import Queue

import torch

import common
from scripts.tables import DOUBTS, TABLES, TEST_SETS

ROOT = Path(__file__).parent.parent
BENCH = "bench.json"                                     # in results/: seconds by method and K

# ---------------------------------------------------------------------------------------------
# what it takes, in hours

MINI = {"supervised": 0.05, "fixmatch": 0.075, "mixmatch": 0.09}   # measured, one core of an EPYC
# At full size: the paper's FixMatch makes 19.6 iterations a second on an RTX 3090, with 640 image
# passes (forward 1, backward 2). Others by their number of passes, by WRN-28-2's 0.214 and
# ResNet-34's 3.67 billion multiplications an image, and by our measured cost of the methods.
PASSES = {"supervised": 192, "fixmatch": 640, "mixmatch": 704}
COST = {"l2ac": 1.10, "abc": 1.2, "daso": 1.15, "darp": 1.05, "sar": 1.05}
SUN397 = 2176 / 640 * 3.67 / 0.214 * 69_300 / 250_000    # batch 128 + 2 x 256 views + 256, in runs


def hours(cell, scale):
    if cell.dataset == "bench":
        return 0.3
    if scale == "mini":
        return MINI[cell.base]
    size = SUN397 if cell.dataset == "sun397" else 1
    return 250_000 / 19.6 / 3600 * PASSES[cell.base] / 640 * COST.get(cell.method, 1) * size


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


def test_file(folder, test):
    return folder / f"test_{test}.json"


def jobs(tables, scale, seeds, runs):
    """One for each different command, in the order of the tables."""
    found = {}
    for cell in (cell for number in tables for cell in TABLES[number] if cell.runs):
        for seed in seeds[:1] if cell.dataset == "bench" else seeds:
            job = Job(cell, scale, seed, runs)
            if job.command in found:
                found[job.command].cells.append(cell)
            else:
                found[job.command] = job
    return list(found.values())


def show(wanted):
    """A command a line, fit for a scheduler; what it is for stands behind the #."""
    for job in wanted:
        line = " && ".join(f"{c} > {output}" if output else c for c, output in job.commands())
        state = "done" if job.done else f"about {job.hours:.2g} h"
        cell = job.cell
        print(f"{line}  # {state}; table {cell.table}, {cell.row.strip('*')}, {cell.column}")
    left = sum(job.hours for job in wanted if not job.done)
    print(f"# {len(wanted)} runs, {sum(job.done for job in wanted)} done, about {left:.3g} h left")


def execute(job, slots, children):
    """The job's commands one after the other; '' or the sentence that says why one failed."""
    slot, gpus = slots.get(), torch.cuda.device_count()
    env = dict(os.environ)
    if gpus > 1:
        env["CUDA_VISIBLE_DEVICES"] = str(slot % gpus)   # untested on CUDA
    if "--threads 1 " in job.command:
        env["OMP_NUM_THREADS"] = "1"                     # evaluate.py too
    print(f"{time.strftime('%H:%M')}  {job.command}", flush=True)
    try:
        for line, output in job.commands():
            if line == job.command and job.result.exists():
                continue                                 # trained; the test sets are missing
            # In a session of its own: Ctrl-C reaches it once, through `run`, and it saves.
            child = subprocess.Popen([sys.executable, *shlex.split(line)[1:]], text=True,
                                     stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                     env=env, start_new_session=True)
            children.append(child)
            printed, errors = child.communicate()
            if child.returncode:
                return f"exit code {child.returncode}: {errors.strip().splitlines()[-1:]}"
            if output:
                output.parent.mkdir(parents=True, exist_ok=True)
                common.write(output, printed.encode())
        return ""
    finally:
        slots.put(slot)


def run(wanted, count):
    """All that is not done, `count` at a time. Ctrl-C and SIGTERM stop them; they save."""
    todo, children, slots, failed = [job for job in wanted if not job.done], [], Queue(), 0
    for slot in range(count):
        slots.put(slot)
    print(f"{len(todo)} of {len(wanted)} runs to do, {count} at a time", flush=True)
    with ThreadPoolExecutor(count) as pool:
        futures = {pool.submit(execute, job, slots, children): job for job in todo}
        try:
            for future in as_completed(futures):
                if future.result():
                    failed += 1
                    print(f"failed: {futures[future].command}\n  {future.result()}", flush=True)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in children:
                child.terminate()                        # no effect on those that have ended
            print("stopped; the same command goes on from here", flush=True)
            return 1
    print(f"{failed} failed" if failed else "all done")
    return 1 if failed else 0


# ---------------------------------------------------------------------------------------------
# collect


def gather(runs, results):
    """Copy what finished runs of the tables say to results/<scale>/."""
    names = {cell.name for cells in TABLES.values() for cell in cells}
    for path in sorted(Path(runs).glob("*/*/result.json")):
        folder = path.parent
        if folder.name.rpartition("_s")[0] in names:
            result = json.loads(path.read_text())
            tests = {t: json.loads(test_file(folder, t).read_text()) for t in TEST_SETS.values()
                     if test_file(folder, t).exists()}
            if tests:                                    # {kind: {folder: numbers}}
                result["tests"] = {t: {k: v for k, v in next(iter(judged.values())).items()
                                       if k != "confusion"} for t, judged in tests.items()}
            target = results / folder.parent.name / f"{folder.name}.json"
            target.parent.mkdir(parents=True, exist_ok=True)
            common.write_json(target, result)
    if (Path(runs) / BENCH).exists():
        common.write(results / BENCH, (Path(runs) / BENCH).read_bytes())


def read(results):
    """{(scale, name of the run): {seed: result}}, and the bench's seconds under ("bench", "")."""
    found = defaultdict(dict)
    for path in sorted(results.glob("*/*_s*.json")):
        name, _, seed = path.stem.rpartition("_s")
        found[path.parent.name, name][int(seed)] = json.loads(path.read_text())
    if (results / BENCH).exists():
        found["bench", ""] = json.loads((results / BENCH).read_text())
    return found


def numbers(cell, scale, found):
    """{seed: {"bacc": .., "gm": .., "acc": ..}} of a cell."""
    by_seed = found.get((scale, cell.name), {})
    if cell.test:
        return {s: r["tests"][cell.test] for s, r in by_seed.items() if cell.test in
                r.get("tests", {})}
    return by_seed


def folded(values, signed=False):
    """46.5 ± 0.8, or 46.5 where there is one seed."""
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{'+' if signed else ''}.1f}{spread}"


def ours(cell, scale, found):
    """Mean ± standard deviation (number of seeds), "" if there is none."""
    if cell.dataset == "bench":
        seconds = found.get(("bench", ""), {})
        key = f"{cell.method} {cell.flags}"
        return f"{seconds[key] / seconds[f'none {cell.flags}']:.2f}" if key in seconds else ""
    by_seed = numbers(cell, scale, found)
    if not by_seed:
        return ""
    keys = ("bacc", "gm", "acc") if cell.test else ("bacc", "gm")
    text = " / ".join(folded([r[key] for r in by_seed.values()]) for key in keys)
    return f"{text} ({len(by_seed)})" + worth(cell, by_seed, scale, found)


def worth(cell, by_seed, scale, found):
    """Of a recipe: how much it differs from the paper's at the same seeds."""
    if cell.table != "recipe":
        return ""
    plain = next(c for c in TABLES["recipe"] if c.column == cell.column)
    base = numbers(plain, scale, found)
    seeds = by_seed.keys() & base.keys()
    if cell == plain or not seeds:
        return ""
    return "<br>" + " / ".join(folded([by_seed[s][key] - base[s][key] for s in seeds], signed=True)
                               for key in ("bacc", "gm"))


def text_of(cell, found):
    """Ours in miniature, ours at full size if it was run, the paper's in italics."""
    if not cell.runs:
        return cell.paper
    full = ours(cell, "paper", found)
    parts = [ours(cell, "mini", found) or "not run", full and f"full size: {full}",
             cell.paper and f"*{cell.paper}*"]
    return "<br>".join(part for part in parts if part)


def markdown(number, found):
    """The table as it stands in the README; one part for each dataset."""
    parts, cells = [], TABLES[number]
    for dataset in dict.fromkeys(cell.dataset for cell in cells):
        part = [cell for cell in cells if cell.dataset == dataset]
        columns = list(dict.fromkeys(cell.column for cell in part))
        lines = ["| | " + " | ".join(columns) + " |", "|---|" + "--:|" * len(columns)]
        for i in range(0, len(part), len(columns)):
            row = part[i:i + len(columns)]
            lines.append(f"| {row[0].row} | " + " | ".join(text_of(c, found) for c in row) + " |")
        parts.append("\n".join(lines))
    marks = sorted({m for cell in cells for m in re.findall(r"\((\w)\)", cell.paper)})
    return "\n\n".join(parts + [f"({mark}) {DOUBTS[mark]}" for mark in marks])


def as_csv(number, found):
    keys = ("bacc", "gm", "acc")
    out = io.StringIO(newline="")
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(["scale", "dataset", "row", "column", "seeds", "command", "paper",
                   *keys, *(f"{key}_std" for key in keys)])
    for scale, cell in ((s, c) for s in ("mini", "paper") for c in TABLES[number] if c.runs):
        by_seed = numbers(cell, scale, found)
        values = [[r[key] for r in by_seed.values()] for key in keys]
        means = (f"{statistics.mean(v):.2f}" if v else "not run" for v in values)
        spreads = (f"{statistics.stdev(v):.2f}" if len(v) > 1 else "" for v in values)
        rows.writerow([scale, cell.dataset, cell.row.strip("*`"), cell.column,
                       " ".join(map(str, by_seed)), cell.command(scale, "S").split(" --resume")[0],
                       cell.paper, *means, *spreads])
    return out.getvalue()


def block(number):
    return re.compile(rf"(<!-- table {number} -->\n).*?(<!-- end -->)", re.S)


def collect(runs, results=ROOT / "results", readme=ROOT / "README.md"):
    gather(runs, results)
    found, text = read(results), readme.read_text()
    for number in TABLES:
        if number != "8":                                # bench.json is its file
            common.write(results / f"table_{number}.csv", as_csv(number, found).encode())
        table = markdown(number, found)
        text = block(number).sub(lambda old: f"{old[1]}{table}\n{old[2]}", text)
    common.write(readme, text.encode())
    count = sum(len(seeds) for (scale, _), seeds in found.items() if scale != "bench")
    print(f"{count} runs in {results}; the tables of {readme} are theirs")


def main(argv=None):
    p = common.Parser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    add = p.add_argument
    add("action", choices=("list", "run", "collect"))
    add("--table", nargs="+", choices=tuple(TABLES), default=tuple(TABLES), metavar="N",
        help=f"{', '.join(TABLES)} (default: all)")
    add("--scale", choices=("mini", "paper"), default="mini", help="(default: mini)")
    add("--seeds", nargs="+", type=common.number(int, 0, 2**31), default=[0], help="(default: 0)")
    add("--jobs", type=common.number(int, 1, 1024), default=1, help="at a time (default: 1)")
    add("--runs", default="runs", help="folder of the run folders (default: runs)")
    args = p.parse_args(argv)
    if args.action == "collect":
        if args.runs != p.get_default("runs") and not Path(args.runs).is_dir():
            p.error(f"--runs {args.runs} is no folder")
        return collect(args.runs)
    wanted = jobs(args.table, args.scale, args.seeds, args.runs)
    if args.action == "list":
        return show(wanted)
    signal.signal(signal.SIGTERM, signal.default_int_handler)            # as Ctrl-C
    return run(wanted, args.jobs)


if __name__ == "__main__":
    common.exit_cleanly(main)
