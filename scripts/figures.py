"""The paper's figures and some more, from finished runs: one function per figure.

    python -m scripts.figures runs/fixmatch_s0 runs/l2ac_s0 --out assets
    python -m scripts.figures runs/* --out assets --only recall confusion --format pdf

The run folders are all it needs. Seeds of one setting become mean and standard deviation. Where
something is missing for a figure (bounds, true labels, an attractor), a sentence on stderr says so
and the other figures are drawn. The numbers are evaluate.py's.
"""
from functools import partial
from pathlib import Path

import numpy as np
import torch

import data
import evaluate
from scripts import drawing
from scripts.training_figures import attractor, bias, curves, log_counts, losses, with_attractor
from support import UserError, augment, cli, report

# ---------------------------------------------------------------------------------------------
# data


def distribution(groups):
    """Images per class in the labeled and the unlabeled set. Fig. 1a; with step imbalance Fig. 7"""
    settings = {drawing.setting_of(group): group.runs[0] for group in reversed(groups)}
    figure, axes = drawing.panels(len(settings), 2.6, sharey=True)
    for ax, (setting, run) in zip(axes, reversed(settings.items()), strict=True):
        counts = [run.dataset.count(index).tolist() for index in run.split]
        x = np.arange(len(counts[0]))
        ax.bar(x - 0.2, counts[0], 0.4, color="#222222", label="labeled")
        ax.bar(x + 0.2, counts[1], 0.4, color="#B5B5B5", label="unlabeled")
        if not any(counts[1]):
            drawing.note_on("distribution",
                            f"the true labels of the unlabeled images of {run.folder} are not "
                            f"known, only the labeled images are drawn")
        ax.set_yscale("log")
        ax.set_ylim(bottom=1)
        ax.set_title(setting.title(), loc="right")
        drawing.name_classes(ax, drawing.names_of(groups))
    axes[0].set_ylabel("images (log scale)")
    axes[0].legend(ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
    return figure


def imbalanced_tests(groups):
    """Images per class in the three test sets of `evaluate.py --test`, gamma_t 10. Fig. 6"""
    dataset = groups[0].runs[0].dataset
    labels = dataset.test_labels.cpu().numpy()
    fewest = np.bincount(labels, minlength=dataset.num_classes).min()
    if fewest < 10:
        raise UserError(f"it needs 10 test images of each class, the smallest has {fewest}")
    figure, axes = drawing.panels(3, 2.4, across=3, sharey=True)
    for ax, kind in zip(axes, ("longtail", "reversed", "random"), strict=True):
        index = evaluate.choose_test(labels, dataset.num_classes, kind, 10, 0)
        ax.bar(range(dataset.num_classes), np.bincount(labels[index]), color="#5A5A5A")
        ax.set_title(kind, loc="right")
        drawing.name_classes(ax, drawing.names_of(groups))
    axes[0].set_ylabel("test images")
    return figure


def views(groups, columns=10):
    """A labeled image of each class, its weak view and two strong views."""
    run = groups[0].runs[0]
    index, labels = run.split[0], run.dataset.labels[run.split[0]]
    known = np.unique(labels)
    classes = known[np.unique(np.linspace(0, len(known) - 1, columns).round()).astype(int)]
    x, _ = run.dataset.take(np.array([index[labels == k][0] for k in classes]))  # (C, 3, H, W)
    n, m = (run.cfg.ra_n, run.cfg.ra_m) if run.cfg.base == "fixmatch" else (3, 4)
    weak, strong = (partial(view, normalise=run.normalise, no_flip=run.cfg.no_flip)
                    for view in (augment.weak, augment.strong))
    rows = {"image": run.normalise(x), "weak view": weak(x, view_rng(run, 0))}
    rows |= {f"strong view {i}": strong(x, view_rng(run, i), n=n, m=m) for i in (1, 2)}
    strip = np.concatenate([side_by_side(run.dataset, row) for row in rows.values()])
    side = strip.shape[0] / len(rows)
    figure, (ax,) = drawing.panels(1, drawing.WIDTH * len(rows) / len(classes) * 0.95)
    ax.imshow(strip)
    names = [drawing.names_of(groups)[k] for k in classes]
    ax.set_xticks((np.arange(len(classes)) + 0.5) * side - 0.5, names,
                  **(drawing.SLANTED if max(map(len, names)) > 12 else {}))
    ax.set_yticks((np.arange(len(rows)) + 0.5) * side - 0.5, rows)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return figure


def view_rng(run, i):
    return data.rng(run.cfg.seed, "figure", i)


def side_by_side(dataset, x):
    """(C, 3, H, W) normalised -> one picture, values in [0, 1], a white frame around each image."""
    std, mean = (np.array(v).reshape(1, 1, 1, 3) for v in (dataset.std, dataset.mean))
    x = (x.cpu().permute(0, 2, 3, 1).numpy() * std + mean).clip(0, 1)            # (C, H, W, 3)
    x = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=1)
    return np.concatenate(list(x), axis=1)


