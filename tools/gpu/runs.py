"""Runs of ``check.py``: their configurations, rates and launches.

Configurations are built from the dataclasses, so that no Hydra is needed. A test checks each of them against its task's
specification, at its full size.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from pql.config import (
    AlgoConfig,
    BudgetConfig,
    Config,
    DdpgConfig,
    DqnConfig,
    PlacementConfig,
    PpoConfig,
    QuantileNetConfig,
    ReplayConfig,
    RolloutPolicyConfig,
    SacConfig,
    TaskConfig,
    ThreadsConfig,
    changed,
)
from pql.config.groups import ExploreConfig
from pql.engine.executors import Executor, Inline, Streams
from pql.engine.placement import machine_of
from pql.run.components import Parts
from pql.run.store.checkpoint import flatten
from tools.bench.common import Round, Row, alternate, begun, close, compare, per_second, synchronize

LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
NAMES = {"v": "critic", "p": "policy", "learner": "learner"}
AHEAD = 2  # ticks that can be launched before the host has to wait
ONE_THREAD = PlacementConfig(threads=ThreadsConfig(1, 1, 1, 1))  # for tests on a shared CPU
BUDGET = BudgetConfig(seconds=60)  # unused: every case measures its own time
PPO = PpoConfig(
    name="ppo", warmup_steps=16, horizon=16, policy=RolloutPolicyConfig(lr=3e-4, weight_decay=0.0, grad_clip=1.0)
)
SAC = SacConfig(name="pql_sac", explore=ExploreConfig(kind="none"))
PQL = DdpgConfig(name="pql")
TINY: dict[str, dict[str, Any]] = {
    "replay": {"algo.batch_size": 32, "algo.v_per_step": 2.0},
    "rollout": {"algo.horizon": 4, "algo.epochs": 1, "algo.minibatches": 2},
}


def make_config(args: Any, num_envs: int, task: str = "cartpole_swingup", algo: AlgoConfig | None = None) -> Config:
    """Return a config at the paper's scale (the schema's defaults), or tiny. ``algo`` defaults to PQL."""
    algo, name = algo or PQL, TaskConfig(name=task)
    config = Config(task=name, algo=algo, num_envs=num_envs, device=args.device, budget=BUDGET)
    if not args.smoke:
        return config
    tiny = {"algo.warmup_steps": 4, "algo.critic.hidden": [16, 16], "algo.policy.hidden": [16, 16], **TINY[algo.data]}
    ring = ReplayConfig(capacity=64 * num_envs)
    return replace(changed(config, tiny), replay=ring, placement=ONE_THREAD)


def catch_config(args: Any, num_envs: int) -> Config:
    """Return DQN on Catch, each row used eight times, in large batches; or tiny."""
    hidden, batch, warm_up = ([16], 32, 4) if args.smoke else ([512], 2 * num_envs, 32)
    critic = QuantileNetConfig(hidden=hidden, activation="relu", weight_decay=0.0)
    sizes: dict[str, Any] = {"batch_size": batch, "v_per_step": 8 * num_envs / batch, "warmup_steps": warm_up}
    sizes |= {"n_step": 1, "target_period": 16 * num_envs, "normalize_obs": False}
    algo = DqnConfig(name="dqn", critic=critic, **sizes)
    place = ONE_THREAD if args.smoke else PlacementConfig()
    config = Config(task=TaskConfig(name="catch"), algo=algo, num_envs=num_envs, device=args.device, budget=BUDGET)
    return replace(config, replay=ReplayConfig(capacity=1024 * num_envs), placement=place)


def ready(config: Config, schedule: str, graphs: bool, warm_ticks: int = 5, executor: Executor | None = None) -> Parts:
    """Return a run after its first ticks."""
    algo = replace(config.algo, schedule=schedule)
    parts = begun(replace(config, algo=algo, graphs="auto" if graphs else "off"), executor=executor)
    for _ in range(warm_ticks):
        parts.schedule.tick()
    wait(parts)
    return parts


def wait(parts: Parts) -> None:
    """Wait until the device has finished."""
    synchronize(parts.env.spec.device)


def ticks_per_second(parts: Parts, seconds: float) -> Round:
    return per_second(parts.schedule.tick, 1, seconds, parts.env.spec.device)


def host_ms(parts: Parts, repeats: int) -> float:
    """Return the median milliseconds that the host needs to launch a tick."""
    spent = []
    for _ in range(repeats):
        wait(parts)
        began = time.perf_counter()
        for _ in range(AHEAD):
            parts.schedule.tick()
        spent.append((time.perf_counter() - began) / AHEAD * 1e3)
    wait(parts)
    return sorted(spent)[repeats // 2]


def count_work(parts: Parts, job: Callable[[], Any]) -> tuple[int, int]:
    """Return (kernels run on the device, host calls that launch work) of one ``job``."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if parts.env.spec.device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with parts.schedule.executor.exclusive():
        job()
        wait(parts)
        with torch.profiler.profile(activities=kinds) as recorded:
            job()
            wait(parts)
    events = list(recorded.events() or [])
    ran = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation]
    kernels = sum(not e.name.startswith(("Memcpy", "Memset")) for e in ran)
    return kernels, sum(e.name.startswith(LAUNCHES) for e in events)


