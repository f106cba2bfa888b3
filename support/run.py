"""A training run as its loop sees it: set-up, bookkeeping after each iteration, end.

    run = Run(cfg)                            device, ranks
    start = run.open(dataset, ..., parts)     lock --out, restore a checkpoint, print the settings
    if run.after_step(step, judge, ...):      log, finite check, evaluation, checkpoint, stop signal
    run.finish(...)                           result.json

Its files are in checkpoint.py, its flags in config.py. No loss, no `if method ==`.
"""
import math
import os
import shutil
import signal
import sys
import textwrap
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch

from support import UserError, checkpoint, checks, config, distributed
from support.health import Health

PER_CLASS = ("recall_", "bias_", "kept_", "precision_")      # columns that the screen leaves out


class Run:
    def __init__(self, cfg, on_step=None):
        """on_step(step, losses) is called after every iteration, for benchmarks and tests."""
        self.cfg, self.on_step = cfg, on_step
        self.device = config.pick_device(cfg)
        self.rank, self.size = distributed.start(self.device)
        distributed.agree({f"--{key}": value for key, value in vars(cfg).items()},
                          differ=[f"--{key}" for key in config.OF_THE_MACHINE])
        distributed.everywhere(self.check_batches)
        self.mean_over_ranks = distributed.mean_over_ranks if self.size > 1 else list

    def check_batches(self):
        for key in ("batch_size", "batch_size_u"):
            if getattr(self.cfg, key) % self.size:
                raise UserError(f"--{key} {getattr(self.cfg, key)} cannot be shared equally by the "
                                f"{self.size} processes; choose a multiple of their number")

    def open(self, dataset, index_l, index_u, parts, resizable=False, milestones=()):
        """Take --out and restore what it holds. Returns the step to start from.

        parts: {name: module, optimizer, ...}, everything that a checkpoint must hold
        resizable: --resume may change --iters, because no schedule depends on it
        milestones: epochs also end after these numbers of iterations
        """
        self.cfg.dataset_info = dataset.info
        distributed.agree({f"--dataset: {key}": value for key, value in dataset.info.items()})
        self.folder, self.milestones = Path(self.cfg.out), milestones
        self.averages = Averages(dataset.num_classes, self.device)
        self.guard = NaNGuard(self.cfg)
        self.trained, self.parts = parts, parts | {"averages": self.averages}
        found = distributed.broadcast_from_rank0(
            lambda: checkpoint.find(self.cfg, self.folder, resizable))
        self.start, seconds, self.history, self.commits = checkpoint.restore(
            self.folder, found, self.parts, self.cfg, self.is_evaluated)
        self.health = Health(self.cfg, dataset.names, dataset.count(index_l))
        for row in self.history:
            self.warnings(row)                       # known from before
        if self.cfg.resume and not found:
            print(f"--resume: there is no run in {self.folder} yet, a new one starts")
        print_start(self.cfg, dataset, index_l, index_u, parts["model"], self.device)
        self.progress = Progress(self.start, self.cfg.iters, seconds)
        return self.start

    def backward(self, loss, *modules):
        """Put the gradients of the loss, averaged over ranks, into p.grad of every parameter.

        Those of the step before are replaced, also where a parameter is frozen now. loss.backward()
        would add to them, and dispatch one more operation for each parameter.
        """
        params = [p for module in modules for p in module.parameters()]
        trained = [p for p in params if p.requires_grad]
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        gradients = dict(zip(trained, gradients, strict=True))
        for p in params:
            p.grad = gradients.get(p)
        self.sync_gradients(*modules)

    def sync_gradients(self, *modules):
        """Average the gradients of the local batches over ranks."""
        if self.size > 1:
            distributed.sync_gradients(*modules)

    def join_ranks(self, *parts):
        """Local batches -> the global batch: each part's rows of all ranks, parts end to end."""
        if self.size > 1:
            parts = [distributed.all_gather(part) for part in parts]
        return torch.cat(parts)

    def local_rows(self, x, *sizes):
        """This rank's rows of a global batch that join_ranks made of parts of these sizes."""
        if self.size == 1:
            return x
        parts = x.split([size * self.size for size in sizes])
        return torch.cat([part.chunk(self.size)[self.rank] for part in parts])

    def after_step(self, step, judge, y_u, mask, true_u, **losses):
        """Everything that follows an iteration. Returns whether the loop has to stop.

        judge(): evaluates; returns columns for log.csv
        y_u, mask, true_u (U,): pseudo-labels, which of them count, true labels or -1
        losses: scalars by name; those of Averages go into the log, all have to be finite
        """
        done = step + 1
        losses = {name: x.detach() if x.requires_grad else x
                  for name, x in losses.items() if x is not None}
        self.averages.add(y_u, mask, true_u, **losses)
        # Reading the losses would wait for a GPU: there they are checked before a checkpoint only.
        self.guard.pending.append((step, losses))
        diverged = self.device.type == "cpu" and self.guard.flush()
        if self.on_step:
            self.on_step(step, losses)
        if self.progress.due():
            self.progress.show(done, self.averages.means())
        stop = stop_signal.requested
        if self.size > 1:
            stop, diverged = distributed.any_rank(stop, diverged)
        if diverged:
            distributed.everywhere(self.guard.fail)
        if self.is_evaluated(done):
            self.evaluate(done, judge)
        elif stop:
            self.progress.pause()
            self.save(done)
        if stop and done < self.cfg.iters:
            print(f"\nstopped after iteration {done}; the same command with --resume goes on")
            return True
        return False

    def ends_epoch(self, done):
        return done % self.cfg.eval_every == 0 or done in self.milestones

    def is_evaluated(self, done):
        """At the end of an epoch, and densely at the end of the run: what is reported is the mean
        of the last 20 evaluations, and they shall lie in its last tenth."""
        left, interval = self.cfg.iters - done, self.cfg.iters // 200
        dense = left < 20 * interval and left % interval == 0 if interval else left == 0
        return dense or self.ends_epoch(done)

    def evaluate(self, done, judge):
        self.progress.pause()
        row = {"iter": done} | self.averages.means(self.mean_over_ranks) | judge()
        self.history.append(row | {"it_per_s": self.progress.rate(done)})
        if self.ends_epoch(done):       # other rows are dropped if the run is made longer
            self.averages.reset()
        self.save(done)
        checkpoint.write_log(self.folder, self.history)
        self.progress.row(self.history[-1])
        for text in self.warnings(row):
            self.progress.line(text)                 # of rank 0 only: the others print nowhere
        self.progress.begin()

    def warnings(self, row):
        """Bad signs in a row of the log. Those between two epochs average too few iterations."""
        return self.health.warnings(row) if self.ends_epoch(row["iter"]) else []

    def save(self, done):
        """A checkpoint, but never of weights that are not finite."""
        distributed.everywhere(lambda: self.guard.check(done, self.trained))
        checkpoint.save_checkpoint(self.folder, self.parts, step=done,
                                   seconds=self.progress.seconds, history=self.history,
                                   config=vars(self.cfg), commits=self.commits)

    def finish(self, mean, evaluations):
        """result.json and the last line on the screen. mean: evaluate.mean_of_last"""
        keys = ("method", "base", "dataset", "gamma_l", "gamma_u", "reverse_u", "imbalance", "beta",
                "seed", "iters", "scale", "recipe")
        path, trained = self.folder / "result.json", self.start < self.cfg.iters
        if trained or not path.exists():         # what an earlier call has finished is left alone
            result = {key: getattr(self.cfg, key) for key in keys} | mean | {
                "evaluations": evaluations, "sec_per_iter": self.progress.seconds / self.cfg.iters,
                "peak_memory_mb": peak_memory_mb(self.device)}
            checkpoint.write_json(path, result | checkpoint.versions(self.commits))
        print(f"\n{self.cfg.method}: bACC {mean['bacc']:.2f}  GM {mean['gm']:.2f}  "
              f"(mean of the last {evaluations} evaluations; files in {self.folder})")


