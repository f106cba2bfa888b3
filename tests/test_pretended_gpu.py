"""Every method of the three loops on a pretended GPU: no tensor is left on the CPU, no iteration
makes the host wait, and the log is that of the CPU.

Its tensors tell Python that they are on cuda:0, and hold a CPU tensor that does the work. Every
operation passes through `Device`, which raises where a CPU tensor meets one of the GPU and notes
what would make the host wait. To C++ they are those of a backend in Python, "pretended", which
cannot be taken back: each case has a process of its own. Without this part of PyTorch it fails.
"""
import json
import sys
from pathlib import Path

import pytest
import torch
import worker
from conftest import ROOT, TINY
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

import train_fixmatch
import train_mixmatch
from baselines import train as baselines
from baselines.methods import METHODS
from support.run import Run

SCRIPTS = {"fixmatch": train_fixmatch.main, "mixmatch": train_mixmatch.main,
           "baselines": baselines.main}
OWN = {"crest": "--crest_generations 2", "crest+": "--crest_generations 2", "acr": "--eval_every 2",
       "crt": "--iters 3 --crt_iters 3", "darp_crt": "--iters 3 --crt_iters 3"}
CASES = {"fixmatch": "fixmatch --tau 0.2", "mixmatch": "mixmatch",
         "adaptive": "fixmatch --tau 0.2 --pseudo_from adaptive --omega_every 2 --n_strong 2",
         "vector": "mixmatch --attractor vector --attractor_start prior"}
CASES |= {f"{base} {method}": f"baselines --base {base} --method {method} {OWN.get(method, '')}"
          + " --tau 0.2" * (base in ("fixmatch", "pseudolabel"))
          for base, table in METHODS.items() for method in table}
# Operations of CUDA after which the host has to know a value of the GPU.
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "bincount", "_unique2", "equal",
           "repeat_interleave.Tensor", "_linalg_check_errors"}
MAY_WAIT = {"column_roots", "begin"}         # of DARP: Newton's test; CReST: once in a generation


class Pretended(torch.Tensor):
    """A tensor on the pretended GPU, and the CPU tensor `held` that computes in its place."""
    _is_param = False                                 # nn.Parameter sets it on subclasses
    device = property(lambda self: torch.device("cuda", 0))

    def __new__(cls, real):
        new = torch.Tensor._make_wrapper_subclass(
            cls, real.shape, strides=real.stride(), storage_offset=real.storage_offset(),
            dtype=real.dtype, device="pretended:0")
        new.held = real
        return new

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return device.__torch_dispatch__(func, types, args, kwargs)      # outside of the mode

    def __deepcopy__(self, memo):
        copy = self.detach().clone()
        return torch.nn.Parameter(copy, self.requires_grad) if self._is_param else copy

    def __reduce_ex__(self, protocol):                # torch.save
        return self.held.__reduce_ex__(protocol)

    def tolist(self):
        return self.cpu().tolist()

    def numpy(self, *, force=False):
        if not force:
            raise TypeError("a tensor on CUDA cannot become an array; copy it first")
        return self.detach().cpu().numpy()


