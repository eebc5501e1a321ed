"""Symptoms in the metrics of a run, each with a remedy: sections of docs/troubleshooting.md, which says more.

The remedies are texts of this module, since a report is read on machines that have no documentation.
"""

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pql.reports.runs import configured

Row = Mapping[str, float]
ENOUGH = 30  # rows with training returns, before a trend is judged
UPDATES = 5_000  # critic updates before a flat return, or growing values, are a symptom
OFF = 0.02  # relative error of an update ratio; the realised ones are exact but at the very start
GROWTH_GIB = 0.5
LATE = 8  # ticks between the weights that acted and those that learn


class Symptom(NamedTuple):
    """A symptom that a run shows.

    Attributes:
        section: its number in docs/troubleshooting.md.
        text: the metric, its value, what it means.
        remedy: what to change.
        anchor: of the section, within the page of the documentation.
    """

    section: int
    text: str
    remedy: str
    anchor: str


class Detector(NamedTuple):
    """A section of docs/troubleshooting.md that can be detected in metrics.

    Attributes:
        title: its heading.
        check: returns the metric, its value and what it means, or None if the run does not have the symptom.
        remedy: what to change.
    """

    title: str
    check: "Callable[[RunMetrics], str | None]"
    remedy: str


class RunMetrics(NamedTuple):
    """A run's metrics: the newest value of each, all values of each in order, and the settings with dotted names."""

    newest: Row
    series: Mapping[str, Sequence[float]]
    settings: Mapping[str, Any]

    def above(self, name: str, limit: float) -> bool:
        return self.newest.get(name, limit) > limit


def flat(run: RunMetrics) -> str | None:
    returns = run.series.get("train/return_mean", ())
    if len(returns) < ENOUGH or not run.above("updates/v", UPDATES):
        return None
    third = len(returns) // 3
    begin, end = statistics.median(returns[:third]), statistics.median(returns[-third:])
    if end > begin + 0.05 * abs(begin):
        return None
    return f"train/return_mean: {end:,.4g} in the last third of the run, {begin:,.4g} in the first"


def frozen(run: RunMetrics) -> str | None:
    share = run.newest.get("policy/frozen", 0.0)
    if share <= 0.5:
        return None
    return f"policy/frozen: {share:.0%} of the action components stay at one end of their range"


def exploding(run: RunMetrics) -> str | None:
    """Values more than double from the second quarter of the run to the third, and to the fourth; returns grow less.

    Values that approach a limit, as those of a healthy critic do from 0, grow less from quarter to quarter.
    """
    values = run.series.get("value/q", ())
    if len(values) < ENOUGH or not run.above("updates/v", UPDATES):
        return None
    sizes = quarters(values)
    returns = quarters(run.series.get("train/return_mean", ())) or [0.0] * 4
    if min(sizes[1:3]) <= 0 or min(sizes[3] / sizes[2], sizes[2] / sizes[1]) < 2:
        return None
    growth = sizes[3] / sizes[1]
    if returns[3] > growth / 2 * returns[1] > 0:
        return None
    return f"value/q: {values[-1]:,.4g}, {growth:,.0f} times the values of the run's second quarter"


def quarters(values: Sequence[float]) -> list[float]:
    """Return the medians of the absolute values in each quarter of a series; [] for fewer than four values."""
    size = len(values) // 4
    return [statistics.median(map(abs, values[i * size : (i + 1) * size])) for i in range(4)] if size else []


def cut_off(run: RunMetrics) -> str | None:
    atoms, low, high = (run.settings.get(f"algo.critic.{name}") for name in ("atoms", "v_min", "v_max"))
    value = run.newest.get("value/q")
    if not (isinstance(atoms, int) and atoms > 1 and isinstance(low, float | int) and isinstance(high, float | int)):
        return None
    distance = (high - low) / (atoms - 1)
    if value is None or low + distance < value < high - distance:
        return None
    return f"value/q: {value:.4g} is at the end of the critic's range, {low:g} to {high:g}"


