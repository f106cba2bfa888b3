"""A training run as its loop sees it: set-up, bookkeeping after each iteration, end.

    run = Run(cfg)                            device, processes
    start = run.open(dataset, ..., parts)     take --out, restore a checkpoint, print the settings
    run.after_step(step, ...)                 log, evaluation, checkpoint, Ctrl-C
    run.finish()                              result.json

The folder holds config.json, log.csv, last.pt and result.json. Every file is written under another
name, synced and renamed, so a crash leaves the old one or the new one. No loss, no `if method ==`.
"""
import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from datetime import timedelta
from importlib import metadata
from pathlib import Path

import torch

import evaluate as metrics
from support import UserError, config, distributed, exit_cleanly

LAST = 20                                            # evaluations whose mean is reported
FILES = ("config.json", "log.csv", "last.pt", "result.json")


class Run:
    def __init__(self, cfg, on_step=None):
        """on_step(step, losses) is called after every iteration, for benchmarks and tests."""
        self.cfg, self.on_step, self.folder = cfg, on_step, Path(cfg.out)
        self.device = config.pick_device(cfg)
        for key in ("batch_size", "batch_size_u"):
            if getattr(cfg, key) % distributed.size():
                raise UserError(f"--{key} {getattr(cfg, key)} cannot be shared equally by the "
                                f"{distributed.size()} processes; choose a multiple of that")

    def open(self, dataset, index_l, index_u, parts, evaluate, resizable=False, milestones=(),
             after_epoch=None, reported=None):
        """Take --out and restore what it holds. Returns the step to start from.

        parts: {name: module or optimizer}, everything that a checkpoint must hold
        evaluate(): columns for log.csv
        resizable: --resume may change --iters, because no schedule depends on it
        milestones: epochs also end after these numbers of iterations
        after_epoch(done): called at the end of an epoch, before the checkpoint
        reported(history, cfg): the evaluations that count, by default all
        """
        cfg = self.cfg
        cfg.dataset_info = dataset.info
        self.parts, self.evaluate, self.milestones = parts, evaluate, milestones
        self.after_epoch, self.reported = after_epoch, reported or (lambda history, cfg: history)
        self.means = Means(dataset.num_classes, self.device)
        state = self.take_folder(resizable)
        self.history, self.seconds, self.start = [], 0.0, 0
        if state:
            self.restore(state)
        print_start(cfg, dataset, index_l, index_u, parts["model"], self.device)
        if cfg.resume:
            print(f"--resume: continues after iteration {self.start} of {cfg.iters}" if state
                  else f"--resume: there is no checkpoint in {self.folder} yet, a new run starts")
        self.before, self.shown, self.since = self.seconds, 0.0, time.perf_counter()
        return self.start

    def take_folder(self, resizable):
        """The checkpoint to continue from, or None. Another run is not touched."""
        cfg, folder = self.cfg, self.folder
        held = [name for name in FILES if (folder / name).exists()]
        if held and not (cfg.resume or cfg.overwrite):
            raise UserError(f"--out {folder} already holds a run ({held[0]}); add --resume to "
                            f"continue it, --overwrite to replace it, or choose another --out")
        state = load_checkpoint(folder) if cfg.resume else None
        if state:
            check_same_run(state, cfg, folder, resizable)
        elif cfg.resume and "log.csv" in held:
            raise UserError(f"--resume: {folder} holds results but no checkpoint to continue from; "
                            f"choose another --out, or --overwrite them")
        if state and state["step"] == cfg.iters and "result.json" in held:
            return state                             # finished: its files stay as they are
        if distributed.rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for name in held:                        # a longer run has another result
                if name == "result.json" or cfg.overwrite and not cfg.resume:
                    (folder / name).unlink()
            write_json(folder / "config.json", vars(cfg) | versions())
        return state

    def restore(self, state):
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        self.means.sums.copy_(state["means"])
        self.start, self.seconds, self.history = state["step"], state["seconds"], state["history"]
        if state["config"]["iters"] != self.cfg.iters:        # evaluated where this run would not
            self.history = [row for row in self.history if self.is_evaluated(row["iter"])]

    def after_step(self, step, y_u, mask, true_u, **losses):
        """Everything that follows an iteration.

        y_u, mask, true_u (U,): pseudo-labels, which of them count, true labels or -1
        losses: scalars by name, or None: loss_x, loss_u, loss_bal
        """
        done = step + 1
        losses = {name: x.detach() for name, x in losses.items() if x is not None}
        self.means.add(y_u, mask, true_u, **losses)
        if self.on_step:
            self.on_step(step, losses)
        self.estimate(done)
        if sys.stdout.isatty() and time.perf_counter() - self.shown > 1:
            self.show_status(done)
        stop = distributed.mean(torch.tensor(float(stop_signal.requested))) > 0
        if self.is_evaluated(done):
            self.evaluate_and_save(done)
        elif stop:
            self.seconds += time.perf_counter() - self.since
            self.save(done, self.means.values())
        if stop and done < self.cfg.iters:
            print(f"\nstopped after iteration {done}; the same command with --resume goes on")
            raise SystemExit(130)                    # exit code of an interrupted program

    def ends_epoch(self, done):
        return done % self.cfg.eval_every == 0 or done in self.milestones

    def is_evaluated(self, done):
        """At the end of an epoch, and densely at the end of the run: what is reported is the mean
        of the last 20 evaluations, and they should lie in its last tenth."""
        left, interval = self.cfg.iters - done, self.cfg.iters // (10 * LAST)
        dense = 0 < interval < self.cfg.eval_every and left < LAST * interval
        return self.ends_epoch(done) or left == 0 or dense and left % interval == 0

    def evaluate_and_save(self, done):
        self.seconds += time.perf_counter() - self.since
        means = self.means.values()
        if distributed.rank() == 0:
            rate = (done - self.start) / (self.seconds - self.before)
            self.history.append({"iter": done} | means | self.evaluate() | {"it_per_s": rate})
        if self.ends_epoch(done):
            if self.after_epoch:
                self.after_epoch(done)
            self.means.sums.zero_()       # not at other rows: a longer run drops them
        self.save(done, means)
        if distributed.rank() == 0:
            write(self.folder / "log.csv", log_lines(self.history).encode())
            self.show_row(done)
        self.since = time.perf_counter()

    def save(self, done, means):
        """A checkpoint, but never of a run that has diverged."""
        finite = all(math.isfinite(means[key]) or math.isnan(means[key]) and not self.means.has(key)
                     for key in ("loss_x", "loss_u", "loss_bal"))
        if not finite or not all(p.isfinite().all() for p in self.parts["model"].parameters()):
            raise UserError(f"the losses or weights are not finite after iteration {done}; the "
                            f"last checkpoint is kept, start again in another --out with a lower "
                            f"--lr, --lambda_u or --weight_decay")
        if distributed.rank() == 0:
            state = {name: part.state_dict() for name, part in self.parts.items()} | {
                "means": self.means.sums, "step": done, "seconds": self.seconds,
                "history": self.history, "config": vars(self.cfg)}
            write(self.folder / "last.pt", state)

    def finish(self):
        """result.json and the last line on the screen; returns the means that are reported."""
        if distributed.rank():
            return None
        cfg, rows = self.cfg, self.reported(self.history, self.cfg)[-LAST:]
        mean = metrics.mean_of_last(rows)
        if not (self.folder / "result.json").exists():
            keys = ("method", "base", "dataset", "gamma_l", "gamma_u", "reverse_u", "imbalance",
                    "beta", "seed", "iters", "scale")
            write_json(self.folder / "result.json", {key: getattr(cfg, key) for key in keys} | mean
                       | {"names": cfg.dataset_info["names"], "evaluations": len(rows),
                          "sec_per_iter": self.seconds / cfg.iters} | versions())
        which = "last evaluation" if len(rows) == 1 else f"mean of the last {len(rows)} evaluations"
        print(f"\n{cfg.method}: bACC {mean['bacc']:.2f}  GM {mean['gm']:.2f}  ({which}; files in "
              f"{self.folder})")
        return mean

    # ----------------------------------------------------------------------------------- screen

    def estimate(self, done):
        """Once, from iterations 5 to 20 of this process: how long the run will take."""
        if done == self.start + 5:
            self.fifth = time.perf_counter()
        elif done == self.start + 20 and done < self.cfg.iters:
            left = (self.cfg.iters - done) * (time.perf_counter() - self.fifth) / 15
            text = f"about {timedelta(seconds=round(left))} to go"
            if left > 86_400:
                text = f"WARNING: {text} on this machine; --scale mini takes minutes"
            print(text, flush=True)

    def show_status(self, done):
        self.shown = time.perf_counter()
        rate = (done - self.start) / (self.seconds - self.before + self.shown - self.since)
        left = timedelta(seconds=int((self.cfg.iters - done) / rate))
        last = f"  bACC {self.history[-1]['bacc']:.1f}" if self.history else ""
        text = (f"{done}/{self.cfg.iters} ({100 * done // self.cfg.iters}%)  {rate:.1f} it/s  "
                f"{left} left{last}")
        print("\r\033[K" + text, end="", flush=True)

    def show_row(self, done):
        """A row of the table, at most 20 in a run; log.csv has all."""
        epochs = self.cfg.iters / self.cfg.eval_every
        if done % (self.cfg.eval_every * math.ceil(epochs / 20)) and done < self.cfg.iters:
            return
        shown = {"iter": "{:.0f}", "loss_x": "{:.3f}", "loss_u": "{:.3f}", "loss_bal": "{:.3f}",
                 "kept": "{:.3f}", "right": "{:.3f}", "bacc": "{:.2f}", "gm": "{:.2f}",
                 "it_per_s": "{:.1f}"}
        row = self.history[-1]
        shown = {key: form for key, form in shown.items() if row[key] == row[key]}     # not nan
        clear = "\r\033[K" if sys.stdout.isatty() else ""
        titles = {"bacc": "bACC", "gm": "GM", "it_per_s": "it/s"}
        if len(self.history) == 1 or self.start and self.history[-1]["iter"] == done and (
                not hasattr(self, "titled")):
            print(clear + "".join(f"{titles.get(key, key):>9}" for key in shown)[1:])
        self.titled = True
        print(clear + "".join(f"{form.format(row[key]):>9}" for key, form in shown.items())[1:],
              flush=True)


