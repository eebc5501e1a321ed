"""Displays of a run's progress: a panel on a terminal, one line in a notebook, elsewhere a table of plain lines.

This file does not import torch.
"""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

Row = dict[str, float]
EVERY = 8.0  # seconds between two plain lines
SAME = 60.0  # seconds until a plain line says again that a phase is where it was
REPEAT_HEADER = 20  # lines


class RunProgress:
    """Progress of a run, from which every display is drawn.

    Attributes:
        title: of the run.
        budget: limits that end the run: ``seconds``, ``env_steps``.
        latest: newest value of every metric written so far.
        now: returns current time and steps, once the run exists; it must be fast and may lag behind.
        phase: the current activity; None: training.
        detail: returns a text on the progress of the phase.
    """

    def __init__(self, title: str, budget: Row, clock: Callable[[], float] = time.monotonic):
        self.title, self.budget, self.clock = title, budget, clock
        self.latest: Row = {}
        self.now: Callable[[], Row] = dict
        self.phase: str | None = None
        self.detail: Callable[[], str] = str
        self.since = clock()

    @property
    def row(self) -> Row:
        """The newest value of every metric. Time never decreases, though an evaluation has the time of its request."""
        ahead = self.now() if self.latest or self.phase else {}
        return self.latest | {k: max(v, self.latest.get(k, 0.0)) for k, v in ahead.items()}

    def share(self) -> float | None:
        """Return the used share of the budget, in [0, 1]; None if the run has no limit."""
        known = (("seconds", "time/seconds"), ("env_steps", "steps/env"))
        row = self.row
        used = [row.get(key, 0.0) / self.budget[name] for name, key in known if name in self.budget]
        return min(1.0, max(used)) if used else None

    def left(self) -> float | None:
        """Return the seconds left until the first limit; None if there is no limit, or too little is known."""
        row = self.row
        seconds, steps = row.get("time/seconds", 0.0), row.get("steps/env", 0.0)
        left = []
        if "seconds" in self.budget:
            left.append(self.budget["seconds"] - seconds)
        if "env_steps" in self.budget and steps > 0:
            left.append((self.budget["env_steps"] - steps) * seconds / steps)
        return max(0.0, min(left)) if left else None

    def doing(self) -> str:
        """Return the phase, its progress and its duration so far."""
        spent = self.clock() - self.since
        text = ", ".join(x for x in (self.detail(), f"{spent:.0f} s" if spent >= 1 else "") if x)
        return f"{self.phase}: {text}" if text else f"{self.phase}"


class Face(Protocol):
    """Progress display of a run."""

    def say(self, text: str) -> None:
        """Print lines."""
        ...

    def show(self, due: bool) -> None:
        """Display a change; ``due``: at once."""
        ...

    def beat(self) -> None:
        """Called once a second."""
        ...

    def close(self) -> None: ...


def make_face(progress: RunProgress, console: Any = None) -> Face:
    """Return the display that suits the output stream."""
    if console is None and (display := notebook_display()) is not None:
        return Notebook(progress, display)
    from rich.console import Console as RichConsole

    console = console or RichConsole()
    live = console.is_terminal and not console.is_dumb_terminal
    return Panel(progress, console) if live else Lines(progress, console)


# -- plain lines ----------------------------------------------------------------------------------------------------

NAMES = ("time", "left", "env steps", "steps/s", "updates", "train", "eval", "busiest")
COLUMNS = tuple(zip(NAMES, (8, 8, 9, 8, 8, 9, 9, 14), strict=True))  # with their widths


class Lines:
    """A table for pipes and files: a line every few seconds, at most ``WIDTH`` wide; the header is repeated."""

    def __init__(self, progress: RunProgress, console: Any):
        self.progress, self.console = progress, console
        self.rows, self.last, self.said = 0, progress.clock(), ""
        self.lock = threading.Lock()

    def say(self, text: str) -> None:
        with self.lock:
            self._print(text)

    def show(self, due: bool) -> None:
        with self.lock:
            if due or self.rows == 0 or self.progress.clock() - self.last >= EVERY:
                self._table_row()

    def beat(self) -> None:
        with self.lock:
            detail = self.progress.detail()
            same = detail and detail == self.said
            # A second more, for a row of metrics to arrive first.
            if self.progress.clock() - self.last < (SAME if same else EVERY + 1):
                return
            if self.progress.phase is not None:
                self.said = detail
                self._print(f"  {self.progress.doing()}")
            elif self.progress.latest:
                self._table_row()

    def close(self) -> None:
        pass

    def _table_row(self) -> None:
        if self.rows % REPEAT_HEADER == 0:
            self._print("  ".join(name.rjust(width) for name, width in COLUMNS))
        self.rows += 1
        known = zip(cells(self.progress), COLUMNS, strict=True)
        self._print("  ".join(cell.rjust(width) for cell, (_, width) in known))

    def _print(self, text: str) -> None:
        self.last = self.progress.clock()
        self.console.print(text, highlight=False, soft_wrap=True, markup=False, emoji=False)