def collapsed(run: RunMetrics) -> str | None:
    returns = run.series.get("eval/return_mean", ())
    if len(returns) < 3 or max(returns) <= 0 or returns[-1] > 0.5 * max(returns):
        return None
    return f"eval/return_mean: {returns[-1]:,.4g}, less than half of its best, {max(returns):,.4g}"


def no_values(run: RunMetrics) -> str | None:
    explained = run.newest.get("value/explained_variance", 1.0)
    if explained > 0.05 or len(run.series["value/explained_variance"]) < ENOUGH:
        return None
    return f"value/explained_variance: {explained:.2f}, the values predict nothing"


def collector_bound(run: RunMetrics) -> str | None:
    return bound(run, ("busy/collector",), ("busy/v", "busy/p"))


def learner_bound(run: RunMetrics) -> str | None:
    return bound(run, ("busy/v", "busy/p"), ("busy/collector",))


def bound(run: RunMetrics, busy: Sequence[str], idle: Sequence[str]) -> str | None:
    """Return a text if one of ``busy`` works all the time, and every one of ``idle`` less than half of it."""
    worst = max(busy, key=lambda name: run.newest.get(name, 0.0))
    others = [run.newest[name] for name in idle if name in run.newest]
    if run.newest.get(worst, 0.0) < 0.9 or not others or max(others) > 0.5:
        return None
    return f"{worst}: {run.newest[worst]:.0%}, while {' and '.join(idle)} wait more than half of the time"


def ratios_off(run: RunMetrics) -> str | None:
    if not run.above("updates/v", UPDATES):
        return None
    wanted = {name: value for name, value in configured(run.settings).items() if name in run.newest and value > 0}
    off = {name: value for name, value in wanted.items() if abs(run.newest[name] / value - 1) > OFF}
    return "; ".join(f"{name}: {run.newest[name]:.4g}, configured: {value:.4g}" for name, value in off.items()) or None


