"""What the figures share: names and colours of methods, panels by data setting, bars, heat maps.

Colours are Okabe and Ito's, which colour-blind readers can tell apart; a method has the same one
in every figure. Classes run from head to tail, dark to light. Runs are read by evaluate.py, the
figures themselves are in figures.py and training_figures.py.
"""
import io
import sys
from typing import NamedTuple

import matplotlib
import numpy as np

matplotlib.use("Agg")                                # files only, no window
from matplotlib import patheffects  # noqa: E402  (the line above comes first)
from matplotlib import pyplot as plt
from PIL import Image

from support import checkpoint

BLUE, VERMILLION, SKY, ORANGE, GREEN = "#0072B2", "#D55E00", "#56B4E9", "#E69F00", "#009E73"
PURPLE, YELLOW, GREY, BLACK = "#CC79A7", "#F0E442", "#8C8C8C", "#000000"
BOUNDS = {"lower_bound": ("Lower bound", GREY), "vanilla": ("Lower bound", GREY),
          "upper_bound": ("Upper bound", BLACK)}
BASES = {"fixmatch": ("FixMatch", BLUE), "mixmatch": ("MixMatch", SKY),
         "pseudolabel": ("Pseudo-labels", YELLOW)}
OTHERS = {"attractor": "Attractor, trained jointly", "single_level": "One level",
          "resampling": "Re-sampling", "ldam": "LDAM-DRW", "crt": "cRT", "darp": "DARP",
          "crest": "CReST", "crest+": "CReST+", "abc": "ABC", "sar": "SaR", "daso": "DASO",
          "full_unroll": "Full unroll", "la": "LA, labeled rows", "la_all": "LA, all rows",
          "la_post_hoc": "LA, post hoc", "darp_crt": "DARP + cRT", "cdmad": "CDMAD",
          "flexda": "FlexDA", "adello": "ADELLO", "acr": "ACR"}
CYCLE = [PURPLE, GREEN, YELLOW, SKY, ORANGE]
HATCHES, DASHES = ["", "///", "..."], ["-", "--", ":"]
STYLE = {"font.size": 9, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False,
         "legend.frameon": False, "figure.dpi": 150, "figure.constrained_layout.use": True}
SLANTED = dict(rotation=40, ha="right", rotation_mode="anchor")                # tick labels
WIDTH = 9                                            # inches; 1350 pixels, shown at about 900


# ---------------------------------------------------------------------------------------------
# text that users wrote: names of classes and folders


def plain(text):
    """Text as it is: matplotlib would take what stands between two $ for mathematics."""
    return text.replace("$", r"\$")


def short(name, most=20):
    """A class name to be drawn; of a long one the beginning and the end, which tell it apart."""
    name = " ".join(name.split())
    return plain(name if len(name) <= most else f"{name[:most - 8]}…{name[-7:]}")


# ---------------------------------------------------------------------------------------------
# what a group of runs looks like


class Look(NamedTuple):
    name: str
    colour: str
    turn: int            # 0, 1, 2: hatch of bars, dash of lines; tells equal colours apart


def look_of_method(base, method):
    """(name, colour) of a method."""
    if base == "supervised" and method in BOUNDS:
        return BOUNDS[method]
    if method == "none":
        return BASES[base]
    if method == "l2ac":
        return ("L2AC on MixMatch", ORANGE) if base == "mixmatch" else ("L2AC", VERMILLION)
    name = OTHERS.get(method, method)
    place = list(OTHERS).index(method) if method in OTHERS else 0
    return name + (" on MixMatch" if base == "mixmatch" else ""), CYCLE[place % len(CYCLE)]


def looks(groups):
    """A Look per group. A name that occurs twice gets the data setting or the folder added."""
    known = [look_of_method(g.runs[0].cfg.base, g.runs[0].cfg.method) for g in groups]
    brief, colours = [plain(name) for name, _ in known], [colour for _, colour in known]
    long = [f"{name}, {setting_of(g).title()}" for name, g in zip(brief, groups, strict=True)]
    found = []
    for i, group in enumerate(groups):
        full = f"{brief[i]} ({plain(group.path.name)})"
        name = next((n[i] for n in (brief, long) if n.count(n[i]) == 1), full)
        found.append(Look(name, colours[i], colours[:i].count(colours[i]) % 3))
    return found


class Setting(NamedTuple):
    """How the data of a run is distributed."""
    labeled: tuple
    unlabeled: tuple

    def title(self):
        (_, gamma_l, imbalance, beta), (_, gamma_u, reverse, ratio) = self
        parts = [rf"$\{name}={value:g}$" for name, value in (
            ("gamma_l", gamma_l), ("gamma_u", gamma_u), ("beta", beta)) if value is not None]
        parts = (["step"] if imbalance == "step" else []) + parts
        parts += [] if ratio is None else [f"ratio {ratio:g}"]
        return (", ".join(parts) or "data as it is") + (" reversed" if reverse else "")


def setting_of(group):
    cfg = group.runs[0].cfg
    return Setting((cfg.n1, cfg.gamma_l, cfg.imbalance, cfg.beta),
                   (cfg.m1, cfg.gamma_u, cfg.reverse_u, cfg.ratio))


def is_bound(group):
    cfg = group.runs[0].cfg
    return cfg.base == "supervised" and cfg.method in BOUNDS


def by_setting(groups):
    """{setting: groups}. A supervised run belongs to every setting with the same labeled set."""
    def labels_only(group):
        cfg = group.runs[0].cfg
        return cfg.base == "supervised" and cfg.method != "upper_bound"
    members = {}
    for group in sorted(groups, key=labels_only):                   # these last, else in order
        own = setting_of(group)
        homes = [s for s in members if s.labeled == own.labeled] if labels_only(group) else []
        for setting in homes or [own]:
            members.setdefault(setting, []).append(group)
    return members


