"""Defaults by dataset, scale and recipe; numbers on the command line."""
import argparse
import math

import pytest

import settings
import train_fixmatch


def config(text=""):
    return train_fixmatch.config(text.split())


def test_paper_defaults_for_cifar10():
    cfg = config("--dataset cifar10 --gamma_l 100 --gamma_u 1")
    expected = dict(model="wrn-28-2", image_size=32, iters=250_000, batch_size=64, lr=2e-3,
                    weight_decay=0.02, ema=0.999, bn_momentum=0.001, eval_every=500, n_strong=2,
                    eta=1e-4, hidden=256, tau=0.95, lambda_u=1.0, ra_n=3, ra_m=4.0,
                    n1=1500, m1=3000,
                    omega_every=1, omega_order="after", inner="adam", attractor_input="softmax",
                    pseudo_from="linear", pool="disjoint", split="random", wrn_quirk=False,
                    decay_bn=False, method="l2ac")
    assert {k: getattr(cfg, k) for k in expected} == expected


def test_official_recipe():
    cfg = config("--dataset cifar10 --recipe official")
    expected = dict(omega_every=10, omega_order="before", inner="adam", attractor_input="l2",
                    pseudo_from="auto", pool="union", split="first", wrn_quirk=True, decay_bn=True)
    assert {k: getattr(cfg, k) for k in expected} == expected


def test_a_flag_wins_over_every_table():
    cfg = config("--recipe official --scale mini --omega_every 3 --no-wrn_quirk --iters 7 --n1 20")
    assert (cfg.omega_every, cfg.wrn_quirk, cfg.iters, cfg.n1) == (3, False, 7, 20)


def test_every_line_of_the_recipe_table_is_a_flag_of_its_own():
    parser = settings.parser("", str)
    settings.l2ac_flags(parser)
    flags = {option for action in parser._actions for option in action.option_strings}
    assert {f"--{key}" for table in settings.RECIPES.values() for key in table} <= flags


def test_help_names_every_default_table(capsys):
    with pytest.raises(SystemExit) as end:
        config("--help")
    text = capsys.readouterr().out
    assert end.value.code == 0
    for table in (settings.PROTOCOL, settings.MINI, *settings.DATASETS.values()):
        assert all(f"{key} {value}" in text for key, value in table.items())


@pytest.mark.parametrize("kind,low,high,text", [
    (int, 1, math.inf, "0"), (int, 1, math.inf, "1.5"), (float, 0, 1, "nan"), (float, 0, 1, "1.01"),
    (float, 0, math.inf, "inf"), (float, 0, math.inf, "-1"), (int, 0, 5, "x"), (float, 0, 1, "")])
def test_numbers_that_are_refused(kind, low, high, text):
    with pytest.raises((ValueError, argparse.ArgumentTypeError)):
        settings.number(kind, low, high)(text)
