"""The paper's figures and some more, from finished runs.

    python -m scripts.figures runs/none_s0 runs/l2ac_s0 --out figures              all of them
    python -m scripts.figures runs/* --only story --out story.pdf                  one, by its name
    python -m scripts.figures --out assets             those of the pages that need only results/

Seeds of one setting become mean and standard deviation. Where the runs lack something for a figure
(true labels, an attractor), a message says so and the others are drawn.
"""
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from matplotlib import pyplot as plt
from sklearn.manifold import TSNE

import data
import evaluate
from scripts import report, study, tables
from scripts.collect import configuration, runs_of
from support import UserError, config, exit_cleanly, readers
from support.finished import FinishedRun

plt.switch_backend("agg")                                # files only, no window
BLUE, VERMILLION, SKY, ORANGE = "#0072B2", "#D55E00", "#56B4E9", "#E69F00"   # Okabe and Ito's
GREEN, PURPLE, GREY, BLACK = "#009E73", "#CC79A7", "#8C8C8C", "#000000"
LABELS_ONLY, ALL_LABELS = "labels only", "all labels"
NAMES = {"vanilla": LABELS_ONLY, "upper_bound": ALL_LABELS,
         "single_level": "single-level ablation"}
COLOURS = {"FixMatch": BLUE, "L2AC": VERMILLION, LABELS_ONLY: GREY, ALL_LABELS: BLACK}
CYCLE = (PURPLE, GREEN, SKY, ORANGE, BLUE, VERMILLION, GREY)
STYLE = {"font.size": 9, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False,
         "axes.titlelocation": "right", "legend.frameon": False, "legend.borderaxespad": 0.2,
         "figure.dpi": 150, "figure.constrained_layout.use": True}
ABOVE = dict(loc="lower left", bbox_to_anchor=(0, 1), ncols=5)                 # place of a legend
WIDTH = 9                                                # inches; 1350 pixels, shown at about 900


class Group:
    """Runs that differ in nothing but the seed."""

    def __init__(self, runs, folder=""):
        cfg = runs[0].cfg
        self.runs, self.first, self.cfg, self.folder = runs, runs[0], cfg, folder
        base = {"fixmatch": "FixMatch", "mixmatch": "MixMatch"}.get(cfg.base, cfg.base)
        name = NAMES.get(cfg.method, cfg.method.upper() if len(cfg.method) < 7 else cfg.method)
        self.method = base if name == "NONE" else name + " on MixMatch" * (base == "MixMatch")
        self.classes = [name[:18] for name in cfg.dataset_info["names"]]
        self.counts = runs[0].labels_per_class
        self.by_size = np.argsort(-np.array(self.counts), kind="stable")       # (K,) largest first
        stem = Path(cfg.dataset).stem
        parts = [tables.NAMES.get(stem, stem)] + ["step"] * (cfg.imbalance == "step")
        parts += [f"{key} {getattr(cfg, key):g}" for key in ("beta", "gamma_l", "gamma_u", "ratio")
                 if getattr(cfg, key)]
        self.setting = ", ".join(parts) + " reversed" * cfg.reverse_u

    def seeds(self, part):
        """(S, ...) of S seeds. part: a function of a run that gives an array"""
        return np.array([part(run) for run in self.runs])


def looks(groups):
    """[(name, colour)] of the groups. Where a method comes twice, its folders tell them apart."""
    found, cycle = [], [c for c in CYCLE if c not in {COLOURS.get(g.method) for g in groups}]
    for i, group in enumerate(groups):
        same = [g for g in groups if g.method == group.method]
        name = group.method if len(same) == 1 else f"{group.method}, {group.folder}"
        colour = COLOURS.get(group.method) if group is same[0] else None
        found.append((name, colour or cycle[i % len(cycle)]))
    return found


def by_setting(groups):
    """{setting: groups}. Runs with the labels only are in each that has their gamma_l, as last."""
    others = [group for group in groups if group.method != LABELS_ONLY] or groups
    return {o.setting: [g for g in others if g.setting == o.setting] + [
        g for g in groups if g not in others and g.cfg.gamma_l == o.cfg.gamma_l] for o in others}


def with_attractor(groups):
    found = [group for group in groups if group.first.attractor]
    if not found:
        raise UserError("no run has an attractor; name a run of --method l2ac")
    return found


def logged(group, column):
    """Iterations (T,) at which epochs end, and a column of log.csv there (S, T), of S seeds. The
    rows in between, in the last tenth of a run, average over a part of an epoch."""
    ends = [[row for row in run.history if row["iter"] % run.cfg.eval_every == 0]
            or run.history[-1:] for run in group.runs]
    ends = [rows[:min(map(len, ends))] for rows in ends]             # up to the shortest run
    values = [[row.get(column, np.nan) for row in rows] for rows in ends]
    return [row["iter"] for row in ends[0]], np.array(values)


