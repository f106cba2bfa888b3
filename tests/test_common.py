"""Plumbing: defaults, EMA, checkpoint, log, numbers on the command line."""
import argparse
import math

import pytest
import torch

import common
import models
import run_folder
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


def test_ema_has_its_closed_form_and_covers_bn_statistics():
    model = models.build("wrn-10-1", 3, 0.1)
    ema, decay = common.EMA(model, 0.9), 0.9
    expected = {k: v.clone() for k, v in model.state_dict().items()}
    for step in range(4):
        model(torch.randn(4, 3, 8, 8))                       # moves the running statistics
        with torch.no_grad():
            for p in model.parameters():
                p += torch.randn_like(p)
        ema.update()
        for key, value in model.state_dict().items():
            expected[key] = decay * expected[key] + (1 - decay) * value
    for key, value in ema.model.state_dict().items():
        torch.testing.assert_close(value, expected[key])
    assert any("running_var" in key for key in expected)


def checkpoint(step):
    return {"step": step, "config": {}, "history": [], "model": {"w": torch.ones(3)}, "ema": {}}


def test_checkpoint_round_trip_and_the_one_before(tmp_path, capsys):
    for step in (1, 2):
        run_folder.save_checkpoint(tmp_path, {}, **checkpoint(step))
    assert run_folder.load_checkpoint(tmp_path)["step"] == 2
    whole = (tmp_path / "last.pt").read_bytes()
    for damaged in (whole[:100], b"", b"junk"):
        (tmp_path / "last.pt").write_bytes(damaged)
        assert run_folder.load_checkpoint(tmp_path)["step"] == 1
        assert "last.pt cannot be used" in capsys.readouterr().err
    torch.save({"weights": 3}, tmp_path / "last.pt")          # readable, but not ours
    assert run_folder.load_checkpoint(tmp_path)["step"] == 1
    (tmp_path / "prev.pt").write_bytes(b"")
    with pytest.raises(settings.UserError, match="has to start again"):
        run_folder.load_checkpoint(tmp_path)


def test_watch_stops_at_a_loss_that_is_not_finite():
    watch = common.Watch()
    watch.see(0, torch.tensor([1.0, 2.0]))
    with pytest.raises(settings.UserError, match=r"iteration 1 is not finite .\[1.0, nan\]"):
        watch.see(1, torch.tensor([1.0, math.nan]))


def test_watch_on_a_device_that_is_not_waited_for():
    watch = common.Watch()
    watch.seen = {s: torch.tensor([float("inf") if s == 7 else 1.0]) for s in range(5, 10)}
    with pytest.raises(settings.UserError, match="iteration 7"):
        watch.look()


def test_watch_refuses_weights_that_are_not_finite():
    watch, module = common.Watch(), torch.nn.Linear(2, 2)
    module.weight.data[0, 0] = math.nan
    with pytest.raises(settings.UserError, match="weights are not finite after iteration 3"):
        watch.check(3, module)


def test_log_is_cut_back_to_the_history(tmp_path):
    rows = [{"iter": i, "bacc": i / 3} for i in range(1, 4)]
    run_folder.write_log(tmp_path, rows)
    run_folder.write_log(tmp_path, rows[:2])
    assert (tmp_path / "log.csv").read_text() == "iter,bacc\n1,0.333333\n2,0.666667\n"