class Device(TorchDispatchMode):
    """The GPU below autograd: one call for each operation."""
    waits = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves, form = tree_flatten((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        ours = [x for x in tensors if isinstance(x, Pretended)]
        target = kwargs.get("device")
        made_here = bool(ours) if target is None else target.type != "cpu"
        strangers = [x for x in tensors if not isinstance(x, Pretended)]
        self.look_at(func, args, kwargs, ours, strangers, made_here)
        bare = [x.held if isinstance(x, Pretended) else torch.device("cpu")
                if isinstance(x, torch.device) else x for x in leaves]
        given = {id(b): x for b, x in zip(bare, leaves, strict=True) if isinstance(x, Pretended)}
        args, kwargs = tree_unflatten(bare, form)

        def wrap(x):
            if not isinstance(x, torch.Tensor) or not made_here:
                return x
            return given[id(x)] if id(x) in given else Pretended(x)      # given: changed in place
        return tree_map(wrap, func(*args, **kwargs))

    def look_at(self, func, args, kwargs, ours, strangers, made_here):
        """Raise what a GPU would raise, note what it would wait for."""
        name, full = func.overloadpacket.__name__, func.name().removeprefix("aten::")
        if name in ("_to_copy", "copy_"):
            to, of = ((isinstance(x, Pretended) for x in args[:2]) if name == "copy_"
                      else (made_here, bool(ours)))
            blocking = not (kwargs.get("non_blocking") or name == "copy_" and True in args[2:])
            if of and not to or to and not of and blocking:
                self.wait(f"copy {'to' if to else 'from'} the GPU")
        elif name.removesuffix("_") in ("index", "index_put") and isinstance(args[0], Pretended):
            index = [i for i in args[1] if i is not None]
            one_value = name != "index" and args[2].numel() == 1         # masked_fill
            if any(i.dtype == torch.bool for i in index) and not one_value:
                self.wait("boolean index")
            if any(not isinstance(i, Pretended) and i.dim() for i in index):
                self.wait("index from the CPU")
        elif ours and (torch.Tag.pointwise not in func.tags and strangers
                       or any(x.dim() for x in strangers)):
            # a single number of the CPU may take part where the operation is elementwise
            raise RuntimeError(f"{func}: tensors on CUDA and on the CPU")
        elif ours and {name, full} & WAITING:
            self.wait(full)

    def wait(self, what):
        """Note it, with the lines of the project that led to it."""
        frame, places = sys._getframe(), {}
        while frame := frame.f_back:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / "tests"):
                places.setdefault(frame.f_code.co_name, f"{path.name}:{frame.f_lineno}")
        if not places.keys() & MAY_WAIT:
            self.waits.append(f"{what}: {places}")


device = Device()


def set_up():
    backend_registration._setup_privateuseone_for_python_backend("pretended")
    torch._C._ensureCUDADeviceGuardSet()              # one that does nothing, for device="cuda"
    torch._C._set_only_lift_cpu_tensors(True)         # torch.tensor(.., device="cuda") is a copy
    torch.autograd.set_multithreading_enabled(False)  # a mode is active in one thread
    torch.cuda.is_available = lambda: True
    torch.cuda._lazy_init = torch.cuda.is_current_stream_capturing = lambda: False


def train(command, kind, out, on_step=None):
    script, *flags = command.split()
    SCRIPTS[script]([*TINY.split(), "--iters", "6", "--eval_every", "6", *flags, "--device", kind,
                     "--out", str(out / kind)], on_step)


def train_on_pretended(command, out):
    """waits.json: of all iterations but the first, which may fill caches; evaluation and checkpoint
    are no part of an iteration."""
    waits, save = [], Run.save

    def on_step(step, losses):
        waits.extend(device.waits if step else [])
        device.waits.clear()

    def save_and_forget(*args):
        save(*args)
        device.waits.clear()
    Run.save = save_and_forget
    set_up()
    with device:
        train(command, "cuda", out, on_step)
    (out / "waits.json").write_text(json.dumps(waits))


@pytest.mark.parametrize("name", [
    name if name == "fixmatch" else pytest.param(name, marks=pytest.mark.slow) for name in CASES])
def test_a_run_on_a_pretended_gpu(name, tmp_path):
    train(CASES[name], "cpu", tmp_path)
    worker.run(train_on_pretended, CASES[name], tmp_path, folder=tmp_path)
    waits = json.loads((tmp_path / "waits.json").read_text())
    assert len(waits) <= ("darp" in name), waits      # its target counts, once
    logs = [[line.rsplit(",", 1)[0] for line in (tmp_path / kind / "log.csv").read_text().split()]
            for kind in ("cpu", "cuda")]              # it_per_s is the last column
    assert logs[0] == logs[1]


def test_the_pretended_gpu_sees_what_a_gpu_would_not_like(tmp_path):
    def operations():
        set_up()
        with device:
            x = torch.ones(2, 3).to("cuda")
            for operation in (x[0, 0].item, (x > 0).all().__bool__, x.cpu, x.nonzero,
                              lambda: torch.ones(3).to(x.device), lambda: x[x > 0],
                              lambda: x[torch.tensor([0, 1])]):
                device.waits.clear()
                operation()
                assert device.waits
            device.waits.clear()
            for operation in (lambda: x + torch.ones(2, 3), lambda: x @ torch.ones(3, 2), x.numpy,
                              lambda: torch.stack([x[0], torch.ones(3)])):
                with pytest.raises((RuntimeError, TypeError)):
                    operation()
            x * torch.tensor(2.0) * (x > 0) + torch.ones(3).to(x.device, non_blocking=True)
            assert not device.waits
    worker.run(operations, folder=tmp_path)
