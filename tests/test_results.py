"""results/: what a line says of a run is consistent, and the pages show it."""
import shutil

import numpy as np
import pytest

from scripts import collect, reproduce


def test_every_run_is_there_once_and_consistent():
    lines = collect.read_results()
    assert len({line["command"] for line in lines}) == len(lines)
    for line in lines:
        assert line["command"].endswith(f"--seed {line['seed']}")
        assert line["reported_from"] >= 0.9 * line["iters"]      # one rule for all of them
        assert line["bacc"] == pytest.approx(np.mean(line["recall"]), abs=1e-3)


def test_the_pages_show_the_results(tmp_path, monkeypatch):
    """Collecting nothing changes no line; a new row of a table may come in."""
    pages = [collect.ROOT / "README.md", *collect.ROOT.glob("docs/*.md")]
    before = {page.relative_to(collect.ROOT): page.read_text() for page in pages}
    shutil.copytree(collect.ROOT / "docs", tmp_path / "docs")
    shutil.copy(collect.ROOT / "README.md", tmp_path)
    monkeypatch.setattr(collect, "ROOT", tmp_path)
    reproduce.main(["collect"])
    for page, text in before.items():
        assert set(text.splitlines()) <= set((tmp_path / page).read_text().splitlines())
