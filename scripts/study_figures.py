"""The figures of docs/attractor.md, from the numbers of scripts/study.py.

A column of a figure is a setting. `result` is what study.study returns: {(dataset, column): {row:
[numbers of each seed]}}.
"""
import numpy as np
from matplotlib import pyplot as plt

from scripts import drawing

L2AC, PRIOR, VECTOR = "**w/ L2AC**", "w/ L2AC, prior start (ours)", "w/ L2AC, vector"
METHODS = {"FixMatch": drawing.BLUE, "w/ LA, labeled rows": drawing.YELLOW,
           "w/ LA, all rows": drawing.SKY, VECTOR: drawing.GREEN, L2AC: drawing.VERMILLION,
           PRIOR: drawing.PURPLE}
TENTHS = np.arange(10, 101, 10)                          # percent of the run


def draw(result, counts):
    """{name: figure}. counts: {(dataset, column): N_k (K,)}"""
    digits = {key: rows for key, rows in result.items() if key[0] == "digits"}
    trained = {key: rows for key, rows in result.items() if rows[L2AC]}
    return {"study": draw_accuracy(digits, counts), "study_training": draw_training(trained),
            "study_labels": draw_labels(digits)}


def panels(result, rows, height):
    """A figure and its axes (rows, settings), titled by the setting."""
    figure, axes = plt.subplots(rows, len(result), figsize=(drawing.WIDTH, height), sharey="row")
    several = len({dataset for dataset, _ in result}) > 1
    for ax, (dataset, column) in zip(axes[0], result, strict=True):
        lines = column.replace(" reversed", "\nreversed")           # narrow if there are many
        ax.set_title(f"{dataset}\n{lines}" if several else column)
    return figure, axes


def legend(figure, rows, *axes):
    """One legend below the figure: colours of the rows, and the labeled lines of some axes."""
    handles = [plt.Line2D([], [], color=METHODS[row], marker="o", markersize=4,
                          label=row.strip("*").removeprefix("w/ ")) for row in rows]
    for ax in axes:
        handles += ax.get_legend_handles_labels()[0]
    figure.legend(handles=handles, loc="outside lower center", ncols=4)


def mean(runs, key):
    return np.mean([run[key] for run in runs], axis=0)


def draw_accuracy(result, counts):
    """bACC of the methods, and what the attractors add by class at the end of the run, beside the
    two distributions they could follow."""
    figure, axes = panels(result, 2, 5.2)
    for (above, below), (key, rows) in zip(axes.T, result.items(), strict=True):
        for i, (row, colour) in enumerate(METHODS.items()):
            values = [run["bacc"] for run in rows[row]]
            above.plot([i] * len(values), values, ".", color=colour, alpha=0.5)
            if values:
                above.plot(i, np.mean(values), "_", color=colour, markersize=16, markeredgewidth=3)
        for row, style in (("Labels alone", ":"), ("All true labels", "--")):
            if rows[row]:
                above.axhline(mean(rows[row], "bacc"), color="grey", linestyle=style, linewidth=1,
                              label=row)
        above.set(xticks=[], xlim=(-0.7, len(METHODS) - 0.3))
        log_n = np.log(counts[key])
        below.axhline(0, color="black", linewidth=0.6)
        below.plot(log_n - log_n.mean(), "--", color="black", linewidth=1,
                   label=r"$\ln N_k$, centred")
        if rows[L2AC]:
            below.plot(mean(rows[L2AC], "log_eff"), color="grey", linewidth=3, alpha=0.5,
                       label=r"$\ln \pi_{eff,k}$ of L2AC, centred")
        for row in (L2AC, PRIOR, VECTOR):
            if rows[row]:
                below.plot(mean(rows[row], "bias"), ".-", color=METHODS[row])
        below.set(xlabel="class", xticks=range(0, len(log_n), 3))
    axes[0, 0].set_ylabel("bACC: seeds, mean")
    axes[1, 0].set_ylabel("added to a logit")
    legend(figure, METHODS, *axes[:, 0])
    return figure


def draw_training(result):
    """What the attractors add over training: slope on log N_k beside the predicted one, R^2 of both
    fits, share that varies between images. Means over seeds."""
    figure, axes = panels(result, 3, 6.6)
    for (slope, r2, varies), rows in zip(axes.T, result.values(), strict=True):
        for row in (L2AC, PRIOR, VECTOR):
            if rows[row]:
                course = {key: np.mean([[tenth[key] for tenth in run["tenths"]]
                                        for run in rows[row]], axis=0)
                          for key in ("slope_n", "r2_n", "r2_eff", "predicted")}
                slope.plot(TENTHS, course["slope_n"], ".-", color=METHODS[row])
                varies.plot(TENTHS, mean(rows[row], "varies_tenths"), ".-", color=METHODS[row])
                if row == L2AC:
                    slope.plot(TENTHS, course["predicted"], color="grey", linewidth=3, alpha=0.5,
                               label=r"slope of $\ln \pi_{eff,k}$, L2AC")
                    r2.plot(TENTHS, course["r2_n"], "--", color="black", linewidth=1,
                            label=r"R² on $\ln N_k$, L2AC")
                    r2.plot(TENTHS, course["r2_eff"], ".-", color=METHODS[row],
                            label=r"R² on $\ln \pi_{eff,k}$, L2AC")
        slope.axhline(0, color="black", linewidth=0.6)
        varies.set(xlabel="% of the run")
    for ax, text in zip(axes[:, 0], (r"slope on $\ln N_k$", "R²", "varies between\nimages, %"),
                        strict=True):
        ax.set_ylabel(text)
    legend(figure, (L2AC, PRIOR, VECTOR), *axes[:2, 0])
    return figure


def draw_labels(result):
    """Pseudo-labels by class at the end of the run: how many images of a class count with the right
    label, and how many of the labels of a class that count are right. Over all seeds."""
    figure, axes = panels(result, 2, 5)
    for (found, right), rows in zip(axes.T, result.values(), strict=True):
        for row, colour in METHODS.items():
            if rows[row]:
                found.plot(mean(rows[row], "found_k"), ".-", color=colour)
                kept, correct = (mean(rows[row], key) for key in ("known_k", "right_k"))   # (K,)
                some = kept > 0                          # on some seed a label of the class counts
                right.plot(np.flatnonzero(some), 100 * correct[some] / kept[some], ".-",
                           color=colour)
        found.set_xticks(range(0, 10, 3))
        right.set(xlabel="class", xticks=range(0, 10, 3))
    axes[0, 0].set_ylabel("images of the class that\ncount and are right, %")
    axes[1, 0].set_ylabel("labels of the class that\ncount: right, %")
    legend(figure, METHODS)
    return figure
