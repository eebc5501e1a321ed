"""Statistics and tables of ``compare.py``."""

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from tools.bench.common import Row, row
from tools.peers.course import Point

Run = dict[str, Any]
DRAWS = 20_000
AT_SHARES = (0.25, 0.5, 1.0)  # of the training time, in the table by seconds
AT_STEPS = (10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000)  # in the table by env steps


def iqm(values: Sequence[float] | np.ndarray) -> float:
    """Return the mean of the middle half, with fractional weights at its ends (Agarwal et al. 2021)."""
    ordered, n = np.sort(np.asarray(values, float)), len(values)
    # Each value stands for [i/n, (i+1)/n] of the distribution; its weight is the part inside [1/4, 3/4].
    edges = np.arange(n + 1) / n
    weight = np.clip(edges[1:], 0.25, 0.75) - np.clip(edges[:-1], 0.25, 0.75)
    return float((ordered * weight).sum() / weight.sum())


def by_task(runs: list[Run], name: str) -> dict[str, np.ndarray]:
    """Return task -> mean returns of ``name``, one per seed."""
    found: dict[str, list[float]] = {}
    for run in runs:
        if run["contender"] == name:
            found.setdefault(run["task"], []).append(run["return_mean"])
    return {task: np.asarray(values) for task, values in found.items()}


def lead(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], seed: int = 0) -> tuple[float, float, float]:
    """Return by how much our returns, as means over seeds, exceed theirs, over the tasks that both have.

    For one task it is (ours - theirs) / |theirs|. For several it is the geometric mean of ours / theirs, minus 1: in
    an arithmetic mean one task with a large ratio would outweigh the others, and exchanging the two sides would not
    give the inverse. It is NaN where a mean is negative.

    Returns:
        (estimate, lower, upper), with the ends of the 95 % percentile bootstrap interval. Tasks are strata; within each
        the seeds of the two contenders are resampled separately, with replacement.
    """
    rng = np.random.default_rng(seed)
    tasks = [t for t in ours if t in theirs]

    def excess(a: list[np.ndarray], b: list[np.ndarray]) -> np.ndarray:
        means = [(x.mean(-1), y.mean(-1)) for x, y in zip(a, b, strict=True)]
        if len(means) == 1:
            [(x, y)] = means
            return (x - y) / np.abs(y)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.exp(np.mean([np.log(x) - np.log(y) for x, y in means], axis=0)) - 1

    def redrawn(values: np.ndarray) -> np.ndarray:
        return values[rng.integers(len(values), size=(DRAWS, len(values)))]

    estimate = excess([ours[t] for t in tasks], [theirs[t] for t in tasks])
    draws = excess(*zip(*((redrawn(ours[t]), redrawn(theirs[t])) for t in tasks), strict=True))
    lower, upper = np.percentile(draws, (2.5, 97.5))
    return float(estimate), float(lower), float(upper)


def rows_of(runs: list[Run]) -> list[Row]:
    """Return rows in the benchmarks' common form: per task and contender, then our leads over all tasks and each."""
    names = list(dict.fromkeys(r["contender"] for r in runs))
    returns = {name: by_task(runs, name) for name in names}
    rows = []
    for task in dict.fromkeys(r["task"] for r in runs):
        for name in (n for n in names if task in returns[n]):
            values = returns[name][task]
            for what, number in (("median", np.median(values)), ("mean", values.mean()), ("IQM", iqm(values))):
                rows.append(row(f"{task}: {name}, {what}", number, "return", len(values)))
    for mine in (n for n in names if n.startswith("pql:")):
        for peer in (n for n in names if n != mine and (n == "pql:ppo" or not n.startswith("pql:"))):
            common = [t for t in returns[mine] if t in returns[peer]]
            for label, tasks in (("all tasks", common), *((t, [t]) for t in common)):
                ours = {t: returns[mine][t] for t in tasks}
                if not ours:
                    continue
                estimate, lower, upper = lead(ours, returns[peer])
                if np.isnan([estimate, lower, upper]).any():
                    continue
                count = sum(len(v) for v in ours.values())
                for what, number in (("lead", estimate), ("lower 95 %", lower), ("upper 95 %", upper)):
                    rows.append(row(f"{mine} over {peer}, {label}: {what}", number, "(ours-theirs)/theirs", count))
    return rows


