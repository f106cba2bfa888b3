"""docs/tutorial.ipynb: its code runs from top to bottom, and its mathematics is right."""
import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


def execute(iters):
    """What the code cells define, with training runs of `iters` steps; no figure is shown."""
    names = {"__name__": "tutorial"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plt, "show", lambda: plt.close("all"))
        patch.setattr(plt, "rcParams", plt.rcParams.copy())
        patch.syspath_prepend(ROOT)                        # restores sys.path at the end
        for cell in json.loads((ROOT / "docs/tutorial.ipynb").read_text())["cells"]:
            if cell["cell_type"] == "code":
                exec("".join(cell["source"]), names)
                names["ITERS"] = iters
    return names


@pytest.fixture(scope="module")
def notebook():
    return execute(iters=10)


def test_the_gradients_agree_with_finite_differences(notebook):
    differences = notebook["differences"]
    assert len(differences) == 10 * 8 + 8 + 8 * 10 + 10 and differences.norm() > 1e-6
    for name in ("unrolled", "cheap"):
        gradient = torch.cat([part.flatten() for part in notebook[name]])
        assert gradient.dtype == torch.float64
        assert torch.allclose(gradient, differences, rtol=1e-3, atol=1e-9)


def test_exercises_accept_the_solutions_and_nothing_else(notebook):
    assert notebook["solutions"] == [True] * 3
    for number, name in enumerate(("post_hoc", "vector_gradient", "predicted_slope"), 1):
        check, solution = notebook[f"check_{number}"], notebook[f"{name}_solution"]
        assert check(solution) and not check(notebook[name])              # not answered yet
        assert not check(lambda *args, solve=solution: 1.1 * solve(*args))
    assert not notebook["check_1"](lambda logits, counts: logits + counts.log())
    assert not notebook["check_2"](lambda p, w, u: (w[:, None] * p * u).sum(0))
    assert notebook["check_1"](lambda logits, counts: logits - (counts / counts.sum()).log())


def test_the_data(notebook):
    """200 * 100^(-k/9), truncated; a reversed or uniform unlabeled set leaves the labels alone."""
    data = notebook["data"]
    assert data.n.tolist() == [200, 119, 71, 43, 25, 15, 9, 5, 3, 2]
    reverse, uniform = notebook["make_data"](reverse=True), notebook["make_data"](gamma_u=1)
    assert reverse.m.tolist() == data.m.tolist()[::-1] and set(uniform.m) == {1000}
    for other in (data, reverse, uniform):
        assert torch.equal(other.x_l, data.x_l) and torch.equal(other.x_t, data.x_t)
        assert torch.bincount(other.y_u).tolist() == other.m.tolist()
    assert torch.bincount(data.y_t).tolist() == [200] * 10


def test_what_is_added_to_the_logits(notebook):
    data, B, logits = notebook["data"], notebook["B"], torch.zeros(notebook["B"] + 5, 10)
    log_pi = torch.tensor(data.n / data.n.sum(), dtype=torch.float32).log()
    rows = notebook["LogitAdjustment"](data, rows=B).adapt(logits)
    assert torch.equal(rows[:B], log_pi.expand(B, 10)) and not rows[B:].any()
    assert torch.equal(notebook["LogitAdjustment"](data).adapt(logits), log_pi.expand_as(logits))
    l2ac = notebook["L2AC"](data, start="prior")
    assert torch.allclose(l2ac.attractor.out.bias, log_pi - log_pi.mean(), atol=1e-5)
    assert torch.bincount(l2ac.balanced_batch()[1]).tolist() == [6] * 10
    log_n, pi = np.log(data.n), data.n / data.n.sum()
    for kept, expected in ((0 * pi, pi), (2 * pi, pi), (0.3 - pi, np.full(10, 0.1))):
        log_eff = notebook["log_effective"](data, kept)
        assert np.allclose(log_eff, np.log(expected) - np.log(expected).mean())
        assert notebook["slope"](log_eff, log_n) == pytest.approx(float(expected is pi), abs=1e-9)


@pytest.mark.slow
def test_l2ac_wins_the_tail_back(notebook):
    """Section 7, with the notebook's 1,200 steps; chance would give the tail a recall of 10 %."""
    notebook["ITERS"] = 1200
    data, train = notebook["data"], notebook["train"]
    plain, l2ac = train(data, notebook["FixMatch"]()), train(data, notebook["L2AC"](data))
    assert l2ac["tail"] > 10 > plain["tail"] and l2ac["bacc"] > plain["bacc"] + 4
