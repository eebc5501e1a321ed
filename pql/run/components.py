"""Components of a run: one replica or several, and the schedule that runs them.

A :class:`Replica` is a complete learner: an environment, the collector that steps it, and the workers that learn from
its rows. All schedules except ``Replicas`` have one. The session accesses a run through :class:`Parts`.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pql.algos.registry import env_seed
from pql.collect import saturation
from pql.collect.collector import Collector
from pql.config import Config
from pql.contract.env import VecEnv, preparation
from pql.contract.optional import Resumable, supports
from pql.data.normalize import Moments
from pql.data.replay import Cursor
from pql.engine.collectives import ALONE, Group
from pql.engine.deadlines import start_limit, step_limit
from pql.engine.schedule import Counts, Schedule
from pql.engine.watchdog import touch, watching
from pql.engine.worker import Learner, LearnerJob, MetricSum, WeightSlot, Worker
from pql.errors import ConfigError
from pql.nets.mlp import Flat


@dataclass
class Replica:
    """A complete learner.

    Attributes:
        config: its share of the run's config: environments, seed, device.
        learners: "v" and "p", or "learner" if one trains both.
        gauges: 0-dim values for the log, summed over replicas.
        schedule: schedule of its workers.
        policy: the policy that it trains.
    """

    config: Config
    env: VecEnv
    collector: Collector
    learners: dict[str, Learner]
    jobs: dict[str, LearnerJob]
    cursors: dict[str, Cursor]
    gauges: dict[str, Tensor]
    slots: dict[str, WeightSlot]
    workers: dict[str, Worker]
    schedule: Schedule
    policy: Flat | nn.Module

    def prepare(self) -> None:
        self.collector.prepare()
        for job in self.jobs.values():
            job.graph.prepare()

    def counters(self) -> dict[str, int]:
        """Steps of each of its environments, and updates by learner."""
        return {**self.collector.counters(), **{k: job.updates for k, job in self.jobs.items()}}

    def load_counters(self, counters: dict[str, float]) -> None:
        self.collector.load_counters(counters)
        for k, job in self.jobs.items():
            job.updates = int(counters[k])

    def statistics(self) -> list[Moments]:
        """All running statistics, in the same order in every replica."""
        states = [v for learner in self.learners.values() for v in vars(learner.state).values()]
        owners = [self.collector.normalizer, *(v for v in states if isinstance(v, nn.Module))]
        return [m for owner in owners for m in owner.modules() if isinstance(m, Moments)]

    def state_dict(self) -> dict[str, Any]:
        learners = {k: {"state": v.state.state_dict(), "gen": v.gen.get_state()} for k, v in self.learners.items()}
        lost = {k: v.lost for k, v in self.cursors.items()}
        return {"collector": self.collector.state_dict(), "learners": learners, "lost": lost}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore in place."""
        self.collector.load_state_dict(state["collector"])
        for k, learner in self.learners.items():
            learner.state.load_state_dict(state["learners"][k]["state"])
            learner.gen.set_state(state["learners"][k]["gen"].cpu())
        for k, cursor in self.cursors.items():
            cursor.lost.copy_(state["lost"][k])


