"""Figures over the course of training, from log.csv, and of the attractor that training leaves.

Drawn by scripts/figures.py, which holds the command line and the other figures.
"""
import numpy as np

from evaluate import bias_added
from scripts import drawing
from support import UserError

# ---------------------------------------------------------------------------------------------
# training


def log(group, column):
    """(iterations, mean, standard deviation or None) of a column, or a function of a row."""
    rows = list(zip(*(run.history for run in group.runs)))
    value = column if callable(column) else lambda row: row[column]
    table = np.array([[value(row) for row in seeds] for seeds in rows])          # (rows, seeds)
    spread = table.std(1, ddof=1) if table.shape[1] > 1 else None
    return [seeds[0]["iter"] for seeds in rows], table.mean(1), spread


def lower_loss(cfg):
    """L = L_l + lambda_u L_u of a row; where lambda_u grows, its value halfway through the row."""
    length = {"mixmatch": 1, "pseudolabel": 0.4}.get(cfg.base)                   # of the ramp
    weight = getattr(cfg, "lambda_u", 0)

    def loss(row):
        ramp = min(1, (row["iter"] - cfg.eval_every / 2) / (length * cfg.iters)) if length else 1
        return row["loss_x"] + weight * ramp * row["loss_u"]
    return loss


def has_upper_level(group):
    return bool(group.runs[0].history) and not np.isnan(log(group, "loss_bal")[1]).all()


def curves(groups):
    """Lower and upper loss, and bACC on the test set, over training. Fig. 10"""
    figure, axes = drawing.panels(2, 3.4)
    upper = [group for group in groups if has_upper_level(group)]
    if not upper:
        drawing.say("curves", "no run has an upper loss (--method l2ac has one); drawn without it")
    for group, look in zip(groups, drawing.looks(groups)):
        if group in (upper or groups):
            drawing.course(axes[0], *log(group, lower_loss(group.runs[0].cfg)), look, f"{look.name}, lower")
        if group in upper:
            drawing.course(axes[0], *log(group, "loss_bal"), look, f"{look.name}, upper", linestyle="--")
        drawing.course(axes[1], *log(group, "bacc"), look)
    for ax, label in zip(axes, ("loss", "bACC on the test set, %")):
        ax.set(xlabel="iteration", ylabel=label)
        ax.legend()
    return figure


def losses(groups):
    """The upper loss beside the labeled part of the lower loss. Fig. 11"""
    found = [(g, look) for g, look in zip(groups, drawing.looks(groups)) if has_upper_level(g)]
    if not found:
        raise UserError("no run has an upper loss; name a run of --method l2ac")
    figure, axes = drawing.panels(len(found), 3)
    for ax, (group, look) in zip(axes, found):
        drawing.course(ax, *log(group, "loss_bal"), look, r"upper loss $L_{bal}$, balanced batches, linear "
               "classifier", linestyle="--")
        drawing.course(ax, *log(group, "loss_x"), look, "labeled lower loss $L_l$, skewed batches, with "
               "attractor")
        ax.set(xlabel="iteration", ylabel="loss", title=look.name, ylim=(0, None))
        ax.legend()
    return figure


# ---------------------------------------------------------------------------------------------
# the attractor


def with_attractor(groups):
    found = [(g, look) for g, look in zip(groups, drawing.looks(groups)) if g.runs[0].attractor]
    if not found:
        raise UserError("no run has an attractor; name a run of --method l2ac")
    return found


def bias(run):
    """[K][K] what the attractor adds to the logits (column) of test images of a class (row)."""
    return bias_added(run.attractor, run.test_scores, run.dataset.test_labels).tolist()


def skew(group):
    """(K,) ln N_k less its mean: what separates a skewed from a balanced prior, as logits."""
    logs = np.log(drawing.labeled_counts(group))
    return logs - logs.mean()


def attractor(groups):
    """What the attractor adds to the logits: over training and in the end. Not in the paper."""
    found = with_attractor(groups)
    figure, axes = drawing.panels(2 * len(found), 4)
    for (group, look), ax, ax_end in zip(found, axes[::2], axes[1::2]):
        draw_bias_course(ax, group)
        names, end = drawing.names_of(groups), np.array(group.mean(bias))
        high = abs(end).max()
        drawing.heat(ax_end, np.vstack([end, skew(group)]), names, [*names, r"$\ln N_k$, centred"],
             "PuOr_r", -high, high, "{:.1f}")
        ax_end.axhline(len(names) - 0.5, color="black", linewidth=1)
        ax_end.set(title="in the end, added to the logit of", ylabel="test images of class")
        ax.set_title(f"{look.name}, over training")
    return figure


def draw_bias_course(ax, group):
    """bias_k over training: what images of class k gain in the logit of their own class."""
    names, colours = drawing.names_of([group]), drawing.class_colours(drawing.labeled_counts(group))
    ax.set(xlabel="iteration", ylabel="added to the logit of the true class")
    x = log(group, "iter")[0]
    values = np.array([log(group, f"bias_{k}")[1] for k in range(len(names))])   # (K, rows)
    for line, colour in zip(values, colours):
        ax.plot(x, line, color=colour)
    heights = drawing.apart(values[:, -1], 0.05 * np.ptp(values))
    for name, height, colour in zip(names, heights, colours) if len(names) <= 20 else ():
        ax.annotate(name, (x[-1], height), (4, 0), textcoords="offset points", fontsize=7,
                    va="center", color=0.8 * colour[:3])
    ax.axhline(0, color="black", linewidth=0.6)


