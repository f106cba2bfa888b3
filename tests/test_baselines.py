"""The loop of the comparison methods, the supervised ones, and a method of one's own: losses and
samplers against hand-written ones, plain bases against the tutorials, runs against evaluate.py."""
import json
import os
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from collections import deque
from functools import partial

import numpy as np
import pytest
import torch
from comparison import at_work, build, cross_entropy
from conftest import ROOT, TINY, checkpoint, same, stopped, train
from replay import MixMatch, Replay, compare

import data
import models
import train_fixmatch
import train_mixmatch
from baselines import Batch, Method
from baselines.train import configure, main
from support import augment
from support.finished import FinishedRun

SUPERVISED = "--base supervised --method "
CRT = f"{SUPERVISED}crt --iters 4 --crt_iters 4 --eval_every 3"
SHORT = "--iters 9 --gamma_u 100 --n1 100 --m1 100 --tau 0.15"


def backbone(weights):
    return {k: v for k, v in weights.items() if not k.startswith("classifier")}


# ---------------------------------------------------------------------------------------------
# the loop


@pytest.mark.parametrize("base,tutorial,flags", [
    ("fixmatch", train_fixmatch.main, "--tau 0.2 --n_strong 2"),
    ("mixmatch", train_mixmatch.main, "")])
def test_the_plain_base_equals_the_tutorial(tmp_path, base, tutorial, flags):
    theirs = train(tmp_path / "tutorial", f"--method none {flags}", tutorial)
    ours = train(tmp_path / "baseline", f"--base {base} {flags}", main)
    for part in ("model", "ema", "optimizer", "history", "step"):
        assert same(ours[part], theirs[part]), part


def test_what_the_hooks_see(tmp_path):
    """refine: features of the first weak view, and p, which MixMatch sharpens and takes from two
    views. extra_loss: what refine returned, its argmax, and which labels count."""
    seen = []

    class Spy(Method):
        def refine(self, p, batch):
            seen.append((p, batch.z_u))
            return p.flip(1)

        def extra_loss(self, batch):
            seen.append(batch)
            return 0
    state = train(tmp_path, "--base mixmatch --iters 1", partial(main, own=Spy))
    (p, z_u), batch = seen
    by_hand = MixMatch(Namespace(**state["config"]))
    x_u, _ = by_hand.take("unlabeled", 0)
    views = [by_hand.weak(x_u, name, 0) for name in ("weak", "second weak")]
    torch.testing.assert_close(z_u, by_hand.model.features(views[0]))
    squares = sum(by_hand.guess(x).softmax(1) for x in views) ** 2
    torch.testing.assert_close(p, squares / squares.sum(1, True))
    assert torch.equal(batch.p, p.flip(1)) and torch.equal(batch.y_u, 9 - p.argmax(1))
    assert torch.equal(batch.mask, torch.ones(6))


class PseudoLabels(Replay):
    """One pass over [x; u]; the target of u is the argmax of the same prediction. The weight of
    its loss grows over the first 40 % of three iterations."""

    def batch(self, step):
        (x_l, y_l), (x_u, _) = self.take("labeled", step), self.take("unlabeled", step)

        def lower(logits):
            log_p = logits.log_softmax(1)
            kept = [row.max() for row in log_p[6:] if row.max().exp() >= self.cfg.tau]
            assert 0 < len(kept) < 6                  # dividing by `kept` would differ
            loss_x = -sum(row[k] for row, k in zip(log_p[:6], y_l, strict=True)) / 6
            loss_u = -sum(kept) / 6
            return loss_x + (0, 1 / 1.2, 1)[step] * loss_u, loss_x, loss_u
        return torch.cat([self.weak(x_l, "labeled", step), self.weak(x_u, "weak", step)]), lower


def test_pseudo_labels_by_hand(tmp_path):
    compare(PseudoLabels, tmp_path, "--base pseudolabel --tau 0.2")


# ---------------------------------------------------------------------------------------------
# LDAM


