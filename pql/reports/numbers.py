"""Computation of all numbers of a page from runs, as plain JSON; figures use only these."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pql.errors import show
from pql.reports import stats
from pql.reports.overall import aggregates, at, improvements, overall, ranking
from pql.reports.references import Scale, known, own_range, reference_of
from pql.reports.runs import AXES, Run, configured, position, shown

Array = NDArray[np.float64]
GRID = 100  # points of a group's curve
FRACTIONS = (0.5, 0.75, 0.9)  # thresholds, as shares of the range from a task's lowest to its highest evaluation
FEW = 5  # with fewer runs, a bootstrap interval is hardly more than their minimum and maximum
EVALUATED = ("eval.num_envs", "eval.epsilon")  # settings that change an evaluation
UNITS = {"seconds": "s", "env_steps": "env steps", "updates": "updates"}


def analyse(
    runs: Sequence[Run],
    x: str,
    thresholds: Sequence[float] = (),
    notes: Sequence[str] = (),
    references: Mapping[str, Scale] | None = None,
    points: Sequence[float] = (),
) -> dict[str, Any]:
    """Return all numbers of a page about ``runs``.

    Args:
        x: the axis on which runs are compared: ``seconds``, ``env_steps`` or ``updates``.
        thresholds: returns for the time-to-threshold table, instead of shares of each task's range.
        notes: additional remarks for the reader.
        references: returns that count as 0 and 1, by task; default: those of ``references.yaml``. Used if every task
            has one; if not, the scale of each task is the range of its evaluations.
        points: positions on ``x`` at which every run's return is given.
    Returns:
        Plain dicts and lists; unknown values are None. ``docs/compare.md`` describes it.
    """
    names = list(dict.fromkeys(r.task for r in runs))
    by_task = {name: [r for r in runs if r.task == name] for name in names}
    scored = {t: [r for r in mine if len(r.evals["return_mean"])] for t, mine in by_task.items()}
    ends = {t: {axis: common_end(mine, axis) for axis in AXES} for t, mine in scored.items() if mine}
    scales = {t: scale for t in names if (scale := reference_of(t, known() if references is None else references))}
    if len(scales) < len(names):
        scales = {t: own_range(*task_range(by_task[t])) for t in names}
    tasks = [task_numbers(by_task[t], ends.get(t), scales[t], x, thresholds, points) for t in names]
    order = ranking(tasks)
    for task in tasks:
        task["groups"].sort(key=lambda g: order.index(g["label"]))
    together = overall([t for t in tasks if t["end"] is not None], order, scored, scales)
    return clean(
        {
            "x": x,
            "labels": order,
            "tasks": tasks,
            "overall": together,
            "runs": [run_numbers(r) for r in runs],
            "notes": [
                *notes,
                *remarks(runs, tasks, together, x),
                *(f"{r.name}: {note}" for r in runs for note in r.notes),
            ],
        }
    )


# -- one task -------------------------------------------------------------------------------------------------------


def common_end(runs: Sequence[Run], axis: str) -> float:
    """Return the smallest last evaluation of all runs on ``axis``.

    Runs that were cut off or that ended at their target return do not shorten the others: their last evaluation is
    used for later points. nan if a run does not record the axis.
    """
    full = [r for r in runs if r.complete and not r.reached] or [r for r in runs if r.complete]
    lasts = [float(r.evals[axis][-1]) for r in full or runs]
    return float(np.max(lasts) if full and all(r.reached for r in full) else np.min(lasts))


def task_range(runs: Sequence[Run]) -> tuple[float, float]:
    """Return the lowest and the highest evaluation of the runs; nan if there is none."""
    returns = np.concatenate([r.evals["return_mean"] for r in runs])
    return (float(returns.min()), float(returns.max())) if len(returns) else (math.nan, math.nan)


def task_numbers(
    runs: Sequence[Run],
    ends: Mapping[str, float] | None,
    scale: Scale,
    x: str,
    thresholds: Sequence[float],
    points: Sequence[float],
) -> dict[str, Any]:
    """Numbers of one task: its range, its scale and its groups."""
    low, high = task_range(runs)
    levels = [{"value": float(v), "share": None} for v in thresholds] or [
        {"value": low + f * (high - low), "share": f} for f in FRACTIONS
    ]
    out: dict[str, Any] = {
        "task": runs[0].task,
        "low": low,
        "high": high,
        "scale": scale.as_dict(),
        "end": dict(ends) if ends else None,
        "thresholds": levels if ends else [],
        "points": list(points) if ends else [],
    }
    labels = list(dict.fromkeys(r.label for r in runs))
    out["groups"] = [group_numbers([r for r in runs if r.label == text], out, scale, x) for text in labels]
    for label, beats in improvements({g["label"]: [g["scores"]] for g in out["groups"] if g["scores"]}).items():
        next(g for g in out["groups"] if g["label"] == label)["beats"] = beats
    return out


def group_numbers(runs: Sequence[Run], task: Mapping[str, Any], scale: Scale, x: str) -> dict[str, Any]:
    """Numbers of one algorithm on one task."""
    scored = [r for r in runs if len(r.evals["return_mean"])]
    out: dict[str, Any] = {
        "label": runs[0].label,
        "algo": runs[0].algo,
        "runs": [r.name for r in runs],
        "seeds": [r.seed for r in runs],
        "speed": speed(runs),
        "score": None,
        "scores": [],
        "independent": independent(scored),
        "beats": {},
        "at": {},
        "curves": {},
        "time_to": [],
        "returns_at": [],
        "final": {},
    }
    if not scored:
        return out
    scores = [float(at(r, x, task["end"][x])) for r in scored]
    out |= {"scores": scores, "score": aggregates([np.array(scores)])}
    out["normalised"] = [scale(s) for s in scores]
    out["at"] = {a: iqm_at(scored, a, task["end"][a]) for a in AXES}
    out["final"] = {
        k: float(np.mean([r.evals[k][-1] for r in scored]))
        for k in ("return_mean", "return_median", "return_iqm", "length_mean", "success")
        if all(k in r.evals for r in scored)
    }
    out["curves"] = {axis: curve(scored, axis) for axis in AXES}
    out["time_to"] = [reaching(scored, level["value"]) for level in task["thresholds"]]
    out["returns_at"] = [returns_at(runs, x, point) for point in task["points"]]
    return out


def iqm_at(runs: Sequence[Run], axis: str, x: float) -> dict[str, float]:
    """IQM over the runs of the returns at ``x``, with its interval; nan if the runs do not record the axis."""
    if not math.isfinite(x):
        return {"value": math.nan, "low": math.nan, "high": math.nan}
    return aggregates([np.array([float(at(r, axis, x)) for r in runs])])["iqm"]


def returns_at(runs: Sequence[Run], axis: str, x: float) -> dict[str, Any]:
    """Each run's return at ``x``, nan before its first and after its last evaluation, and their median without nan."""
    within = [len(r.evals[axis]) and r.evals[axis][0] <= x <= r.evals[axis][-1] for r in runs]
    returns = [float(at(r, axis, x)) if inside else math.nan for r, inside in zip(runs, within, strict=True)]
    known = [v for v in returns if math.isfinite(v)]
    return {"returns": returns, "median": float(np.median(known)) if known else math.nan}


