"""What log.csv says about the iterations of an epoch: means of losses and pseudo-labels."""
import math

import numpy as np
import torch

from support import checks, distributed


class Averages:
    """Means since the epoch began, for log.csv.

    kept_k is the share of unlabeled images that count with pseudo-label k (sum: mask_rate), and
    precision_k the share of these that are of class k.
    add() keeps what it is given, on the device, and launches nothing. The sums are made when they
    are asked for, in the order of the iterations, so that they do not depend on when that is.
    Every rank sums over its local batches; ranks are averaged when the log is written.
    """
    columns = ("loss_x", "loss_u", "mask_rate", "pseudo_acc", "loss_bal", "omega_grad")

    def __init__(self, num_classes, device):
        self.names = [*self.columns, *(f"{name}_{k}" for name in ("kept", "precision")
                                       for k in range(num_classes))]
        self.num_classes, self.pending = num_classes, []
        self.sums = torch.zeros(2, len(self.names), device=device)       # totals, their counts

    def add(self, y_u, mask, true_u, loss_x, loss_u, loss_bal=None, omega_grad=None, **others):
        """loss_bal, omega_grad: None in an iteration that has none."""
        self.pending.append((y_u, mask, true_u, loss_x, loss_u, loss_bal, omega_grad))
        if len(self.pending) == 1000:                # or they would fill the memory
            self.flush()

    def flush(self):
        if not self.pending:
            return
        *labels, loss_x, loss_u, loss_bal, omega_grad = zip(*self.pending, strict=True)
        y_u, mask, true_u = map(torch.stack, labels)                     # (n, U): n iterations
        zero, one = torch.zeros_like(loss_x[0]), torch.ones_like(loss_x[0])
        guessed = one if mask.numel() else zero      # labels alone make no guesses
        shares = mask / max(1, mask.shape[1])
        known = mask * (true_u >= 0)                 # those of which we can say if they are right
        right = known * (y_u == true_u)
        by_class = mask.new_zeros(3, len(mask), self.num_classes)
        if mask.numel():
            by_class.scatter_add_(2, y_u.expand(3, -1, -1), torch.stack([shares, known, right]))
        kept_k, known_k, right_k = by_class                              # (n, K) each
        optional = [[zero if x is None else x for x in values] for values in (loss_bal, omega_grad)]
        moved = [zero if x is None else one for x in loss_bal]
        ones, guesses = one.expand(len(mask)), guessed.expand(len(mask))
        rows = [*map(torch.stack, (loss_x, loss_u)), shares.sum(1), right.sum(1),
                *map(torch.stack, optional), *kept_k.T, *right_k.T,
                ones, ones, guesses, known.sum(1), *[torch.stack(moved)] * 2,
                *[guesses] * self.num_classes, *known_k.T]
        rows = torch.cat([self.sums.view(1, -1), torch.stack(rows, 1)]).cpu().numpy()
        total = np.add.accumulate(rows)[-1]          # in order; sum() adds pairwise
        self.sums = torch.from_numpy(total).view(2, -1).to(mask.device)
        self.pending.clear()

    def means(self, mean_over_ranks=list):
        self.flush()
        sums, = mean_over_ranks([self.sums])
        return {name: total / count if count else math.nan
                for name, total, count in zip(self.names, *sums.tolist(), strict=True)}

    def reset(self):
        self.pending.clear()
        self.sums = torch.zeros_like(self.sums)

    def state_dict(self):
        self.flush()
        return {"sums": distributed.all_gather(self.sums[None])}         # (ranks, 2, columns)

    def load_state_dict(self, state):
        sums = state.get("sums") if isinstance(state, dict) else None
        several = torch.is_tensor(sums) and sums.dim() > 0 and len(sums) > 0
        form = self.sums.cpu().expand(len(sums) if several else 1, 2, -1)
        checks.compare(sums, form, "sums")
        same_ranks = len(sums) == distributed.size()
        self.sums.copy_(sums[distributed.rank()] if same_ranks else sums.mean(0))
