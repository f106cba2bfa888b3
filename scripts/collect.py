"""From finished runs to results/*.jsonl, and from there to the tables of README.md and docs/.

A line is a run: its command, what it reports, `tests` (imbalanced test sets), and by class `labels`
and `unlabeled` (numbers of images), `recall`, `kept` (share of the unlabeled images that count with
this label), `right` (share of these that have it) and `bias` (what the attractor adds): means over
the reported evaluations. recipes.jsonl and other.jsonl hold runs of flags and rules that are gone.
"""
import csv
import json
import re
import shlex
from functools import lru_cache
from pathlib import Path

import numpy as np

import evaluate
import train_fixmatch
import train_mixmatch
from baselines import train as baselines
from scripts.tables import SCALES, TABLES
from support import UserError, config
from support.finished import FinishedRun

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
CELLS = [cell for cells in TABLES.values() for cell in cells]


def file_of(dataset, scale):
    return RESULTS / ("digits.jsonl" if dataset == "digits" else f"{dataset}_{scale}.jsonl")


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@lru_cache
def read_results():
    """The lines of all runs that tables are written from."""
    paths = sorted({file_of(cell.dataset, scale) for cell in CELLS for scale in SCALES})
    return [line for path in paths for line in read_lines(path)]


def runs_of(cell, scale="mini"):
    """{seed: line} of the runs of a cell."""
    command = cell.command(scale, "")                    # it ends with the seed
    return {line["seed"]: line for line in read_results()
            if line["command"] == f"{command}{line['seed']}"
            and (not cell.test or cell.test in line.get("tests", ()))}


@lru_cache(None)
def configuration(command):
    """All flags of a command as its training script reads them; no file is touched."""
    words = shlex.split(command)
    if words[1] == "-m":
        return vars(baselines.configure(words[3:])[0])
    base = words[1].removeprefix("train_").removesuffix(".py")
    script = train_mixmatch if base == "mixmatch" else train_fixmatch
    return vars(config.read(words[2:], base, "", script.flags, script.l2ac_flags))


def belongs(cfg, cell):
    """Whether a cell's command gives the configuration (a dict) of a run. A flag that the run
    lacks, because it is newer, has its default."""
    same = all(cfg[key] == getattr(cell, key) for key in ("base", "method", "dataset"))
    if not (same and cell.runs_at(cfg["scale"])):
        return False
    command = cell.command(cfg["scale"], cfg["seed"])
    wanted, plain = configuration(command), configuration(command.replace(cell.flags, ""))
    return all(cfg.get(key, plain[key]) == value for key, value in wanted.items()
               if key == "iters" or key not in config.FREE)


def by_class(rows):
    """What rows of log.csv say by class, {name: (K,)}: means over the rows."""
    def columns(name):                                   # (rows, K); no right_k if k never counts
        K = sum(column.startswith("recall_") for column in rows[0])
        return np.array([[float(row.get(f"{name}_{k}", "nan")) for k in range(K)] for row in rows])
    means = {"recall": columns("recall").mean(0)}
    if "kept_0" in rows[0]:
        # of all labels that count: a class without one in some evaluation has no share there
        kept, right = columns("kept"), columns("right")
        with np.errstate(invalid="ignore"):
            right = np.where(kept > 0, kept * right, 0).sum(0) / kept.sum(0)
        means |= {"kept": kept.mean(0), "right": right}
    if "bias_0" in rows[0]:
        means |= {"bias": columns("bias").mean(0),
                  "bias_varies": np.mean([float(row["bias_varies"]) for row in rows])}
    return means


