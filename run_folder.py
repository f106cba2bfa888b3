"""The run folder: config.json, log.csv, last.pt, prev.pt, result.json.

One process at a time is in it. Every file is written beside the old one, synced and renamed, so a
crash or a full disk leaves what was there; a checkpoint holds tensors and plain Python types only.
"""
import contextlib
import io
import json
import math
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

import distributed
from settings import UserError

try:
    import fcntl
except ImportError:                                  # Windows: there a run folder is not locked
    fcntl = None

FILES = ("config.json", "log.csv", "last.pt", "prev.pt", "damaged.pt", "result.json")
FREE = ("out", "resume", "overwrite", "iters", "device", "threads", "compile", "data_dir", "facts")
CONTENTS = {"step": int, "config": dict, "history": list, "model": dict, "ema": dict}   # of last.pt


def open_run(args, schedule=True):
    """(folder, checkpoint or None) of --out. Refuses to touch another run; changes no file yet.

    schedule: something in the run is a fraction of --iters, so --resume cannot make it longer.
    """
    folder = Path(args.out)
    return folder, distributed.from_first(lambda: find_checkpoint(args, folder, schedule))


def find_checkpoint(args, folder, schedule):
    if args.resume and args.overwrite:
        raise UserError("--resume and --overwrite exclude each other; give one of them")
    lock(folder)
    held = [name for name in FILES if (folder / name).exists()]
    if held and not (args.resume or args.overwrite):
        raise UserError(f"--out {folder} already holds a run ({held[0]}); add --resume to continue "
                        f"it, --overwrite to replace it, or choose another --out")
    checkpoint = load_checkpoint(folder) if args.resume else None
    if checkpoint:
        check_same_run(checkpoint, vars(args), folder, schedule)
    elif args.resume and {"log.csv", "result.json"} & set(held):
        raise UserError(f"--resume: {folder} holds results but no checkpoint to continue from; "
                        f"choose another --out, or --overwrite them")
    return checkpoint


locked = None                                        # the folder of this process's run, kept open


def lock(folder):
    """Keep other processes out of the folder. The lock ends with the process, however it ends."""
    global locked
    if locked is not None:
        os.close(locked)                             # a process has one run at a time
        locked = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        locked = os.open(folder, os.O_RDONLY) if fcntl else None
    except OSError as error:
        raise cannot_write(folder, error) from None
    try:
        if fcntl:
            fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"--out {folder} is in use by another process; wait until it ends, or "
                        f"choose another --out") from None
    except OSError:
        pass                                         # a file system without locks


def cannot_write(folder, error):
    return UserError(f"--out {folder} cannot be written ({error.strerror}); choose another folder")


def check_same_run(checkpoint, now, folder, schedule):
    saved = checkpoint["config"]
    if saved.keys() != now.keys():
        raise UserError(f"--out {folder} holds a run of another script or version, whose flags are "
                        f"others; resume it with that one, or choose another --out")
    keys = saved.keys() - set(FREE) | ({"iters"} if schedule else set())
    for key in sorted(keys, key=lambda k: (k != "dataset", k)):      # it drags others along
        if saved[key] != now[key]:
            raise UserError(f"--{key} is {now[key]}, but the run in {folder} has {saved[key]}; "
                            f"--resume continues a run with the flags it was started with")
    if saved["facts"] != now["facts"]:
        raise UserError(f"--dataset {now['dataset']} has other classes, colours or sizes than when "
                        f"the run in {folder} began; restore it, or choose another --out")
    if checkpoint["step"] > now["iters"]:
        raise UserError(f"--iters is {now['iters']}, but the run in {folder} is already at "
                        f"{checkpoint['step']}; ask for more, or choose another --out")


def versions():
    commit = shutil.which("git") and subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, text=True,
        capture_output=True).stdout.strip()          # None or "" outside a checkout
    packages = {name: metadata.version(name) for name in ("torch", "torchvision", "numpy")}
    return packages | {"python": sys.version.split()[0], "commit": commit,
                       "processes": distributed.size()}


def write(path, content, keep=None):
    """bytes, all or nothing: a reader never meets half a file, a crash leaves the old one.

    The file that was there is kept under the name `keep`, if one is given.
    """
    if distributed.rank():
        return                                       # the first process writes for all
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()                       # a full disk needs the room
        raise OSError(error.errno, error.strerror, str(path)) from None
    if keep and path.exists():
        os.replace(path, keep)
    os.replace(temporary, path)


