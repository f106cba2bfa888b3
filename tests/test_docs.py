"""Pages: links lead somewhere, and what stands in blocks of code runs."""
import csv
import importlib
import re
import shlex
import shutil
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, train
from PIL import Image
from torch.distributed.run import parse_args as torchrun_arguments
from torchvision.models import resnet50

import evaluate
import train_fixmatch
from scripts import collect, figures
from support import config

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), ROOT / "baselines/README.md"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def commands(page):
    """[module, argument, ...] of each command in a page, up to a pipe or >."""
    text = "\n".join(code for kind, code in FENCE.findall(page.read_text()) if not kind)
    for line in re.split(r"\n|&&|\||> ", text.replace("\\\n", " ")):
        if re.match(r"\s*(python|torchrun) ", line):
            program, *words = [word for part in shlex.split(line, comments=True)
                               for word in in_braces(part)]
            if program == "torchrun":
                known = torchrun_arguments(words)
                words = [known.training_script, *known.training_script_args]
            yield words[1:] if words[0] == "-m" else [words[0].removesuffix(".py"), *words[1:]]


def in_braces(word):
    """a_{b,c} -> a_b, a_c, as in the shell."""
    at = re.search(r"\{(.*?)\}", word)
    return [word] if not at else [whole for part in at[1].split(",") for whole in in_braces(
        word[:at.start()] + part + word[at.end():])]


@pytest.mark.slow
def test_the_commands_of_the_pages_run(tmp_path, monkeypatch):
    """All of them, in the order of the pages, for two iterations on little data."""
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).integers(0, 256, (4500, 8, 8, 3), np.uint8)
    y = np.arange(4500) % 10
    Path("data").mkdir()
    np.savez("data/cifar10.npz", x_train=x, y_train=y, x_test=x[:200], y_test=y[:200])
    for i in range(60):                                          # the folders of README, data.md
        for place in (f"pictures/train/{'abc'[i % 3]}", "pictures/unlabeled", "new_pictures"):
            Path(place).mkdir(parents=True, exist_ok=True)
            Image.fromarray(x[i]).save(f"{place}/{i}.png")
    shutil.copytree("pictures", "signs")
    shutil.copytree("pictures/train", "new_signs")
    for name in ("README.md", "docs", "results"):                # `collect` writes to these
        (shutil.copytree if "." not in name else shutil.copy)(ROOT / name, tmp_path / name)
    monkeypatch.setattr(collect, "ROOT", tmp_path)
    monkeypatch.setattr(collect, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url",
                        lambda *_, **__: resnet50().state_dict())
    read = config.read

    def shrunk(*args):
        cfg = read(*args)
        cfg.iters, cfg.eval_every, cfg.batch_size, cfg.batch_size_u = 2, 2, 4, 4
        cfg.device, cfg.overwrite = "cpu", not cfg.resume
        if cfg.dataset == "cifar10":
            cfg.n1, cfg.m1 = 150, 300
        return cfg
    monkeypatch.setattr(config, "read", shrunk)
    for name in ("read_results", "configuration"):               # with memories of their own
        function = getattr(collect, name).__wrapped__
        monkeypatch.setattr(collect, name, lru_cache(None)(function))
    for method in ("none", "l2ac"):                              # named in results.md
        train_fixmatch.main(["--method", method, "--seed", "2"])
    for page in PAGES:
        for module, *words in commands(page):
            importlib.import_module(module).main(words)
    assert {path.stem for path in Path("figures").iterdir()} == figures.FIGURES.keys()


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