# ---------------------------------------------------------------------------------------------
# test set


def draw_by_class(ax, groups, part):
    """Bars of part(run) [K] by class; lower and upper bound as horizontal lines."""
    drawn = list(zip(groups, drawing.looks(groups), strict=True))
    methods = [(g, look) for g, look in drawn if not drawing.is_bound(g)] or drawn
    spreads = [g.deviation(part) or [0] * len(drawing.names_of(groups)) for g, _ in methods]
    several = any(len(g.runs) > 1 for g, _ in methods)
    drawing.bars(ax, [g.mean(part) for g, _ in methods], [look for _, look in methods],
                 spreads if several else None)
    for group, look in drawn:
        if (group, look) not in methods:
            drawing.levels(ax, group.mean(part), look)


def recall(groups):
    """Recall by class, mean of the last 20 evaluations, between the bounds. Fig. 1b"""
    figure = by_class("recall", groups, lambda run: run.reported["recall"], "recall, %")
    for ax in figure.axes:
        ax.set_ylim(0, 100)
    return figure


def predicted(groups):
    """Mean predicted probability of each class over the test set. Fig. 1c"""
    figure = by_class("predicted", groups, lambda run: run.last["predicted"], "mean probability, %")
    for ax in figure.axes:
        share = np.bincount(groups[0].runs[0].dataset.test_labels.cpu(),
                            minlength=len(drawing.names_of(groups)))
        ax.plot(100 * share / share.sum(), color="#333333", linestyle=":", linewidth=1,
                label="test set")
    drawing.place_legend(figure.axes[0])
    return figure


def by_class(name, groups, part, ylabel):
    """The figure `name`: bars of part(run) [K] by class, a panel for each data setting."""
    bounds = {drawing.look_of_method("supervised", group.runs[0].cfg.method)[0]
              for group in groups if drawing.is_bound(group)}
    if len(bounds) < 2:
        drawing.note_on(name, "the lower or the upper bound is not among the runs (python -m "
                           "baselines.train --base supervised --method lower_bound or "
                           "upper_bound); drawn without it")
    settings = drawing.by_setting(groups)
    figure, axes = drawing.panels(len(settings), 3.3, across=1)
    for ax, (setting, members) in zip(axes, settings.items(), strict=True):
        draw_by_class(ax, members, part)
        ax.set_ylabel(ylabel)
        ax.set_title(setting.title(), loc="right")
        drawing.name_classes(ax, drawing.names_of(groups), drawing.labeled_counts(members[0]))
        drawing.place_legend(ax)
    axes[-1].set_xlabel("class, number of labeled images")
    return figure


def confusion(groups):
    """Test images of each true class by predicted class, in percent, last checkpoint. Fig. 3"""
    return matrices(groups, lambda run: run.last["confusion"], "predicted class")


def matrices(groups, part, xlabel):
    figure, axes = drawing.panels(len(groups), 4.1)
    for i, (ax, group, look) in enumerate(
            zip(axes, groups, drawing.looks(groups), strict=True)):
        drawing.heat(ax, group.mean(part), drawing.names_of(groups))
        ax.set_title(look.name)
        ax.set_xlabel(xlabel)
        ax.set_ylabel("true class" if i % 2 == 0 else "")
    return figure


# ---------------------------------------------------------------------------------------------
# pseudo-labels, features


def semi_supervised(groups):
    found = [group for group in groups if group.runs[0].cfg.base != "supervised"]
    if not found:
        raise UserError("all runs are supervised; name a run that makes pseudo-labels")
    return found


def pseudo_confusion(groups):
    """Unlabeled images of each true class by pseudo-label, in percent. Fig. 8, 9"""
    return matrices(semi_supervised(groups), lambda run: run.pseudo["confusion"], "pseudo-label")


