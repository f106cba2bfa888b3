"""A pretended GPU: whole runs take the path of a GPU on a machine without one.

    python tests/pretended.py cases.json        one line of JSON for each case

Its tensors tell Python that they are on cuda:0 or mps:0, and hold a CPU tensor that does the work.
Every operation passes through `Device`, which raises where a CPU tensor meets one of the GPU and
notes what would make the host wait. To PyTorch's C++ the tensors are those of a backend in Python,
"pretended", which cannot be taken back: it needs a process of its own.

A case is {"kind": "cuda" or "mps", "commands": ["script flags", ...], "bfloat16": whether}. Its
commands are run one after the other on the pretended GPU, then on the CPU; {out} stands for the run
folder. A case without commands tries the device itself (OPERATIONS). No speed, no kernels, no
rounding of a GPU: these take a real one (test_gpu.py).
"""
import contextlib
import importlib
import io
import json
import sys
import tempfile
import traceback
from collections import Counter
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from conftest import ROOT, checkpoint, same, synthetic_once
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

import data
import models
from support.run import Run

SMALL = ("--dataset synthetic --model wrn-10-1 --image_size 8 --batch_size 6 --iters 6 "
         "--eval_every 6 --threads 1")
TRAINING = ("train_fixmatch", "train_mixmatch", "baselines.train", "scripts.full_unroll")
# Operations of CUDA after which the host has to know a value of the GPU.
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "bincount", "_unique", "_unique2",
           "unique_dim", "unique_consecutive", "equal", "repeat_interleave.Tensor",
           "_linalg_check_errors", "is_nonzero"}
AUTOCAST = {torch.conv2d, F.linear, torch.matmul}     # of what autocast computes in bfloat16: ours
EXCEPTED = ("column_roots", "estimate_counts")        # DARP's, counted: Newton's test, and once


def missing_parts():
    """Names of the experimental parts that this version of PyTorch lacks."""
    needed = {"_setup_privateuseone_for_python_backend": backend_registration,
              "_ensureCUDADeviceGuardSet": torch._C, "_set_only_lift_cpu_tensors": torch._C}
    return [name for name, module in needed.items() if not hasattr(module, name)]


class Pretended(torch.Tensor):
    """A tensor on the pretended GPU, and the CPU tensor `held` that computes in its place."""
    _is_param = False                                 # nn.Parameter sets it on subclasses

    def __new__(cls, real):
        new = torch.Tensor._make_wrapper_subclass(
            cls, real.shape, strides=real.stride(), storage_offset=real.storage_offset(),
            dtype=real.dtype, device="pretended:0")
        new.held = real
        return new

    @property
    def device(self):
        return torch.device(pretended.kind, 0)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return pretended.compute(func, args, kwargs or {})       # where the mode is not active

    def __deepcopy__(self, memo):
        copy = self.detach().clone()
        return torch.nn.Parameter(copy, self.requires_grad) if self._is_param else copy

    def __reduce_ex__(self, protocol):                # torch.save
        return self.held.__reduce_ex__(protocol)

    def tolist(self):
        return self.cpu().tolist()

    def numpy(self, *, force=False):
        if not force:
            raise TypeError(f"a tensor on {self.device} cannot become an array; copy it first")
        return self.detach().cpu().numpy()


