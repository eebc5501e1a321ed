"""Layout of the page: text, tables, figures and HTML (``page.html``, ``page.css``)."""

import base64
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from matplotlib.figure import Figure

from pql.errors import show
from pql.reports import draw, words
from pql.reports.numbers import UNITS
from pql.reports.runs import AXES, IDENTITY, IGNORED, Run
from pql.reports.symptoms import Symptom
from pql.reports.tables import (
    Cell,
    Table,
    beats_table,
    efficiency_table,
    named,
    overall_table,
    points_table,
    scales_table,
    score_table,
    span,
    speed_table,
)
from pql.reports.words import ABOUT, DASH, compact, num, percent, spoken

Numbers = Mapping[str, Any]


@dataclass(frozen=True)
class Picture:
    """A figure: the name of its file, its content in words, and the file."""

    name: str
    alt: str
    png: bytes

    @property
    def source(self) -> str:
        """The figure as a URL, which makes the page one file."""
        return f"data:image/png;base64,{base64.b64encode(self.png).decode()}"


@dataclass
class Section:
    title: str
    text: str = ""
    pictures: list[Picture] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    folded: bool = False
    reading: str = ""  # next to the last figure
    files: list[tuple[str, str]] = field(default_factory=list)  # name and content, folded

    @property
    def anchor(self) -> str:
        return "".join(c if c.isalnum() else "-" for c in self.title.lower())


def sections(numbers: Numbers, series: Mapping[str, Any] | None = None, runs: Sequence[Run] = ()) -> list[Section]:
    """Return all sections of a page.

    Args:
        series: one run's metrics over time, for a page about that run.
        runs: the compared runs, for the table of their settings.
    """
    with draw.look():
        out = [curves_section(numbers, series)]
        if len(numbers["runs"]) > 1:
            out.append(scores_section(numbers))
        out += [points_section(numbers), thresholds_section(numbers), speed_section(numbers, series)]
        if series:
            out.append(rest_section(series))
    out.append(runs_section(numbers))
    if len(runs) > 1:
        out.append(settings_section(runs, numbers["labels"]))
    return [s for s in out if s.pictures or s.tables]


def picture(name: str, figure: Figure, alt: str) -> Picture:
    with warnings.catch_warnings():  # a letter that the font lacks is a box
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
        return Picture(name, alt, draw.png(figure))


# -- sections -------------------------------------------------------------------------------------------------------


def curves_section(numbers: Numbers, series: Mapping[str, Any] | None) -> Section:
    several = len(numbers["runs"]) > 1
    out = Section("Learning curves", ABOUT["curves" if several else "curve"])
    axes = [numbers["x"], *(a for a in AXES if a != numbers["x"])]
    for i, task in enumerate(numbers["tasks"]):
        for axis in axes if task["end"] else ():
            if not any(g["curves"].get(axis, {}).get("x") for g in task["groups"]):
                continue
            figure = draw.learning_curves(task, numbers["runs"], numbers["labels"], axis)
            last = [
                f"{g['label']} {num(g['curves'][axis]['iqm'][-1])} at {words.compact(g['curves'][axis]['x'][-1])}"
                for g in task["groups"]
                if g["curves"].get(axis, {}).get("x")
            ]
            alt = f"Return on {task['task']} over {words.AXIS_WORDS[axis]}. Ends: {'; '.join(last)} {UNITS[axis]}."
            out.pictures.append(picture(f"curve-{i}-{axis}", figure, alt))
        if several and scored(task, numbers["x"]):
            alt = "; ".join(f"{g['label']} {spoken(g['score']['iqm'])}" for g in task["groups"] if g["score"])
            figure = draw.score_intervals(task, numbers["labels"], numbers["x"])
            out.pictures.append(picture(f"score-{i}", figure, f"IQM on {task['task']}: {alt}."))
    if series and (part := series.get("eval/success")):
        alt = f"Success of evaluated episodes over time; at the end {percent(part['y'][-1])}."
        figure = draw.lines("success of evaluated episodes", {"success": part}, share=True, unit="success")
        out.pictures.append(picture("success", figure, alt))
    if series and (part := series.get("train/return_mean")):
        alt = f"Return of training episodes over time, with exploration noise; at the end {num(part['y'][-1])}."
        out.pictures.append(
            picture("train", draw.lines("return of training episodes", {"train": part}, unit="return"), alt)
        )
    return out


def scored(task: Numbers, x: str) -> bool:
    return bool(task["end"]) and task["end"][x] is not None


