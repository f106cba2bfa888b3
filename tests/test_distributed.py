"""Several ranks: the same run as with one, stopped and resumed together, down if one dies."""
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, checkpoint, exit_of, own_npz, same, synthetic, wait_for
from worker import run, run_all

import data
import models
import train_fixmatch
from support import cli, distributed
from support.checkpoint import write

TINY = "--dataset synthetic --image_size 8 --batch_size 8 --threads 1 --device cpu".split()
SCRIPTS = {"f": "train_fixmatch", "m": "train_mixmatch", "b": "baselines.train",
           "u": "scripts.full_unroll"}


def torchrun(ranks, *words, **kwargs):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
               str(ranks), *map(str, words)]
    return subprocess.Popen(command, cwd=ROOT, text=True, stderr=subprocess.PIPE, env=os.environ | {
        "PYTHONPATH": f"{ROOT}:{ROOT}/tests", "OMP_NUM_THREADS": "1"}, **kwargs)


def start(ranks, jobs, folder):
    """torchrun of tests/worker.py with these jobs."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    return torchrun(ranks, "tests/worker.py", folder / "jobs.json", stdout=subprocess.DEVNULL)


def together(ranks, jobs, folder):
    """Run the jobs with so many ranks; folder / name holds each run."""
    worker = start(ranks, jobs, folder)
    err = worker.communicate(timeout=500)[1]
    assert worker.returncode == 0, err[-3000:]


def job(script, flags, out, **more):
    return dict(script=SCRIPTS[script], argv=[*TINY, *flags.split(), "--out", str(out)], **more)


# ---------------------------------------------------------------------------------------------
# N ranks = one rank

EXACT = {
    "l2ac": ("f", "--tau 0.2 --n_strong 2"), "none": ("f", "--tau 0.2 --method none"),
    "official": ("f", "--tau 0.2 --n_strong 1 --recipe official --omega_every 2"),
    "joint": ("f", "--tau 0.2 --method attractor"),
    "single": ("f", "--tau 0.2 --method single_level"),
    "vector": ("f", "--tau 0.2 --attractor vector"),
    "prior": ("f", "--tau 0.2 --attractor_start prior"),
    "unroll": ("u", "--tau 0.2"), "mixmatch": ("m", ""),
    "ldam": ("b", "--base supervised --method ldam"),
    "crt": ("b", "--base supervised --method crt --iters 10 --crt_iters 10"),
    "pseudolabel": ("b", "--base pseudolabel --tau 0.2"),
    "la": ("b", "--tau 0.2 --method la"), "la_all": ("b", "--tau 0.2 --method la_all"),
    "mixmatch_none": ("b", "--base mixmatch"), "abc": ("b", "--base mixmatch --method abc"),
    "daso": ("b", "--tau 0.2 --method daso --daso_start 0.2"),
    "sar": ("b", "--tau 0.2 --method sar"),
    "darp": ("b", "--tau 0.2 --method darp --darp_warm 0.2 --darp_period 2"),
    "crest": ("b", "--tau 0.2 --method crest+ --crest_anyway --crest_generations 2"),
    "darp_crt": ("b", "--tau 0.2 --method darp_crt --darp_warm 0.2 --darp_period 2 --iters 12 "
                 "--crt_iters 8"),
    "cdmad": ("b", "--method cdmad"), "adello": ("b", "--tau 0.2 --method adello"),
    "acr": ("b", "--tau 0.2 --method acr --eval_every 5"),
}


def exact_jobs(folder, names, iters=20):
    return [job(EXACT[n][0], f"--iters {iters} --eval_every {iters // 2} {EXACT[n][1]}", folder / n,
                exact=True, record=f"{folder / n}.images") for n in names]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """A function: name -> the run of this name in EXACT with one rank."""
    folder = tmp_path_factory.mktemp("one")

    @lru_cache
    def train(name):
        run(*exact_jobs(folder, [name]))
        return folder / name
    return train


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """The folder of all of EXACT with two ranks."""
    folder = tmp_path_factory.mktemp("two")
    together(2, exact_jobs(folder, EXACT), folder)
    return folder


def assert_equal_runs(one, two):
    """Weights, EMA, omega, Adam's moments, what a baseline has learned (its buffers), log."""
    one, two = checkpoint(one), checkpoint(two)
    assert one["step"] == two["step"] == 20
    for part in one.keys() & {"model", "ema", "attractor", "optimizer", "omega_optimizer",
                              "method"}:
        a, b = (torch.cat([t.double().flatten() for t in tensors(s[part])] or [torch.zeros(0)])
                for s in (one, two))
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    for a, b in zip(one["history"], two["history"], strict=True):
        for key in a.keys() - {"it_per_s"}:
            assert a[key] == pytest.approx(b[key], rel=1e-9, abs=1e-9, nan_ok=True), key
    if "attractor" in one and one["config"]["method"] != "none":
        *_, bias = one["attractor"].values()                         # out.bias, or the vector
        assert bias.abs().min() > 0            # omega moved: it starts at 0, except "prior"


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_two_ranks_equal_one(one_rank, two_ranks, name):
    """20 steps in float64, with BatchNorm."""
    assert_equal_runs(one_rank(name), two_ranks / name)


