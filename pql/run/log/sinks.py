"""Metric sinks: metrics.jsonl and the console always; TensorBoard, a tracker or a package's logger on request.

Workers sum their metrics on the device. A row is assembled at a tick boundary, copied to the host asynchronously and
written one tick later, so that no sink makes a worker wait.
"""

import contextlib
import importlib.util
import json
import resource
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from pql.config import Config, to_dict
from pql.config.files import check_ordinary, create_file
from pql.config.schema import LOGGERS, PLUGINS
from pql.contract.plugins import entry_points
from pql.errors import ConfigError, HungError, PqlWarning, first_line, writing
from pql.run.log.console import Console
from pql.run.log.displays import Row
from pql.run.log.loggers import LATER, TensorBoard, Tracker

LINE = 1 << 20  # upper limit of a row's characters; rows are far shorter


PART = 32 << 20  # bytes of metrics.jsonl after which rows come half as often
LONGEST = 1024  # times the configured interval


class Sink(Protocol):
    """A receiver of rows."""

    def write(self, row: Row) -> None: ...
    def close(self) -> None: ...


@runtime_checkable
class WithVideos(Protocol):
    """Optional for a sink: it also receives videos."""

    def video(self, path: Path, step: int) -> None:
        """Log the finished mp4 at ``path``, an episode of the policy at ``step`` env steps; return without waiting."""
        ...


def stretch(run_dir: Path) -> int:
    """Return the factor by which the interval between rows is longer than configured, a power of two.

    It doubles with every ``PART`` of metrics.jsonl: 32 MB hold nine hours of rows every two seconds, 256 MB three
    months. A row covers its whole interval, so that only resolution in time is lost. One file, and not several of
    limited size, because readers (trackers, sweeps, ``pql watch``, scripts of users) follow it by its name.
    """
    try:
        size = (run_dir / "metrics.jsonl").stat().st_size
    except OSError:  # deleted: it is created again
        return 1
    return min(2 ** (size // PART), LONGEST)


class Jsonl:
    """metrics.jsonl: one JSON object per line, with finite numbers only; nan and inf are left out.

    Args:
        resumed_at: env steps at which a resumed run continues. Later rows, which it will write again, and truncated
            lines are dropped.

    Raises:
        ConfigError: the file of a resumed run is not a regular file.
        OSError: it cannot be written.
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
        try:
            create_file(temporary, "")
            with path.open(errors="replace") as file, temporary.open("a") as kept:
                while line := file.readline(LINE):
                    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                        if json.loads(line)["steps/env"] <= steps:
                            kept.write(line.rstrip("\n") + "\n")
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def write(self, row: Row) -> None:
        finite = {k: v for k, v in row.items() if abs(v) < float("inf")}
        self.file.write(json.dumps(finite) + "\n")

    def close(self) -> None:
        self.file.close()


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
            with self._warning_once(sink):
                sink.write(row)

    def video(self, path: Path, step: int) -> None:
        """Show a finished mp4, recorded at ``step`` env steps, in every logger that shows videos."""
        for sink in self.sinks:
            if isinstance(sink, WithVideos):
                with self._warning_once(sink):
                    sink.video(path, step)

    @contextlib.contextmanager
    def _warning_once(self, sink: Sink) -> Iterator[None]:
        try:
            yield
        except HungError:  # from the watchdog
            raise
        except Exception as error:
            if sink not in self.failed:
                what = f"{type(sink).__name__}: {first_line(error)}"
                warnings.warn(f"a log is incomplete, the run continues: {what}", PqlWarning, stacklevel=4)
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
    """Create the sinks: metrics.jsonl always, the console unless the run is quiet, and the chosen logger. Raises
    ``ConfigError``: the logger's package is not installed, or metrics.jsonl cannot be written."""
    metrics = run_dir / "metrics.jsonl"
    with writing("run_dir", run_dir):
        sinks: list[Sink] = [Jsonl(metrics, resumed_at)]
        kind, offset = config.logger.kind, metrics.stat().st_size
    if kind == "tensorboard":
        sinks.append(TensorBoard(run_dir / "tensorboard", resumed_at))
    elif kind in LATER:
        sinks.append(Tracker(config, run_dir, offset, console.say if console else None))
    elif kind != "none":
        sinks.append(find_logger(kind)(run_dir, to_dict(config), resumed_at))
    return Sinks([*sinks, console] if console else sinks)


def find_logger(kind: str) -> Callable[[Path, dict[str, Any], int | None], Sink]:
    """Return the logger of an installed package (entry-point group ``pql.loggers``).

    It is called with the run directory, the settings and the env steps of a resumed run, and returns a sink.

    Raises:
        ConfigError: its package cannot be imported.
    """
    entry = next(e for e in entry_points(group=PLUGINS) if e.name == kind)
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError("logger", kind, f"a logger that can be imported: {entry.value} ({error})") from error


def check_logger(config: Config) -> None:
    """Raise ``ConfigError`` if the logger's package is not installed."""
    kind = config.logger.kind
    if kind not in LOGGERS:
        find_logger(kind)
    elif kind != "none" and kind not in sys.modules and importlib.util.find_spec(kind) is None:
        raise ConfigError("logger", kind, f"the package {kind!r}, which is not installed: pip install 'pql-rl[{kind}]'")


def memory(device: torch.device) -> Row:
    """Return the peak host memory of this process and, on CUDA, the device memory reserved by PyTorch, in GiB."""
    unit = 2**30 if sys.platform == "darwin" else 2**20
    row = {"memory/host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit}
    if device.type == "cuda":
        row["memory/gpu_gib"] = torch.cuda.memory_reserved(device) / 2**30
    return row
