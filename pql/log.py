"""Where numbers go: metrics.jsonl and the console always; TensorBoard or wandb on request.

Metrics are summed on the device by their owners. A row is assembled at a tick's boundary, copied to the host
asynchronously, and written a tick later: no sink ever makes a worker wait.
"""

import contextlib
import json
import queue
import resource
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

Row = dict[str, float]


class Sink(Protocol):
    def write(self, row: Row) -> None: ...
    def close(self) -> None: ...


class Jsonl:
    """One JSON object a line, numbers only. A number that JSON lacks (nan, inf) is left out."""

    def __init__(self, path: Path):
        self.file = path.open("a", buffering=1)

    def write(self, row: Row) -> None:
        finite = {k: v for k, v in row.items() if abs(v) < float("inf")}
        self.file.write(json.dumps(finite) + "\n")

    def close(self) -> None:
        self.file.close()


class TensorBoard:
    """Scalars by env step. Needs the extra ``tensorboard``."""

    def __init__(self, folder: Path):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder))

    def write(self, row: Row) -> None:
        for key, value in row.items():
            self.writer.add_scalar(key, value, int(row["steps/env"]))

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """wandb in a thread of its own, offline unless asked: whatever it does, the run neither waits nor stops."""

    def __init__(self, folder: Path, project: str, mode: str, config: dict[str, Any]):
        self.rows: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
        options = {"dir": str(folder), "project": project, "mode": mode, "config": config}
        self.thread = threading.Thread(target=self._loop, args=(options,), name="pql-wandb", daemon=True)
        self.thread.start()

    def _loop(self, options: dict[str, Any]) -> None:
        try:
            import wandb

            run = wandb.init(**options)
            while (row := self.rows.get()) is not None:
                run.log(row, step=int(row["steps/env"]))
            run.finish()
        except Exception as error:
            warnings.warn(f"wandb stopped, the run goes on: {type(error).__name__}: {error}", stacklevel=1)

    def write(self, row: Row) -> None:
        self.rows.put(row)

    def close(self) -> None:
        self.rows.put(None)
        self.thread.join(timeout=15.0)


class Console:
    """A live panel on a terminal, plain lines when piped (at most one every ``every`` seconds)."""

    def __init__(self, title: str, budget: Row, every: float = 10.0):
        from rich.console import Console as RichConsole
        from rich.live import Live

        self.title, self.budget, self.every = title, budget, every
        self.console = RichConsole()
        self.last = -1e9
        self.seen: Row = {}
        self.live = Live(console=self.console, refresh_per_second=4) if self.console.is_terminal else None
        if self.live:
            self.live.start()

    def write(self, row: Row) -> None:
        self.seen |= row
        if self.live:
            self.live.update(self._panel())
        elif row["time/seconds"] - self.last >= self.every or "eval/return_mean" in row:
            self.last = row["time/seconds"]
            self.console.print(plain_line(self.seen | row, self._eta()), highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self.live:
            self.live.stop()
            self.live = None

    def _eta(self) -> float | None:
        """Seconds left by the budget that ends first; None where nothing bounds the run."""
        seconds, steps = self.seen["time/seconds"], self.seen["steps/env"]
        left = []
        if "seconds" in self.budget:
            left.append(self.budget["seconds"] - seconds)
        if "env_steps" in self.budget and steps > 0:
            left.append((self.budget["env_steps"] - steps) * seconds / steps)
        return max(0.0, min(left)) if left else None

    def _panel(self) -> Any:
        from rich.panel import Panel
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        for label, text in describe(self.seen, self._eta()):
            table.add_row(label, text)
        return Panel(table, title=self.title, expand=False)


def describe(row: Row, eta: float | None) -> list[tuple[str, str]]:
    """(label, text) of what a person wants to see of a run."""

    def number(key: str, form: str = ",.0f") -> str:
        return format(row[key], form) if key in row else "-"

    return [
        ("time", f"{number('time/seconds')} s" + (f", {eta:,.0f} s left" if eta is not None else "")),
        ("env steps", f"{number('steps/env')}  ({number('throughput/env_steps_per_s')}/s)"),
        ("updates", f"v {number('updates/v')}, p {number('updates/p')}  ({number('throughput/updates_per_s')}/s)"),
        ("ratios", f"v/step {number('ratio/v_per_step', 'g')}, p/v {number('ratio/p_per_v', 'g')}, "
                   f"lag {number('lag/policy_ticks', 'g')}"),
        ("return", f"train {number('train/return_mean', ',.1f')}, eval {number('eval/return_mean', ',.1f')}"),
        ("busy", f"collector {number('busy/collector', '.0%')}, v {number('busy/v', '.0%')}, p {number('busy/p', '.0%')}"),
        ("memory", f"{number('memory/host_gib', '.2f')} GiB"
                   + (f", GPU {number('memory/gpu_gib', '.2f')} GiB" if "memory/gpu_gib" in row else "")),
    ]  # fmt: skip


def plain_line(row: Row, eta: float | None) -> str:
    return " | ".join(f"{label} {text}" for label, text in describe(row, eta))


class Pending:
    """Device scalars on their way to the host."""

    def __init__(self, values: dict[str, Tensor], row: Row):
        self.row, self.names = row, list(values)
        self.event: torch.cuda.Event | None = None
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
        """The row with the values filled in; waits where they have not arrived."""
        for event in self.events:
            event.synchronize()
        for names, values in self.parts:
            self.row |= dict(zip(names, values.tolist(), strict=True))
        return self.row


class Sinks:
    """All sinks of a run. One that fails is dropped with a warning; the run goes on."""

    def __init__(self, sinks: list[Sink]):
        self.sinks = sinks

    def write(self, row: Row) -> None:
        for sink in list(self.sinks):
            try:
                sink.write(row)
            except Exception as error:
                self.sinks.remove(sink)
                warnings.warn(f"{type(sink).__name__} dropped, the run goes on: {error}", stacklevel=2)

    def close(self) -> None:
        for sink in self.sinks:
            with contextlib.suppress(Exception):
                sink.close()


def memory(device: torch.device) -> Row:
    """Peak host memory of this process and, on CUDA, what PyTorch holds on the device, in GiB."""
    unit = 2**30 if sys.platform == "darwin" else 2**20
    row = {"memory/host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit}
    if device.type == "cuda":
        row["memory/gpu_gib"] = torch.cuda.memory_reserved(device) / 2**30
    return row


def stamp() -> str:
    return time.strftime("%Y%m%d-%H%M%S")
