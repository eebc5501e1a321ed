"""Metric sinks: metrics.jsonl and the console always; TensorBoard or wandb on request.

Workers sum their metrics on the device. A row is assembled at a tick boundary, copied to the host asynchronously and
written one tick later, so that no sink makes a worker wait.
"""

import contextlib
import importlib.util
import json
import math
import resource
import shlex
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from pql.config import BudgetConfig, Config, to_dict
from pql.config.files import check_ordinary, create_file
from pql.errors import ConfigError, PqlWarning, first_line
from pql.run.log.console import WIDTH, Console, Row
from pql.run.store.run_dir import Summary

LINE = 1 << 20  # upper limit of a row's characters; rows are far shorter
PATIENCE = 5.0  # seconds that a run waits for wandb at its end


class Sink(Protocol):
    def write(self, row: Row) -> None: ...
    def close(self) -> None: ...


class Jsonl:
    """metrics.jsonl: one JSON object per line, with finite numbers only; nan and inf are left out.

    Args:
        resumed_at: env steps at which a resumed run continues. Later rows, which it will write again, and truncated
            lines are dropped.

    Raises:
        ConfigError: the file of a resumed run is not a regular file.
    """

    def __init__(self, path: Path, resumed_at: int | None = None):
        if resumed_at is not None and path.exists():
            self._trim(path, resumed_at)
        self.path = path
        self.reopen()

    def reopen(self) -> None:
        """Continue in the file of that name, created if missing."""
        self.file = self.path.open("a", buffering=1)

    @staticmethod
    def _trim(path: Path, steps: int) -> None:
        try:
            check_ordinary(path)
        except ValueError as error:
            raise ConfigError("run", path.parent, f"a run with metrics that can be read ({error})") from error
        temporary = path.with_name(f".{path.name}")
        create_file(temporary, "")
        with path.open(errors="replace") as file, temporary.open("a") as kept:
            while line := file.readline(LINE):
                with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                    if json.loads(line)["steps/env"] <= steps:
                        kept.write(line.rstrip("\n") + "\n")
        temporary.replace(path)

    def write(self, row: Row) -> None:
        finite = {k: v for k, v in row.items() if abs(v) < float("inf")}
        self.file.write(json.dumps(finite) + "\n")

    def close(self) -> None:
        self.file.close()


class TensorBoard:
    """Scalars by env step. Needs the extra ``tensorboard``."""

    def __init__(self, folder: Path, resumed_at: int | None = None):
        from torch.utils.tensorboard import SummaryWriter

        # A resumed run's rows up to and including the resume point are kept, as in metrics.jsonl.
        self.writer = SummaryWriter(str(folder), purge_step=None if resumed_at is None else resumed_at + 1)

    def write(self, row: Row) -> None:
        for key, value in row.items():
            self.writer.add_scalar(key, value, int(row["steps/env"]))

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """wandb, offline by default, in a separate process that reads metrics.jsonl (``wandb_feed.py``).

    Args:
        folder: the run directory.
        offset: byte in metrics.jsonl at which this sitting begins.
        say: receives the place of the data and the command that uploads them.
        patience: seconds that ``close`` waits for the process. If it needs longer, it finishes after the run.
    """

    def __init__(
        self,
        folder: Path,
        project: str,
        mode: str,
        config: dict[str, Any],
        offset: int = 0,
        say: Callable[[str], None] | None = None,
        patience: float | None = None,
    ):
        self.folder, self.say, self.ended = folder, say, False
        self.patience = PATIENCE if patience is None else patience
        options = {
            "folder": str(folder),
            "metrics": str(folder / "metrics.jsonl"),
            "offset": offset,
            "project": project,
            "mode": mode,
            "config": config,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pql.run.log.wandb_feed", json.dumps(options, default=str)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            process_group=0,  # Ctrl-C is for the run, which then closes this
        )

    def write(self, row: Row) -> None:
        """Write nothing: metrics.jsonl has the row. Warn if wandb has ended before the run."""
        if not self.ended and self.process.poll() is not None:
            self.close()

    def close(self) -> None:
        if self.ended:
            return
        self.ended = True
        verdict = {"dir": str(self.folder / "wandb" / "latest-run"), "why": "wandb's process died", "mode": ""}
        try:
            reply, _ = self.process.communicate(timeout=self.patience)
            verdict = json.loads(reply)
        except subprocess.TimeoutExpired:
            verdict["why"] = "wandb is still uploading and continues in the background"
        except ValueError:
            pass
        upload = f"wandb sync {shlex.quote(verdict['dir'])}"
        if verdict["why"]:
            what = f"{verdict['why']}; the run is not affected. To upload what is missing: {upload}"
            warnings.warn(what, PqlWarning, stacklevel=2)
        elif verdict["mode"] == "offline" and self.say:
            self.say(f"wandb: offline; to upload: {upload}")


