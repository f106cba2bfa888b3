"""results/: what a line says of a run is consistent, and the pages show it."""
import shutil

import numpy as np
import pytest

from scripts import collect, reproduce

LINES = collect.read_results()


def test_every_run_is_there_once():
    assert len({line["command"] for line in LINES}) == len(LINES)
    for line in LINES:
        assert line["command"].endswith(f"--seed {line['seed']}")
        assert line["reported_from"] >= 0.9 * line["iters"]      # one rule for all of them


def test_balanced_accuracy_is_the_mean_of_the_recalls():
    for line in LINES:
        assert line["bacc"] == pytest.approx(np.mean(line["recall"]), abs=1e-3)
        end = np.mean(line["by_tenth"]["recall"][-1])
        assert line["last"]["bacc"] == pytest.approx(end, abs=1e-3)
        assert [len(rows) for rows in line["by_tenth"].values()] == [10] * len(line["by_tenth"])


def test_the_pages_show_the_results(tmp_path, monkeypatch):
    """Collecting nothing changes no line; a new row of a table may come in."""
    pages = [collect.ROOT / "README.md", *collect.ROOT.glob("docs/*.md")]
    (tmp_path / "docs").mkdir()
    for page in pages:
        shutil.copy(page, tmp_path / page.relative_to(collect.ROOT))
    copies = [tmp_path / page.relative_to(collect.ROOT) for page in pages]
    monkeypatch.setattr(collect, "ROOT", tmp_path)
    reproduce.main(["collect"])
    for copy, page in zip(copies, pages, strict=True):
        assert set(page.read_text().splitlines()) <= set(copy.read_text().splitlines())
