"""Figures of a page with matplotlib.

Colours are from the palette of Okabe and Ito, which colour-blind readers can distinguish; markers and dashes repeat the
distinction.
"""

import io
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter
from matplotlib.transforms import offset_copy

from pql.reports.numbers import UNITS
from pql.reports.words import AXIS_WORDS, UNITS_SHORT, compact

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6f7783")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", ":", "-.")
INK, MUTED, GRID = "#1b1f27", "#5b6472", "#e3e6eb"
RATES = {"env_steps_per_s": "environment steps per second", "updates_per_s": "updates per second"}
SIZE = (4.0, 2.7)  # inches


def look() -> AbstractContextManager[None]:
    """Return the context with matplotlib's settings for all figures; enter it to draw and save."""
    return matplotlib.rc_context(
        {
            "font.family": "DejaVu Sans",
            "font.size": 8,
            "text.color": INK,
            "axes.edgecolor": MUTED,
            "axes.linewidth": 0.7,
            "axes.labelcolor": MUTED,
            "axes.labelsize": 8,
            "xtick.color": MUTED,
            "ytick.color": MUTED,
            "grid.color": GRID,
            "grid.linewidth": 0.7,
            "xtick.major.size": 3,
            "ytick.major.size": 0,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.spines.left": False,
            "axes.titlesize": 9,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.titlepad": 9,
            "axes.axisbelow": True,
            "savefig.dpi": 200,
            "text.parse_math": False,
            "axes.unicode_minus": True,
        }
    )


def style(index: int) -> dict[str, Any]:
    """Return the look of the line of the group at ``index`` in the page's order, with a marker at its end."""
    turn, place = divmod(index, len(COLORS))
    look_of = {"color": COLORS[place], "linestyle": DASHES[turn % len(DASHES)], "marker": MARKERS[place]}
    return {**look_of, "markevery": [-1], "ms": 4.5, "lw": 1.7}


class Ticks(FuncFormatter):
    """Format all ticks of an axis in the unit of the largest, with as many digits as distinguish them: 2k and 10k."""

    def __init__(self) -> None:
        super().__init__(self._write)
        self.places: Sequence[float] = ()

    def set_locs(self, locs: Any) -> None:
        self.places = locs  # matplotlib's own attribute was renamed in 3.11

    def _write(self, value: float, _: Any = None) -> str:
        at = np.asarray(self.places if len(self.places) else [value], dtype=float)
        size = float(np.abs(at).max())
        unit, suffix = next(((u, s) for u, s in UNITS_SHORT if size >= 10 * u or (size >= u and s != "k")), (1.0, ""))
        near = 1e-4 * max(float(np.ptp(at)) / unit, 1e-12)
        digits = next((d for d in range(7) if np.abs(np.round(at / unit, d) - at / unit).max() <= near), 7)
        return f"{value / unit:,.{digits}f}{suffix if value else ''}".replace("-", "−")


# -- figures --------------------------------------------------------------------------------------------------------


def learning_curves(
    task: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], labels: Sequence[str], axis: str
) -> Figure:
    """Draw the IQM over runs with its band, and every run as a thin line."""
    drawn = [g for g in task["groups"] if g["curves"].get(axis, {}).get("x")]
    unit = axis.replace("_", " ") + shown({len(g["scores"]) for g in drawn})
    fig, ax = panel(f"{task['task']}: return over {AXIS_WORDS[axis]}", unit, "return")
    for group in drawn:
        curve, look_of = group["curves"][axis], style(labels.index(group["label"]))
        mine = [
            r for r in runs if r["task"] == task["task"] and r["label"] == group["label"] and r["evals"]["return_mean"]
        ]
        alone = len(mine) == 1
        for run in mine:
            x, y = run["evals"][axis], run["evals"]["return_mean"]
            ax.plot(x, y, color=look_of["color"], lw=0.6, alpha=0.4, marker="." if alone else None, ms=3)
        band(ax, curve["x"], curve["low"], curve["high"], look_of["color"])
        ax.plot(curve["x"], curve["iqm"], label=clip(group["label"]), **look_of)
    if drawn:  # a much longer run must not determine the range of the axis
        ax.set_xlim(right=min(ax.get_xlim()[1], 1.25 * max(g["curves"][axis]["x"][-1] for g in drawn)))
    name_lines(ax)
    return fig


