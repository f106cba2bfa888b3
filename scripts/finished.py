"""Whether a run folder, or a file of results/, holds what a cell of the tables asks for.

A run is known by what it has recorded, not by the name of its folder: config.json has to be what
the cell's command asks for, result.json has to say the same, log.csv has to end where the run ends
and to have the mean that result.json reports. Nothing here writes.
"""
import csv
import json
import math
import shlex
import statistics
from functools import lru_cache
from pathlib import Path

from baselines import train as baselines
from scripts import tables
from scripts.tables import TEST_SETS, test_set_file
from support import UserError, config

REDO = "delete it and run its command again"
IDENTITY = ("method", "base", "dataset", "seed", "scale", "recipe", "iters")  # in every result.json


@lru_cache(None)
def configuration(command):
    """The flags of a cell's command, complete, as its training script reads them; no file is
    touched. Those of config.FREE do not matter, except the length of the run."""
    words = shlex.split(command)
    if words[1] == "-m":
        cfg, _ = baselines.configure(words[3:])
    else:
        cfg = config.read(words[2:], words[1].removeprefix("train_").removesuffix(".py"))
    return {key: value for key, value in vars(cfg).items()
            if key not in config.FREE or key == "iters"}


# ---------------------------------------------------------------------------------------------
# files that may be damaged


def read_text(path):
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing; run the command of its folder again") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); make it readable") from error
    except ValueError as error:                          # not UTF-8
        raise UserError(f"{path} is damaged; {REDO}") from error


def read_json(path):
    """The dict in a file."""
    try:
        content = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged; {REDO}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged (it holds no named values); {REDO}")
    return content


def is_finite_number(value):
    return type(value) in (int, float) and math.isfinite(value)


def check_percentages(path, numbers, keys):
    for key in keys:
        value = numbers.get(key)
        if not is_finite_number(value) or not 0 <= value <= 100 + 1e-6:    # rounding of a mean
            raise UserError(f"{path}: {key} is {value}, not a percentage; {REDO}")


def check_bench(path):
    """Seconds by method and number of classes, as `scripts.bench --rivals --json` prints them."""
    seconds = read_json(path)
    cells = [cell for cells in tables.TABLES.values() for cell in cells if cell.dataset == "bench"]
    for key in {f"{name} {cell.flags}" for cell in cells for name in ("none", cell.method)}:
        value = seconds.get(key)
        if not is_finite_number(value) or value <= 0:
            raise UserError(f"{path}: the seconds of '{key}' are {value}; {REDO}")
    return seconds


# ---------------------------------------------------------------------------------------------
# runs


def check_result(path, result, expected):
    """A result.json, or its copy in results/, against the flags of the cell's command.

    Files of earlier versions lack some flags: what is recorded has to fit.
    """
    for key in sorted({*IDENTITY} | result.keys() & expected.keys(), key=by_weight):
        if key not in result or result[key] != expected[key]:
            raise does_not_fit(path, key, result.get(key), expected[key])
    check_percentages(path, result, ("bacc", "gm", "acc"))
    recall, count = result.get("recall"), result.get("evaluations")
    if not isinstance(recall, list):
        raise UserError(f"{path}: recall is {recall}, not a list of percentages; {REDO}")
    known = {f"recall of class {k}": r for k, r in enumerate(recall) if r is not None}
    check_percentages(path, known, known)
    if type(count) is not int or count < 1:
        raise UserError(f"{path}: evaluations is {count}, not a number of evaluations; {REDO}")


def check_copy(path, result, expected):
    """A file of results/: a result.json and what `collect` adds to it."""
    check_result(path, result, expected)
    for key in ("last", "tests", "course"):
        if not isinstance(result.get(key), dict):
            raise UserError(f"{path}: {key} is {result.get(key)}; {REDO}")
    check_percentages(path, result["last"], ("bacc", "gm"))
    first = result.get("judged_from")
    if not is_finite_number(first) or first < 0.9 * result["iters"]:
        raise UserError(f"{path}: judged_from is {first}, so its mean is not of the last tenth of "
                        f"the run; {REDO}")
    for kind, numbers in result["tests"].items():
        check_test(path, kind, numbers)


def by_weight(key):
    """An order in which a flag comes before those that follow from it."""
    return IDENTITY.index(key) if key in IDENTITY else len(IDENTITY), key


def does_not_fit(path, key, recorded, expected):
    return UserError(f"{path}: {key} is {recorded}, but the tables need {expected} there; move the "
                     f"run to another folder and run the command of the tables")


