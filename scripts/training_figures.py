"""Figures of the course of training, from log.csv, and of the attractor at its end.

scripts/figures.py has the command line and the other figures.
"""
import numpy as np

from evaluate import bias_added, mean_by_class
from scripts import drawing
from support import UserError

# ---------------------------------------------------------------------------------------------
# training


def logged(group, column):
    """(iterations, mean, standard deviation or None) of a column, or of a function of a row."""
    rows = list(zip(*(run.history for run in group.runs), strict=False))   # up to the shortest run
    value = column if callable(column) else lambda row: row[column]
    table = np.array([[value(row) for row in seeds] for seeds in rows])
    table = table.reshape(-1, len(group.runs))        # (rows, seeds); no rows if stopped early
    spread = table.std(1, ddof=1) if len(group.runs) > 1 else None
    return [seeds[0]["iter"] for seeds in rows], table.mean(1), spread


def lower_loss_of(cfg):
    """Row of log.csv -> L = L_l + lambda_u L_u. Where lambda_u is ramped up, its value in the
    middle of the iterations that the row averages over."""
    ramp_length = {"mixmatch": 1, "pseudolabel": 0.4}.get(cfg.base)        # as a share of the run
    lambda_u = 0 if cfg.base == "supervised" else cfg.lambda_u

    def loss(row):
        middle = row["iter"] - ((row["iter"] - 1) % cfg.eval_every + 1) / 2
        ramp = min(1, middle / (ramp_length * cfg.iters)) if ramp_length else 1
        return row["loss_x"] + lambda_u * ramp * row["loss_u"]
    return loss


def has_upper_level(group):
    return not np.isnan(logged(group, "loss_bal")[1]).all()


def curves(groups):
    """Lower and upper loss, and bACC on the test set, over training. Fig. 10"""
    figure, axes = drawing.panels(2, 3.4)
    upper = [group for group in groups if has_upper_level(group)]
    if not upper:
        drawing.note_on("curves", "no run has an upper loss (--method l2ac has); drawn without it")
    for group, look in zip(groups, drawing.looks(groups), strict=True):
        if group in (upper or groups):
            lower = logged(group, lower_loss_of(group.runs[0].cfg))
            drawing.course(axes[0], *lower, look, f"{look.name}, lower")
        if group in upper:
            drawing.course(axes[0], *logged(group, "loss_bal"), look, f"{look.name}, upper",
                           linestyle="--")
        drawing.course(axes[1], *logged(group, "bacc"), look)
    for ax, label in zip(axes, ("loss", "bACC on the test set, %"), strict=True):
        ax.set(xlabel="iteration", ylabel=label)
        ax.legend()
    return figure


def losses(groups):
    """The upper loss beside the labeled part of the lower loss. Fig. 11"""
    found = [(group, look) for group, look in zip(groups, drawing.looks(groups), strict=True)
             if has_upper_level(group)]
    if not found:
        raise UserError("no run has an upper loss; name a run of --method l2ac")
    figure, axes = drawing.panels(len(found), 3)
    for ax, (group, look) in zip(axes, found, strict=True):
        drawing.course(ax, *logged(group, "loss_bal"), look, linestyle="--",
                       name=r"upper loss $L_{bal}$, balanced batches, linear classifier")
        drawing.course(ax, *logged(group, "loss_x"), look,
                       name="labeled lower loss $L_l$, skewed batches, with attractor")
        ax.set(xlabel="iteration", ylabel="loss", title=look.name, ylim=(0, None))
        ax.legend()
    return figure


# ---------------------------------------------------------------------------------------------
# the attractor


def with_attractor(groups):
    """[(group, its Look)] of the groups that have an attractor."""
    found = [(group, look) for group, look in zip(groups, drawing.looks(groups), strict=True)
             if group.runs[0].attractor]
    if not found:
        raise UserError("no run has an attractor; name a run of --method l2ac")
    return found


def bias(run):
    """[K][K] what the attractor adds to the logits (column) of test images of a class (row)."""
    added = bias_added(run.attractor, run.test_scores)
    return mean_by_class(added, run.dataset.test_labels).tolist()


def log_counts(group):
    """(K,) ln N_k less its mean: the difference between a skewed and a uniform prior, as logits."""
    logs = np.log(drawing.labeled_counts(group))
    return logs - logs.mean()


def attractor(groups):
    """What the attractor adds to the logits, over training and at its end. Not in the paper."""
    found = with_attractor(groups)
    figure, axes = drawing.panels(2 * len(found), 4)
    names = drawing.names_of(groups)
    for (group, look), ax, ax_end in zip(found, axes[::2], axes[1::2], strict=True):
        draw_bias_course(ax, group)
        ax.set_title(f"{look.name}, over training")
        end = np.array(group.mean(bias))
        high = np.nanmax(abs(end))                    # NaN: a class without a test image
        drawing.heat(ax_end, np.vstack([end, log_counts(group)]), names,
                     [*names, r"$\ln N_k$, centred"], "PuOr_r", -high, high, "{:.1f}")
        ax_end.axhline(len(names) - 0.5, color="black", linewidth=1)
        ax_end.set(title="at the end, added to the logit of", ylabel="test images of class")
    return figure


def draw_bias_course(ax, group):
    """bias_k over training: what is added to logit k, mean over all test images."""
    names, colours = drawing.names_of([group]), drawing.class_colours(drawing.labeled_counts(group))
    ax.set(xlabel="iteration", ylabel="added to the logit, mean over test images")
    x = logged(group, "iter")[0]
    values = np.array([logged(group, f"bias_{k}")[1] for k in range(len(names))])    # (K, rows)
    for line, colour in zip(values, colours, strict=True):
        ax.plot(x, line, color=colour)
    ax.axhline(0, color="black", linewidth=0.6)
    if len(names) > 20 or not x:
        return
    shown = np.flatnonzero(np.isfinite(values[:, -1]))    # not classes without a test image
    heights = drawing.apart(values[shown, -1], 0.05 * np.ptp(values[shown]))
    for k, height in zip(shown, heights, strict=True):
        name, colour = names[k], colours[k]
        ax.annotate(name, (x[-1], height), (4, 0), textcoords="offset points", fontsize=7,
                    va="center", color=0.8 * colour[:3])
