"""Components of a run: its environment, the collector that steps it, and the workers that learn from its rows.

The session accesses a run through :class:`Parts`; one of several replicas is a ``ReplicatedRun`` (``replicas.py``).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pql.algos.registry import env_seed
from pql.collect import saturation
from pql.collect.collector import Collector
from pql.config import Config, leaves
from pql.contract.env import VecEnv, preparation
from pql.contract.optional import Resumable, supports
from pql.data.normalize import Moments
from pql.engine.collectives import ALONE, Group
from pql.engine.deadlines import start_limit, step_limit
from pql.engine.flat import Flat
from pql.engine.graph import Graph
from pql.engine.placement import Machine
from pql.engine.schedule import Counts, Schedule
from pql.engine.watchdog import touch, watching
from pql.engine.worker import Learner, LearnerJob, MetricSum, WeightSlot, Worker, intra_op
from pql.errors import ConfigError


@dataclass
class Parts:
    """Objects of a run.

    Attributes:
        config: of a replica: its share of the run's, with environments, seed and device of its own.
        machine: devices and threads.
        counts: step and update counts of a tick.
        learners: "v" and "p", or "learner" if one trains both.
        gauges: 0-dim values for the log.
        schedule: schedule of the workers.
        policy: the policy that is trained.
        sources: see ``Wiring``.
    """

    config: Config
    machine: Machine
    counts: Counts
    env: VecEnv
    collector: Collector
    learners: dict[str, Learner]
    jobs: dict[str, LearnerJob]
    gauges: dict[str, Tensor]
    slots: dict[str, WeightSlot]
    workers: dict[str, Worker]
    schedule: Schedule
    policy: Flat | nn.Module
    sources: dict[str, str]

    # -- from the start to the end ----------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Compile and capture bodies if enabled; call before the first reset."""
        with self._starting("the compilation and capture of graphs"):
            with intra_op(self.workers["collector"].threads):  # what is compiled for the CPU depends on their number
                self.collector.prepare()
            for name, job in self.jobs.items():
                with intra_op(self.workers[name].threads):
                    job.graph.prepare()

    def bodies(self) -> list[Graph]:
        """Return what :meth:`prepare` compiles and captures, in its order."""
        return [*(body for one in self.collector.slices for body in one.bodies), *(j.graph for j in self.jobs.values())]

    def compiled(self) -> list[str]:
        """Return the workers whose bodies are compiled."""
        acting = any(part.compiled for part in self.collector.slices)
        learning = [name for name, job in self.jobs.items() if job.graph.program is not None]
        return [*(["collector"] if acting else []), *learning]

    def preparation(self) -> str:
        """Return what :meth:`prepare` is doing, in words. Other threads may call it."""
        wanted = [body for body in self.bodies() if body.wanted]
        return preparation(self.env) or next(
            (f"{one.name} ({i} of {len(wanted)})" for i, one in enumerate(wanted, 1) if one.preparing), ""
        )

    def start(self, resumed_at: int = 0) -> None:
        """Reset the simulator. ``resumed_at``: env steps of a resumed run. They change the seed of a simulator that
        cannot restore its state."""
        with self._starting(f"the reset of {self.env.spec.name}"):
            steps = 0 if supports(self.env, Resumable) else resumed_at
            self.collector.start(env_seed(self.config.seed, steps))
            touch()

    def warm_up(self, steps: int, going: Callable[[], bool] = lambda: True) -> bool:
        """Step every environment with random actions until each has made ``steps`` steps in total.

        Args:
            going: called before every step; False interrupts the warm-up.
        Returns:
            True if all steps were made. A later call makes the rest, with the same bits.
        """
        if (left := math.ceil(steps - self.collector.steps)) > 0:
            with self._starting("the warm-up"):
                self.collector.warm_up(left, going)
        return self.steps >= steps

    def _starting(self, what: str) -> AbstractContextManager[Any]:
        place = self.config.placement
        return watching(what, start_limit(place), step_limit(place))

    def begin(self, ticks: int = 0) -> None:
        """Publish the current state; tick ``ticks`` is next."""
        if ticks == 0:
            self.begin_learners()
        self.schedule.begin(ticks)

    def begin_learners(self) -> None:
        for learner in self.learners.values():
            if learner.begin is not None:
                learner.begin()

    def check_environments(self) -> None:
        """Raise ``RunError`` if no environment of a replica returns finite values. Waits for the device."""
        self.collector.quarantine.check()

    def broken(self) -> "Parts | None":
        """Return the part without any finite environment that ended the run; None: there is none."""
        return self if self.collector.quarantine.over else None

    def close(self, envs: bool = True) -> None:
        """End the workers and, unless ``envs`` is False, close the simulators."""
        self.schedule.executor.close()
        if envs:
            self.close_envs()

    def close_envs(self) -> None:
        with self._starting(f"closing {self.env.spec.name}"):
            self.env.close()

    # -- what was done ----------------------------------------------------------------------------------------------

    @property
    def steps(self) -> float:
        """Steps of every environment so far, warm-up included; mean over replicas."""
        return self.collector.steps

    @property
    def env_steps(self) -> int:
        """Transitions so far, summed over all environments, warm-up included."""
        return round(self.collector.steps * self.env.spec.num_envs)

    def updates(self) -> dict[str, int]:
        """Updates so far of the critic ("v") and the policy ("p"); equal if one learner trains both."""
        return {
            what: sum(job.updates for job in self.jobs.values() if what in job.learner.trains) for what in ("v", "p")
        }

    def busy(self) -> dict[str, float]:
        """Busy seconds so far by worker; mean over replicas."""
        return {k: worker.busy for k, worker in self.workers.items()}

    def totals(self) -> dict[str, float]:
        """Counters for rates, since the start of the run (``busy/...``: since the last resume), without env steps."""
        updates = sum(job.updates for job in self.jobs.values())
        return {"ticks": self.schedule.ticks, "updates": updates} | {f"busy/{k}": v for k, v in self.busy().items()}

    def drain(self, group: Callable[[str], Group] = lambda worker: ALONE) -> dict[str, Tensor]:
        """Return device values for the log since the last call: episodes and updates of all replicas, and gauges.
        ``group``: process group of a worker, over which values are summed."""
        return drain_all([self], group)

    def statistics(self) -> list[Moments]:
        """All running statistics, in the same order in every replica."""
        states = [v for learner in self.learners.values() for v in learner.state.own().values()]
        owners = [self.collector.normalizer, *(v for v in states if isinstance(v, nn.Module))]
        return [m for owner in owners for m in owner.modules() if isinstance(m, Moments)]

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def counters(self) -> dict[str, int]:
        """Return ticks, steps of each environment, and updates by learner; the second replica's as ``steps.1`` etc."""
        return {"ticks": self.schedule.ticks, **self.own_counters()}

    def check_sources(self, saved: Mapping[str, str]) -> None:
        """Raise ``ConfigError`` unless a file that the run reads has the content of which ``saved`` has the hash."""
        values = dict(leaves(self.config))
        for name, found in self.sources.items():
            if saved.get(name, found) != found:  # older checkpoints have none
                raise ConfigError(name, values[name], "the content that it had when the run began; it has another one")

    def own_counters(self) -> dict[str, int]:
        return {**self.collector.counters(), **{k: job.updates for k, job in self.jobs.items()}}

    def load_counters(self, counters: dict[str, float]) -> None:
        """Restore the output of :meth:`counters`, except the ticks. Raises ``ConfigError``: they come from another
        number of replicas."""
        check_replicas(counters, 1)
        self.collector.load_counters({k: counters[k] for k in self.own_counters()})
        for k, job in self.jobs.items():
            job.updates = int(counters[k])

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next tick depends on."""
        learners = {k: {"state": v.state.state_dict(), "gen": v.gen.get_state()} for k, v in self.learners.items()}
        lost = {k: v.lost for k, v in self.learners.items() if v.lost is not None}
        return {"collector": self.collector.state_dict(), "learners": learners, "lost": lost}

    def load_state_dict(self, state: dict[str, Any], ticks: int | None = None) -> None:
        """Restore in place, as after ``ticks`` ticks; None: :meth:`begin` is called later."""
        self.collector.load_state_dict(state["collector"])
        for k, learner in self.learners.items():
            learner.state.load_state_dict(state["learners"][k]["state"])
            learner.gen.set_state(state["learners"][k]["gen"].cpu())
            if learner.lost is not None:
                learner.lost.copy_(state["lost"][k])
        if ticks is not None:
            self.begin(ticks)


def drain_all(replicas: Sequence[Parts], group: Callable[[str], Group]) -> dict[str, Tensor]:
    """Return what ``Parts.drain`` does, over all ``replicas``."""
    first, *others = replicas
    for one in others:
        first.collector.episodes.absorb(one.collector.episodes)
    values = first.collector.episodes.drain(group("collector"))
    for name in first.jobs:
        sums = [m for one in replicas if (m := one.jobs[name].metrics).count is not None] or [MetricSum()]
        for other in sums[1:]:
            sums[0].absorb(other)
        values |= sums[0].drain(group(name))
    meters = [one.collector.saturation for one in replicas if one.collector.saturation is not None]
    if meters:
        values |= saturation.drain(meters, group("collector"))
    learner = next(iter(first.jobs))
    for worker, gauges in (
        (learner, [one.gauges for one in replicas]),
        ("collector", [one.collector.quarantine.gauges() for one in replicas]),
    ):
        for name, gauge in gauges[0].items():
            total = sum((other[name].to(gauge.device) for other in gauges[1:]), gauge.clone())
            values[name] = group(worker).sum_(total)
    return values


def check_replicas(counters: Mapping[str, float], count: int) -> None:
    """Raise ``ConfigError`` for counters of another number of replicas than ``count``."""
    saved = 1 + sum(k.startswith("steps.") for k in counters)
    if saved != count:
        raise ConfigError("algo.replicas", count, f"{saved}, as in the checkpoint")
