"""Formatting of numbers, and the summary sentences of a page."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pql.reports.numbers import FEW, UNITS

Numbers = Mapping[str, Any]
DASH = "–"
UNITS_SHORT = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
AXIS_WORDS = {"seconds": "wall-clock time", "env_steps": "environment steps", "updates": "gradient updates"}


def num(value: float | None, whole: bool = False) -> str:
    """Format a number: 10,232; 162.4; 0.31; None is a dash."""
    if value is None or not math.isfinite(value):
        return DASH
    size = abs(value)
    if size >= 1000 or value == int(value):
        text = f"{value:,.0f}"
    elif size >= 100:
        text = f"{value:,.{0 if whole else 1}f}"
    else:
        text = f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 0.1 else f"{value:.2g}"
    return text.replace("-", "−")


def compact(value: float | None) -> str:
    """Three or four digits and a suffix: 465k, 2.09M, 9,500."""
    if value is None or not math.isfinite(value):
        return DASH
    size = abs(value)
    for unit, suffix in UNITS_SHORT:
        if size >= 10 * unit or (size >= unit and suffix != "k"):
            return f"{value / unit:.3g}{suffix}".replace("-", "−")
    return (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}").replace("-", "−")


def percent(value: float | None) -> str:
    return DASH if value is None else f"{value:.0%}"


def spoken(value: Mapping[str, float | None]) -> str:
    """Format an aggregate and its interval."""
    text = num(value["value"])
    return text if value["low"] is None else f"{text} ({num(value['low'])} to {num(value['high'])})"


def plural(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


LONG = 60  # characters of the algorithms in a title


def title(numbers: Numbers) -> str:
    tasks, labels = [t["task"] for t in numbers["tasks"]], numbers["labels"]
    what = listed(labels)  # the legend below has them, too
    what = what if (len(labels) <= 4 and len(what) <= LONG) or len(labels) == 1 else f"{len(labels)} algorithms"
    return f"{what} on {listed(tasks) if len(tasks) <= 4 else f'{len(tasks)} tasks'}"


def subtitle(numbers: Numbers) -> str:
    runs = numbers["runs"]
    if len(runs) == 1:
        seed = [] if runs[0]["seed"] is None else [f"seed {runs[0]['seed']}"]
        return " · ".join([runs[0]["path"], *seed, *alike(runs)])
    what = [
        plural(len(runs), "run"),
        plural(len(numbers["labels"]), "algorithm"),
        plural(len(numbers["tasks"]), "task"),
        f"compared at equal {AXIS_WORDS[numbers['x']]}",
        *alike(runs),
    ]
    return " · ".join(what)


def alike(runs: Sequence[Numbers]) -> list[str]:
    """Describe the evaluations and machines of the runs, where recorded and equal for all."""
    out = []
    if (episodes := shared(runs, "episodes")) is not None:
        out.append(f"{plural(episodes, 'episode')} an evaluation")
    if (machine := shared(runs, "machine")) is not None:
        out.append(machine)
    return out


def shared(runs: Sequence[Numbers], key: str) -> Any:
    """Return the value that all runs share; None if they differ."""
    first, *others = (run[key] for run in runs)
    return first if all(value == first for value in others) else None


def findings(numbers: Numbers) -> list[tuple[str, str]]:
    """Return (task, the leading algorithm and the verdict on it), for each task and for all of them."""
    out = []
    for task in numbers["tasks"]:
        groups = sorted((g for g in task["groups"] if g["score"]), key=lambda g: -g["score"]["iqm"]["value"])
        if not groups:
            out.append((task["task"], "no run has been evaluated."))
            continue
        where = f"{num(task['end'][numbers['x']], whole=True)} {UNITS[numbers['x']]}"
        best, runs = groups[0], plural(len(groups[0]["scores"]), "run")
        if len(groups) == 1:
            text = f"{best['label']} has an IQM of {spoken(best['score']['iqm'])} at {where}, {runs}."
        else:
            ahead = f"{best['label']} is ahead at {where}, IQM {spoken(best['score']['iqm'])} over {runs}"
            text = f"{ahead}; {followed(best, groups[1])}"
        out.append((task["task"], text))
    return [*out, *over_all_tasks(numbers)]


def over_all_tasks(numbers: Numbers) -> list[tuple[str, str]]:
    """Return the finding over all tasks, if there are several with the same algorithms."""
    overall = numbers["overall"]
    groups = sorted(overall["groups"], key=lambda g: -g["score"]["iqm"]["value"])
    if len(overall["tasks"]) < 2 or len(groups) < 2:
        return []
    best, second = groups[:2]
    ahead = f"{best['label']} is ahead, normalised IQM {spoken(best['score']['iqm'])}"
    return [(f"{len(overall['tasks'])} tasks", f"{ahead}; {followed(best, second)}")]


def followed(first: Numbers, second: Numbers) -> str:
    """Return the second algorithm with its score, and the verdict."""
    return f"next {second['label']} with {spoken(second['score']['iqm'])}. {verdict(first, second)}"


def verdict(first: Numbers, second: Numbers) -> str:
    """State if ``first`` is better than ``second``; with too few seeds, how many are missing.

    It is better if the 95 % interval of the probability of improvement is above one half.
    """
    lacking = [f"{FEW - g['independent']} of {g['label']}" for g in (first, second) if g["independent"] < FEW]
    if lacking:
        return f"No verdict, which needs {FEW} seeds of each; missing: {listed(lacking)}."
    a, b = first["score"]["iqm"], second["score"]["iqm"]
    overlap = "overlap" if a["low"] <= b["high"] else "do not overlap"
    chance = first["beats"][second["label"]]
    likely = f"{chance['value']:.0%} ({chance['low']:.0%} to {chance['high']:.0%})"
    shown = f"{first['label']} is better" if chance["low"] > 0.5 else "no difference is shown"
    return (
        f"Verdict: {shown}. The intervals {overlap}; the probability that a run of {first['label']} scores above one "
        f"of {second['label']} is {likely}."
    )


def facts(run: Numbers) -> list[tuple[str, str]]:
    """Return (label, value) pairs of one run, for the top of its page."""
    evals, speed = run["evals"], run["speed"]
    names = {
        "return_mean": "return, mean",
        "return_median": "return, median",
        "return_iqm": "return, IQM",
        "length_mean": "episode length",
        "success": "success",
    }
    out = [(text, (percent if k == "success" else num)(evals[k][-1])) for k, text in names.items() if evals.get(k)]
    out += [(a.replace("_", " "), compact(run["end"][a])) for a in UNITS]
    rates = {"env_steps_per_s": "env steps per second", "updates_per_s": "updates per second"}
    return out + [(text, num(speed.get(k), whole=True)) for k, text in rates.items()]


ABOUT = {
    "curves": (
        "Thick lines: interquartile mean (IQM) over runs of each evaluation's mean undiscounted return, with its 95 % "
        "bootstrap band. Thin lines: single runs. Seconds count from the first env step on. The last figure of "
        "each task shows its scores: IQM (mark), interval (bar) and runs (strokes)."
    ),
    "curve": "Mean undiscounted return of each evaluation. Seconds count from the first env step on.",
    "scores": (
        "A run's score is the mean return of its curve at the {axis} that all finished runs of the task have reached. "
        "Small print: the 95 % percentile interval of the stratified bootstrap over runs. Normalised scores are linear "
        "in the return; their table says which returns count as 0 and 1."
    ),
    "profile": (
        "A performance profile shows, for every score, the share of runs above it: the further right, "
        "the better. If two profiles cross, neither algorithm is better at every level. The mark is at the score "
        "that half of the runs exceed."
    ),
    "points": (
        "The return of each run in small print, in the order of the table of runs: linear between two evaluations, a "
        "dash before the first and after the last. Above it the median of the runs that have a return there."
    ),
    "thresholds": (
        "First time at which the curve of evaluations reaches a return, with linear interpolation: median over the "
        "runs, with minimum and maximum below. A run that never reaches it counts as infinite; one that is above it "
        "at its first evaluation counts with the time of that evaluation."
    ),
    "speed": (
        "Medians over runs (strokes); for lag, memory and dropped evaluations, maxima. Ratios are realised "
        "ones, with the configured one below. Lag: ticks by which the acting policy is older than the newest. Busy: "
        "share of time in which a worker was at work."
    ),
    "settings": (
        "From each run's config.yaml. If the runs of one algorithm differ, all their values are listed. Seeds, "
        "directories and the task are left out. The files themselves are below the tables."
    ),
    "rest": "Everything else in metrics.jsonl.",
}
"""Explanations on the page, by section."""
