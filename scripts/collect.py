"""From finished runs to results/ and to the tables of README.md and docs/.

`python -m scripts.reproduce collect` copies the numbers of finished runs to results/<scale>/, one
file per run. From there it writes results/table_<N>.csv and the Markdown between `<!-- table N -->`
and `<!-- end -->` in README.md or docs/: a clone without runs collects the same tables. Everything
is read and checked (scripts/finished.py) before the first file is written.
"""
import csv
import io
import re
import statistics
import sys
from collections import defaultdict
from pathlib import Path

from scripts import finished, tables
from scripts.tables import BENCH, DOUBTS, SCALES
from support import UserError, checkpoint

ROOT = Path(__file__).parent.parent
RUN = re.compile(r"(.+)_s(0|[1-9][0-9]*)")                # name and seed of a run folder


def warn(sentence):
    print(sentence, file=sys.stderr)


def command_of(scale, name):
    """The command that a run of this name has to come from; None if no cell has that name."""
    run = RUN.fullmatch(name)
    cells = (cell for cells in tables.TABLES.values() for cell in cells)
    cell = run and next((cell for cell in cells if cell.name == run[1]), None)
    return cell and cell.command(scale, int(run[2]))


def new_results(runs, results):
    """{file of results/: content} of the finished runs of the tables."""
    found = {}
    for folder in sorted(p for scale in SCALES for p in Path(runs).glob(f"{scale}/*/")):
        scale, name = folder.parent.name, folder.name
        command = command_of(scale, name)
        if not command:
            continue
        if not (folder / "result.json").exists():
            warn(f"{folder} is not finished and left out; `run` continues it")
            continue
        target, result = results / scale / f"{name}.json", finished.read_run(folder, command)
        tests, stale = finished.read_tests(folder)
        for file in stale:
            warn(f"{file} is older than the run beside it and left out; `run` makes it again")
        found[target] = result | {"tests": tests_before(target, result) | tests}
    if (Path(runs) / BENCH).exists():
        found[results / BENCH] = finished.check_bench(Path(runs) / BENCH)
    return found


def tests_before(target, result):
    """Numbers on imbalanced test sets in results/, where it already holds this very run. They are
    those of its last checkpoint, so that has to be the same."""
    old = finished.read_json(target) if target.exists() else {}
    return old.get("tests", {}) if old.get("last") == result["last"] else {}


def read_results(results, new=None):
    """{(scale, name of the run): {seed: result}}; ("bench", ""): seconds from bench.json.

    new: {file: content} that takes the place of what the files hold
    """
    found, new = defaultdict(dict), new or {}
    there = {p for scale in SCALES for p in results.glob(f"{scale}/*.json")} | new.keys()
    for path in sorted(there - {results / BENCH}):
        scale, command = path.parent.name, command_of(path.parent.name, path.stem)
        if not command:
            warn(f"{path} belongs to no cell of the tables and is left out")
            continue
        result = new[path] if path in new else finished.read_json(path)
        finished.check_copy(path, result, finished.configuration(command))
        name, seed = RUN.fullmatch(path.stem).groups()
        found[scale, name][int(seed)] = result
    if results / BENCH in new or (results / BENCH).exists():
        found["bench", ""] = new.get(results / BENCH) or finished.check_bench(results / BENCH)
    return found


def by_seed(cell, scale, found):
    """{seed: {"bacc": .., "gm": .., "acc": ..}} of a cell."""
    results = found.get((scale, cell.name), {})
    if cell.test:
        return {s: r["tests"][cell.test] for s, r in results.items() if cell.test in r["tests"]}
    return results


def mean_text(values):
    """46.5 ± 0.8 with the standard deviation, or 46.5 if there is one seed."""
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def difference_text(values):
    """**+2.3 ± 0.5** with the standard error, bold beyond two; +2.3 if there is one seed."""
    mean = statistics.mean(values)
    if len(values) == 1:
        return f"{mean:+.1f}"
    error = statistics.stdev(values) / len(values) ** 0.5
    mark = "**" if abs(mean) > max(2 * error, 0.05) else ""      # not where 0.0 is shown
    return f"{mark}{mean:+.1f} ± {error:.1f}{mark}"


def ours(cell, scale, found):
    """Mean ± standard deviation (number of seeds), or "" without a run."""
    if cell.dataset == "bench":
        return cost(cell, found) if scale == "mini" else ""      # is the same at both scales
    results = by_seed(cell, scale, found)
    if not results:
        return ""
    keys = ("bacc", "gm", "acc") if cell.test else ("bacc", "gm")
    text = " / ".join(mean_text([r[key] for r in results.values()]) for key in keys)
    return f"{text} ({len(results)})" + recipe_effect(cell, results, scale, found)


