"""Mistakes that people make: one sentence that names the flag or the file, exit code 2, and not a
byte changed on the disk. One case for each way of being refused."""
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, own_npz, stopped, train
from PIL import Image

import evaluate
import models
import train_fixmatch
import train_mixmatch
from baselines import train as baselines
from support import UserError, exit_cleanly

SCRIPTS = {"fixmatch": train_fixmatch.main, "mixmatch": train_mixmatch.main,
           "baselines": baselines.main, "evaluate": evaluate.main}
FOUR = "--n1 2 --m1 2 --gamma_l 1 --gamma_u 1"
CASES = {  # script: {arguments: a part of the sentence}; --out is a new folder if there is none
    "fixmatch": {
        "--nonsense 3": "--nonsense", "stray": "stray", "--iter 5": "--iter", "--lr": "--lr",
        "--iters 1.5": "--iters", "--iters 0": "--iters", "--batch_size 1": "--batch_size",
        "--tau 1.5": "--tau", "--gamma_l nan": "--gamma_l", "--seed -1": "--seed",
        "--ra_m hard": "--ra_m", "--ra_m 31": "--ra_m 31 is not between",
        "--imbalance square": "--imbalance",
        "--method darp": "--method: invalid choice: 'darp'",
        "--model resnet": "--model resnet", "--model wrn-11-1": "--model wrn-11-1",
        "--dataset nothing": "--dataset nothing", "--device cuda": "--device cuda",
        # splits: a class is too small, or would have no label
        "--n1 2000": "--n1.* class 0 .a., which has 1000", "--gamma_l 501": "0 labeled",
        "--m1 -5": "-5 unlabeled", "--m1 0": "no unlabeled images",
        "--dataset good.npz": "no unlabeled images", "--dataset good.npz --n1 3": "--gamma_l",
        f"--dataset own.npz {FOUR}": "leave out the 80 unlabeled images",
        # files
        "--dataset none.npz": "none.npz", "--dataset half.npz": "half.npz",
        "--dataset pictures": "1 class",
        # networks
        "--model resnet19": "near it are resnet18", "--model squeezenet1_0": "no linear",
        "--model resnet18 --weights none.pt": "--weights none.pt: none that can be read",
        "--model resnet18 --weights wrn.pt": "--weights wrn.pt does not fit --model resnet18",
        "--model wrn-10-1 --weights less.pt": "less.pt does not fit --model wrn-10-1 .Missing key",
        "--model wrn-10-1 --weights default": "--weights default: none that can be read",
        "--dataset broken": "cannot be read .broken/train/b/0.png",
        # run folders
        "--out half --resume --iters 2": "--iters is 2, but the run in half is already at 2",
        "--out run": "already holds a run", "--out run --resume --seed 1": "--seed is 1",
        f"--out run --resume --dataset good.npz {FOUR}": "but the run in run has",
        "--out damaged --resume": "damaged/last.pt is damaged",
        "--out lost --resume": "no checkpoint"},
    "mixmatch": {"--tau 0.9": "--tau", "--out run --resume": "the run in run has"},
    "baselines": {"--base nothing": "--base", "--method nothing": "--method nothing",
                  "--base supervised --method darp": "--method darp is not one of",
                  "--method l2ac": "train_"},
    "evaluate": {"": "runs", "nothing": "nothing holds no run", "run nothing": "nothing holds no",
                 "damaged": "damaged/last.pt is damaged", "run own": "different classes",
                 "own --pseudo": "--pseudo", "run --test longtail --gamma_t 21": "--gamma_t 21",
                 "run --predict nowhere": "--predict nowhere",
                 "run half --predict broken": "--predict takes one run",
                 "run --doubtful 3": "--doubtful goes with",
                 "run --against half": "--against: an interval needs",
                 "run --predict broken/train/b/0.png": "cannot be read"},
}


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with datasets and run folders, good ones and others."""
    folder, g = tmp_path_factory.mktemp("here"), np.random.default_rng(0)
    own_npz(folder)
    x = g.integers(0, 256, (12, 8, 8, 3), dtype=np.uint8)
    np.savez(folder / "good.npz", x_train=x, y_train=np.arange(12) % 3, x_test=x[:6],
             y_test=np.arange(6) % 3)
    (folder / "half.npz").write_bytes((folder / "good.npz").read_bytes()[:1000])
    (folder / "data/cache").mkdir(parents=True)
    for place in ("pictures/train/a", "broken/train/a", "broken/train/b", "broken/test/a"):
        (folder / place).mkdir(parents=True)
        Image.fromarray(x[0]).save(folder / place / "0.png")
    (folder / "broken/train/b/0.png").write_bytes(b"no picture")
    train(folder / "run", "--iters 2")
    stopped(folder / "half", "", after=2)
    train(folder / "own", f"--iters 2 --dataset {folder}/own.npz")
    for name in ("damaged", "lost"):
        shutil.copytree(folder / "run", folder / name)
    (folder / "damaged/last.pt").write_bytes((folder / "run/last.pt").read_bytes()[:5000])
    (folder / "lost/last.pt").unlink()
    state = models.build("wrn-10-1", 10).state_dict()
    torch.save(state, folder / "wrn.pt")
    torch.save({key: x for key, x in state.items() if key != "bn.bias"}, folder / "less.pt")
    return folder


def disk(folder):
    return {str(f): f.is_file() and f.stat().st_mtime_ns for f in folder.rglob("*")}


@pytest.mark.parametrize("script,flags", [(s, flags) for s in CASES for flags in CASES[s]])
def test_wrong_input(here, script, flags, monkeypatch):
    if "cuda" in flags and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.chdir(here)
    before, argv = disk(here), flags.split()
    if script != "evaluate":
        argv = [*TINY.split(), "--iters", "2", "--out", "new", *argv]
    with pytest.raises(UserError, match=CASES[script][flags]) as error:
        SCRIPTS[script](argv)
    assert "\n" not in str(error.value) and disk(here) == before


def test_the_length_of_a_mixmatch_run_is_fixed(tmp_path):
    """Its ramp of lambda_u depends on it."""
    train(tmp_path, "--iters 2", train_mixmatch.main)
    with pytest.raises(UserError, match="--iters is 4"):
        train(tmp_path, "--iters 4 --resume", train_mixmatch.main)


def test_overwrite_replaces_a_run(tmp_path):
    train(tmp_path, "--iters 2")
    assert train(tmp_path, "--iters 1 --seed 1 --overwrite")["config"]["seed"] == 1


def test_an_error_of_the_user_is_a_sentence_and_one_of_the_program_a_traceback(capsys):
    def main(error):
        raise error
    with pytest.raises(SystemExit) as end:
        exit_cleanly(lambda: main(UserError("--lr is wrong; lower it")))
    assert end.value.code == 2 and capsys.readouterr().err == "error: --lr is wrong; lower it\n"
    for error in (KeyError("x"), OSError("x"), RuntimeError("x")):
        with pytest.raises(type(error)):
            exit_cleanly(lambda error=error: main(error))


@pytest.mark.slow
@pytest.mark.parametrize("command,sentence", [
    ("train_fixmatch.py --dataset nothing", "error: --dataset nothing"),
    ("-m baselines.train --method nothing", "error: --method nothing"),
    (f"train_fixmatch.py --out {ROOT}/README.md", f"error: --out {ROOT}/README.md is a file"),
    ("evaluate.py nothing", "error: nothing holds no run")])
def test_from_a_shell(tmp_path, command, sentence):
    script, *flags = command.split()
    words = [f"{ROOT}/{script}" if script != "-m" else script, *flags]
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 2 and done.stderr.startswith(sentence), done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout == "" and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_tutorial_needs_no_comparison_method():
    """A mistake in one of them does not stop train_fixmatch.py."""
    code = "import sys, train_fixmatch, train_mixmatch, evaluate; print('baselines' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
