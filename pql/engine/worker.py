"""Workers, learners, and the slots in which workers exchange weights, statistics and replay cursors.

A :class:`Learner` is the algorithm: named state, a function that draws batches, an update. A :class:`Worker` runs a
learner or the collector on a device and a thread share: it pulls private copies, works, publishes. Apart from
replay rows below the published cursor, no worker reads another worker's tensors: the owner publishes a copy at the end
of its tick, readers pull a copy at the start of theirs. Two buffers alternate, so that publishing version v + 1 never
touches version v, which may still be read: the join of all workers between ticks is the only synchronisation needed.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import Field, dataclass, fields
from typing import Any, TypeVar

import torch
from torch import Generator, Tensor

from pql.engine import watchdog
from pql.engine.collectives import ALONE, Group
from pql.engine.cpu_graph import CpuGraph, make_graph
from pql.engine.graph import Execution
from pql.engine.optim import Optimizer
from pql.engine.recorder import boundary
from pql.types import Metrics


class WeightSlot:
    """Published copies of a fixed list of tensors with one owner.

    Args:
        name: used in traces and errors.
        source: the owner's tensors, copied by every ``publish``.
    """

    def __init__(self, name: str, source: Sequence[Tensor]):
        self.name = name
        self.source = [t.detach() for t in source]
        self.buffers = [[t.clone() for t in self.source] for _ in range(2)]
        self.version = 0  # number of publications

    @torch.no_grad()
    def publish(self) -> int:
        """Copy the owner's tensors into the buffer that is not being read. Returns the new version."""
        torch._foreach_copy_(self.buffers[(self.version + 1) % 2], self.source)
        self.version += 1
        return self.version

    @torch.no_grad()
    def pull(self, target: Sequence[Tensor], version: int) -> int:
        """Copy ``version`` into ``target``, in place and across devices. Returns the version copied.

        Raises:
            AssertionError: that version is not available: the schedule violated its order.
        """
        assert version in (self.version, self.version - 1), f"slot {self.name}: {version} of {self.version}"
        for t, s in zip(target, self.buffers[version % 2], strict=True):
            t.copy_(s, non_blocking=True)
        return version

    def reload(self, version: int) -> None:
        """Publish the owner's tensors as ``version``, after a checkpoint changed them."""
        self.version = version - 1
        self.publish()


PULLED = {"pulled": True}
"""Metadata of the fields of a :class:`State` that hold copies of what other workers publish."""


