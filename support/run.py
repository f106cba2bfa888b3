"""A training run as its loop sees it: set-up, bookkeeping after each iteration, end.

Its folder holds config.json, log.csv, last.pt and result.json. Every file is written under another
name, synced and renamed, so a crash leaves the old one or the new one.
"""
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from datetime import timedelta
from functools import cached_property
from importlib import metadata
from pathlib import Path

import torch

import evaluate as metrics
from support import UserError, config, distributed, exit_cleanly

SHOWN = {"iter": 0, "loss_x": 3, "loss_u": 3, "loss_bal": 3, "kept": 3, "right": 3, "bacc": 2,
         "gm": 2, "it_per_s": 1}                     # columns on the screen, and their digits


class Run:
    def __init__(self, cfg, on_step=None):
        """on_step(step, losses) is called after every iteration, for benchmarks and tests."""
        self.cfg, self.on_step, self.folder = cfg, on_step, Path(cfg.out)
        self.device = config.pick_device(cfg)

    def open(self, dataset, index_l, index_u, parts, evaluate, resizable=False, milestones=(),
             after_epoch=lambda done: None, reported=lambda history, cfg: history):
        """Take --out and restore what it holds; returns the step to start from.

        parts: {name: module or optimizer}, everything that a checkpoint must hold
        evaluate(): columns for log.csv;  resizable: no schedule depends on --iters
        milestones, after_epoch, reported: hooks of a comparison method (baselines/__init__.py)
        """
        self.cfg.dataset_info = dataset.info | {"labels": dataset.count(index_l).tolist(),
                                                "unlabeled": dataset.count(index_u).tolist()}
        self.parts, self.evaluate, self.milestones = parts, evaluate, milestones
        self.after_epoch, self.reported = after_epoch, reported
        self.means = Means(dataset.num_classes, self.device)
        self.start, self.seconds, self.history, self.columns = 0, 0.0, [], []
        state = self.take_folder(resizable)
        if state:
            for name, part in parts.items():
                part.load_state_dict(state[name])
            self.means.sums.copy_(state["means"])
            self.start, self.seconds = state["step"], state["seconds"]
            # a run that is made longer is not evaluated at the same iterations
            self.history = [row for row in state["history"] if self.is_evaluated(row["iter"])]
        self.print_start(dataset, {"labeled": index_l, "unlabeled": index_u})
        self.before, self.updated, self.since = self.seconds, 0.0, time.perf_counter()
        return self.start

    def take_folder(self, resizable):
        """The checkpoint to continue from, or None. Another run is not touched."""
        cfg, folder = self.cfg, self.folder
        held = distributed.rank() == 0 and (folder / "config.json").exists()
        if held and not (cfg.resume or cfg.overwrite):
            raise UserError(f"--out {folder} already holds a run; add --resume to continue it, "
                            f"--overwrite to replace it, or choose another --out")
        state = load_checkpoint(folder) if cfg.resume else None
        if state:
            check_same_run(state, cfg, folder, resizable)
            if state["step"] == cfg.iters and (folder / "result.json").exists():
                return state                         # finished: its files stay as they are
        elif cfg.resume and (folder / "result.json").exists():
            raise UserError(f"--resume: {folder} has results, no checkpoint; choose another --out")
        if distributed.rank() == 0:
            if folder.is_file():
                raise UserError(f"--out {folder} is a file; choose another --out")
            folder.mkdir(parents=True, exist_ok=True)
            for name in ("result.json",) if state else ("result.json", "last.pt", "log.csv"):
                (folder / name).unlink(missing_ok=True)
            content = json.dumps(vars(cfg) | versions(), indent=1)
            write(folder / "config.json", content.encode())
        return state

    def after_step(self, step, y_u, mask, true_u, **losses):
        """What follows an iteration. y_u, mask, true_u (U,): pseudo-labels, which of them count,
        true labels or -1; losses: loss_x, loss_u, loss_bal, scalars or None"""
        done = step + 1
        losses = {name: x.detach() for name, x in losses.items() if x is not None}
        self.means.add(y_u, mask, true_u, **losses)
        if self.on_step:
            self.on_step(step, losses)
        self.show_progress(done)
        stop = distributed.mean(torch.tensor(float(len(stop_requests)))) > 0
        if stop or self.is_evaluated(done):
            self.seconds += time.perf_counter() - self.since
            if not self.means.sums.isfinite().all() or not all(
                    p.isfinite().all() for p in self.parts["model"].parameters()):
                raise UserError(f"the losses or weights are not finite after iteration {done}; "
                                f"start again in another --out with a lower --lr or --lambda_u")
            if self.is_evaluated(done):
                self.evaluate_now(done)
            self.save(done)
            self.since = time.perf_counter()
        if stop and done < self.cfg.iters:
            print(f"\nstopped after iteration {done}; the same command with --resume goes on")
            raise SystemExit(130)                    # exit code of an interrupted program

    def ends_epoch(self, done):
        return done % self.cfg.eval_every == 0 or done in self.milestones

    @cached_property
    def interval(self):
        """Between the last evaluations: they lie in the last tenth, on the grid of the epochs."""
        tenth, epoch = self.cfg.iters // (10 * metrics.LAST), self.cfg.eval_every
        return max((n for n in range(1, min(tenth, epoch) + 1) if epoch % n == 0), default=epoch)

    def is_evaluated(self, done):
        """At the end of an epoch, and densely at the end of the run."""
        left = self.cfg.iters - done
        dense = left <= (metrics.LAST - 1) * self.interval and done % self.interval == 0
        return self.ends_epoch(done) or left == 0 or dense

    def evaluate_now(self, done):
        means = self.means.values()                  # of all processes
        if distributed.rank() == 0:
            rate = (done - self.start) / (self.seconds - self.before)
            self.history.append({"iter": done} | means | self.evaluate() | {"it_per_s": rate})
            self.show_row(done)
        if self.ends_epoch(done):
            self.after_epoch(done)
            self.means.sums.zero_()                  # not at other rows: a longer run drops them

    def save(self, done):
        sums = distributed.mean(self.means.sums)     # another number of processes may go on
        if distributed.rank() == 0:
            if self.history:                         # before the checkpoint: it is never behind it
                write(self.folder / "log.csv", log_lines(self.history).encode())
            states = {name: part.state_dict() for name, part in self.parts.items()}
            write(self.folder / "last.pt", states | {
                "means": sums, "step": done, "seconds": self.seconds,
                "history": self.history, "config": vars(self.cfg)})

    def finish(self):
        """result.json and the last line on the screen; returns the means that are reported."""
        if distributed.rank():
            return None
        rows = self.reported(self.history, self.cfg)[-metrics.LAST:]
        mean = metrics.mean_of_last(rows)
        if not (self.folder / "result.json").exists():
            text = json.dumps(mean | {"evaluations": len(rows), "seconds": self.seconds}, indent=1)
            write(self.folder / "result.json", text.replace("NaN", "null").encode())  # no test
        print(f"\n{self.cfg.method}: bACC {mean['bacc']:.2f}  GM {mean['gm']:.2f}  (evaluations "
              f"averaged: {len(rows)})\nfiles in {self.folder}")
        return mean

    # ----------------------------------------------------------------------------------- screen

    def print_start(self, dataset, sets):
        """Class counts, network, the settings that differ from the preset."""
        lines, cfg = [], self.cfg
        for name, index in sets.items():
            counts = zip(dataset.names, dataset.count(index).tolist(), strict=True)
            counts = [f"{k} {n}" for k, n in counts if n] or ["classes unknown"]
            lines.append(f"{name}: {len(index)} images: {', '.join(counts[:10])}"
                         + f", ... {counts[-1]}" * (len(counts) > 10))
        size = sum(p.numel() for p in self.parts["model"].parameters()) / 1e6
        lines.append(f"network: {cfg.model}, {size:.2f} M parameters, on {self.device}"
                     + f", {distributed.size()} processes" * (distributed.size() > 1))
        flags = "".join(f", {k} {v}" for k, v in cfg.changed.items() if k not in ("out", "resume"))
        lines.append(f"{cfg.method} on {cfg.base}{flags} (all settings: {self.folder}/config.json)")
        if self.start:
            lines.append(f"--resume: continues after iteration {self.start} of {cfg.iters}")
        print("\n".join(textwrap.fill(line, 79, subsequent_indent="  ", break_on_hyphens=False,
                                      break_long_words=False) for line in lines) + "\n")

    def show_progress(self, done):
        """After 20 iterations an estimate of the whole run, later a status line each second."""
        now = time.perf_counter()
        rate = (done - self.start) / (self.seconds - self.before + now - self.since)
        left = timedelta(seconds=round((self.cfg.iters - done) / rate))
        if done == self.start + 20 and done < self.cfg.iters:
            advice = "; --scale mini takes minutes" * (self.cfg.scale != "mini")
            print(f"about {left} to go" if left.days == 0 else
                  f"WARNING: about {left} to go on this machine{advice}", flush=True)
        elif sys.stdout.isatty() and now - self.updated > 1:
            self.updated = now
            print(f"\r\033[K{done}/{self.cfg.iters} ({100 * done // self.cfg.iters}%)  "
                  f"{rate:.1f} it/s  {left} left", end="", flush=True)

    def show_row(self, done):
        """A row of the table on the screen, at most 20 in a run; log.csv has all."""
        cfg, row = self.cfg, self.history[-1]
        stride = cfg.eval_every * math.ceil(cfg.iters / cfg.eval_every / 20)
        if done % stride and done < cfg.iters:
            return
        clear = "\r\033[K" if sys.stdout.isatty() else ""
        if not self.columns:                         # those that are not nan; none is kept at first
            self.columns = [key for key in SHOWN if row[key] == row[key] or key == "right"
                            and row["kept"] == 0 and any(cfg.dataset_info["unlabeled"])]
            print(clear + " ".join(f"{key:>8}" for key in self.columns))
        text = " ".join(f"{row[key]:>8.{SHOWN[key]}f}" for key in self.columns)
        print(clear + text.replace("nan", "  -"), flush=True)


