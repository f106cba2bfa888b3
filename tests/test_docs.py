"""Pages: links lead somewhere, and programs know the flags of the commands in blocks of code."""
import argparse
import importlib
import re
import shlex

import pytest
from conftest import ROOT
from torch.distributed.run import parse_args as torchrun_arguments

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), ROOT / "baselines/README.md"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def commands(page):
    """(module, argument, ...) of the command lines in a page's blocks of code, up to a pipe."""
    text = "\n".join(code for kind, code in FENCE.findall(page.read_text()) if not kind)
    for line in re.split(r"\n|&&|\|", text.replace("\\\n", " ")):
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
