"""What a profiler's trace says about a tick: which worker launched what, and how long its kernels ran.

A kernel belongs to the worker in whose range the host launched it, alone or within a graph: the profiler gives launch
and kernels the same correlation number. On a CPU operations take the kernels' place, without those that others call.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH = ("cuda_runtime", "cuda_driver")

PROGRAM = "body"
"""What the profiler calls a recorded program of operations (``pql.engine.cpu_graph``)."""

Event = Mapping[str, Any]


@dataclass
class Work:
    """Kernels, or on a CPU operations, of one worker.

    Attributes:
        count, us: number and microseconds of all of them.
        names: microseconds and number by name.
    """

    count: int = 0
    us: float = 0.0
    names: dict[str, tuple[float, int]] = field(default_factory=dict)

    def add(self, name: str, us: float) -> None:
        self.count += 1
        self.us += us
        spent, count = self.names.get(name, (0.0, 0))
        self.names[name] = (spent + us, count + 1)


def work_of(events: Iterable[Event], workers: Sequence[str]) -> tuple[dict[str, Work], bool]:
    """Return the work of each worker, and True if it is that of a GPU.

    Args:
        events: a Chrome trace's ``traceEvents``; each worker's work is in a range (``user_annotation``) of its name.
    """
    ranges, found = defaultdict(list), list(events)
    for event in found:
        if event.get("cat") == "user_annotation" and event["name"] in workers:
            ranges[event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))

    def owner(event: Event) -> str | None:
        at = event["ts"]
        return next((name for start, end, name in ranges[event["tid"]] if start <= at <= end), None)

    work = {name: Work() for name in workers}
    launched = {e["args"]["correlation"]: e for e in found if e.get("cat") in LAUNCH and "correlation" in e["args"]}
    kernels = [e for e in found if e.get("cat") in DEVICE]
    for event in kernels:
        launch = launched.get(event["args"].get("correlation"))
        name = None if launch is None else owner(launch)
        if name is not None:
            work[name].add(event["name"], event["dur"])
    if not kernels:
        for event in outermost(e for e in found if e.get("cat") == "cpu_op" and e["name"] != PROGRAM):
            if (name := owner(event)) is not None:
                work[name].add(event["name"], event["dur"])
    return work, bool(kernels)


def outermost(operations: Iterable[Event]) -> list[Event]:
    """Return the operations that are not inside of another one of their thread."""
    out: list[Event] = []
    ends: dict[int, float] = defaultdict(float)
    for event in sorted(operations, key=lambda e: (e["ts"], -e["dur"])):
        if event["ts"] >= ends[event["tid"]]:
            out.append(event)
            ends[event["tid"]] = event["ts"] + event["dur"]
    return out


def largest(work: Mapping[str, Work], count: int = 10) -> list[tuple[str, str, float, int]]:
    """Return the kernels or operations that took longest: worker, name, microseconds, number."""
    rows = [(worker, name, us, times) for worker, one in work.items() for name, (us, times) in one.names.items()]
    return sorted(rows, key=lambda row: -row[2])[:count]