def read_run(folder):
    """The line of a finished run, or None if no cell has its configuration."""
    cfg, result = (json.loads((folder / name).read_text())
                   for name in ("config.json", "result.json"))
    cells, count = [cell for cell in CELLS if belongs(cfg, cell)], result["evaluations"]
    if not cells:
        return None
    rows = list(csv.DictReader((folder / "log.csv").read_text().splitlines()))
    line = {"command": cells[0].command(cfg["scale"], cfg["seed"])}
    line |= {key: cfg[key] for key in ("dataset", "base", "method", "scale", "seed", "iters",
                                       "torch", "torchvision", "numpy", "python", "commit")}
    line |= {key: result[key] for key in ("bacc", "gm", "acc", "evaluations")}
    line |= {"reported_from": int(rows[-count]["iter"])}
    line |= {key: cfg["dataset_info"][key] for key in ("labels", "unlabeled")}
    for kind in sorted({cell.test for cell in cells} - {""}):
        _, numbers = evaluate.on_imbalanced(FinishedRun(folder), kind, gamma=10)
        line.setdefault("tests", {})[kind] = {key: numbers[key] for key in ("bacc", "gm", "acc")}
    line |= by_class(rows[-count:])
    return json.loads(json.dumps(line, default=lambda array: array.round(4).tolist()),
                      parse_constant=lambda nan: None)


def collect(runs):
    """File the finished runs below a folder. One replaces an earlier one of the same command."""
    results = sorted(Path(runs).rglob("result.json"))
    if not results:
        raise UserError(f"collect {runs}: no finished run is there; name the folder of the runs")
    for result in results:
        line = read_run(result.parent)
        print(f"{result.parent}: {line['command'] if line else 'belongs to no table'}")
        if line:
            path = file_of(line["dataset"], line["scale"])
            held = {old["command"]: old for old in read_lines(path)}
            path.write_text("".join(json.dumps(kept, separators=(",", ":")) + "\n" for kept in (
                held | {line["command"]: line}).values()))


def ours(cell, scale="mini"):
    """bACC/GM (number of seeds), or "" without a run."""
    numbers = [line["tests"][cell.test] if cell.test else line
               for line in runs_of(cell, scale).values()]
    keys = ("bacc", "gm", "acc") if cell.test else ("bacc", "gm")
    means = [f"{np.mean([n[key] for n in numbers]):.1f}" for key in keys if numbers]
    return f"{'/'.join(means)} ({len(numbers)})" if numbers else ""


def cell_text(cell):
    """Our number at the scale mini, at full size if it was run, and the paper's in italics."""
    if cell.dataset == "bench":                          # relative to FixMatch
        seconds = json.loads((RESULTS / "bench.json").read_text())
        number = seconds[f"{cell.method} {cell.flags}"] / seconds[f"none {cell.flags}"]
        return f"{number:.2f}<br>*{cell.paper}*"
    if not cell.runs_at("mini"):
        return cell.paper
    full = ours(cell, "paper")
    parts = [ours(cell) or "not run", full and f"full size: {full}",
             cell.paper and f"*{cell.paper}*"]
    return "<br>".join(filter(None, parts))


def grid(columns, rows):
    """A table in Markdown. rows: lists of texts, the first of which is a title"""
    lines = [f"| | {' | '.join(columns)} |", "|---|" + "--:|" * len(columns)]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def table_of(cells, text):
    """The rows and columns of one of TABLES; text: a function of a cell. A row without text is left
    out, columns of several datasets are named by them."""
    several, rows = len({cell.dataset for cell in cells}) > 1, {}
    for cell in cells:
        rows.setdefault((cell.base, cell.row), []).append(text(cell))
    columns = dict.fromkeys(cell.title if several else cell.column for cell in cells)
    return grid(columns, [[row, *texts] for (_, row), texts in rows.items() if any(texts)])


def write_pages(tables):
    """Put tables[NAME](), Markdown, between `<!-- table NAME -->` and `<!-- end -->`."""
    place = re.compile(r"(<!-- table (.+?) -->\n).*?(?=<!-- end -->)", re.S)
    for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))):
        text = place.sub(lambda at: f"{at[1]}{tables[at[2]]()}\n", page.read_text(encoding="utf-8"))
        page.write_text(text, encoding="utf-8")
