"""What only a real GPU can show: skipped where there is none. Whole runs on a pretended one are in
test_pretended_gpu.py."""
import pytest
import torch
from conftest import checkpoint, log_rows, relative_difference, same, stopped, train
from test_distributed import job, together

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS == 0, reason="needs a GPU")
FLAGS = "--device cuda --n_strong 2 --tau 0"         # no image is near the threshold


@pytest.fixture(autouse=True)
def without_tf32():
    parts = torch.backends.cudnn, torch.backends.cuda.matmul
    before = [part.allow_tf32 for part in parts]
    for part in parts:
        part.allow_tf32 = False
    yield
    for part, value in zip(parts, before, strict=True):
        part.allow_tf32 = value
    torch.use_deterministic_algorithms(False)        # --deterministic switches them on


def test_an_iteration_does_not_wait(tmp_path):
    """PyTorch raises if one of the iterations 2, 3, 4 does."""
    def on_step(step, losses):
        torch.cuda.set_sync_debug_mode("error" if 1 <= step < 4 else "default")
    try:
        train(tmp_path, f"{FLAGS} --eval_every 6", on_step=on_step)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_gpu_computes_what_the_cpu_computes(tmp_path):
    """Ten iterations, up to rounding. Float32 and float64 on the CPU differ by 1e-6."""
    losses, states = {"cpu": [], "cuda": []}, {}
    for device, seen in losses.items():
        def on_step(step, values, seen=seen):
            seen += [values[key].item() for key in ("loss", "loss_x", "loss_u", "loss_bal")]
        states[device] = train(tmp_path / device, f"{FLAGS} --iters 10 --eval_every 10 "
                               f"--device {device}", on_step=on_step)
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-4)
    for part in ("model", "ema", "attractor"):
        ours, theirs = ([t.cpu() for t in states[device][part].values()] for device in losses)
        assert relative_difference(ours, theirs) < 1e-4


def test_a_stopped_run_resumes_exactly(tmp_path):
    flags = f"{FLAGS} --deterministic"
    whole = train(tmp_path / "whole", flags)
    stopped(tmp_path / "parts", flags, after=4)
    assert same(train(tmp_path / "parts", f"{flags} --resume"), whole)


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("script", "fmu")
def test_two_gpus_compute_what_one_computes(tmp_path, script):
    """In float64, up to rounding."""
    flags = "--device cuda --iters 10 --eval_every 10"
    for ranks in (1, 2):
        together(ranks, [job(script, flags, tmp_path / str(ranks), exact=True)], tmp_path)
    one, two = (checkpoint(tmp_path / ranks) for ranks in "12")
    for ours, theirs in zip(log_rows(two), log_rows(one), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-8, nan_ok=True)
    for part in ("model", "ema", "attractor"):
        ours, theirs = ([t.cpu() for t in state[part].values()] for state in (two, one))
        assert relative_difference(ours, theirs) < 1e-8
