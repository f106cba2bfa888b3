"""What only a real GPU can show: skipped where there is none."""
import pytest
import torch
from conftest import relative_difference, same, stopped, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FLAGS = "--device cuda --n_strong 2 --tau 0 "        # no image is near the threshold


def test_an_iteration_does_not_wait(tmp_path):
    """PyTorch raises if one of the iterations 2, 3, 4 does."""
    def on_step(step, losses):
        torch.cuda.set_sync_debug_mode("error" if 1 <= step < 4 else "default")
    train(tmp_path, f"{FLAGS} --eval_every 6", on_step=on_step)


def test_a_gpu_computes_what_the_cpu_computes(tmp_path, monkeypatch):
    """Ten iterations, up to rounding."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    cuda, cpu = (train(tmp_path / kind, f"{FLAGS} --iters 10 --eval_every 10 --device {kind}")
                 for kind in ("cuda", "cpu"))
    for part in ("model", "ema", "attractor"):
        ours, theirs = ([x.cpu() for x in state[part].values()] for state in (cuda, cpu))
        assert relative_difference(ours, theirs) < 1e-4


def test_a_stopped_run_resumes_exactly(tmp_path):
    whole = train(tmp_path / "whole", FLAGS + "--deterministic")
    stopped(tmp_path / "parts", FLAGS + "--deterministic", after=4)
    parts = train(tmp_path / "parts", FLAGS + "--deterministic --resume")
    torch.use_deterministic_algorithms(False)
    assert same(parts, whole)


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--dtype bfloat16", "--compile", "--dtype bfloat16 --compile"])
def test_fast_ways(tmp_path, flags):
    assert train(tmp_path, FLAGS + flags)["step"] == 6
