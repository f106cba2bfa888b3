"""The paper's tables: every cell has a command that works, `run` does what is not done yet,
`collect` computes means over seeds, and the README has the tables that it writes."""
import csv
import fcntl
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, checkpoint, exit_of, wait_for

import data
import train_fixmatch
import train_mixmatch
from baselines import train as baselines
from scripts import collect, reproduce, tables
from support import UserError, config
from support import checkpoint as checkpoints

MAINS = {"train_fixmatch.py": train_fixmatch.main, "train_mixmatch.py": train_mixmatch.main,
         "baselines.train": baselines.main}


def test_collect_leaves_the_committed_tables_as_they_are(tmp_path):
    """README.md, docs/ and results/*.csv are what collect makes of results/, so no cell is out of
    date."""
    shutil.copytree(ROOT / "results", tmp_path / "results")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "README.md", tmp_path)
    collect.collect(tmp_path / "no runs", tmp_path)
    pages = ["README.md", *(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))]
    for page in pages:
        assert (tmp_path / page).read_text() == (ROOT / page).read_text(), page
    text = "\n".join((tmp_path / page).read_text() for page in pages)
    for number in tables.TABLES:
        assert len(collect.block(number).findall(text)) == 1, number
    for path in (tmp_path / "results").glob("*.csv"):
        assert path.read_text() == (ROOT / "results" / path.name).read_text(), path.name


SETTINGS = {"gamma 100": (100, 100, False), "gamma 150": (150, 150, False),
            "gamma_u 1": (100, 1, False), "gamma_u 100 reversed": (100, 100, True)}
ON_DIGITS = {"gamma 5": (5, 5, False), "gamma 10": (10, 10, False), "gamma_u 1": (5, 1, False),
             "gamma_u 5 reversed": (5, 5, True)}


def setting(result):
    return result["gamma_l"], result["gamma_u"], result["reverse_u"]


def test_results_are_what_their_names_say():
    """One protocol for all of results/mini, and one recipe except in the table of recipes."""
    paths = list(ROOT.glob("results/mini/*.json"))
    assert paths
    cells = [cell for cells in tables.TABLES.values() for cell in cells]
    for path in paths:
        result, (name, seed) = json.loads(path.read_text()), path.stem.rsplit("_s", 1)
        assert result["seed"] == int(seed)
        own = [cell for cell in cells if cell.name == name]
        two_stages = own[0].method in ("crt", "darp_crt")
        assert result["iters"] == {"cifar10": 2000, "digits": 1200}[own[0].dataset] or two_stages
        assert result["judged_from"] >= 0.9 * result["iters"] and result["evaluations"] == 20
        settings = ON_DIGITS if own[0].dataset == "digits" else SETTINGS
        for cell in own:
            assert (result["base"], result["method"], result["dataset"], result["scale"]) == (
                cell.base, cell.method, cell.dataset, "mini")
            assert result["recipe"] == ("official" if "official" in cell.flags else "paper")
            if cell.base == "supervised":
                assert result["gamma_l"] == settings[cell.column][0]
            elif cell.column in settings:
                assert setting(result) == settings[cell.column]
            if cell.table == "4":
                assert cell.column == f"CIFAR-10, beta {100 * result['beta']:.0f} %"
            if cell.table == "7":
                assert result["imbalance"] == "step"
                assert setting(result) == settings[cell.column.removeprefix("step, ")]


def test_the_miniature_tables_are_filled():
    """All methods at one seed; the bases, ABC, LA, L2AC and the ablation at three."""
    found = collect.read_results(ROOT / "results")
    for cell in (c for n in "14567" for c in tables.TABLES[n] if c.runs_at("mini")
                 and c.dataset == "cifar10"):
        three = cell.table == "5" or (cell.table in "16" and cell.base != "supervised" and (
            cell.method in ("none", "abc", "la", "la_all", "l2ac") and "prior" not in cell.flags))
        assert set(collect.by_seed(cell, "mini", found)) >= (set(range(3)) if three else {0}), cell
    for cell in (c for c in tables.TABLES["recipe"] if c.runs_at("mini")):
        assert 0 in collect.by_seed(cell, "mini", found), cell


