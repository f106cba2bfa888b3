"""What every training script needs and no algorithm is made of: flags and their defaults, device,
EMA, checkpoint, log, screen. Nouns only: no loop, no loss, no `if method ==`.
"""
import argparse
import contextlib
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from copy import deepcopy
from datetime import timedelta
from importlib import metadata
from pathlib import Path

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

import distributed

try:
    import fcntl
except ImportError:                                  # Windows: there a run folder is not locked
    fcntl = None

# ---------------------------------------------------------------------------------------------
# defaults: later tables win over earlier ones, a flag on the command line wins over all

PROTOCOL = dict(  # the paper's, for all datasets; where it is silent, its released code's
    model="wrn-28-2", image_size=32, iters=250_000, batch_size=64, lr=2e-3, weight_decay=0.02,
    ema=0.999, bn_momentum=0.001, eval_every=500, n_strong=2, eta=1e-4, hidden=256, tau=0.95,
    ra_m=4.0)
DATASETS = {  # an own dataset (any other name): taken as it is
    "synthetic": dict(n1=500, m1=500, gamma_l=100, gamma_u=1, attractor_input="softmax"),
    "cifar10": dict(n1=1500, m1=3000, gamma_l=100, gamma_u=1, attractor_input="softmax"),
    "cifar100": dict(n1=150, m1=300, gamma_l=10, gamma_u=10, attractor_input="l2"),
    "stl10": dict(n1=450, gamma_l=10, attractor_input="softmax"),     # its own unlabeled images
    # 300 epochs, once through both sets each. The random crop that the paper makes of a picture is
    # augment.py's, of the whole picture squeezed to 224 px. BatchNorm is torchvision's.
    "sun397": dict(ratio=2, model="resnet34", image_size=224, batch_size=128, batch_size_u=256,
                   iters=69_300, eval_every=231, ema=0.99, bn_momentum=0.1, tau=0.6,
                   ra_m="random", attractor_input="l2"),
    "own .npz": dict(image_size=None, attractor_input="softmax"),
    "own folder": dict(image_size=32, attractor_input="softmax"),
}
MINI = dict(  # the same protocol on one CPU core in minutes
    model="wrn-10-1", image_size=16, iters=2000, ema=0.99, bn_momentum=0.02, eval_every=50,
    n_strong=1)
MINI_SYNTHETIC = dict(iters=1500, batch_size=32, eval_every=15)
RECIPES = {  # what the paper's text says, what its released code does
    "paper": dict(omega_every=1, omega_order="after", inner="adam", pseudo_from="linear",
                  pool="disjoint", split="random", wrn_quirk=False, decay_bn=False),
    "official": dict(omega_every=10, omega_order="before", inner="adam", attractor_input="l2",
                     pseudo_from="auto", pool="union", split="first", wrn_quirk=True,
                     decay_bn=True),
}


def resolve(args, base):
    """Fill the flags that were not given: protocol < dataset < scale < recipe < command line.

    Only flags that the script has: the tables also speak of those of other scripts.
    """
    if args.scale is None:
        args.scale = "mini" if args.dataset == "synthetic" else "paper"
    own = "own folder" if Path(args.dataset).is_dir() else "own .npz"
    table = PROTOCOL | DATASETS.get(args.dataset, DATASETS[own])
    if args.scale == "mini":
        table |= MINI | (MINI_SYNTHETIC if args.dataset == "synthetic" else {})
    table |= RECIPES[args.recipe]
    if base == "mixmatch":
        table |= dict(pool="disjoint")               # in the released protocol too
    counts = [key for key in ("n1", "m1", "gamma_l", "gamma_u", "beta") if getattr(args, key)]
    if counts:
        table.pop("ratio", None)                     # classes get counts instead
    if args.beta is not None:
        if args.n1 or args.m1:
            raise UserError("--beta sets --n1 and --m1; leave these out, or --beta")
        table |= dict(n1=None, m1=None)
    for key in table.keys() & vars(args).keys():
        if getattr(args, key) is None:
            setattr(args, key, table[key])
    args.batch_size_u = args.batch_size_u or args.batch_size
    if args.compile and args.method == "full_unroll":
        raise UserError("--compile does not go with --method full_unroll: torch.compile cannot "
                        "differentiate twice")
    for key in ("batch_size", "batch_size_u"):
        if getattr(args, key) % distributed.size():
            raise UserError(f"--{key} {getattr(args, key)} cannot be shared equally by the "
                            f"{distributed.size()} processes; choose a multiple of their number")
    args.base, args.out = base, args.out or default_out(args, base)
    return args


# ---------------------------------------------------------------------------------------------
# flags