class Means:
    """Means since the epoch began, for log.csv. They stay on the device until they are asked for.

    kept: the share of unlabeled images whose pseudo-label counts; kept_k: those with label k.
    right: the share of these labels that are right, where the truth is known; right_k of label k.
    """

    def __init__(self, num_classes, device):
        self.names = ["loss_x", "loss_u", "loss_bal", "kept", "right"]
        self.names += [f"{name}_{k}" for name in ("kept", "right") for k in range(num_classes)]
        self.num_classes = num_classes
        self.sums = torch.zeros(2, len(self.names), device=device)       # totals, their counts
        self.zero, self.one = torch.zeros((), device=device), torch.ones((), device=device)

    def add(self, y_u, mask, true_u, loss_x, loss_u, loss_bal=None):
        moved = self.zero if loss_bal is None else self.one
        guessed = self.one if len(mask) else self.zero        # labels only: there are no guesses
        shares = mask / max(1, len(mask))                     # (U,)
        known = mask * (true_u >= 0)                          # (U,)
        right = known * (y_u == true_u)                       # (U,)
        by_class = self.sums.new_zeros(3, self.num_classes)
        if len(mask):
            by_class.scatter_add_(1, y_u.expand(3, -1), torch.stack([shares, known, right]))
        kept_k, known_k, right_k = by_class                   # (K,) each
        loss_bal = self.zero if loss_bal is None else loss_bal
        totals = torch.stack([loss_x, loss_u, loss_bal, shares.sum(), right.sum()])
        counts = torch.stack([self.one, self.one, moved, guessed, known.sum()])
        self.sums += torch.stack([torch.cat([totals, kept_k, right_k]),
                                  torch.cat([counts, guessed.expand_as(kept_k), known_k])])

    def has(self, name):
        return self.sums[1, self.names.index(name)] > 0

    def values(self):
        """The means over all processes; nan for what there was none of."""
        sums = distributed.mean(self.sums)
        return {name: total / count if count else math.nan
                for name, total, count in zip(self.names, *sums.tolist(), strict=True)}


