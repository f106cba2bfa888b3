"""Configuration: flags, the defaults that depend on dataset, scale and recipe, the device."""
import argparse
import os
from pathlib import Path

import torch

from support import UserError, distributed
from support.cli import Parser, number

DATA_DIR = "data"    # the default folder of archives, the only one that is created if missing

# ---------------------------------------------------------------------------------------------
# defaults: later tables win over earlier ones, a flag on the command line wins over all

PROTOCOL = dict(  # the paper's, for all datasets; where it is silent, its released code's
    model="wrn-28-2", image_size=32, iters=250_000, batch_size=64, lr=2e-3, weight_decay=0.02,
    ema=0.999, bn_momentum=0.001, eval_every=500, n_strong=2, eta=1e-4, hidden=256, tau=0.95,
    ra_m=4.0, no_flip=False, threads=0)
DATASETS = {  # any other name is the user's own data, taken as it is
    "digits": dict(n1=10, m1=100, gamma_l=5, gamma_u=1, attractor_input="softmax", no_flip=True),
    "synthetic": dict(n1=500, m1=500, gamma_l=100, gamma_u=1, attractor_input="softmax"),
    "cifar10": dict(n1=1500, m1=3000, gamma_l=100, gamma_u=1, attractor_input="softmax"),
    "cifar100": dict(n1=150, m1=300, gamma_l=10, gamma_u=10, attractor_input="l2"),
    # Its own unlabeled images. Shrunk before RandAugment: translations and boxes, in pixels, are
    # three times as large relative to the image as they would be at the original 96 px.
    "stl10": dict(n1=450, gamma_l=10, attractor_input="softmax"),
    # 300 epochs, each one pass over both sets. The random crop that the paper makes of a picture is
    # augment.py's, of the whole picture squeezed to 224 px. bn_momentum is torchvision's.
    "sun397": dict(ratio=2, model="resnet34", image_size=224, batch_size=128, batch_size_u=256,
                   iters=69_300, eval_every=231, ema=0.99, bn_momentum=0.1, tau=0.6,
                   ra_m="random", attractor_input="l2"),
    "own .npz": dict(image_size=None, attractor_input="softmax"),
    "own folder": dict(image_size=32, attractor_input="softmax"),
}
# The same protocol on one CPU core in minutes. Threads of such small networks spend more time
# waiting for each other than computing as soon as another program wants a core.
MINI = dict(
    model="wrn-10-1", image_size=16, iters=2000, ema=0.99, bn_momentum=0.02, eval_every=100,
    n_strong=1, threads=1)
MINI_SMALL = dict(iters=1200, batch_size=32, eval_every=60)   # of digits and synthetic
SMALL = ("digits", "synthetic")
LIKE_CIFAR10 = (*SMALL, "cifar10")               # DARP, DASO: the constants of CIFAR-10
# An entry of the vector moves by eta a step, while the weights of the MLP move together: with 1e-4
# it could move by 25 in the paper's run, but in a miniature by 0.2 at most.
MINI_VECTOR = dict(eta=1e-2)
RECIPES = {  # what the paper's text says, what its released code does
    "paper": dict(omega_every=1, omega_order="after", inner="adam", pseudo_from="linear",
                  pool="disjoint", split="random", wrn_quirk=False, decay_bn=False),
    "official": dict(omega_every=10, omega_order="before", inner="adam", attractor_input="l2",
                     pseudo_from="auto", pool="union", split="first", wrn_quirk=True,
                     decay_bn=True),
}

# Flags that have a fixed place in the default --out, and flags that may change on --resume.
NAMED = ("dataset", "method", "gamma_l", "gamma_u", "reverse_u", "imbalance", "beta", "scale",
         "recipe", "seed")
FREE = ("out", "resume", "overwrite", "iters", "device", "threads", "compile", "deterministic",
        "data_dir", "dataset_info", "cwd")
OF_THE_MACHINE = ("out", "device", "threads", "compile", "data_dir", "cwd")  # may differ by rank

CORE_METHODS = ("l2ac", "none", "attractor", "single_level")   # --method of train_*.py


def read(argv, base, doc=""):
    """The configuration of a training script of FixMatch or MixMatch with L2AC."""
    cfg = resolve(parser(doc, l2ac_flags, BASE_FLAGS[base]), argv, base)
    if cfg.method not in CORE_METHODS:
        raise UserError(f"--method {cfg.method} is none of {', '.join(CORE_METHODS)}; the "
                        f"methods of baselines/ are run with `python -m baselines.train --base "
                        f"{base} --method NAME`")
    return cfg


