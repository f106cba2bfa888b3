"""baselines/README.md: its example trains, aligns as its formula says, resumes exactly and is
treated by evaluate.py as documented; its table names the calls of `Method`."""
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
from collections import deque
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, checkpoint, exit_of, same, stopped, train

import evaluate
from baselines import Method
from baselines import train as baselines
from baselines.methods import METHODS

README = (ROOT / "baselines" / "README.md").read_text()
EXAMPLE, = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
FLAGS = "--tau 0.1 --gamma_u 100 --n1 100 --m1 100"


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    """The example, as a module outside of the tree."""
    path = tmp_path_factory.mktemp("example") / "alignment.py"
    path.write_text(EXAMPLE)
    spec = importlib.util.spec_from_file_location("alignment", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def main(module):
    return partial(baselines.main, own=module.Alignment)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Folder of a finished run of six iterations; `run` fills it."""
    return tmp_path_factory.mktemp("run") / "whole"


@pytest.fixture
def run(out, main):
    if not out.exists():
        train(out, FLAGS, main)
    return out


def alignment_of(module, counts):
    return module.Alignment(SimpleNamespace(counts=torch.tensor(counts, dtype=torch.float64),
                                            dataset=SimpleNamespace(num_classes=len(counts))))


def test_alignment_against_numpy(module):
    """140 batches: p times prior over the mean of the 128 batches before, uniform at first."""
    counts, g = [6.0, 3.0, 1.0], np.random.default_rng(0)
    method, prior = alignment_of(module, counts), np.array(counts) / 10
    recent = deque([np.full(3, 1 / 3)] * 128, maxlen=128)
    for step in range(140):
        p = g.dirichlet([1, 2, 3], size=4)
        expected = p * prior / np.mean(recent, axis=0)
        expected /= expected.sum(1, keepdims=True)
        recent.append(p.mean(0))
        ours = method.refine(torch.from_numpy(p).float(), SimpleNamespace(step=step))
        np.testing.assert_allclose(ours, expected, rtol=1e-4)


def test_the_example_trains(run, tmp_path, main):
    """It is not the plain base, and its buffer holds a mean prediction of each of six batches."""
    ours, plain = checkpoint(run), train(tmp_path, f"{FLAGS} --method none", main)
    assert ours["config"]["method"] == "alignment" and ours["step"] == 6
    assert not same(ours["model"], plain["model"])
    recent = ours["method"]["recent"]
    assert (recent[:6] != 0.1).all() and (recent[6:] == 0.1).all()
    torch.testing.assert_close(recent.sum(1), torch.ones(128))


@pytest.mark.slow
def test_stopped_and_resumed_it_equals_the_uninterrupted_run(run, tmp_path, main):
    stopped(tmp_path, FLAGS, after=4, main=main)
    assert same(checkpoint(run), train(tmp_path, f"{FLAGS} --resume", main))


@pytest.mark.parametrize("base", METHODS)
def test_an_own_method_is_the_default_on_every_base(module, base):
    cfg, method = baselines.configure(["--base", base], module.Alignment)
    assert method is module.Alignment and cfg.method == "alignment"
    assert f"_{base}_alignment_" in cfg.out


def test_other_methods_remain_available(module):
    assert baselines.configure(["--method", "daso"], module.Alignment)[1].__name__ == "DASO"


def test_evaluate_needs_the_second_step(run, module, monkeypatch, capsys):
    code, err = exit_of(evaluate.main, [str(run)], capsys)
    assert code == 2 and err.count("\n") == 1
    assert "--method alignment" in err and "baselines/methods.py" in err

    monkeypatch.setitem(METHODS["fixmatch"], "alignment", module.Alignment)
    bacc = [row["bacc"] for row in checkpoint(run)["history"]]
    assert evaluate.load_run(run).last["bacc"] == pytest.approx(bacc[-1])
    evaluate.main([str(run)])
    assert re.search(rf"bACC +{np.mean(bacc):.2f}", capsys.readouterr().out)


def test_the_table_has_the_signatures_of_method():
    calls = re.findall(r"`(\w+)\(([\w, ]*)\)`", "\n".join(re.findall(r"^\|.*", README, re.M)))
    assert {"labeled", "refine", "extra_loss", "predict", "heads"} <= dict(calls).keys()
    for name, arguments in calls:
        parameters = [x for x in inspect.signature(getattr(Method, name)).parameters if x != "self"]
        assert parameters == arguments.split(", "), name


# ---------------------------------------------------------------------------------------------
# other processes


def python(*words, cwd, path):
    return subprocess.run([sys.executable, *map(str, words)], cwd=cwd, text=True,
                          capture_output=True, timeout=300,
                          env=os.environ | {"PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"})


RANK = """
import sys
from types import SimpleNamespace

import torch

from alignment import Alignment
from support import distributed

rank, _ = distributed.start(torch.device("cpu"))
method = Alignment(SimpleNamespace(counts=torch.ones(2), dataset=SimpleNamespace(num_classes=2)))
method.refine(torch.tensor([[[.9, .1]], [[.3, .7]]])[rank], SimpleNamespace(step=0))
torch.save(method.recent[0], f"{sys.argv[1]}/{rank}.pt")
distributed.stop()
"""


@pytest.mark.slow
def test_two_ranks_store_the_mean_of_the_global_batch(tmp_path):
    (tmp_path / "alignment.py").write_text(EXAMPLE)
    (tmp_path / "rank.py").write_text(RANK)
    done = python("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2, "rank.py",
                  tmp_path, cwd=tmp_path, path=f"{ROOT}{os.pathsep}{tmp_path}")
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in (0, 1):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), torch.tensor([.6, .4]))


@pytest.mark.slow
def test_both_steps_in_a_copy_of_the_tree(tmp_path):
    """The commands of the README: a file in baselines/, then a line in methods.py."""
    tree, flags = tmp_path / "tree", [*TINY.split(), "--iters", 6, "--out", "runs/a"]
    tree.mkdir()
    for path in (*ROOT.glob("*.py"), ROOT / "baselines", ROOT / "support"):
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, tree / path.name)
    (tree / "baselines" / "alignment.py").write_text(EXAMPLE)
    call = partial(python, cwd=tree, path=tree)
    done = call("-m", "baselines.alignment", "--base", "fixmatch", *flags)
    assert done.returncode == 0, done.stderr
    methods = tree / "baselines" / "methods.py"
    text = methods.read_text().replace("    Method,\n", "    Method,\n    alignment,\n")
    entry = '{"alignment": alignment.Alignment, "none": Method, "darp"'
    methods.write_text(text.replace('{"none": Method, "darp"', entry))
    for words in (["evaluate.py", "runs/a"], ["-m", "baselines.train", "--method", "alignment",
                                              *flags, "--resume"],
                  ["-m", "baselines.alignment", *flags, "--resume"]):
        done = call(*words)
        assert done.returncode == 0 and "bACC" in done.stdout, done.stderr