# ---------------------------------------------------------------------------------------------
# the commands


def training_commands(scale):
    """{command: a cell that needs it}"""
    return {job.command: job.cell for job in reproduce.jobs(tables.TABLES, scale, [0], "runs")
            if job.cell.dataset != "bench"}


def parse(command):
    """The name of the script and its arguments."""
    words = shlex.split(command)
    script = next(word for word in words if word in MAINS)
    return script, words[words.index(script) + 1:]


def configuration(command):
    script, argv = parse(command)
    if script == "baselines.train":
        return baselines.configure(argv)[0]
    return config.read(argv, script.removeprefix("train_").removesuffix(".py"))


SIZES = {"digits": [134] * 10, "cifar10": [5000] * 10, "cifar100": [500] * 100, "stl10": [500] * 10,
         "sun397": [50, 51, 120, 2311] + [200] * 393}      # training images of each class


@pytest.mark.parametrize("scale", tables.SCALES)
@pytest.mark.parametrize("number", [n for n in tables.TABLES if n != "8"])
def test_the_commands_of_a_table(scale, number):
    """Every flag is known, the settings are those of the cell, and the split can be made."""
    chosen = {job.command: job.cell for job in reproduce.jobs([number], scale, [3], "runs")}
    for command, cell in chosen.items():
        cfg, sizes = configuration(command), SIZES[cell.dataset]
        assert (cfg.base, cfg.method, cfg.dataset) == (cell.base, cell.method, cell.dataset)
        assert (cfg.scale, cfg.seed, cfg.resume) == (scale, 3, True)
        assert cfg.recipe == ("official" if "official" in cell.flags else "paper")
        column = cell.column.removeprefix("step, ")
        settings = ON_DIGITS if cell.dataset == "digits" else SETTINGS
        if column in settings and cell.base != "supervised":
            assert (cfg.gamma_l, cfg.gamma_u, cfg.reverse_u) == settings[column], command
        elif column in settings:
            assert cfg.gamma_l == settings[column][0], command
        labels = np.repeat(np.arange(len(sizes)), sizes)
        labels = np.append(labels, np.full(1000 * (cell.dataset == "stl10"), -1))
        names = [f"class {k}" for k in range(len(sizes))]
        labeled, unlabeled = data.split(data.Dataset(None, labels, None, None, names, None, None),
                                        cfg)
        assert set(labels[labeled]) == set(range(len(sizes))) and len(unlabeled) > 0


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory):
    """Noise in the numbers of the real datasets, 8 px."""
    folder, g = tmp_path_factory.mktemp("stand-ins"), np.random.default_rng(0)

    def write(name, classes, per_class, **more):
        y = np.repeat(np.arange(classes), per_class)
        x = g.integers(0, 256, (len(y), 8, 8, 3), np.uint8)
        np.savez(folder / f"{name}.npz", x_train=x, y_train=y, x_test=x[::per_class],
                 y_test=y[::per_class], **more)
    write("cifar10", 10, 5000)
    write("cifar100", 100, 500)
    write("stl10", 10, 500, x_unlabeled=g.integers(0, 256, (1000, 8, 8, 3), np.uint8))
    write("sun397", 397, 6)
    return folder


# one command for each base, method and dataset; of DARP one more, where it estimates
EXAMPLES = {(cell.base, cell.method, cell.dataset, "--darp_estimate" in command): command
            for command, cell in training_commands("paper").items()}


@pytest.mark.slow
@pytest.mark.parametrize("key", EXAMPLES, ids=lambda key: "_".join(map(str, key)))
def test_a_command_trains(key, stand_ins, tmp_path, capsys):
    """As `list` prints it, but one iteration on stand-ins of the data, with a small network."""
    base, method, dataset, _ = key
    script, argv = parse(EXAMPLES[key])
    small = ["--iters", "1", "--model", "wrn-10-1", "--image_size", "8", "--batch_size", "4",
             "--batch_size_u", "4", "--data_dir", str(stand_ins), "--threads", "1", "--out",
             str(tmp_path / "run")]
    one_more = ["--crt_iters", "1"]
    small += {"crest+": ["--crest_generations", "1"], "crt": one_more, "darp_crt": one_more}.get(
        method, [])
    MAINS[script]([*argv, *small])
    assert "bACC" in capsys.readouterr().out
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["base"], result["method"], result["dataset"]) == (base, method, dataset)