def launch_rows(case: str, parts: Parts) -> Iterator[Row]:
    """Measure kernels and launches per update of each learner and per step of the collector."""
    horizon = parts.counts.horizon
    jobs: dict[str, tuple[Callable[[], Any], int]] = {
        f"{NAMES[worker]} update": (partial(job, 1), job.size) for worker, job in parts.jobs.items()
    }
    jobs["collector step"] = (lambda: parts.collector.run(horizon), horizon)
    for name, (job, count) in jobs.items():
        kernels, launches = count_work(parts, job)
        yield compare(f"{case}: kernels per {name}", "kernels", [kernels / count])
        yield compare(f"{case}: launches per {name}", "calls", [launches / count])


def measure(case: str, config: Config, args: Any) -> Iterator[Row]:
    """Measure both schedules of one algorithm (on rollouts only its own), with graphs and without, in turn."""
    own = config.algo.schedule
    schedules = (own,) if config.algo.data == "rollout" else ("concurrent", "lockstep")
    runs = {(schedule, graphs): ready(config, schedule, graphs) for schedule in schedules for graphs in (True, False)}
    names = {key: f"{key[0]}, graphs {'on' if key[1] else 'off'}" for key in runs}
    try:
        rates = alternate({names[k]: ticks_per_second(p, args.seconds) for k, p in runs.items()}, args.rounds)
        yield from rate_rows(case, config, {key: rates[name] for key, name in names.items()}, runs[schedules[0], True])
        for key, parts in runs.items():
            tick = [1e3 / r for r in rates[names[key]]]
            host = host_ms(parts, 2 if args.smoke else 20)
            yield compare(f"{case} {names[key]}: host per tick / tick", "ms", [host] * len(tick), tick)
        for graphs in (True, False) if config.device != "cpu" else (False,):
            yield from launch_rows(f"{case} graphs {'on' if graphs else 'off'}", runs[schedules[0], graphs])
    finally:
        for parts in runs.values():
            close(parts)


def rate_rows(case: str, config: Config, rates: dict[tuple[str, bool], list[float]], parts: Parts) -> Iterator[Row]:
    """Yield rates of env steps and updates, compared by schedule and graphs."""
    counts, unit = parts.counts, "env-steps/s"
    rate = {key: [r * counts.horizon * config.num_envs for r in ticks] for key, ticks in rates.items()}
    first = next(iter(rates))[0]
    if ("lockstep", True) in rates and first == "concurrent":
        for g in (True, False):
            title = f"{case} graphs {'on' if g else 'off'}: concurrent / lockstep"
            yield compare(title, unit, rate["concurrent", g], rate["lockstep", g])
    yield compare(f"{case} {first}: graphs on / off", unit, rate[first, True], rate[first, False])
    updates = [t * sum(counts.updates.values()) for t in rates[first, True]]
    yield compare(f"{case}: updates", "updates/s", updates)


class Ordered(Streams):
    """Executor with a stream for each worker, launched in a chosen order."""

    def __init__(self, config: Config, order: tuple[str, ...]):
        super().__init__(machine_of(config).devices)
        self.order = order

    def run(self, jobs: Any) -> Any:
        return super().run({name: jobs[name] for name in self.order if name in jobs})


def state_after(config: Config, ticks: int, executor: Executor) -> dict[str, torch.Tensor]:
    """Return all state that the next tick depends on, on the host."""
    parts = ready(config, "concurrent", True, 0, executor)
    for _ in range(ticks):
        parts.schedule.tick()
    wait(parts)
    with parts.schedule.executor.exclusive():
        state = {k: v.cpu() for k, v in flatten(parts.state_dict()).items()}
    close(parts)
    return state


def order_rows(config: Config, args: Any) -> Iterator[Row]:
    """Count worker orders whose bits differ from those of one stream; expected: 0."""
    ticks, cuda = (3, False) if args.device == "cpu" else (50, True)
    reference, wrong = state_after(config, ticks, Inline()), 0
    for order in itertools.permutations(("collector", "v", "p")):
        state = state_after(config, ticks, Ordered(config, order) if cuda else Inline(order))
        wrong += any(not torch.equal(v.nan_to_num(), reference[k].nan_to_num()) for k, v in state.items())
    yield compare(f"n={config.num_envs}: worker orders with other bits", "orders", [float(wrong)])