def cost(cell, found):
    """Seconds per iteration, relative to FixMatch with the same number of classes."""
    seconds, key = found.get(("bench", ""), {}), f"{cell.method} {cell.flags}"
    return f"{seconds[key] / seconds[f'none {cell.flags}']:.2f}" if key in seconds else ""


def recipe_effect(cell, results, scale, found):
    """In the table of recipes: the difference to the paper's recipe at the same seeds."""
    if not cell.table.startswith("recipe"):
        return ""
    plain = next(c for c in tables.TABLES[cell.table] if c.column == cell.column)
    base = by_seed(plain, scale, found)
    seeds = sorted(results.keys() & base.keys())
    if cell == plain or not seeds:
        return ""
    effects = [[results[s][key] - base[s][key] for s in seeds] for key in ("bacc", "gm")]
    return "<br>" + " / ".join(map(difference_text, effects))


def cell_text(cell, found):
    """Our number at the scale mini, at full size if it was run, and the paper's in italics."""
    if not cell.runs:
        return cell.paper
    full = ours(cell, "paper", found)
    parts = [ours(cell, "mini", found) or "not run", full and f"full size: {full}",
             cell.paper and f"*{cell.paper}*"]
    return "<br>".join(part for part in parts if part)


def markdown(number, found):
    """The table in Markdown, in parts if it has several datasets."""
    parts, cells = [], tables.TABLES[number]
    for dataset in dict.fromkeys(cell.dataset for cell in cells):
        part = [cell for cell in cells if cell.dataset == dataset]
        columns = list(dict.fromkeys(cell.column for cell in part))
        lines = ["| | " + " | ".join(columns) + " |", "|---|" + "--:|" * len(columns)]
        for i in range(0, len(part), len(columns)):
            row = part[i:i + len(columns)]
            lines.append(f"| {row[0].row} | " + " | ".join(cell_text(c, found) for c in row) + " |")
        parts.append("\n".join(lines))
    marks = sorted(set(re.findall(r"\(([a-z])\)", "".join(parts))))
    return "\n\n".join(parts + [f"({mark}) {DOUBTS[mark]}" for mark in marks])


def as_csv(number, found):
    keys = ("bacc", "gm", "acc")
    out = io.StringIO(newline="")
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(["scale", "dataset", "base", "method", "row", "column", "command", "paper",
                   "seeds", "ours", *keys, *(f"{key}_std" for key in keys),
                   "last_bacc", "last_gm"])
    for scale, cell in ((s, c) for s in SCALES for c in tables.TABLES[number] if c.runs_at(s)):
        results = by_seed(cell, scale, found)
        values = [[r[key] for r in results.values()] for key in keys]
        last = [[] if cell.test else [r["last"][key] for r in results.values()]
                for key in ("bacc", "gm")]
        command = cell.command(scale, "S").split(" --resume")[0]
        judge = f" && python evaluate.py RUN --test {cell.test}" if cell.test else ""
        rows.writerow([scale, cell.dataset, cell.base, cell.method, cell.row.strip("*`"),
                       cell.column, command + judge, cell.paper,
                       " ".join(map(str, results)),
                       ours(cell, scale, found).replace("<br>", ", ") or "not run",
                       *(f"{statistics.mean(v):.2f}" if v else "" for v in values),
                       *(f"{statistics.stdev(v):.2f}" if len(v) > 1 else "" for v in values),
                       *(f"{statistics.mean(v):.2f}" if v else "" for v in last)])
    return out.getvalue()


def block(number):
    return re.compile(rf"(<!-- table {number} -->\n)(.*?)(?=<!-- end -->)", re.S)


def collect(runs, root=ROOT):
    results = root / "results"
    new = new_results(runs, results)
    found = read_results(results, new)
    pages = {path: finished.read_text(path)
             for path in (root / "README.md", *sorted(root.glob("docs/*.md")))}
    files = {path: checkpoint.to_json(content) for path, content in new.items()}
    for number in tables.TABLES:
        files[results / f"table_{number}.csv"] = as_csv(number, found)
        write_table(number, markdown(number, found), pages)
    for path, content in (files | pages).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        checkpoint.write(path, content.encode())
    count = sum(len(seeds) for (scale, _), seeds in found.items() if scale != "bench")
    print(f"{count} runs in {results}; the tables of README.md and docs/ show them")


def write_table(number, table, pages):
    """Put a table into its place. pages: {path: text}"""
    for path, text in pages.items():
        if place := block(number).search(text):
            begin, end = place.span(2)
            pages[path] = f"{text[:begin]}{table}\n{text[end:]}"
            return
    raise UserError(f"neither README.md nor docs/ has a place for table {number}; put the lines "
                    f"<!-- table {number} --> and <!-- end --> there")
