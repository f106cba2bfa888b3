"""What a checkpoint holds is checked before use: tensors, flags, history, each tampered with."""
import math
import shutil

import numpy as np
import pytest
import torch
from conftest import TINY, same, train
from test_checkpoint import refused, some

import evaluate
import train_fixmatch


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    train(folder)
    return folder


def tampered(finished, folder, change):
    """A copy of the run in whose last.pt `change` has altered something; there is no prev.pt."""
    run = shutil.copytree(finished, folder / "run")
    (run / "prev.pt").unlink()
    state = torch.load(run / "last.pt", weights_only=True)
    change(state)
    torch.save(state, run / "last.pt")
    return run, [*TINY.split(), "--iters", "9", "--resume", "--out", str(run)]


def entry(state, key="exp_avg"):
    """Adam's entries of the first parameter, and a tensor of them."""
    entries = state["optimizer"]["state"][0]
    return entries, entries[key]


def put(key, change):
    def alter(state):
        entries, tensor = entry(state, key)
        entries[key] = change(tensor)
    return alter


def group(key, value):
    return lambda state: state["optimizer"]["param_groups"][0].update({key: value})


TAMPERED = {  # of the optimizer, which only --resume reads
    "shape": put("exp_avg", lambda t: t.flatten()[:1].clone()),     # made the fused step segfault
    "dtype": put("exp_avg", torch.Tensor.double), "nan": put("exp_avg", lambda t: t * math.nan),
    "negative": put("exp_avg_sq", lambda t: -1 - t), "list": put("exp_avg", torch.Tensor.tolist),
    "too far": put("step", lambda t: t + 1), "half": put("step", lambda t: t - 0.5),
    "behind": put("step", lambda t: t - 1),
    "step": put("step", lambda t: t.expand(3)), "lr": group("lr", 1.0),
    "betas": group("betas", (0.9, 2.0)), "amsgrad": group("amsgrad", True),
    "tensor": group("lr", torch.ones(2)), "params": group("params", [0]),
    "missing": lambda state: entry(state)[0].pop("exp_avg_sq"),
    "more": lambda state: state["optimizer"]["state"].update({999: entry(state)[0]}),
    "groups": lambda state: state["optimizer"].update(param_groups=[]),
    "no state": lambda state: state.update(optimizer=3),
    "averages": lambda state: state["averages"].update(sums=torch.ones(1))}


@pytest.mark.parametrize("name", some(TAMPERED, "shape", "negative", "too far", "lr", "averages"))
def test_a_tampered_optimizer_does_not_resume(finished, tmp_path, capsys, name):
    run, argv = tampered(finished, tmp_path, TAMPERED[name])
    err = refused(run, train_fixmatch.main, argv, capsys)
    assert "last.pt" in err and ("averages" if name == "averages" else "optimizer:") in err


WEIGHTS = {"nan": lambda t: t * math.nan, "inf": lambda t: t + math.inf, "shape": lambda t: t[:1],
           "dtype": torch.Tensor.double, "list": torch.Tensor.tolist}


@pytest.mark.parametrize("name", some(WEIGHTS, "nan", "dtype"))
def test_tampered_weights_are_used_by_no_command(finished, tmp_path, capsys, name):
    def change(state):
        state["ema"]["stem.weight"] = WEIGHTS[name](state["ema"]["stem.weight"])
    run, argv = tampered(finished, tmp_path, change)
    np.savez(tmp_path / "x.npz", x=np.zeros((1, 8, 8, 3), np.uint8))
    for main, words in ((train_fixmatch.main, argv), (evaluate.main, [str(run)]), (
            evaluate.main, [str(run), "--predict", str(tmp_path / "x.npz")])):
        err = refused(run, main, words, capsys)
        assert "last.pt" in err and "ema: stem.weight" in err


def test_finite_weights_that_predict_no_numbers(finished, tmp_path, capsys):
    def change(state):
        state["ema"]["bn.running_var"] -= 1e6
    run, _ = tampered(finished, tmp_path, change)
    assert "does not predict numbers" in refused(run, evaluate.main, [str(run)], capsys)


@pytest.mark.slow
def test_tensors_of_the_optimizer_share_no_memory(finished, tmp_path):
    """Saved with stride 0 a tensor has the right shape and the storage of one number: fused Adam
    would write beyond it. The run goes on as from a full tensor with these numbers."""
    expanded, full = (tampered(finished, tmp_path / name, put("exp_avg", change))[1]
                      for name, change in {
                          "a": lambda t: t.new_full((1,), 0.1).expand_as(t),
                          "b": lambda t: torch.full_like(t, 0.1)}.items())
    for argv in (expanded, full):
        train_fixmatch.main(argv)
    assert same(*(torch.load(f"{argv[-1]}/last.pt", weights_only=True)
                  for argv in (expanded, full)))


def drop(key):
    return lambda state: state["config"].pop(key)


def config(**values):
    return lambda state: state["config"].update(values)


def info(**values):
    return lambda state: state["config"]["dataset_info"].update(values)


ALTERED = {  # what is not a tensor: what the sentence must name
    "no model": (drop("model"), "--model"), "no info": (drop("dataset_info"), "--dataset_info"),
    "model 3": (config(model=3), "--model"), "method": (config(method=["l2ac"]), "--method"),
    "base": (config(base="x"), "--base"), "base list": (config(base=["x"]), "--base"),
    "no cwd": (drop("cwd"), "--cwd"), "seed": (config(seed="0"), "--seed"),
    "hidden": (config(hidden=2.5), "--hidden"), "quirk": (config(wrn_quirk=1), "--wrn_quirk"),
    "momentum": (config(bn_momentum=7.0), "--bn_momentum"), "iters": (config(iters="6"), "config"),
    "tensor": (config(lr=torch.ones(2)), "config"), "names": (info(names="ab"), "data"),
    "one name": (info(names=["a"]), "data"), "mean": (info(mean=(0.0, math.nan, 0.0)), "data"),
    "std": (info(std=[0, 0, 0]), "data"), "size": (info(size=(8.0, 8)), "data"),
    "row": (lambda state: state["history"].append(3), "history"),
    "no bacc": (lambda state: state["history"][0].pop("bacc"), "history"),
    "9999": (lambda state: state["history"][0].update(bacc=9999.0), "history"),
    "order": (lambda state: state["history"].reverse(), "history"),
    "step": (lambda state: state.update(step=-6), "step"),
    "seconds": (lambda state: state.update(seconds="x"), "seconds"),
    "no seconds": (lambda state: state.pop("seconds"), "seconds"),
    "commits": (lambda state: state.update(commits=[]), "commits")}


@pytest.mark.parametrize("name", some(ALTERED, "no model", "hidden", "names", "9999"))
def test_an_altered_configuration_is_one_sentence(finished, tmp_path, capsys, name):
    change, word = ALTERED[name]
    run, argv = tampered(finished, tmp_path, change)
    err = refused(run, evaluate.main, [str(run)], capsys)
    assert word in err and str(run) in err
    if name not in ("base", "base list", "no cwd"):          # no flag of this script
        refused(run, train_fixmatch.main, argv, capsys)