def cells(progress: RunProgress) -> list[str]:
    """Return the newest values for ``COLUMNS``; empty texts for missing ones."""
    row, left = progress.row, progress.left()
    busy = {k.removeprefix("busy/"): v for k, v in row.items() if k.startswith("busy/")}
    busiest = max(busy, key=lambda k: busy[k], default="")

    def number(key: str, form: Callable[[float], str]) -> str:
        return form(row[key]) if key in row else ""

    return [
        number("time/seconds", duration),
        "" if left is None else duration(left),
        number("steps/env", short),
        number("throughput/env_steps_per_s", short),
        number("updates/v", short),
        number("train/return_mean", score),
        number("eval/return_mean", score),
        f"{busiest} {busy[busiest]:.0%}" if busiest else "",
    ]


def duration(seconds: float) -> str:
    """``0:07``, ``12:34``, ``1:02:03``, ``250:00:00``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def short(count: float) -> str:
    """``950``, ``12,345``, ``1.23M``, ``45.6G``: at most eight characters."""
    for power, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(count) >= power:
            return f"{count / power:.3g}{unit}"
    return f"{count:,.0f}"


def score(value: float) -> str:
    """A return in at most nine characters."""
    text = f"{value:,.1f}"
    return text if len(text) <= 9 else f"{value:.3g}"


# -- a terminal -----------------------------------------------------------------------------------------------------


class Panel:
    """A live panel: a bar with the used share of the budget, and the most important metrics."""

    def __init__(self, progress: RunProgress, console: Any):
        from rich.live import Live

        self.progress, self.console = progress, console
        self.live = Live(get_renderable=self._render, console=console, refresh_per_second=4)
        self.started, self.lock = False, threading.Lock()

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True, markup=False, emoji=False)

    def show(self, due: bool) -> None:
        self.beat()

    def beat(self) -> None:
        with self.lock:
            if not self.started:
                self.started = True
                self.live.start(refresh=True)

    def close(self) -> None:
        with self.lock:
            if self.started:
                self.live.stop()

    def _render(self) -> Any:
        from rich.console import Group
        from rich.panel import Panel as Box
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        progress, share, left, row = self.progress, self.progress.share(), self.progress.left(), self.progress.row
        head, table = Table.grid(padding=(0, 2)), Table.grid(padding=(0, 2))
        state = "" if left is None or not row else f"{duration(left)} left"
        bar = ProgressBar(total=1.0, completed=share or 0.0, width=40, pulse=share is None)
        head.add_row(bar, "" if share is None else f"{share:.0%}", progress.doing() if progress.phase else state)
        for label, text in labelled(row) if progress.latest else ():
            table.add_row(label, text)
        return Box(Group(head, table) if progress.latest else head, title=progress.title, expand=False)


def labelled(row: Row) -> list[tuple[str, str]]:
    """Return (label, text) of the most important metrics."""

    def number(key: str, form: str = ",.0f") -> str:
        return format(row[key], form) if key in row else "-"

    lag = "lag/policy_mean" if "lag/policy_mean" in row else "lag/policy_ticks"  # lag/policy_mean: replicas, in pushes
    ratios = f"v/step {number('ratio/v_per_step', 'g')}, p/v {number('ratio/p_per_v', 'g')}"
    gpu = f", GPU {number('memory/gpu_gib', '.2f')} GiB" if "memory/gpu_gib" in row else ""
    names = [k.removeprefix("busy/") for k in row if k.startswith("busy/")]
    workers = sorted(names, key=lambda w: w != "collector") or ["collector"]
    return [
        ("time", f"{number('time/seconds')} s"),
        ("env steps", f"{number('steps/env')}  ({number('throughput/env_steps_per_s')}/s)"),
        ("updates", f"v {number('updates/v')}, p {number('updates/p')}  ({number('throughput/updates_per_s')}/s)"),
        ("ratios", f"{ratios}, lag {number(lag, '.3g')}"),
        ("return", f"train {number('train/return_mean', ',.1f')}, eval {number('eval/return_mean', ',.1f')}"),
        ("busy", ", ".join(f"{w} {number(f'busy/{w}', '.0%')}" for w in workers)),
        ("memory", f"{number('memory/host_gib', '.2f')} GiB{gpu}"),
    ]


# -- a notebook -----------------------------------------------------------------------------------------------------


def notebook_display() -> Callable[..., Any] | None:
    """IPython's ``display`` inside a notebook's kernel; None elsewhere, IPython in a terminal included."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is None:
        return None
    from IPython.display import display

    return display


class Notebook:
    """One line below the cell, updated in place."""

    def __init__(self, progress: RunProgress, display: Callable[..., Any]):
        self.progress, self.display = progress, display
        self.handle: Any = None
        self.lock = threading.Lock()

    def say(self, text: str) -> None:
        print(text, flush=True)

    def show(self, due: bool) -> None:
        self.beat()

    def beat(self) -> None:
        with self.lock:
            data = {"text/plain": self.line()}
            if self.handle is not None:
                self.handle.update(data, raw=True)
            elif data["text/plain"]:
                self.handle = self.display(data, raw=True, display_id=True)

    def close(self) -> None:
        self.beat()

    def line(self) -> str:
        """Return the names and values of the table's columns, without empty ones."""
        progress, share = self.progress, self.progress.share()
        done = [] if share is None or not progress.latest else [f"{share:.0%}"]
        if progress.phase is not None:
            return " | ".join([*done, progress.doing()])
        known = zip(COLUMNS, cells(progress), strict=True)
        return " | ".join([*done, *(f"{name} {cell}" for (name, _), cell in known if cell)])