def scores_section(numbers: Numbers) -> Section:
    x, labels, overall = numbers["x"], numbers["labels"], numbers["overall"]
    tasks = [t for t in numbers["tasks"] if scored(t, x)]
    out = Section("Scores", ABOUT["scores"].format(axis=words.AXIS_WORDS[x]))
    for task in tasks:
        out.tables += [score_table(task, labels, x), efficiency_table(task, labels)]
    if tasks:
        out.tables.append(scales_table(tasks))
    if not overall["groups"]:
        return out
    if len(overall["tasks"]) > 1:
        out.tables.append(overall_table(overall, labels))
        alt = "; ".join(f"{g['label']} {spoken(g['score']['iqm'])}" for g in overall["groups"])
        out.pictures.append(picture("score-all", draw.overall_intervals(overall, labels), f"Normalised IQM: {alt}."))
        for axis in ("seconds", "env_steps"):
            if overall["x"][axis]:
                alt = f"Normalised IQM over all tasks by {words.AXIS_WORDS[axis]}."
                out.pictures.append(picture(f"all-{axis}", draw.overall_curves(overall, labels, axis), alt))
    alone = tasks[0] if len(tasks) == 1 else None
    half = (next(i for i, v in enumerate(g["profile"]["value"]) if v <= 0.5) for g in overall["groups"])
    middles = [f"{g['label']} {num(overall['tau'][i])}" for g, i in zip(overall["groups"], half, strict=True)]
    alt = f"Performance profiles. Normalised score that half of the runs exceed: {'; '.join(middles)}."
    out.pictures.append(picture("profile", draw.profiles(overall, alone, labels), alt))
    if len(out.pictures) % 2:  # there is room next to the last figure
        out.reading = ABOUT["profile"]
    else:
        out.text += " " + ABOUT["profile"]
    if 1 < len(overall["groups"]) <= 8:
        out.tables.append(beats_table(overall, labels))
    return out


def points_section(numbers: Numbers) -> Section:
    out = Section("Returns at chosen points", ABOUT["points"])
    tasks = [task for task in numbers["tasks"] if task["points"]]
    out.tables += [points_table(task, numbers["labels"], numbers["x"]) for task in tasks]
    return out


def thresholds_section(numbers: Numbers) -> Section:
    out = Section("Time to threshold", ABOUT["thresholds"])
    axes = [numbers["x"], *(a for a in AXES if a != numbers["x"])]
    for task in numbers["tasks"]:
        groups = [g for g in task["groups"] if g["time_to"]]
        rows = []
        for k, level in enumerate(task["thresholds"]):
            share = "" if level["share"] is None else f"{level['share']:.0%} of the range"
            head = [Cell(num(level["value"]), share, left=True, rows=len(groups))]
            for group in groups:
                times_to = group["time_to"][k]
                times = [Cell(compact(times_to[a]["median"]), span(times_to[a], times_to["of"])) for a in axes]
                rows.append(
                    [*head, named(group, numbers["labels"]), Cell(f"{times_to['reached']} of {times_to['of']}"), *times]
                )
                head = []
        if rows:
            heads = ["return", "algorithm", "runs there", *(a.replace("_", " ") for a in axes)]
            out.tables.append(Table(task["task"], heads, rows))
    return out


def speed_section(numbers: Numbers, series: Mapping[str, Any] | None) -> Section:
    out = Section("Speed and resources", ABOUT["speed"])
    for i, task in enumerate(numbers["tasks"]):
        out.tables.append(speed_table(task, numbers["labels"]))
        for key, title in () if series else draw.RATES.items():
            known = [f"{g['label']} {num(g['speed'][key])}" for g in task["groups"] if g["speed"][key] is not None]
            if not known:
                continue
            figure = draw.rates(task, numbers["runs"], numbers["labels"], key)
            out.pictures.append(picture(f"speed-{i}-{key}", figure, f"{title} on {task['task']}: {'; '.join(known)}"))
    for key, title in draw.RATES.items():
        if series and (part := series.get(f"throughput/{key}")):
            alt = f"{title} over time, {num(part['y'][0])} at first, {num(part['y'][-1])} at the end"
            out.pictures.append(picture(key, draw.lines(title, {key: part}, zero=True), alt))
    unit = "pushes" if series and "lag/policy_mean" in series else "ticks"  # pushes: replicas
    for prefix, title in (
        ("busy/", "busy share of each worker"),
        ("ratio/", "realised ratios"),
        ("memory/", "memory (GiB)"),
        ("lag/", f"policy lag ({unit})"),
    ):
        parts = {k.removeprefix(prefix): v for k, v in (series or {}).items() if k.startswith(prefix)}
        if parts:
            alt = f"{title} over time; at the end " + ", ".join(f"{k} {num(v['y'][-1])}" for k, v in parts.items())
            figure = draw.lines(title, parts, share=prefix == "busy/", zero=True)
            out.pictures.append(picture(prefix[:-1], figure, alt))
    return out


