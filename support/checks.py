"""The one place that checks what a checkpoint holds: it may be damaged, or a stranger's.

`flaw` looks at everything but the tensors, `saved_flags` at the values of the flags, `checked`
holds every tensor against the fresh one whose place it is to take. No files.
"""
import argparse
import math

import torch

from support import UserError, config

CONTENTS = {"step": int, "config": dict, "history": list, "model": dict, "ema": dict}   # of last.pt
MAY_BE_NONE = ("gamma_l", "gamma_u", "n1", "m1", "beta", "ratio", "image_size")


def saved_flags(state, folder, methods):
    """The configuration in a checkpoint, after a check by the flags of the script that wrote it.

    methods: {base: {name: class}} of baselines/
    """
    saved = state["config"]
    base, method = (str(saved.get(key)) for key in ("base", "method"))
    if "method" not in state:                         # a run of train_*.py
        groups = [config.l2ac_flags, config.BASE_FLAGS.get(base)]
    elif method in methods.get(base, ()):
        groups = [config.BASE_FLAGS[base], methods[base][method].flags]
    else:
        raise UserError(f"{folder}: --method {method} is not in baselines/methods.py, which says "
                        f"how its network predicts; add it there")
    wrong = wrong_flag(saved, config.parser("", *groups)) if groups[-1] else "--base"
    if wrong:
        raise UserError(f"{folder}: {wrong} in its checkpoint is missing or has an impossible "
                        f"value; it is damaged or of another version, use that one or train again")
    return saved


def wrong_flag(saved, parser):
    """The first flag of a saved configuration that is missing or has a value which the parser of
    its script would not have taken; None if there is none."""
    for action in parser._actions:
        key, value = action.dest, saved.get(action.dest)
        if key == "help" or value is None and key in MAY_BE_NONE and key in saved:
            continue
        try:
            if action.nargs == 0:                    # a switch; or one of two, --x and --no-x
                good = isinstance(value, bool)
            elif action.choices is not None or action.type is None:
                good = isinstance(value, str) and value in (action.choices or [value])
            else:
                good = not isinstance(value, bool) and action.type(str(value)) == value
        except (ValueError, argparse.ArgumentTypeError):
            good = False
        if not good:
            return f"--{key}"
    return next((f"--{key}" for key in ("base", "dataset_info", "cwd") if key not in saved), None)


def flaw(state):
    """What is wrong with a checkpoint apart from its tensors and flags, or None."""
    if not isinstance(state, dict):
        return "it is not a dict"
    for key, kind in CONTENTS.items():
        if not isinstance(state.get(key), kind) or isinstance(state[key], bool):
            return f"its {key} is missing or of a wrong type"
    if state["step"] < 0 or not is_number(state.get("seconds"), 0):
        return "its step or seconds are not a count"
    commits = state.get("commits", [None])
    if not isinstance(commits, list) or not commits or not is_plain(commits):
        return "its commits are no list"
    cfg, names = state["config"], ()
    if not is_plain(cfg) or not is_number(cfg.get("iters", 1), 1):
        return "its config holds something else than plain values"
    if "dataset_info" in cfg:
        info = cfg["dataset_info"] if isinstance(cfg["dataset_info"], dict) else {}
        names, lists = info.get("names"), [info.get(key) for key in ("mean", "std", "size")]
        if not (isinstance(names, list) and len(names) > 1
                and all(isinstance(name, str) for name in names)
                and all(isinstance(x, (list, tuple)) for x in lists)
                and [len(x) for x in lists] == [3, 3, 2]
                and all(is_number(x, 0) for x in lists[0])
                and all(is_number(x, 1e-9) for x in lists[1])
                and all(is_number(x, 1) and isinstance(x, int) for x in lists[2])):
            return "its config does not describe the data"
    percent, last = ["bacc", "gm", "acc", *(f"recall_{k}" for k in range(len(names)))], 0
    for row in state["history"]:
        if not (isinstance(row, dict) and is_plain(row) and row.keys() >= {"iter", *percent}
                and all(isinstance(value, (int, float)) for value in row.values())
                and last < row["iter"] <= state["step"]
                and not any(row[key] < 0 or row[key] > 100 + 1e-9 for key in percent)):
            return "its history is not one of evaluations"
        last = row["iter"]
    return None


def is_number(x, least):
    return isinstance(x, (int, float)) and least <= x < math.inf and not isinstance(x, bool)


def is_plain(x, depth=4):
    """Whether x is nested no deeper than a configuration and has no tensors in it."""
    if isinstance(x, dict):
        return depth > 0 and all(isinstance(k, str) and is_plain(y, depth - 1)
                                 for k, y in x.items())
    if isinstance(x, (list, tuple)):
        return depth > 0 and all(is_plain(y, depth - 1) for y in x)
    return x is None or isinstance(x, (str, int, float))