# ---------------------------------------------------------------------------------------------
# files


def write(path, content):
    """bytes, or what torch.save takes; all or nothing."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        if isinstance(content, bytes):
            file.write(content)
        else:
            torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_json(path, content):
    """JSON has no NaN (the recall of a class without test images): null in its place."""
    content = json.loads(json.dumps(content), parse_constant=lambda nan: None)
    write(path, json.dumps(content, indent=1).encode())


def log_lines(history):
    """log.csv: all evaluations so far, without the columns that have no number anywhere."""
    keys = [key for key in history[0] if any(row[key] == row[key] for row in history)]
    rows = [[f"{row[key]:.6g}" for key in keys] for row in history]
    return "".join(",".join(row) + "\n" for row in [keys, *rows])


def load_checkpoint(folder):
    """The contents of last.pt, or None. Loading it runs no code."""
    path = Path(folder) / "last.pt"
    if not path.exists():
        return None
    try:
        with zipfile.ZipFile(path) as file:          # every part of it has a checksum
            if file.testzip():
                raise zipfile.BadZipFile
        return torch.load(path, map_location="cpu", weights_only=True)
    except (zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise UserError(f"{path} is damaged; the run has to start again, in another --out or with "
                        f"--overwrite") from error


def check_same_run(state, cfg, folder, resizable):
    """Refuse flags and data that are not the checkpoint's. A flag that did not exist when the run
    was made counts as its default."""
    saved, now = state["config"], vars(cfg)
    for key in now.keys() - {*config.FREE} | (set() if resizable else {"iters"}):
        if saved[key] != now[key] if key in saved else key in cfg.changed:
            raise UserError(f"--{key} is {now[key]}, but the run in {folder} has "
                            f"{saved.get(key, 'none')}; --resume continues a run with the flags it "
                            f"was started with")
    check_data(saved, cfg.dataset_info, folder)
    if state["step"] > cfg.iters:
        raise UserError(f"--iters is {cfg.iters}, but the run in {folder} is already at "
                        f"{state['step']}; ask for more, or choose another --out")


def check_data(saved, info, folder):
    """Refuse data other than the run's. saved: its configuration; info: data.Dataset.info"""
    for key in ("names", "size", "checksum"):
        if saved["dataset_info"].get(key, info[key]) != info[key]:
            raise UserError(f"--dataset {saved['dataset']} (--data_dir {saved['data_dir']}) is not "
                            f"what the run in {folder} was trained on (other {key}); restore the "
                            f"data, or train on these in another --out")


