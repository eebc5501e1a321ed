"""``pql profile``: where a run's tick goes: who bounds it, kernels and their time, and what to change."""

import gzip
import json
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from pql.cli.tables import table
from pql.errors import ConfigError, writing

if TYPE_CHECKING:
    from pql.reports.trace import Work
    from pql.run.components import Parts

BEFORE = 4  # ticks before the measured ones: the executor tells a tick's busy time two ticks later
HOST = 0.5  # share of a tick in which kernels run, below which the host is the limit
MANY = 100  # kernels in an update, from which compilation is worth a hint
UNITS = {"collector": "env step", "v": "critic update", "p": "policy update", "learner": "update"}


def profile(overrides: Sequence[str], path: Path, ticks: int) -> int:
    """Build the run, make some ticks, profile ``ticks`` more; write the trace, print where they go, and return 0.

    Args:
        overrides: as for ``pql train``.
        path: the trace's file, a Chrome trace.
    Raises:
        ConfigError: a wrong setting or number, or a run that does not fit into memory.
    """
    from pql.config.compose import compose
    from pql.engine.watchdog import guarded
    from pql.reports.trace import work_of
    from pql.run.build import build
    from pql.run.log.console import Console

    config = compose(overrides)
    if config.algo.schedule == "replicas":
        raise ConfigError("algo.schedule", "replicas", "another: replicas have no common tick")
    if config.task.name == "remote":
        raise ConfigError("task", "remote", "the simulator's own task, without actors")
    if ticks < 1:
        raise ConfigError("--ticks", ticks, "at least 1")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError("--out", str(path), "a file in a folder that exists and can be written to")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before torch is loaded
    with guarded(), closing(Console("pql profile", {})) as console:
        with console.doing("building the simulator and the networks"):
            parts = build(config)
        try:
            with console.doing("compiling", parts.preparation):
                parts.prepare()
            with console.doing("the first ticks"):
                parts.start()
                parts.warm_up(config.algo.warmup_steps)
                parts.begin()
                while min(one.updates for one in parts.jobs.values()) == 0:
                    parts.schedule.tick()
                seconds, busy = measured(parts, ticks)
            with console.doing("profiling"):
                trace = traced(parts, ticks, path)
        finally:
            parts.close()
    work, on_gpu = work_of(trace, list(parts.workers))
    print(profile_report(parts, Profiled(seconds, busy, work, ticks, on_gpu, lengths(trace, parts.workers))))
    print(f"trace: {path} (ui.perfetto.dev shows it)")
    return 0


def measured(parts: "Parts", ticks: int) -> tuple[float, dict[str, float]]:
    """Return the seconds of a tick, and the share of it in which each worker works."""
    for _ in range(BEFORE):
        parts.schedule.tick()
    finish(parts)
    before, began = {name: one.busy for name, one in parts.workers.items()}, time.perf_counter()
    for _ in range(ticks):
        parts.schedule.tick()
    finish(parts)
    seconds = (time.perf_counter() - began) / ticks
    return seconds, {n: (one.busy - before[n]) / ticks / seconds for n, one in parts.workers.items()}


def finish(parts: "Parts") -> None:
    """Wait for the devices."""
    import torch

    from pql.engine.deadlines import step_limit
    from pql.engine.watchdog import watching

    with watching("the ticks", step_limit(parts.config.placement)):
        for device in {worker.device for worker in parts.workers.values()}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)


def traced(parts: "Parts", ticks: int, path: Path) -> list[dict[str, Any]]:
    """Make ``ticks`` ticks under PyTorch's profiler, with a range of each worker's name around its work; write the
    trace to ``path``, and return its events."""
    import torch
    from torch._C._profiler import _ExperimentalConfig  # no other way to see the workers' threads
    from torch.profiler import ProfilerActivity

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    with ranges(parts), torch.profiler.profile(activities=kinds, experimental_config=everywhere) as recorded:
        for _ in range(ticks):
            parts.schedule.tick()
        finish(parts)
    with writing("--out", path, "file"):
        recorded.export_chrome_trace(str(path))
        read = gzip.open if path.suffix == ".gz" else open
        with read(path, "rt") as file:
            return json.load(file)["traceEvents"]


