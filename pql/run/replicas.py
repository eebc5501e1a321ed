"""Schedule ``replicas``: several learners on shared parameters and optimiser moments (A3C, asynchronous PPO).

Each replica has its own environments, collector, rollout, local parameters and generators, and runs the tick of
``Lockstep``: collect, then update. Before its tick it pulls the central parameters; every update's gradient is
pushed to them (``central.py``). Replicas do not wait for each other: others may push between a pull and a push, so
gradients may be stale; their age is logged. ::

    replica 0   pull | act, step ... | update push | update push | pull | act, step ...
    replica 1     act, step ... | update push | update push | pull | act, step ... | update push
                  ------------------------------------------------------ central parameters and moments

A tick of the run is a fixed number of replica ticks; a free replica takes the next one. All replicas stop at the end of
a tick, so logs, evaluations, checkpoints and budgets work as in any other run. At that point every replica has the
central parameters and the merged statistics of all replicas.

Source: Stooke & Abbeel 2018; there, replicas are processes.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pql.algos.registry import own_seed
from pql.config import Config, PpoConfig
from pql.config.families import own
from pql.contract.env import preparation
from pql.data.normalize import merge_moments, share_largest_return
from pql.engine.central import Central, CentralOptimizer, ReplicaStopped, ReplicaTurns
from pql.engine.collectives import ALONE, Group
from pql.engine.executors import Inline, Job, Threads
from pql.engine.graph import Graph
from pql.engine.placement import replica_devices
from pql.run.components import Parts, check_replicas, drain_all


def replica_shares(config: Config) -> list[Config]:
    """Return each replica's config: an equal part of the environments, a device, a seed; the first has the run's."""
    count = config.replicas
    return [
        replace(config, num_envs=config.num_envs // count, device=device, seed=own_seed(config.seed, i))
        for i, device in enumerate(replica_devices(config))
    ]


class Member:
    """A replica with its index. The optimiser of its learner is replaced by one that steps the central parameters."""

    def __init__(self, number: int, replica: Parts, central: Central, turns: ReplicaTurns | None):
        (learner,) = replica.learners.values()
        state: Any = learner.state
        self.replica, self.learner = replica, learner
        self.optimizer = state.optimizer = CentralOptimizer(state.optimizer, central, turns, number)
        home, own = central.data.device, self.optimizer.flat.data.device
        touched = [own] if home == own else [home, own]  # its own device last, which makes it the current one
        self.streams = [torch.cuda.Stream(device) for device in touched if device.type == "cuda"]

    def tick(self, number: int) -> None:
        """Pull and run one tick, number ``number`` over all replicas."""
        with on_streams(self.streams):
            if self.learner.clock is not None:
                self.learner.clock.fill_(number)
            self.optimizer.pull()
            for slot in self.replica.slots.values():
                slot.publish()
            self.replica.schedule.tick()


@contextmanager
def on_streams(streams: Sequence[torch.cuda.Stream]) -> Iterator[None]:
    """Context manager: queue device work on ``streams`` after that which prepares ticks; wait for it on exit."""
    with ExitStack() as inside:
        for stream in streams:
            stream.wait_stream(torch.cuda.default_stream(stream.device))
            inside.enter_context(torch.cuda.stream(stream))
        yield
    for stream in streams:
        stream.synchronize()  # the next tick is handed out only after the device has finished the last one


def replica_names(count: int) -> list[str]:
    """Return the names of replicas, for threads and errors."""
    return [f"replica{i}" for i in range(count)]


class Replicas:
    """Replicas that take ticks when free or, with ``algo.central.order=turns``, pull and push in a fixed order.

    With ``turns`` the same seed gives the same bits, because only pulls and pushes are shared.

    Args:
        executor: runs ticks of the replicas, under their ``replica_names``. ``Inline`` runs one after the other.
    Attributes:
        reproducible: the same seed gives the same bits.
    """

    def __init__(self, config: Config, replicas: Sequence[Parts], executor: Threads | Inline):
        central, count = own(config, PpoConfig).central, len(replicas)
        self.executor, self.each = executor, central.ticks
        known = replica_names(count)
        self.turns = ReplicaTurns(count, lambda i: executor.waiting(known[i])) if central.order == "turns" else None
        (learner,) = replicas[0].learners.values()
        state: Any = learner.state
        self.central = Central(state.optimizer, central.chunk)
        self.members = [Member(i, one, self.central, self.turns) for i, one in enumerate(replicas)]
        self.ticks = 0
        self.reproducible = count == 1 or self.turns is not None or isinstance(executor, Inline)

    def begin(self, ticks: int) -> None:
        """Copy the first replica's parameters to all."""
        self.ticks = ticks
        with torch.no_grad():
            self.central.data.copy_(self.members[0].optimizer.flat.data)
        self._meet()
        for one in self.members:
            one.replica.schedule.begin(ticks)

    def tick(self) -> None:
        try:
            self.executor.share(self._jobs())
        except BaseException:
            self._halt()
            raise
        self._meet()
        self.ticks += 1

    def _jobs(self) -> dict[str, Iterator[Job]]:
        """Return the ticks by replica name: taken from a common supply or, with ``turns``, equally many each."""
        count = len(self.members)
        numbers = range(self.ticks * self.each * count, (self.ticks + 1) * self.each * count)
        supply = iter(numbers)
        return {
            name: map(partial(self._job, one), numbers[i::count] if self.turns else supply)
            for i, (name, one) in enumerate(zip(replica_names(count), self.members, strict=True))
        }

    def _job(self, member: Member, number: int) -> Job:
        return partial(self._run, member, number)

    def _run(self, member: Member, number: int) -> None:
        try:
            member.tick(number)
        except ReplicaStopped:
            pass  # another replica has failed; report its error
        except BaseException:
            self._halt()
            raise

    def _halt(self) -> None:
        if self.turns:
            self.turns.halt()

    def _meet(self) -> None:
        """While all replicas are stopped, copy the central parameters and the merged statistics to each."""
        for one in self.members:
            self.central.pull(one.optimizer.flat.data)
        for sets in zip(*(one.replica.statistics() for one in self.members), strict=True):
            merge_moments(sets)
        normalizers = [one.replica.collector.normalizer for one in self.members]
        share_largest_return(normalizers)
        for normalizer in normalizers:
            normalizer.freeze()

    def measures(self) -> dict[str, float]:
        lags = sum((one.optimizer.drain_lags() for one in self.members), Counter())
        return {
            "lag/policy_mean": sum(lag * n for lag, n in lags.items()) / max(1, lags.total()),
            "lag/policy_max": max(lags, default=0),
            "schedule/reproducible": float(self.reproducible),
        }


