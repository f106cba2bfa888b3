"""Wrong input to every command: one sentence on stderr that names the flag or the file, exit code
2, no traceback, and not a byte changed on the disk."""
import fcntl
import os
import shutil
import zipfile

import conftest
import numpy as np
import pytest
import torch
from conftest import exit_of

import evaluate
import train_fixmatch
import train_mixmatch
from baselines import train as baselines
from scripts import bench, full_unroll, reproduce, torture
from support import UserError, checkpoint

TINY = conftest.TINY + " --eval_every 2 --iters 2 "
MAINS = {"fixmatch": train_fixmatch.main, "mixmatch": train_mixmatch.main,
         "baselines": baselines.main, "unroll": full_unroll.main, "evaluate": evaluate.main,
         "bench": bench.main, "torture": torture.main, "reproduce": reproduce.main}
NEW, RUN = " --out {here}/new", " --out {here}/run --resume"

FLAGS = {  # flags of the training scripts: what the sentence must name
    "fixmatch": {
        "--nonsense 3": "--nonsense", "--iters 0": "--iters", "--iters 1.5": "--iters",
        "--iters -3": "--iters", "--iters x": "--iters", "--iter 5": "--iter",
        "--batch_size 1": "--batch_size", "--batch_size 1e3": "--batch_size",
        "--lr nan": "--lr", "--lr inf": "--lr", "--lr -1": "--lr", "--lr": "--lr",
        "--weight_decay nan": "--weight_decay", "--tau 1.5": "--tau", "--tau nan": "--tau",
        "--lambda_u -1": "--lambda_u", "--lambda_u inf": "--lambda_u", "--ema 2": "--ema",
        "--bn_momentum -0.1": "--bn_momentum", "--gamma_l 0.5": "--gamma_l",
        "--gamma_l nan": "--gamma_l", "--gamma_u 0": "--gamma_u", "--n1 0": "--n1",
        "--n1 100000": "--n1", "--n1 99999999999999999999": "--n1", "--m1 999": "--m1",
        "--gamma_l 501": "--gamma_l", "--gamma_l 1e300": "--gamma_l", "--method best": "--method",
        "--recipe mine": "--recipe", "--scale huge": "--scale", "--device tpu": "--device",
        "--model resnet": "--model", "--model wrn-11-1": "--model", "--model wrn-10-0": "--model",
        "--model wrn-10-9999999": "--model", "--dataset nothing": "--dataset",
        "--imbalance square": "--imbalance", "--omega_every 0": "--omega_every",
        "--omega_order sideways": "--omega_order", "--inner newton": "--inner",
        "--eta nan": "--eta", "--hidden 0": "--hidden", "--attractor_input raw":
        "--attractor_input", "--pseudo_from you": "--pseudo_from", "--seed -1": "--seed",
        "--seed 99999999999": "--seed", "--dtype bfloat16": "--dtype",
        "--dtype float8": "--dtype", "--method full_unroll": "--method",
        "--n_strong 0": "--n_strong", "--n_strong 99": "--n_strong", "--ra_n -1": "--ra_n",
        "--ra_m 31": "--ra_m", "--image_size 4": "--image_size",
        "--image_size 99999": "--image_size", "--resume --overwrite": "--resume",
        "--reverse_u false": "false", "--threads -1": "--threads", "--eval_every 0": "--eval_every",
        "--split last": "--split", "--pool both": "--pool", "stray": "stray",
        "--beta 2": "--beta", "--beta 0.1 --n1 5": "--beta", "--beta 1": "--beta",
        "--beta 0": "--beta", "--ratio 0": "--ratio", "--ratio 1e-17": "--ratio",
        "--hidden 2000000000": "--hidden",
        "--batch_size 200000000": "--batch_size", "--iters 99999999999999": "--iters",
        "--ratio -1": "--ratio", "--ratio 2 --n1 5": "--ratio",
        "--batch_size_u 1": "--batch_size_u", "--ra_m hard": "--ra_m"},
    "mixmatch": {
        "--temperature 0": "--temperature", "--temperature nan": "--temperature",
        "--mix_alpha -1": "--mix_alpha", "--mix_alpha inf": "--mix_alpha",
        "--tau 0.9": "--tau", "--n_strong 2": "--n_strong", "--lambda_u nan": "--lambda_u",
        "--method darp": "--method", "--iters 0": "--iters", "--seed x": "--seed"},
    "baselines": {
        "--base nothing": "--base", "--method nothing": "--method", "--method l2ac": "--method",
        "--base supervised --method darp": "--method",
        "--base supervised --method vanilla --tau 0.9": "--tau",
        "--base mixmatch --tau 0.9": "--tau", "--omega_every 1": "--omega_every",
        "--base supervised --method crt --crt_iters 0": "--crt_iters",
        "--method darp --darp_warm 2": "--darp_warm", "--method daso --daso_td 0": "--daso_td",
        "--method crest": "--crest_anyway", "--method sar --sar_start nan": "--sar_start",
        "--method crest --crest_generations 0": "--crest_generations", "--iters 0": "--iters"},
    "unroll": {"--compile": "--compile", "--method none": "--method",
               "--recipe official": "--recipe", "--omega_order before": "--omega_order",
               "--omega_every 2": "--omega_every", "--pseudo_from auto": "--pseudo_from",
               "--iters 0": "--iters"},
}
FILES = {  # with the files that `here` has made
    "fixmatch": {
        "--dataset {here}/none.npz": "none.npz", "--dataset {here}/empty.npz": "empty.npz",
        "--dataset {here}/junk.npz": "junk.npz", "--dataset {here}/half.npz": "half.npz",
        "--dataset {here}/folder.npz": "folder.npz", "--dataset {here}/lacks.npz": "y_test",
        "--dataset {here}/float.npz": "x_train", "--dataset {here}/flat.npz": "x_train",
        "--dataset {here}/small.npz": "x_train", "--dataset {here}/sizes.npz": "x_test",
        "--dataset {here}/short.npz": "y_train", "--dataset {here}/words.npz": "y_train",
        "--dataset {here}/below.npz": "y_train", "--dataset {here}/gap.npz": "class 1",
        "--dataset {here}/more.npz": "y_test", "--dataset {here}/pickle.npz": "pickle.npz",
        "--dataset {here}/good.npz": "--n1", "--dataset {here}/good.npz --n1 3": "--gamma_l",
        "--dataset {here}/good.npz --n1 3 --m1 99 --gamma_l 1 --gamma_u 1": "--m1",
        "--dataset {here}/good.npz --n1 3 --m1 3 --gamma_l 9 --gamma_u 1": "--gamma_l",
    },
}
RUNS = {  # run folders: that of a small FixMatch run, damaged ones, one in use
    "fixmatch": {
        "--out {here}/run": "--out", "--out {here}/run --seed 1": "--out",
        "--out {here}/file": "--out", "--out {here}/file/run": "--out", "--out /proc/run": "--out",
        RUN + " --seed 1": "--seed", RUN + " --method none": "--method",
        RUN + " --model wrn-16-1": "--model", RUN + " --gamma_u 2": "--gamma_u",
        RUN + " --iters 1": "--iters", RUN + " --dataset {here}/good.npz --n1 2 --m1 2 --gamma_l 1 "
        "--gamma_u 1": "--dataset", RUN + " --batch_size 8": "--batch_size",
        "--out {here}/busy": "in use", "--out {here}/busy --resume": "in use",
        "--out {here}/busy --overwrite": "in use", "--out {here}/damaged --resume": "last.pt",
        "--out {here}/foreign --resume": "last.pt", "--out {here}/typed --resume": "last.pt",
        "--out {here}/code --resume": "last.pt", "--out {here}/misfit --resume": "last.pt",
        "--out {here}/partless --resume": "last.pt", "--out {here}/lost --resume": "lost"},
    "mixmatch": {RUN: "{here}/run", "--out {here}/run --overwrite --resume": "--overwrite",
                 "--out {here}/busy": "in use", "--out {here}/damaged --resume": "last.pt"},
    "baselines": {RUN + " --method none": "{here}/run", "--out {here}/run": "--out",
                  "--out {here}/busy --resume": "in use"},
    "evaluate": {"": "runs", "{here}/nothing": "nothing", "{here}/file": "file",
                 "{here}/misfit": "misfit",
                 "{here}": "last.pt", "{here}/damaged": "last.pt", "{here}/foreign": "last.pt",
                 "{here}/typed": "last.pt", "{here}/code": "last.pt", "{here}/run --jsn": "--jsn",
                 "{here}/run {here}/nothing": "nothing"},
    "bench": {"--iters 0": "--iters", "--iters x": "--iters", "--model resnet": "--model",
              "--batch_size 1": "--batch_size", "--image_size 4": "--image_size", "more": "more"},
    "torture": {"--kills 0": "--kills", "--script evaluate": "--script", "--processes 99":
                "--processes", "--seed -1": "--seed"},
    "reproduce": {"": "action", "sing": "action", "list --table 9": "--table", "list --scale huge":
                  "--scale", "list --seeds -1": "--seeds", "list --seeds": "--seeds",
                  "run --jobs 0": "--jobs", "run --jobs many": "--jobs",
                  "collect --runs {here}/nothing": "--runs", "collect --runs {here}/file":
                  "--runs", "collect --seeds 1": "--seeds", "list --runs a$b": "--runs"},
}
FAST = {  # one for each way of being refused; the others are slow
    "fixmatch": [
        "--nonsense 3", "--iter 5", "--iters 1.5", "--lr nan", "--lr", "--tau 1.5",
        "--method full_unroll", "--model resnet", "--dataset nothing", "--gamma_l 501",
        "--beta 0.1 --n1 5", "--ratio 2 --n1 5", "--beta 0", "--ratio 0",
        "--dtype bfloat16", "--resume --overwrite", "stray", "--ra_m hard",
        "--dataset {here}/half.npz", "--dataset {here}/float.npz",
        "--dataset {here}/short.npz", "--dataset {here}/good.npz", "--out {here}/run",
        "--out {here}/file", RUN + " --seed 1", "--out {here}/busy",
        "--out {here}/foreign --resume", "--out {here}/misfit --resume",
        "--out {here}/partless --resume", "--out {here}/lost --resume"],
    "mixmatch": ["--tau 0.9", RUN],
    "baselines": ["--base supervised --method darp", "--method crest"],
    "unroll": ["--compile"], "evaluate": ["{here}/nothing", "{here}/misfit"],
    "bench": ["--iters 0"], "torture": ["--kills 0"], "reproduce": ["sing"]}