def independent(runs: Sequence[Run]) -> int:
    """Return the number of runs with different seeds; runs without a recorded seed count as different."""
    seeds = [r.seed for r in runs]
    return len({s for s in seeds if s is not None}) + seeds.count(None)


def curve(runs: Sequence[Run], axis: str) -> dict[str, list[float]]:
    """Return the IQM over the runs and its band, from the point where all have been evaluated to their common end."""
    start, end = max(float(r.evals[axis][0]) for r in runs), common_end(runs, axis)
    if not math.isfinite(start + end):  # a run that records no updates
        return {"x": [], "iqm": [], "low": [], "high": []}
    x = np.linspace(start, end, GRID) if end > start else np.array([max(start, end)])
    values = np.stack([at(r, axis, x) for r in runs])  # [runs, GRID]
    low, high = stats.interval([values], stats.iqm)
    return {
        "x": x.tolist(),
        "iqm": stats.measured([values], stats.iqm).tolist(),
        "low": low.tolist(),
        "high": high.tolist(),
    }


def reaching(runs: Sequence[Run], threshold: float) -> dict[str, Any]:
    """Return when a group first reaches a return: the median over its runs; those that never do count as infinite."""
    out: dict[str, Any] = {"of": len(runs)}
    for axis in AXES:
        times = np.array([stats.time_to(r.evals[axis], r.evals["return_mean"], threshold) for r in runs])
        reached = times[np.isfinite(times)]
        out["reached"] = max(len(reached), out.get("reached", 0))
        out[axis] = {
            "median": float(np.median(times)),
            "min": float(reached.min()) if len(reached) else math.inf,
            "max": float(times.max()),
        }
    return out


# -- speed ----------------------------------------------------------------------------------------------------------


def speed(runs: Sequence[Run]) -> dict[str, Any]:
    """Return rates and resource use of runs: medians over the runs; maxima for memory, lag and dropped evaluations."""
    each = [run_speed(r) for r in runs]

    def over(key: str, by: Any = np.median) -> float | None:
        known = [e[key] for e in each if math.isfinite(e.get(key, math.nan))]
        return float(by(known)) if known else None

    keys = list(dict.fromkeys(k for e in each for k in e))
    largest = ("memory/", "lag/", "dropped")
    values = {k: over(k, np.max if k.startswith(largest) else np.median) for k in keys}
    return {**values, "configured": {k: v for k, v in configured(runs[0].settings).items() if k in keys}}


