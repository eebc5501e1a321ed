"""A stand-in for a CUDA device on the CPU, so that the bodies of the ``gpu`` tests run everywhere.

Graphs are tapes (``pql.engine.tape``), streams and events are a log, and reading a value back to the host is an error
wherever it would wait for a device. Real concurrency and speed are not tested.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pql.engine.executors import Streams
from pql.engine.graph import WARMUP, Graph
from pql.engine.tape import Tape, waits
from pql.errors import RunError

HELD = 30
"""Number of queries until an event recorded on a delayed device has happened."""


class RecordingStreams(Streams):
    """The CUDA executor, with its CUDA calls replaced by a log of synchronisation edges.

    Attributes:
        device: the device that all of them work on; tests delay it.
    """

    def __init__(self, names: Any, log: Callable[..., None]):
        self.log, self.count, self.device = log, 0, Device()
        super().__init__(dict.fromkeys(names, torch.device("cpu")))

    def _stream(self, device: Any, priority: int) -> Any:
        self.count += 1
        self.log("stream", f"stream{self.count}", priority)
        return f"stream{self.count}"

    def _on(self, stream: Any) -> Any:
        self.log("on", stream)
        return contextlib.nullcontext()

    def _wait(self, stream: Any, event: Any) -> None:
        self.log("wait", stream, event)

    def _record(self, stream: Any) -> Any:
        self.count += 1
        self.log("record", stream, f"event{self.count}")
        return FakeEvent(f"event{self.count}", self.log, self.device)

    def _current(self) -> list[Any]:
        return ["main"]


class Device:
    """Remaining delay of a device, in queries by the host."""

    def __init__(self) -> None:
        self.left = 0

    def sleep(self, cycles: int = 0) -> None:
        self.left = HELD

    def done(self) -> bool:
        self.left = max(0, self.left - 1)
        return self.left == 0


class FakeEvent(str):
    """A named event; it has happened when its device is no longer delayed."""

    log: Callable[..., None]
    device: Device

    def __new__(cls, name: str, log: Callable[..., None], device: Device) -> "FakeEvent":
        event = super().__new__(cls, name)
        event.log, event.device = log, device
        return event

    def query(self) -> bool:
        self.log("host", str(self))
        return self.device.done()

    def elapsed_time(self, end: str) -> float:
        return 1000.0 * (int(end[5:]) - int(self[5:]))  # in milliseconds: a second between events


class TapedGraph(Graph):
    """A graph whose capture is a tape, on any device."""

    @staticmethod
    def possible(device: torch.device) -> bool:
        return True

    def place(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def take(self) -> Tape:
        for _ in range(WARMUP):
            self.body()
        with Tape(self.generators) as tape:
            self.body()
        return tape

    def finish(self) -> None:
        pass


def pretend(patch: pytest.MonkeyPatch) -> Device:
    """Use graphs, streams and waits as on a CUDA device, on the CPU, until ``patch`` is undone."""
    device = Device()
    for name in ("possible", "place", "take", "finish"):
        patch.setattr(Graph, name, TapedGraph.__dict__[name])

    def begin(self: Any, devices: Any, watchdog: float = 30.0) -> None:
        self.log, self.count, self.device = (lambda *event: None), 0, device
        original(self, devices, watchdog)

    original = Streams.__init__
    patch.setattr(Streams, "__init__", begin)
    for name in ("_stream", "_on", "_wait", "_record", "_current"):
        patch.setattr(Streams, name, RecordingStreams.__dict__[name])
    patch.setattr("pql.run.build.make_executor", lambda place, devices: Streams(devices, place.watchdog_seconds))
    patch.setattr(torch.cuda, "_sleep", device.sleep)
    patch.setattr(torch.cuda, "synchronize", lambda *args: setattr(device, "left", 0))
    patch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    return device


class NoWaiting(TorchDispatchMode):
    """Raises an error for an operation that would make the host wait for a device.

    Raises:
        RunError: names the operation.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if waits(func, args):
            raise RunError(f"{func}: the host would wait for the device")
        return func(*args, **(kwargs or {}))
