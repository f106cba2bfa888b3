"""The tables' commands, and the way of a run from its folder to a cell."""
import csv
import json
import shlex

import numpy as np
import pytest
from scipy import stats

import train_fixmatch
from scripts import collect, report, reproduce
from scripts.tables import SCALES, TABLES, Cell

SETTINGS = {  # gamma_l, gamma_u, reverse_u
    "gamma 100": (100, 100, False), "gamma 150": (150, 150, False), "gamma_u 1": (100, 1, False),
    "gamma_u 100 reversed": (100, 100, True)}
ON_DIGITS = {"gamma 5": (5, 5, False), "gamma 10": (10, 10, False), "gamma_u 1": (5, 1, False),
             "gamma_u 5 reversed": (5, 5, True)}
ON_SIGNS = {"natural tail": (None, None, False), "gamma_u 1": (12.5, 1, False)}


@pytest.mark.parametrize("scale", SCALES)
def test_commands_mean_what_their_cells_say(scale):
    for cell in (cell for cells in TABLES.values() for cell in cells if cell.runs_at(scale)):
        cfg = collect.configuration(cell.command(scale, 3))
        assert (cfg["base"], cfg["method"], cfg["dataset"], cfg["scale"], cfg["seed"]) == (
            cell.base, cell.method, cell.dataset, scale, 3)
        settings = {"digits": ON_DIGITS, "gtsrb": ON_SIGNS}.get(cell.dataset, SETTINGS)
        column = cell.column.removeprefix("step, ")
        if column in settings:
            gamma_l, gamma_u, reverse_u = settings[column]
            assert cfg["gamma_l"] == gamma_l
            if cell.base != "supervised" or cell.method == "upper_bound":
                assert (cfg["gamma_u"], cfg["reverse_u"]) == (gamma_u, reverse_u)
            if cell.method in ("darp", "darp_crt"):      # told the distribution where it is known
                assert cfg["darp_estimate"] == (gamma_l != gamma_u or reverse_u)
        assert (cfg["imbalance"] == "step") == cell.column.startswith("step")
        assert cfg.get("attractor_start") == "prior" or "prior" not in cell.row
        assert cfg.get("attractor") == "vector" or "vector" not in cell.row
        soft = "soft" in cell.row or cell.method == "cdmad" and "hard" not in cell.row
        assert cfg.get("labels") in (None, "soft" if soft else "hard")       # MixMatch has none


def listed(capsys, *flags):
    reproduce.main(["list", *flags])
    return capsys.readouterr().out.splitlines()


def test_list(capsys):
    """Each run once and in a folder of its own; with --missing those that results/ lacks."""
    every = listed(capsys, "--seeds", "2")
    assert len({shlex.split(line)[-1] for line in every}) == len(set(every)) == len(every)
    missing = listed(capsys, "--seeds", "2", "--missing")
    held = {line["command"] for line in collect.read_results() if line["seed"] == 2}
    assert missing == [c for c in every if c.split(" --resume")[0] not in held] and held
    few = listed(capsys, "--table", "5-digits", "--method", "single_level", "l2ac", "--seeds", "2")
    assert len(few) == 4 and set(few) < set(every)       # two methods in two settings


FLAGS = "--gamma_l 5 --gamma_u 5 --iters 10 --eval_every 1 --batch_size 4 --tau 0.1"
PLAIN, TEST, PRIOR = (Cell("own", "", "", "fixmatch", "l2ac", "digits", FLAGS + more, "", test)
                      for more, test in (("", ""), ("", "longtail"),
                                         (" --attractor_start prior", "")))


@pytest.fixture
def own_cells(tmp_path, monkeypatch):
    monkeypatch.setattr(collect, "CELLS", [PRIOR, PLAIN, TEST])
    monkeypatch.setattr(collect, "RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()
    yield tmp_path
    collect.read_results.cache_clear()


def gather(folder):
    collect.collect(folder / "runs")
    collect.read_results.cache_clear()
    return [collect.runs_of(cell) for cell in (PLAIN, TEST, PRIOR)]


def test_a_run_is_filed_under_its_configuration(own_cells):
    """The folder's name says nothing."""
    folder = own_cells / "runs" / "deep" / "digits_fixmatch_none_s7"
    train_fixmatch.main([*shlex.split(PLAIN.command("mini", 1))[2:], "--out", str(folder)])
    plain, test, prior = gather(own_cells)
    line, result = plain[1], json.loads((folder / "result.json").read_text())
    assert plain.keys() == test.keys() == {1} and not prior
    assert (line["bacc"], line["gm"], line["acc"]) == (result["bacc"], result["gm"], result["acc"])
    assert line["recall"] == pytest.approx(result["recall"], abs=1e-4)
    assert 0 < line["tests"]["longtail"]["acc"] <= 100
    rows = list(csv.DictReader((folder / "log.csv").open()))
    assert [int(row["iter"]) for row in rows] == list(range(line["reported_from"], 11))
    for name in ("recall", "kept", "bias"):
        expected = [np.mean([float(row[f"{name}_{k}"]) for row in rows]) for k in range(10)]
        assert line[name] == pytest.approx(expected, abs=1e-4)

    cfg = json.loads((folder / "config.json").read_text())

    def with_config(changed):
        (folder / "config.json").write_text(json.dumps(changed))
        for path in collect.RESULTS.iterdir():
            path.unlink()
        return [set(found) for found in gather(own_cells)]
    older = {key: value for key, value in cfg.items() if key not in ("attractor_start", "pool")}
    assert with_config(older) == [{1}, {1}, set()]       # a flag that it lacks has its default
    assert with_config(cfg | {"attractor_start": "prior"}) == [set(), set(), {1}]
    assert with_config(cfg | {"lr": 0.5}) == with_config(cfg | {"iters": 40}) == [set()] * 3

    with_config(cfg)
    other = line | {"command": PLAIN.command("mini", 2), "seed": 2}
    (collect.RESULTS / "digits.jsonl").write_text(f"{json.dumps(line)}\n{json.dumps(other)}\n")
    (folder / "result.json").write_text(json.dumps(result | {"bacc": 12.5}))
    found, *_ = gather(own_cells)                        # a newer run of the same command
    assert (found[1]["bacc"], found[2]["bacc"]) == (12.5, line["bacc"])
    assert len(collect.read_results()) == 2


def test_right_is_the_share_of_all_labels_that_count():
    """A class without a label in an evaluation says nothing there: 3 of 4 are right."""
    rows = [{"recall_0": "9", "recall_1": "9", "kept_0": kept, "kept_1": "0", "right_0": right}
            for kept, right in (("0.3", "0.6666667"), ("0", "nan"), ("0.1", "1"))]
    found = collect.by_class(rows)
    assert found["kept"] == pytest.approx([0.4 / 3, 0])
    assert found["right"] == pytest.approx([0.75, np.nan], nan_ok=True)


def test_quantiles():
    assert stats.t.ppf(0.975, range(1, 10)) == pytest.approx(report.T_95, abs=5e-4)