def run_as_rank(rank, port, function, errors):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
                   "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    with open(f"{errors}.{rank}", "w") as sys.stderr:
        cli.exit_cleanly(lambda: function(rank))


def fork_two(jobs, errors):
    """Two ranks that run the jobs, a list for each. errors: their stderr, by rank"""
    return fork_ranks(lambda rank: run_all(jobs[rank]), errors)


def fork_ranks(function, errors):
    """function(rank) on two ranks without torchrun: forks of this process, which has imported
    everything."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_as_rank, args=(rank, port, function, errors))
             for rank in range(2)]
    for process in ranks:
        process.start()
    return ranks


def ends(ranks, errors):
    """[exit code], [stderr] of two forks."""
    for process in ranks:
        process.join(60)
    return ([process.exitcode for process in ranks],
            [Path(f"{errors}.{rank}").read_text() for rank in range(2)])


def test_two_ranks_equal_one_for_l2ac(one_rank, tmp_path):
    ranks = fork_two([exact_jobs(tmp_path, ["l2ac"])] * 2, tmp_path / "err")
    one = one_rank("l2ac")
    assert ends(ranks, tmp_path / "err") == ([0, 0], ["", ""])
    assert_equal_runs(one, tmp_path / "l2ac")
    assert seen(one, 1) == seen(tmp_path / "l2ac", 2)


def tensors(x):
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, dict):
        x = list(x.values())
    return [t for y in x for t in tensors(y)] if isinstance(x, (list, tuple)) else []


# ---------------------------------------------------------------------------------------------
# BatchNorm


class NormProblem:
    """A BatchNorm with weights of its own, a batch whose halves differ, and a loss."""

    def __init__(self, norm):
        g = torch.Generator().manual_seed(0)
        self.norm = norm.double()
        with torch.no_grad():
            for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
                tensor.uniform_(0.5, 2, generator=g)
        self.tensors = torch.randn(3, 8, 5, 3, 2, generator=g, dtype=torch.float64)
        self.tensors[0, 4:] = 3 * self.tensors[0, 4:] + 1

    def results(self, rank=0, size=1):
        """{name: tensor} with the rows of this rank, and of what is a sum over ranks: the losses
        are sums over rows, so those of the ranks add up to that of the batch."""
        x, target, direction = (distributed.local_slice(t, rank, size).contiguous(
            memory_format=torch.channels_last) for t in self.tensors)
        variables = [x.requires_grad_(), self.norm.weight, self.norm.bias]
        with models.frozen_bn_stats(self.norm):
            frozen = self.norm(x)
        out = self.norm(x)
        first = torch.autograd.grad(((out - target) ** 4).sum(), variables, create_graph=True)
        second = torch.autograd.grad((first[0] * direction).sum(), variables)
        self.norm(x + 1)
        statistics = {"mean": self.norm.running_mean, "var": self.norm.running_var}
        rows = {"frozen": frozen, "out": out, "first": first[0], "second": second[0],
                "eval": self.norm.eval()(x)}
        sums = {"first, weight": first[1], "first, bias": first[2], "second, weight": second[1]}
        return [{key: value.detach() for key, value in part.items()}
                for part in (rows, sums, statistics)]


def test_batchnorm_of_two_ranks_is_that_of_the_whole_batch(tmp_path):
    """Output, derivatives, running statistics; and no more messages than one a pass, each way."""
    def work(rank):
        distributed.start(torch.device("cpu"))
        problem, sizes, all_reduce = NormProblem(models.Norm(5, 0.3)), [], dist.all_reduce
        problem.norm.shared = True

        def counted(x):
            sizes.append(x.numel())
            all_reduce(x)
        with mock.patch.object(dist, "all_reduce", counted):
            torch.save((*problem.results(rank, 2), sizes), tmp_path / f"{rank}.pt")

    whole = NormProblem(torch.nn.BatchNorm2d(5, momentum=0.3)).results()
    assert ends(fork_ranks(work, tmp_path / "err"), tmp_path / "err") == ([0, 0], ["", ""])
    (*a, sizes), (*b, _) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    joined = ({key: torch.cat([a[0][key], b[0][key]]) for key in a[0]},
              {key: a[1][key] + b[1][key] for key in a[1]}, a[2])
    for ours, theirs in zip(joined, whole, strict=True):
        for key in theirs:
            torch.testing.assert_close(ours[key], theirs[key], rtol=1e-10, atol=1e-10, msg=key)
    assert same(a[2], b[2])
    # frozen, the pass, its derivative, the derivatives of both, the last pass: mean and variance
    assert sizes == [2 * 2 * 5] * 6


# ---------------------------------------------------------------------------------------------
# what all ranks see together


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    together(4, exact_jobs(folder, ["l2ac", "mixmatch"], 2), folder)
    return folder


def seen(run, ranks):
    """The images of each pass through the network, in whatever order they stood in it."""
    passes = zip(*(torch.load(f"{run}.images.{rank}") for rank in range(ranks)), strict=True)
    return [sorted(image.numpy().tobytes() for part in parts for image in part)
            for parts in passes]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["l2ac", "mixmatch"])
def test_ranks_see_together_what_one_sees(one_rank, two_ranks, four_ranks, name):
    """Split, batches and views: every image that enters the network, pixel by pixel."""
    one, two = seen(one_rank(name), 1), seen(two_ranks / name, 2)
    assert len(one) >= 60 and one == two and one[:6] == seen(four_ranks / name, 4)[:6]


# ---------------------------------------------------------------------------------------------
# stopped and resumed


RESUMED = {"f": "--tau 0.2", "m": "",
           "b": "--base supervised --method crt --iters 10 --crt_iters 10"}


@pytest.fixture(scope="module")
def plain_runs(tmp_path_factory):
    """With BatchNorm, two ranks: whole runs, and the same stopped after 10 iterations by a signal
    that one rank alone has got, then resumed."""
    folder, jobs = tmp_path_factory.mktemp("plain"), []
    for script, flags in RESUMED.items():
        flags = f"--iters 20 --eval_every 8 {flags}"
        jobs += [job(script, flags, folder / f"{script}_whole"),
                 job(script, flags, folder / f"{script}_parts", stop=9),
                 job(script, flags + " --resume", folder / f"{script}_parts")]
    together(2, jobs, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("script", RESUMED)
def test_ten_and_resume_and_ten_equals_twenty(plain_runs, script):
    """Bit for bit, also the sums that each rank keeps for the log."""
    whole, parts = (checkpoint(plain_runs / f"{script}_{name}") for name in ("whole", "parts"))
    assert whole["step"] == 20 and same(whole, parts)
    assert len(whole["averages"]["sums"]) == 2


@pytest.mark.slow
def test_two_ranks_and_then_one_equal_one(one_rank, tmp_path):
    """A checkpoint moves between numbers of ranks, BatchNorm's statistics with it."""
    part, = exact_jobs(tmp_path, ["l2ac"])
    ranks = fork_two([[part | {"stop": 9}]] * 2, tmp_path / "err")
    assert ends(ranks, tmp_path / "err") == ([0, 0], ["", ""])
    run(part | {"argv": [*part["argv"], "--resume"]})
    assert_equal_runs(one_rank("l2ac"), tmp_path / "l2ac")