def test_every_cell_of_the_paper_has_a_command():
    count = {number: sum(cell.runs for cell in cells) for number, cells in tables.TABLES.items()}
    # table 1: 66 cells of the paper; in 4 settings 7 rows of ours and 4 of what came after
    assert count == {"1": 66 + 28 + 16, "2": 20, "3": 6, "4": 20, "5": 8, "6": 15, "7": 7, "8": 10,
                     "recipe": 23, "1-digits": 66 + 28 + 16, "5-digits": 8, "recipe-digits": 23,
                     "attractor": 8 * (4 + 2), "front": 5 * 4}
    for scale in ("mini", "paper"):
        for command, cell in training_commands(scale).items():
            assert f"--scale {scale}" in command and cell.name in command
    assert len({c.folder("mini", 0) for c in training_commands("mini").values()}) == len(
        training_commands("mini"))                       # different commands, different folders


def test_darp_estimates_exactly_where_the_distributions_differ():
    for cell in (c for cells in tables.TABLES.values() for c in cells
                 if c.method in ("darp", "darp_crt")):
        if cell.dataset in ("cifar10", "cifar100") and cell.runs:
            cfg, _ = baselines.configure(["--base", cell.base, "--method", cell.method, "--dataset",
                                          cell.dataset, *cell.flags.split()])
            assert cfg.darp_estimate == (not config.matched(cfg)), cell
        if cell.dataset == "stl10":
            assert "--darp_estimate" in cell.flags


def test_list_prints_one_command_per_line_with_its_hours(tmp_path, capsys):
    reproduce.main(["list", "--table", "1", "6", "--scale", "paper", "--seeds", "0", "1",
                    "--runs", str(tmp_path)])
    *lines, last = capsys.readouterr().out.splitlines()
    assert all(line.startswith("python ") and "  # about" in line for line in lines)
    assert len(lines) == 2 * (66 + 28 + 16 - 2 * 4) and f"{len(lines)} runs, 0 done" in last
    # supervised methods have no gamma_u: three columns share their runs
    assert sum("evaluate.py" in line for line in lines) == 2 * 5          # the methods of table 6
    cell = next(c for c in tables.TABLES["1"] if (c.base, c.method) == ("mixmatch", "none"))
    folder = write_run(tmp_path, cell, "paper")
    (folder / "result.json").write_text("{}")
    for state in ("  # ERROR: ", "  # done;"):
        reproduce.main(["list", "--table", "1", "--scale", "paper", "--runs", str(tmp_path)])
        marked = [x for x in capsys.readouterr().out.splitlines() if x.startswith("# python")]
        assert len(marked) == 1 and cell.name in marked[0] and state in marked[0]
        write_run(tmp_path, cell, "paper")


def test_hours_follow_the_papers_rate():
    cell = tables.TABLES["1"][0]
    fixmatch = next(c for c in tables.TABLES["1"] if (c.base, c.method) == ("fixmatch", "none"))
    assert reproduce.hours(fixmatch, "paper") == pytest.approx(3.54, abs=0.01)   # 250,000 / 19.6 s
    assert reproduce.hours(cell, "paper") == pytest.approx(3.54 * 64 * 3 / 640, abs=0.01)


# ---------------------------------------------------------------------------------------------
# run



def write_run(runs, cell, scale="mini", seed=0, bacc=40.0, gm=30.0, last=(2, 3)):
    """The files of a finished run, as far as `run` and `collect` read them, with two evaluations
    that count; `last`: by how much the second is above the mean."""
    folder = Path(cell.folder(scale, seed, runs))
    folder.mkdir(parents=True, exist_ok=True)
    cfg = vars(configuration(cell.command(scale, seed, runs)))
    rows = [f"{it},{bacc + sign * last[0]},{gm + sign * last[1]}"
            for it, sign in ((1, 0), (cfg["iters"] - 1, -1), (cfg["iters"], 1))]
    (folder / "log.csv").write_text("\n".join(["iter,bacc,gm", *rows]))
    (folder / "config.json").write_text(json.dumps(cfg | {"dataset_info": {}, "torch": "2"}))
    keys = ("method", "base", "dataset", "gamma_l", "seed", "iters", "scale", "recipe")
    (folder / "result.json").write_text(json.dumps({key: cfg[key] for key in keys} | {
        "bacc": bacc, "gm": gm, "acc": 1.0, "recall": [50.0, None], "evaluations": 2}))
    (folder / "last.pt").touch()
    return folder