# ---------------------------------------------------------------------------------------------
# tensors


def checked(part, saved, steps):
    """What `part`, a fresh module or optimizer, may load of `saved`. Raises ValueError.

    steps: iterations so far
    """
    if isinstance(part, torch.nn.Module):
        fresh = part.state_dict()
        own = {key for key in fresh if key.endswith("_extra_state")}           # not tensors
        compare(*({key: x for key, x in state.items() if key not in own}
                  if isinstance(state, dict) else state for state in (saved, fresh)))
    elif isinstance(part, torch.optim.Adam):
        return adam_state(part, saved, steps)
    return saved


def compare(saved, fresh, where="its state", equal=False):
    """Raise ValueError unless `saved` has the form of `fresh`: names, types, shapes; numbers in
    tensors have to be finite. equal: what is not a tensor has to be the same."""
    if torch.is_tensor(fresh):
        if not torch.is_tensor(saved):
            raise ValueError(f"{where} is no tensor")
        kinds = [(t.dtype, tuple(t.shape), t.layout) for t in (saved, fresh)]
        if kinds[0] != kinds[1] or saved.device.type != "cpu":
            raise ValueError(f"{where} is {kinds[0][0]} {kinds[0][1]}, not {kinds[1][0]} "
                             f"{kinds[1][1]}")
        if not saved.isfinite().all():
            raise ValueError(f"{where} is not finite")
    elif isinstance(fresh, dict):
        odd = (saved.keys() ^ fresh.keys()) if isinstance(saved, dict) else fresh.keys()
        if odd or not isinstance(saved, dict):
            raise ValueError(f"{where} lacks {min(map(str, odd), default='names')}, or should")
        for key in fresh:
            compare(saved[key], fresh[key], key if where == "its state" else f"{where} {key}",
                    equal)
    elif isinstance(fresh, (list, tuple)):
        if type(saved) is not type(fresh) or len(saved) != len(fresh):
            raise ValueError(f"{where} is not a {type(fresh).__name__} of {len(fresh)}")
        for x, y in zip(saved, fresh, strict=True):
            compare(x, y, where, equal)
    elif type(saved) is not type(fresh) or equal and saved != fresh:
        raise ValueError(f"{where} is {str(saved)[:40]}, not {fresh}")


def adam_state(optimizer, saved, steps):
    """`saved` after a check, its tensors copied into memory laid out like the parameters', which is
    what the fused step takes for granted. steps: iterations so far, an upper bound of Adam's."""
    groups, found = (saved.get(key) if isinstance(saved, dict) else None
                     for key in ("param_groups", "state"))
    fresh, state = optimizer.state_dict()["param_groups"], {}
    if not isinstance(groups, list) or [type(g) for g in groups] != [dict] * len(fresh):
        raise ValueError("it has other parameter groups")
    for theirs, ours in zip(groups, fresh, strict=True):
        for key in ours.keys() & theirs.keys():      # another version of torch has more, or fewer
            compare(theirs[key], ours[key], key, equal=True)
    places = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    if not isinstance(found, dict) or not found.keys() <= places.keys():
        raise ValueError("it has other parameters")
    for i, entries in found.items():
        form = {"step": torch.zeros(()), "exp_avg": places[i], "exp_avg_sq": places[i]}
        compare(entries, form, f"parameter {i},")
        count = float(entries["step"])
        if not (1 <= count <= steps and count.is_integer()) or (entries["exp_avg_sq"] < 0).any():
            raise ValueError(f"parameter {i} has a step or exp_avg_sq that Adam cannot have made")
        state[i] = {key: torch.empty_like(like, requires_grad=False).copy_(entries[key].detach())
                    for key, like in form.items()}
    if len({float(entries["step"]) for entries in state.values()}) > 1:
        raise ValueError("its parameters have made different numbers of steps")
    return {"state": state, "param_groups": fresh}


def tensors(x):
    """All tensors in a nested state."""
    if isinstance(x, (dict, list, tuple)):
        for y in x.values() if isinstance(x, dict) else x:
            yield from tensors(y)
    elif torch.is_tensor(x):
        yield x


def finite(predict, folder):
    """The function `predict`, but it refuses to return what is no number: weights that are finite
    may still be absurd."""
    def finite_predict(x):
        result = predict(x)
        if not result.isfinite().all():
            raise UserError(f"{folder}: its network does not predict numbers; it has diverged or "
                            f"is damaged, train it again")
        return result
    return finite_predict
