"""One run over several processes (ranks), each with a GPU of its own.

    torchrun --standalone --nproc_per_node 4 train_fixmatch.py --dataset cifar10

--batch_size stays global: every rank takes its slice of the batch, and makes its own random views.
Gradients are averaged after each backward pass, so all ranks hold the same weights. BatchNorm
normalises the local batch, as under DDP. Rank 0 evaluates, prints and writes. nccl is untested.
"""
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist


def start(kind):
    """Join the process group that torchrun has prepared, if it has; returns the device."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return torch.device(kind)
    dist.init_process_group(timeout=timedelta(hours=1))       # they wait while rank 0 evaluates
    if rank() > 0:
        sys.stdout = open(os.devnull, "w")
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))      # what "cuda" then means
    return torch.device(kind)


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def size():
    return dist.get_world_size() if dist.is_initialized() else 1


def local(batch):
    """This rank's slice of a global batch; what does not divide evenly is left out."""
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
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    if size() > 1:
        flat = mean(torch.cat([g.flatten() for g in gradients]))
        for g, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            g.copy_(part.view_as(g))
