"""Build a run: a validated config and an environment become workers under a schedule."""

from contextlib import ExitStack
from functools import partial
from typing import cast

import torch

from pql.algos.registry import Setup, Wiring, family_of
from pql.config import Config
from pql.contract.env import EnvSpec, VecEnv
from pql.engine.executors import Executor, Inline, Threads
from pql.engine.graph import EAGER, Execution
from pql.engine.inductor import Choice, compilable
from pql.engine.placement import Machine, keep_freed_memory, machine_of, make_executor, make_inline, set_precision
from pql.engine.schedule import Concurrent, Counts, Lockstep, Schedule, Trace
from pql.engine.worker import LearnerJob, WeightSlot, Worker
from pql.errors import ConfigError
from pql.run.components import Parts
from pql.run.environment import build_env, check_groups, describe_env, with_last_action
from pql.run.policy import load_policy
from pql.run.replicas import ReplicatedRun, replica_names, replica_shares


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
    env = None if env is None else with_last_action(config, env)
    each = replica_shares(config)
    machines = [machine_of(share) for share in each]
    set_precision(config.placement)
    keep_freed_memory()
    counts = family.counts(config)
    first = machines[0]
    home, together = first.devices[config.algo.learners[0]], all(m.devices == first.devices for m in machines)
    choice = compilable(cast(Choice, config.placement.compile), home)
    execution = Execution(cast(Choice, config.graphs), choice)
    spec = env.spec if env is not None else describe_env(config if together else each[0], first)
    rows = 0 if spec is None else _check(config, spec, counts, home, env)
    with ExitStack() as opened:  # closes started environments if a later step fails
        replicas: list[Parts] = []
        for share, machine in zip(each, machines, strict=True):
            check = partial(_check, share, counts=counts, home=home, env=None)
            started = env if env is not None else build_env(share, machine=machine, approve=check)
            if env is None:
                opened.callback(started.close)
            rows = rows or _check(share, started.spec, counts, home, env)
            setup = Setup(share, started, counts, rows, machine.devices, execution, load_policy)
            replicas.append(_assemble(setup, family.wire(setup), machine, trace, executor))
        parts = replicas[0]
        if config.algo.schedule == "replicas":
            parts = ReplicatedRun.of(config, replicas, make_crew(config))
        opened.pop_all()
    return parts


def _check(config: Config, spec: EnvSpec, counts: Counts, home: torch.device, env: VecEnv | None) -> int:
    """Check a config against an environment spec. Returns the storage rows per environment."""
    count = config.replicas
    if count > 1 and env is not None:
        raise ConfigError("algo.replicas", count, "1: a live environment cannot be built again for another replica")
    if count > 1 and spec.single_instance:
        raise ConfigError("algo.replicas", count, f"1: a process can hold one {spec.name} only")
    check_groups(config, spec)
    return family_of(config).check(config, spec, counts, home)


def make_crew(config: Config) -> Threads | Inline:
    """Return the executor that runs the replicas' ticks."""
    place = config.placement
    if place.executor == "inline":
        return make_inline(place)
    return Threads(replica_names(config.replicas), place.watchdog_seconds, place.start_seconds)


def _assemble(setup: Setup, wiring: Wiring, machine: Machine, trace: Trace | None, executor: Executor | None) -> Parts:
    """Create slots, jobs, workers and the schedule for a family's wiring."""
    config, counts, devices = setup.config, setup.counts, setup.devices
    collector, kind = wiring.collector, config.algo.schedule
    collector.stepper.overlap = config.placement.overlap
    learners = {one.name: one for one in wiring.learners}
    # Learners first: their work is on the GPU's queue before a simulator blocks the host.
    exchanged = {w: (one.pulls, one.publishes) for w, one in learners.items()}
    exchanged["collector"] = (wiring.pulls, wiring.publishes)
    slots = {
        name: WeightSlot(name, source) for _, publishes in exchanged.values() for name, source in publishes.items()
    }
    rounds = 1 if kind == "concurrent" else counts.rounds
    execution = EAGER if kind == "replicas" else setup.execution  # replicas take locks, which cannot be captured
    jobs = {w: LearnerJob(learners[w], counts.updates[w] // rounds, devices[w], execution) for w in learners}
    workers = {}
    for w, (pulls, publishes) in exchanged.items():
        pulled, published = [(slots[s], t) for s, t in pulls.items()], [slots[s] for s in publishes]
        job = jobs.get(w, collector.run)
        workers[w] = Worker(w, job, devices[w], pulled, published, machine.threads[w], trace)
    schedule: Schedule
    if kind == "concurrent":
        executor = executor or make_executor(config.placement, devices)
        schedule = Concurrent(workers, counts, executor, collector.behind_target)
    else:
        alone = Inline() if kind == "replicas" else make_inline(config.placement)  # replicas have their own executor
        schedule = Lockstep(workers, counts, executor or alone, collector.behind_target)
    own = (collector, learners, jobs, wiring.gauges, slots, workers, schedule, wiring.policy, wiring.sources)
    return Parts(config, machine, counts, setup.env, *own)
