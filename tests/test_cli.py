"""The command lines as a user meets them: run folders, evaluate, imports.
Wrong input has a file of its own, test_wrong_input.py."""
import ast
import json
import os
import subprocess
import sys
import tarfile
from functools import lru_cache

import numpy as np
import pytest
from conftest import ROOT, TINY, checkpoint, exit_of, files

import data
import evaluate
import train_fixmatch
from support import UserError, readers


def train(flags, out, capsys):
    """(exit code, stderr) of a tiny FixMatch run."""
    argv = f"{TINY} --iters 4 --eval_every 2 {flags} --out {out}".split()
    return exit_of(train_fixmatch.main, argv, capsys)


# ---------------------------------------------------------------------------------------------
# data


def test_no_data_and_no_network(tmp_path, capsys, monkeypatch):
    def offline(*args, **kwargs):
        raise OSError("no network")
    monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", offline)
    code, err = train(f"--dataset cifar10 --data_dir {tmp_path}", tmp_path / "run", capsys)
    assert code == 2 and err.count("\n") == 1
    assert all(word in err for word in ("cifar10.npz", str(tmp_path), "--dataset digits"))


def test_a_broken_archive_is_a_sentence_with_its_cause(tmp_path, monkeypatch):
    (tmp_path / "stl10_binary.tar.gz").write_bytes(b"not an archive")
    monkeypatch.setattr("torchvision.datasets.STL10.tgz_md5", None)  # so that it is not replaced
    with pytest.raises(UserError, match="--dataset stl10: .*stl10_binary.tar.gz") as error:
        data.load("stl10", tmp_path)
    assert isinstance(error.value.__cause__, tarfile.TarError)


def test_a_mistake_in_a_reader_keeps_its_traceback(tmp_path, monkeypatch):
    def misspelt(reader, data_dir):
        raise NameError("name 'readr' is not defined")
    monkeypatch.setattr(readers, "read_cifar", misspelt)
    with pytest.raises(NameError, match="readr"):
        data.load("cifar10", tmp_path)


def test_ratio_on_a_built_in_dataset(tmp_path, capsys):
    """Every class of 1000 images is divided 1:2."""
    code, err = train("--ratio 2 --method none", tmp_path / "run", capsys)
    assert code is None and err == "" and checkpoint(tmp_path / "run")["step"] == 4
    run = evaluate.load_run(tmp_path / "run")
    labels, (labeled, unlabeled) = run.dataset.labels, run.split
    assert np.bincount(labels).tolist() == [1000] * 10
    assert np.bincount(labels[labeled]).tolist() == [333] * 10
    assert np.bincount(labels[unlabeled]).tolist() == [667] * 10
    assert not set(labeled) & set(unlabeled)


def test_ratio_and_counts_exclude_each_other(tmp_path, capsys):
    code, err = train("--ratio 2 --n1 5", tmp_path / "run", capsys)
    assert code == 2 and err.count("\n") == 1 and "--ratio" in err and "--n1" in err


# ---------------------------------------------------------------------------------------------
# run folders


def test_an_existing_run_is_never_overwritten_unasked(tmp_path, capsys):
    out = tmp_path / "run"
    assert train("", out, capsys)[0] is None
    before = files(out)
    code, err = train("--seed 1", out, capsys)
    assert code == 2 and "already holds a run" in err
    assert files(out) == before
    code, err = train("--seed 1 --resume", out, capsys)
    assert code == 2 and "--seed is 1" in err
    code, err = train("--iters 3 --resume", out, capsys)
    assert code == 2 and "--iters is 3" in err
    assert files(out) == before
    assert train("--seed 1 --overwrite", out, capsys)[0] is None
    assert json.loads((out / "config.json").read_text())["seed"] == 1


@pytest.mark.parametrize("flags,what", [
    ("--lr 1e30 --iters 20", "the loss of iteration"),
    ("--lr 1e30 --iters 1 --method none", "the weights are not finite")])
def test_a_run_that_diverges_stops_and_saves_nothing(tmp_path, capsys, flags, what):
    code, err = train(flags, tmp_path / "run", capsys)
    assert code == 2 and what in err and err.count("\n") == 1
    assert not (tmp_path / "run/last.pt").exists() and not (tmp_path / "run/result.json").exists()


def test_results_without_a_checkpoint_are_not_resumed_over(tmp_path, capsys):
    train("--iters 1 --method none", tmp_path / "run", capsys)
    (tmp_path / "run/last.pt").unlink()
    code, err = train("--resume", tmp_path / "run", capsys)
    assert code == 2 and "no checkpoint" in err