SMALL = "--image_size 8 --batch_size 6 --eval_every 2"


def small_cell(flags, **more):
    fields = dict(table="x", row="a", column="b", base="fixmatch", method="none",
                  dataset="synthetic", flags=flags, paper="1 / 2")
    return tables.Cell(**fields | more)


@pytest.fixture
def two_cells(monkeypatch):
    monkeypatch.setattr(tables, "TABLES", {
        "x": [small_cell(f"{SMALL} --iters 4", test="longtail"), small_cell(f"{SMALL} --iters 0")]})


@pytest.mark.slow
def test_run_does_what_is_not_done_and_names_what_fails(two_cells, tmp_path, capsys):
    wanted = reproduce.jobs(["x"], "mini", [0], tmp_path)
    assert [job.done for job in wanted] == [False, False]
    assert reproduce.run_jobs(wanted, 2) == 1
    out = capsys.readouterr().out
    assert "2 of 2 runs to do" in out and "1 failed" in out and "--iters" in out
    assert [job.done for job in wanted] == [True, False]
    judged, trained = wanted[0].folder / "test_longtail.json", wanted[0].folder / "last.pt"
    assert json.loads(judged.read_text())[str(wanted[0].folder)]["acc"] >= 0
    judged.unlink()
    before = trained.stat().st_mtime_ns
    assert reproduce.run_jobs(wanted[:1], 2) == 0 and judged.exists()
    assert before == trained.stat().st_mtime_ns                          # not trained again
    assert reproduce.run_jobs(wanted[:1], 2) == 0
    assert "0 of 1 runs to do" in capsys.readouterr().out


@pytest.mark.slow
def test_a_stopped_run_continues_where_it_was(tmp_path):
    """SIGTERM to `run`: its training saves and ends; the same command finishes it."""
    flags = "--image_size 8 --batch_size 6 --eval_every 20 --iters 400"
    code = ("import sys\nfrom scripts import reproduce, tables\n"
            "cell = tables.Cell('x', 'a', 'b', 'fixmatch', 'none', 'synthetic', "
            f"{flags!r}, '1 / 2')\ntables.TABLES = {{'x': [cell]}}\n"
            f"sys.exit(reproduce.main(['run', '--runs', {str(tmp_path)!r}]))\n")
    command = [sys.executable, "-c", code]
    run = Path(small_cell(flags).folder("mini", 0, tmp_path))
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        wait_for(run / "log.csv", process)
    finally:
        process.terminate()
    assert process.wait(60) == 1 and "continues" in process.stdout.read()
    step = checkpoint(run)["step"]
    assert 0 < step < 400
    time.sleep(1)
    assert checkpoint(run)["step"] == step             # no process trains on in the background
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 0 and "1 of 1 runs to do" in again.stdout
    assert json.loads((run / "result.json").read_text())["iters"] == 400


# ---------------------------------------------------------------------------------------------
# collect