def shown(counts: set[int]) -> str:
    """Return a caption that explains curves and bands without the page. ``counts``: runs in each group."""
    least, most = min(counts, default=0), max(counts, default=0)
    each = f"{most}" if least == most else f"{least} to {most}"
    return f": IQM of {each} runs each, 95 % band" if most > 1 else ""


def score_intervals(task: Mapping[str, Any], labels: Sequence[str], x: str) -> Figure:
    """Draw the IQM of the scores with its interval, one row per group, and every run as a small mark."""
    groups = [g for g in task["groups"] if g["scores"]]
    fig, ax = panel(f"{task['task']}: score at {compact(task['end'][x])} {UNITS[x]}", "return")
    rows = [(g["label"], g["score"]["iqm"], g["scores"]) for g in groups]
    interval_rows(ax, rows, labels)
    return fig


def overall_intervals(overall: Mapping[str, Any], labels: Sequence[str]) -> Figure:
    """Draw the IQM of the normalised scores over all tasks."""
    fig, ax = panel("all tasks: normalised score (IQM)", "normalised score")
    interval_rows(ax, [(g["label"], g["score"]["iqm"], ()) for g in overall["groups"]], labels)
    return fig


def overall_curves(overall: Mapping[str, Any], labels: Sequence[str], axis: str) -> Figure:
    """Draw the IQM of the normalised scores over all tasks, with its band."""
    fig, ax = panel(f"all tasks: score over {AXIS_WORDS[axis]}", axis.replace("_", " "), "normalised score")
    x = overall["x"][axis]
    for group in overall["groups"]:
        of, curve = style(labels.index(group["label"])), group["curves"][axis]
        band(ax, x, curve["low"], curve["high"], of["color"])
        ax.plot(x, curve["iqm"], label=clip(group["label"]), **of)
    name_lines(ax)
    return fig


def profiles(overall: Mapping[str, Any], task: Mapping[str, Any] | None, labels: Sequence[str]) -> Figure:
    """Draw performance profiles. With a single ``task``, the axis shows returns instead of normalised scores."""
    fig, ax = panel("share of runs above a score", "return" if task else "normalised score", "share of runs")
    tau = np.array(overall["tau"])
    zero, one = (0.0, 1.0) if task is None else (task["scale"]["zero"], task["scale"]["one"])
    x = zero + tau * (one - zero)
    for group in overall["groups"]:
        of = style(labels.index(group["label"]))
        line = group["profile"]
        band(ax, x, line["low"], line["high"], of["color"])
        half = int(np.argmax(np.array(line["value"]) <= 0.5))
        ax.step(x, line["value"], where="post", label=clip(group["label"]), **{**of, "markevery": [half]})
    ax.set_ylim(-0.02, 1.02)
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    name_lines(ax)
    return fig


def rates(task: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], labels: Sequence[str], key: str) -> Figure:
    """Draw a rate for each group: the median, and every run as a small mark."""
    fig, ax = panel(f"{task['task']}: {RATES[key]}", "")
    rows = []
    for group in task["groups"]:
        mine = [r["speed"][key] for r in runs if r["task"] == task["task"] and r["label"] == group["label"]]
        if group["speed"][key] is not None:
            middle = {"value": group["speed"][key], "low": None, "high": None}
            rows.append((group["label"], middle, [v for v in mine if v is not None]))
    interval_rows(ax, rows, labels)
    most = max((v for _, middle, mine in rows for v in (middle["value"], *mine)), default=0.0)
    ax.set_xlim(0, 1.05 * most or 1.0)  # equal values have no automatic margin
    return fig