# ---------------------------------------------------------------------------------------------
# one rank in trouble


CIFAR = "--dataset cifar10 --n1 2 --m1 2 --gamma_l 1 --data_dir "
UNEQUAL = {  # flags of rank 0, of rank 1: what both ranks have to say
    "seed": ("--seed 0", "--seed 1", "rank 1 has another --seed (1) than rank 0 (0)"),
    "iters": ("--iters 2", "--iters 3", "--iters"), "tau": ("", "--tau 0.3", "--tau"),
    "data": ("--dataset {here}/a/own.npz", "--dataset {here}/b/own.npz", "--dataset"),
    "content": (CIFAR + "{here}/a", CIFAR + "{here}/b", "rank 1 has another --dataset: finger"),
    "no data": (CIFAR + "{here}/a", CIFAR + "{here}/none", "rank 1: --data_dir")}


@pytest.mark.parametrize("name", [name if name in ("seed", "no data") else pytest.param(
    name, marks=pytest.mark.slow) for name in UNEQUAL])
def test_ranks_that_do_not_agree(tmp_path, name):
    """One sentence on both ranks, within seconds, and nothing is written."""
    for place, seed in (("a", 0), ("b", 1)):
        (tmp_path / place).mkdir()
        own_npz(tmp_path / place)
        x = np.random.default_rng(seed).integers(0, 256, (100, 8, 8, 3), dtype=np.uint8)
        np.savez(tmp_path / place / "cifar10.npz", x_train=x, y_train=np.arange(100) % 10,
                 x_test=x, y_test=np.arange(100) % 10)
    *flags, word = (x.format(here=tmp_path) for x in UNEQUAL[name])
    jobs = [[job("f", "--iters 2 --eval_every 2 " + flag, tmp_path / "run")] for flag in flags]
    codes, errors = ends(fork_two(jobs, tmp_path / "err"), tmp_path / "err")
    assert codes == [2, 2], errors
    assert errors[0].count("\n") == 1 and errors[0] == errors[1] and word in errors[0], errors
    assert "is dead" not in errors[0] and not (tmp_path / "run").exists()


