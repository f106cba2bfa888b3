"""Time some loops against each other: they take turns, one iteration each, in one process.

    times = take_turns({"a": run_a, "b": repeated(function, 20)}, "cpu")
    statistics.median(by_round(times["a"], times["b"]))     how many times longer a takes

A ratio within a round is free of what slows the machine down for a while: it slows both sides. On a
CPU a second is one of the thread's own (time.thread_time): time in which another program had the
core does not count. On a GPU it is one by the clock, with torch.cuda.synchronize before both
readings.
"""
import contextlib
import ctypes
import io
import os
import statistics
import threading
import time

import torch


def clock(device):
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.thread_time()


class Candidate(threading.Thread):
    """A training loop in a thread of its own, which waits at the end of every iteration."""

    def __init__(self, run, device):
        super().__init__(daemon=True)
        self.work, self.device, self.times = run, device, []
        self.finished, self.error = False, None
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.start()

    def run(self):
        try:
            self.wait()
            self.work(self.on_step)
        except BaseException as error:                   # for the main thread to raise
            self.error = error
        self.finished = True
        self.done.release()

    def wait(self):
        self.go.acquire()
        self.began = clock(self.device)

    def on_step(self):
        self.times.append(clock(self.device) - self.began)
        self.done.release()
        self.wait()

    def advance(self):
        """Let it make one iteration, or end."""
        self.go.release()
        self.done.acquire()
        if self.error:
            raise self.error


def repeated(function, times):
    """A function of on_step that calls `function`."""
    def run(on_step):
        for _ in range(times):
            function()
            on_step()
    return run


def take_turns(runs, device):
    """{name: seconds of each iteration but the first}. runs: {name: function of on_step}"""
    with contextlib.redirect_stdout(io.StringIO()):
        candidates = {name: Candidate(run, device) for name, run in runs.items()}
        while running := [c for c in candidates.values() if not c.finished]:
            for candidate in running:
                candidate.advance()
    return {name: c.times[1:] for name, c in candidates.items()}


def by_round(times, others):
    """The ratios of two candidates' times, round by round; one may have made fewer of them."""
    return [a / b for a, b in zip(times, others, strict=False)]


def spread(values):
    """The median distance from the median, relative to it."""
    middle = statistics.median(values)
    return statistics.median(abs(v - middle) for v in values) / middle


def share_memory():
    """One pool of memory for all candidates, from which nothing returns to the system (glibc).

    Otherwise each thread has its own, and the page faults of an iteration depend on what the pool
    has seen before: l2ac / bare came out between 0.94 and 1.01.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt:
        for option, value in ((-8, 1), (-4, 0), (-1, 2**31 - 1)):    # ARENA_MAX, MMAP_MAX, TRIM
            mallopt(option, value)