def resolve(parser, argv, base):
    """The flags of a command line, complete: those that were not given get their defaults."""
    given = parser.parse_args(argv)
    args = fill_defaults(given, base)
    if args.out is None:
        plain = vars(parser.parse_args([])) | {key: getattr(given, key) for key in NAMED}
        args.out = default_out(args, fill_defaults(argparse.Namespace(**plain), base))
    args.cwd = os.getcwd()                           # what relative paths start from
    return args


def default_scale(dataset):
    return "mini" if dataset in SMALL else "paper"


def fill_defaults(args, base):
    """Protocol < dataset < scale < recipe < command line.

    Only flags that the script has: the tables also hold those of other scripts.
    """
    args = argparse.Namespace(**vars(args) | {"base": base})         # a copy
    args.scale = args.scale or default_scale(args.dataset)
    own = "own folder" if Path(args.dataset).is_dir() else "own .npz"
    table = PROTOCOL | DATASETS.get(args.dataset, DATASETS[own])
    if args.scale == "mini":
        table |= MINI | (MINI_SMALL if args.dataset in SMALL else {})
        table |= MINI_VECTOR if getattr(args, "attractor", None) == "vector" else {}
    table |= RECIPES[args.recipe]
    if base == "mixmatch":
        table |= dict(pool="disjoint")               # in the released protocol too
    counts = ("n1", "m1", "gamma_l", "gamma_u")
    if args.ratio is not None:                       # in place of counts
        table |= dict.fromkeys(counts)
    elif any(getattr(args, key) is not None for key in (*counts, "beta")):
        table.pop("ratio", None)                     # counts in its place
    if args.beta is not None:
        if args.n1 or args.m1:
            raise UserError("--beta sets --n1 and --m1; leave these out, or --beta")
        table |= dict(n1=None, m1=None)
    for key in table.keys() & vars(args).keys():
        if getattr(args, key) is None:
            setattr(args, key, table[key])
    args.batch_size_u = args.batch_size_u or args.batch_size
    return args


def matched(cfg):
    """Whether the flags say that labeled and unlabeled set are distributed alike."""
    return cfg.ratio is not None or (
        cfg.gamma_u is not None and cfg.gamma_l == cfg.gamma_u and not cfg.reverse_u)


def adaptive_labels(cfg):
    """Whether the attractor takes part in making pseudo-labels."""
    return cfg.method != "none" and (
        cfg.pseudo_from == "adaptive" or cfg.pseudo_from == "auto" and matched(cfg))


def default_out(args, plain):
    """runs/<dataset>_<base>_<method>_gl<..>_gu<..>, every other flag that was changed, _s<seed>.

    args: all flags; plain: as they would be with the flags of NAMED alone
    The length of a run is not in its name: --resume may make it longer.
    """
    gammas = [f"{g:g}" if g else "own" for g in (args.gamma_l, args.gamma_u)]
    name = f"{Path(args.dataset).resolve().stem}_{args.base}_{args.method}"
    name += f"_gl{gammas[0]}_gu{gammas[1]}" + ("rev" if args.reverse_u else "")
    name += "_step" if args.imbalance == "step" else ""
    name += f"_beta{args.beta:g}" if args.beta is not None else ""
    name += "" if args.scale == default_scale(args.dataset) else f"_{args.scale}"
    name += "" if args.recipe == "paper" else f"_{args.recipe}"
    for key, value in vars(args).items():
        changed = value is not None and value != getattr(plain, key)
        if changed and key not in (*NAMED, *FREE, "base"):
            text = f"{value:g}" if isinstance(value, float) else value
            name += f"_{key}" if value is True else f"_{key}{text}"
    return f"runs/{name}_s{args.seed}"


# ---------------------------------------------------------------------------------------------
# flags


LARGE = 10**6       # more images in a batch, or neurons in the attractor, are a typing error


