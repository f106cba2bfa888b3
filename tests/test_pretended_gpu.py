"""Every method of the three loops on a pretended GPU (pretended.py): no tensor is left on the CPU,
no iteration makes the host wait, and the numbers are those of the CPU."""
import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT
from pretended import OPERATIONS, missing_parts

from baselines.methods import METHODS

L2AC = {"l2ac": "", "none": "--method none", "attractor": "--method attractor",
        "single_level": "--method single_level", "vector": "--attractor vector",
        "prior": "--attractor_start prior", "official": "--recipe official --omega_every 2"}
FIXMATCH = "train_fixmatch --tau 0.2"
TRAINING = {f"fixmatch {name}": f"{FIXMATCH} {flags}" for name, flags in L2AC.items()}
TRAINING |= {f"mixmatch {name}": f"train_mixmatch {flags}" for name, flags in L2AC.items()}
TRAINING["full_unroll"] = "scripts.full_unroll --tau 0.2"

CREST = "--crest_generations 2 --crest_anyway"
DARP = "--darp_warm 0.2 --darp_period 2 --darp_outer 2"           # three refinements in six steps
OWN = {"crest": CREST, "crest+": CREST, "darp": DARP, "daso": "--daso_start 0.2",
       "crt": "--iters 3 --crt_iters 3", "acr": "--eval_every 2",
       "darp_crt": "--iters 3 --crt_iters 3 --darp_warm 0 --darp_period 1 --darp_outer 2"}
for base, table in METHODS.items():
    tau = "--tau 0.2" if base in ("fixmatch", "pseudolabel") else ""
    TRAINING |= {f"{base} baseline {method}": f"baselines.train --base {base} --method {method} "
                 f"{tau} {OWN.get(method, '')}" for method in table}
TRAINING["darp estimate"] = TRAINING["fixmatch baseline darp"] + " --darp_estimate"

FAST = "fixmatch l2ac"
CASES = {name: {"kind": "cuda", "commands": [command]} for name, command in TRAINING.items()}
CASES |= {f"{name}, bfloat16": case | {"bfloat16": True} for name, case in CASES.items()}
CASES["resumed"] = {"kind": "cuda", "commands": [f"{FIXMATCH} --iters 3", f"{FIXMATCH} --resume"]}
CASES["evaluated"] = {"kind": "cuda", "commands": [
    FIXMATCH, "evaluate {out} --pseudo --json", "evaluate {out} --test longtail --json",
    "evaluate {out} --predict {out}/pictures.npz",
    "scripts.figures {out} --out {out} --only predicted attractor views imbalanced_tests"]}
# On mps RandAugment rounds in float32: other numbers than the CPU's, so without it.
CASES |= {f"mps {name}": {"kind": "mps", "commands": [command]} for name, command in {
    "fixmatch": f"{FIXMATCH} --ra_n 0", "mixmatch": "train_mixmatch",
    "crest+": TRAINING["mixmatch baseline crest+"], "daso": TRAINING["mixmatch baseline daso"],
    "darp": TRAINING["mixmatch baseline darp"] + " --darp_estimate",
    "sar": TRAINING["mixmatch baseline sar"],
    "cdmad": TRAINING["fixmatch baseline cdmad"] + " --ra_n 0",
    "adello": TRAINING["fixmatch baseline adello"] + " --ra_n 0",
    "acr": TRAINING["fixmatch baseline acr"] + " --ra_n 0",
    "ldam": TRAINING["supervised baseline ldam"]}.items()}
DEVICE = "the device itself"
CASES |= {DEVICE: {"kind": "cuda"}, f"{DEVICE}, mps": {"kind": "mps"}}

pytestmark = pytest.mark.skipif(bool(missing_parts()), reason="this version of PyTorch has no "
                                f"backends in Python ({', '.join(missing_parts())})")


@pytest.fixture(scope="module")
def outcome(request, tmp_path_factory):
    """{case: what pretended.py says}, of those cases that this session asks for, in one process."""
    params = [getattr(item, "callspec", None) for item in request.session.items
              if item.module is request.module]
    names = list(dict.fromkeys(spec.params["name"] for spec in params if spec))
    path = tmp_path_factory.mktemp("pretended") / "cases.json"
    path.write_text(json.dumps([CASES[name] for name in names]))
    done = subprocess.run([sys.executable, "tests/pretended.py", path], cwd=ROOT, text=True,
                          capture_output=True, env=os.environ | {
                              "PYTHONPATH": f"{ROOT}:{ROOT}/tests", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(names, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name == FAST else pytest.mark.slow)
    for name, case in CASES.items() if case.get("commands")])
def test_a_run_on_a_pretended_gpu(name, outcome):
    result = outcome[name]
    assert result["error"] is None, result["error"]
    assert len(result["waits"]) == 6
    assert not any(result["waits"][1:])              # the first iteration may fill caches
    assert result["same"] == {"log": True, "checkpoint": True, "printed": True}
    assert ("torch.bfloat16" in result["dtypes"]) == CASES[name].get("bfloat16", False)
    excepted = result["excepted"]
    if " darp" not in name and "darp " not in name or "mps" in name:
        assert not excepted
    else:                                            # Newton: 1 to 30 tests in each of two rounds
        assert 3 * 2 <= excepted.pop("column_roots") <= 3 * 2 * 30
        assert set(excepted) <= ({"estimate_counts"} if "estimate" in name else set())


FINE = {"copy that does not wait", "number of the CPU", "index", "fill", "mask", "float64",
        "known number of classes"}
RAISES = {"stack", "stack of numbers", "sum", "product", "array", "layout"}


@pytest.mark.parametrize("name", [DEVICE])
def test_the_pretended_gpu_sees_what_a_gpu_would_not_like(name, outcome):
    told = outcome[name]
    assert {key for key, text in told.items() if text is None} == FINE
    assert {key for key, text in told.items() if text and "Error: " in text} == RAISES
    assert told.keys() == OPERATIONS.keys()          # at all others the host waits


@pytest.mark.parametrize("name", [f"{DEVICE}, mps"])
def test_the_pretended_mps_has_no_float64(name, outcome):
    assert "float64" in outcome[name]["float64"] and outcome[name]["mask"] is None