def tables(rows: list[Row]) -> str:
    """Return the rows as two Markdown tables, for a page of results."""
    lines = ["| task | contender | median | mean | IQM | seeds |", "|---|---|---|---|---|---|"]
    found = {r["name"]: r for r in rows}
    for name, r in found.items():
        if name.endswith(", median"):
            task, _, who = name.removesuffix(", median").partition(": ")
            numbers = [found[f"{task}: {who}, {what}"]["value"] for what in ("median", "mean", "IQM")]
            lines.append(f"| {task} | {who} | " + " | ".join(f"{v:,.0f}" for v in numbers) + f" | {r['runs']} |")
    lines += ["", "| ours over theirs | tasks | (ours - theirs) / theirs | 95 % interval |", "|---|---|---|---|"]
    for name, r in found.items():
        if name.endswith(": lead"):
            stem = name.removesuffix(": lead")
            pair, _, tasks = stem.partition(", ")
            low, high = (found[f"{stem}: {end} 95 %"]["value"] for end in ("lower", "upper"))
            lines.append(f"| {pair} | {tasks} | {r['value']:+.1%} | {low:+.1%} to {high:+.1%} |")
    return "\n".join(lines)


def timed(run: Run) -> list[Point]:
    """Return the run's curve. Of a run whose time was converted to env steps, ``seconds`` are those of its short run:
    of its ``clock`` as far as it goes, then at its ``rate``."""
    curve: list[Point] = run.get("curve", [run])
    if "rate" not in run:
        return curve
    steps, seconds = zip(*run["clock"], strict=True)

    def when(env_steps: int) -> float:
        beyond = max(0, env_steps - steps[-1]) / run["rate"]
        return float(np.interp(env_steps, steps, seconds)) + beyond

    return [{**point, "seconds": when(point["env_steps"])} for point in curve]


def at(curve: list[Point], axis: str, value: float) -> Point | None:
    """Return the curve's numbers where ``axis`` is ``value``, linear between evaluations; None outside of them."""
    xs = [point[axis] for point in curve]
    if not xs[0] <= value <= xs[-1]:
        return None
    names = ("seconds", "env_steps", "updates", "return_mean")
    return {name: float(np.interp(value, xs, [point[name] for point in curve])) for name in names}


def curve_table(runs: list[Run], axis: str, values: Sequence[float]) -> str:
    """Return a Markdown table of returns where ``axis`` is each of ``values``, with medians of the other counts.

    A contender that has not come that far with every seed is left out there.
    """
    lines = ["| task | contender | seconds | env steps | updates | median | mean | IQM | seeds |", "|---" * 9 + "|"]
    groups: dict[tuple[str, str], list[list[Point]]] = {}
    for run in runs:
        groups.setdefault((run["task"], run["contender"]), []).append(timed(run))
    for task, value in itertools.product(dict.fromkeys(task for task, _ in groups), values):
        for (where, who), curves in groups.items():
            found = [at(curve, axis, value) for curve in curves]
            if where != task or None in found:
                continue
            columns = {name: [point[name] for point in found if point] for name in found[0] or ()}
            counts = [statistics.median(columns[name]) for name in ("seconds", "env_steps", "updates")]
            returns = columns["return_mean"]
            numbers = [*counts, statistics.median(returns), statistics.fmean(returns), iqm(returns)]
            lines.append(f"| {task} | {who} | " + " | ".join(f"{v:,.0f}" for v in numbers) + f" | {len(found)} |")
    return "\n".join(lines)


def curve_tables(runs: list[Run]) -> str:
    """Return the tables by seconds and by env steps of runs that were evaluated on the way."""
    runs = [run for run in runs if "curve" in run and "updates" in run]
    budgets = sorted({run["budget"] for run in runs} - {0})
    shares = [share * seconds for seconds in budgets for share in AT_SHARES]
    parts = [("By seconds", "seconds", shares), ("By env steps", "env_steps", AT_STEPS)]
    tables = [(title, curve_table(runs, axis, values)) for title, axis, values in parts]
    return "\n\n".join(f"{title}:\n\n{table}" for title, table in tables if table.count("\n") > 1)