def launch(main):
    """Run a training script: Ctrl-C and SIGTERM save, user errors become one sentence."""
    stop_signal.listen()
    config.exit_cleanly(main)


class StopSignal:
    """Ctrl-C and SIGTERM become a request that the loop grants at the end of an iteration."""
    requested = False

    def listen(self):
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self.request)

    def request(self, signum, frame):
        if os.environ.get("WORLD_SIZE", "1") == "1":     # torchrun may send several, and a SIGKILL
            signal.signal(signum, signal.SIG_DFL)        # later; else a second one stops at once
        self.requested = True


stop_signal = StopSignal()                           # signals reach a process, not a run


class Averages:
    """Means since the epoch began, for log.csv.

    kept_k is the share of unlabeled images that count with pseudo-label k (all k: mask_rate), and
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
        total = np.add.accumulate(rows)[-1]          # one after the other; sum() would pair them
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
        # not a number: the share of kept images where a run has no unlabeled ones
        checks.compare(sums.nan_to_num() if several else sums, form, "sums")
        same_ranks = len(sums) == distributed.size()
        self.sums.copy_(sums[distributed.rank()] if same_ranks else sums.mean(0))


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

    def rate(self, done):
        """Iterations per second of this process, while the clock is paused."""
        return (done - self.start) / (self.seconds - self.before)

    def due(self):
        return sys.stdout.isatty() and time.perf_counter() - self.shown > 1

    def show(self, done, values):
        self.shown = time.perf_counter()
        rate = (done - self.start) / (self.seconds - self.before + self.shown - self.since)
        left = timedelta(seconds=int((self.iters - done) / rate))
        text = (f"{done}/{self.iters} ({100 * done // self.iters}%)  {rate:.1f} it/s  {left} left  "
                + "  ".join(f"{k} {v:.3g}" for k, v in values.items()
                            if v == v and not k.startswith(PER_CLASS)))
        print("\r\033[K" + text[:shutil.get_terminal_size().columns - 1], end="", flush=True)

    def row(self, row):
        """`row` is the newest line of log.csv; its columns for single classes are not shown."""
        shown = {k: v for k, v in row.items() if not k.startswith(PER_CLASS)}
        if self.rows % 20 == 0:
            self.line("".join(f"{k:>11}" for k in shown))
        self.rows += 1
        self.line("".join(f"{v:>11.4g}" for v in shown.values()))

    def line(self, text):
        print(("\r\033[K" if sys.stdout.isatty() else "") + text, flush=True)


def print_start(cfg, dataset, index_l, index_u, model, device):
    """What is about to run: class counts, network, every setting."""
    for name, index in (("labeled", index_l), ("unlabeled", index_u)):
        labels = dataset.labels[index]
        known, unknown = (labels >= 0).any(), int((labels < 0).sum())
        parts = [f"{k} {int((labels == i).sum())}" for i, k in enumerate(dataset.names) if known]
        parts[10:-10] = ["..."] if len(parts) > 20 else parts[10:-10]
        parts += [f"unknown {unknown}"] if unknown else []
        print(f"{name}: {len(index)} images: {', '.join(parts)}")
    size = sum(p.numel() for p in model.parameters())
    print(f"network: {cfg.model}, {size / 1e6:.2f} M parameters, on {device}")
    flags = ", ".join(f"{k} {v}" for k, v in vars(cfg).items() if k != "dataset_info")
    print(textwrap.fill(f"settings: {flags}", 100, subsequent_indent="  ") + "\n", flush=True)


def peak_memory_mb(device):
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    status = Path("/proc/self/status")               # Linux; getrusage would count the parent's too
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(x.split()[1]) / 1024 for x in lines if x.startswith("VmHWM:")), None)