@pytest.mark.parametrize("step,weighted", [(79, False), (80, True)])
def test_ldam_loss_against_numpy(step, weighted):
    """A margin of 0.5 (N_min / N_y)^(1/4) off the true class only, scale 30; in the last fifth of
    100 iterations a mean with weights 1e-4 / (1 - 0.9999^N). The classes come in any order."""
    g = np.random.default_rng(0)
    counts = g.permutation(data.class_counts(1500, 10, 100)).astype(float)
    cosines, y = g.uniform(-1, 1, (16, 10)), g.integers(10, size=16)
    method = build(f"{SUPERVISED}ldam --iters 100", torch.from_numpy(counts))
    ours = method.supervised_loss(torch.from_numpy(cosines).float(), torch.from_numpy(y), step)
    lowered = cosines.copy()
    lowered[np.arange(16), y] -= 0.5 * (15 / counts[y]) ** 0.25
    weights = 1 / (1 - 0.9999 ** counts[y]) if weighted else np.ones(16)
    expected = (weights * cross_entropy(30 * lowered, y)).sum() / weights.sum()
    assert ours.item() == pytest.approx(expected, rel=1e-5)


# ---------------------------------------------------------------------------------------------
# samplers and bounds


@pytest.mark.parametrize("name,flags", [("vanilla", ""), ("resampling", ""), ("upper_bound", ""),
                                        ("upper_bound", "--pool union")])
def test_which_images_are_taken(name, flags):
    """The 62 labeled images or, with the 51 unlabeled ones, 113: all of them in the first pass.
    Resampling: rounds of the ten classes."""
    method = at_work(f"{SUPERVISED}{name} --n1 12 --gamma_l 4 --m1 9 --gamma_u 3 {flags}")
    ctx = method.ctx
    allowed = sorted({*ctx.index_l, *(ctx.index_u if name == "upper_bound" else ())})
    assert len(allowed) == (113 if name == "upper_bound" else 62)
    index, y = (np.concatenate(part) for part in zip(*map(method.labeled, range(20)), strict=True))
    assert set(index) <= set(allowed) and np.array_equal(y, ctx.dataset.labels[index])
    if name == "resampling":
        assert all(sorted(y[r:r + 10]) == list(range(10)) for r in range(0, 120, 10))
    else:
        assert sorted(index[:len(allowed)]) == allowed


# ---------------------------------------------------------------------------------------------
# cRT


@pytest.fixture(scope="module")
def crt(tmp_path_factory, finished):
    """Checkpoints: vanilla, cRT between its stages, cRT at its end. The first stage ends between
    two evaluations."""
    return (checkpoint(finished(f"{SUPERVISED}vanilla --iters 4 --eval_every 3")),
            stopped(tmp_path_factory.mktemp("crt"), CRT, after=4, main=main),
            checkpoint(finished(CRT)))


def test_crt_first_stage_is_vanilla_and_the_classifier_starts_again(crt):
    vanilla, between, _ = crt
    assert same(vanilla["history"], between["history"])
    assert same(backbone(vanilla["ema"]), backbone(between["ema"]))
    assert same(between["ema"], between["model"])             # goes on from the averaged weights
    weight = between["model"]["classifier.weight"]
    torch.manual_seed(0)
    start = models.build("wrn-10-1", 10).classifier.weight
    assert all(not torch.equal(weight, other) for other in
               (vanilla["ema"]["classifier.weight"], vanilla["model"]["classifier.weight"], start))
    assert weight.std().item() == pytest.approx(start.std().item(), rel=0.15)
    assert torch.equal(between["model"]["classifier.bias"], torch.zeros(10))
    assert between["optimizer"]["state"] == {}


def test_crt_second_stage_by_hand(crt):
    """Features by running statistics, which stay; the mean of w_y H with w ~ 1 / N_k; a new Adam,
    no weight decay."""
    _, between, end = crt
    cfg, _ = configure(f"{TINY} {CRT}".split())
    dataset = data.load("synthetic", image_size=8)
    labeled, _ = data.split(dataset, cfg)
    stream = data.IndexStream(labeled, 6, 0, "labeled")
    share = 1 / np.bincount(dataset.labels[labeled])
    weights = torch.tensor(share / share.sum() * 10).float()
    model = models.build("wrn-10-1", 10)
    model.load_state_dict(between["model"])
    model.eval()
    optimizer = torch.optim.Adam(model.classifier.parameters(), cfg.lr)
    ema = {k: v.clone() for k, v in between["ema"].items() if k.startswith("classifier")}
    for step in range(4, 8):
        x, y = dataset.take(stream.batch(step))
        x = augment.weak(x, data.rng(0, "labeled view", step),
                         augment.Normalise(dataset.mean, dataset.std))
        loss = -(model(x).log_softmax(1) * torch.eye(10)[y] * weights).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema = {k: cfg.ema * v + (1 - cfg.ema) * model.state_dict()[k] for k, v in ema.items()}
    for key, value in ema.items():
        torch.testing.assert_close(end["model"][key], model.state_dict()[key])
        torch.testing.assert_close(end["ema"][key], value)
    for part in ("model", "ema"):
        assert same(backbone(between[part]), backbone(end[part]))