def parser(doc, *groups):
    """The flags that all training scripts share, and those that the functions `groups` add."""
    p = Parser(description=doc or "", formatter_class=argparse.RawDescriptionHelpFormatter,
               allow_abbrev=False, usage="%(prog)s [--flag value ...]", epilog=describe_defaults())
    whole, real, switch = number(int, 1, 10**12), number(float, 0), argparse.BooleanOptionalAction

    add = p.add_argument_group("data").add_argument
    add("--dataset", default="digits", metavar="NAME",
        help="digits (default: real handwritten ones, no download), synthetic, cifar10, cifar100, "
        "stl10, sun397, or a path to an .npz file or to a folder (train/<class>/*, "
        "test/<class>/*, optional unlabeled/*)")
    add("--data_dir", default=DATA_DIR, help="where the datasets are (default: data)")
    add("--gamma_l", type=number(float, 1), help="N_1 / N_K of the labeled set *")
    add("--gamma_u", type=number(float, 1), help="M_1 / M_K of the unlabeled set *")
    add("--reverse_u", action="store_true", help="unlabeled set: rarest class first")
    add("--imbalance", choices=("long", "step"), default="long",
        help="long tail (default), or half of the classes rare")
    add("--n1", type=whole, help="labeled images of the first class *")
    add("--m1", type=whole, help="unlabeled images of the first class *")
    add("--beta", type=number(float, 0, 1, above=True), help="label-ratio study: n1 is this "
        "fraction of the first class, m1 the rest; counts are rounded half up, to at least 1")
    add("--ratio", type=number(float, 1e-6), help="M_k / N_k: every class keeps its size "
        "and is divided alike, in place of n1, m1 and the gammas *")
    add("--split", choices=("random", "first"),
        help="images drawn by seed, or the first of each class **")
    add("--pool", choices=("disjoint", "union"),
        help="union: the unlabeled set holds the labeled images too **")
    add("--no_flip", action="store_true", default=None, help="views are not mirrored: for "
        "letters, road signs, medical images, and always for digits *")

    add("--recipe", choices=tuple(RECIPES), default="paper",
        help="the paper's text (default) or its released code: sets the flags marked **")

    add = p.add_argument_group("optimisation").add_argument
    add("--iters", type=whole, help="updates of theta and phi *")
    batch = number(int, 2, LARGE)
    add("--batch_size", type=batch, help="labeled and balanced images each *")
    add("--batch_size_u", type=batch, help="unlabeled images (default: batch_size) *")
    add("--lr", type=real, help="learning rate of theta's and phi's Adam *")
    add("--weight_decay", type=real, help="weights shrink by lr times this after each step *")
    add("--ema", type=number(float, 0, 1), help="decay of the averaged weights *")
    add("--bn_momentum", type=number(float, 0, 1), help="BatchNorm's momentum *")
    add("--decay_bn", action=switch, help="weight decay on BatchNorm's running statistics too **")

    add = p.add_argument_group("network").add_argument
    add("--model", metavar="NAME", help="wrn-d-w, as in wrn-28-2, or resnet34 *")
    add("--wrn_quirk", action=switch, help="the released code's WRN wiring (models.Unit) **")
    add("--image_size", type=number(int, 8, 1024), help="images are resized to a square of this "
        "many pixels; those of an own .npz stay as they are, but not with "
        "--scale mini *")

    add = p.add_argument_group("system").add_argument
    add("--scale", choices=("paper", "mini"), help="the paper's protocol, or the same shrunk for "
        "one CPU core (default: paper; mini for digits and synthetic)")
    add("--eval_every", type=whole, help="iterations between evaluations; at the end of the run "
        "they are denser, the last 20 lie in its last tenth *")
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto")
    add("--dtype", choices=("float32", "bfloat16"), default="float32",
        help="bfloat16: autocast of the network passes on CUDA (default: float32)")
    add("--compile", action="store_true", help="torch.compile the network; on one GPU its passes "
        "become CUDA graphs")
    add("--deterministic", action="store_true", help="on CUDA: the same numbers in every run, "
        "but slower; on the CPU they always are")
    add("--threads", type=number(int, 0, 1024), help="of the CPU (0: torch decides) *")
    add("--seed", type=number(int, 0, 2**31), default=0,
        help="split, batches, augmentation, initial weights (default: 0)")
    add("--out", help="run folder (default: runs/<dataset>_<base>_<method>_gl<..>_gu<..>_s<seed>, "
        "with every other flag that was changed)")
    add("--resume", action="store_true", help="continue the run in --out; start if there is none")
    add("--overwrite", action="store_true", help="replace the run in --out")
    for add_flags in groups:
        add_flags(p)
    return p


