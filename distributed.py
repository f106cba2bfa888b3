"""One run over several processes: each works on its slice of every batch, the weights are the same.

    torchrun --standalone --nproc_per_node 4 train_fixmatch.py --dataset cifar10

torchrun starts the processes and tells each its number. --batch_size stays the size of the whole
batch: batches and views are functions of (seed, step), so every process knows the whole batch
without asking and keeps its slice. What has to travel are means: of gradients, of the constants
of the omega step, of the numbers in the log. The slices are equally large, so a mean of their
means is the mean of the batch, and N processes compute what one computes, up to rounding and
except for BatchNorm on a CPU, which normalises each slice by itself (SyncBatchNorm is CUDA's).

With one process every function here hands back what it was given. The CUDA path (nccl,
SyncBatchNorm) is untested: no GPU was at hand.
"""
import os
import sys
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

PATIENCE = timedelta(seconds=60)     # a process that is silent for longer is taken for dead
hosts = None                         # all processes, talking over gloo: slow work, no GPU involved


class LostProcess(Exception):
    """One sentence for the user: this process is well, another one is not."""


def rank():
    return int(os.environ.get("RANK", 0)) if size() > 1 else 0


def size():
    return int(os.environ.get("WORLD_SIZE", 1))


def start(device):
    """Meet the others. Returns (rank, size), the `shard` that augment.py takes."""
    if size() > 1 and not dist.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        if rank():
            sys.stdout = open(os.devnull, "w")               # the first process speaks for all
        with others():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
            global hosts
            hosts = dist.new_group(backend="gloo", timeout=timedelta(hours=1))
    return rank(), size()


def stop():
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def others():
    """Around everything that waits for other processes."""
    try:
        yield
    except RuntimeError as error:                            # gloo has no class of its own for it
        raise LostProcess(
            f"process {rank()} of {size()}: another process of this run is dead or was silent for "
            f"{PATIENCE.seconds} s ({str(error).splitlines()[0][:120]}); what was saved before is "
            f"intact, start all of them again with --resume") from None


def mine(batch):
    """This process's slice of an array or tensor whose first axis is the whole batch."""
    n = len(batch) // size()
    return batch[rank() * n:(rank() + 1) * n]


def gather(x):
    """The slices (n, ...) of all processes, in order: (n * size, ...). No gradient passes."""
    if size() == 1:
        return x
    whole = x.new_empty((size() * len(x), *x.shape[1:]))
    with others():
        dist.all_gather(list(whole.chunk(size())), x.detach().contiguous())
    return whole


def average(tensors):
    """Their means over the processes, in one message."""
    if size() == 1:
        return list(tensors)
    flat = torch.cat([t.detach().flatten() for t in tensors])
    with others():
        dist.all_reduce(flat)
    parts = (flat / size()).split([t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(parts, tensors)]


def average_(tensors):
    """The same in place, e.g. for gradients."""
    if size() > 1:
        with torch.no_grad():
            torch._foreach_copy_(tensors, average(tensors))


def from_first(function):
    """function() of the first process, for all: what it returns, or what it raises."""
    if size() == 1:
        return function()
    box = [None, None]
    if rank() == 0:
        try:
            box[0] = function()
        except Exception as error:
            box[1] = error
    with others():
        dist.broadcast_object_list(box, group=hosts)
    if box[1] is not None:
        raise box[1]
    return box[0]


def in_turn(function):
    """function() of every process, the first one ahead: what it downloads the others then find."""
    ahead = []
    from_first(lambda: ahead.append(function()))
    return ahead[0] if ahead else function()


def any_of(wish):
    """Whether one process at least wishes it, so that all do the same at the same iteration."""
    if size() == 1:
        return wish
    flag = torch.tensor(float(wish))
    with others():                                           # over gloo: nothing waits for a GPU
        dist.all_reduce(flag, dist.ReduceOp.MAX, hosts if dist.get_backend() == "nccl" else None)
    return bool(flag)