@pytest.mark.slow
def test_evaluate_shows_runs_side_by_side(tmp_path, capsys):
    for method in ("none", "l2ac"):
        train(f"--method {method}", tmp_path / method, capsys)
    folders = [str(tmp_path / m) for m in ("none", "l2ac")]
    assert exit_of(evaluate.main, folders, capsys)[0] is None
    evaluate.main(folders)
    text = capsys.readouterr().out
    assert "none" in text and "l2ac" in text and "recall saltire" in text
    evaluate.main([*folders, "--json"])
    numbers = json.loads(capsys.readouterr().out)
    for folder in map(tmp_path.joinpath, ("none", "l2ac")):
        log = (folder / "log.csv").read_text().splitlines()
        last = dict(zip(log[0].split(","), map(float, log[-1].split(",")), strict=True))
        assert numbers[str(folder)]["last"]["bacc"] == pytest.approx(last["bacc"], rel=1e-5)
        result = json.loads((folder / "result.json").read_text())
        assert numbers[str(folder)]["mean_of_last"]["gm"] == pytest.approx(result["gm"])


@pytest.mark.slow
@pytest.mark.parametrize("command,says", [
    ("train_fixmatch.py", "l2ac: bACC"), ("train_mixmatch.py", "l2ac: bACC"),
    ("-m baselines.train", "none: bACC"), ("-m scripts.full_unroll", "full_unroll: bACC")])
def test_from_a_shell(tmp_path, command, says):
    """A real process: exit codes, and nothing but the sentence on stderr."""
    words = [sys.executable, *command.split(), *TINY.split(), "--iters", "2", "--out",
             str(tmp_path / "run")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and says in done.stdout and done.stderr == ""
    again = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 2 and again.stderr.count("\n") == 1


# ---------------------------------------------------------------------------------------------
# imports

TUTORIAL = {"attractor", "bilevel", "train_fixmatch", "train_mixmatch", "data", "models",
            "evaluate"}
PACKAGES = ("support", "baselines", "scripts")
OPTIONAL = {"sklearn"}                   # heavy, for one figure only: may be imported in a function


@lru_cache
def modules():
    """{dotted name: syntax tree} of the project; a package's __init__ has the package's name."""
    paths = [*ROOT.glob("*.py"), *(p for name in PACKAGES for p in (ROOT / name).rglob("*.py"))]
    dotted = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths}
    return {name.removesuffix(".__init__"): ast.parse(path.read_text())
            for path, name in dotted.items()}


def imported(tree):
    """Dotted names that a piece of code imports. `from package import x`: the package, which Python
    runs first, and package.x if that is a module."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {node.module} | inside & modules().keys()
    return names


def import_graph():
    """{module: modules of the project that it imports}; a submodule also needs its package."""
    graph = {}
    for name, tree in modules().items():
        needed = imported(tree)
        needed |= {n.rpartition(".")[0] for n in {*needed, name} if "." in n}
        graph[name] = needed & modules().keys() - {name}
    return graph


def cycle_in(graph):
    """A list of modules that import each other in a circle, or None."""
    done = set()

    def search(module, path):
        if module in path:
            return path[path.index(module):]
        if module in done:
            return None
        for needed in graph[module]:
            if found := search(needed, [*path, module]):
                return found
        done.add(module)
        return None
    return next(filter(None, (search(module, []) for module in graph)), None)


def test_root_holds_the_tutorial_and_nothing_else():
    assert {path.stem for path in ROOT.glob("*.py")} == TUTORIAL


def test_support_imports_no_tutorial_file_and_no_other_package():
    graph = import_graph()
    assert "support.run" in graph and graph["train_fixmatch"] > {"data", "support.run"}
    for module, needed in graph.items():
        if module.split(".")[0] == "support":
            assert {name.split(".")[0] for name in needed} <= {"support"}, module


def test_no_import_is_hidden_in_a_function():
    for module, tree in modules().items():
        functions = [node for node in ast.walk(tree)
                     if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        hidden = {name.split(".")[0] for function in functions for name in imported(function)}
        assert hidden <= OPTIONAL, module


def test_no_import_cycle():
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert cycle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None
    assert cycle_in(import_graph()) is None


# ---------------------------------------------------------------------------------------------
# how OpenMP's threads wait

WATCH_TORCH = """
import os, runpy, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("OMP_WAIT_POLICY"))
            sys.exit()

sys.meta_path.insert(0, Watch())
sys.path.insert(0, "")
runpy.run_module(sys.argv[1], run_name="__main__")
"""


@pytest.mark.parametrize("module", [
    "train_fixmatch", "train_mixmatch", "evaluate", "baselines.train", "scripts.bench",
    "scripts.reproduce", "scripts.figures", "scripts.full_unroll"])
@pytest.mark.parametrize("own", [None, "active"])
def test_the_waiting_policy_is_set_before_torch_is_imported(module, own):
    """OpenMP reads it only then. A setting of the user's own is left alone."""
    env = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    done = subprocess.run([sys.executable, "-c", WATCH_TORCH, module], cwd=ROOT, text=True,
                          capture_output=True, timeout=60,
                          env=env | ({"OMP_WAIT_POLICY": own} if own else {}))
    assert done.stdout.split() == [own or "passive"], done.stderr