def read_run(folder, command):
    """The result.json of a run folder, with excerpts of log.csv, after everything was checked."""
    expected, path = configuration(command), folder / "config.json"
    recorded = read_json(path)
    for key in sorted(expected, key=by_weight):
        if key not in recorded or recorded[key] != expected[key]:
            raise does_not_fit(path, key, recorded.get(key), expected[key])
    result = read_json(folder / "result.json")
    check_result(folder / "result.json", result, expected)
    rows = read_log(folder / "log.csv", result)
    return result | {"last": {key: rows[-1][key] for key in ("bacc", "gm")},
                     "judged_from": int(rows[-result["evaluations"]]["iter"]),
                     "course": course(rows, result)}


def read_log(path, result):
    """The rows of log.csv, as floats; they have to be those of result.json."""
    try:
        rows = [{key: float(value) for key, value in row.items()}
                for row in csv.DictReader(read_text(path).splitlines())]
        if rows and not {"iter", "bacc", "gm"} <= rows[0].keys():
            raise KeyError("a column is missing")
    except (ValueError, TypeError, KeyError, csv.Error) as error:
        raise UserError(f"{path} is damaged; {REDO}") from error
    if not rows or rows[-1]["iter"] != result["iters"]:
        raise UserError(f"{path} ends at iteration {rows[-1]['iter'] if rows else 0:g} of "
                        f"{result['iters']}; the run is not finished, run its command again")
    for row in rows:
        check_percentages(path, row, ("bacc", "gm"))
    for key in ("bacc", "gm"):
        mean = statistics.mean(row[key] for row in rows[-result["evaluations"]:])
        if abs(mean - result[key]) > 0.001:              # the log has six digits
            raise UserError(f"{path}: the mean {key} of the last {result['evaluations']} rows is "
                            f"{mean:.2f}, but result.json says {result[key]:.2f}; they are of "
                            f"different runs, run the command of the folder again")
    return rows


def course(rows, result):
    """Columns of log.csv that are by class, at the end of each tenth of the run and, last, as the
    mean over the evaluations that are reported. {name: [11][K]}, bias_varies: [11]"""
    ends = [next(row for row in rows if row["iter"] >= tenth * result["iters"] / 10)
            for tenth in range(1, 11)]
    judged = rows[-result["evaluations"]:]
    ends.append({key: statistics.mean(row[key] for row in judged) for key in judged[0]})
    for k in range(len(result["recall"]) if "kept_0" in rows[0] else 0):
        # of all labels that count: a class without one in some evaluation has no precision there
        some = [row for row in judged if row[f"kept_{k}"] > 0]
        right = sum(row[f"kept_{k}"] * row[f"precision_{k}"] for row in some)
        kept = sum(row[f"kept_{k}"] for row in some)
        ends[-1][f"precision_{k}"] = right / kept if some else math.nan
    found = {name: [[row[f"{name}_{k}"] for k in range(len(result["recall"]))] for row in ends]
             for name in ("recall", "kept", "precision", "bias") if f"{name}_0" in rows[0]}
    if "bias" in found:
        found["bias_varies"] = [row["bias_varies"] for row in ends]
    return json.loads(json.dumps(found), parse_float=lambda text: round(float(text), 4))


# ---------------------------------------------------------------------------------------------
# imbalanced test sets


def check_test(path, kind, numbers):
    if not isinstance(numbers, dict):
        raise UserError(f"{path} is damaged; {REDO}")
    check_percentages(path, numbers, ("bacc", "gm", "acc"))
    for key, wanted in (("kind", kind), ("gamma_t", 10), ("seed", 0)):    # newer files have them
        if numbers.get(key, wanted) != wanted:
            raise UserError(f"{path}: {key} is {numbers[key]}, but the tables need {wanted}; "
                            f"{REDO}")


def is_stale(file):
    """Whether the run was trained after its numbers on an imbalanced test set were made."""
    trained = next((p for name in ("last.pt", "result.json")
                    if (p := file.with_name(name)).exists()), file)
    return file.stat().st_mtime_ns < trained.stat().st_mtime_ns


def read_tests(folder):
    """({kind: numbers}, [files older than the checkpoint])."""
    files = {kind: test_set_file(folder, kind) for kind in TEST_SETS.values()}
    files = {kind: file for kind, file in files.items() if file.exists()}
    found, stale = {}, [file for file in files.values() if is_stale(file)]
    for kind, file in files.items():
        if file not in stale:
            content = read_json(file)
            if [Path(name).name for name in content] != [folder.name]:
                raise UserError(f"{file} is not of the run beside it; {REDO}")
            found[kind], = content.values()
            check_test(file, kind, found[kind])
    return found, stale
