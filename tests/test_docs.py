"""README.md, docs/ and baselines/README.md: links lead somewhere, commands are accepted by the
parsers they are meant for and run on stand-ins of the data, flags exist, README.md is short."""
import argparse
import ast
import csv
import importlib
import itertools
import re
import shlex
import textwrap
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, checkpoint, train
from PIL import Image
from test_cli import modules
from torch.distributed.run import parse_args as torchrun_arguments

import evaluate
import train_fixmatch
import train_mixmatch
from baselines import Method
from baselines import train as baselines
from scripts import full_unroll
from support import config

PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in (
    ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), ROOT / "baselines/README.md")}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def prose(page):
    """The page without its blocks of code."""
    return FENCE.sub("", PAGES[page])


# ---------------------------------------------------------------------------------------------
# the page as a text


def anchors(page):
    """Those that GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", prose(page)):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(str(file.resolve().relative_to(ROOT))), target


@pytest.mark.parametrize("page", PAGES)
def test_no_placeholder_is_left(page):
    """Nor a name in capitals that a text or number was to replace; flags of the shell are code."""
    shouted = r"\b[A-Z]+(-[A-Z]+){2,}\b|(?<!`)\b[A-Z]+(_[A-Z]+){2,}\b"   # NUMBERS-TO-COME
    assert not re.search(rf"@\w+@|TODO|{shouted}", PAGES[page])


@pytest.mark.parametrize("page", PAGES)
def test_rows_of_a_table_have_its_columns(page):
    for table in re.findall(r"(?:^\|.*\n)+", prose(page), re.M):
        rows = re.sub(r"`[^`]*`", "", table).splitlines()
        assert len({row.count("|") for row in rows}) == 1, table


def test_the_front_page_is_short_and_starts_with_a_command():
    lines = PAGES["README.md"].splitlines()
    assert len(lines) <= 200
    assert max(len(line) for line in lines if not line.startswith("|")) <= 120   # tables: collect
    first = next(i for i, line in enumerate(lines, 1) if line.startswith("python "))
    assert first < 60


@pytest.mark.parametrize("page", PAGES)
def test_flags_exist(page):
    strings = [node.value for tree in modules().values() for node in ast.walk(tree)
               if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    known = {value for value in strings if re.fullmatch("--[a-z][a-z_0-9]*", value)}
    known |= {f"--no-{name[2:]}" for name in known}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z_0-9]*", PAGES[page])) <= known


# ---------------------------------------------------------------------------------------------
# its commands


def expand(word):
    """Braces, as a shell does: a{0,1} -> a0 a1"""
    parts = re.split(r"\{([^}]*)\}", word)
    return map("".join, itertools.product(*(
        part.split(",") if i % 2 else [part] for i, part in enumerate(parts))))


def commands(page):
    """[words] of every command line: in blocks of code, and in the text if it has no placeholder
    (a capital letter) in it."""
    blocks = [code.replace("\\\n", " ") for kind, code in FENCE.findall(PAGES[page]) if not kind]
    lines = [line for block in blocks for line in block.splitlines()]
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(page))]
    lines += [span for span in spans if not re.search(r"\b[A-Z]+\b|_[A-Z]", span)]
    for line in itertools.chain.from_iterable(line.split("&&") for line in lines):
        if re.match(r"\s*(python|torchrun|pytest|pip) ", line):
            words = [w for word in shlex.split(line, comments=True) for w in expand(word)]
            if len(words) > 1:
                yield words


def target(words):
    """(script or module, its arguments)"""
    if words[0] == "torchrun":
        known = torchrun_arguments(words[1:])
        return known.training_script, known.training_script_args
    return (words[2], words[3:]) if words[1] == "-m" else (words[1], words[2:])


def own_method(script):
    """A method like that which a page tells its reader to save under this name; else None."""
    saved = re.findall(r"[Ss]ave it as\s+`([\w/]+)\.py`", "".join(PAGES.values()))
    name = script.removeprefix("baselines.")
    return type(name.title(), (Method,), {}) if script in (
        path.replace("/", ".") for path in saved) else None


TRAINING = {"train_fixmatch.py": (lambda argv: config.read(argv, "fixmatch"), train_fixmatch.main),
            "train_mixmatch.py": (lambda argv: config.read(argv, "mixmatch"), train_mixmatch.main),
            "baselines.train": (baselines.configure, baselines.main),
            "scripts.full_unroll": (full_unroll.configure, full_unroll.main)}


def training(script):
    """(function that reads its flags, its main), or None"""
    own = own_method(script)
    return (partial(baselines.configure, own=own), partial(baselines.main, own=own)) if own else (
        TRAINING.get(script))


class Parsed(Exception):
    """What a script is told to do, in place of doing it."""


def check(words, monkeypatch):
    """Raises unless the command is one that its program accepts."""
    if words[0] == "pip":
        assert words[1:3] == ["install", "-r"] and (ROOT / words[3]).exists()
    elif words[0] == "pytest":
        paths, marks = (words[1:], "") if "-m" not in words else (
            words[1:words.index("-m")], words[words.index("-m") + 1])
        assert set(marks.split()) <= {"slow", "or", "not"}
        assert paths and all((ROOT / path).exists() for path in paths)
    else:
        script, argv = target(words)
        if training(script):
            training(script)[0](argv)
        elif script.startswith("tests/"):
            assert (ROOT / script).exists() and not argv
        else:
            parse = argparse.ArgumentParser.parse_args

            def parse_only(*args):
                raise Parsed(parse(*args))
            monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
            with pytest.raises(Parsed):
                importlib.import_module(script.removesuffix(".py")).main(argv)


COMMANDS = {f"{page}: {' '.join(words)}": words for page in PAGES for words in commands(page)}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_accepted(name, monkeypatch):
    check(COMMANDS[name], monkeypatch)


def test_commands_are_found():
    """Also in the middle of a sentence, with a comment behind them, over two lines."""
    found = set(map(" ".join, COMMANDS.values()))
    assert len(found) > 40 and {
        "python train_fixmatch.py", "pytest tests/", "python -m scripts.reproduce collect",
        "python -m scripts.torture --processes 2 --kills 6",
        "torchrun --standalone --nproc_per_node 4 train_fixmatch.py --dataset cifar10",
        "python -m scripts.figures runs/gu1_none_s0 runs/gu1_none_s1 runs/gu1_none_s2 "
        "runs/gu1_l2ac_s0 runs/gu1_l2ac_s1 runs/gu1_l2ac_s2 --out assets --only confusion losses",
        } <= found


@pytest.mark.parametrize("line", [
    "python train_fixmatch.py --metod none", "python -m baselines.train --method nothing",
    "python evaluate.py", "python -m scripts.figures runs/a --out x --only nothing",
    "python -m scripts.reproduce gather", "pytest tests/test_nothing.py",
    "torchrun --standalone --nproc_per_node 2 train_mixmatch.py --tau 0.5"])
def test_a_wrong_command_would_be_noticed(line, monkeypatch):
    with pytest.raises(Exception) as error:
        check(shlex.split(line), monkeypatch)
    assert not isinstance(error.value, Parsed)


# ---------------------------------------------------------------------------------------------
# its commands, carried out


SMALL = dict(model="wrn-10-1", image_size=8, batch_size=4, iters=2, eval_every=2)


@pytest.fixture
def small(monkeypatch, tmp_path):
    """An empty folder with stand-ins of the data; by default a run has two iterations."""
    monkeypatch.chdir(tmp_path)
    for table in (config.PROTOCOL, config.MINI, config.MINI_SMALL, config.DATASETS["own folder"]):
        for key in SMALL.keys() & table.keys():
            monkeypatch.setitem(table, key, SMALL[key])
    g = np.random.default_rng(0)
    y = np.repeat(np.arange(10), 5000)
    x = g.integers(0, 256, (len(y), 8, 8, 3), np.uint8)
    (tmp_path / "data").mkdir()
    np.savez(tmp_path / "data/cifar10.npz", x_train=x, y_train=y, x_test=x[::250], y_test=y[::250])
    for folder, count in {**{f"pictures/{part}/{name}": count for part in ("train", "test")
                             for name, count in (("cat", 9), ("dog", 5), ("emu", 3))},
                          "pictures/unlabeled": 12, "new_pictures": 2}.items():
        (tmp_path / folder).mkdir(parents=True)
        for i in range(count):
            pixels = g.integers(0, 256, (9 + i, 12, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / folder / f"{i}.png")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_run_one_after_the_other(page, small, capsys):
    """Training, and evaluation on those pages that evaluate runs of their own."""
    done, complete = 0, page in ("README.md", "docs/data.md")
    for words in map(list, dict.fromkeys(map(tuple, commands(page)))):
        script, argv = target(words) if words[0] == "python" else ("", [])
        if training(script):
            argv = [*argv, "--iters", "2", "--threads", "1"]
            argv += ["--crest_generations", "1"] * ("crest" in argv)
            training(script)[1](argv)
            done += 1
        elif script == "evaluate.py" and complete:
            evaluate.main(argv)
            done += 1
        assert "Traceback" not in capsys.readouterr().out
    if complete:
        rows = list(csv.DictReader((small / "out.csv").read_text().splitlines()))
        assert done >= 8 and len(rows) == 2                                    # two pictures
    if page == "docs/data.md":
        example, = (code for kind, code in FENCE.findall(PAGES[page]) if kind == "python")
        exec(example, space := {})
        assert space["labels"] == [row["label"] for row in rows]


# ---------------------------------------------------------------------------------------------
# the method of the front page


@pytest.fixture(scope="module")
def aligned():
    example, = (code for kind, code in FENCE.findall(PAGES["README.md"]) if kind == "python")
    space = {"__name__": "aligned"}
    exec(textwrap.dedent(example), space)
    return space["Aligned"]


def test_the_example_of_the_front_page_aligns_a_batch(aligned):
    counts = torch.tensor([6.0, 2.0], dtype=torch.float64)
    p = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]])
    method = aligned(SimpleNamespace(counts=counts))
    torch.testing.assert_close(method.refine(p, None), torch.tensor([[0.75, 0.25]]).expand(3, 2))


def test_the_example_of_the_front_page_trains(aligned, tmp_path):
    train(tmp_path, "--tau 0.1 --gamma_u 100", partial(baselines.main, own=aligned))
    state = checkpoint(tmp_path)
    assert state["step"] == 6 and state["config"]["method"] == "aligned"
