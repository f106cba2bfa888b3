"""One run over several processes (ranks), each with a GPU of its own.

    torchrun --standalone --nproc_per_node 4 train_fixmatch.py --dataset cifar10

--batch_size stays global: every rank takes its slice of the batch and makes its own random views.
Gradients are averaged after each backward pass, so all ranks hold the same weights. BatchNorm
normalises the local batch, as it does under DistributedDataParallel. Rank 0 evaluates, prints and
writes. nccl is untested: no GPU was at hand.
"""
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from support import UserError


def start(kind):
    """Join the process group that torchrun has prepared, if it has; returns the device."""
    ranks, local = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    if ranks == 1:
        return torch.device(kind)
    if kind == "cuda" and local >= torch.cuda.device_count():
        raise UserError(f"there are {torch.cuda.device_count()} GPUs, and each process needs one "
                        f"of its own; lower torchrun's --nproc_per_node, or add --device cpu")
    if not dist.is_initialized():
        # rank 0 may download a dataset or evaluate while the others wait
        dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
                                timeout=timedelta(hours=1))
    if rank():
        sys.stdout = open(os.devnull, "w")
    if kind == "cuda":
        torch.cuda.set_device(local)
    return torch.device(kind, local) if kind == "cuda" else torch.device(kind)


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def size():
    return dist.get_world_size() if dist.is_initialized() else 1


def local(batch):
    """This rank's slice of a global batch."""
    n = len(batch) // size()
    return batch[rank() * n:(rank() + 1) * n]


def mean(x):
    """The mean of a tensor over ranks."""
    if size() > 1:
        x = x.clone()
        dist.all_reduce(x)
        x /= size()
    return x


def average_gradients(module):
    """Replace every p.grad by its mean over ranks, in one message."""
    if size() > 1:
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        flat = mean(torch.cat([g.flatten() for g in gradients]))
        for g, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            g.copy_(part.view_as(g))


def wait_for_rank0(function):
    """function() on rank 0 first: the others find what it has downloaded or decoded."""
    if rank() == 0:
        result = function()
    if size() > 1:
        dist.barrier()
    return result if rank() == 0 else function()


def stop():
    if dist.is_initialized():
        dist.destroy_process_group()