def rest_section(series: Mapping[str, Any]) -> Section:
    """Plots of the other metrics of algorithm and task."""
    groups = ("throughput/", "busy/", "ratio/", "memory/", "lag/")
    drawn = ("eval/return_mean", "eval/success", "train/return_mean")
    keys = [k for k in series if not k.startswith(groups) and k not in drawn]
    out = Section("Training in detail", ABOUT["rest"], folded=len(keys) > 16)
    for i, key in enumerate(sorted(keys, key=lambda k: (k.split("/")[0] != "train", k))):
        part = series[key]
        alt = f"{key} over time, from {num(part['y'][0])} to {num(part['y'][-1])}"
        out.pictures.append(picture(f"detail-{i}", draw.lines(key, {key: part}), alt))
    return out


def runs_section(numbers: Numbers) -> Section:
    out = Section("Runs", folded=len(numbers["runs"]) > 12)
    rows = []
    for run in numbers["runs"]:
        returns = run["evals"]["return_mean"]
        rows.append(
            [
                Cell(run["name"], "; ".join(run["notes"]), left=True),
                Cell(run["task"], left=True),
                named(run, numbers["labels"]),
                Cell(DASH if run["seed"] is None else str(run["seed"])),
                *(Cell(compact(run["end"][a])) for a in AXES),
                Cell(str(len(returns))),
                Cell(num(returns[-1] if returns else None)),
                Cell(num(max(returns, default=None))),
            ]
        )
    ends = [a.replace("_", " ") for a in AXES]
    heads = ["run", "task", "algorithm", "seed", *ends, "evaluations", "last return", "best return"]
    out.tables.append(Table("Every run of this page", heads, rows))
    return out


def settings_section(runs: Sequence[Run], labels: Sequence[str]) -> Section:
    """Tables of the settings in which the algorithms of a page differ, and of those that all runs share."""
    values: dict[str, dict[str, list[str]]] = {}  # setting -> label -> its values, in order of appearance
    for run in runs:
        for name, value in run.settings.items():
            if not name.startswith(IDENTITY):
                mine = values.setdefault(name, {}).setdefault(run.label, [])
                mine += [show(value)] if show(value) not in mine else []
    several = {k: v for k, v in values.items() if len({str(v.get(name)) for name in labels}) > 1}
    differing = {k: v for k, v in values.items() if k in several or any(len(mine) > 1 for mine in v.values())}
    alike = {k: next(iter(v.values())) for k, v in values.items() if k not in differing and not k.startswith(IGNORED)}
    out = Section("Settings", ABOUT["settings"], folded=len(differing) + len(alike) > 12)
    if differing:
        rows = [
            [Cell(k, left=True), *(Cell(", ".join(v.get(name, [DASH]))) for name in labels)]
            for k, v in sorted(differing.items())
        ]
        out.tables.append(Table("Settings that differ", ["setting", *labels], rows))
    if alike:
        same = [[Cell(k, left=True), Cell(", ".join(v))] for k, v in sorted(alike.items())]
        out.tables.append(Table("Settings of all algorithms", ["setting", "value"], same))
    out.files = [(f"{run.name}/config.yaml", run.config) for run in runs if run.config]
    return out


# -- HTML -----------------------------------------------------------------------------------------------------------


def render(
    numbers: Numbers,
    parts: Sequence[Section],
    settings: Mapping[str, Any] | None,
    version: str,
    video: str | None = None,
    symptoms: Sequence[Symptom] = (),
) -> str:
    """Return the page as HTML text, self-contained but for a video, without paths of this machine.

    Args:
        settings: the config of a page about one run.
        video: path of a video, relative to the page.
        symptoms: of a page about one run.
    """
    import jinja2

    source = files("pql.reports")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(source.joinpath("page.html").read_text())
    single = settings is not None
    return template.render(
        title=words.title(numbers),
        subtitle=words.subtitle(numbers),
        version=version,
        notes=numbers["notes"],
        lead=[] if single else words.findings(numbers),
        facts=words.facts(numbers["runs"][0]) if single else [],
        labels=numbers["labels"],
        video=video,
        symptoms=symptoms,
        parts=parts,
        colors=len(draw.COLORS),
        css=source.joinpath("page.css").read_text(),
        settings=[(k, str(v)) for k, v in (settings or {}).items()],
    )
