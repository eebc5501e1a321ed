"""What the metrics of a run show to be wrong, with the section of docs/troubleshooting.md that says what to change."""

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pql

Row = Mapping[str, float]
PAGE = Path(pql.__file__).parents[1] / "docs" / "troubleshooting.md"
SITE = PAGE.parents[1] / "build" / "site" / "troubleshooting.html"
ENOUGH = 30  # rows with training returns, before a trend is judged
UPDATES = 5_000  # critic updates before a flat return is a symptom


class Symptom(NamedTuple):
    """A symptom that a run shows.

    Attributes:
        section: its number in docs/troubleshooting.md.
        text: the metric, its value, what it means.
        url: where the section is on this machine; None: the documentation is not installed.
    """

    section: int
    text: str
    url: str | None


class Seen(NamedTuple):
    """A run's metrics: the newest value of each, all values of each in order, and the settings with dotted names."""

    newest: Row
    series: Mapping[str, Sequence[float]]
    settings: Mapping[str, Any]

    def above(self, name: str, limit: float) -> bool:
        return self.newest.get(name, limit) > limit


def flat(seen: Seen) -> str | None:
    returns = seen.series.get("train/return_mean", ())
    if len(returns) < ENOUGH or not seen.above("updates/v", UPDATES):
        return None
    third = len(returns) // 3
    begin, end = statistics.median(returns[:third]), statistics.median(returns[-third:])
    if end > begin + 0.05 * abs(begin):
        return None
    return f"train/return_mean: {end:,.4g} in the last third of the run, {begin:,.4g} in the first"


def frozen(seen: Seen) -> str | None:
    share = seen.newest.get("policy/frozen", 0.0)
    if share <= 0.5:
        return None
    return f"policy/frozen: {share:.0%} of the action components stay at one end of their range"


def cut_off(seen: Seen) -> str | None:
    atoms, low, high = (seen.settings.get(f"algo.critic.{name}") for name in ("atoms", "v_min", "v_max"))
    value = seen.newest.get("value/q")
    if not (isinstance(atoms, int) and atoms > 1 and isinstance(low, float | int) and isinstance(high, float | int)):
        return None
    distance = (high - low) / (atoms - 1)
    if value is None or low + distance < value < high - distance:
        return None
    return f"value/q: {value:.4g} is at the end of the critic's range, {low:g} to {high:g}"


def collapsed(seen: Seen) -> str | None:
    returns = seen.series.get("eval/return_mean", ())
    if len(returns) < 3 or max(returns) <= 0 or returns[-1] > 0.5 * max(returns):
        return None
    return f"eval/return_mean: {returns[-1]:,.4g}, less than half of its best, {max(returns):,.4g}"


def no_values(seen: Seen) -> str | None:
    explained = seen.newest.get("value/explained_variance", 1.0)
    if explained > 0.05 or len(seen.series["value/explained_variance"]) < ENOUGH:
        return None
    return f"value/explained_variance: {explained:.2f}, the values predict nothing"


def collector_bound(seen: Seen) -> str | None:
    return bound(seen, ("busy/collector",), ("busy/v", "busy/p"))


def learner_bound(seen: Seen) -> str | None:
    return bound(seen, ("busy/v", "busy/p"), ("busy/collector",))


def bound(seen: Seen, busy: Sequence[str], idle: Sequence[str]) -> str | None:
    """Return a text if one of ``busy`` works all the time, and every one of ``idle`` less than half of it."""
    worst = max(busy, key=lambda name: seen.newest.get(name, 0.0))
    others = [seen.newest[name] for name in idle if name in seen.newest]
    if seen.newest.get(worst, 0.0) < 0.9 or not others or max(others) > 0.5:
        return None
    return f"{worst}: {seen.newest[worst]:.0%}, while {' and '.join(idle)} wait more than half of the time"


def dropped(seen: Seen) -> str | None:
    names = {
        "env/dropped": "rows were left out, since they were not finite",
        "replay/bootstrap_lost": "time limits had no final observation",
    }
    texts = [f"{name}: {seen.newest[name]:,.0f} {what}" for name, what in names.items() if seen.above(name, 0)]
    return "; ".join(texts) or None


def skipped(seen: Seen) -> str | None:
    for name, whose in (("skipped/v", "critic's"), ("skipped/p", "policy's")):
        if seen.above(name, 0):
            share = seen.newest[name]
            return f"{name}: {share:.0%} of the {whose} updates were left out, since their gradients were not finite"
    return None


def lost_actors(seen: Seen) -> str | None:
    actors = seen.series.get("remote/actors", ())
    if not actors or actors[-1] >= max(actors):
        return None
    return f"remote/actors: {actors[-1]:.0f}, there were {max(actors):.0f}"


SYMPTOMS: dict[int, Callable[[Seen], str | None]] = {
    1: flat,
    2: frozen,
    4: cut_off,
    5: collapsed,
    10: no_values,
    12: collector_bound,
    13: learner_bound,
    17: dropped,
    18: skipped,
    21: lost_actors,
}
"""By section of docs/troubleshooting.md: a function that returns what is wrong, or None."""


def symptoms(rows: Sequence[Row], settings: Mapping[str, Any]) -> list[Symptom]:
    """Return what a run's rows of metrics.jsonl show to be wrong, in the order of docs/troubleshooting.md."""
    series: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            series.setdefault(name, []).append(value)
    seen = Seen({name: values[-1] for name, values in series.items()}, series, settings)
    texts = {section: check(seen) for section, check in SYMPTOMS.items()}
    return [Symptom(section, text, url(section)) for section, text in texts.items() if text]


def url(section: int) -> str | None:
    """Return the address of a section in the built site, else that of its page; None without either."""
    if not PAGE.is_file():
        return None
    if not SITE.is_file():
        return PAGE.as_uri()
    heading = re.search(rf"^### ({section}\. .*)$", PAGE.read_text(encoding="utf-8"), re.M)
    assert heading is not None
    anchor = re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading[1]).strip().lower())
    return f"{SITE.as_uri()}#{anchor}"