class Pending:
    """Device scalars on their way to the host."""

    def __init__(self, values: dict[str, Tensor], row: Row):
        self.row = row
        by_device: dict[torch.device, list[str]] = {}
        for name, value in values.items():
            by_device.setdefault(value.device, []).append(name)
        self.parts: list[tuple[list[str], Tensor]] = []
        self.events: list[Any] = []
        for device, names in by_device.items():
            stacked = torch.stack([values[n].float() for n in names])
            if device.type == "cuda":
                host = torch.empty(stacked.shape, pin_memory=True)
                host.copy_(stacked, non_blocking=True)
                self.events.append(torch.cuda.current_stream(device).record_event())
                stacked = host
            self.parts.append((names, stacked))

    def ready(self) -> bool:
        return all(e.query() for e in self.events)

    def collect(self) -> Row:
        """Return the row with its values filled in, after waiting for those still being copied."""
        for event in self.events:
            event.synchronize()
        for names, values in self.parts:
            self.row |= dict(zip(names, values.tolist(), strict=True))
        return self.row


class Sinks:
    """All sinks of a run. A failing sink causes one warning and is tried again with every row; the run continues."""

    def __init__(self, sinks: Sequence[Sink]):
        self.sinks = list(sinks)
        self.failed: set[Sink] = set()

    def write(self, row: Row) -> None:
        for sink in self.sinks:
            try:
                sink.write(row)
            except Exception as error:
                if sink not in self.failed:
                    what = f"{type(sink).__name__}: {first_line(error)}"
                    warnings.warn(f"a log is incomplete, the run continues: {what}", PqlWarning, stacklevel=2)
                self.failed.add(sink)

    def reopen(self) -> None:
        """Continue metrics.jsonl in a run directory that was deleted and created again."""
        for sink in self.sinks:
            if isinstance(sink, Jsonl):
                sink.close()
                sink.reopen()

    def close(self) -> None:
        for sink in self.sinks:
            with contextlib.suppress(Exception):
                sink.close()


def make_sinks(config: Config, run_dir: Path, console: Console | None, resumed_at: int | None = None) -> Sinks:
    """Create the sinks: metrics.jsonl always, the console unless the run is quiet, and the chosen logger.

    Raises:
        ConfigError: the logger's package is not installed.
    """
    metrics = run_dir / "metrics.jsonl"
    sinks: list[Sink] = [Jsonl(metrics, resumed_at)]
    if config.logger.kind == "tensorboard":
        sinks.append(TensorBoard(run_dir / "tensorboard", resumed_at))
    elif config.logger.kind == "wandb":
        say, offset = console.say if console else None, metrics.stat().st_size
        sinks.append(Wandb(run_dir, config.logger.project, config.logger.mode, to_dict(config), offset, say))
    return Sinks([*sinks, console] if console else sinks)


def check_logger(config: Config) -> None:
    """Raise ``ConfigError`` if the logger's package is not installed."""
    kind = config.logger.kind
    if kind != "none" and kind not in sys.modules and importlib.util.find_spec(kind) is None:
        raise ConfigError("logger", kind, f"the package {kind!r}, which is not installed: pip install 'pql-rl[{kind}]'")


