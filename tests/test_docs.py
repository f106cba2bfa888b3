"""Pages: links lead somewhere, and programs know the flags of the commands in blocks of code."""
import argparse
import csv
import importlib
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, train
from PIL import Image
from torch.distributed.run import parse_args as torchrun_arguments

import evaluate

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), ROOT / "baselines/README.md"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def commands(page):
    """(module, argument, ...) of the commands in a page, each up to a pipe or >."""
    text = "\n".join(code for kind, code in FENCE.findall(page.read_text()) if not kind)
    for line in re.split(r"\n|&&|\||> ", text.replace("\\\n", " ")):
        if re.match(r"\s*(python|torchrun) ", line):
            program, *words = shlex.split(line, comments=True)
            if program == "torchrun":
                known = torchrun_arguments(words)
                words = [known.training_script, *known.training_script_args]
            words = words[1:] if words[0] == "-m" else [words[0].removesuffix(".py"), *words[1:]]
            yield tuple(words)


class Parsed(Exception):
    """In place of doing it."""


COMMANDS = sorted({words for page in PAGES for words in commands(page)})


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_is_accepted(words, monkeypatch):
    parse = argparse.ArgumentParser.parse_args

    def parse_only(*args):
        raise Parsed(parse(*args))
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    with pytest.raises(Parsed):
        importlib.import_module(words[0]).main(list(words[1:]))


def test_the_code_of_data_md(tmp_path, monkeypatch, capsys):
    """Signs become files; a network in one's own code, and exported, does what --predict does."""
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).integers(0, 256, (43 * 6, 9, 12, 3), dtype=np.uint8)
    for folder in ("new_pictures", "data"):
        Path(folder).mkdir()
    for i, image in enumerate(x[:5]):
        Image.fromarray(image).save(f"new_pictures/{i}.png")
    y = np.arange(43 * 6) // 6                                  # two tracks of three frames each
    track = np.arange(43 * 6) // 3
    np.savez("data/gtsrb.npz", x_train=x, y_train=y, track=track, x_test=x, y_test=y)
    run = "runs/pictures"
    train(Path(run), "--iters 2")
    found = {}
    for kind, code in FENCE.findall((ROOT / "docs/data.md").read_text()):
        if kind == "python" and "mine" not in code:
            exec(code, found)
    assert np.array_equal(Image.open("signs/train/animals/track0062.png"), x[31 * 6 + 2])
    assert [len(list(Path(f).glob("**/*.png"))) for f in ("signs", "new_signs")] == [12 + 18, 18]
    capsys.readouterr()
    evaluate.main([run, "--predict", "new_pictures"])
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [row["label"] for row in rows] == found["labels"]
    for p in (found["p"], found["same"]):
        told = [float(row["probability"]) for row in rows]
        assert p.max(1).values.tolist() == pytest.approx(told, abs=1e-4)


def anchors(page):
    """Those that GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!http)([^)]+)\)", FENCE.sub("", page.read_text())):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists() and (not anchor or anchor in anchors(file)), target
