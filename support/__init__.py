"""What every run needs and no reader of L2AC has to know: flags, files, processes, augmentation."""
import os
import sys
from contextlib import suppress

# How OpenMP's threads wait for each other. By default they spin; if another program has taken the
# core of the one they wait for, a run is seven times slower. OpenMP reads this when torch is
# imported, so every program imports from `support` first.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

NO_MEMORY = ("allocate memory", "not enough memory", "out of memory", "bad_alloc",
             "Storage size calculation overflowed")   # torch has a class of its own on CUDA only


class UserError(Exception):
    """One sentence for the user: which flag or file is wrong, and what to do. Exit code 2."""


def lacks_memory(error):
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in NO_MEMORY))


def main_line(error):
    """The most informative line of a message: the first, or the last of nccl's."""
    lines = str(error).strip().splitlines() or [""]
    return lines[-1 if type(error).__name__ == "DistBackendError" else 0][:160]


def explain(error):
    """One sentence, if the error is the user's or the machine's; None for mistakes in the code."""
    text = main_line(error)
    if isinstance(error, UserError):
        return str(error)
    if lacks_memory(error):
        return (f"there is too little memory ({text or 'none is left'}); lower --batch_size, "
                f"--image_size or --hidden, or take a smaller --model")
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return f"--compile does not work on this machine ({text}); leave it out"
    if type(error).__module__ == "torch.distributed":        # nccl's may come after the collective
        return (f"the connection to another process of this run is lost ({text}); what was saved "
                f"before is intact, start all of them again with --resume")
    if isinstance(error, OSError) and error.errno is not None:       # raised by the system
        where = f" ({error.filename})" if error.filename else ""
        return (f"{error.strerror}{where}; what was saved before is intact, run the command again "
                f"when this is mended")
    return None


def prepare_streams():
    """A terminal may lack the letters of a class name, and a program may be started without one."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:               # closed: `>&-`
            setattr(sys, name, open(os.devnull, "w"))
        if hasattr(getattr(sys, name), "reconfigure"):
            getattr(sys, name).reconfigure(errors="backslashreplace")


def discard_output():
    """What could not be printed would be tried again when Python ends, and fail again."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