class Device(TorchDispatchMode):
    """The GPU below autograd: one call for each operation."""
    kind = "cuda"

    def __init__(self):
        super().__init__()
        self.waits, self.excepted, self.dtypes = [], Counter(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.compute(func, args, kwargs or {})

    def compute(self, func, args, kwargs):
        leaves, form = tree_flatten((args, kwargs))
        here = [isinstance(x, Pretended) for x in leaves if isinstance(x, torch.Tensor)]
        target = kwargs.get("device")
        made_here = any(here) if target is None else target.type != "cpu"
        self.look_at(func, args, kwargs, leaves, made_here)
        bare = [x.held if isinstance(x, Pretended) else torch.device("cpu")
                if isinstance(x, torch.device) else x for x in leaves]
        given = {id(b): x for b, x in zip(bare, leaves, strict=True) if isinstance(x, Pretended)}
        args, kwargs = tree_unflatten(bare, form)

        def wrap(x):
            if not isinstance(x, torch.Tensor) or not made_here:
                return x
            return given[id(x)] if id(x) in given else Pretended(x)      # given: changed in place
        return tree_map(wrap, func(*args, **kwargs))

    def look_at(self, func, args, kwargs, leaves, made_here):
        """Raise what a GPU would raise, note what it would wait for."""
        name, full = func.overloadpacket.__name__, func.name().removeprefix("aten::")
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        ours = [x for x in tensors if isinstance(x, Pretended)]
        strangers = [x for x in tensors if not isinstance(x, Pretended)]
        if self.kind == "mps" and (made_here and kwargs.get("dtype") == torch.float64
                                   or any(x.dtype == torch.float64 for x in ours)
                                   or ours and any(x.dtype == torch.float64 for x in strangers)):
            raise TypeError(f"{func}: mps has no float64")
        if name in ("_to_copy", "copy_"):
            to, of = ((isinstance(x, Pretended) for x in args[:2]) if name == "copy_"
                      else (made_here, bool(ours)))
            blocking = not (kwargs.get("non_blocking") or name == "copy_" and True in args[2:])
            if of and not to or to and not of and blocking:
                self.wait(f"copy {'to' if to else 'from'} the GPU")
        elif name in ("index", "index_put", "index_put_", "_unsafe_index") and ours:
            index = [i for i in args[1] if i is not None]
            if not isinstance(args[0], Pretended):
                raise RuntimeError(f"{func}: a CPU tensor is indexed from the GPU")
            if any(i.dtype in (torch.bool, torch.uint8) for i in index) and (
                    name == "index" or args[2].numel() > 1):       # one value: masked_fill
                self.wait("boolean index")
            if any(not isinstance(i, Pretended) and i.dim() for i in index):
                self.wait("index from the CPU")
            if any(not isinstance(v, Pretended) and v.dim() for v in args[2:3]):
                raise RuntimeError(f"{func}: values from the CPU")
        elif ours and strangers and (torch.Tag.pointwise not in func.tags
                                     or any(x.dim() for x in strangers)):
            # a single number of the CPU may take part where the operation is elementwise
            raise RuntimeError(f"{func}: tensors on {self.kind} and on the CPU")
        if ours and (name in WAITING or full in WAITING):
            self.wait(full)
        if name == "convolution" and ours:
            self.dtypes.add(str(args[0].dtype))
        if name.startswith("_fused_adam"):            # the kernel takes equal memory layouts only
            layouts = [[[s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1]
                        for x in tensors] for tensors in args[:4]]
            if any(layout != layouts[0] for layout in layouts):
                raise RuntimeError("fused Adam: parameters, gradients and moments have different "
                                   "memory layouts")

    def wait(self, what):
        """Note it, with the innermost line of the project."""
        if self.kind != "cuda":
            return
        frame, places = sys._getframe(), []
        while frame:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / "tests"):
                places.append((frame.f_code.co_name, path.relative_to(ROOT), frame.f_lineno))
            frame = frame.f_back
        names = [name for name, *_ in places]
        excepted = [name for name in EXCEPTED if name in names]
        if excepted:
            self.excepted[excepted[-1]] += 1
        else:
            where = "{1}:{2} {0}".format(*places[0]) if places else "tests"
            self.waits.append(f"{where}: {what}")