def l2ac_flags(p):
    whole, real = number(int, 1), number(float, 0)
    add = p.add_argument_group("L2AC").add_argument
    add("--method", default="l2ac", metavar="NAME",
        help="l2ac (default); none: the plain base method; attractor: theta, phi, omega trained "
        "jointly on L; single_level: jointly on L + L_bal")
    add("--omega_every", type=whole, help="iterations between omega steps **")
    add("--omega_order", choices=("after", "before"), help="after: theta, phi move first "
        "(Algorithm 1); before: omega first, judged on a virtual step of phi **")
    add("--inner", choices=("adam", "sgd"), help="the update of phi that is differentiated **")
    add("--attractor", choices=("mlp", "vector"), default="mlp", help="the paper's residual MLP "
        "(default), or K numbers that are the same for all images")
    add("--attractor_start", choices=("zero", "prior"), default="zero", help="where the bias "
        "of its output layer starts: 0 (default, the paper's), or the centred log class counts")
    add("--attractor_input", choices=("softmax", "l2"), help="how its input is scaled * **")
    add("--pseudo_from", choices=("linear", "adaptive", "auto"), help="who makes pseudo-labels: "
        "the linear classifier, the adaptive one, or the latter iff gamma_l = gamma_u **")
    add("--eta", type=real, help="learning rate of omega's Adam; where omega is trained jointly "
        "(attractor, single_level) it has --lr *")
    add("--hidden", type=number(int, 1, LARGE), help="width of the attractor *")


def fixmatch_flags(p):
    add = p.add_argument_group("FixMatch").add_argument
    add("--tau", type=number(float, 0, 1), help="confidence from which a pseudo-label counts *")
    add("--lambda_u", type=number(float, 0), default=1.0,
        help="weight of the unlabeled loss (default: 1)")
    add("--n_strong", type=number(int, 1, 16), help="strong views of each unlabeled image *")
    add("--ra_n", type=number(int, 0, 16), default=3,
        help="RandAugment: operations per image (default: 3)")
    add("--ra_m", type=number(float, 0, 30, "random"), metavar="M",
        help="RandAugment: strength, 0 to 30, or `random`: drawn for each operation *")


def mixmatch_flags(p):
    add = p.add_argument_group("MixMatch").add_argument
    add("--temperature", type=number(float, 0.1), default=0.5,
        help="of the sharpening; 1 leaves the guess as it is (default: 0.5)")
    add("--mix_alpha", type=number(float, 0.01), default=0.75,
        help="mixup coefficient from Beta(alpha, alpha) (default: 0.75)")
    add("--lambda_u", type=number(float, 0), default=75.0,
        help="weight of the unlabeled loss at the end of the run (default: 75)")


def pseudolabel_flags(p):
    add = p.add_argument_group("pseudo-labels").add_argument
    add("--tau", type=number(float, 0, 1), help="confidence from which a pseudo-label counts *")
    add("--lambda_u", type=number(float, 0), default=1.0,
        help="weight of the unlabeled loss after its ramp (default: 1)")


BASE_FLAGS = {"supervised": lambda p: None, "pseudolabel": pseudolabel_flags,
              "fixmatch": fixmatch_flags, "mixmatch": mixmatch_flags}


def describe_defaults():
    def line(name, table):
        return f"  {name}: " + ", ".join(f"{k} {v}" for k, v in table.items())
    lines = ["* default by dataset and scale, later lines win:", line("all", PROTOCOL)]
    lines += [line(name, table) for name, table in DATASETS.items()]
    lines += [line("--scale mini", MINI), line("--scale mini, digits and synthetic", MINI_SMALL),
              line("--scale mini, --attractor vector", MINI_VECTOR)]
    lines += ["** default by recipe:"] + [line(f"--recipe {r}", t) for r, t in RECIPES.items()]
    return "\n".join(lines)


def kind_of_device(name):
    """cpu, cuda or mps: what --device asks for, if this machine has it."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available.get(name, True):
        raise UserError(f"--device {name}: this machine or this PyTorch has none; use --device cpu")
    return next((kind for kind in available if available[kind]), "cpu") if name == "auto" else name


def pick_device(args):
    """The torch.device; also sets the number of CPU threads."""
    if args.threads:
        torch.set_num_threads(args.threads)
    name = kind_of_device(args.device)
    if args.dtype == "bfloat16" and name != "cuda":
        raise UserError(f"--dtype bfloat16 needs CUDA, the device is {name}; use --dtype float32")
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS asks for
        # Only a warning for the rest: augment.py's sums of whole numbers, exact in any order.
        torch.use_deterministic_algorithms(True, warn_only=True)
    args.device, args.threads = name, torch.get_num_threads()        # resolved, for config.json
    return distributed.local_device(name)