def names_of(groups):
    """Class names, as they are drawn."""
    return [short(name) for name in groups[0].runs[0].dataset.names]


def labeled_counts(group):
    run = group.runs[0]
    return run.dataset.count(run.split[0]).tolist()


# ---------------------------------------------------------------------------------------------
# panels, bars, heat maps


def panels(n, height, across=2, **kwargs):
    """A figure of n panels, `across` in a row at most, each `height` inches high."""
    columns = min(n, across)
    rows = -(-n // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(WIDTH, height * rows), squeeze=False,
                                **kwargs)
    for ax in axes.flat[n:]:
        ax.set_axis_off()
    return figure, list(axes.flat[:n])


def name_classes(ax, names, below=None):
    """Class names on the x axis, with a number below each. Only some of them if there are many."""
    step = -(-len(names) // 25)
    labels = names if below is None else [
        f"{name}\n{n}" for name, n in zip(names, below, strict=True)]
    inches = ax.get_position().width * ax.get_figure().get_figwidth()
    slanted = inches / len(labels[::step]) < 0.65 or max(map(len, names)) > 12
    ax.set_xticks(range(0, len(names), step), labels[::step], **(SLANTED if slanted else {}))


def bars(ax, columns, looks, spreads=None):
    """Bars side by side: columns [G][K] for G groups, with error bars where there are spreads."""
    width = 0.84 / len(columns)
    for i, (values, look) in enumerate(zip(columns, looks, strict=True)):
        place = np.arange(len(values)) + (i - (len(columns) - 1) / 2) * width
        ax.bar(place, values, width, color=look.colour, label=look.name, hatch=HATCHES[look.turn],
               edgecolor="white", linewidth=0.3, yerr=spreads[i] if spreads else None,
               error_kw=dict(elinewidth=0.8, ecolor="#333333"))


def levels(ax, values, look):
    """A horizontal line over each class, for the bounds that bars are compared with."""
    x = np.arange(len(values))
    ax.hlines(values, x - 0.46, x + 0.46, color="white", linewidth=3, zorder=3)        # a halo
    ax.hlines(values, x - 0.46, x + 0.46, color=look.colour, linewidth=1.8, zorder=4,
              linestyle=(0, (2, 1)) if look.colour == GREY else "-", label=look.name)


def heat(ax, matrix, names, rows=None, cmap="Blues", low=0, high=100, form="{:.0f}"):
    """A matrix (R, K) as a heat map; up to 20 classes, with the values written in the cells."""
    matrix, rows = np.array(matrix), rows or names
    ax.imshow(matrix, cmap=cmap, vmin=low, vmax=high, aspect="auto")
    step = -(-len(names) // 25)
    ax.set_xticks(range(0, len(names), step), names[::step], **SLANTED)
    ax.set_yticks(range(0, len(rows), step), rows[::step])
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    for i, j in np.ndindex(*matrix.shape) if len(names) <= 20 else ():
        dark = abs(matrix[i, j] - (low + high) / 2 * (low < 0)) > 0.6 * high
        text = "–" if np.isnan(matrix[i, j]) else form.format(matrix[i, j])  # no image of class i
        ax.text(j, i, text, ha="center", va="center", fontsize=7.5,
                color="white" if dark else "black")


def course(ax, x, mean, spread, look, name=None, **kwargs):
    """A curve, with a band of one standard deviation where there are several seeds."""
    style = dict(color=look.colour, linestyle=DASHES[look.turn]) | kwargs
    ax.plot(x, mean, label=name or look.name, **style)
    if spread is not None:
        ax.fill_between(x, np.subtract(mean, spread), np.add(mean, spread), color=style["color"],
                        alpha=0.2, linewidth=0)


def class_colours(counts):
    """A colour per class, dark for the most labeled images, light for the fewest. [K] -> (K, 4)"""
    rank = np.empty(len(counts))
    rank[np.argsort(-np.asarray(counts), kind="stable")] = np.linspace(0, 0.92, len(counts))
    return plt.cm.viridis(rank)


def apart(values, gap):
    """Values moved until neighbours are `gap` apart, so that labels do not overlap."""
    order, placed = np.argsort(values), np.array(values, dtype=float)
    for _ in range(100):
        for low, high in zip(order, order[1:], strict=False):
            push = max(0, gap - (placed[high] - placed[low])) / 2
            placed[low], placed[high] = placed[low] - push, placed[high] + push
    return placed


def outlined(ax, x, y, text, **kwargs):
    ax.text(x, y, text, path_effects=[patheffects.withStroke(linewidth=2.5, foreground="white")],
            ha="center", va="center", fontsize=8, fontweight="bold", **kwargs)


def place_legend(ax):
    """Above the panel, bars before lines."""
    handles, labels = ax.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: not hasattr(handles[i], "patches"))
    ax.legend([handles[i] for i in order], [labels[i] for i in order], loc="lower left",
              bbox_to_anchor=(0, 1), ncols=5, borderaxespad=0.2)


def note_on(figure, sentence):
    print(f"{figure}: {sentence}", file=sys.stderr)


def save_figure(figure, path):
    """Drawn in memory, so that a failure leaves the file that was there."""
    memory = io.BytesIO()
    figure.savefig(memory, format=path.suffix[1:])
    if path.suffix == ".png":                        # 256 colours will do, for a third of the bytes
        small = Image.open(memory, formats=["PNG"]).convert("RGB").quantize(256, dither=0)
        memory = io.BytesIO()
        small.save(memory, "PNG", optimize=True)
    checkpoint.write(path, memory.getvalue())
