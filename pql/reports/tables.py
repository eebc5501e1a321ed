"""Tables of the page: cells as text, from the numbers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pql.reports.numbers import UNITS
from pql.reports.references import Scale
from pql.reports.words import DASH, compact, num, percent

Numbers = Mapping[str, Any]


@dataclass(frozen=True)
class Cell:
    """A table's cell: its text, a note in small print below, and a share drawn as a bar."""

    text: str
    note: str = ""
    bar: float | None = None
    chip: int | None = None  # the group whose colour and marker precede it
    left: bool = False  # text instead of a number
    rows: int = 1  # number of rows that it spans


@dataclass(frozen=True)
class Table:
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def score_table(task: Numbers, labels: Sequence[str], x: str) -> Table:
    groups, scale = [g for g in task["groups"] if g["score"]], Scale(**task["scale"])
    more = [k for k in ("length_mean", "success") if any(k in g["final"] for g in groups)]
    rows = [
        [
            named(g, labels),
            Cell(str(len(g["scores"]))),
            *(aggregate(g["score"][k]) for k in ("iqm", "median", "mean")),
            aggregate({k: None if v is None else scale(v) for k, v in g["score"]["iqm"].items()}),
            *(Cell(num(g["final"].get(k)) if k != "success" else percent(g["final"].get(k))) for k in more),
        ]
        for g in groups
    ]
    called = {"length_mean": "episode length, last evaluation", "success": "success, last evaluation"}
    caption = f"{task['task']}: return at {num(task['end'][x], whole=True)} {UNITS[x]}"
    heads = ["algorithm", "runs", "IQM", "median", "mean", "normalised IQM", *(called[k] for k in more)]
    return Table(caption, heads, rows)


def efficiency_table(task: Numbers, labels: Sequence[str]) -> Table:
    """The same runs at equal wall-clock time and at equal samples."""
    ends = {axis: end for axis in ("seconds", "env_steps") if (end := task["end"][axis]) is not None}
    rows = [
        [named(g, labels), *(aggregate(g["at"][axis]) for axis in ends), Cell(num(g["speed"].get("env_steps_per_s")))]
        for g in task["groups"]
        if g["at"]
    ]
    heads = [f"IQM at {compact(end)} {UNITS[axis]}" for axis, end in ends.items()]
    caption = f"{task['task']}: sample efficiency beside wall-clock time"
    return Table(caption, ["algorithm", *heads, "env steps/s"], rows)


def points_table(task: Numbers, labels: Sequence[str], x: str) -> Table:
    """Medians at chosen positions, with the return of each run below."""
    rows = [
        [named(g, labels), *(Cell(num(at["median"]), ", ".join(map(num, at["returns"]))) for at in g["returns_at"])]
        for g in task["groups"]
        if g["returns_at"]
    ]
    heads = [f"at {num(point, whole=True)} {UNITS[x]}" for point in task["points"]]
    return Table(f"{task['task']}: return", ["algorithm", *heads], rows)


def scales_table(tasks: Sequence[Numbers]) -> Table:
    """The returns that count as 0 and 1 in normalised scores, and their sources."""
    rows = [
        [
            Cell(t["task"], left=True),
            *(Cell(num(t["scale"][k]), t["scale"][f"{k}_is"]) for k in ("zero", "one")),
            Cell(t["scale"]["source"] or "these runs", left=True),
        ]
        for t in tasks
    ]
    return Table("Normalised scores: the returns that count as 0 and 1", ["task", "0", "1", "source"], rows)


def overall_table(overall: Numbers, labels: Sequence[str]) -> Table:
    rows = [
        [named(g, labels), Cell(str(g["runs"])), *(aggregate(g["score"][k]) for k in ("iqm", "median", "mean"))]
        for g in overall["groups"]
    ]
    caption = "All tasks, normalised scores"
    return Table(caption, ["algorithm", "runs", "IQM", "median of tasks", "mean"], rows)


def beats_table(overall: Numbers, labels: Sequence[str]) -> Table:
    names = [g["label"] for g in overall["groups"]]
    rows = [
        [named(g, labels), *(Cell(DASH) if n == g["label"] else chance(g["beats"][n]) for n in names)]
        for g in overall["groups"]
    ]
    caption = "Probability of improvement: that a run of the row's algorithm scores above one of the column's"
    return Table(caption, ["algorithm", *names], rows)


LAGS = {
    "lag/policy_ticks": "policy lag",
    "lag/policy_mean": "policy lag, mean, pushes",
    "lag/policy_max": "policy lag, largest",
}


def speed_table(task: Numbers, labels: Sequence[str]) -> Table:
    each = [g["speed"] for g in task["groups"]]
    keys = list(dict.fromkeys(k for s in each for k in s if s[k] is not None))

    def prefixed(prefix: str) -> list[str]:
        return [k for k in keys if k.startswith(prefix)]

    columns: list[tuple[str, Callable[[Numbers], Cell]]] = [
        ("env steps/s", lambda s: Cell(num(s.get("env_steps_per_s")))),
        ("updates/s", lambda s: Cell(num(s.get("updates_per_s")))),
    ]
    for k in prefixed("ratio/"):
        columns.append((k.removeprefix("ratio/").replace("_", " "), lambda s, k=k: ratio(s, k)))  # type: ignore[misc]
    for k in prefixed("lag/"):
        columns.append((LAGS.get(k, k), lambda s, k=k: Cell(num(s.get(k)))))  # type: ignore[misc]
    for k in prefixed("busy/"):
        columns.append((f"busy: {k.removeprefix('busy/')}", lambda s, k=k: Cell(percent(s.get(k)), bar=s.get(k))))  # type: ignore[misc]
    for k, title in (("memory/host_gib", "memory, GiB"), ("memory/gpu_gib", "GPU memory, GiB")):
        if k in keys:
            columns.append((title, lambda s, k=k: Cell(num(s.get(k)))))  # type: ignore[misc]
    if "dropped" in keys:
        columns.append(("evaluations dropped", lambda s: Cell(num(s.get("dropped")))))
    rows = [[named(g, labels), *(make(g["speed"]) for _, make in columns)] for g in task["groups"]]
    return Table(task["task"], ["algorithm", *(title for title, _ in columns)], rows)


# -- cells ----------------------------------------------------------------------------------------------------------


def named(group: Numbers, labels: Sequence[str]) -> Cell:
    return Cell(group["label"], chip=labels.index(group["label"]))


def aggregate(value: Mapping[str, float | None]) -> Cell:
    return Cell(num(value["value"]), "" if value["low"] is None else f"{num(value['low'])} to {num(value['high'])}")


def chance(value: Mapping[str, float | None]) -> Cell:
    return Cell(percent(value["value"]), "" if value["low"] is None else f"{value['low']:.0%} to {value['high']:.0%}")


def ratio(speed: Numbers, key: str) -> Cell:
    wanted = speed["configured"].get(key)
    return Cell(num(speed.get(key)), "" if wanted is None or speed.get(key) is None else f"configured {num(wanted)}")


def span(times: Mapping[str, float | None], of: int) -> str:
    if of < 2 or times["min"] is None:
        return ""
    return f"{compact(times['min'])} to {compact(times['max']) if times['max'] is not None else 'never'}"