def growing_memory(run: RunMetrics) -> str | None:
    """Memory grows until the end of the run, though replay was full by the middle of it."""
    steps, capacity = run.series.get("steps/env", ()), run.settings.get("replay.capacity")
    for name in ("memory/host_gib", "memory/gpu_gib"):
        values = run.series.get(name, ())
        half = len(values) // 2
        if len(values) < ENOUGH or (isinstance(capacity, int) and steps and steps[len(steps) // 2] < capacity):
            continue
        middle, end = values[half], values[-1]
        shortly_before = values[-(len(values) // 10)]
        if end > 1.2 * middle and end > middle + GROWTH_GIB and end > shortly_before:
            return f"{name}: {end:.2f} GiB, {middle:.2f} in the middle of the run, and still growing"
    return None


def dropped(run: RunMetrics) -> str | None:
    names = {
        "env/dropped": "rows were left out, since they were not finite",
        "replay/bootstrap_lost": "windows ended in a truncation without a final observation",
        "rollout/bootstrap_lost": "rows were truncated without a final observation",
    }
    texts = [f"{name}: {run.newest[name]:,.0f} {what}" for name, what in names.items() if run.above(name, 0)]
    return "; ".join(texts) or None


def skipped(run: RunMetrics) -> str | None:
    for name, whose in (("skipped/v", "critic's"), ("skipped/p", "policy's")):
        if run.above(name, 0):
            share = run.newest[name]
            return f"{name}: {share:.0%} of the {whose} updates were left out, since their gradients were not finite"
    return None


def lost_actors(run: RunMetrics) -> str | None:
    texts = []
    actors, lags = run.series.get("remote/actors", ()), run.series.get("lag/rows_max", ())
    if actors and actors[-1] < max(actors):
        texts.append(f"remote/actors: {actors[-1]:.0f}, there were {max(actors):.0f}")
    if len(lags) >= ENOUGH:
        first, *_, last = quarters(lags)
        if last > 2 * max(first, 1.0) and last > LATE:
            texts.append(f"lag/rows_max: {last:.0f} ticks in the last quarter of the run, {first:.0f} in the first")
    return "; ".join(texts) or None


SYMPTOMS = {
    1: Detector(
        "The return stays flat from the start",
        flat,
        "check the simulator (pql doctor --env NAME); more updates (algo.v_per_step, a longer budget); then scale "
        "rewards (algo.normalize_reward=true algo.return_cap=5)",
    ),
    2: Detector(
        "Actions are saturated, the policy is frozen",
        frozen,
        "algo.policy.saturation_penalty=0.01 (pql, pql_d, ddpg, td3), a smaller algo.policy.lr, or a larger action "
        "scale of the task",
    ),
    3: Detector(
        "Values explode",
        exploding,
        "a smaller algo.critic.tau, algo.critic.target=min, algo.critic.layer_norm=true, normalised rewards, or a "
        "categorical critic (algo.critic.atoms=51 algo.critic.v_min=-10 algo.critic.v_max=10)",
    ),
    4: Detector(
        "Values of a categorical critic do not move, or are cut off",
        cut_off,
        "a wider support (algo.critic.v_min, algo.critic.v_max), or algo.normalize_reward=true algo.return_cap=5, with "
        "which returns stay near +-5 times the constant factors on rewards",
    ),
    5: Detector(
        "Returns rise and then collapse",
        collapsed,
        "smaller learning rates, a smaller algo.critic.tau, a larger algo.batch_size or replay.capacity, "
        "algo.lr_schedule=cosine; checkpoints/best keeps the best evaluation",
    ),
    10: Detector(
        "PPO learns nothing", no_values, "algo.init_std, algo.epochs, algo.minibatches, algo.normalize_reward=true"
    ),
    12: Detector(
        "The collector limits the speed",
        collector_bound,
        "fewer environments, a faster simulator (task.model=fast, task.kwargs.engine=warp on a GPU), "
        "placement.groups=2; more updates (algo.v_per_step) then cost little time",
    ),
    13: Detector(
        "A learner limits the speed",
        learner_bound,
        "smaller networks and batches, a smaller algo.v_per_step, algo.amp=true on a GPU, placement.threads.v",
    ),
    16: Detector(
        "Update ratios are not what was configured",
        ratios_off,
        "with remote actors, whose ticks may end early, a longer task.kwargs.wait",
    ),
    17: Detector(
        "Rows are dropped",
        dropped,
        "the simulator: RUN/dumps replays a failure; it should return final observations at truncations. A few dropped "
        "rows in a million do no harm",
    ),
    18: Detector(
        "Updates are skipped",
        skipped,
        "as for exploding values: a smaller algo.critic.tau, algo.critic.layer_norm=true, normalised rewards; without "
        "algo.amp=true",
    ),
    19: Detector(
        "Memory grows, or does not suffice",
        growing_memory,
        "smaller replay.capacity and num_envs, fewer stored observation groups; a simulator that leaks is seen in a "
        "process of its own (task.process.python)",
    ),
    21: Detector(
        "Actors are late or lost",
        lost_actors,
        "task.kwargs.wait, task.kwargs.step_seconds, more environments per actor",
    ),
}
"""By section of docs/troubleshooting.md."""


def symptoms(rows: Sequence[Row], settings: Mapping[str, Any]) -> list[Symptom]:
    """Return what a run's rows of metrics.jsonl show to be wrong, in the order of docs/troubleshooting.md."""
    series: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            series.setdefault(name, []).append(value)
    run = RunMetrics({name: values[-1] for name, values in series.items()}, series, settings)
    texts = {section: known.check(run) for section, known in SYMPTOMS.items()}
    return [
        Symptom(section, text, SYMPTOMS[section].remedy, anchor(section)) for section, text in texts.items() if text
    ]


def anchor(section: int) -> str:
    """Return the anchor of a section in the page of the documentation."""
    heading = f"{section}. {SYMPTOMS[section].title}"
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())