def run_speed(run: Run) -> dict[str, float]:
    """Return rates over a run (from its first row to its last, thus without the warm-up) and summaries of its rows."""
    rows = [r for r in run.rows if "eval/return_mean" not in r] or run.rows
    first, last = position(rows[0]), position(rows[-1])
    span = last["seconds"] - first["seconds"]
    out: dict[str, float] = {}
    for key, axis in (("env_steps_per_s", "env_steps"), ("updates_per_s", "updates")):
        out[key] = (last[axis] - first[axis]) / span if span > 0 else rows[-1].get(f"throughput/{key}", math.nan)
    windows = np.diff([0.0, *(r["time/seconds"] for r in rows)])
    for key in dict.fromkeys(k for r in rows for k in r):
        values = [(r[key], w) for r, w in zip(rows, windows, strict=True) if key in r]
        if key.startswith("busy/"):
            out[key] = sum(v * w for v, w in values) / max(sum(w for _, w in values), 1e-9)
        elif key.startswith("ratio/"):
            out[key] = values[-1][0]
        elif key.startswith(("memory/", "lag/")):
            out[key] = max(v for v, _ in values)
    if "dropped" in run.evals and len(run.evals["dropped"]):
        out["dropped"] = float(run.evals["dropped"].max())
    return out


def run_numbers(run: Run) -> dict[str, Any]:
    """Numbers of one run: identity, progress and evaluations."""
    return {
        "name": run.name,
        "path": shown(run.path),
        "task": run.task,
        "label": run.label,
        "seed": run.seed,
        "complete": run.complete,
        "end": {axis: run.end(axis) for axis in AXES},
        "speed": run_speed(run),
        "machine": run.machine,
        "episodes": run.settings.get("eval.num_envs"),
        "evals": {k: v.tolist() for k, v in run.evals.items()},
        "notes": run.notes,
    }


def series(run: Run, points: int = 300) -> dict[str, dict[str, list[float]]]:
    """Return every metric of metrics.jsonl over the seconds; long runs are averaged into ``points`` equal parts."""
    out = {}
    for key in dict.fromkeys(k for r in run.rows for k in r if not k.startswith(("time/", "steps/", "updates/"))):
        values = np.array([(r["time/seconds"], r[key]) for r in run.rows if key in r])
        parts = np.array_split(values, min(points, len(values)))
        out[key] = {"x": [float(p[:, 0].mean()) for p in parts], "y": [float(p[:, 1].mean()) for p in parts]}
    return out


# -- remarks --------------------------------------------------------------------------------------------------------


def remarks(runs: Sequence[Run], tasks: Sequence[Mapping[str, Any]], together: Mapping[str, Any], x: str) -> list[str]:
    """Return caveats of the comparison, which the page states."""
    out = []
    groups = [(f"{g['label']} on {t['task']}", len(g["scores"])) for t in tasks for g in t["groups"]]
    alone = [name for name, count in groups if count == 1]
    if alone and len(runs) > 1:
        out.append(f"One run only, hence no interval: {some(alone)}.")
    if any(1 < count < FEW for _, count in groups):
        worth = "with two runs it contains the true value about one time in two, with three about three times in four"
        out.append(f"An interval over fewer than {FEW} runs is too narrow: {worth}.")
    if any(count in (2, 3) for _, count in groups):
        out.append("The IQM of two or three runs is their mean: nothing is cut off.")
    full = {g["label"] for g in together["groups"]}
    partly = dict.fromkeys(g["label"] for t in tasks for g in t["groups"] if g["scores"] and g["label"] not in full)
    if partly:
        out.append(f"Not scored on every task, hence left out of the results over all tasks: {some([*partly])}.")
    machines = sorted({r.machine for r in runs if r.machine})
    if len(machines) > 1:
        out.append(f"Seconds of different machines cannot be compared: {'; '.join(machines)}.")
    by_task = ((t, [r for r in runs if r.task == t["task"]]) for t in tasks)
    return [*out, *(text for task, mine in by_task for text in task_remarks(task, mine, x))]


def task_remarks(task: Mapping[str, Any], runs: Sequence[Run], x: str) -> list[str]:
    """Return the caveats for one task."""
    out, name = [], task["task"]
    for key in EVALUATED:
        values = {r.settings[key] for r in runs if r.settings.get(key) is not None}
        if len(values) > 1:
            out.append(f"Not evaluated alike on {name}: {key}={', '.join(map(show, sorted(values)))}.")
    for group in task["groups"]:
        twice = sorted({str(s) for s in group["seeds"] if group["seeds"].count(s) > 1})
        if twice:
            out.append(f"{group['label']} on {name}: seed {', '.join(twice)} more than once.")
    if task["end"] is None:
        return out
    for i, point in enumerate(task["points"]):
        if all(math.isnan(g["returns_at"][i]["median"]) for g in task["groups"] if g["returns_at"]):
            out.append(f"No run on {name} was evaluated before and after {point:,.10g} {UNITS[x]}.")
    end, mine = task["end"][x], [r for r in runs if len(r.evals["return_mean"])]
    short = [r.name for r in mine if r.evals[x][-1] < 0.98 * end]
    if short:
        out.append(f"Ended before the common end on {name}; the last evaluation counts: {some(short)}.")
    longer = [r.name for r in mine if r.evals[x][-1] > 1.1 * end]
    if longer:
        out.append(f"Continued beyond the common end on {name}, which does not affect the scores: {some(longer)}.")
    return out


def some(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def clean(value: Any) -> Any:
    """Replace nan and infinities, which JSON lacks, by None."""
    if isinstance(value, Mapping):
        return {k: clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [clean(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
