"""Reports: a page about one run, or a comparison of several. ``docs/compare.md`` describes its content and statistics.

``stats`` has the statistics, ``runs`` reads runs, ``numbers`` and ``overall`` compute all numbers of a page, ``draw``,
``tables`` and ``page`` lay it out. matplotlib, scipy and Jinja (the extra ``report``) are imported only when a page is
written.
"""

import importlib.util
import json
import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pql
from pql.config.files import expanded, read_json
from pql.config.trust import check_links
from pql.errors import ConfigError, nearest, printable, writing
from pql.reports.references import is_number, known

if TYPE_CHECKING:
    from pql.reports.runs import Run

PACKAGES = ("matplotlib", "scipy", "jinja2")


@dataclass(frozen=True)
class PageOptions:
    """Contents of a page.

    Attributes:
        x: the axis on which runs are compared: ``seconds``, ``env_steps`` or ``updates``.
        thresholds: returns for the time-to-threshold table.
        at: positions on ``x`` at which every run's return is given.
        references: file of returns by which scores are normalised (``references.yaml`` shows its form).
    """

    x: str = "seconds"
    thresholds: Sequence[float] = ()
    at: Sequence[float] = ()
    references: str | Path | None = None


def write(
    words: Sequence[str], out: str | Path | None = None, options: PageOptions | None = None, single: bool = False
) -> tuple[Path, dict[str, Any]]:
    """Read runs, write ``index.html``, its figures as PNG and ``numbers.json`` into a folder.

    Args:
        words: run directories, or folders of runs.
        out: folder to write to; default: ``comparison`` in the working directory, or ``report`` in a ``single`` run.
        single: write a page about one run.
    Returns:
        The page and its numbers.
    Raises:
        ConfigError: a path is not a run, a run has no metrics, the axis is unknown, a threshold or position is not a
            number, the folder cannot be written or a package is missing.
    """
    options = options or PageOptions()
    x, thresholds, points = options.x, _numbers("thresholds", options.thresholds), _numbers("at", options.at)
    folder = None if out is None else expanded("out", out)
    check_packages()
    from pql.reports import numbers, runs

    if x not in runs.AXES:
        raise ConfigError("x", x, f"one of {', '.join(runs.AXES)}{nearest(x, runs.AXES)}")
    scales = known(None if options.references is None else expanded("references", options.references))
    paths, notes = runs.find(words)
    if single and len(paths) > 1:
        raise ConfigError(
            "run", words[0], f"one run, not {len(paths)}; to compare them: pql compare {shlex.quote(words[0])}"
        )
    found = runs.read(paths)
    lacking = [r.name for r in found if len(r.evals["return_mean"]) and r.evals[x][-1] != r.evals[x][-1]]
    if lacking:
        raise ConfigError("x", x, f"an axis that all runs record; {lacking[0]} does not")
    if folder is None:
        folder = paths[0] / "report" if single else Path("comparison")
        if single:
            check_links(paths[0], "report")
    with writing("out", folder):  # before the work starts
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "index.html").touch()
    analysis = numbers.analyse(found, x, thresholds, notes, scales, points)
    _draw(folder, found, analysis, paths[0] if single else None)
    return folder / "index.html", analysis


def _draw(folder: Path, found: "Sequence[Run]", analysis: dict[str, Any], only: Path | None) -> None:
    """Write the files of a page about the runs ``found``; ``only``: the directory of its one run."""
    from pql.reports import numbers, page
    from pql.reports.symptoms import symptoms

    run, more = found[0], dict[str, Any]()
    film = _newest_video(only) if only else None
    shown = symptoms(run.rows, run.settings) if only else []
    if only:
        more = {"series": numbers.clean(numbers.series(run)), "symptoms": [symptom._asdict() for symptom in shown]}
    parts = page.sections(analysis, more.get("series"), found)
    video = os.path.relpath(film, folder) if film else None
    text = page.render(analysis, parts, run.settings if only else None, pql.__version__, video, shown)
    figures = {f"{p.name}.png": p.png for part in parts for p in part.pictures}
    for name in set(_figures(folder)) - set(figures):  # of an earlier page, which this one replaces
        (folder / name).unlink(missing_ok=True)
    for name, data in figures.items():
        (folder / name).write_bytes(data)
    (folder / "numbers.json").write_text(json.dumps({**analysis, "pictures": list(figures), **more}) + "\n")
    (folder / "index.html").write_text(text, encoding="utf-8")


def _numbers(key: str, values: Any) -> list[float]:
    """Return a setting's numbers, or raise ``ConfigError``."""
    if isinstance(values, Iterable) and not isinstance(values, str):
        values = list(values)
        if all(map(is_number, values)):
            return [float(v) for v in values]
    raise ConfigError(key, values, "a list of numbers such as [100,200]")


def _newest_video(run: Path) -> Path | None:
    """Return the newest ordinary, complete video of a run; None if there is none."""
    found = [p for p in (run / "videos").glob("[!.]*.mp4") if p.is_file() and not p.is_symlink()]
    return max(found, key=lambda p: p.stat().st_mtime_ns, default=None)


def _figures(folder: Path) -> list[str]:
    """Return the file names of the figures of an earlier page in ``folder``."""
    try:
        names = read_json(folder / "numbers.json")["pictures"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [name for name in names if isinstance(name, str) and Path(name).name == name and name.endswith(".png")]


def check_packages() -> None:
    """Raise ``ConfigError`` if a package of the extra ``report`` is missing."""
    missing = [p for p in PACKAGES if importlib.util.find_spec(p) is None]
    if missing:
        raise ConfigError("report", missing[0], "this package, which is not installed: pip install 'pql-rl[report]'")


def tell(numbers: dict[str, Any]) -> None:
    """Print the findings and a table of the scores."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from pql.reports.numbers import UNITS
    from pql.reports.words import findings, num, spoken

    console = Console()
    if not console.is_terminal:  # do not wrap lines to a window
        console.width = 160
    table = Table(box=None, pad_edge=False, padding=(0, 2), header_style="bold")
    for name in ("task", "algorithm", "runs", "IQM (95 %)", "median", "mean"):
        table.add_column(name, justify="left" if name in ("task", "algorithm") else "right")
    for task in numbers["tasks"]:
        for group in (g for g in task["groups"] if g["score"]):
            score = group["score"]
            middle = (num(score[k]["value"]) for k in ("median", "mean"))
            about = (Text(printable(text)) for text in (task["task"], group["label"]))
            table.add_row(*about, str(len(group["scores"])), spoken(score["iqm"]), *middle)
    if table.row_count:
        console.print(table)
    chosen = [
        f"{task['task']}, {group['label']}, at {num(point, whole=True)} {UNITS[numbers['x']]}: median "
        f"{num(there['median'])} ({', '.join(map(num, there['returns']))})"
        for task in numbers["tasks"]
        for group in task["groups"]
        if group["returns_at"]
        for point, there in zip(task["points"], group["returns_at"], strict=True)
    ]
    found = [f"{task}: {text}" for task, text in findings(numbers)]
    for line in (*chosen, *found, *(f"note: {n}" for n in numbers["notes"])):
        console.print(printable(line), highlight=False, markup=False, soft_wrap=True)