class UserError(Exception):
    """One sentence for the user; ends the program with exit code 2."""


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one sentence instead of the usage text and a sentence."""

    def error(self, message):
        raise UserError(f"{message}; see --help")


def number(kind, low, high=math.inf):
    """An argparse type: int or float within [low, high]."""
    def parse(text):
        value = kind(text)
        if not low <= value <= high or value == math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not in [{low}, {high}]")
        return value
    parse.__name__ = kind.__name__          # argparse names it when the text is no number at all
    return parse


def parser(doc, network):
    """The flags that all training scripts share; the script adds those of its methods.

    network: the argparse type of --model.
    """
    p = Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter,
               allow_abbrev=False, usage="%(prog)s [--flag value ...]", epilog=describe_defaults())
    whole, real, switch = number(int, 1), number(float, 0), argparse.BooleanOptionalAction

    add = p.add_argument_group("data").add_argument
    add("--dataset", default="synthetic", metavar="NAME",
        help="synthetic (default, no download), cifar10, cifar100, stl10, sun397, or a path to an "
        ".npz file or to a folder (train/<class>/*, test/<class>/*, optional unlabeled/*)")
    add("--data_dir", default="data", help="where datasets lie (default: data)")
    add("--gamma_l", type=number(float, 1), help="N_1 / N_K of the labeled set *")
    add("--gamma_u", type=number(float, 1), help="M_1 / M_K of the unlabeled set *")
    add("--reverse_u", action="store_true", help="unlabeled set: rarest class first")
    add("--imbalance", choices=("long", "step"), default="long",
        help="long tail (default), or half of the classes rare")
    add("--n1", type=whole, help="labeled images of the first class *")
    add("--m1", type=whole, help="unlabeled images of the first class *")
    add("--beta", type=number(float, 0, 1), help="label-ratio study: n1 is this fraction of the "
        "first class, m1 the rest; counts are rounded half up, to at least 1")
    add("--ratio", type=number(float, 0), help="M_k / N_k: every class keeps its size and is "
        "divided alike, in place of n1, m1 and the gammas *")
    add("--split", choices=("random", "first"),
        help="images drawn by seed, or the first of each class **")
    add("--pool", choices=("disjoint", "union"),
        help="union: the unlabeled set holds the labeled images too **")

    add("--recipe", choices=tuple(RECIPES), default="paper",
        help="the paper's text (default) or its released code: sets the flags marked **")

    add = p.add_argument_group("optimisation").add_argument
    add("--iters", type=whole, help="updates of theta and phi *")
    add("--batch_size", type=number(int, 2), help="labeled and balanced images each *")
    add("--batch_size_u", type=number(int, 2), help="unlabeled images (default: batch_size) *")
    add("--lr", type=real, help="learning rate of theta's and phi's Adam *")
    add("--weight_decay", type=real, help="weights shrink by lr times this after each step *")
    add("--ema", type=number(float, 0, 1), help="decay of the averaged weights *")
    add("--bn_momentum", type=number(float, 0, 1), help="BatchNorm's momentum *")
    add("--decay_bn", action=switch, help="weight decay on BatchNorm's running statistics too **")

    add = p.add_argument_group("network").add_argument
    add("--model", type=network, help="wrn-d-w, as in wrn-28-2, or resnet34 *")
    add("--wrn_quirk", action=switch, help="the released code's WRN wiring (models.Unit) **")
    add("--image_size", type=number(int, 8, 1024), help="images are resized to a square of this "
        "many pixels; None: they stay as they are *")

    add = p.add_argument_group("system").add_argument
    add("--scale", choices=("paper", "mini"), help="the paper's protocol, or the same shrunk for "
        "one CPU core (default: paper; mini for synthetic)")
    add("--eval_every", type=whole, help="iterations between evaluations *")
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto")
    add("--dtype", choices=("float32", "bfloat16"), default="float32",
        help="bfloat16: autocast of the network passes on CUDA (default: float32)")
    add("--compile", action="store_true", help="torch.compile the network")
    add("--threads", type=number(int, 0, 1024), default=0, help="of the CPU (0: torch decides)")
    add("--seed", type=number(int, 0, 2**31), default=0,
        help="split, batches, augmentation, initial weights (default: 0)")
    add("--out", help="run folder (runs/<dataset>_<base>_<method>_gl<..>_gu<..>_s<seed>)")
    add("--resume", action="store_true", help="continue the run in --out; start if there is none")
    add("--overwrite", action="store_true", help="replace the run in --out")
    return p


def l2ac_flags(p):
    whole, real = number(int, 1), number(float, 0)
    add = p.add_argument_group("L2AC").add_argument
    add("--method", choices=("l2ac", "none", "attractor", "single_level", "full_unroll"),
        default="l2ac", help="l2ac (default); none: the plain base method; attractor: theta, phi, "
        "omega trained jointly on L; single_level: jointly on L + L_bal; full_unroll: omega "
        "through a step of the whole network")
    add("--omega_every", type=whole, help="iterations between omega steps **")
    add("--omega_order", choices=("after", "before"), help="after: theta, phi move first "
        "(Algorithm 1); before: omega first, judged on a virtual step of phi **")
    add("--inner", choices=("adam", "sgd"), help="the update that omega is judged through **")
    add("--attractor_input", choices=("softmax", "l2"), help="how its input is scaled * **")
    add("--pseudo_from", choices=("linear", "adaptive", "auto"), help="who makes pseudo-labels: "
        "the linear classifier, the adaptive one, or the latter iff gamma_l = gamma_u **")
    add("--eta", type=real, help="learning rate of omega's Adam; where omega is trained jointly "
        "(attractor, single_level) it has --lr *")
    add("--hidden", type=whole, help="width of the attractor *")


def describe_defaults():
    def line(name, table):
        return f"  {name}: " + ", ".join(f"{k} {v}" for k, v in table.items())
    lines = ["* default by dataset and scale, later lines win:", line("all", PROTOCOL)]
    lines += [line(name, table) for name, table in DATASETS.items()]
    lines += [line("--scale mini", MINI), line("--scale mini, synthetic", MINI_SYNTHETIC)]
    lines += ["** default by recipe:"] + [line(f"--recipe {r}", t) for r, t in RECIPES.items()]
    return "\n".join(lines)


def default_out(args, base):
    dataset = Path(args.dataset).resolve().stem
    gammas = [f"{g:g}" if g else "own" for g in (args.gamma_l, args.gamma_u)]
    reverse = "rev" if args.reverse_u else ""
    study = "_step" if args.imbalance == "step" else ""
    study += f"_beta{args.beta:g}" if args.beta is not None else ""
    return (f"runs/{dataset}_{base}_{args.method}_gl{gammas[0]}_gu{gammas[1]}{reverse}{study}"
            f"_s{args.seed}")


def pick_device(args):
    """The torch.device; also sets the number of CPU threads."""
    if args.threads:
        torch.set_num_threads(args.threads)
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    name = args.device
    if name == "auto":
        name = next((d for d in ("cuda", "mps") if available[d]), "cpu")
    elif not available.get(name, True):
        raise UserError(f"--device {name}: this machine or this PyTorch has none; use --device cpu")
    if args.dtype == "bfloat16" and name != "cuda":
        raise UserError(f"--dtype bfloat16 needs CUDA, the device is {name}; use --dtype float32")
    args.device, args.threads = name, torch.get_num_threads()        # resolved, for config.json
    several = name == "cuda" and distributed.size() > 1
    return torch.device(name, int(os.environ["LOCAL_RANK"]) if several else None)


def exit_cleanly(main, *expected):
    """Run a script's main: expected errors become one sentence on stderr and exit code 2."""
    try:
        status = main()
        distributed.stop()
        sys.exit(status)
    except BrokenPipeError:                          # `... | head` closed our output
        sys.exit(1)
    except (UserError, *expected) as error:
        if distributed.rank():                       # all processes met it, the first one tells
            sys.exit(2)
        sentence = str(error)
    except distributed.LostProcess as error:
        sentence = str(error)
    except torch.OutOfMemoryError:
        sentence = "the device has too little memory; lower --batch_size or take a smaller --model"
    except OSError as error:                         # disk full, no permission, ...
        sentence = f"{error.strerror} ({error.filename}); what was saved before is intact"
    print(f"{Path(sys.argv[0]).name}: {sentence}", file=sys.stderr)
    sys.exit(2)