def versions():
    """Packages, Python, number of processes, and the commit if this is a git checkout."""
    root = Path(__file__).resolve().parent.parent
    commit = None
    if (root / ".git").exists() and shutil.which("git"):
        done = subprocess.run(["git", "-C", root, "rev-parse", "--short", "HEAD"], text=True,
                              capture_output=True)
        commit = done.stdout.strip() or None
    packages = {name: metadata.version(name) for name in ("torch", "torchvision", "numpy")}
    return packages | {"python": sys.version.split()[0], "commit": commit,
                       "processes": distributed.size()}


# ---------------------------------------------------------------------------------------------


def print_start(cfg, dataset, index_l, index_u, model, device):
    """What is about to run: class counts, network, the settings that differ from the preset."""
    for name, index in (("labeled", index_l), ("unlabeled", index_u)):
        counts, unknown = dataset.count(index).tolist(), int((dataset.labels[index] < 0).sum())
        parts = [f"{k} {n}" for k, n in zip(dataset.names, counts, strict=True) if sum(counts)]
        parts[5:-2] = ["..."] if len(parts) > 10 else parts[5:-2]
        parts += [f"unknown {unknown}"] if unknown else []
        print(f"{name}: {len(index)} images: {', '.join(parts)}")
    size, ranks = sum(p.numel() for p in model.parameters()), distributed.size()
    print(f"network: {cfg.model}, {size / 1e6:.2f} M parameters, on {device}"
          + f", {ranks} processes" * (ranks > 1))
    flags = ", ".join(f"{k} {v}" for k, v in cfg.changed.items() if k not in ("out", "resume"))
    print(f"settings: {flags or 'all as preset'}; all of them are in {cfg.out}/config.json\n",
          flush=True)


def launch(main):
    """Run a training script: Ctrl-C and SIGTERM save, user errors become one sentence."""
    stop_signal.listen()
    exit_cleanly(main)
    distributed.stop()


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
