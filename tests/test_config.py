"""Defaults by dataset, scale and recipe; numbers on the command line; the default run folder; how a
program ends."""
import argparse
import errno
import itertools
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch._dynamo.exc as dynamo
from conftest import ROOT, TINY, exit_of

from baselines import train as baselines
from support import UserError, cli, config


def read(text="", base="fixmatch"):
    return config.read(text.split(), base)


def test_paper_defaults_for_cifar10():
    cfg = read("--dataset cifar10 --gamma_l 100 --gamma_u 1")
    expected = dict(model="wrn-28-2", image_size=32, iters=250_000, batch_size=64, lr=2e-3,
                    weight_decay=0.02, ema=0.999, bn_momentum=0.001, eval_every=500, n_strong=2,
                    eta=1e-4, hidden=256, tau=0.95, lambda_u=1.0, ra_n=3, ra_m=4.0,
                    n1=1500, m1=3000,
                    omega_every=1, omega_order="after", inner="adam", attractor_input="softmax",
                    pseudo_from="linear", pool="disjoint", split="random", wrn_quirk=False,
                    decay_bn=False, method="l2ac")
    assert {k: getattr(cfg, k) for k in expected} == expected


def test_official_recipe():
    cfg = read("--dataset cifar10 --recipe official")
    expected = dict(omega_every=10, omega_order="before", inner="adam", attractor_input="l2",
                    pseudo_from="auto", pool="union", split="first", wrn_quirk=True, decay_bn=True)
    assert {k: getattr(cfg, k) for k in expected} == expected


def test_a_flag_wins_over_every_table():
    cfg = read("--recipe official --scale mini --omega_every 3 --no-wrn_quirk --iters 7 --n1 20")
    assert (cfg.omega_every, cfg.wrn_quirk, cfg.iters, cfg.n1) == (3, False, 7, 20)


@pytest.mark.parametrize("dataset", ["digits", "synthetic", "cifar10", "cifar100", "stl10"])
def test_ratio_takes_the_place_of_the_counts_of_a_built_in_dataset(dataset):
    cfg = read(f"--dataset {dataset} --ratio 2")
    assert (cfg.ratio, cfg.n1, cfg.m1, cfg.gamma_l, cfg.gamma_u) == (2, None, None, None, None)


def test_counts_take_the_place_of_a_ratio():
    cfg = read("--dataset sun397 --n1 40 --m1 60 --gamma_l 2 --gamma_u 1")
    assert (cfg.ratio, cfg.n1, cfg.m1, cfg.gamma_l, cfg.gamma_u) == (None, 40, 60, 2, 1)


def all_flags(parser):
    return {option for action in parser._actions for option in action.option_strings}


def test_every_line_of_the_recipe_table_is_a_flag_of_its_own():
    flags = all_flags(config.parser("", config.l2ac_flags))
    assert {f"--{key}" for table in config.RECIPES.values() for key in table} <= flags


def test_help_names_every_default_table(capsys):
    with pytest.raises(SystemExit) as end:
        read("--help")
    text = capsys.readouterr().out
    assert end.value.code == 0
    for table in (config.PROTOCOL, config.MINI, *config.DATASETS.values()):
        assert all(f"{key} {value}" in text for key, value in table.items())


@pytest.mark.parametrize("kind,low,high,text", [
    (int, 1, math.inf, "0"), (int, 1, math.inf, "1.5"), (float, 0, 1, "nan"), (float, 0, 1, "1.01"),
    (float, 0, math.inf, "inf"), (float, 0, math.inf, "-1"), (int, 0, 5, "x"), (float, 0, 1, "")])
def test_numbers_that_are_refused(kind, low, high, text):
    with pytest.raises((ValueError, argparse.ArgumentTypeError)):
        cli.number(kind, low, high)(text)


def test_a_word_in_place_of_a_number():
    parse = cli.number(float, 0, 30, "random")
    assert parse("random") == "random" and parse("4") == 4.0
    with pytest.raises(ValueError):
        parse("hard")


# ---------------------------------------------------------------------------------------------
# the default run folder