class Means:
    """Means since the epoch began, for log.csv. kept: the share of unlabeled images whose
    pseudo-label counts; kept_k: those with label k. right, right_k: the share of these that is
    right, where the truth is known."""

    def __init__(self, num_classes, device):
        self.names = ["loss_x", "loss_u", "loss_bal", "kept", "right"]
        self.names += [f"{name}_{k}" for name in ("kept", "right") for k in range(num_classes)]
        self.zeros = torch.zeros(3, num_classes, device=device)
        self.sums = torch.zeros(2, len(self.names), device=device)       # totals, their counts

    def add(self, y_u, mask, true_u, loss_x, loss_u, loss_bal=None):
        one, zero = torch.ones_like(loss_x), torch.zeros_like(loss_x)
        bal, moved = (zero, zero) if loss_bal is None else (loss_bal, one)
        guessed = one if len(mask) else zero                  # labels only: there are no guesses
        share = mask / max(1, len(mask))                      # (U,)
        known = mask * (true_u >= 0)                          # (U,)
        right = known * (y_u == true_u)                       # (U,)
        kept_k, known_k, right_k = self.zeros.scatter_add(                     # (K,) each
            1, y_u.long().expand(3, -1), torch.stack([share, known, right]))
        totals = torch.stack([loss_x, loss_u, bal, share.sum(), right.sum()])
        counts = torch.stack([one, one, moved, guessed, known.sum()])
        self.sums[0] += torch.cat([totals, kept_k, right_k])
        self.sums[1] += torch.cat([counts, guessed.expand_as(known_k), known_k])

    def values(self):
        """The means over all processes; nan for what there was none of."""
        return {name: total / count if count else math.nan for name, total, count in zip(
            self.names, *distributed.mean(self.sums).tolist(), strict=True)}


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
        with zipfile.ZipFile(path) as file:          # every part has a checksum, but for folders
            if file.testzip() or any(part.external_attr for part in file.infolist()):
                raise zipfile.BadZipFile
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:                       # zipfile and torch raise a dozen kinds
        raise UserError(f"{path} is damaged ({type(error).__name__}); the run has to start again, "
                        f"in another --out or with --overwrite") from error