@pytest.mark.parametrize("flags,word", [("--dataset nowhere.npz", "nowhere.npz"),
                                        ("--batch_size 7", "--batch_size 7 cannot be shared")])
def test_errors_that_all_ranks_meet_are_reported_once(tmp_path, flags, word):
    jobs = [[job("f", flags, tmp_path / "run")]] * 2
    codes, errors = ends(fork_two(jobs, tmp_path / "err"), tmp_path / "err")
    assert codes == [2, 2] and errors[0].count("\n") == 1 and word in errors[0]
    assert errors[1] == ""


@pytest.mark.parametrize("gpus,local,here", [(2, 1, 4), (2, 3, 4), (1, 1, None), (1, 0, 2)])
def test_more_ranks_than_gpus(tmp_path, monkeypatch, capsys, gpus, local, here):
    """One sentence on every rank of the machine, also on those that would get a GPU."""
    several_gpus(monkeypatch, gpus, local, here)
    argv = [*TINY, "--device", "cuda", "--out", str(tmp_path / "run")]
    code, err = exit_of(train_fixmatch.main, argv, capsys)
    assert code == 2 and err.count("\n") == 1 and f"--nproc_per_node {gpus}" in err
    assert f"{here or local + 1} processes" in err and not (tmp_path / "run").exists()


