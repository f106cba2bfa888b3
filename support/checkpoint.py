"""The run folder: config.json, log.csv, last.pt, prev.pt, result.json.

It is locked, so that two runs never share it. Every file is written beside the old one, synced and
renamed, so a crash or a full disk leaves what was there. A checkpoint holds tensors and plain
Python types only; loading one never runs code.
"""
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

from support import UserError, distributed
from support.config import FREE

try:
    import fcntl
except ImportError:                                  # Windows: there a run folder is not locked
    fcntl = None

FILES = ("config.json", "log.csv", "last.pt", "prev.pt", "damaged.pt", "result.json")
CONTENTS = {"step": int, "config": dict, "history": list, "model": dict, "ema": dict}   # of last.pt


def find(args, folder, resizable):
    """The checkpoint to continue from, or None. Refuses to touch another run; writes nothing yet.

    resizable: --resume may change --iters, because no schedule in the run depends on it.
    """
    if args.resume and args.overwrite:
        raise UserError("--resume and --overwrite exclude each other; give one of them")
    lock(folder)
    held = [name for name in FILES if (folder / name).exists()]
    if held and not (args.resume or args.overwrite):
        raise UserError(f"--out {folder} already holds a run ({held[0]}); add --resume to continue "
                        f"it, --overwrite to replace it, or choose another --out")
    checkpoint = load_checkpoint(folder) if args.resume else None
    if checkpoint:
        check_same_run(checkpoint, vars(args), folder, resizable)
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
        raise cannot_write(folder, error) from error
    try:
        if fcntl:
            fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(f"--out {folder} is in use by another process; wait until it ends, or "
                        f"choose another --out") from error
    except OSError:
        pass                                         # a file system without locks


def cannot_write(folder, error):
    return UserError(f"--out {folder} cannot be written ({error.strerror}); choose another folder")


def check_same_run(checkpoint, now, folder, resizable):
    saved = checkpoint["config"]
    if saved.keys() != now.keys():
        raise UserError(f"--out {folder} holds a run of another script or version, whose flags are "
                        f"others; resume it with that one, or choose another --out")
    keys = saved.keys() - set(FREE) | (set() if resizable else {"iters"})
    for key in sorted(keys, key=lambda k: (k != "dataset", k)):      # others follow from it
        if saved[key] != now[key]:
            raise UserError(f"--{key} is {now[key]}, but the run in {folder} has {saved[key]}; "
                            f"--resume continues a run with the flags it was started with")
    if saved["dataset_info"] != now["dataset_info"]:
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
        return                                       # rank 0 writes for all
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
    lines = [",".join(history[0])] if history else []
    lines += [",".join(f"{value:.6g}" for value in row.values()) for row in history]
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

    Files of the folder are touched only now, after everything fits.
    """
    step, seconds, history = 0, 0.0, []
    if checkpoint:
        check_contents(folder, checkpoint, parts)
        step, seconds, history = (checkpoint[key] for key in ("step", "seconds", "history"))
        longer = step == checkpoint["config"]["iters"] < cfg.iters
        if longer and step % cfg.eval_every:
            history.pop()                            # its last row is off the grid of this run
        for name, part in parts.items():
            try:
                part.load_state_dict(checkpoint[name])
            except (RuntimeError, ValueError) as error:      # names, shapes, parameter groups
                raise does_not_fit(folder, checkpoint, f"{name}: {error}") from error
    distributed.broadcast_from_rank0(lambda: prepare_folder(folder, checkpoint, history, cfg))
    return step, seconds, history


def check_contents(folder, checkpoint, parts):
    missing = {"step", "seconds", "history", *parts} - checkpoint.keys()
    if missing:
        raise does_not_fit(folder, checkpoint, f"it lacks {sorted(missing)[0]}")


def does_not_fit(folder, checkpoint, why):
    return UserError(f"--resume: {folder / checkpoint['file']} does not fit this command or these "
                     f"data ({why.splitlines()[0]}); call the script that made the run, or choose "
                     f"another --out")


def prepare_folder(folder, checkpoint, history, cfg):
    """Make the folder ready for training. That of a finished run is left as it is."""
    if checkpoint and checkpoint["step"] == cfg.iters and (folder / "result.json").exists():
        return
    try:
        for name in FILES if cfg.overwrite else ():
            (folder / name).unlink(missing_ok=True)
        if checkpoint and checkpoint["file"] == "prev.pt" and (folder / "last.pt").exists():
            os.replace(folder / "last.pt", folder / "damaged.pt")    # or it would become prev.pt
        write_json(folder / "config.json", vars(cfg) | versions())
        if checkpoint:
            write_log(folder, history)               # cuts off later rows
    except OSError as error:
        raise cannot_write(folder, error) from error


def load_checkpoint(folder):
    """The newest checkpoint that can be read, or None where there is none at all."""
    problems = []
    for path in [folder / n for n in ("last.pt", "prev.pt") if (folder / n).exists()]:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)       # never runs code
        except Exception as error:                   # torch.load raises a dozen kinds
            problems.append(f"{path} cannot be used ({type(error).__name__})")
            continue
        if isinstance(state, dict) and all(isinstance(state.get(key), kind)
                                           for key, kind in CONTENTS.items()):
            for problem in problems:
                print(f"WARNING: {problem}; falling back to {path}", file=sys.stderr)
            return state | {"file": path.name}
        problems.append(f"{path} cannot be used (it is not a checkpoint of this project)")
    if problems:
        raise UserError(f"{' and '.join(problems)}; the run has to start again, in another --out "
                        f"or with --overwrite")
    return None