def pseudo_recall(groups):
    """Recall of the pseudo-labels by class. Fig. 4"""
    settings = drawing.by_setting(semi_supervised(groups))
    figure, axes = drawing.panels(len(settings), 3, sharey=True)
    for ax, (setting, members) in zip(axes, settings.items(), strict=True):
        draw_by_class(ax, members, lambda run: run.pseudo["recall"])
        ax.set_title(setting.title(), loc="right")
        drawing.name_classes(ax, drawing.names_of(groups))
    axes[0].set_ylabel("recall of pseudo-labels, %")
    shown = {label: bar for ax in axes
             for bar, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(shown.values(), shown, loc="outside upper left", ncols=6)
    return figure


def tsne(groups, points=2000):
    """t-SNE of the features of training images (EMA model, without augmentation). Fig. 5, 12, 13"""
    figure, axes = drawing.panels(len(groups), 4.2)
    names = drawing.names_of(groups)
    for ax, group, look in zip(axes, groups, drawing.looks(groups), strict=True):
        place, y = embed(group.runs[0], points)
        colours = drawing.class_colours(drawing.labeled_counts(group))
        ax.scatter(*place.T, s=7, c=colours[y], linewidths=0)
        classes = np.unique(y) if len(names) <= 20 else []
        centres = np.array([np.median(place[y == k], 0) for k in classes]).reshape(-1, 2)
        heights = drawing.apart(centres[:, 1], 0.045 * np.ptp(place[:, 1]))
        for k, x, height in zip(classes, centres[:, 0], heights, strict=True):
            drawing.outlined(ax, x, height, names[k], color=0.8 * colours[k, :3])
        ax.set_title(look.name)
        ax.set_xticks([])
        ax.set_yticks([])
        ax.spines[:].set_visible(False)
    return figure


def embed(run, points):
    """Places (P, 2) and true classes (P,) of images drawn from the labeled and unlabeled set."""
    from sklearn.manifold import TSNE
    index = np.union1d(*run.split)
    index = index[run.dataset.labels[index] >= 0]
    index = view_rng(run, 0).permutation(index)[:points]
    z = run.on_training_images(run.model.features, index)                               # (P, D)
    perplexity = min(30, (len(index) - 1) / 3)
    return (TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(z.cpu().numpy()),
            run.dataset.labels[index])


# ---------------------------------------------------------------------------------------------
# the whole


def story(groups):
    """Recall by class, and below it what the attractor adds: the whole method in one picture."""
    with_attractor(groups)                           # or there is nothing to show
    setting, members = next((s, m) for s, m in drawing.by_setting(groups).items()
                            if any(g.runs[0].attractor for g in m))
    figure, (top, below) = drawing.plt.subplots(
        2, 1, figsize=(drawing.WIDTH, 5.2), height_ratios=(5, 3), sharex=True)
    draw_by_class(top, members, lambda run: run.reported["recall"])
    (group, look), *_ = with_attractor(members)
    added = np.diagonal(group.mean(bias))
    below.bar(range(len(added)), added, 0.5, color=look.colour,
              label=f"what the attractor of {look.name} adds to the logit of the true class")
    below.plot(log_counts(group), "D", color="black", markersize=4, label=r"$\ln N_k$, centred")
    below.axhline(0, color="black", linewidth=0.6)
    top.set(ylabel="recall on the test set, %", ylim=(0, 102))
    top.set_title(setting.title(), loc="right")
    below.set(ylabel="logit", xlabel="class, number $N_k$ of labeled images")
    drawing.name_classes(below, drawing.names_of(groups), drawing.labeled_counts(group))
    for ax in (top, below):
        drawing.place_legend(ax)
    return figure


# ---------------------------------------------------------------------------------------------

FIGURES = {f.__name__: f for f in (
    story, distribution, imbalanced_tests, recall, predicted, confusion, pseudo_confusion,
    pseudo_recall, tsne, curves, losses, attractor, views)}


def draw(name, groups, path):
    """Whether the figure could be drawn; if not, a sentence says what is missing."""
    try:
        with drawing.plt.rc_context(drawing.STYLE):
            drawing.save_figure(FIGURES[name](groups), path)
    except UserError as error:
        drawing.note_on(name, f"{error}; not drawn")
        return False
    finally:
        drawing.plt.close("all")
    print(path)
    return True


def main(argv=None):
    p = cli.Parser(description=cli.title(__doc__), allow_abbrev=False)
    p.add_argument("runs", nargs="+", help="run folders")
    p.add_argument("--out", required=True, help="folder for the figures")
    p.add_argument("--format", choices=("png", "pdf", "svg"), default="png")
    p.add_argument("--only", nargs="+", choices=tuple(FIGURES), default=list(FIGURES),
                   metavar="NAME", help=f"some of {', '.join(FIGURES)}")
    p.add_argument("--unfinished", action="store_true",
                   help="average seeds that are not finished, too")
    report.device_flag(p)
    args = p.parse_args(argv)
    out = Path(args.out)
    if out.exists() and not out.is_dir():
        p.error(f"--out {out} is not a folder")
    runs = report.load_all(args.runs, evaluate.load_run, args.device)
    groups = report.grouped(runs, args.unfinished)
    out.mkdir(parents=True, exist_ok=True)
    drawn = [draw(name, groups, out / f"{name}.{args.format}")
             for name in dict.fromkeys(args.only)]
    return 0 if any(drawn) else 2


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    cli.exit_cleanly(main)