def lengths(trace: Sequence[Mapping[str, Any]], workers: Collection[str]) -> dict[str, float]:
    """Return the us that each worker's ranges in a trace last."""
    ranges = [e for e in trace if e.get("cat") == "user_annotation"]
    return {name: sum(e["dur"] for e in ranges if e["name"] == name) for name in workers}


@contextmanager
def ranges(parts: "Parts") -> Iterator[None]:
    """Context manager: name what each worker does in the profiler's trace."""
    from torch.profiler import record_function

    def named(name: str, run: Any) -> Any:
        def inside(*args: Any) -> None:
            with record_function(name):
                run(*args)

        return inside

    for name, worker in parts.workers.items():
        worker.run = named(name, worker.run)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for worker in parts.workers.values():
            del worker.run


class Profiled(NamedTuple):
    """What was measured.

    Attributes:
        seconds: of a tick.
        busy: worker -> share of a tick in which it works.
        work: worker -> its kernels in ``ticks`` ticks, or operations where it is not ``on_gpu``.
        traced: worker -> us that it worked under the profiler, which slows operations down.
    """

    seconds: float
    busy: Mapping[str, float]
    work: "Mapping[str, Work]"
    ticks: int
    on_gpu: bool
    traced: Mapping[str, float]

    def per(self, worker: str, amount: float) -> float:
        """Return a worker's kernels per step or update, of which a tick has ``amount``."""
        return self.work[worker].count / self.ticks / amount

    def running(self, worker: str) -> float:
        """Return the share of a tick in which a worker's kernels run, above 1 if several run at once.

        On a CPU it is the share of ``busy`` that operations have under the profiler.
        """
        if not self.on_gpu:
            return self.busy[worker] * self.work[worker].us / self.traced[worker]
        return 1e-6 * self.work[worker].us / self.ticks / self.seconds


def profile_report(parts: "Parts", found: Profiled) -> str:
    """Return where a tick goes, as text."""
    from pql.reports.trace import largest
    from pql.run.log.closing import bounded

    amount = amounts(parts)
    what, of = ("kernels", "running") if found.on_gpu else ("operations", "computing")
    rate = {name: count / found.seconds for name, count in amount.items()}
    steps = rate.pop("collector") * parts.env.spec.num_envs
    heading = f"a tick: {1e3 * found.seconds:.3g} ms, {steps:,.0f} env steps/s"
    for name, each in rate.items():
        heading += f", {each:,.0f} {UNITS.get(name, name)}s/s"
    rows = [["worker", "busy", what, "", of]]
    for name, share in found.busy.items():
        per = f"per {UNITS.get(name, 'update')}"
        rows.append([name, f"{share:.0%}", f"{found.per(name, amount[name]):,.0f}", per, f"{found.running(name):.0%}"])
    most = [["ms a tick", "each", "worker", f"the largest {what}"]]
    for worker, name, us, count in largest(found.work):
        most.append([f"{us / found.ticks / 1e3:.3f}", f"{us / count:,.0f} us", worker, name[:80]])
    tables = (table(rows, (1, 2, 4)), table(most, (0, 1)))
    return "\n\n".join((heading, *tables, bounded({**found.busy}), *hints(parts, found)))


def hints(parts: "Parts", found: Profiled) -> Iterator[str]:
    """Yield what to change, besides the slowest worker."""
    amount, (one, *_) = amounts(parts), parts.collector.slices
    slowest = max(found.busy, key=lambda name: found.busy[name])
    many = [name for name in found.work if found.per(name, amount[name]) > MANY]
    if found.on_gpu and sum(map(found.running, found.work)) < HOST:
        yield "the device waits for the host: graphs=auto captures updates and steps"
    if found.on_gpu and many and not {*many} <= {*parts.compiled()}:
        yield f"many small kernels ({', '.join(many)}): placement.compile=auto compiles them"
    if found.on_gpu and slowest == "collector" and not one.whole:
        yield "the simulator's step is no part of a graph: the host launches it (docs/guides/performance.md#graphs)"


def amounts(parts: "Parts") -> dict[str, float]:
    """Return the steps of each environment and the updates in a tick, by worker."""
    counts = cast(Any, parts.schedule).counts
    return {"collector": float(counts.horizon), **{name: float(counts.updates[name]) for name in parts.jobs}}
