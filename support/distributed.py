"""One run over several processes (ranks). Each works on its local batch; all hold the same weights.

    torchrun --standalone --nproc_per_node 4 train_fixmatch.py --dataset cifar10

--batch_size stays global. Batches and views are functions of (seed, step), so every rank can draw
the global batch and keep its slice. What has to travel are means: of gradients, of the constants of
the omega step, of BatchNorm's statistics, of the numbers in the log. The slices have equal size, so
the mean of their means is the mean over the batch, and N ranks compute what one computes, up to
rounding.

With one rank the collectives return what they are given. nccl is untested: no GPU was at hand.
"""
import os
import sys
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F

from support import UserError, explain, lacks_memory, main_line

TIMEOUT = timedelta(seconds=60)      # a rank that is silent for longer is taken for dead
host_group = None                    # all ranks over gloo, with a timeout long enough for downloads


class PeerError(UserError):
    """Something is wrong with another rank. Every rank reports it: they may be on several hosts."""


def environment():
    """(rank, size) as torchrun has put them into the environment; (0, 1) if it has not."""
    size = variable("WORLD_SIZE", 1, default=1)
    rank = variable("RANK", 0, size - 1, default=0 if size == 1 else None)
    if size > 1:
        variable("MASTER_PORT", 1, 65535)
        if not os.environ.get("MASTER_ADDR"):
            raise UserError("MASTER_ADDR is not set in the environment, but WORLD_SIZE is; start "
                            "several processes with torchrun, a single one without WORLD_SIZE")
    return rank, size


def variable(name, low, high=2**20, default=None):
    """A whole number from the environment."""
    text = os.environ.get(name, default)
    try:
        if low <= int(text) <= high:
            return int(text)
    except (TypeError, ValueError):
        pass
    raise UserError(f"{name} is {text!r} in the environment, not a whole number from {low} to "
                    f"{high}; start several processes with torchrun, a single one without "
                    f"WORLD_SIZE and RANK")


def local_device(kind):
    """The device of this rank."""
    _, size = environment()
    if kind != "cuda" or size == 1:
        return torch.device(kind)
    local, gpus = variable("LOCAL_RANK", 0), torch.cuda.device_count()
    here = max(local + 1, variable("LOCAL_WORLD_SIZE", 1, default=1))
    if here > gpus:                           # on all ranks: none shall wait for one without a GPU
        raise UserError(f"{here} processes were started on this machine, but it has {gpus} GPUs, "
                        f"and each needs one of its own; start torchrun with --nproc_per_node "
                        f"{gpus}, or use --device cpu")
    return torch.device(kind, local)


# From the process group, not the environment: a program that has joined none, such as evaluate.py,
# may have inherited the variables of a rank.
def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def size():
    return dist.get_world_size() if dist.is_initialized() else 1


def start(device):
    """Join the process group. Returns (rank, size)."""
    number, ranks = environment()
    if ranks > 1 and not dist.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if number:
            sys.stdout = open(os.devnull, "w")               # only rank 0 prints
        with peer_errors(number, ranks):
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                                    timeout=TIMEOUT)
            global host_group
            host_group = dist.new_group(backend="gloo", timeout=timedelta(hours=1))
    return rank(), size()


def agree(values, differ=()):
    """Raise on every rank unless all have the same values {name: value}, except those in `differ`.

    Ranks that torchrun starts have one command; those that are started by hand may not.
    """
    if size() == 1:
        return
    everyone = [None] * size()
    with peer_errors():
        dist.all_gather_object(everyone, values, group=host_group)
    for name in sorted(set().union(*everyone) - set(differ)):
        for other, theirs in enumerate(everyone):
            if theirs.get(name) != everyone[0].get(name):
                raise PeerError(f"rank {other} has another {name} ({str(theirs.get(name))[:80]}) "
                                f"than rank 0 ({str(everyone[0].get(name))[:80]}); start all "
                                f"processes with the same command and the same data")


