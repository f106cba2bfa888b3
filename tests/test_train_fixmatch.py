"""FixMatch + L2AC: three iterations by hand, exact resume, frozen features, own data."""
import csv

import numpy as np
import pytest
import torch
from conftest import own_npz, same, stopped
from conftest import train as train_tiny
from replay import FixMatch, compare

import models
import train_fixmatch
from support.finished import FinishedRun

TAU = "--tau 0.2 "                       # low, so that some pseudo-labels count at once


def train(out, flags=""):
    return train_tiny(out, TAU + flags)


@pytest.mark.parametrize("flags", [
    "--method l2ac", "--method none --pseudo_from adaptive --attractor_start prior",
    "--lambda_u 0.5 --omega_every 2 --seed 1",
    "--attractor vector --attractor_start prior --pseudo_from adaptive",
    "--attractor_input l2 --no_flip", "--labels soft", "--freeze"])
def test_three_iterations_by_hand(tmp_path, flags):
    compare(FixMatch, tmp_path, f"{TAU} --n_strong 2 --eta 0.01 {flags}", train_fixmatch.main)


def test_a_stopped_run_goes_on_and_a_finished_one_can_be_made_longer(tmp_path):
    """Both as if nothing had happened, bit for bit; 8 is not on the grid of evaluations."""
    whole = train(tmp_path / "whole", "--iters 12")
    stopped(tmp_path / "parts", TAU + "--iters 8", after=4)
    train(tmp_path / "parts", "--iters 8 --resume")
    assert same(whole, train(tmp_path / "parts", "--iters 12 --resume"))


def test_frozen_features(tmp_path):
    """theta stays as it is bit for bit, in the EMA too; phi moves; a stopped run goes on."""
    start = models.build("wrn-10-1", 10)
    torch.save(start.state_dict(), tmp_path / "weights.pt")
    flags = f"--freeze --model wrn-10-1 --weights {tmp_path / 'weights.pt'} "
    whole = train(tmp_path / "whole", flags)
    for key, value in start.state_dict().items():
        for part in ("model", "ema"):
            assert torch.equal(whole[part][key], value) != key.startswith("classifier"), key
    assert whole["config"]["dataset_info"]["mean"] == [0.5, 0.5, 0.5]             # synthetic's
    stopped(tmp_path / "parts", TAU + flags, after=4)
    assert same(whole, train(tmp_path / "parts", flags + "--resume"))


@pytest.mark.parametrize("model", ["resnet18", pytest.param("vit_b_16", marks=pytest.mark.slow)])
def test_a_network_of_torchvision_trains(tmp_path, model):
    torch.save(models.build(model, 10, image_size=32).state_dict(), tmp_path / "weights.pt")
    state = train(tmp_path / "run", f"--iters 2 --eval_every 2 --image_size 32 --model {model} "
                  f"--weights {tmp_path / 'weights.pt'}")
    assert state["config"]["dataset_info"]["mean"] == [0.485, 0.456, 0.406]       # ImageNet's
    assert state["step"] == 2 and state["history"][-1]["loss_bal"] > 0
    torch.testing.assert_close(FinishedRun(tmp_path / "run").last["bacc"],
                               state["history"][-1]["bacc"])


def test_own_data(tmp_path):
    result = train_fixmatch.main(f"--dataset {own_npz(tmp_path)} --model wrn-10-1 --batch_size 6 "
                                 f"--iters 4 --eval_every 1 --out {tmp_path}/run".split())
    with open(tmp_path / "run/log.csv") as file:
        rows = list(csv.DictReader(file))
    for k in range(4):
        mean = np.mean([float(row[f"recall_{k}"]) for row in rows])
        assert result["recall"][k] == pytest.approx(mean, abs=1e-3)
    assert result["bacc"] == pytest.approx(np.mean(result["recall"][:4]))
    assert np.isnan(result["recall"][4])                      # no test image of that class


@pytest.mark.slow
def test_a_short_default_run_learns_digits(tmp_path):
    """No data flag at all: real digits. The EMA, which is evaluated, has not come far by then."""
    train_fixmatch.main(f"--iters 200 --threads 1 --out {tmp_path}".split())
    with open(tmp_path / "log.csv") as file:
        rows = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
    first, last = rows[0], rows[-1]
    assert last["loss_x"] < 0.2 * first["loss_x"] and last["loss_bal"] < 0.5 * first["loss_bal"]
    assert last["kept"] > first["kept"] and last["right"] > 0.9
