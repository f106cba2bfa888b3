"""CReST and CReST+: train to the end, adopt pseudo-labels of rare classes, start again.

A biased classifier has low recall on rare classes, but high precision. A run consists of several
generations. After each one the labeled set becomes the original one plus, of the n_c unlabeled
images predicted as class c, the mu_c n_c most confident ones; the network starts from scratch.

    mu_c = (N_(K-1-r) / N_(0))^alpha      N_(0) >= ... >= N_(K-1) sorted; class c has N_c = N_(r)

CReST+ also aligns the pseudo-labels' distribution (progressive distribution alignment):

    p' ~ p pi / p~        pi ~ N^t        t = 1 .. 0.5 over the generations
                          p~: mean of the last 128 batches' predictions

Both steps assume that the unlabeled set is distributed like the labeled one.
"""
import numpy as np
import torch

import data
import models
from baselines import Method
from support import UserError, cli, config
from support.augment import to_device
from support.distributed import all_gather, broadcast_from_rank0


def shares(counts, alpha=1 / 3):
    """mu (K,) from labeled counts (K,): 1 for the rarest class, least for the most frequent one."""
    descending = np.argsort(-counts, kind="stable")                # classes, most frequent first
    mu = np.empty(len(counts))
    mu[descending] = (np.sort(counts) / counts.max()) ** alpha     # place r gets N_(K-1-r)
    return mu


def select(predicted, confidence, mu):
    """Labels (N,) of the adopted images, -1 for the others. predicted, confidence (N,), mu (K,)."""
    labels = np.full(len(predicted), -1)
    for k, share in enumerate(mu):
        members = np.flatnonzero(predicted == k)
        ordered = members[np.argsort(-confidence[members], kind="stable")]     # surest first
        labels[ordered[:int(share * len(members))]] = k
    return labels


def alignment_target(counts, generation, generations, lowest=0.5):
    """pi (K,) ~ N^t, t from 1 in the first generation to `lowest` in the last."""
    t = 1 - (1 - lowest) * generation / max(1, generations - 1)
    return counts ** t / (counts ** t).sum()


def milestones(cfg):
    """The numbers of iterations after which a generation ends, without the last one."""
    return tuple(cfg.iters * g // cfg.crest_generations for g in range(1, cfg.crest_generations))


class CReST(Method):
    @staticmethod
    def flags(p):
        add = p.add_argument_group("CReST").add_argument
        add("--crest_generations", type=cli.number(int, 1, 1000), default=5,
            help="equal parts of the run (default: 5)")
        add("--crest_anyway", action="store_true",
            help="go on although labeled and unlabeled images are distributed differently")

    @staticmethod
    def check(cfg):
        known = cfg.gamma_u is not None
        if known and not config.matched(cfg) and not cfg.crest_anyway:
            raise UserError(
                f"--method {cfg.method} assumes that labeled and unlabeled images are distributed "
                f"alike, so it is not applicable here; make --gamma_u equal to --gamma_l without "
                f"--reverse_u, or add --crest_anyway")
        if cfg.crest_generations > cfg.iters:
            raise UserError(f"--crest_generations {cfg.crest_generations} are more than --iters "
                            f"{cfg.iters}; a generation needs an iteration")

    def __init__(self, ctx):
        super().__init__(ctx)
        self.counts = ctx.counts.numpy()                                       # (K,) N_k
        self.generation, self.milestones = 0, milestones(ctx.cfg)
        # label under which each unlabeled image was adopted, -1: it was not
        self.register_buffer("adopted", torch.full((len(ctx.index_u),), -1))
        self.make_stream()

    def make_stream(self):
        """The labeled stream of this generation, and the labels it goes with."""
        ctx, adopted = self.ctx, self.adopted.cpu().numpy()
        chosen = adopted >= 0
        self.labels = ctx.dataset.labels.copy()
        self.labels[ctx.index_u[chosen]] = adopted[chosen]
        index = np.concatenate([ctx.index_l, ctx.index_u[chosen]])
        # The first generation draws the same batches as the base method.
        purpose = f"labeled {self.generation}" if self.generation else "labeled"
        self.stream = data.IndexStream(index, ctx.cfg.batch_size, ctx.cfg.seed, purpose, ctx.shard)
        ctx.dataset.read_ahead(self.stream)

    def get_extra_state(self):                           # saved with the buffers
        return self.generation

    def set_extra_state(self, state):
        self.generation = state
        self.make_stream()

    def labeled(self, step):
        index = self.stream.batch(step)
        return index, self.labels[index]

    def schedule(self, step):
        starts = (0, *self.milestones, self.ctx.cfg.iters)
        return step - starts[self.generation], starts[self.generation + 1] - starts[self.generation]

    def after_epoch(self, done):
        if done not in self.milestones:
            return
        # --pool union: images that have a label are not candidates, or they would use up the shares
        new = np.flatnonzero(~np.isin(self.ctx.index_u, self.ctx.index_l))
        # rank 0 chooses for all: rounding on a GPU may make ranks differ
        labels = broadcast_from_rank0(lambda: select(
            *self.predict_unlabeled(self.ctx.index_u[new]), shares(self.counts)))
        new, labels = (to_device(a, self.adopted) for a in (new, labels))
        self.adopted[new] = labels
        self.generation += 1
        self.restart()
        self.make_stream()

    @torch.no_grad()
    def predict_unlabeled(self, index):
        """The EMA's class and confidence (N,) for images (N,), without augmentation."""
        ctx, chunks = self.ctx, np.array_split(index, len(index) // 500 + 1)
        p = torch.cat([ctx.ema.model(ctx.normalise(ctx.dataset.take(c)[0])).softmax(1)
                       for c in chunks])                                       # (N, K)
        confidence, predicted = p.max(1)
        return predicted.cpu().numpy(), confidence.cpu().numpy()

    def restart(self):
        """New weights in the network and its EMA, a new state of the optimizer."""
        ctx, cfg = self.ctx, self.ctx.cfg
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(cfg.seed + 1000003 * self.generation)
            fresh = models.build(cfg.model, len(self.counts), cfg.bn_momentum, cfg.wrn_quirk)
        for network in (ctx.model, ctx.ema.model):
            network.load_state_dict(fresh.state_dict())
        ctx.optimizer.state.clear()

    @staticmethod
    def judged(history, cfg):
        """Evaluations of the last generation only."""
        start = (0, *milestones(cfg))[-1]
        return [row for row in history if row["iter"] > start]


class CReSTPlus(CReST):
    def __init__(self, ctx):
        super().__init__(ctx)
        K = ctx.dataset.num_classes
        self.register_buffer("recent", torch.full((128, K), 1 / K))            # means of batches

    def refine(self, p, batch):
        target = alignment_target(self.ctx.counts, self.generation,
                                  self.ctx.cfg.crest_generations)
        target = to_device(target.to(p.dtype).numpy(), p)                      # (K,)
        aligned = p * (target + 1e-6) / (self.recent.mean(0) + 1e-6)           # (U, K)
        self.recent[batch.step % 128] = all_gather(p).mean(0)       # unaligned, for the next steps
        return aligned / aligned.sum(1, keepdim=True)

    def restart(self):
        super().restart()
        self.recent.fill_(1 / self.recent.shape[1])
