"""What a training run prints: its settings, a status line, a row for each evaluation."""
import shutil
import sys
import textwrap
import time
from datetime import timedelta

PER_CLASS = ("recall_", "bias_", "kept_", "precision_")      # columns that the screen leaves out


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
        """Iterations per second since this process began. The clock has to be paused."""
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