# ---------------------------------------------------------------------------------------------
# runs and their files: one method for each thing that a method can change or has to save

RUNS = {"ldam": SUPERVISED + "ldam", "crt": CRT, "abc": f"{SHORT} --method abc",
        "cdmad": f"{SHORT} --method cdmad", "la_post_hoc": f"{SHORT} --method la_post_hoc",
        "darp": f"{SHORT} --method darp", "crest+": f"{SHORT} --method crest+",
        "single_level": f"{SHORT} --method single_level"}


@pytest.mark.parametrize("name", ["ldam", "crt", "abc", "cdmad", "la_post_hoc", "crest+",
                                  "single_level"])
def test_evaluate_agrees_with_training(finished, name):
    """Its own classifier, a change of prediction, a part of the evaluations, an attractor."""
    folder = finished(RUNS[name])
    run, last = FinishedRun(folder), checkpoint(folder)["history"][-1]
    assert run.last["recall"] == pytest.approx([last[f"recall_{k}"] for k in range(10)])
    result = json.loads((folder / "result.json").read_text())
    assert run.reported["gm"] == pytest.approx(result["gm"])
    assert (run.attractor is not None) == (name == "single_level") == ("bias_0" in last)


@pytest.mark.parametrize("name,first", [("crt", 4), ("crest+", 7)])
def test_only_the_last_stage_is_reported(finished, name, first):
    """cRT: its second stage; CReST: the last of five generations, which ends after 7 of 9."""
    folder = finished(RUNS[name])
    counted = [row["bacc"] for row in checkpoint(folder)["history"] if row["iter"] > first]
    result = json.loads((folder / "result.json").read_text())
    assert len(counted) == result["evaluations"] == (2 if name == "crt" else 1)
    assert result["bacc"] == pytest.approx(np.mean(counted), rel=1e-5)


@pytest.mark.parametrize("name,after", [("darp", 6), ("crest+", 6), ("crt", 5),
                                        ("single_level", 4)])
def test_a_stopped_run_resumes_exactly(tmp_path, finished, name, after):
    """Buffers within a period of DARP; a restart within CReST's fourth generation; a network that
    is frozen; parameters of the method."""
    stopped(tmp_path, RUNS[name], after, main)
    assert same(checkpoint(finished(RUNS[name])), train(tmp_path, RUNS[name] + " --resume", main))


# ---------------------------------------------------------------------------------------------
# a method of one's own: the example of baselines/README.md

README = (ROOT / "baselines" / "README.md").read_text()
EXAMPLE, = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)


def test_the_example_against_numpy():
    """140 batches: p times prior over the mean of the 128 batches before, uniform at first."""
    names = {"__name__": "alignment"}
    exec(EXAMPLE, names)
    method, g = names["Alignment"](build("").ctx), np.random.default_rng(0)
    recent = deque([np.full(3, 1 / 3)] * 128, maxlen=128)
    for step in range(140):
        p = g.dirichlet([1, 2, 3], size=4)
        expected = p * [0.7, 0.2, 0.1] / np.mean(recent, axis=0)
        recent.append(p.mean(0))
        ours = method.refine(torch.from_numpy(p).float(), Batch(step, None, None))
        np.testing.assert_allclose(ours, expected / expected.sum(1, keepdims=True), rtol=1e-4)


@pytest.mark.slow
def test_one_file_in_a_copy_of_the_tree(tmp_path):
    """The commands of the README, with the file in baselines/ and in the root."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for item in (*ROOT.glob("*.py"), *map(ROOT.joinpath, ("baselines", "scripts", "support"))):
        (shutil.copytree if item.is_dir() else shutil.copy)(item, tree / item.name)
    for folder in (tree, tree / "baselines"):
        (folder / "alignment.py").write_text(EXAMPLE)
    flags = f"{TINY} --iters 6 --out"
    for words in (f"-m baselines.alignment {flags} runs/a", f"alignment.py {flags} runs/b",
                  "evaluate.py runs/a runs/b"):
        done = subprocess.run([sys.executable, *words.split()], cwd=tree, text=True,
                              capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0 and "bACC" in done.stdout, done.stderr
