"""L2AC as bi-level code is usually written: the step of *every* weight depends on omega.

The whole network is differentiated twice. The paper's cost table calls this "L2AC (traditional)";
it serves as that row and as a check. The loop is that of train_fixmatch.py without its variants.

    python -m scripts.full_unroll --iters 100     the flags of train_fixmatch.py, without --method
"""
from functools import partial

import torch
import torch.nn.functional as F
from torch.func import functional_call

import data
import evaluate
import models
from attractor import build_attractor
from bilevel import snapshot, update
from support import UserError, config, distributed
from support.augment import Normalise, strong, weak
from support.run import Run, launch
from train_fixmatch import fixmatch_loss

FIXED = {"method": "full_unroll", "recipe": "paper", "omega_every": 1, "omega_order": "after",
         "pseudo_from": "linear", "compile": False}           # flags that have no other value here


def full_unroll(model, attractor, lower_loss, logits, inner, x_b, y_b, mean_over_ranks=list):
    """(L_bal, dL_bal/domega, this rank's part of the lower gradients, which is to be averaged).

    logits (N, K) come with the graph of the whole network; inner: InnerSteps of all its parameters.
    The lower gradients are returned so that the caller can step without a second backward pass.
    """
    names, params = zip(*model.named_parameters(), strict=True)
    loss, *_ = lower_loss(logits + attractor(logits.detach()))                 # Eq. 2, 3
    local = torch.autograd.grad(loss, params, create_graph=True)
    g = mean_over_ranks([t.detach() for t in local])
    for part in g:
        part.requires_grad_()
    moved = dict(zip(names, map(update, inner, g), strict=True))               # Eq. 4, theta too
    loss_bal = F.cross_entropy(functional_call(model, moved, (x_b,)), y_b)     # Eq. 5
    c = mean_over_ranks(torch.autograd.grad(loss_bal, g))
    gradient = torch.autograd.grad(local, list(attractor.parameters()), c)
    return loss_bal.detach(), mean_over_ranks(gradient), [t.detach() for t in local]


def configure(argv):
    """The flags of train_fixmatch.py; refuses those of variants that this loop does not have."""
    p = config.parser(__doc__, config.l2ac_flags, config.fixmatch_flags)
    p.set_defaults(method="full_unroll")                      # names the run folder
    cfg = config.resolve(p, argv, "fixmatch")
    for key, value in FIXED.items():
        if getattr(cfg, key) != value:
            raise UserError(f"--{key} {getattr(cfg, key)}: scripts.full_unroll has the paper's "
                            f"loop only; leave --{key} out")
    return cfg


def main(argv=None, on_step=None):
    cfg = configure(argv)
    run = Run(cfg, on_step)
    device, shard = run.device, (run.rank, run.size)
    dataset, index_l, index_u = data.load_split(cfg, device)
    normalise = Normalise(dataset.mean, dataset.std, device)
    stream_l = data.IndexStream(index_l, cfg.batch_size, cfg.seed, "labeled", shard)
    stream_u = data.IndexStream(index_u, cfg.batch_size_u, cfg.seed, "unlabeled", shard)
    stream_b = data.BalancedStream(index_l, dataset.labels, cfg.batch_size, cfg.seed, shard)
    dataset.read_ahead(stream_l, stream_u, stream_b)

    def view(x, purpose, step):
        return weak(x, data.rng(cfg.seed, purpose, step), normalise, shard, cfg.no_flip)

    model, ema, features = models.build_with_ema(cfg, dataset.num_classes, device)
    attractor = build_attractor(cfg, dataset.count(index_l)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), cfg.lr, fused=True)
    omega_optimizer = torch.optim.Adam(attractor.parameters(), cfg.eta, fused=True)
    judge = partial(evaluate.on_test_set, ema.model, dataset, normalise, attractor)
    start = run.open(dataset, index_l, index_u, resizable=True, parts={
        "model": model, "ema": ema.model, "attractor": attractor, "optimizer": optimizer,
        "omega_optimizer": omega_optimizer})
    for step in range(start, cfg.iters):
        x_l, y_l = dataset.take(stream_l.batch(step))
        x_u, true_u = dataset.take(stream_u.batch(step))
        x_b, y_b = dataset.take(stream_b.batch(step))
        x_s = strong(x_u.repeat_interleave(cfg.n_strong, dim=0),
                     data.rng(cfg.seed, "strong view", step), normalise, cfg.ra_n, cfg.ra_m, shard,
                     cfg.no_flip)
        with torch.no_grad(), models.frozen_bn_stats(model):
            p = model.classifier(features(view(x_u, "weak view", step))).softmax(1)
            confidence, y_u = p.max(1)
            mask = (confidence >= cfg.tau).float()
        logits = model.classifier(features(torch.cat([view(x_l, "labeled view", step), x_s])))
        lower_loss = partial(fixmatch_loss, y_l=y_l, y_u=y_u, mask=mask, lambda_u=cfg.lambda_u)
        with torch.no_grad():                                 # for the log only
            loss, loss_x, loss_u = lower_loss(logits + attractor(logits))

        inner = snapshot(model.parameters(), optimizer, step + 1, cfg.inner)
        with models.frozen_bn_stats(model):
            loss_bal, gradient, lower_gradient = full_unroll(
                model, attractor, lower_loss, logits, inner, view(x_b, "balanced view", step), y_b,
                distributed.mean_over_ranks)
        for p, g in zip(attractor.parameters(), gradient, strict=True):
            p.grad = g
        omega_optimizer.step()                                                 # Eq. 6
        for p, g in zip(model.parameters(), lower_gradient, strict=True):
            p.grad = torch.empty_like(p).copy_(g)             # in p's memory layout, for fused Adam
        distributed.sync_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
        models.decay_weights(model, cfg)
        if run.after_step(step, judge, y_u, mask, true_u, loss=loss, loss_x=loss_x, loss_u=loss_u,
                          loss_bal=loss_bal, omega_grad=torch.nn.utils.get_total_norm(gradient)):
            return 130
    run.finish(evaluate.mean_of_last(run.history), run.history)


if __name__ == "__main__":
    launch(main)
