"""Ticks per second of the ``concurrent`` schedule compared with ``lockstep``, on the CPU, with the real workers.

Three cases, all variants in turn:

waiting  The simulator sleeps 1.2 times as long as both learners work per tick (measured first, under both schedules;
         the shorter counts), like a simulator in another process or on another device. ``concurrent / lockstep``
         compares ticks per second: at best 2.2 / 1.2 = 1.83, the goal is at least 1.6. ``tick / slowest worker``
         compares milliseconds: a tick against its slowest worker running by itself on its own thread; the goal is at
         most 1.15.
busy     Every core has work: physics (HalfCheetah where MuJoCo is installed, else cart-pole), 2 critic and 2 policy
         updates a step. The batch is first chosen so that the collector takes as long as both learners together,
         and the table has each worker's own time. Lockstep has all cores as intra-op and physics threads, concurrent
         the threads of ``machine_of`` and ``--env-threads`` for the physics. Overlap then gains only what more
         threads per operation would lose: the goal is at least 1.0.
halves   Only the collector, with a simulator in two groups that sleeps as long for each group as the policy takes to
         act on one. ``by turns / one after the other`` compares env-steps/s with overlap to the same groups without: at
         best 2, the goal is at least 1.6. ``by turns / all at once`` compares overlap with one group of all
         environments, whose step sleeps twice as long.

Rows in ms are times (a ratio below 1 is good); rows in ticks/s are rates (above 1 is good).
"""

import importlib.util
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pql.collect.collector import Collector
from pql.config import Config, DdpgConfig, changed
from pql.config.families import own
from pql.contract.env import EnvSpec, VecEnv, make_env
from pql.contract.grouped import Grouped
from pql.run.build import build
from pql.run.components import Parts
from pql.types import Obs, Step
from tools.bench import common
from tools.bench.common import Round, Row, compare, small_config

WAIT = 1.2  # the simulator's wait relative to the learners' work
WORKERS = ("collector", "v", "p")
BATCHES = (64, 4096)  # allowed when balancing
STEPS = 16  # steps of a tick in the case ``halves``


class Sleeper:
    """``env`` with a sleep of ``seconds`` in every step, which keeps no core busy."""

    def __init__(self, env: VecEnv, seconds: float = 0.0):
        self.env, self.seconds = env, seconds

    @property
    def spec(self) -> EnvSpec:
        return self.env.spec

    def reset(self, seed: int | None = None) -> Obs:
        return self.env.reset(seed)

    def step(self, action: Tensor) -> Step:
        time.sleep(self.seconds)
        return self.env.step(action)

    def close(self) -> None:
        self.env.close()


def begun_under(config: Config, schedule: str, env: VecEnv) -> Parts:
    return common.begun(replace(config, algo=replace(config.algo, schedule=schedule)), env)


def alone(parts: Parts, name: str, seconds: float) -> Round:
    """Return the milliseconds of one worker's share of a tick, with the others idle."""
    learner_bursts = parts.counts.rounds if parts.config.algo.schedule == "lockstep" else 1
    amount = parts.counts.horizon if name == "collector" else learner_bursts
    job = partial(parts.workers[name].run, amount)
    one = common.microseconds(lambda: parts.schedule.executor.run({name: job}), seconds)
    return lambda: one() / 1e3


def alone_times(parts: Parts, seconds: float, rounds: int) -> dict[str, float]:
    """Return each worker's median milliseconds by itself."""
    times = common.alternate({name: alone(parts, name, seconds) for name in WORKERS}, rounds)
    return {name: statistics.median(values) for name, values in times.items()}


def compare_schedules(case: str, lockstep: Parts, concurrent: Parts, solo: Parts, args: Any) -> list[Row]:
    """Measure both schedules and each worker by itself, in turn; close everything."""
    runs = {"concurrent": concurrent, "lockstep": lockstep}
    fns: dict[str, Round] = {k: common.per_second(p.schedule.tick, 1, args.seconds) for k, p in runs.items()}
    fns |= {name: alone(solo, name, args.seconds) for name in WORKERS}
    rates = common.alternate(fns, args.rounds)
    slowest = max(WORKERS, key=lambda name: statistics.median(rates[name]))
    tick = [1e3 / r for r in rates["concurrent"]]
    common.close(lockstep, concurrent, solo)
    return [
        *(compare(f"{case}: {name} alone", "ms", rates[name]) for name in WORKERS),
        compare(f"{case}: tick / slowest worker ({slowest})", "ms", tick, rates[slowest]),
        compare(f"{case}: concurrent / lockstep", "ticks/s", rates["concurrent"], rates["lockstep"]),
    ]