# ---------------------------------------------------------------------------------------------
# EMA


class EMA:
    """A copy of the model whose weights and BatchNorm statistics trail those of the live one."""

    # torch's AveragedModel would also do, but it reads a counter back from the device at each step.
    def __init__(self, model, decay):
        self.model = deepcopy(model).eval().requires_grad_(False)
        self.average = get_ema_multi_avg_fn(decay)
        self.trail, self.live = ([t for t in m.state_dict().values() if t.is_floating_point()]
                                 for m in (self.model, model))

    def update(self):
        self.average(self.trail, self.live, None)    # trail <- decay * trail + (1 - decay) * live


# ---------------------------------------------------------------------------------------------
# the run folder: config.json, log.csv, last.pt, prev.pt, result.json

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


# ---------------------------------------------------------------------------------------------
# screen and signals


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

    def due(self):
        return sys.stdout.isatty() and time.perf_counter() - self.shown > 1

    def show(self, done, values):
        self.shown = time.perf_counter()
        rate = (done - self.start) / (self.seconds - self.before + self.shown - self.since)
        left = timedelta(seconds=int((self.iters - done) / rate))
        text = (f"{done}/{self.iters} ({100 * done // self.iters}%)  {rate:.1f} it/s  {left} left  "
                + "  ".join(f"{k} {v:.3g}" for k, v in values.items() if v == v))
        print("\r\033[K" + text[:shutil.get_terminal_size().columns - 1], end="", flush=True)

    def row(self, row):
        """`row` is the newest line of log.csv; what it says of single classes stays in the file."""
        shown = {k: v for k, v in row.items() if not k.startswith(("recall_", "bias_"))}
        if self.rows % 20 == 0:
            self.line("".join(f"{k:>11}" for k in shown))
        self.rows += 1
        self.line("".join(f"{v:>11.4g}" for v in shown.values()))

    def line(self, text):
        print(("\r\033[K" if sys.stdout.isatty() else "") + text, flush=True)


