"""Is the run healthy? Losses that are not finite stop it; other known bad signs give a warning.

The signs are looked for at the end of an epoch, in the row of log.csv that is made there anyway.
The thresholds lie well outside of what healthy runs show: docs/engineering.md, "Is it working?",
has the measurements.
"""
import math
from collections import defaultdict

import torch

from support import UserError, checks

START = 0.5          # share of the run before which no sign counts: a slow start is normal
ENOUGH = 1000        # unlabeled images in an epoch: shares of fewer say little
STILL = 0.12         # the attractor has to add more than this to some logit; its start adds 0.1
FEW = 0.001          # share of the unlabeled images that have to pass tau
SOME, MOST = 0.05, 0.95      # if more than SOME pass tau, no class may have over MOST of them


class Health:
    def __init__(self, cfg, names, counts):
        """names [K] of the classes; counts (K,): labeled images of each"""
        self.cfg, self.names, self.told = cfg, names, set()
        self.counts = [max(1, int(n)) for n in counts]

    def warnings(self, row):
        """Sentences about the signs that this row of the log is the first to show."""
        late = row["iter"] > START * self.cfg.iters
        if not late or self.cfg.eval_every * self.cfg.batch_size_u < ENOUGH:
            return []
        row = defaultdict(lambda: math.nan, row)     # a column that is not there shows no sign
        found = {check.__name__: check(row) for check in (
            self.attractor_is_still, self.no_label_passes, self.one_class_takes_over)}
        new = {name: text for name, text in found.items() if text and name not in self.told}
        self.told |= new.keys()
        return [f"warning, iteration {row['iter']}: {text}" for text in new.values()]

    def attractor_is_still(self, row):
        """Not checked if it starts at the prior, which may be right, or if classes are equal."""
        equal = max(self.counts) < 2 * min(self.counts)
        if self.cfg.method != "l2ac" or self.cfg.attractor_start == "prior" or equal:
            return None
        added = max(abs(row[f"bias_{k}"]) for k in range(len(self.names)))
        every = self.cfg.omega_every
        return added < STILL and (
            f"the attractor has hardly moved (it adds {added:.2f} to a logit at most), so this is "
            f"close to --method none; raise --iters {self.cfg.iters} or --eta {self.cfg.eta:g}"
            + f", or lower --omega_every {every}" * (every > 1))

    def no_label_passes(self, row):
        return row["mask_rate"] < FEW and (
            f"hardly any pseudo-label is sure enough (mask_rate {row['mask_rate']:.2g}), so the "
            f"unlabeled images have no effect; lower --tau {self.cfg.tau:g} or raise --iters "
            f"{self.cfg.iters}")

    def one_class_takes_over(self, row):
        """A class that has most of the labels may have most of the pseudo-labels."""
        kept = [row[f"kept_{k}"] for k in range(len(self.names))]
        k = kept.index(max(kept))
        if not row["mask_rate"] > SOME or self.counts[k] > sum(self.counts) / 2:
            return None
        share = kept[k] / row["mask_rate"]
        sure = f"raise --tau {self.cfg.tau:g}, or " if hasattr(self.cfg, "tau") else ""
        return share > MOST and (
            f"{share:.0%} of the pseudo-labels that count are of class '{self.names[k]}', which "
            f"has {self.counts[k] / sum(self.counts):.0%} of the labels: it takes over; "
            f"{sure}lower --lambda_u {self.cfg.lambda_u:g} or --lr {self.cfg.lr:g}")


class NaNGuard:
    """Stops a run whose losses or weights are not finite, before they can be saved."""

    def __init__(self, cfg):
        self.pending, self.bad = [], None            # (step, losses) not yet looked at
        idle = ("none", "attractor", "single_level")         # methods in which omega has no eta
        causes = ("lr", "weight_decay", "lambda_u", *(() if cfg.method in idle else ("eta",)))
        self.causes = ", ".join(f"--{k} {getattr(cfg, k):g}" for k in causes if hasattr(cfg, k))

    def flush(self):
        """Look at what is pending. Returns whether anything so far was not finite."""
        for step, losses in self.pending:
            if not math.isfinite(torch.stack(list(losses.values())).sum()):
                self.bad = self.bad or (step, losses)
        self.pending.clear()
        return self.bad is not None

    def fail(self):
        """Raise, if anything so far was not finite."""
        if self.flush():
            step, losses = self.bad
            values = ", ".join(f"{name} {float(x):g}" for name, x in losses.items())
            self.stop(f"the loss of iteration {step} is not finite ({values})")

    def check(self, done, parts):
        """parts: {name: module, optimizer, ...}"""
        self.fail()
        if not all(t.isfinite().all() for part in parts.values()
                   for t in checks.tensors(part.state_dict())):
            self.stop(f"the weights are not finite after iteration {done}")

    def stop(self, what):
        raise UserError(f"{what}; nothing was saved since, start again in another --out with a "
                        f"lower value of the flag that is the cause ({self.causes})")
