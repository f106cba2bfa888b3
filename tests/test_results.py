"""Every number of the README's tables that scripts/reproduce.py does not write stands in results/,
and nothing there is left out. (Of those it writes: test_reproduce.py.)"""
import json
import statistics
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("synthetic", "extra", "long", "lambda_u")
GROUPS = defaultdict(list)                               # (folder, name without seed): results
for path in sorted(p for f in FOLDERS for p in ROOT.glob(f"results/{f}/*.json")):
    GROUPS[path.parent.name, path.stem.rsplit("_s", 1)[0]].append(json.loads(path.read_text()))


def cell(results):
    """bACC / GM, with the standard deviation where there are several seeds."""
    numbers = []
    for key in ("bacc", "gm"):
        values = [r[key] for r in results]
        spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
        numbers.append(f"{statistics.mean(values):.1f}{spread}")
    return " / ".join(numbers)


@pytest.mark.parametrize("key", GROUPS, ids=str)
def test_readme_shows_what_was_measured(key):
    assert cell(GROUPS[key]) in (ROOT / "README.md").read_text()


def test_results_are_of_one_setting_and_of_different_seeds():
    assert {folder for folder, _ in GROUPS} == set(FOLDERS)
    for results in GROUPS.values():
        assert len({r["seed"] for r in results}) == len(results)
    for folder in {key[0] for key in GROUPS}:
        same = {(r["scale"], r["recipe"], r["iters"]) for key, results in GROUPS.items()
                if key[0] == folder for r in results}
        assert len(same) == 1