def centred_log(counts):
    """(K,) ln N_k less its mean: the difference between a skewed and a uniform prior, as logits."""
    return np.log(counts) - np.log(counts).mean()


def panels(n, height, **kwargs):
    """A figure of n panels, two in a row, each `height` inches high."""
    rows = -(-n // 2)
    figure, axes = plt.subplots(rows, min(n, 2), figsize=(WIDTH, height * rows), squeeze=False,
                                **kwargs)
    for ax in axes.flat[n:]:
        ax.set_axis_off()
    return figure, list(axes.flat[:n])


def name_classes(ax, group, by_size=False):
    """Class names on the x axis, or by size with the numbers of labels; some of very many."""
    names, step = group.classes, -(-len(group.classes) // 50)
    turned = len(names) > 12 or max(map(len, names)) > (12 if by_size else 4)
    if by_size:
        between = ", " if turned else "\n"
        names = [f"{names[k]}{between}{group.counts[k]}" for k in group.by_size]
    ax.set_xticks(range(0, len(names), step), names[::step], parse_math=False,
                  rotation=90 if turned else 0, fontsize=7.5 if len(names) > 20 else 9)


def recall_by_class(ax, groups):
    """Bars; lines for runs with the labels only and all labels."""
    bars = [group for group in groups if group.method not in (LABELS_ONLY, ALL_LABELS)]
    first, width = (bars or groups)[0], 0.84 / max(1, len(bars))
    x = np.arange(len(first.classes))
    for group, (name, colour) in zip(groups, looks(groups), strict=True):
        seeds = group.seeds(lambda run: run.reported["recall"])[:, first.by_size]      # (S, K)
        mean = seeds.mean(0)
        if group in bars:
            shift = (bars.index(group) - (len(bars) - 1) / 2) * width
            std = seeds.std(0, ddof=min(1, len(seeds) - 1))
            whiskers = np.minimum(std, [mean, 100 - mean])                     # within 0 to 100
            ax.bar(x + shift, mean, width, color=colour, label=name, yerr=whiskers,
                   error_kw=dict(elinewidth=0.8))
        else:
            ax.hlines(mean, x - 0.46, x + 0.46, color=BLACK, label=name,
                      linestyle="-" if group.method == ALL_LABELS else "--")
    seeds = ", ".join(map(str, sorted({len(group.runs) for group in groups})))
    ax.set(ylabel="recall on the test set, %", title=f"{first.setting}, seeds: {seeds}",
           xlim=(-0.6, x[-1] + 0.6), ylim=(0, 102))
    ax.legend(**ABOVE)
    name_classes(ax, first, by_size=True)


def heat(ax, matrix, group, rows, cmap="Blues", low=0, high=100, form="{:.0f}"):
    """A matrix (R, K) as a heat map; up to 20 classes, with the values written in the cells."""
    ax.imshow(matrix, cmap=cmap, vmin=low, vmax=high, aspect="auto")
    name_classes(ax, group)
    step = -(-len(rows) // 25)
    ax.set_yticks(range(0, len(rows), step), rows[::step])
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    for (i, j), value in np.ndenumerate(matrix) if len(matrix.T) <= 20 else ():
        ax.text(j, i, "–" if np.isnan(value) else form.format(value), ha="center", va="center",
                fontsize=7.5, color="white" if abs(value) > 0.6 * high else "black")


def story(groups):
    """Recall by class, and below it what the attractor adds: the whole method in one picture."""
    group = with_attractor(groups)[0]
    size = WIDTH, 5.2 if len(group.classes) <= 20 else 6.2
    figure, (top, below) = plt.subplots(2, figsize=size, height_ratios=(5, 3), sharex=True)
    recall_by_class(top, by_setting(groups)[group.setting])
    added = group.seeds(lambda run: run.reported["bias"]).mean(0)              # (K,)
    below.bar(range(len(added)), added[group.by_size], 0.5,
              color=VERMILLION, label="what the attractor adds to a logit, mean over test images")
    below.plot(centred_log(group.counts)[group.by_size], "D", color=BLACK, markersize=4,
               label=r"$\ln N_k$, centred")
    below.axhline(0, color=BLACK, linewidth=0.6)
    below.set(ylabel="logit", xlabel="class, number $N_k$ of labeled images")
    name_classes(below, group, by_size=True)
    below.legend(**ABOVE)
    return figure


def distribution(groups):
    """Images per class in the labeled and the unlabeled set. Fig. 1a; with step imbalance Fig. 7"""
    settings = by_setting(groups)
    figure, axes = panels(len(settings), 2.4, sharex=True, sharey=True)
    for ax, (setting, (group, *_)) in zip(axes, settings.items(), strict=True):
        x, unlabeled = np.arange(len(group.counts)), group.cfg.dataset_info["unlabeled"]
        ax.bar(x - 0.2, group.counts, 0.4, color="#222222", label="labeled")
        ax.bar(x + 0.2, unlabeled, 0.4, color="#B5B5B5", label="unlabeled")
        ax.set(title=setting, ylabel="images", yscale="log", ylim=(0.5, None))
        name_classes(ax, group)
    figure.legend(*ax.get_legend_handles_labels(), loc="outside upper left", ncols=2)
    return figure


def matrices(section, xlabel, groups):
    """Confusion matrices, in percent of the true class."""
    figure, axes = panels(len(groups), 4.1)
    for ax, group, (name, _) in zip(axes, groups, looks(groups), strict=True):
        matrix = group.seeds(lambda run: getattr(run, section)["confusion"]).mean(0)
        heat(ax, matrix, group, group.classes)
        ax.set(title=name, xlabel=xlabel, ylabel="true class")
    return figure


def curves(groups):
    """Losses and bACC over training. Fig. 10, 11"""
    figure, (losses, accuracy) = panels(2, 3.6)
    for group, (name, colour) in zip(groups, looks(groups), strict=True):
        for ax, column, style in ((losses, "loss_x", "-"), (losses, "loss_bal", "--"),
                                  (accuracy, "bacc", "-")):
            x, seeds = logged(group, column)
            mean, std = seeds.mean(0), seeds.std(0, ddof=min(1, len(seeds) - 1))
            ax.plot(x, mean, color=colour, linestyle=style, marker=".", label=name)
            ax.fill_between(x, mean - std, mean + std, color=colour, alpha=0.2, linewidth=0)
    for ax, ylabel in ((losses, "labeled loss; dashed: upper loss"),
                       (accuracy, "bACC on the test set, %")):
        ax.set(xlabel="iteration", ylabel=ylabel, xlim=(0, None), ylim=(0, None))
    figure.legend(*accuracy.get_legend_handles_labels(), loc="outside upper left", ncols=4)
    return figure


def tsne(groups, points=2000):
    """t-SNE of the features of training images (EMA model, without augmentation). Fig. 5, 12, 13"""
    figure, axes = panels(len(groups), 4.2)
    for ax, group, (name, _) in zip(axes, groups, looks(groups), strict=True):
        run, colours = group.first, plt.cm.viridis(np.linspace(0, 0.92, len(group.classes)))
        index = np.union1d(*run.split)
        index = data.rng(0, "figure").permutation(index[run.dataset.labels[index] >= 0])[:points]
        z = run.on_training_images(run.model.features, index).cpu().numpy()             # (P, D)
        place = TSNE(perplexity=min(30, len(z) // 4), random_state=0).fit_transform(z)  # (P, 2)
        y = run.dataset.labels[index]
        ax.scatter(*place.T, s=7, c=colours[y], linewidths=0)
        for k in np.unique(y) if len(colours) <= 20 else ():
            ax.text(*np.median(place[y == k], 0), group.classes[k], color=0.8 * colours[k, :3],
                    ha="center", va="center", fontsize=8, fontweight="bold",
                    bbox=dict(facecolor="white", alpha=0.7, linewidth=0, pad=1))
        ax.set_title(name)
        ax.set_axis_off()
    return figure


def attractor(groups):
    """What the attractor adds to the logits, over training and at its end. Not in the paper."""
    found = with_attractor(groups)
    figure, axes = panels(2 * len(found), 4)
    for group, (name, _), ax, end in zip(found, looks(found), axes[::2], axes[1::2], strict=True):
        for k, colour in enumerate(plt.cm.viridis(np.linspace(0, 0.92, len(group.counts)))):
            x, seeds = logged(group, f"bias_{k}")
            ax.plot(x, seeds.mean(0), color=colour, marker=".", label=group.classes[k])
        order = sorted(ax.lines, key=lambda line: -line.get_ydata()[-1])
        ax.legend(handles=order[:20], loc="center left", bbox_to_anchor=(1, 0.5))
        ax.axhline(0, color=BLACK, linewidth=0.6)
        ax.set(title=f"{name}, over training", xlabel="iteration", xlim=(0, None),
               ylabel="added to the logit, mean over test images")
        added = group.seeds(lambda run: evaluate.mean_by_class(                # (S, K, K)
            evaluate.bias_added(run.attractor, run.test_scores), run.dataset.test_labels).cpu())
        matrix = np.vstack([added.mean(0), centred_log(group.counts)])
        high = np.nanmax(abs(matrix))
        heat(end, matrix, group, [*group.classes, r"$\ln N_k$"], "PuOr_r", -high, high, "{:.1f}")
        end.axhline(len(group.counts) - 0.5, color=BLACK, linewidth=1)
        end.set(title="at the end, added to the logit of", ylabel="test images of class")
    return figure


def stored(table, dataset, column):
    """Groups of the runs in results/ of four rows of a table, without their networks."""
    names, groups = readers.BUILT_IN[dataset][0] or data.load(dataset).names, []
    for row in (study.LABELS_ONLY, "FixMatch", study.L2AC, "All labels"):
        cell = next(cell for cell in tables.TABLES[table] if cell.base != "mixmatch"
                    and (cell.row, cell.dataset, cell.column) == (row, dataset, column))
        runs = [SimpleNamespace(
            cfg=SimpleNamespace(**configuration(line["command"]), dataset_info={"names": names}),
            labels_per_class=line["labels"], reported=line, attractor="bias" in line)
            for _, line in sorted(runs_of(cell).items())]
        groups += [Group(runs)] if runs else []
    return groups


def study_figure():
    """The study of docs/attractor.md on the digits: bACC, and at the end of the run what the
    attractors add, beside the two distributions that they could follow."""
    settings = {title.removeprefix("digits, "): rows for title, rows in
                study.study("attractor").items() if title.startswith("digits")}
    colours = (GREY, BLUE, ORANGE, SKY, GREEN, VERMILLION, PURPLE, BLACK)
    figure, axes = plt.subplots(2, len(settings), figsize=(WIDTH, 5.2), sharey="row")
    for (top, below), (setting, rows) in zip(axes.T, settings.items(), strict=True):
        for i, (row, colour) in enumerate(zip(rows, colours, strict=True)):
            bacc = [run["bacc"] for run in rows[row]]
            top.plot([i] * len(bacc), bacc, ".", color=colour, alpha=0.5)
            top.plot(i, np.mean(bacc), "_", color=colour, markersize=12, markeredgewidth=3,
                     label=row.strip("*w/ "))
            if "L2AC" in row:
                below.plot(np.mean([run["bias"] for run in rows[row]], 0), ".-", color=colour)
        runs = rows[study.L2AC]
        below.plot(centred_log(runs[0]["labels"]), "--", color=BLACK, label=r"$\ln N_k$, centred")
        below.plot(np.mean([run["log_eff"] for run in runs], 0), color=GREY, linewidth=3, alpha=0.6,
                   label=r"$\ln \pi_{eff,k}$ of L2AC, centred")
        top.set(xticks=[], xlim=(-0.7, len(rows) - 0.3), ylabel="bACC: seeds, mean")
        below.set(xlabel="class", xticks=range(0, 10, 3), ylabel="added to a logit")
        top.set_title(setting, loc="center")
        top.label_outer()
        below.label_outer()
    handles = [handle for ax in (top, below) for handle in ax.get_legend_handles_labels()[0]]
    figure.legend(handles=handles, loc="outside lower center", ncols=5)
    return figure


FIGURES = {                                              # of run folders
    "story": story, "distribution": distribution,
    "confusion": partial(matrices, "last", "predicted class"),                        # Fig. 3
    "pseudo_confusion": partial(matrices, "pseudo", "pseudo-label"),                  # Fig. 8, 9
    "curves": curves, "attractor": attractor, "tsne": tsne}                   # the slowest last
STORED = {                                               # of results/
    "story": lambda: story(stored("attractor", "digits", "gamma_u 1")),
    "story_cifar10": lambda: story(stored("attractor", "cifar10", "gamma_u 1")),
    "story_signs": lambda: story(stored("signs", "gtsrb", "natural tail")),
    "study": study_figure}


def main(argv=None):
    p = config.Parser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    p.add_argument("runs", nargs="*", help="run folders")
    p.add_argument("--out", type=Path, default="figures", help="folder (figures), or a file")
    p.add_argument("--only", nargs="+", metavar="NAME", help=f"some of {', '.join(FIGURES)}; "
                   f"without run folders some of {', '.join(STORED)}")
    args = p.parse_args(argv)
    runs = [FinishedRun(folder) for folder in args.runs]
    groups = [Group(members, name) for name, members in report.grouped(runs).items()]
    figures = {name: partial(draw, groups) for name, draw in FIGURES.items()} if runs else STORED
    for name in args.only or figures:
        if name not in figures:
            p.error(f"--only {name}: choose from {', '.join(figures)}")
        path = args.out if args.out.suffix in (".png", ".pdf", ".svg") else args.out / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with plt.rc_context(STYLE):
                figures[name]().savefig(path)
            print(path)
        except UserError as error:
            print(f"{name}: {error}; not drawn", file=sys.stderr)
        plt.close("all")


if __name__ == "__main__":
    exit_cleanly(main)
