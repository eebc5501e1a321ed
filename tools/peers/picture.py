"""Curves of ``compare.py``: return over seconds or env steps, a panel per task, a line and a band per contender."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tools.peers.report import Run, timed

NAMES = {
    "pql:pql2": "PQL2",
    "pql:pql2 algo.v_per_step=8": "PQL2, v_per_step=8",
    "pql:pql": "PQL",
    "pql:ppo": "PPO (pql)",
    "rsl_rl:ppo": "PPO (rsl_rl)",
    "sb3:td3": "TD3 (SB3)",
    "sb3:sac": "SAC (SB3)",
}
COLORS = ("#0072b2", "#56b4e9", "#d55e00", "#e69f00", "#009e73", "#cc79a7", "#999999", "#000000")  # Okabe and Ito
LABELS = {"seconds": "seconds of training", "env_steps": "environment steps"}


def band(runs: Sequence[Run], axis: str) -> tuple[np.ndarray, np.ndarray]:
    """Return grid [G] and, on it, the lowest, median and highest return of the runs [3, G], as far as all have come."""
    curves = [np.array([(point[axis], point["return_mean"]) for point in timed(run)]).T for run in runs]  # [2, points]
    grid = np.linspace(max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves), 200)
    returns = np.stack([np.interp(grid, x, y) for x, y in curves])
    return grid, np.quantile(returns, [0, 0.5, 1], axis=0)


def draw(runs: Sequence[Run], axis: str, file: Path, label: str = "") -> None:
    """Draw all contenders, one panel per task, four in a row.

    Args:
        axis: seconds or env_steps (logarithmic).
        label: of the axis, instead of its own.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tasks, contenders = ([*dict.fromkeys(run[key] for run in runs)] for key in ("task", "contender"))
    columns = min(4, len(tasks))
    rows, legend_rows = -(-len(tasks) // columns), -(-len(contenders) // max(2, 2 * columns))
    height = 2.8 * rows + 0.2 + 0.2 * legend_rows
    figure, panels = pyplot.subplots(rows, columns, figsize=(3.4 * columns, height), squeeze=False)
    lines: dict[str, Any] = {}
    for panel, task in zip(panels.flat, tasks, strict=False):
        for i, name in enumerate(contenders):
            if chosen := [run for run in runs if (run["task"], run["contender"]) == (task, name)]:
                grid, (low, middle, high) = band(chosen, axis)
                color, style = COLORS[i % len(COLORS)], "-" if i < len(COLORS) else "--"
                (lines[name],) = panel.plot(grid, middle, style, color=color, linewidth=1.8)
                panel.fill_between(grid, low, high, color=color, alpha=0.15, linewidth=0)
        panel.set_title(task, fontsize=11)
        panel.set_xlabel(label or LABELS[axis], fontsize=9)
        panel.tick_params(labelsize=8)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        if axis == "env_steps":
            panel.set_xscale("log")
            panel.xaxis.set_minor_formatter("")  # within one decade matplotlib's labels overlap
    for panel in [*panels.flat][len(tasks) :]:
        panel.set_visible(False)
    panels[0, 0].set_ylabel("return (median, range over seeds)", fontsize=9)
    names = [NAMES.get(name, name) for name in lines]
    figure.legend(lines.values(), names, loc="lower center", ncol=-(-len(names) // legend_rows), frameon=False)
    figure.tight_layout(rect=(0, 0.05 + 0.22 * legend_rows / height, 1, 1))
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