def waiting(args: Any) -> list[Row]:
    """Case ``waiting``: overlap hides the learners behind a simulator that sleeps."""
    config = small_config(8, 32, [16, 16], 2, 0.5) if args.smoke else small_config(64, 512, [128, 128], 4, 0.5)
    envs = [Sleeper(make_env("lqr", config.num_envs)) for _ in range(3)]
    lockstep = begun_under(config, "lockstep", envs[0])
    concurrent, solo = (begun_under(config, "concurrent", env) for env in envs[1:])
    # On a machine that others use, threads waiting for each other can stretch lockstep's updates a hundredfold.
    work = min(t["v"] + t["p"] for t in (alone_times(parts, args.seconds / 2, 3) for parts in (lockstep, solo)))
    for env in envs:
        env.seconds = WAIT * work / 1e3
    print(f"waiting: the simulator sleeps {envs[0].seconds * 1e3:.2f} ms a step")
    return compare_schedules("waiting", lockstep, concurrent, solo, args)


def physics(num_envs: int, threads: int) -> VecEnv:
    """Return HalfCheetah with ``threads`` physics threads (0: one per core), or cart-pole without MuJoCo."""
    if importlib.util.find_spec("mujoco") is None:
        return make_env("cartpole_swingup", num_envs)
    return make_env("halfcheetah", num_envs, threads=threads)


def balanced(config: Config, args: Any) -> Config:
    """Return ``config`` with the batch size at which both learners together take as long as the collector."""
    parts = begun_under(config, "concurrent", physics(config.num_envs, args.env_threads))
    time_of = alone_times(parts, args.seconds / 2, 3)
    common.close(parts)
    batch = own(config, DdpgConfig).batch_size * time_of["collector"] / (time_of["v"] + time_of["p"])
    batch = int(min(max(batch // 32 * 32, BATCHES[0]), BATCHES[1]))
    return changed(config, {"algo.batch_size": batch})


def busy(args: Any) -> list[Row]:
    """Case ``busy``: every core has work, so overlap competes with more threads per operation."""
    config = small_config(8, 32, [16, 16], 2, 1) if args.smoke else small_config(128, 512, [128, 128], 2, 1)
    config = balanced(config, args)
    envs = [physics(config.num_envs, threads) for threads in (0, args.env_threads, args.env_threads)]
    lockstep = begun_under(config, "lockstep", envs[0])
    concurrent, solo = (begun_under(config, "concurrent", env) for env in envs[1:])
    case = f"busy {envs[0].spec.name} n={config.num_envs} batch={own(config, DdpgConfig).batch_size}"
    return compare_schedules(case, lockstep, concurrent, solo, args)


def sampler(config: Config, groups: int, args: Any) -> tuple[Collector, list[Sleeper]]:
    """Return a started collector and its simulators, which do not sleep yet."""
    envs = [Sleeper(make_env("lqr", config.num_envs // groups)) for _ in range(groups)]
    collector = build(config, Grouped(envs) if groups > 1 else envs[0]).collector
    collector.start(0)
    return collector, envs


def env_steps(collector: Collector, overlap: bool, seconds: float) -> Round:
    """Return env-steps per second in ticks of ``STEPS`` steps."""
    count = common.per_second(lambda: collector.run(STEPS), STEPS * collector.env.spec.num_envs, seconds)

    def one() -> float:
        collector.stepper.overlap = overlap
        with common.intra_op(1):
            return count()

    return one


def halves(args: Any) -> list[Row]:
    """Case ``halves``: one group's actions are computed while the other group's simulator sleeps."""
    config = small_config(16, 32, [16, 16], 1, 1) if args.smoke else small_config(128, 512, [512, 512], 1, 1)
    (two, pair), (one, single) = (sampler(config, groups, args) for groups in (2, 1))
    with common.intra_op(1), torch.no_grad():
        act = common.microseconds(two.slices[0].act, args.seconds)() / 1e6
    for env, count in ((pair[0], 1), (pair[1], 1), (single[0], 2)):
        env.seconds = act * count
    print(f"halves: acting on one takes {act * 1e3:.2f} ms")
    ways = {"turns": (two, True), "after": (two, False), "once": (one, False)}
    rates = common.alternate({k: env_steps(c, overlap, args.seconds) for k, (c, overlap) in ways.items()}, args.rounds)
    two.env.close()
    return [
        compare("halves: by turns / one after the other", "env-steps/s", rates["turns"], rates["after"]),
        compare("halves: by turns / all at once", "env-steps/s", rates["turns"], rates["once"]),
    ]


CASES = {"waiting": waiting, "busy": busy, "halves": halves}


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.options(__doc__, seconds=0.5)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--env-threads", type=int, default=1, help="physics threads under concurrent")
    args = parser.parse_args(argv)
    if args.smoke:
        args.rounds, args.seconds = 1, 0.02
    common.report([row for case in args.cases for row in CASES[case](args)], args.json)


if __name__ == "__main__":
    main()