class State:
    """Base of the learners' state dataclasses: what an update changes, and copies of what other workers publish.

    Its state_dict has the state_dict of every field that has one, except copies (``PULLED``); others are not saved.
    """

    def own(self) -> dict[str, Any]:
        """Return the fields that are not copies, and states added with :meth:`add`."""
        declared: tuple[Field[Any], ...] = fields(self)  # type: ignore[arg-type]
        mine = {f.name: getattr(self, f.name) for f in declared if "pulled" not in f.metadata}
        return mine | vars(self).get("_added", {})

    def add(self, name: str, state: "State") -> None:
        """Add a state that an extension of the update changes; it is saved and connected with this one."""
        vars(self).setdefault("_added", {})[name] = state

    def state_dict(self) -> dict[str, Any]:
        return {k: v.state_dict() for k, v in self.own().items() if hasattr(v, "state_dict")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for k, v in self.own().items():
            if hasattr(v, "state_dict"):
                v.load_state_dict(state[k])

    def optimizers(self) -> list[Optimizer]:
        members = self.own().values()
        nested = [optimizer for one in members if isinstance(one, State) for optimizer in one.optimizers()]
        return [*(member for member in members if isinstance(member, Optimizer)), *nested]

    def connect(self, group: Group) -> None:
        """Train the same weights as all processes of ``group``: optimisers average their gradients."""
        for member in self.own().values():
            if isinstance(member, Optimizer | State):
                member.connect(group)


StateT = TypeVar("StateT")
BatchT = TypeVar("BatchT")
SettingsT = TypeVar("SettingsT")
Update = Callable[[StateT, BatchT, SettingsT, Generator], Metrics]
"""(state, batch, settings, gen) -> metrics, 0-dim. It changes only ``state``; ``settings`` is ``config.algo``."""

Tensors = dict[str, list[Tensor]]
"""Tensors by the name of the slot that fills or publishes them."""


@dataclass
class Learner:
    """Work of a worker that learns: draw batches and update a state.

    Attributes:
        name: of the worker.
        draw: (k, gen) -> k batches. Rows that can be read do not change within a tick.
        pulls: tensors that slots fill before each tick: copies in ``state`` and of ``draw``.
        publishes: tensors of ``state`` that others pull.
        trains: counters of updates that it increments: "v" (value), "p" (policy).
        lost: 0-dim; bootstraps lost because a simulator gave no final observation. Saved with the run.
        clock: 0-dim, in ``state``; ticks so far, for schedules that depend on them.
        begin: called once before a new run's first tick; it may wait for the device.
        rest: called in place of updates, in a tick that has none.
    """

    name: str
    state: State
    update: Update[Any, Any, Any]
    settings: Any
    draw: Callable[[int, Generator], Iterable[Any]]
    gen: Generator
    pulls: Tensors
    publishes: Tensors
    trains: tuple[str, ...]
    lost: Tensor | None = None
    clock: Tensor | None = None
    begin: Callable[[], None] | None = None
    rest: Callable[[], None] | None = None


class MetricSum:
    """Sums of an update's metrics on the device; read once per log line, never in between."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.sums: list[Tensor] = []
        self.count: Tensor | None = None

    @torch.no_grad()
    def add(self, metrics: Metrics) -> None:
        if self.count is None:
            self.names = list(metrics)
            self.sums = [torch.zeros_like(v) for v in metrics.values()]
            self.count = torch.zeros_like(self.sums[0])
        torch._foreach_add_([self.count, *self.sums], [torch.ones_like(self.count), *metrics.values()])

    def zero(self) -> None:
        if self.count is not None:
            torch._foreach_zero_([self.count, *self.sums])

    def absorb(self, other: "MetricSum") -> None:
        """Add the sums of ``other``, which has the same metrics, and reset it. Both must be non-empty."""
        assert self.count is not None
        assert other.count is not None
        sums = [t.to(self.count.device) for t in (other.count, *other.sums)]
        torch._foreach_add_([self.count, *self.sums], sums)
        other.zero()

    def drain(self, group: Group = ALONE) -> dict[str, Tensor]:
        """Return means since the last drain, over all processes of ``group``, as device tensors; then reset."""
        if self.count is None:
            return {}
        count, *sums = group.sum_(torch.stack([self.count, *self.sums]))
        self.zero()
        return dict(zip(self.names, torch.stack(sums) / count.clamp(min=1), strict=True))


class LearnerJob:
    """A burst of ``size`` updates in one graph, or eager (``Graph``)."""

    def __init__(self, learner: Learner, size: int, device: torch.device, execution: Execution):
        self.learner, self.size = learner, size
        self.metrics = MetricSum()
        self.updates = 0
        self.group = ALONE
        self.graph = make_graph(
            self._burst, device, [learner.gen], self, execution, f"the updates of worker {learner.name}"
        )

    def _burst(self) -> None:
        one = self.learner
        for batch in one.draw(self.size, one.gen):
            boundary()  # so that all updates of a burst share what is compiled for one
            metrics = one.update(one.state, batch, one.settings, one.gen)
            broken = [optimizer.broken for optimizer in one.state.optimizers()]
            self.metrics.add({**metrics, f"skipped/{one.name}": functools.reduce(torch.maximum, broken)})
            boundary()
            watchdog.touch()

    def __call__(self, bursts: int) -> None:
        if bursts == 0 and self.learner.rest is not None:
            self.learner.rest()
        for _ in range(bursts):
            with self.group.turn():
                self.graph()
        self.updates += bursts * self.size

    def connect(self, group: Group) -> None:
        """Train jointly with all processes of ``group``. Call it before the graph is captured."""
        self.group = group
        self.learner.state.connect(group)
        if isinstance(self.graph, CpuGraph) and group is not ALONE:  # a program has no collective operations
            self.graph.capture = False

    # the graph's warm-up must leave this state unchanged
    def state_dict(self) -> dict[str, Any]:
        return {"state": self.learner.state.state_dict(), "gen": self.learner.gen.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.learner.state.load_state_dict(state["state"])
        self.learner.gen.set_state(state["gen"].cpu())
        self.metrics.zero()


@contextmanager
def intra_op(threads: int) -> Iterator[None]:
    """Set the intra-op threads of the calling thread in the block."""
    before = torch.get_num_threads()  # first: its first call sets the calling thread to the process-wide count
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


Pull = tuple[WeightSlot, Sequence[Tensor]]


class Worker:
    """One role of the tick: pull private copies, work, publish.

    Args:
        job: called with a count (steps for the collector, bursts for a learner).
        pulls: slots and the private tensors that receive them.
        publishes: slots that this worker owns.
        threads: intra-op threads; a per-thread setting in PyTorch, so it is applied wherever the job runs.
        trace: records every pull and publish (see ``schedule.Trace``).
    """

    def __init__(
        self,
        name: str,
        job: Callable[[int], None],
        device: torch.device,
        pulls: Sequence[Pull] = (),
        publishes: Sequence[WeightSlot] = (),
        threads: int = 1,
        trace: Callable[..., None] | None = None,
    ):
        self.name, self.job, self.device, self.threads = name, job, device, threads
        self.pulls, self.publishes, self.trace = pulls, publishes, trace
        self.pulled: dict[str, int] = {}
        self.busy = 0.0  # seconds of work so far, as the executor measured them

    def run(self, count: int, version: int | None = None) -> None:
        """Pull (``version``, or the newest if None), work, publish."""
        with intra_op(self.threads):
            for slot, target in self.pulls:
                self.pulled[slot.name] = slot.pull(target, slot.version if version is None else version)
                if self.trace:
                    self.trace("pull", self.name, slot.name, self.pulled[slot.name])
            self.job(count)
            for slot in self.publishes:
                slot.publish()
                if self.trace:
                    self.trace("publish", self.name, slot.name, slot.version)