OTHER = {  # a value that is not the default, of every flag that makes another run
    "dataset": "cifar10", "gamma_l": 50, "gamma_u": 100, "reverse_u": None, "imbalance": "step",
    "n1": 20, "m1": 20, "beta": 0.1, "ratio": 2, "split": "first", "pool": "union",
    "recipe": "official", "batch_size": 6, "batch_size_u": 6, "lr": 0.1, "weight_decay": 0.1,
    "ema": 0.5, "bn_momentum": 0.5, "decay_bn": None, "model": "wrn-16-1", "wrn_quirk": None,
    "image_size": 8, "scale": "paper", "eval_every": 7, "dtype": "bfloat16", "seed": 1,
    "method": "none", "omega_every": 3, "omega_order": "before", "inner": "sgd",
    "attractor": "vector", "attractor_start": "prior", "no_flip": None,
    "attractor_input": "l2", "pseudo_from": "auto", "eta": 0.1, "hidden": 6, "tau": 0.5,
    "lambda_u": 2, "n_strong": 6, "ra_n": 1, "ra_m": "random"}
PLAIN = "runs/digits_fixmatch_l2ac_gl5_gu1_s0"


def flag(name):
    return f"--{name}" if OTHER[name] is None else f"--{name} {OTHER[name]}"


def test_default_folder_of_a_plain_command():
    assert read().out == PLAIN
    assert read("--dataset cifar10 --scale mini --method none --seed 3").out == (
        "runs/cifar10_fixmatch_none_gl100_gu1_mini_s3")


def test_different_settings_have_different_folders():
    """Each flag alone, and each together with --lr 0.1: all of them, the plain run and MixMatch's
    have a folder of their own."""
    known = {name.removeprefix("--no-").removeprefix("--") for name in all_flags(
        config.parser("", config.l2ac_flags, config.fixmatch_flags))} - {"-h", "help"}
    recorded = {"dataset_info", "cwd"}
    assert OTHER.keys() | set(config.FREE) - recorded == known             # no flag is forgotten
    commands = ["", *map(flag, OTHER)]                       # of digits --no_flip is the default
    commands += [f"--lr 0.1 {flag(name)}" for name in OTHER if name != "lr"]
    commands = [f"--dataset synthetic {command}" for command in commands]
    folders = [read(command).out for command in commands] + [read(commands[0], "mixmatch").out]
    assert len(set(folders)) == len(folders)


def test_folders_of_baselines_name_their_own_flags():
    commands = ["--method darp", "--method darp --darp_warm 0.1", "--method darp --darp_estimate",
                "--method sar", "--base mixmatch --method sar"]
    folders = [baselines.configure(command.split())[0].out for command in commands]
    assert len(set(folders)) == len(commands)


def test_default_folder_of_a_batch_size_u_that_is_the_default_of_another_batch_size():
    assert read("--batch_size 16 --batch_size_u 32").out != read("--batch_size 16").out


@pytest.mark.parametrize("flags", ["--iters 9", "--device cpu", "--threads 2", "--data_dir /tmp",
                                   "--compile", "--resume", "--overwrite", "--lr 0.002",
                                   "--dataset digits", "--scale mini", "--n1 10"])
def test_settings_that_may_change_on_resume_or_are_the_default_are_not_in_the_name(flags):
    assert read(flags).out == PLAIN


def test_a_folder_that_is_given_is_taken():
    assert read("--out here --lr 0.1").out == "here"


# ---------------------------------------------------------------------------------------------
# how a program ends


def test_full_unroll_is_no_method_of_the_training_script(capsys):
    code, err = exit_of(lambda argv: config.read(argv, "fixmatch"), ["--method", "full_unroll"],
                        capsys)
    assert code == 2 and err.count("\n") == 1 and "--method" in err and "full_unroll" in err


def ends(error, capsys):
    def main(argv):
        raise error
    return exit_of(main, [], capsys)


@pytest.mark.parametrize("error,sentence", [
    (UserError("--lr is wrong"), "--lr is wrong"),
    (OSError(errno.ENOSPC, "No space left on device", "runs/a/last.pt"),
     "No space left on device (runs/a/last.pt); what was saved before is intact"),
    (PermissionError(errno.EACCES, "Permission denied", "runs"), "Permission denied (runs)"),
    (torch.OutOfMemoryError("CUDA out of memory"), "too little memory"),
    (MemoryError(), "too little memory"), (UserError("a\nb\x1b[2J"), r"a\nb\x1b[2J"),
    (OSError(errno.ENOSPC, "No space left on device"), "No space left on device; what"),
    (dynamo.InternalTorchDynamoError("No working C++ compiler found"), "--compile")])
