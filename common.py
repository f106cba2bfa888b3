"""What every training loop holds in its hands: EMA, tally, watch, screen, signals. Nouns only: no
loop, no loss, no `if method ==`. Its flags are in settings.py, its files in run_folder.py.
"""
import math
import shutil
import signal
import sys
import time
from copy import deepcopy
from datetime import timedelta

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

import distributed
from settings import UserError


class EMA:
    """A copy of the model whose weights and BatchNorm statistics trail those of the live one."""

    # torch's AveragedModel would also do, but it reads a counter back from the device at each step.
    def __init__(self, model, decay):
        self.model = deepcopy(model).eval().requires_grad_(False)
        self.average = get_ema_multi_avg_fn(decay)
        self.trail, self.live = ([t for t in m.state_dict().values() if t.is_floating_point()]
                                 for m in (self.model, model))

    def update(self):
        self.average(self.trail, self.live, None)    # trail <- decay * trail + (1 - decay) * live


class Progress:
    """The screen: one status line, redrawn in place once a second, and a table row per evaluation.

    Also the clock: training time, evaluations not counted.
    """

    def __init__(self, start, iters, seconds):
        self.start, self.iters, self.before = start, iters, seconds
        self.seconds, self.shown, self.rows = seconds, 0.0, 0
        self.begin()

    def begin(self):
        self.since = time.perf_counter()

    def pause(self):
        self.seconds += time.perf_counter() - self.since

    def due(self):
        return sys.stdout.isatty() and time.perf_counter() - self.shown > 1

    def show(self, done, values):
        self.shown = time.perf_counter()
        rate = (done - self.start) / (self.seconds - self.before + self.shown - self.since)
        left = timedelta(seconds=int((self.iters - done) / rate))
        text = (f"{done}/{self.iters} ({100 * done // self.iters}%)  {rate:.1f} it/s  {left} left  "
                + "  ".join(f"{k} {v:.3g}" for k, v in values.items() if v == v))
        print("\r\033[K" + text[:shutil.get_terminal_size().columns - 1], end="", flush=True)

    def row(self, row):
        """`row` is the newest line of log.csv; what it says of single classes stays in the file."""
        shown = {k: v for k, v in row.items() if not k.startswith(("recall_", "bias_"))}
        if self.rows % 20 == 0:
            self.line("".join(f"{k:>11}" for k in shown))
        self.rows += 1
        self.line("".join(f"{v:>11.4g}" for v in shown.values()))

    def line(self, text):
        print(("\r\033[K" if sys.stdout.isatty() else "") + text, flush=True)


class Interrupt:
    """Ctrl-C and SIGTERM become a wish that the loop grants at the end of its iteration."""
    wished = False

    def listen(self):
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self.wish)

    def wish(self, signum, frame):
        if distributed.size() == 1:                  # torchrun may send several, and a SIGKILL
            signal.signal(signum, signal.SIG_DFL)    # later; else a second one stops at once
        self.wished = True


interrupt = Interrupt()                              # signals are the process's, not a run's


class Tally:
    """What log.csv says about training: sums since the last evaluation, kept on the device."""

    def __init__(self, device):
        self.sums = torch.zeros(9, device=device)

    def add(self, loss_x, loss_u, y_u, mask, true_u, loss_bal, omega_norm, omega_moved):
        """y_u, mask, true_u (U,): pseudo-labels, which of them count, true ones or -1."""
        known, one = mask * (true_u >= 0), torch.ones_like(loss_x)
        now = torch.stack([
            one, loss_x, loss_u, mask.mean(), known.sum(), (known * (y_u == true_u)).sum(),
            loss_bal, omega_norm, omega_moved * one]).detach()
        self.sums += distributed.average([now])[0]

    def averages(self):
        """The columns of log.csv."""
        iters, loss_x, loss_u, kept, known, right, loss_bal, norm, moves = self.sums.tolist()
        return {"loss_x": loss_x / iters, "loss_u": loss_u / iters, "mask_rate": kept / iters,
                "pseudo_acc": right / known if known else math.nan,
                "loss_bal": loss_bal / moves if moves else math.nan,
                "omega_grad": norm / moves if moves else math.nan}

    def reset(self):
        self.sums.zero_()

    def state_dict(self):
        return {"sums": self.sums}

    def load_state_dict(self, state):
        self.sums.copy_(state["sums"])


class Watch:
    """Stops the run where something is not finite, before it can be saved."""

    def __init__(self):
        self.seen = {}                               # losses by iteration, not yet looked at

    def see(self, step, losses):
        self.seen[step], = distributed.average([losses])     # so that all processes stop at once
        if losses.device.type == "cpu":              # a GPU would have to be waited for: its losses
            self.look()                              # are looked at when something is saved

    def look(self):
        for step, losses in self.seen.items():
            if not losses.isfinite().all():
                self.stop(f"the loss of iteration {step} is not finite ({losses.tolist()})")
        self.seen.clear()

    def check(self, step, *modules):
        self.look()
        if not all(t.isfinite().all() for m in modules for t in (*m.parameters(), *m.buffers())):
            self.stop(f"the weights are not finite after iteration {step}")

    def stop(self, what):
        raise UserError(f"{what}; nothing was saved since, start again with a lower --lr in "
                        f"another --out")


def print_start(cfg, dataset, index_l, index_u, model, device):
    """What is about to run: every setting, the class counts, the network."""
    for name, index in (("labeled", index_l), ("unlabeled", index_u)):
        labels = dataset.labels[index]
        known, unknown = (labels >= 0).any(), int((labels < 0).sum())
        parts = [f"{k} {int((labels == i).sum())}" for i, k in enumerate(dataset.names) if known]
        parts[10:-10] = ["..."] if len(parts) > 20 else parts[10:-10]
        parts += [f"unknown {unknown}"] if unknown else []
        print(f"{name}: {len(index)} images: {', '.join(parts)}")
    size = sum(p.numel() for p in model.parameters())
    print(f"network: {cfg.model}, {size / 1e6:.2f} M parameters, on {device}")
    flags = (f"{k} {v}" for k, v in vars(cfg).items() if k != "facts")
    print("settings: " + ", ".join(flags) + "\n", flush=True)
