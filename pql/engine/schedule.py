"""Schedules: the order of collection and updates. A tick is ``horizon`` env steps plus each learner's updates.

``Concurrent``: all workers run in parallel on weights exactly one tick old. Apart from replay rows, which are read only
below the published cursor, they share no tensors: threads, CUDA streams and sequential execution give the same bits.
``Lockstep``: workers run one after another, each on the newest weights.
``Replicas`` (``run/replicas.py``): several lockstep replicas in parallel on shared parameters.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, Protocol

from pql.engine.executors import Executor
from pql.engine.worker import Worker
from pql.errors import ConfigError

LONGEST_HORIZON = 64


@dataclass(frozen=True)
class Counts:
    """Steps and updates per tick, and the rounds in which ``Lockstep`` interleaves the learners' updates."""

    horizon: int
    updates: Mapping[str, int]  # by learner
    rounds: int
    ahead: int = 0  # steps collected before the first tick, so that its updates have a rollout


def tick_counts(v_per_step: float, p_per_v: float) -> Counts:
    """Return the smallest tick with whole numbers of updates at both ratios (Li et al. 2023).

    Args:
        v_per_step: critic updates per step of all environments (beta_a:v = 1:8 is 8).
        p_per_v: policy updates per critic update (beta_p:v = 1:2 is 0.5).
    Raises:
        ConfigError: no horizon up to 64 gives whole numbers.
    """
    v, p = exact(v_per_step), exact(v_per_step) * exact(p_per_v)
    for horizon in range(1, LONGEST_HORIZON + 1):
        kv, kp = v * horizon, p * horizon
        if kv.denominator == kp.denominator == 1 and kv >= 1 and kp >= 1:
            a, b = int(kv), int(kp)
            return Counts(horizon, {"v": a, "p": b}, next(g for g in range(min(a, b), 0, -1) if a % g == b % g == 0))
    allowed = (
        f"a ratio that, with algo.p_per_v={p_per_v}, gives whole numbers of updates within {LONGEST_HORIZON} steps"
    )
    raise ConfigError("algo.v_per_step", v_per_step, allowed)


def exact(ratio: float) -> Fraction:
    """Return a ratio as a fraction; 0.333333 is meant to be 1/3."""
    simple = Fraction(ratio).limit_denominator(LONGEST_HORIZON)
    return simple if abs(float(simple) - ratio) < 1e-6 else Fraction(str(ratio))


class Trace:
    """Record of a tick's events and synchronisation edges, from which tests derive happens-before."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def __call__(self, *event: Any) -> None:
        self.events.append(event)  # list.append is atomic


class Schedule(Protocol):
    """Interface of schedules. Between ticks no worker is running.

    Attributes:
        reproducible: the same seed gives the same bits.
    """

    ticks: int
    reproducible: bool

    @property
    def executor(self) -> Executor: ...

    def begin(self, ticks: int) -> None:
        """Publish all tensors; the next tick is number ``ticks``."""
        ...

    def tick(self) -> None: ...

    def measures(self) -> dict[str, float]:
        """Return metrics of the schedule since the last call."""
        ...


class _Ticks:
    """Base of the schedules of one set of workers."""

    reproducible = True

    def __init__(
        self, workers: Mapping[str, Worker], counts: Counts, executor: Executor, behind_target: Callable[[], bool]
    ):
        self.workers, self.counts, self.executor = workers, counts, executor
        self.behind_target = behind_target  # learners pause while remote actors are late
        self.ticks = 0
        self.lag = 0  # ticks between the policy of the newest rows and the newest policy

    def begin(self, ticks: int) -> None:
        self.ticks = ticks
        for worker in self.workers.values():
            for slot in worker.publishes:
                slot.reload(ticks)

    def measures(self) -> dict[str, float]:
        return {"lag/policy_ticks": self.lag}


class Concurrent(_Ticks):
    """All workers in parallel, each exactly one tick stale (Parallel Q-Learning)."""

    def begin(self, ticks: int) -> None:
        """Publish all tensors; in a new run, also collect the rows that the first update needs."""
        super().begin(ticks)
        if ticks == 0 and self.counts.ahead:
            self.executor.run({"collector": partial(self.workers["collector"].run, self.counts.ahead, 0)})
            with self.executor.exclusive():
                super().begin(0)

    def tick(self) -> None:
        version, counts = self.ticks, {"collector": self.counts.horizon}
        bursts = 0 if self.behind_target() else 1
        jobs = {name: partial(w.run, counts.get(name, bursts), version) for name, w in self.workers.items()}
        account(self.workers, self.executor.run(jobs))
        self.lag = policy_lag(self.workers)
        self.ticks += 1


class Lockstep(_Ticks):
    """The collector, then rounds of each learner's updates, on the newest weights."""

    def tick(self) -> None:
        workers = self.workers
        account(workers, self.executor.run({"collector": partial(workers["collector"].run, self.counts.horizon)}))
        self.lag = policy_lag(workers)
        rounds, bursts = (1, 0) if self.behind_target() else (self.counts.rounds, 1)
        for _ in range(rounds):
            for name in (n for n in workers if n != "collector"):
                account(workers, self.executor.run({name: partial(workers[name].run, bursts)}))
        self.ticks += 1


def account(workers: Mapping[str, Worker], seconds: Mapping[str, float]) -> None:
    """Add ``seconds`` to the workers' busy time."""
    for name, amount in seconds.items():
        workers[name].busy += amount


def policy_lag(workers: Mapping[str, Worker]) -> int:
    """Return the versions between the policy that produced the newest rows and the newest published one."""
    newest = next(s.version for w in workers.values() for s in w.publishes if s.name == "policy")
    return newest - workers["collector"].pulled["policy"]