@dataclass
class ReplicatedRun(Parts):
    """Several replicas as one run. Between ticks all have the same parameters and statistics.

    Attributes:
        replicas: complete learners. What :class:`Parts` has once (environment, policy, learners, ...) is the first's,
            which stands for all; methods act on all.
    """

    replicas: list[Parts]

    @classmethod
    def of(cls, config: Config, replicas: list[Parts], executor: Threads | Inline) -> "ReplicatedRun":
        whole = {"config": config, "schedule": Replicas(config, replicas, executor)}
        return cls(**{f.name: getattr(replicas[0], f.name) for f in fields(Parts)} | whole, replicas=replicas)

    def prepare(self) -> None:
        for one in self.replicas:
            one.prepare()

    def preparation(self) -> str:
        return next((text for one in self.replicas if (text := preparation(one.env))), "") or super().preparation()

    def bodies(self) -> list[Graph]:
        return [body for one in self.replicas for body in one.bodies()]

    def start(self, resumed_at: int = 0) -> None:
        """Reset the simulators, each with its own seed."""
        for one in self.replicas:
            one.start(resumed_at)

    def warm_up(self, steps: int, going: Callable[[], bool] = lambda: True) -> bool:
        done = [one.warm_up(steps, going) for one in self.replicas]
        return all(done)

    def begin_learners(self) -> None:
        for one in self.replicas:
            one.begin_learners()

    def check_environments(self) -> None:
        for one in self.replicas:
            one.check_environments()

    def broken(self) -> Parts | None:
        return next((one for one in self.replicas if one.broken()), None)

    def close_envs(self) -> None:
        for one in self.replicas:
            one.close_envs()

    @property
    def steps(self) -> float:
        return sum(one.steps for one in self.replicas) / len(self.replicas)

    @property
    def env_steps(self) -> int:
        return sum(one.env_steps for one in self.replicas)

    def updates(self) -> dict[str, int]:
        return {k: sum(one.updates()[k] for one in self.replicas) for k in ("v", "p")}

    def busy(self) -> dict[str, float]:
        return {k: sum(one.busy()[k] for one in self.replicas) / len(self.replicas) for k in self.workers}

    def totals(self) -> dict[str, float]:
        return super().totals() | {"updates": sum(one.totals()["updates"] for one in self.replicas)}

    def drain(self, group: Callable[[str], Group] = lambda worker: ALONE) -> dict[str, Tensor]:
        return drain_all(self.replicas, group)

    def own_counters(self) -> dict[str, int]:
        each = enumerate(one.own_counters() for one in self.replicas)
        return {f"{k}.{i}" if i else k: v for i, counters in each for k, v in counters.items()}

    def load_counters(self, counters: dict[str, float]) -> None:
        check_replicas(counters, len(self.replicas))
        for i, one in enumerate(self.replicas):
            one.load_counters({k: counters[f"{k}.{i}" if i else k] for k in one.own_counters()})

    def state_dict(self) -> dict[str, Any]:
        first, *others = (one.state_dict() for one in self.replicas)
        return {**first, "replicas": others}

    def load_state_dict(self, state: dict[str, Any], ticks: int | None = None) -> None:
        for one, saved in zip(self.replicas, [state, *state["replicas"]], strict=True):
            one.load_state_dict(saved)
        if ticks is not None:
            self.begin(ticks)