def test_collect_computes_means_over_seeds_and_says_not_run(monkeypatch, tmp_path):
    cells = [small_cell("--n1 9"), small_cell("--n1 8", column="c", paper="N/A"),
             small_cell("--n1 7", row="d"), small_cell("--n1 6", row="d", column="c")]
    monkeypatch.setattr(tables, "TABLES", {"1": cells})
    for i, seed, scale, bacc, gm in ((0, 0, "mini", 40, 10), (0, 1, "mini", 44, 13),
                                     (2, 0, "mini", 30, 20), (0, 0, "paper", 80, 79)):
        write_run(tmp_path / "runs", cells[i], scale, seed, bacc, gm)
    (tmp_path / "results").mkdir()
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- table 1 -->\n<!-- end -->\nafter\n<!-- end -->\n")
    collect.collect(tmp_path / "runs", tmp_path)
    # standard deviations: sqrt(2 * 2^2 / 1) = 2.8, sqrt(2 * 1.5^2 / 1) = 2.1
    assert readme.read_text() == """before
<!-- table 1 -->
| | b | c |
|---|--:|--:|
| a | 42.0 ± 2.8 / 11.5 ± 2.1 (2)<br>full size: 80.0 / 79.0 (1)<br>*1 / 2* | N/A |
| d | 30.0 / 20.0 (1)<br>*1 / 2* | not run<br>*1 / 2* |
<!-- end -->
after
<!-- end -->
"""
    collect.collect(tmp_path / "runs", tmp_path)             # replaces the table
    assert readme.read_text().count("| a |") == 1
    rows = list(csv.DictReader(open(tmp_path / "results/table_1.csv")))
    assert (rows[0]["seeds"], rows[0]["bacc"], rows[0]["gm_std"]) == ("0 1", "42.00", "2.12")
    assert (rows[0]["last_bacc"], rows[0]["last_gm"]) == ("44.00", "14.50")
    assert rows[2]["ours"] == "not run" and rows[2]["bacc"] == ""


@pytest.fixture
def one_cell(monkeypatch, tmp_path):
    """A cell of an imbalanced test set, its finished run, and all files that `collect` writes."""
    cell = small_cell("--n1 9", test="longtail")
    monkeypatch.setattr(tables, "TABLES", {"6": [cell]})
    (tmp_path / "README.md").write_text("<!-- table 6 -->\n<!-- end -->\n")
    return cell, write_run(tmp_path / "runs", cell)


def collect_in(tmp_path):
    """The table that `collect` makes of tmp_path/runs."""
    collect.collect(tmp_path / "runs", tmp_path)
    return (tmp_path / "README.md").read_text()


def judged_numbers(folder, **more):
    return json.dumps({f"runs/mini/{folder.name}": {"bacc": 40, "gm": 30, "acc": 50, "counts": {},
                                                    "kind": "longtail"} | more})


def test_imbalanced_test_sets_belong_to_the_checkpoint_they_were_made_with(one_cell, tmp_path,
                                                                           capsys):
    cell, folder = one_cell
    judged, shown = tables.test_set_file(folder, "longtail"), "40.0 / 30.0 / 50.0 (1)"
    assert "not run" in collect_in(tmp_path) and not capsys.readouterr().err
    judged.write_text(judged_numbers(folder))
    assert reproduce.Job(cell, "mini", 0, tmp_path / "runs").done
    assert shown in collect_in(tmp_path)
    os.utime(judged, (0, 0))                            # the run was trained again, says the clock
    assert shown in collect_in(tmp_path)                # ... but its numbers are those in results/
    assert str(judged) in capsys.readouterr().err and not reproduce.Job(
        cell, "mini", 0, tmp_path / "runs").done
    judged.unlink()
    assert shown in collect_in(tmp_path)
    write_run(tmp_path / "runs", cell, bacc=5)          # another run of that name
    assert "not run" in collect_in(tmp_path)