def lines(
    title: str,
    parts: Mapping[str, Mapping[str, Sequence[float]]],
    share: bool = False,
    zero: bool = False,
    unit: str | None = None,
) -> Figure:
    """Draw metrics of one run over its seconds.

    Args:
        share: from 0 to 100 %.
        zero: from 0 on.
        unit: of the vertical axis; default: ``title``.
    """
    fig, ax = panel(title, "seconds", clip(title if unit is None else unit, 40))
    for i, (name, part) in enumerate(parts.items()):
        ax.plot(part["x"], part["y"], label=clip(name), **style(i))
    if zero:
        ax.set_ylim(0, 1.1 * max(max(part["y"]) for part in parts.values()) or 1)
    if share:
        ax.set_ylim(0, 1.02)
        ax.yaxis.set_major_formatter(PercentFormatter(1))
    if len(parts) > 1:
        name_lines(ax)
    return fig


# -- pieces ---------------------------------------------------------------------------------------------------------


def panel(title: str, unit: str, vertical: str = "") -> tuple[Figure, Axes]:
    """Empty axes: horizontal rules, few ticks; ``unit`` and ``vertical`` label the two axes."""
    fig = Figure(figsize=SIZE, layout="constrained")
    ax = fig.add_subplot()
    ax.set_title("\n".join(textwrap.wrap(title, 46)))  # leaves room for the names beside the axes
    ax.set_xlabel(unit)
    ax.set_ylabel(vertical)
    ax.grid(axis="y")
    ax.margins(x=0.02, y=0.08)
    ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.yaxis.set_major_locator(MaxNLocator(5))
    ax.xaxis.set_major_formatter(Ticks())
    ax.yaxis.set_major_formatter(Ticks())
    return fig, ax


def band(ax: Axes, x: Any, low: Sequence[float | None], high: Sequence[float | None], color: str) -> None:
    if None not in (*low, *high):
        ax.fill_between(x, np.array(low, float), np.array(high, float), color=color, alpha=0.16, lw=0)


def interval_rows(
    ax: Axes, rows: Sequence[tuple[str, Mapping[str, float], Sequence[float]]], labels: Sequence[str]
) -> None:
    """Draw point and interval of each (label, aggregate, runs), the first on top."""
    below = offset_copy(ax.transData, ax.get_figure(root=True), y=-8, units="points")
    for y, (label, aggregate, scores) in enumerate(rows):
        of = style(labels.index(label))
        ax.plot(scores, [y] * len(scores), ls="", marker="|", ms=5, color=of["color"], alpha=0.6, transform=below)
        if aggregate["low"] is not None:
            ends = [aggregate["low"], aggregate["high"]]
            ax.plot(ends, [y, y], color=of["color"], lw=5, alpha=0.28, solid_capstyle="butt")
        ax.plot(aggregate["value"], y, color=of["color"], marker=of["marker"], ms=6)
    ax.update_datalim([(v, 0) for _, _, scores in rows for v in scores])  # shifted marks are not included automatically
    ax.autoscale_view()
    ax.set_yticks(range(len(rows)), [clip(label) for label, _, _ in rows], color=INK)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)
    ax.grid(axis="x")
    ax.xaxis.set_major_locator(MaxNLocator(4))


def name_lines(ax: Axes) -> None:
    """Add a legend to the right of the axes."""
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, handlelength=1.5)


def clip(text: str, most: int = 20) -> str:
    """Cut a long text in its middle: labels of algorithms often differ only at their ends."""
    head = most // 2
    return text if len(text) <= most else f"{text[: head - 1]}…{text[head - most :]}"


# -- files ----------------------------------------------------------------------------------------------------------


def png(fig: Figure) -> bytes:
    """Render as PNG, on white."""
    out = io.BytesIO()
    fig.savefig(out, format="png", facecolor="white")
    return out.getvalue()
