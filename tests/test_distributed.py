"""Several processes: the same run as with one, stopped and resumed together, down if one dies."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from test_train_fixmatch import same
from worker import run

ROOT = Path(__file__).parent.parent
TINY = "--image_size 8 --batch_size 8 --threads 1 --device cpu".split()
SCRIPTS = {"f": "train_fixmatch", "m": "train_mixmatch", "b": "baselines.train"}


def torchrun(processes, *words, **kwargs):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
               str(processes), *map(str, words)]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | {
        "PYTHONPATH": f"{ROOT}:{ROOT}/tests", "OMP_NUM_THREADS": "1"}, **kwargs)


def together(processes, jobs, folder):
    """Run the jobs in so many processes; folder / name holds each run."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    worker = torchrun(processes, "tests/worker.py", folder / "jobs.json", text=True,
                      stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    err = worker.communicate(timeout=500)[1]
    assert worker.returncode == 0, err[-3000:]


def job(script, flags, out, **more):
    return dict(script=SCRIPTS[script], argv=[*TINY, *flags.split(), "--out", str(out)], **more)


def state(folder):
    return torch.load(folder / "last.pt", weights_only=True)


# ---------------------------------------------------------------------------------------------
# N processes = one process

EXACT = {
    "l2ac": ("f", "--tau 0.2 --n_strong 2"),
    "official": ("f", "--tau 0.2 --n_strong 1 --recipe official --omega_every 2"),
    "joint": ("f", "--method attractor"), "single": ("f", "--method single_level"),
    "unroll": ("f", "--tau 0.2 --method full_unroll"), "mixmatch": ("m", ""),
    "ldam": ("b", "--base supervised --method ldam"),
    "crt": ("b", "--base supervised --method crt --iters 10 --crt_iters 10"),
    "pseudolabel": ("b", "--base pseudolabel --tau 0.2"), "fixmatch": ("b", "--tau 0.2"),
    "mixmatch_none": ("b", "--base mixmatch"), "abc": ("b", "--base mixmatch --method abc"),
    "daso": ("b", "--tau 0.2 --method daso --daso_start 0.2"), "sar": ("b", "--method sar"),
    "darp": ("b", "--tau 0.2 --method darp --darp_warm 0.2 --darp_period 2"),
    "crest": ("b", "--tau 0.2 --method crest+ --crest_anyway --crest_generations 2"),
}


def exact_jobs(folder, names=EXACT, iters=20):
    return [job(EXACT[n][0], f"--iters {iters} --eval_every {iters // 2} {EXACT[n][1]}", folder / n,
                exact=True, record=f"{folder / n}.images") for n in names]


@pytest.fixture(scope="module")
def exact_runs(tmp_path_factory):
    """All of EXACT, with one process (here) and with two."""
    one, two = (tmp_path_factory.mktemp(n) for n in ("one", "two"))
    for each in exact_jobs(one):
        run(each)
    together(2, exact_jobs(two), two)
    return one, two


@pytest.mark.parametrize("name", EXACT)
def test_two_processes_equal_one(exact_runs, name):
    """20 steps without BatchNorm, in float64: weights, EMA, omega, Adam's moments, log."""
    one, two = (state(folder / name) for folder in exact_runs)
    assert one["step"] == two["step"] == 20
    for part in one.keys() & {"model", "ema", "attractor", "optimizer", "omega_optimizer"}:
        a, b = (torch.cat([t.double().flatten() for t in tensors(s[part])]) for s in (one, two))
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    for a, b in zip(one["history"], two["history"]):
        for key in a.keys() - {"it_per_s"}:
            assert a[key] == pytest.approx(b[key], rel=1e-6, abs=1e-6, nan_ok=True), key
    if "attractor" in one:
        assert one["attractor"]["mlp.2.bias"].abs().min() > 0        # omega moved: it starts at 0


def tensors(x):
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, dict):
        x = list(x.values())
    return [t for y in x for t in tensors(y)] if isinstance(x, (list, tuple)) else []


# ---------------------------------------------------------------------------------------------
# stopped and resumed; what every process sees


RESUMED = {"f": "--tau 0.2", "m": "",
           "b": "--base supervised --method crt --iters 10 --crt_iters 10"}


@pytest.fixture(scope="module")
def plain_runs(tmp_path_factory):
    """With BatchNorm, two processes: whole runs, and the same stopped after 10 iterations by a
    signal that one process alone has got, then resumed."""
    folder, jobs = tmp_path_factory.mktemp("plain"), []
    for script, flags in RESUMED.items():
        flags = f"--iters 20 --eval_every 8 {flags}"
        jobs += [job(script, flags, folder / f"{script}_whole"),
                 job(script, flags, folder / f"{script}_parts", stop=9),
                 job(script, flags + " --resume", folder / f"{script}_parts")]
    together(2, jobs, folder)
    return folder


@pytest.mark.parametrize("script", RESUMED)
def test_ten_and_resume_and_ten_equals_twenty(plain_runs, script):
    whole, parts = (state(plain_runs / f"{script}_{name}") for name in ("whole", "parts"))
    assert whole["step"] == 20 and same(whole, parts)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    together(4, exact_jobs(folder, ["l2ac", "mixmatch"], 2), folder)
    return folder


@pytest.mark.parametrize("name", ["l2ac", "mixmatch"])
def test_processes_see_together_what_one_sees(exact_runs, four, name):
    """Split, batches and views: every image that enters the network, pixel by pixel."""
    one, two = (seen(folder / name, n) for n, folder in zip((1, 2), exact_runs))
    assert len(one) >= 60 and one == two and one[:6] == seen(four / name, 4)[:6]


def seen(run, processes):
    """The images of each pass through the network, in whatever order they stood in it."""
    passes = zip(*(torch.load(f"{run}.images.{rank}") for rank in range(processes)))
    return [sorted(image.numpy().tobytes() for part in parts for image in part)
            for parts in passes]