class Front(TorchFunctionMode):
    """What happens above autograd: autocast, which C++ would apply to tensors of CUDA only, and
    another name for mps, which this PyTorch may not have."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if pretended.kind == "mps":
            args, kwargs = tree_map(
                lambda x: torch.device("cuda", 0) if isinstance(x, torch.device)
                and x.type == "mps" else x, (args, kwargs))
        if func in AUTOCAST and torch.is_autocast_enabled("cuda"):
            lower = torch.get_autocast_dtype("cuda")
            args, kwargs = tree_map(
                lambda x: x.to(lower) if isinstance(x, Pretended) and x.dtype == torch.float32
                else x, (args, kwargs))
        return func(*args, **kwargs)


pretended = Device()


def set_up():
    backend_registration._setup_privateuseone_for_python_backend("pretended")
    torch._C._ensureCUDADeviceGuardSet()              # one that does nothing, for device="cuda"
    torch._C._set_only_lift_cpu_tensors(True)         # torch.tensor(.., device="cuda") is a copy
    torch.autograd.set_multithreading_enabled(False)  # a mode is active in one thread
    torch.cuda.is_available = torch.backends.mps.is_available = lambda: True
    torch.cuda.is_bf16_supported = lambda *_: True
    torch.cuda._lazy_init = torch.cuda.synchronize = lambda *_: None
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.max_memory_allocated = lambda *_: 0


# ---------------------------------------------------------------------------------------------
# single operations


def transposed_gradient(x):
    x = torch.zeros_like(x, requires_grad=True)
    x.grad = torch.zeros_like(x.T.contiguous()).T
    torch.optim.Adam([x], fused=True).step()


OPERATIONS = {  # of x (2, 3) on the device
    "item": lambda x: x[0, 0].item(), "float": lambda x: float(x.sum()),
    "condition": lambda x: bool((x > 0).all()), "list": lambda x: x.tolist(),
    "copy from": lambda x: x.cpu(), "copy to": lambda x: torch.ones(3).to(x.device),
    "new tensor": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "boolean index": lambda x: x[x > 0], "index of the CPU": lambda x: x[torch.tensor([0, 1])],
    "nonzero": lambda x: x.nonzero(), "bincount": lambda x: x.flatten().long().bincount(),
    "repeats": lambda x: torch.repeat_interleave(x, x[:, 0].long(), dim=0),
    "number of classes": lambda x: F.one_hot(x.long()),
    "stack": lambda x: torch.stack([x[0], torch.ones(3)]),
    "stack of numbers": lambda x: torch.stack([x[0, 0], torch.tensor(1.0)]),
    "sum": lambda x: x + torch.ones(2, 3), "product": lambda x: x @ torch.ones(3, 2),
    "array": lambda x: x.numpy(), "layout": transposed_gradient,
    "copy that does not wait": lambda x: torch.ones(3).to(x.device, non_blocking=True),
    "number of the CPU": lambda x: x * torch.tensor(2.0), "index": lambda x: x[x[0].long() % 2],
    "fill": lambda x: x.clone().masked_fill_(x > 0, 0), "mask": lambda x: x * (x > 0),
    "known number of classes": lambda x: F.one_hot(x.long(), 3), "float64": lambda x: x.double(),
}


def try_operations(kind):
    """{name: what was waited for, or what was raised, or None}"""
    pretended.kind, noted = kind, {}
    with Front(), pretended:
        x = torch.ones(2, 3).to(torch.device(kind))
        for name, operation in OPERATIONS.items():
            pretended.waits.clear()
            try:
                operation(x)
                noted[name] = ", ".join(pretended.waits) or None
            except (RuntimeError, TypeError) as error:
                noted[name] = f"{type(error).__name__}: {error}"
    return noted


# ---------------------------------------------------------------------------------------------
# runs


def apart(method, waits):
    """A method of Run that is no part of an iteration: what was waited for until its end is
    forgotten."""
    def call(*args, **kwargs):
        result = method(*args, **kwargs)
        waits.clear()
        return result
    return call


def execute(command, device, out, on_step):
    """Run one command. What it prints, if that is its result."""
    script, *flags = command.replace("{out}", str(out)).split()
    screen, main = io.StringIO(), importlib.import_module(script).main
    with contextlib.redirect_stdout(screen):
        if script in TRAINING:
            main([*SMALL.split(), *flags, "--device", device, "--out", str(out)], on_step)
            return ""
        main([*flags, "--device", device])
    return screen.getvalue().replace(str(out), "{out}")


def on_pretended(case, out):
    """{"printed", "waits": [[of iteration 0], ...], "excepted": {name: number}, "dtypes": of what
    was convolved}"""
    pretended.kind, waits = case["kind"], []
    for notes in (pretended.waits, pretended.excepted, pretended.dtypes):
        notes.clear()

    def on_step(step, losses):
        waits.append(list(pretended.waits))
        pretended.waits.clear()

    dtype = " --dtype bfloat16" if case.get("bfloat16") else ""
    with contextlib.ExitStack() as stack:
        for name in ("open", "evaluate"):
            stack.enter_context(mock.patch.object(
                Run, name, apart(getattr(Run, name), pretended.waits)))
        stack.enter_context(Front())
        stack.enter_context(pretended)
        printed = [execute(command + dtype * is_training(command), case["kind"], out, on_step)
                   for command in case["commands"]]
    return {"printed": printed, "waits": waits, "excepted": dict(pretended.excepted),
            "dtypes": sorted(pretended.dtypes)}


def is_training(command):
    return command.split()[0] in TRAINING


def on_cpu(case, out):
    """What the commands print on the CPU, there in bfloat16 too."""
    passes = models.feature_pass
    forced = partial(bfloat16_pass, passes) if case.get("bfloat16") else passes
    with mock.patch.object(models, "feature_pass", forced):
        return [execute(command, "cpu", out, None) for command in case["commands"]]


def bfloat16_pass(passes, model, device, dtype, *more):
    return passes(model, device, "bfloat16", *more)


def log(out):
    """The lines of log.csv without the clock, its last column."""
    return [line.rsplit(",", 1)[0] for line in (out / "log.csv").read_text().splitlines()]


def judge(case):
    """error, waits, excepted, and whether log and checkpoint are those of the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        theirs, ours = Path(folder) / "cpu", Path(folder) / "gpu"
        for out in (theirs, ours):
            out.mkdir()
            pictures = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), dtype=np.uint8)
            np.savez(out / "pictures.npz", x=pictures)
        try:
            result = on_pretended(case, ours)
            printed = result.pop("printed")
            equal = (printed == on_cpu(case, theirs), log(ours) == log(theirs),
                     same(checkpoint(ours), checkpoint(theirs)))
        except Exception:
            return {"error": traceback.format_exc()}
    return {"error": None, "same": dict(zip(("printed", "log", "checkpoint"), equal, strict=True)),
            **result}


def main(cases):
    set_up()
    data.synthetic = synthetic_once
    for case in cases:
        result = judge(case) if case.get("commands") else try_operations(case["kind"])
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
