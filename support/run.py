"""A training run as its loop sees it: set-up, bookkeeping after each iteration, end.

    run = Run(cfg)                            device, ranks
    start = run.open(dataset, ..., parts)     lock --out, restore a checkpoint, print the settings
    if run.after_step(step, judge, ...):      log, finite check, evaluation, checkpoint, stop signal
    run.finish(...)                           result.json

Its files are in checkpoint.py, its flags in config.py, what it logs in averages.py, what it prints
in screen.py. No loss, no `if method ==`.
"""
import os
import signal
from pathlib import Path

import torch

from support import UserError, checkpoint, cli, config, distributed
from support.averages import Averages
from support.health import Health, NaNGuard
from support.report import LAST
from support.screen import Progress, print_start


class Run:
    def __init__(self, cfg, on_step=None):
        """on_step(step, losses) is called after every iteration, for benchmarks and tests."""
        self.cfg, self.on_step = cfg, on_step
        self.device = config.pick_device(cfg)
        self.rank, self.size = distributed.start(self.device)
        distributed.agree({f"--{key}": value for key, value in vars(cfg).items()},
                          differ=[f"--{key}" for key in config.OF_THE_MACHINE])
        distributed.everywhere(self.check_batches)

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
            self.warnings(row)                       # not to be printed again
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
        distributed.sync_gradients(*modules)

    def join_ranks(self, *parts):
        """Local batches -> the global batch: each part's rows of all ranks, parts end to end."""
        return torch.cat([distributed.all_gather(part) for part in parts])

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
        # Reading the losses would wait for a GPU: there they are checked before a checkpoint, and
        # every 1,000 steps, or they would fill the memory.
        self.guard.pending.append((step, losses))
        due = self.device.type == "cpu" or len(self.guard.pending) == 1000
        diverged = due and self.guard.flush()
        if self.on_step:
            self.on_step(step, losses)
        if self.progress.due():
            self.progress.show(done, self.averages.means())
        stop, diverged = distributed.any_rank(stop_signal.requested, diverged)
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
        of the last 20 evaluations, and they should lie in its last tenth."""
        left, interval = self.cfg.iters - done, self.cfg.iters // (10 * LAST)
        dense = left < LAST * interval and left % interval == 0 if interval else left == 0
        return dense or self.ends_epoch(done)

    def evaluate(self, done, judge):
        self.progress.pause()
        row = {"iter": done} | self.averages.means(distributed.mean_over_ranks) | judge()
        self.history.append(row | {"it_per_s": self.progress.rate(done)})
        if self.ends_epoch(done):       # not at other rows: a longer run drops them
            self.averages.reset()
        self.save(done)
        checkpoint.write_log(self.folder, self.history)
        self.progress.row(self.history[-1])
        for text in self.warnings(row):
            self.progress.line(text)                 # other ranks discard their output
        self.progress.begin()

    def warnings(self, row):
        """Bad signs in a row of the log. Rows between two epochs average too few iterations."""
        return self.health.warnings(row) if self.ends_epoch(row["iter"]) else []

    def save(self, done):
        """A checkpoint, but never of weights that are not finite."""
        distributed.everywhere(lambda: self.guard.check(done, self.trained))
        checkpoint.save_checkpoint(self.folder, self.parts, step=done,
                                   seconds=self.progress.seconds, history=self.history,
                                   config=vars(self.cfg), commits=self.commits)

    def finish(self, mean, judged):
        """result.json and the last line on the screen. mean: evaluate.mean_of_last(judged)"""
        evaluations = len(judged[-LAST:])
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
    cli.exit_cleanly(main)


class StopSignal:
    """Ctrl-C and SIGTERM become a request that the loop grants at the end of an iteration."""
    requested = False

    def listen(self):
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self.request)

    def request(self, signum, frame):
        if os.environ.get("WORLD_SIZE", "1") == "1":     # torchrun may send several signals
            signal.signal(signum, signal.SIG_DFL)        # a second one stops at once
        self.requested = True


stop_signal = StopSignal()                           # signals reach a process, not a run


def peak_memory_mb(device):
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    status = Path("/proc/self/status")               # Linux; getrusage would count the parent's too
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(x.split()[1]) / 1024 for x in lines if x.startswith("VmHWM:")), None)