def check_same_run(state, cfg, folder, resizable):
    """Refuse other flags and data than the checkpoint's. A flag that it lacks has its default."""
    saved, now = state["config"], vars(cfg)
    for key in sorted(now.keys() - {*config.FREE} | (set() if resizable else {"iters"})):
        if saved[key] != now[key] if key in saved else key in cfg.changed:
            raise UserError(f"--{key} is {now[key]}, but the run in {folder} has "
                            f"{saved.get(key, 'none')}; --resume continues a run with its flags")
    check_data(saved["dataset_info"], cfg.dataset_info, folder)
    if state["step"] > cfg.iters or state["step"] == cfg.iters != saved["iters"]:
        raise UserError(f"--iters is {cfg.iters}, but the run in {folder} is already at "
                        f"{state['step']}; ask for more, or choose another --out")


def check_data(saved, now, folder):
    """saved, now: data.Dataset.info of the run and of what --dataset holds"""
    if saved["checksum"] != now["checksum"]:
        raise UserError(f"--dataset is not what the run in {folder} was trained on; restore it, or "
                        f"train on it in another --out")


def versions():
    git = ["git", "-C", Path(__file__).parent, "rev-parse", "--short", "HEAD"]
    found = subprocess.run(git, text=True, capture_output=True) if shutil.which("git") else None
    return {name: metadata.version(name) for name in ("torch", "torchvision", "numpy")} | {
        "python": sys.version.split()[0], "processes": distributed.size(),
        "commit": found and found.stdout.strip() or None}


stop_requests = []                                   # signals reach a process, not a run


def launch(main):
    """Run a training script: Ctrl-C and SIGTERM save, user errors become one sentence."""
    def request_stop(signum, frame):
        stop_requests.append(signum)                 # granted at the end of an iteration
        signal.signal(signum, signal.SIG_DFL)        # a second one stops at once
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, request_stop)
    exit_cleanly(main)
    if distributed.size() > 1:                       # a thread of gloo may abort the regular end
        os._exit(0)
