"""What the tests share: tiny runs, comparison of checkpoints, a cached dataset."""
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch

import train_fixmatch
from baselines import train as baselines
from support import readers
from support import run as run_module

ROOT = Path(__file__).parent.parent
# One thread, 8 x 8 pixels, a batch of six: tenths of a second for six iterations.
TINY = "--dataset synthetic --image_size 8 --batch_size 6 --eval_every 3 --threads 1 --device cpu"


@pytest.fixture(autouse=True, scope="session")             # so that it holds in all fixtures too
def tiny_synthetic_data():
    """Made once per size, with 20 test images of each class."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "make_synthetic", cache(partial(readers.make_synthetic,
                                                               each_test=20)))
        yield


@pytest.fixture(autouse=True)
def clean_process():
    """One thread (for so little work more only wait), and no stop request left behind."""
    torch.set_num_threads(1)
    yield
    run_module.stop_requests.clear()


# ---------------------------------------------------------------------------------------------
# runs


def train(out, flags="", main=train_fixmatch.main, on_step=None):
    """last.pt of a tiny run of six iterations."""
    main([*TINY.split(), "--iters", "6", *flags.split(), "--out", str(out)], on_step)
    return checkpoint(out)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Function: flags -> folder of a finished baseline. Runs are shared; tests only read them."""
    @cache
    def run(flags):
        out = tmp_path_factory.mktemp("run")
        train(out, flags, baselines.main)
        return out
    return run


def checkpoint(out):
    return torch.load(out / "last.pt", weights_only=True)


def stopped(out, flags, after, main=train_fixmatch.main):
    """last.pt of a run that a stop signal reaches in iteration `after`."""
    def on_step(step, losses):
        if step == after - 1:
            run_module.stop_requests.append("a signal")
    with pytest.raises(SystemExit) as end:
        train(out, flags, main, on_step)
    run_module.stop_requests.clear()
    state = checkpoint(out)
    assert end.value.code == 130 and state["step"] == after
    return state


def same(a, b):
    """Equality of nested checkpoints, bit for bit; the clock and the command line may differ."""
    if isinstance(a, dict):
        skip = {"seconds", "it_per_s", "config"}
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a.keys() - skip)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    return a == b or (a != a and b != b)


def files(folder):
    return {f.name: f.read_bytes() for f in folder.iterdir()}


def own_npz(folder):
    """An .npz of noise: 5 classes, of which 4 are tested, and unlabeled images."""
    g = np.random.default_rng(0)

    def images(n):
        return g.integers(0, 256, (n, 20, 20, 3), dtype=np.uint8)
    np.savez(folder / "own.npz", x_train=images(60), y_train=np.arange(60) % 5,
             x_test=images(20), y_test=np.arange(20) % 4, x_unlabeled=images(80))
    return folder / "own.npz"


def relative_difference(ours, theirs):
    """Of two lists of tensors, in the Euclidean norm."""
    a, b = (torch.cat([t.flatten() for t in tensors]) for tensors in (ours, theirs))
    return ((a - b).norm() / b.norm()).item()
