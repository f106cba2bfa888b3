"""Flags of data, network and system, and one table of presets.

The numbers of an algorithm are flags of its own training file. Presets take the place of their
defaults, and a flag on the command line wins over both.
"""
import argparse
import os
import sys
from pathlib import Path

import torch

from support import UserError, distributed

PRESETS = {
    "digits": dict(n1=10, m1=100, gamma_l=5.0, gamma_u=1.0, no_flip=True),
    "synthetic": dict(n1=500, m1=500, gamma_l=100.0, gamma_u=1.0),
    "cifar10": dict(n1=1500, m1=3000, gamma_l=100.0, gamma_u=1.0),
    "cifar100": dict(n1=150, m1=300, gamma_l=10.0, gamma_u=10.0, attractor_input="l2"),
    "stl10": dict(n1=450, gamma_l=10.0),             # and its own unlabeled images
    # 300 epochs, each one pass over both sets; bn_momentum is torchvision's
    "sun397": dict(ratio=2.0, model="resnet34", image_size=224, batch_size=128, batch_size_u=256,
                   iters=69_300, eval_every=231, ema=0.99, bn_momentum=0.1, tau=0.6,
                   ra_m="random", attractor_input="l2"),
    "gtsrb": dict(ratio=80.0, no_flip=True),         # traffic signs, 27 labels down to 2
    # one CPU core, minutes: threads of so small a network wait for each other
    "--scale mini": dict(model="wrn-10-1", image_size=16, iters=2000, ema=0.99, bn_momentum=0.02,
                         eval_every=100, n_strong=1, threads=1),
    "--scale mini, digits": dict(iters=1200, batch_size=32, eval_every=60),
    "--scale mini, gtsrb": dict(iters=6000, batch_size=32, eval_every=600),
    # of a miniature: an entry moves by eta a step at most, with 1e-4 by 0.2 in the whole run
    "--attractor vector": dict(eta=1e-2),
    # minutes on one CPU core if theta is frozen
    "--weights": dict(image_size=64, batch_size=32, iters=300, eval_every=60, ema=0.99,
                      n_strong=1, bn_momentum=0.1, threads=1),
}
COUNTS = ("n1", "m1", "gamma_l", "gamma_u")
FREE = ("out", "resume", "overwrite", "iters", "device", "threads", "compile", "deterministic",
        "data_dir", "dataset_info", "changed")                  # may change on --resume


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one sentence instead of the usage text and a sentence."""

    def error(self, message):
        raise UserError(f"{message}; see --help")


def parser(doc):
    """The flags that all training scripts share."""
    p = Parser(description=doc.split("\n\n")[0], usage="%(prog)s [--flag value ...]",
               epilog="defaults are those of the --dataset and --scale given with --help",
               formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False)
    add = p.add_argument_group("data").add_argument
    add("--dataset", default="digits", metavar="NAME",
        help="digits (no download), synthetic, cifar10, cifar100, stl10, sun397, gtsrb, an .npz "
        "file, or a folder with train/<class>/*, test/<class>/* and, if you have some, unlabeled/*")
    add("--data_dir", default="data", help="where the datasets are")
    add("--gamma_l", type=float, help="N_1 / N_K of the labeled set")
    add("--gamma_u", type=float, help="M_1 / M_K of the unlabeled set")
    add("--reverse_u", action="store_true", help="unlabeled set: rarest class first")
    add("--imbalance", choices=("long", "step"), default="long", help="step: half are rare")
    add("--n1", type=int, help="labeled images of the first class")
    add("--m1", type=int, help="unlabeled images of the first class")
    add("--beta", type=float, help="n1 is this share of the first class, m1 the rest of it")
    add("--ratio", type=float, help="M_k / N_k: every class is divided alike, instead of counts")
    add("--pool", choices=("disjoint", "union"), default="disjoint",
        help="union: the unlabeled set holds the labeled images too")
    add("--no_flip", action="store_true", help="views are not mirrored: digits, road signs, ...")
    add("--hold_out", type=float, default=0.2, metavar="SHARE",
        help="of each class, for testing, if an own dataset has no test set")
    add("--skip_broken", action="store_true", help="leave out pictures that cannot be read")

    add = p.add_argument_group("network").add_argument
    add("--model", metavar="NAME", default="wrn-28-2",
        help="wrn-d-w, or a classifier of torchvision: resnet18, convnext_tiny, vit_b_16, ...")
    add("--weights", metavar="FILE", help="start from a state_dict of that network; `default`: "
        "torchvision's of ImageNet")
    add("--freeze", action="store_true", help="train the classifier only, on fixed features")
    add("--image_size", type=int, default=32, help="side; an own .npz is resized with mini only")
    add("--bn_momentum", type=float, default=0.001, help="BatchNorm's momentum")

    add = p.add_argument_group("system").add_argument
    add("--scale", choices=("paper", "mini"), help="mini: the same protocol for one CPU core")
    add("--eval_every", type=int, default=500, help="an epoch; evaluations are denser at the end")
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto", help="auto: CUDA, CPU")
    add("--dtype", choices=("float32", "bfloat16"), default="float32",
        help="of the network's passes; bfloat16 on CUDA and on CPUs that have it")
    add("--compile", action="store_true", help="torch.compile; on CUDA with CUDA graphs")
    add("--deterministic", action="store_true", help="on CUDA: the same numbers in every run")
    add("--threads", type=int, default=0, help="of the CPU (0: torch decides)")
    add("--seed", type=int, default=0, help="split, batches, augmentation, initial weights")
    add("--out", help="run folder (runs/<dataset>_<base>_<method>_<changed flags>_s<seed>)")
    add("--resume", action="store_true", help="continue the run in --out; start if there is none")
    add("--overwrite", action="store_true", help="replace the run in --out")
    return p


def read(argv, base, doc, *groups):
    """The configuration of a command line. groups: functions that add flags to the parser"""
    p = parser(doc)
    for add_flags in groups:
        add_flags(p)
    words = sys.argv[1:] if argv is None else argv
    chosen, _ = p.parse_known_args([word for word in words if word not in ("-h", "--help")])
    scale = "mini" if chosen.dataset in ("digits", "synthetic") else "paper"
    p.set_defaults(scale=scale, **presets(chosen, chosen.scale or scale))
    cfg, preset = p.parse_args(argv), vars(p.parse_args([]))
    check(cfg)
    cfg.changed = {key: value for key, value in vars(cfg).items()
                   if value is not None and value != preset[key] and key not in ("base", "method")}
    cfg.base, cfg.batch_size_u = base, cfg.batch_size_u or cfg.batch_size
    cfg.out = cfg.out or default_out(cfg)
    return cfg


def presets(chosen, scale):
    own = chosen.dataset not in PRESETS and not Path(chosen.dataset).is_dir()
    table = dict(image_size=None) if own else {}                 # an .npz file: as it is
    names = [chosen.dataset]
    if scale == "mini":
        names += ["--scale mini", f"--scale mini, {chosen.dataset}",
                  f"--attractor {getattr(chosen, 'attractor', '')}"]
    for name in names + ["--weights"] * bool(chosen.weights):
        table |= PRESETS.get(name, {})
    if chosen.weights and not chosen.freeze:
        table |= dict(lr=1e-4)
    if chosen.ratio is not None:                     # in place of counts
        table = table | dict.fromkeys(COUNTS)
    elif any(getattr(chosen, key) is not None for key in (*COUNTS, "beta")):
        table = table | dict(ratio=None)             # counts in its place
    if chosen.beta is not None:                      # it sets these two
        table = table | dict(n1=None, m1=None)
    return {key: value for key, value in table.items() if key in vars(chosen)}


def check(cfg):
    """The values that are mistyped most easily."""
    for low, high, keys in (
            (1, 1e12, "iters eval_every omega_every n_strong hidden gamma_l gamma_u"),
            (2, 1e6, "batch_size batch_size_u"), (8, 1e4, "image_size"), (0, 30, "ra_m"),
            (0, 1, "tau beta ema bn_momentum"), (1e-3, 0.9, "hold_out"), (1e-6, 1e9, "ratio"),
            (0, 1e9, "lr eta weight_decay lambda_u seed threads ra_n")):
        for key in keys.split():
            value = getattr(cfg, key, None)
            if isinstance(value, (int, float)) and not low <= value <= high:
                raise UserError(f"--{key} {value:g} is not between {low:g} and {high:g}")
    if cfg.freeze and not cfg.weights:
        print("WARNING: --freeze without --weights keeps random features", file=sys.stderr)


def default_out(cfg):
    """The length of a run is not in its name: --resume may make it longer."""
    name = f"{Path(cfg.dataset).resolve().stem}_{cfg.base}_{cfg.method}"
    for key, value in cfg.changed.items():
        if key not in ("dataset", "seed", "skip_broken", *FREE):
            text = f"{value:g}" if isinstance(value, float) else Path(str(value)).stem
            name += f"_{key}" if value is True else f"_{key}{text}"
    return f"runs/{name}_s{cfg.seed}"


def pick_device(cfg):
    """The torch.device of this process; also sets the number of CPU threads."""
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    if cfg.device == "auto":
        cfg.device = "cuda" if torch.cuda.is_available() else "cpu"
    if cfg.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this machine or this PyTorch has none; use --device cpu")
    if cfg.dtype == "bfloat16" and not (
            cfg.device == "cuda" or cfg.device == "cpu" and torch.cpu._is_avx512_bf16_supported()):
        raise UserError("--dtype bfloat16 needs CUDA or a CPU with AVX512-BF16; here it would be "
                        "emulated, so use --dtype float32")
    if cfg.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS asks for
        # Only a warning for the rest: augment.py's sums of whole numbers, exact in any order.
        torch.use_deterministic_algorithms(True, warn_only=True)
    cfg.threads = torch.get_num_threads()            # for config.json
    return distributed.start(cfg.device)