def cases():
    """[(command, flags, word that the sentence must have)], marked and named."""
    found = []
    for table in (FLAGS, FILES, RUNS):
        for command, flags, word in ((c, f, w) for c in table for f, w in table[c].items()):
            line = flags if table is RUNS else flags + NEW * ("--out" not in flags)
            line = TINY + line if command in FLAGS else line
            slow = () if flags in FAST[command] else pytest.mark.slow
            found.append(pytest.param(command, line, word, marks=slow, id=f"{command} {flags}"))
    return found


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with a dataset that is good, datasets that are not, and run folders of all kinds."""
    folder = tmp_path_factory.mktemp("here")
    make_datasets(folder)
    (folder / "file").write_text("not a folder")
    train_fixmatch.main([*TINY.split(), "--out", str(folder / "run")])
    checkpoint.lock(folder / "elsewhere")                    # let go of the run's folder
    state = torch.load(folder / "run/last.pt", weights_only=True)
    weights = {k: v[..., :1] for k, v in state["model"].items()}
    for name, content in {
            "foreign": {"weights": 3}, "typed": state | {"step": "2"},
            "code": state | {"x": os.system},
            "misfit": state | {"model": weights, "ema": weights},
            "partless": {k: v for k, v in state.items() if k != "attractor"}}.items():
        (folder / name).mkdir()
        torch.save(content, folder / name / "last.pt")
    for name in ("damaged", "lost", "busy"):
        shutil.copytree(folder / "run", folder / name)
        (folder / name / "prev.pt").unlink(missing_ok=True)
    (folder / "damaged/last.pt").write_bytes((folder / "run/last.pt").read_bytes()[:5000])
    (folder / "lost/last.pt").unlink()
    busy = os.open(folder / "busy", os.O_RDONLY)
    fcntl.flock(busy, fcntl.LOCK_EX)
    yield folder
    os.close(busy)


def make_datasets(folder):
    g = np.random.default_rng(0)

    def images(n, side=8):
        return g.integers(0, 256, (n, side, side, 3), dtype=np.uint8)
    good = dict(x_train=images(12), y_train=np.arange(12) % 3, x_test=images(6),
                y_test=np.arange(6) % 3)
    for name, change in {
            "good": {}, "float": dict(x_train=images(12) / 255),
            "flat": dict(x_train=images(12)[0]),
            "small": dict(x_train=images(12, 4), x_test=images(6, 4)),
            "sizes": dict(x_test=images(6, 9)), "short": dict(y_train=np.arange(5) % 3),
            "words": dict(y_train=np.array(["cat"] * 12)), "below": dict(y_train=np.arange(12) - 1),
            "gap": dict(y_train=np.arange(12) % 2 * 2), "more": dict(y_test=np.arange(6)),
            "pickle": dict(y_train=np.array([{}] * 12, dtype=object))}.items():
        np.savez(folder / f"{name}.npz", **good | change)
    np.savez(folder / "lacks.npz", **{k: v for k, v in good.items() if k != "y_test"})
    (folder / "empty.npz").write_bytes(b"")
    (folder / "junk.npz").write_bytes(b"no archive at all" * 50)
    (folder / "half.npz").write_bytes((folder / "good.npz").read_bytes()[:1000])
    (folder / "folder.npz").mkdir()


def disk(folder):
    return {str(f): f.is_file() and (f.stat().st_mtime_ns, f.read_bytes())
            for f in folder.rglob("*")}


@pytest.mark.parametrize("command,flags,word", cases())
def test_wrong_input(here, command, flags, word, capsys, monkeypatch):
    monkeypatch.chdir(here)                                  # a default folder would show up too
    before = disk(here)
    code, err = exit_of(MAINS[command], flags.format(here=here).split(), capsys)
    assert code == 2 and err.count("\n") == 1 and "Traceback" not in err, err
    assert word.format(here=here) in err, err
    assert disk(here) == before


@pytest.mark.parametrize("command,flags,cause", [
    ("fixmatch", "--out {here}/misfit --resume", ValueError),
    ("evaluate", "{here}/misfit", ValueError),
    ("fixmatch", "--dataset {here}/half.npz", zipfile.BadZipFile),
    ("fixmatch", "--out {here}/file", OSError),
    ("fixmatch", "--out {here}/busy", OSError)])
def test_the_sentence_keeps_its_cause(here, command, flags, cause, monkeypatch):
    monkeypatch.chdir(here)
    argv = (TINY * (command == "fixmatch") + flags).format(here=here).split()
    with pytest.raises(UserError) as error:
        MAINS[command](argv)
    assert isinstance(error.value.__cause__, cause)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("main", [train_fixmatch.main, bench.main])
def test_a_device_that_is_not_there(main, capsys):
    code, err = exit_of(main, ["--device", "cuda"], capsys)
    assert code == 2 and "--device cuda" in err


@pytest.mark.parametrize("variables,named", [
    ("WORLD_SIZE=0", "WORLD_SIZE"), ("WORLD_SIZE=-2", "WORLD_SIZE"), ("WORLD_SIZE=", "WORLD_SIZE"),
    ("WORLD_SIZE=two", "WORLD_SIZE"), ("WORLD_SIZE=1.5", "WORLD_SIZE"), ("WORLD_SIZE=2", "RANK"),
    ("WORLD_SIZE=2 RANK=2", "RANK"), ("WORLD_SIZE=2 RANK=-1", "RANK"), ("RANK=1", "RANK"),
    ("WORLD_SIZE=2 RANK=x", "RANK"), ("WORLD_SIZE=2 RANK=0", "MASTER_PORT"),
    ("WORLD_SIZE=2 RANK=0 MASTER_PORT=99999", "MASTER_PORT"),
    ("WORLD_SIZE=2 RANK=0 MASTER_PORT=2000", "MASTER_ADDR")])
def test_an_impossible_environment(variables, named, capsys, monkeypatch, tmp_path):
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    code, err = exit_of(train_fixmatch.main, ["--out", str(tmp_path / "run")], capsys)
    assert code == 2 and err.count("\n") == 1 and f": {named} is" in err, err
    assert not (tmp_path / "run").exists()
