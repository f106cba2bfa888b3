"""From finished runs to results/ and to the tables of README.md.

`python -m scripts.reproduce collect` copies the numbers of finished runs to results/<scale>/, one
file per run. From there it writes results/table_<N>.csv and the Markdown between `<!-- table N -->`
and `<!-- end -->` in the README: a clone without runs collects the same tables.
"""
import csv
import io
import json
import re
import statistics
from collections import defaultdict
from pathlib import Path

from scripts import tables
from scripts.tables import BENCH, DOUBTS, SCALES, TEST_SETS, test_set_file
from support import UserError, checkpoint

ROOT = Path(__file__).parent.parent
RUN = re.compile(r"(.+)_s(\d+)")                          # name and seed of a run folder


def copy_results(runs, results):
    """Copy the numbers of finished runs of the tables to results/<scale>/."""
    names = {cell.name for cells in tables.TABLES.values() for cell in cells}
    for path in sorted(p for s in SCALES for p in Path(runs).glob(f"{s}/*/result.json")):
        run = RUN.fullmatch(path.parent.name)
        if run and run[1] in names:
            target = results / path.parent.parent.name / f"{path.parent.name}.json"
            target.parent.mkdir(parents=True, exist_ok=True)
            result = read_json(path)
            result["tests"] = tests_of(path.parent) or tests_before(target, result)
            result["last"] = last_evaluation(path.parent)
            checkpoint.write_json(target, result)
    if (Path(runs) / BENCH).exists():
        checkpoint.write_json(results / BENCH, read_json(Path(runs) / BENCH))


def read_json(path):
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is damaged; delete it and run its command again") from error


def last_evaluation(folder):
    """bACC and GM at the end of the run; the reported ones are means of 20 evaluations."""
    with open(folder / "log.csv") as file:
        *_, row = csv.DictReader(file)
    return {key: float(row[key]) for key in ("bacc", "gm")}


def tests_of(folder):
    """{kind: numbers} on the imbalanced test sets, unless they are older than the checkpoint."""
    files = {kind: test_set_file(folder, kind) for kind in TEST_SETS.values()}
    return {kind: next(iter(read_json(file).values())) for kind, file in files.items()
            if file.exists() and file.stat().st_mtime_ns >= (folder / "last.pt").stat().st_mtime_ns}


def tests_before(target, result):
    """The same from results/, where it already holds this very run."""
    old = read_json(target) if target.exists() else {}
    same = all(old.get(key) == result[key] for key in ("bacc", "gm"))
    return old.get("tests", {}) if same else {}


def read_results(results):
    """{(scale, name of the run): {seed: result}}; ("bench", ""): seconds from bench.json."""
    found = defaultdict(dict)
    for path in sorted(p for scale in SCALES for p in results.glob(f"{scale}/*.json")):
        name, seed = RUN.fullmatch(path.stem).groups()
        found[path.parent.name, name][int(seed)] = read_json(path)
    if (results / BENCH).exists():
        found["bench", ""] = read_json(results / BENCH)
    return found


def by_seed(cell, scale, found):
    """{seed: {"bacc": .., "gm": .., "acc": ..}} of a cell."""
    results = found.get((scale, cell.name), {})
    if cell.test:
        return {s: r["tests"][cell.test] for s, r in results.items() if cell.test in r["tests"]}
    return results


def mean_text(values, signed=False):
    """46.5 ± 0.8, or 46.5 if there is one seed."""
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{'+' if signed else ''}.1f}{spread}"


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
    if cell.table != "recipe":
        return ""
    plain = next(c for c in tables.TABLES["recipe"] if c.column == cell.column)
    base = by_seed(plain, scale, found)
    seeds = results.keys() & base.keys()
    if cell == plain or not seeds:
        return ""
    effects = [[results[s][key] - base[s][key] for s in seeds] for key in ("bacc", "gm")]
    return "<br>" + " / ".join(mean_text(values, signed=True) for values in effects)


def cell_text(cell, found):
    """Our number at the scale mini, at full size if it was run, and the paper's in italics."""
    if not cell.runs:
        return cell.paper
    full = ours(cell, "paper", found)
    parts = [ours(cell, "mini", found) or "not run", full and f"full size: {full}",
             cell.paper and f"*{cell.paper}*"]
    return "<br>".join(part for part in parts if part)


def markdown(number, found):
    """The table for the README, in parts if it has several datasets."""
    parts, cells = [], tables.TABLES[number]
    for dataset in dict.fromkeys(cell.dataset for cell in cells):
        part = [cell for cell in cells if cell.dataset == dataset]
        columns = list(dict.fromkeys(cell.column for cell in part))
        lines = ["| | " + " | ".join(columns) + " |", "|---|" + "--:|" * len(columns)]
        for i in range(0, len(part), len(columns)):
            row = part[i:i + len(columns)]
            lines.append(f"| {row[0].row} | " + " | ".join(cell_text(c, found) for c in row) + " |")
        parts.append("\n".join(lines))
    marks = sorted({m for cell in cells for m in re.findall(r"\((\w)\)", cell.paper)})
    return "\n\n".join(parts + [f"({mark}) {DOUBTS[mark]}" for mark in marks])


def as_csv(number, found):
    keys = ("bacc", "gm", "acc")
    out = io.StringIO(newline="")
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(["scale", "dataset", "base", "method", "row", "column", "command", "paper",
                   "seeds", "ours", *keys, *(f"{key}_std" for key in keys),
                   "last_bacc", "last_gm"])
    for scale, cell in ((s, c) for s in SCALES for c in tables.TABLES[number] if c.runs):
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


def collect(runs, results=ROOT / "results", readme=ROOT / "README.md"):
    copy_results(runs, results)
    found, text = read_results(results), readme.read_text()
    for number in tables.TABLES:
        checkpoint.write(results / f"table_{number}.csv", as_csv(number, found).encode())
        table = markdown(number, found)
        begin, end = block(number).search(text).span(2)
        text = f"{text[:begin]}{table}\n{text[end:]}"
    checkpoint.write(readme, text.encode())
    count = sum(len(seeds) for (scale, _), seeds in found.items() if scale != "bench")
    print(f"{count} runs in {results}; the tables of {readme} are theirs")
