"""Build a run: a validated config and an environment become workers under a schedule."""

from contextlib import ExitStack
from functools import partial
from typing import cast

import torch
from torch import nn

from pql.algos.registry import Setup, Wiring, family_of
from pql.config import Config
from pql.contract.env import EnvSpec, VecEnv
from pql.engine.executors import Executor, Inline, Threads
from pql.engine.graph import Capture
from pql.engine.placement import (
    keep_freed_memory,
    make_executor,
    make_inline,
    set_precision,
    thread_counts,
    worker_devices,
)
from pql.engine.schedule import Concurrent, Counts, Lockstep, Schedule, Trace
from pql.engine.worker import LearnerJob, WeightSlot, Worker
from pql.errors import ConfigError
from pql.run.components import Parts
from pql.run.replicas import ReplicatedRun, replica_names, replica_shares
from pql.run.task import build_env, check_groups, describe_env, telling


def build(
    config: Config, env: VecEnv | None = None, trace: Trace | None = None, executor: Executor | None = None
) -> Parts:
    """Build a run.

    Args:
        env: a live environment that replaces the task's.
        trace, executor: for tests; ``executor`` overrides the placement's.
    Raises:
        ConfigError: incompatible settings, before the simulator starts if its spec is available without it.
    """
    family = family_of(config)
    env = None if env is None else telling(config, env)
    each = replica_shares(config)
    learners = config.algo.learners
    devices = [worker_devices(share, learners) for share in each]
    set_precision(config.placement)
    keep_freed_memory()
    counts = family.counts(config)
    home, together = devices[0][learners[0]], all(d == devices[0] for d in devices)
    spec = env.spec if env is not None else describe_env(config if together else each[0], devices[0]["collector"])
    rows = 0 if spec is None else _check(config, spec, counts, home, env)
    with ExitStack() as opened:  # closes started environments if a later step fails
        replicas: list[Parts] = []
        for share, places in zip(each, devices, strict=True):
            check = partial(_check, share, counts=counts, home=home, env=None)
            started = env if env is not None else build_env(share, approve=check)
            if env is None:
                opened.callback(started.close)
            rows = rows or _check(share, started.spec, counts, home, env)
            setup = Setup(share, started, counts, rows, places, capture=cast(Capture, config.graphs))
            replicas.append(_assemble(setup, family.wire(setup), trace, executor))
        parts = replicas[0]
        if config.algo.schedule == "replicas":
            parts = ReplicatedRun.of(config, replicas, make_crew(config))
        opened.pop_all()
    return parts


def _check(config: Config, spec: EnvSpec, counts: Counts, home: torch.device, env: VecEnv | None) -> int:
    """Check a config against an environment spec. Returns the storage rows per environment."""
    check_several(config, spec, env)
    check_groups(config, spec)
    return family_of(config).check(config, spec, counts, home)


def check_several(config: Config, spec: EnvSpec, env: VecEnv | None) -> None:
    """Raise ``ConfigError`` for several replicas of an environment that can have only one instance."""
    count = config.replicas
    if count > 1 and env is not None:
        raise ConfigError("algo.replicas", count, "1: a live environment cannot be built again for another replica")
    if count > 1 and spec.single_instance:
        raise ConfigError("algo.replicas", count, f"1: a process can hold one {spec.name} only")


def make_crew(config: Config) -> Threads | Inline:
    """Return the executor that runs the replicas' ticks."""
    place = config.placement
    if place.executor == "inline":
        return make_inline(place)
    return Threads(replica_names(config.replicas), place.watchdog_seconds, place.start_seconds)


def _assemble(setup: Setup, wiring: Wiring, trace: Trace | None, executor: Executor | None) -> Parts:
    """Create slots, jobs, workers and the schedule for a family's wiring."""
    config, counts, devices = setup.config, setup.counts, setup.devices
    collector, roles, kind = wiring.collector, wiring.roles, config.algo.schedule
    collector.overlap = config.placement.overlap
    owned = {name: source for role in roles.values() for name, source in role.owns.items()}
    slots = {name: WeightSlot(name, source) for name, source in owned.items()}
    rounds = 1 if kind == "concurrent" else counts.rounds
    capture: Capture = "off" if kind == "replicas" else setup.capture  # replicas take locks, which cannot be captured
    learners = {w: role.learner for w, role in roles.items() if role.learner is not None}
    jobs = {w: LearnerJob(learners[w], counts.updates[w] // rounds, devices[w], capture) for w in learners}
    threads = thread_counts(config)
    workers = {
        # Learners first: their work is on the GPU's queue before a simulator blocks the host.
        w: Worker(
            w,
            jobs.get(w, collector.run),
            devices[w],
            [(slots[s], t) for s, t in role.pulls.items()],
            [slots[s] for s in role.owns],
            threads[w],
            trace,
        )
        for w, role in roles.items()
    }
    schedule: Schedule
    if kind == "concurrent":
        schedule = Concurrent(
            workers, counts, executor or make_executor(config.placement, devices), collector.behind_target
        )
    else:
        alone = Inline() if kind == "replicas" else make_inline(config.placement)  # replicas have their own executor
        schedule = Lockstep(workers, counts, executor or alone, collector.behind_target)
    cursors = {w: role.cursor for w, role in roles.items() if role.cursor is not None}
    own = (collector, learners, jobs, cursors, wiring.gauges, slots, workers, schedule, wiring.policy)
    return Parts(config, counts, setup.env, *own)


def make_policy(config: Config, spec: EnvSpec) -> nn.Module:
    """Return a freshly initialised policy network."""
    return family_of(config).policy(config, spec)