def test_every_rank_has_its_gpu(monkeypatch):
    several_gpus(monkeypatch, 4, 3, 4)
    assert distributed.local_device("cuda") == torch.device("cuda", 3)
    assert distributed.local_device("cpu") == torch.device("cpu")


def several_gpus(monkeypatch, gpus, local, here):
    """A machine with GPUs, and the environment that torchrun gives to local rank `local`."""
    names = {"WORLD_SIZE": 8, "RANK": local, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": here,
             "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}
    for name, value in names.items():
        if value is not None:
            monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)


@pytest.mark.parametrize("good,reason,words", [
    (0, "Connection closed by node1<4155>", "is dead"), (1, "Call to recv failed", "is dead"),
    (2, "NCCL communicator was aborted on rank 0.", "is lost"),
    (1, "Cuda failure 2 'out of memory'", "--batch_size")])
def test_errors_of_nccl(monkeypatch, capsys, good, reason, words):
    """In a collective, in its derivative, or later, where the host waits for the GPU."""
    message = ("NCCL error in: NCCLUtils.hpp:219, unhandled system error, NCCL version 2.27.5\n"
               "ncclSystemError: a call of the system or of a library failed.\nLast error:\n")
    calls = iter(range(3))

    def all_reduce(x):
        if next(calls) == good:
            raise dist.DistBackendError(message + reason)

    def main(argv):
        distributed.SumOverRanks.apply(torch.ones(2, requires_grad=True)).sum().backward()
        raise dist.DistBackendError(message + reason)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    code, err = exit_of(main, [], capsys)
    assert code == 2 and err.count("\n") == 1 and words in err
    assert words == "--batch_size" or (reason in err and "--resume" in err)


def test_the_environment_of_a_rank_does_not_keep_other_programs_from_writing(tmp_path,
                                                                             monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    write(tmp_path / "table.csv", b"x")
    assert (tmp_path / "table.csv").read_bytes() == b"x"


@pytest.mark.slow
def test_a_loss_that_is_not_finite_on_one_rank_stops_all(tmp_path):
    """Rank 1 alone sees it, both report it, nobody waits for a rank that has left."""
    worker = start(2, [job("f", "--iters 9 --eval_every 3", tmp_path / "run", nan=4)], tmp_path)
    err = worker.communicate(timeout=120)[1]
    assert worker.returncode != 0
    sentences = {line for line in err.splitlines() if line.startswith("worker.py: ")}
    assert len(sentences) == 1 and "rank 1: the loss of iteration 4 is not finite" in err, err
    assert "another process of this run is dead" not in err
    assert checkpoint(tmp_path / "run")["step"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_one_of_two_ranks_gets_a_signal(tmp_path, monkeypatch, number):
    """SIGKILL: the other one notices, says so and ends, within a minute. SIGTERM: both save."""
    flags = [*TINY, "--tau", "0.2", "--eval_every", "3", "--out", str(tmp_path)]
    ranks = torchrun(2, "train_fixmatch.py", *flags, "--iters", 100_000, stdout=subprocess.PIPE)
    wait_for(tmp_path / "log.csv", ranks)
    children = Path(f"/proc/{ranks.pid}/task/{ranks.pid}/children").read_text().split()
    os.kill(int(children[1]), number)
    out, err = ranks.communicate(timeout=60)
    assert ranks.returncode != 0
    if number == signal.SIGKILL:
        assert "another process of this run is dead" in err and "--resume" in err
    else:
        assert "the same command with --resume goes on" in out
    step = checkpoint(tmp_path)["step"]
    # one rank may go on where two began; they did not have the small test set of the tests
    monkeypatch.setattr(data, "synthetic", synthetic)
    train_fixmatch.main([*flags, "--iters", str(step + 3), "--resume"])
    assert checkpoint(tmp_path)["step"] == step + 3