def to_json(content):
    """JSON has no NaN (the recall of a class without test images): null in its place."""
    return json.dumps(json.loads(json.dumps(content), parse_constant=lambda nan: None), indent=1)


def write_json(path, content):
    write(path, to_json(content).encode())


def write_log(folder, history):
    """log.csv from all evaluations so far; on resume this also cuts off later rows."""
    names = list(history[-1]) if history else []     # older rows may lack a column
    lines = [",".join(names)] if history else []
    lines += [",".join(f"{row.get(name, math.nan):.6g}" for name in names) for row in history]
    write(folder / "log.csv", "".join(f"{x}\n" for x in lines).encode())


def save_checkpoint(folder, parts, **plain):
    """last.pt, the one before it kept as prev.pt. Tensors and plain Python types only.

    parts: {name: anything with a state_dict}.
    """
    state = {name: part.state_dict() for name, part in parts.items()} | plain
    memory = io.BytesIO()                            # torch.save hides what a full disk says
    torch.save(state, memory)
    write(folder / "last.pt", memory.getbuffer(), keep=folder / "prev.pt")


def restore(folder, checkpoint, parts, cfg):
    """Put a checkpoint (or None) back into its parts; (step, seconds, history) to go on from.

    Only now that everything fits, files of the folder are touched.
    """
    step, seconds, history = 0, 0.0, []
    try:
        if checkpoint:
            step, seconds, history = (checkpoint[key] for key in ("step", "seconds", "history"))
            shorter = step == checkpoint["config"]["iters"] < cfg.iters
            if shorter and step % cfg.eval_every:
                history.pop()                        # its last row is off the grid of this run
            for name, part in parts.items():
                part.load_state_dict(checkpoint[name])
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise UserError(f"--resume: {folder / checkpoint['file']} does not fit this command or "
                        f"these data ({type(error).__name__}); call the script that made the run, "
                        f"or choose another --out") from None
    distributed.from_first(lambda: prepare(folder, checkpoint, history, cfg))
    return step, seconds, history


def prepare(folder, checkpoint, history, cfg):
    try:
        for name in FILES if cfg.overwrite else ():
            (folder / name).unlink(missing_ok=True)
        if checkpoint and checkpoint["file"] == "prev.pt" and (folder / "last.pt").exists():
            os.replace(folder / "last.pt", folder / "damaged.pt")    # or it would become prev.pt
        write_json(folder / "config.json", vars(cfg) | versions())
        if checkpoint:
            write_log(folder, history)               # cuts off later rows
    except OSError as error:
        raise cannot_write(folder, error) from None


def load_checkpoint(folder):
    """The newest checkpoint that can be read, or None where there is none at all."""
    problems = []
    for path in [folder / n for n in ("last.pt", "prev.pt") if (folder / n).exists()]:
        try:
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)  # never runs code
            if all(isinstance(checkpoint[key], kind) for key, kind in CONTENTS.items()):
                for problem in problems:
                    print(f"WARNING: {problem}; falling back to {path}", file=sys.stderr)
                return checkpoint | {"file": path.name}
            problem = "not a checkpoint of ours"
        except Exception as error:                   # torch.load raises a dozen kinds
            problem = type(error).__name__
        problems.append(f"{path} cannot be used ({problem})")
    if problems:
        raise UserError(f"{' and '.join(problems)}; the run has to start again, in another --out "
                        f"or with --overwrite")
    return None


def peak_memory_mb(device):
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    status = Path("/proc/self/status")               # Linux; getrusage would count the parent's too
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(x.split()[1]) / 1024 for x in lines if x.startswith("VmHWM:")), None)


def finish(cfg, folder, mean, count, seconds, device):
    """result.json and the last line on the screen, from evaluate.mean_of_last."""
    result = {key: getattr(cfg, key) for key in ("method", "base", "dataset", "gamma_l", "gamma_u",
                                                 "reverse_u", "imbalance", "beta", "seed", "iters",
                                                 "scale", "recipe")}
    result |= mean | {"evaluations": count, "sec_per_iter": seconds / cfg.iters,
                      "peak_memory_mb": peak_memory_mb(device)}
    write_json(folder / "result.json", result | versions())
    print(f"\n{cfg.method}: bACC {mean['bacc']:.2f}  GM {mean['gm']:.2f}  "
          f"(mean of the last {count} evaluations; files in {folder})")