def test_errors_of_the_user_and_the_machine_are_one_sentence(error, sentence, capsys):
    code, err = ends(error, capsys)
    assert code == 2 and err.count("\n") == 1 and sentence in err and "Traceback" not in err


@pytest.mark.parametrize("error", [OSError("x"), AttributeError("x"), NameError("x"),
                                   RuntimeError("x"), ValueError("x"), KeyError("x")])
def test_errors_of_the_program_keep_their_traceback(error, capsys):
    with pytest.raises(type(error)) as kept:
        ends(error, capsys)
    assert kept.value is error and capsys.readouterr().err == ""


def test_memory_that_cannot_be_had(capsys):
    """As torch and numpy say it themselves."""
    for allocate in (lambda: torch.empty(2**55), lambda: np.empty(2**55, np.uint8),
                     lambda: torch.nn.Linear(10**18, 10)):
        code, err = exit_of(lambda argv, allocate=allocate: allocate(), [], capsys)
        assert code == 2 and err.count("\n") == 1 and "too little memory" in err


PRINTS = ("import sys\nfrom support import cli\n"
          "def main():\n    print('Stra\\u00dfe \\udcff', len(sys.stdout.isatty() * 'x'))\n"
          "cli.exit_cleanly(main)")


@pytest.mark.slow
@pytest.mark.parametrize("shell,code,out,err", [
    ("PYTHONIOENCODING=ascii {python}", 0, r"Stra\xdfe \udcff 0", ""),   # unknown letters
    ("{python} >&-", 0, "", ""), ("{python} >&- 2>&-", 0, "", ""),        # closed
    ("{python} > /dev/full", 2, "", "No space left on device"),
    ("{python} | true; exit ${{PIPESTATUS[0]}}", None, "", "")])
def test_streams_that_are_closed_full_or_of_few_letters(shell, code, out, err):
    python = f"{sys.executable} -c \"$PRINTS\""
    done = subprocess.run(["bash", "-c", shell.format(python=python)], capture_output=True,
                          text=True, cwd=ROOT, env=os.environ | {"PRINTS": PRINTS})
    assert done.returncode in ((0, 1) if code is None else (code,)), done
    assert done.stdout.strip() == out and err in done.stderr and "rror:" not in done.stderr
    assert done.stderr.count("\n") == bool(err)


@pytest.mark.slow
def test_every_program_without_docstrings():
    programs = ("train_fixmatch", "train_mixmatch", "evaluate", "baselines.train",
                "scripts.reproduce", "scripts.figures", "scripts.torture", "scripts.bench",
                "scripts.bench_loader", "scripts.full_unroll")
    code = "".join(f"import {name}\ntry:\n    {name}.main(['--help'])\nexcept SystemExit as end:\n"
                   "    print('end', end.code)\n" for name in programs)
    done = subprocess.run([sys.executable, "-OO", "-c", code], cwd=ROOT, capture_output=True,
                          text=True)
    assert done.stdout.count("end 0") == len(programs), done.stderr


def test_title_of_a_module_without_docstring():
    assert cli.title(None) == "" and cli.title("a b\n\nc") == "a b"


@pytest.mark.slow
def test_compile_without_a_compiler(tmp_path):
    done = subprocess.run(
        [sys.executable, "train_fixmatch.py", *TINY.split(), "--iters", "2", "--compile", "--out",
         str(tmp_path / "run")], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"PATH": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "c")})
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--compile" in done.stderr


def test_a_closed_pipe_ends_without_a_word(capsys):
    assert ends(BrokenPipeError(errno.EPIPE, "Broken pipe"), capsys) == (1, "")


def test_status_of_main_is_the_exit_code(capsys):
    for status in (None, 0, 130):
        assert exit_of(lambda argv, status=status: status, [], capsys) == (status, "")


def test_matched_distributions():
    for flags, expected in {"--gamma_l 10 --gamma_u 10": True, "--gamma_l 10 --gamma_u 1": False,
                            "--gamma_l 10 --gamma_u 10 --reverse_u": False,
                            "--ratio 2": True}.items():
        assert config.matched(read(flags)) == expected
    for pair in itertools.product(("linear", "adaptive", "auto"), (1, 10)):
        cfg = read("--pseudo_from {} --gamma_l 10 --gamma_u {}".format(*pair))
        assert config.adaptive_labels(cfg) == (pair in {("adaptive", 1), ("adaptive", 10),
                                                        ("auto", 10)})