@dataclass
class Parts:
    """Objects of a run.

    Attributes:
        counts: step and update counts of a replica's tick.
        schedule: schedule of the run. Between its ticks every replica has the same parameters and statistics.
    """

    config: Config
    counts: Counts
    replicas: list[Replica]
    schedule: Schedule

    @property
    def first(self) -> Replica:
        return self.replicas[0]

    # -- from the start to the end ----------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Capture CUDA graphs if enabled; call before the first reset."""
        with self._starting("the capture of graphs"):
            for one in self.replicas:
                one.prepare()

    def preparation(self) -> str:
        """Return what :meth:`prepare` is doing, in words. Other threads may call it."""
        return next((text for one in self.replicas if (text := preparation(one.env))), "")

    def start(self, resumed_at: int = 0) -> None:
        """Reset the simulators, each with its own seed.

        Args:
            resumed_at: env steps of a resumed run. They change the seed of a simulator that cannot restore its state.
        """
        with self._starting(f"the reset of {self.first.env.spec.name}"):
            for one in self.replicas:
                steps = 0 if supports(one.env, Resumable) else resumed_at
                one.collector.start(env_seed(one.config.seed, steps))
                touch()

    def warm_up(self, steps: int, going: Callable[[], bool] = lambda: True) -> bool:
        """Step every environment with random actions until each has made ``steps`` steps in total.

        Args:
            going: called before every step; False interrupts the warm-up.
        Returns:
            True if all steps were made. A later call makes the rest, with the same bits.
        """
        for one in self.replicas:
            if (left := math.ceil(steps - one.collector.steps)) > 0:
                with self._starting("the warm-up"):
                    one.collector.warm_up(left, going)
        return self.steps >= steps

    def _starting(self, what: str) -> AbstractContextManager[Any]:
        place = self.config.placement
        return watching(what, start_limit(place), step_limit(place))

    def begin(self, ticks: int = 0) -> None:
        """Publish the current state; tick ``ticks`` is next."""
        if ticks == 0:
            for learner in (v for one in self.replicas for v in one.learners.values()):
                if learner.begin is not None:
                    learner.begin()
        self.schedule.begin(ticks)

    def check_environments(self) -> None:
        """Raise ``RunError`` if no environment of a replica returns finite values. Waits for the device."""
        for one in self.replicas:
            one.collector.quarantine.check()

    def close_envs(self) -> None:
        with self._starting(f"closing {self.first.env.spec.name}"):
            for one in self.replicas:
                one.env.close()

    # -- what was done ----------------------------------------------------------------------------------------------

    @property
    def steps(self) -> float:
        """Steps of every environment so far, warm-up included; mean over replicas."""
        return sum(one.collector.steps for one in self.replicas) / len(self.replicas)

    @property
    def env_steps(self) -> int:
        """Transitions so far, summed over all environments, warm-up included."""
        return sum(round(one.collector.steps * one.env.spec.num_envs) for one in self.replicas)

    def updates(self) -> dict[str, int]:
        """Updates so far of the critic ("v") and the policy ("p"); equal if one learner trains both."""
        jobs = [job for one in self.replicas for job in one.jobs.values()]
        return {
            what: sum(job.updates for job in jobs if what in (job.learner.trains or (job.learner.name,)))
            for what in ("v", "p")
        }

    def busy(self) -> dict[str, float]:
        """Busy seconds so far by worker; mean over replicas."""
        return {k: sum(one.workers[k].busy for one in self.replicas) / len(self.replicas) for k in self.first.workers}

    def totals(self) -> dict[str, float]:
        """Counters for rates, since the start of the run (``busy/...``: since the last resume), without env steps."""
        updates = sum(job.updates for one in self.replicas for job in one.jobs.values())
        busy = {f"busy/{k}": v for k, v in self.busy().items()}
        return {"ticks": self.schedule.ticks, "updates": updates, **busy}

    def drain(self, group: Callable[[str], Group] = lambda worker: ALONE) -> dict[str, Tensor]:
        """Return device values for the log since the last call: episodes and updates of all replicas, and gauges.

        Args:
            group: process group of a worker, over which values are summed.
        """
        first, *others = self.replicas
        for one in others:
            first.collector.episodes.absorb(one.collector.episodes)
        values = first.collector.episodes.drain(group("collector"))
        for name in first.jobs:
            sums = [m for one in self.replicas if (m := one.jobs[name].metrics).count is not None] or [MetricSum()]
            for other in sums[1:]:
                sums[0].absorb(other)
            values |= sums[0].drain(group(name))
        meters = [one.collector.saturation for one in self.replicas if one.collector.saturation is not None]
        if meters:
            values |= saturation.drain(meters, group("collector"))
        learner = next(iter(first.jobs))
        for worker, gauges in (
            (learner, [one.gauges for one in self.replicas]),
            ("collector", [one.collector.quarantine.gauges() for one in self.replicas]),
        ):
            for name, gauge in gauges[0].items():
                total = sum((other[name].to(gauge.device) for other in gauges[1:]), gauge.clone())
                values[name] = group(worker).sum_(total)
        return values

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def counters(self) -> dict[str, int]:
        """Return ticks and the counters of every replica; the second replica's are ``steps.1`` etc."""
        out = {"ticks": self.schedule.ticks}
        for i, one in enumerate(self.replicas):
            out |= {f"{k}.{i}" if i else k: v for k, v in one.counters().items()}
        return out

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next tick depends on."""
        first, *others = (one.state_dict() for one in self.replicas)
        return {**first, "replicas": others}

    def load_state_dict(self, state: dict[str, Any], ticks: int | None = None) -> None:
        """Restore in place, as after ``ticks`` ticks; None: :meth:`begin` is called later."""
        for one, saved in zip(self.replicas, [state, *state["replicas"]], strict=True):
            one.load_state_dict(saved)
        if ticks is not None:
            self.begin(ticks)

    def load_counters(self, counters: dict[str, float]) -> None:
        """Restore the output of :meth:`counters`, except the ticks.

        Raises:
            ConfigError: they come from another number of replicas.
        """
        saved = 1 + sum(k.startswith("steps.") for k in counters)
        if saved != len(self.replicas):
            raise ConfigError("algo.replicas", len(self.replicas), f"{saved}, as in the checkpoint")
        for i, one in enumerate(self.replicas):
            one.load_counters({k: counters[f"{k}.{i}" if i else k] for k in one.counters()})
