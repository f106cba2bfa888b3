"""The losses of 20 iterations as they were when golden.json was written.

    python tests/test_golden.py         writes it anew: after a change that is meant to change them

On one machine a run repeats itself bit for bit (test_train_fixmatch.py). Another CPU or another
PyTorch rounds differently, and Adam enlarges the difference with every iteration, hence TOLERANCE;
one and two threads differ by less than a tenth of it (omega's first gradient is next to nothing
and mostly rounding: ABSOLUTE).
"""
import json
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))        # when called as a script

import train_fixmatch  # noqa: E402
import train_mixmatch  # noqa: E402

GOLDEN = Path(__file__).with_name("golden.json")
FLAGS = ("--dataset synthetic --image_size 8 --batch_size 8 --iters 20 --eval_every 20 "
         "--device cpu --threads ")
SCRIPTS = {"fixmatch": (train_fixmatch, "--tau 0.2"), "mixmatch": (train_mixmatch, "")}
COLUMNS = ("loss_x", "loss_u", "loss_bal", "omega_grad")
TOLERANCE, ABSOLUTE = 0.01, 1e-6     # relative; of values below 1e-4


def losses(name, threads=1):
    """loss_x, loss_u, L_bal and the norm of omega's gradient, of each iteration."""
    (script, more), seen = SCRIPTS[name], []

    def on_step(step, values):
        seen.append([values[key].item() for key in COLUMNS])
    with tempfile.TemporaryDirectory() as out:
        script.main([*(FLAGS + str(threads)).split(), *more.split(), "--out", out], on_step)
    return seen


@pytest.mark.parametrize("name", SCRIPTS)
def test_losses_are_the_golden_ones(name):
    golden = json.loads(GOLDEN.read_text())[name]
    assert len(golden) == 20 and len(golden[0]) == 4
    for step, (now, then) in enumerate(zip(losses(name), golden, strict=True)):
        assert now == pytest.approx(then, rel=TOLERANCE, abs=ABSOLUTE), step


if __name__ == "__main__":
    rows = {name: [f"  {json.dumps(row)}" for row in losses(name)] for name in SCRIPTS}
    text = ",\n".join(f'"{name}": [\n' + ",\n".join(lines) + "]" for name, lines in rows.items())
    GOLDEN.write_text("{" + text + "}\n")
