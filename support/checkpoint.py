"""The run folder: config.json, log.csv, last.pt, prev.pt, result.json.

It is locked, so that two runs never share it. Every file is written beside the old one, synced and
renamed, so a crash or a full disk leaves what was there. A checkpoint holds tensors and plain
Python types only; loading one never runs code, and its tensors and flags are checked (checks.py).
"""
import errno
import io
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import torch

from support import UserError, checks, distributed, lacks_memory
from support.config import FREE

try:
    import fcntl
except ImportError:                                  # Windows: there a run folder is not locked
    fcntl = None

FILES = ("config.json", "log.csv", "last.pt", "prev.pt", "damaged.pt", "result.json")
TEMPORARY = re.compile(rf"({'|'.join(map(re.escape, FILES))})\.[0-9a-f]{{16}}\.tmp")   # of `write`


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
    check_data(saved, now["dataset_info"], folder)
    if checkpoint["step"] > now["iters"]:
        raise UserError(f"--iters is {now['iters']}, but the run in {folder} is already at "
                        f"{checkpoint['step']}; ask for more, or choose another --out")


def check_data(config, info, folder):
    """Refuse data other than the run's. config: the run's; info: data.Dataset.info of what is here
    """
    then, now = json.loads(json.dumps([config["dataset_info"], info]))         # tuples become lists
    for key in now:
        if then.get(key) != now[key]:
            what = "images or labels" if key == "fingerprint" else key
            raise UserError(f"--dataset {config['dataset']} (--data_dir {config['data_dir']}) is "
                            f"not what the run in {folder} was trained on (other {what}); restore "
                            f"the data, or train on these in another --out")


def own_commit():
    """That of this checkout; None if it has no .git of its own, even inside another repository."""
    git = Path(__file__).resolve().parent.parent / ".git"
    if not git.exists() or not shutil.which("git"):
        return None
    done = subprocess.run(["git", "--git-dir", git, "rev-parse", "--short", "HEAD"], text=True,
                          capture_output=True)
    return done.stdout.strip() or None


def versions(commits):
    """commits: that which the run was started with, and those it was resumed with."""
    packages = {name: metadata.version(name) for name in ("torch", "torchvision", "numpy")}
    return packages | {"python": sys.version.split()[0], "commit": commits[0], "commits": commits,
                       "processes": distributed.size()}


def write(path, content, keep=None):
    """bytes, all or nothing: a reader never meets half a file, a crash leaves the old one.

    The file that was there is kept under the name `keep`, if one is given. A link is replaced, and
    never followed: mode x opens no file that is there already, under whatever name.
    """
    if distributed.rank():
        return                                       # rank 0 writes for all
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "It is not a regular file")
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if keep and path.exists():
            os.replace(path, keep)
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()                       # a full disk needs the room
        raise OSError(error.errno, error.strerror, str(path)) from None


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


def restore(folder, checkpoint, parts, cfg, is_evaluated):
    """Put a checkpoint (or None) back into its parts; (step, seconds, history, commits) to go on
    from. Files of the folder are touched only now, after everything fits.
    """
    step, seconds, history, commits = 0, 0.0, [], [own_commit()]
    if checkpoint:
        step, seconds, history = (checkpoint[key] for key in ("step", "seconds", "history"))
        before = checkpoint.get("commits", [None])
        commits = before + [c for c in commits if c != before[-1]]
        if checkpoint["config"]["iters"] != cfg.iters:        # evaluated where this run would not
            history = [row for row in history if is_evaluated(row["iter"])]
        for name, part in parts.items():
            load_part(folder, checkpoint, name, part)
    distributed.broadcast_from_rank0(
        lambda: prepare_folder(folder, checkpoint, history, cfg, commits))
    return step, seconds, history, commits


def load_part(folder, checkpoint, name, part):
    """Restore a module, an optimizer, ... from the entry of that name, if it fits in every way."""
    try:
        if name not in checkpoint:
            raise ValueError("it is missing")
        part.load_state_dict(checks.checked(part, checkpoint[name], checkpoint["step"]))
    except (RuntimeError, ValueError) as error:
        if lacks_memory(error):
            raise
        raise UserError(f"{folder / checkpoint['file']} does not fit its flags or these data "
                        f"({name}: {str(error).splitlines()[0]}); it is damaged, or was made by "
                        f"another script or version: use that one, or train again in another "
                        f"--out") from error


def prepare_folder(folder, checkpoint, history, cfg, commits):
    """Make the folder ready for training. That of a finished run is left as it is."""
    if checkpoint and checkpoint["step"] == cfg.iters and (folder / "result.json").exists():
        return
    try:
        left = [f.name for f in folder.iterdir() if TEMPORARY.fullmatch(f.name)]   # left by a kill
        for name in (*left, *(FILES if cfg.overwrite else ())):
            (folder / name).unlink(missing_ok=True)
        if checkpoint and checkpoint["file"] == "prev.pt" and (folder / "last.pt").exists():
            os.replace(folder / "last.pt", folder / "damaged.pt")    # or it would become prev.pt
        write_json(folder / "config.json", vars(cfg) | versions(commits))
        if checkpoint:
            write_log(folder, history)               # cuts off later rows
    except OSError as error:
        raise cannot_write(folder, error) from error


def load_checkpoint(folder):
    """The newest checkpoint that can be used, or None where there is none at all.

    A file that cannot be read is not a damaged one: that ends the program, and nothing is changed.
    """
    problems = []
    for path in (folder / "last.pt", folder / "prev.pt"):
        try:
            if path.exists() and not path.is_file():
                raise OSError(errno.EINVAL, "it is not a regular file")
            content = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}), which need not mean that "
                            f"it is damaged; make it readable and try again") from error
        try:
            state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except Exception as error:                   # torch.load raises a dozen kinds
            if lacks_memory(error):
                raise
            problems.append(f"{path} cannot be used ({type(error).__name__})")
            continue
        problem = checks.flaw(state)
        if problem is None:
            for text in problems:
                print(f"WARNING: {text}; falling back to {path}", file=sys.stderr)
            return state | {"file": path.name}
        problems.append(f"{path} cannot be used (it is no checkpoint of this project: {problem})")
    if problems:
        raise UserError(f"{' and '.join(problems)}; the run has to start again, in another --out "
                        f"or with --overwrite")
    return None
