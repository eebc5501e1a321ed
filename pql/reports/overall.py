"""Numbers over all tasks, from normalised scores: aggregates, profiles, curves and probabilities of improvement."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pql.reports import stats
from pql.reports.references import Scale
from pql.reports.runs import AXES, Run

Array = NDArray[np.float64]
GRID = 50  # points of a curve
STATISTICS = {"iqm": stats.iqm, "median": stats.median, "mean": stats.mean}


def at(run: Run, axis: str, x: float | Array) -> Array:
    """Return the mean return at ``x``, in its shape: linear between evaluations, constant outside their range."""
    return np.asarray(np.interp(x, run.evals[axis], run.evals["return_mean"]))


def aggregates(strata: Sequence[Array]) -> dict[str, dict[str, float]]:
    """IQM, median and mean, each with its 95 % interval."""
    out = {}
    for name, statistic in STATISTICS.items():
        low, high = stats.interval(strata, statistic)
        out[name] = {"value": float(stats.measured(strata, statistic)), "low": float(low), "high": float(high)}
    return out


def ranking(tasks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the labels, best first: by the number of tasks they ran on, then by the IQM of the normalised scores."""
    known: dict[str, list[list[float]]] = {}
    for task in tasks:
        for group in task["groups"]:
            known.setdefault(group["label"], []).append(group.get("normalised", []))
    worth = {}
    for label, strata in known.items():
        scored = [s for s in strata if s]
        worth[label] = (len(scored), float(stats.measured(scored, stats.iqm)) if scored else 0.0)
    return sorted(known, key=lambda k: worth[k], reverse=True)


def overall(
    tasks: Sequence[Mapping[str, Any]],
    order: Sequence[str],
    runs: Mapping[str, Sequence[Run]],
    scales: Mapping[str, Scale],
) -> dict[str, Any]:
    """Return normalised scores of the algorithms that ran on every task.

    Args:
        order: labels, best first.
        runs, scales: by task; only runs with evaluations.
    """
    by_label: dict[str, list[Array]] = {}
    for label in order:
        found = [g for t in tasks for g in t["groups"] if g["label"] == label and g["scores"]]
        if tasks and len(found) == len(tasks):
            by_label[label] = [np.array(g["normalised"]) for g in found]
    known = np.concatenate([s for strata in by_label.values() for s in strata]) if by_label else np.array([0.0, 1.0])
    margin = 0.05 * float(np.ptp(known)) or 0.05
    taus = np.linspace(known.min() - margin, known.max() + margin, 201)
    groups, beats = [], improvements(by_label)
    x = {axis: shared_grid([r for t in tasks for r in runs[t["task"]]], tasks, axis) for axis in AXES}
    for label, strata in by_label.items():
        mine = [([r for r in runs[t["task"]] if r.label == label], scales[t["task"]]) for t in tasks]
        low, high = stats.interval(strata, stats.profile(taus))
        groups.append(
            {
                "label": label,
                "score": aggregates(strata),
                "runs": sum(map(len, strata)),
                "independent": min(g["independent"] for t in tasks for g in t["groups"] if g["label"] == label),
                "profile": {
                    "value": stats.measured(strata, stats.profile(taus)).tolist(),
                    "low": low.tolist(),
                    "high": high.tolist(),
                },
                "curves": {axis: normalised_curve(mine, axis, x[axis]) for axis in AXES},
                "beats": beats[label],
            }
        )
    return {
        "tasks": [t["task"] for t in tasks],
        "tau": taus.tolist(),
        "x": {k: v.tolist() for k, v in x.items()},
        "groups": groups,
    }


def shared_grid(runs: Sequence[Run], tasks: Sequence[Mapping[str, Any]], axis: str) -> Array:
    """Return points from the first evaluation that all runs have to the smallest common end of a task; else none."""
    if not tasks:
        return np.array([])
    start, end = max(float(r.evals[axis][0]) for r in runs), np.min([t["end"][axis] for t in tasks])
    return np.linspace(start, end, GRID) if end > start else np.array([])  # nan if a run does not record the axis


def normalised_curve(mine: Sequence[tuple[Sequence[Run], Scale]], axis: str, x: Array) -> dict[str, list[float]]:
    """Return the IQM over all runs and tasks of the normalised returns at ``x``, and its band.

    On ``env_steps`` this is the sample efficiency curve of Agarwal et al. 2021.
    """
    if not len(x):
        return {"iqm": [], "low": [], "high": []}
    strata = [np.stack([np.vectorize(scale)(at(r, axis, x)) for r in runs]) for runs, scale in mine]
    low, high = stats.interval(strata, stats.iqm)
    return {"iqm": stats.measured(strata, stats.iqm).tolist(), "low": low.tolist(), "high": high.tolist()}


def improvements(scores: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return for each label its probabilities of improvement over every other one, with their intervals. ``scores``: by
    label, one list of scores per task; all labels have the same tasks."""
    out: dict[str, dict[str, dict[str, float]]] = {label: {} for label in scores}
    labels = list(scores)
    for i, a in enumerate(labels):
        for b in labels[i + 1 :]:
            value = stats.improvement(scores[a], scores[b])
            low, high = stats.improvement_interval(scores[a], scores[b])
            out[a][b] = {"value": value, "low": low, "high": high}
            out[b][a] = {"value": 1 - value, "low": 1 - high, "high": 1 - low}
    return out