def stop():
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def peer_errors(number=None, ranks=None):
    """Around every collective: what it raises when another rank has died becomes one sentence.

    number, ranks: rank and size, where there is no process group yet
    """
    try:
        yield
    except RuntimeError as error:                            # gloo's; nccl's are derived from it
        if lacks_memory(error):
            raise
        raise PeerError(
            f"rank {number or rank()} of {ranks or size()}: another process of this run is dead or "
            f"was silent for {TIMEOUT.seconds} s ({main_line(error)}); what was saved before is "
            f"intact, start all of them again with --resume") from error


def local_slice(batch, rank, size):
    """This rank's slice of an array or tensor whose first axis is the global batch."""
    n = len(batch) // size
    return batch[rank * n:(rank + 1) * n]


def all_gather(x):
    """The local batches (n, ...) of all ranks, in order: (n * size, ...). No gradient passes."""
    if size() == 1:
        return x
    whole = x.new_empty((size() * len(x), *x.shape[1:]))
    with peer_errors():
        dist.all_gather(list(whole.chunk(size())), x.detach().contiguous())
    return whole


class SumOverRanks(torch.autograd.Function):
    """A tensor -> its sum over ranks, with derivatives of any order.

    The losses of all ranks depend on the tensor of each. Its gradient on a rank is that of the sum
    of these losses, again a sum over ranks; sync_gradients makes it that of their mean.
    """

    @staticmethod
    def forward(ctx, x):
        total = x.clone(memory_format=torch.contiguous_format)
        with peer_errors():
            dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return SumOverRanks.apply(gradient)


def stack_over_ranks(x):
    """x (n, m) of all ranks, in order: (size, n, m). Gradients pass, unlike in all_gather."""
    return SumOverRanks.apply(F.pad(x[None], (0, 0, 0, 0, rank(), size() - rank() - 1)))


def mean_over_ranks(tensors):
    """The means of the tensors, in one message."""
    if size() == 1:
        return list(tensors)
    flat = torch.cat([t.detach().flatten() for t in tensors])
    with peer_errors():
        dist.all_reduce(flat)
    parts = (flat / size()).split([t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]


def sync_gradients(*modules):
    """Average the gradients over ranks, in place and in one message."""
    if size() == 1:
        return
    gradients = [p.grad for m in modules for p in m.parameters() if p.grad is not None]
    with torch.no_grad():
        torch._foreach_copy_(gradients, mean_over_ranks(gradients))


def broadcast_from_rank0(function):
    """function() of rank 0, for all: what it returns, or what it raises."""
    if size() == 1:
        return function()
    box = [None, None]
    if rank() == 0:
        try:
            box[0] = function()
        except Exception as error:
            box[1] = error
            error.common = True                              # rank 0 reports it for all
    with peer_errors():
        dist.broadcast_object_list(box, group=host_group)
    if box[1] is not None:
        raise box[1]
    return box[0]


def everywhere(function):
    """function() on every rank. What it raises on one ends all of them, with the same sentence."""
    if size() == 1:
        return function()
    result, error, sentences = None, None, [None] * size()
    try:
        result = function()
    except Exception as caught:
        error = caught
    sentence = error and (explain(error) or f"{type(error).__name__}: {error}")
    with peer_errors():
        dist.all_gather_object(sentences, sentence, group=host_group)
    if error is not None and (explain(error) is None or len(set(sentences)) == 1):
        error.common = explain(error) is not None            # a mistake keeps its traceback
        raise error
    for other, sentence in enumerate(sentences):
        if sentence is not None:
            raise PeerError(f"rank {other}: {sentence}") from error
    return result


def rank0_first(function):
    """function() on every rank, rank 0 ahead of the others: they find what it has downloaded."""
    ahead = []
    broadcast_from_rank0(lambda: ahead.append(function()))
    return everywhere(lambda: ahead[0] if ahead else function())


def any_rank(*conditions):
    """For each condition, whether it holds on at least one rank: all ranks then act alike."""
    if size() == 1:
        return conditions
    flags = torch.tensor([float(c) for c in conditions])
    with peer_errors():                                      # over gloo: nothing waits for a GPU
        dist.all_reduce(flags, dist.ReduceOp.MAX)
    return tuple(flags.bool().tolist())