def memory(device: torch.device) -> Row:
    """Return the peak host memory of this process and, on CUDA, the device memory reserved by PyTorch, in GiB."""
    unit = 2**30 if sys.platform == "darwin" else 2**20
    row = {"memory/host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit}
    if device.type == "cuda":
        row["memory/gpu_gib"] = torch.cuda.memory_reserved(device) / 2**30
    return row


ADVICE = {
    "collector": "fewer environments or a faster simulator would speed it up; more updates per step would be free",
    "v": "a smaller critic or batch, fewer updates per step or more threads for v would speed it up",
    "p": "a smaller policy or batch, or fewer policy updates per critic update would speed it up",
    "learner": "smaller networks, fewer epochs or more threads for v would speed it up",
}


def closing_words(
    summary: Summary,
    busy: Row,
    seconds: float,
    ticks: int,
    budget: BudgetConfig,
    kept: tuple[bool, bool] = (True, True),
    code: bool = False,
) -> str:
    """Return the last lines of a run: result, bottleneck, directory and the commands to use next.

    Args:
        busy: worker -> seconds of work in this sitting.
        seconds: duration of the sitting's ``ticks``.
        kept: (policy, resume point): True for each one on disk; commands that need a missing one are not shown.
        code: the run's configuration names code, so that the commands need ``--trust``.
    """
    policy, point = kept
    score = "not evaluated" if summary.return_mean is None else scores(summary)
    run = shlex.quote(summary.run_dir)
    ended = f"interrupted{', saved' if point or policy else ''}" if summary.interrupted else "done"
    again = f"pql resume {run}{'' if summary.interrupted else more(summary, budget)}"
    trust = " --trust" if code else ""
    commands = [*([f"pql eval {run}{trust}"] if policy else []), *([f"{again}{trust}"] if point else [])]
    return "\n".join(
        [
            f"{ended}: {score}",
            f"{summary.seconds:,.0f} s, {summary.env_steps:,} env steps, {summary.updates_v:,} critic and "
            f"{summary.updates_p:,} policy updates",
            bounded(busy, seconds) if ticks else idle(summary),
            f"run: {summary.run_dir}",
            *([f"policy: {summary.checkpoint}"] if policy else []),
            *(f"{' ' * 6 if i else 'next: '}{command}" for i, command in enumerate(commands)),
        ]
    )


def bounded(busy: Row, seconds: float) -> str:
    """Return the busiest worker, for which ticks wait, with advice."""
    bound = max(busy, key=lambda k: busy[k])
    shares = ", ".join(f"{k} {v / max(seconds, 1e-9):.0%}" for k, v in busy.items())
    return textwrap.fill(f"the tick is bounded by {bound} (busy: {shares}): {ADVICE[bound]}", WIDTH)


def idle(summary: Summary) -> str:
    """Return why a sitting ran no tick."""
    if summary.interrupted or summary.updates_v == 0:
        return "nothing was learned in this sitting: it ended before the first tick"
    return "nothing was learned in this sitting: the budget of the run was already used up"


def more(summary: Summary, budget: BudgetConfig) -> str:
    """Suggest a budget for resuming: twice the amount used, and no bound below the run's own."""
    words = ""
    if budget.seconds:
        words += f" budget.seconds={math.ceil(max(2 * max(summary.seconds, 1), budget.seconds))}"
    if budget.env_steps:
        words += f" budget.env_steps={max(2 * summary.env_steps, budget.env_steps)}"
    return words


def scores(summary: Summary) -> str:
    """Return the final evaluation as text."""
    middle = "" if summary.return_median is None else f"median {summary.return_median:,.1f}, "
    success = "" if summary.success is None else f", success {summary.success:.0%}"
    length = "" if summary.length_mean is None else f" of {summary.length_mean:,.1f} steps"
    return (
        f"return {summary.return_mean:,.1f} ({middle}IQM {summary.return_iqm:,.1f}){success} "
        f"over {summary.episodes} episodes{length}"
    )
