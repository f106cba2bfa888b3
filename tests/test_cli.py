"""The command lines as a user meets them: run folders, evaluate, the README. Wrong input has a file
of its own, test_wrong_input.py."""
import ast
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import data
import evaluate
import settings
import train_fixmatch
import train_mixmatch
from baselines import train as baselines

ROOT = Path(__file__).parent.parent
TINY = "--image_size 8 --batch_size 6 --eval_every 2 --iters 4 --threads 1 --device cpu"


def run(main, argv, capsys):
    """(exit code, stderr) of a script called with argv."""
    with pytest.raises(SystemExit) as end:
        settings.exit_cleanly(lambda: main(argv), data.DataError)
    return end.value.code, capsys.readouterr().err


def train(flags, out, capsys):
    return run(train_fixmatch.main, [*TINY.split(), *flags.split(), "--out", str(out)], capsys)


def test_no_data_and_no_network(tmp_path, capsys, monkeypatch):
    def offline(*args, **kwargs):
        raise OSError("no network")
    monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", offline)
    code, err = train(f"--dataset cifar10 --data_dir {tmp_path}", tmp_path / "run", capsys)
    assert code == 2 and err.count("\n") == 1
    assert all(word in err for word in ("cifar10.npz", str(tmp_path), "--dataset synthetic"))


def test_an_existing_run_is_never_overwritten_unasked(tmp_path, capsys):
    out = tmp_path / "run"
    assert train("", out, capsys)[0] is None
    before = {f.name: f.read_bytes() for f in out.iterdir()}
    code, err = train("--seed 1", out, capsys)
    assert code == 2 and "already holds a run" in err
    assert before == {f.name: f.read_bytes() for f in out.iterdir()}
    code, err = train("--seed 1 --resume", out, capsys)
    assert code == 2 and "--seed is 1" in err
    code, err = train("--iters 3 --resume", out, capsys)
    assert code == 2 and "--iters is 3" in err
    assert before == {f.name: f.read_bytes() for f in out.iterdir()}
    assert train("--seed 1 --overwrite", out, capsys)[0] is None
    assert json.loads((out / "config.json").read_text())["seed"] == 1


@pytest.mark.parametrize("flags,what", [
    ("--lr 1e30 --iters 20", "the loss of iteration"),
    ("--lr 1e30 --iters 1 --method none", "the weights are not finite")])
def test_a_run_that_diverges_stops_and_saves_nothing(tmp_path, capsys, flags, what):
    code, err = train(flags, tmp_path / "run", capsys)
    assert code == 2 and what in err and err.count("\n") == 1
    assert not (tmp_path / "run/last.pt").exists() and not (tmp_path / "run/result.json").exists()


def test_results_without_a_checkpoint_are_not_resumed_over(tmp_path, capsys):
    train("", tmp_path / "run", capsys)
    for name in ("last.pt", "prev.pt"):
        (tmp_path / "run" / name).unlink()
    code, err = train("--resume", tmp_path / "run", capsys)
    assert code == 2 and "no checkpoint" in err


def test_evaluate_shows_runs_side_by_side(tmp_path, capsys):
    for method in ("none", "l2ac"):
        train(f"--method {method}", tmp_path / method, capsys)
    folders = [str(tmp_path / m) for m in ("none", "l2ac")]
    assert run(evaluate.main, folders, capsys)[0] is None
    evaluate.main(folders)
    text = capsys.readouterr().out
    assert "none" in text and "l2ac" in text and "recall saltire" in text
    evaluate.main([*folders, "--json"])
    numbers = json.loads(capsys.readouterr().out)
    for method in ("none", "l2ac"):
        log = (tmp_path / method / "log.csv").read_text().splitlines()
        last = dict(zip(log[0].split(","), map(float, log[-1].split(","))))
        numbers[method] = numbers[str(tmp_path / method)]
        assert numbers[method]["last"]["bacc"] == pytest.approx(last["bacc"], rel=1e-5)
        result = json.loads((tmp_path / method / "result.json").read_text())
        assert numbers[method]["mean_of_last_20"]["gm"] == pytest.approx(result["gm"])


def test_from_a_shell(tmp_path):
    """A real process: exit codes, and nothing but the sentence on stderr."""
    command = [sys.executable, "train_fixmatch.py", *TINY.split(), "--out", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "l2ac: bACC" in done.stdout and done.stderr == ""
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 2 and again.stderr.count("\n") == 1


def test_import_graph():
    """Imports point one way: the nouns import no sibling (evaluate does, but only as a script;
    finished puts them together)."""
    siblings = {p.stem for p in ROOT.glob("*.py")}
    allowed = {"bilevel": {"attractor"}, "data": {"readers"}, "settings": {"distributed"},
               "run_folder": {"distributed", "settings"}, "common": {"distributed", "settings"},
               "finished": siblings}
    for name in siblings - {n for n in siblings if n.startswith("train_")}:
        tree = ast.parse((ROOT / f"{name}.py").read_text())
        imported = {alias.name for node in tree.body if isinstance(node, ast.Import)
                    for alias in node.names}
        imported |= {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
        assert imported & siblings <= allowed.get(name, set()), name


SCRIPTS = {"train_fixmatch.py": train_fixmatch, "train_mixmatch.py": train_mixmatch,
           "baselines.train": baselines}


def readme_commands():
    blocks = re.findall(r"```(?:bash|sh)?\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    return [line.split("#")[0].strip() for block in blocks for line in block.splitlines()
            if any(script in line for script in SCRIPTS)]


def test_readme_training_commands_are_accepted():
    commands = readme_commands()
    assert len(commands) >= 5
    for command in commands:
        words = shlex.split(command.split("&&")[-1])
        script = next(word for word in words if word in SCRIPTS)
        SCRIPTS[script].config(words[words.index(script) + 1:])


def test_readme_names_no_flag_that_does_not_exist():
    text = (ROOT / "README.md").read_text()
    code = "".join(path.read_text() for path in
                   [*ROOT.glob("*.py"), *ROOT.glob("baselines/*.py"), *ROOT.glob("scripts/*.py")])
    known = {f"--{name}" for name in re.findall(r'"--([a-z][a-z_0-9]*)"', code)}
    known |= {f"--no-{name[2:]}" for name in known}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z_0-9]*", text)) <= known
