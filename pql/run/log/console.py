"""Console output of a run: the plan first, then progress at least every ten seconds where there is any.

This file does not import torch, so that output appears before the library is loaded.
"""

import contextlib
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pql.config import BudgetConfig, Config, to_dict
from pql.config.validate import likely_device
from pql.engine import deadlines
from pql.run.log.displays import Row, RunProgress, make_face

WIDTH = 100


def opening(config: Config, run_dir: Path | None) -> str:
    """The first lines of a run: what it will do, for how long, and where it writes."""
    where = config.placement.collector or likely_device(config.device)
    what = f"{config.algo.name} on {config.task.title}: {config.num_envs:,} environments on {where}, seed {config.seed}"
    end = f"budget: {budget_words(config.budget)}"
    if config.budget.seconds is not None:
        end += f"; plus building before, saving{' and evaluation' if config.eval.final else ''} after"
    lines = [line for text in (what, end) for line in textwrap.wrap(text, WIDTH)]
    return "\n".join([*lines, *([] if run_dir is None else [f"run: {run_dir}"])])


def budget_words(budget: BudgetConfig) -> str:
    """Return the description of a run's budget."""
    bounds = [
        (budget.seconds, "{:,g} s from the first env step on"),
        (budget.env_steps, "{:,} env steps"),
        (budget.target_return, "a return of {:,g}"),
    ]
    return " or ".join(text.format(value) for value, text in bounds if value is not None)


def announced(config: Config, run_dir: Path | None) -> "Console":
    """Return a console that has printed the plan of the run."""
    budget = {k: float(v) for k, v in to_dict(config.budget).items() if v is not None}
    console = Console(f"{config.algo.name} on {config.task.title}", budget)
    console.say(opening(config, run_dir))
    return console


class Console:
    """Shows a run's progress. Errors in printing, such as a closed pipe, do not stop training.

    Args:
        title: of the run.
        budget: limits that end the run, for the time left: ``seconds``, ``env_steps``.
        console: where to print instead of standard output, a ``rich.console.Console``.
        clock: seconds, for tests.
    """

    def __init__(self, title: str, budget: Row, console: Any = None, clock: Callable[[], float] = time.monotonic):
        self.progress = RunProgress(title, budget, clock)
        self.face = make_face(self.progress, console)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="pql-console", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._closed.wait(1.0):
            with _unheard():
                self.face.beat()

    def write(self, row: Row) -> None:
        """Display a row of metrics."""
        seen = self.progress.latest
        ahead = {k: max(row[k], seen.get(k, 0.0)) for k in ("time/seconds", "steps/env")}
        self.progress.latest = seen | row | ahead
        with _unheard():
            self.face.show("eval/return_mean" in row)

    @contextlib.contextmanager
    def doing(self, what: str, detail: Callable[[], str] = str) -> Iterator[None]:
        """Display the activity ``what`` inside the context. ``detail`` returns its progress; other threads call it, so
        it must be fast."""
        progress = self.progress
        before = progress.phase, progress.detail, progress.since
        progress.phase, progress.detail, progress.since = what, detail, progress.clock()
        try:
            yield
        finally:
            progress.phase, progress.detail, progress.since = before

    def say(self, text: str) -> None:
        """Print lines."""
        with _unheard():
            self.face.say(text)

    def close(self) -> None:
        """Stop updating; the last state stays. Lines may follow (:meth:`say`)."""
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join(timeout=deadlines.CONSOLE)
            with _unheard():
                self.face.close()


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """Ignore a closed pipe, which rich turns into SystemExit."""
    with contextlib.suppress(OSError, ValueError, SystemExit):
        yield
