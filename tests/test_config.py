"""Flags: the paper's values, presets, the default run folder."""
from contextlib import nullcontext

import pytest
import torch

import train_fixmatch
import train_mixmatch
from support import UserError, config


def read(text="", script=train_fixmatch, base="fixmatch"):
    return config.read(text.split(), base, "", script.flags, script.l2ac_flags)


@pytest.mark.parametrize("script,base,own", [
    (train_fixmatch, "fixmatch", dict(tau=0.95, lambda_u=1.0, n_strong=2, ra_n=3, ra_m=4.0)),
    (train_mixmatch, "mixmatch", dict(temperature=0.5, mix_alpha=0.75, lambda_u=75.0))])
def test_the_values_of_the_paper(script, base, own):
    cfg = read("--dataset cifar10 --gamma_l 100 --gamma_u 1", script, base)
    expected = own | dict(
        model="wrn-28-2", image_size=32, iters=250_000, batch_size=64, batch_size_u=64, lr=2e-3,
        weight_decay=0.02, ema=0.999, bn_momentum=0.001, eval_every=500, eta=1e-4, hidden=256,
        n1=1500, m1=3000, omega_every=1, attractor_input="softmax", method="l2ac")
    assert {key: getattr(cfg, key) for key in expected} == expected


def test_a_flag_wins_over_presets_and_counts_over_a_ratio():
    cfg = read("--dataset cifar10 --scale mini --iters 7 --n1 20 --attractor vector")
    assert (cfg.iters, cfg.n1, cfg.m1, cfg.model, cfg.eta) == (7, 20, 3000, "wrn-10-1", 1e-2)
    cfg = read("--ratio 2")                                  # in place of the digits' counts
    assert (cfg.ratio, cfg.n1, cfg.m1, cfg.gamma_l, cfg.gamma_u) == (2, None, None, None, None)
    cfg = read("--dataset sun397 --n1 40 --m1 60 --gamma_l 2 --gamma_u 1")   # whose preset is 2
    assert (cfg.ratio, cfg.n1, cfg.m1, cfg.gamma_l, cfg.gamma_u) == (None, 40, 60, 2, 1)


@pytest.mark.parametrize("can", [True, False])
def test_bfloat16_on_the_cpu_where_it_is_not_emulated(can, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: can)
    cfg = read("--dtype bfloat16 --device cpu")
    with nullcontext() if can else pytest.raises(UserError, match="--dtype bfloat16.*--dtype"):
        assert config.pick_device(cfg).type == "cpu"


def test_different_settings_have_different_folders():
    """Those that may change on --resume have the same."""
    plain, commands = read().out, ["--lr 0.1", "--lr 0.01", "--seed 1", "--method none",
                                   "--gamma_u 5", "--gamma_u 5 --reverse_u", "--attractor vector",
                                   "--dataset synthetic", "--batch_size 16",
                                   "--batch_size 16 --batch_size_u 32", "--ra_m random"]
    folders = [plain, *(read(command).out for command in commands)]
    assert len(set(folders)) == len(folders) and "eta" not in "".join(folders)
    for same in ("--iters 9", "--threads 2", "--resume", "--lr 0.002", "--scale mini", "--n1 10"):
        assert read(same).out == plain