class Interrupt:
    """Ctrl-C and SIGTERM become a wish that the loop grants at the end of its iteration."""
    wished = False

    def listen(self):
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self.wish)

    def wish(self, signum, frame):
        if distributed.size() == 1:                  # torchrun may send several, and a SIGKILL
            signal.signal(signum, signal.SIG_DFL)    # later; else a second one stops at once
        self.wished = True


interrupt = Interrupt()                              # signals are the process's, not a run's


class Tally:
    """What log.csv says about training: sums since the last evaluation, kept on the device."""

    def __init__(self, device):
        self.sums = torch.zeros(9, device=device)

    def add(self, loss_x, loss_u, y_u, mask, true_u, loss_bal, omega_norm, omega_moved):
        """y_u, mask, true_u (U,): pseudo-labels, which of them count, true ones or -1."""
        known, one = mask * (true_u >= 0), torch.ones_like(loss_x)
        now = torch.stack([
            one, loss_x, loss_u, mask.mean(), known.sum(), (known * (y_u == true_u)).sum(),
            loss_bal, omega_norm, omega_moved * one]).detach()
        self.sums += distributed.average([now])[0]

    def averages(self):
        """The columns of log.csv."""
        iters, loss_x, loss_u, kept, known, right, loss_bal, norm, moves = self.sums.tolist()
        return {"loss_x": loss_x / iters, "loss_u": loss_u / iters, "mask_rate": kept / iters,
                "pseudo_acc": right / known if known else math.nan,
                "loss_bal": loss_bal / moves if moves else math.nan,
                "omega_grad": norm / moves if moves else math.nan}

    def reset(self):
        self.sums.zero_()

    def state_dict(self):
        return {"sums": self.sums}

    def load_state_dict(self, state):
        self.sums.copy_(state["sums"])


class Watch:
    """Stops the run where something is not finite, before it can be saved."""

    def __init__(self):
        self.seen = {}                               # losses by iteration, not yet looked at

    def see(self, step, losses):
        self.seen[step], = distributed.average([losses])     # so that all processes stop at once
        if losses.device.type == "cpu":              # a GPU would have to be waited for: its losses
            self.look()                              # are looked at when something is saved

    def look(self):
        for step, losses in self.seen.items():
            if not losses.isfinite().all():
                self.stop(f"the loss of iteration {step} is not finite ({losses.tolist()})")
        self.seen.clear()

    def check(self, step, *modules):
        self.look()
        if not all(t.isfinite().all() for m in modules for t in (*m.parameters(), *m.buffers())):
            self.stop(f"the weights are not finite after iteration {step}")

    def stop(self, what):
        raise UserError(f"{what}; nothing was saved since, start again with a lower --lr in "
                        f"another --out")


def print_start(cfg, dataset, index_l, index_u, model, device):
    """What is about to run: every setting, the class counts, the network."""
    for name, index in (("labeled", index_l), ("unlabeled", index_u)):
        labels = dataset.labels[index]
        known, unknown = (labels >= 0).any(), int((labels < 0).sum())
        parts = [f"{k} {int((labels == i).sum())}" for i, k in enumerate(dataset.names) if known]
        parts[10:-10] = ["..."] if len(parts) > 20 else parts[10:-10]
        parts += [f"unknown {unknown}"] if unknown else []
        print(f"{name}: {len(index)} images: {', '.join(parts)}")
    size = sum(p.numel() for p in model.parameters())
    print(f"network: {cfg.model}, {size / 1e6:.2f} M parameters, on {device}")
    settings = (f"{k} {v}" for k, v in vars(cfg).items() if k != "facts")
    print("settings: " + ", ".join(settings) + "\n", flush=True)


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