def changed(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


DAMAGE = {  # what is wrong with the files of a run: what the sentence says
    "another dataset": (lambda f: changed(f / "config.json", dataset="cifar10"), "dataset is"),
    "another flag": (lambda f: changed(f / "config.json", tau=0.5), "tau is 0.5"),
    "another length": (lambda f: changed(f / "config.json", iters=2), "iters is 2"),
    "an older version": (lambda f: (f / "config.json").write_text("{}"), "method is None"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    "a list": (lambda f: (f / "config.json").write_text("[1]"), "config.json is damaged"),
    "nested": (lambda f: (f / "config.json").write_text("[" * 99999), "config.json is damaged"),
    "another seed": (lambda f: changed(f / "result.json", seed=3), "seed is 3"),
    "another gamma": (lambda f: changed(f / "result.json", gamma_l=7), "gamma_l is 7"),
    "too large": (lambda f: changed(f / "result.json", bacc=9999), "bacc is 9999"),
    "negative": (lambda f: changed(f / "result.json", gm=-1), "gm is -1"),
    "nan": (lambda f: changed(f / "result.json", acc=math.nan), "acc is nan"),
    "null": (lambda f: changed(f / "result.json", acc=None), "acc is None"),
    "true": (lambda f: changed(f / "result.json", acc=True), "acc is True"),
    "recalls": (lambda f: changed(f / "result.json", recall=[1e9]), "recall of class 0"),
    "no recalls": (lambda f: changed(f / "result.json", recall=3), "recall is 3"),
    "evaluations": (lambda f: changed(f / "result.json", evaluations=0), "evaluations is 0"),
    "other mean": (lambda f: changed(f / "result.json", bacc=60.0), "different runs"),
    "half": (lambda f: (f / "result.json").write_text('{"ba'), "result.json is damaged"),
    "binary": (lambda f: (f / "result.json").write_bytes(b"\xff\xfe"), "result.json is damaged"),
    "a folder": (lambda f: ((f / "log.csv").unlink(), (f / "log.csv").mkdir()), "cannot be read"),
    "no log": (lambda f: (f / "log.csv").unlink(), "log.csv is missing"),
    "empty log": (lambda f: (f / "log.csv").write_text(""), "not finished"),
    "stopped": (lambda f: (f / "log.csv").write_text("iter,bacc,gm\n4,1,1\n"), "iteration 4 of"),
    "odd log": (lambda f: (f / "log.csv").write_text("iter,bacc,gm\n4,x\n"), "log.csv is damaged"),
    "NUL": (lambda f: (f / "log.csv").write_bytes(b"iter,bacc,gm\n\0,,\n"), "log.csv is damaged"),
    "test": (lambda f: tables.test_set_file(f, "longtail").write_text("{}"), "not of the run"),
    "test of another": (lambda f: tables.test_set_file(f, "longtail").write_text(
        judged_numbers(Path("other_s0"))), "not of the run"),
    "test kind": (lambda f: tables.test_set_file(f, "longtail").write_text(
        judged_numbers(f, kind="random")), "kind is random"),
    "test range": (lambda f: tables.test_set_file(f, "longtail").write_text(
        judged_numbers(f, acc=101)), "acc is 101"),
    "bench": (lambda f: (f.parents[1] / "bench.json").write_text("{"), "bench.json is damaged")}


@pytest.mark.parametrize("what", DAMAGE)
def test_collect_refuses_what_does_not_fit_and_writes_nothing(one_cell, tmp_path, capsys, what):
    """A good run stands first in order, so that a copy would be seen."""
    cell, folder = one_cell
    other = write_run(tmp_path / "runs", cell, seed=1)
    damage, sentence = DAMAGE[what]
    damage(other)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    code, err = exit_of(lambda _: collect_in(tmp_path), [], capsys)
    assert code == 2 and err.count("\n") == 1 and sentence in err
    assert str(other) in err or what == "bench"
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    if not what.startswith(("test", "bench")):             # `run` does not take it for done
        with pytest.raises(UserError, match=re.escape(str(other))):
            reproduce.run_jobs(reproduce.jobs(["6"], "mini", [0, 1], tmp_path / "runs"), 1)


def test_files_of_results_are_checked_when_tables_are_written(one_cell, tmp_path, capsys):
    collect_in(tmp_path)
    file, = (tmp_path / "results/mini").iterdir()
    shutil.rmtree(tmp_path / "runs")
    good = file.read_text()
    for values in (dict(bacc=9999), dict(method="l2ac"), dict(seed=3), dict(last=None),
                   dict(tests={"longtail": {"bacc": -1}}), dict(dataset="cifar10"),
                   dict(judged_from=None), dict(judged_from=0), dict(course=None)):
        file.write_text(json.dumps(json.loads(good) | values))
        code, err = exit_of(lambda _: collect_in(tmp_path), [], capsys)
        assert code == 2 and str(file) in err and err.count("\n") == 1
    file.write_text(good)
    file.with_name("of no cell.json").write_text("{}")
    collect_in(tmp_path)
    assert "of no cell.json belongs to no cell" in capsys.readouterr().err


def test_a_run_that_another_process_holds_is_waited_for(one_cell, tmp_path, capsys, monkeypatch):
    """The other process ends, and its run is finished: nothing to do, and no failure."""
    cell, folder = one_cell
    tables.test_set_file(folder, "longtail").write_text(judged_numbers(folder))
    (folder / "result.json").rename(tmp_path / "later")
    holder = os.open(folder, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)

    def wait(seconds):
        (tmp_path / "later").rename(folder / "result.json")
        os.close(holder)
    monkeypatch.setattr(reproduce.time, "sleep", lambda seconds: seconds and wait(seconds))
    assert reproduce.run_jobs(reproduce.jobs(["6"], "mini", [0], tmp_path / "runs"), 1) == 0
    out = capsys.readouterr().out
    assert f"under way elsewhere, waiting for it: {folder}" in out and "all done" in out


@pytest.mark.slow
def test_a_folder_in_use_is_not_a_failure_of_the_command(two_cells, tmp_path, monkeypatch):
    """The command itself finds the lock taken, between our look and its start."""
    monkeypatch.setattr(reproduce, "in_use", lambda folder: False)
    job, _ = reproduce.jobs(["x"], "mini", [0], tmp_path / "runs")
    checkpoints.lock(job.folder)
    try:
        assert reproduce.Workers(1).execute(job) == reproduce.BUSY
    finally:
        checkpoints.lock(tmp_path)                          # gives the first one back


@pytest.mark.parametrize("argv,named", [
    ("list --jobs 2", "--jobs"), ("collect --scale mini", "--scale"),
    ("collect --seeds 0", "--seeds"), ("run --runs README.md", "--runs")])
def test_flags_without_effect_are_refused(argv, named, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    code, err = exit_of(reproduce.main, argv.split(), capsys)
    assert code == 2 and named in err and err.count("\n") == 1


def test_the_effect_of_a_recipe_is_that_at_the_same_seeds():
    plain, other = tables.TABLES["recipe"][0], tables.TABLES["recipe"][2]
    found = {("mini", plain.name): {s: {"bacc": b, "gm": b - 10} for s, b in ((0, 40), (1, 90))},
             ("mini", other.name): {0: {"bacc": 41.5, "gm": 28}}}
    assert collect.ours(other, "mini", found) == "41.5 / 28.0 (1)<br>+1.5 / -2.0"
    two = found | {("mini", other.name): found["mini", other.name] | {
        1: {"bacc": 92.5, "gm": 86}}}                        # +1.5 and +2.5, -2 and +6
    assert collect.ours(other, "mini", two).endswith("<br>**+2.0 ± 0.5** / +2.0 ± 4.0")


def test_cost_is_relative_to_fixmatch_at_the_same_number_of_classes():
    cell = next(c for c in tables.TABLES["8"] if c.method == "darp" and c.flags == "100")
    assert collect.ours(cell, "mini", {("bench", ""): {"none 10": 1, "none 100": 2,
                                                       "darp 100": 2.5}}) == "1.25"
    assert collect.cell_text(cell, {("bench", ""): {"none 100": 2, "darp 100": 2.5}}) == (
        "1.25<br>*2.61 (7.5 it/s)*")
    for paper in (c.paper for c in tables.TABLES["8"]):                # ratio (rate)
        ratio, rate = paper.removesuffix(" it/s)").split(" (")
        assert float(ratio) == pytest.approx(19.6 / float(rate), abs=0.006)


def test_missing_runs_are_those_that_results_lacks(capsys, monkeypatch):
    """Seed 0 is there, the others are not."""
    cell = next(c for c in tables.TABLES["5-digits"] if c.method == "attractor")
    found = {("mini", cell.name): {0: {}}}
    monkeypatch.setattr(reproduce, "read_results", lambda folder: found)
    reproduce.main("list --table 5-digits --seeds 0 1 2 --missing".split())
    lines = capsys.readouterr().out.splitlines()
    seeds = [line.split("--seed ")[1][0] for line in lines if f"{cell.name}_s" in line]
    assert seeds == ["1", "2"] and lines[-1].startswith("# 23 runs")     # of 4 rows, 2 columns
    assert exit_of(reproduce.main, ["collect", "--missing"], capsys)[0] == 2
