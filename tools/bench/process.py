"""Cost and gain of a simulator in a separate process.

round trip   One step of a simulator without dynamics, with rows of Isaac Gym's Ant (60 observations, 8 actions,
             float32): actions to shared memory, a byte through a pipe, results copied from it to new tensors, a byte
             back. The baselines are the same simulator in this process, its results copied to new tensors, and the
             bare round trip, the lower bound: a fork that copies the same bytes between fixed arrays, and two pipes.
             The bare trip took 12 us with 64 environments, 57 us with 4,096 and 313 us with 16,384 on an idle machine;
             the goal is at most twice that, and is part of the row's name. On a busy machine, use the ratio to the
             bare trip, which was measured at the same time.
overlap      Ticks per second under ``concurrent`` with a simulator that waits 1.2 times as long as the learners work
             in a tick, and holds its interpreter's lock meanwhile. In this process the learners wait too; with the
             simulator in another process they work: at best 2.2 / 1.2 = 1.83.

``--python`` is the simulator process's interpreter (default: this one).
"""

import argparse
import mmap
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from pql.config import PlacementConfig, ThreadsConfig, changed
from pql.contract.env import VecEnv
from pql.engine.placement import keep_freed_memory
from pql.remote.process.far_build import FLAGS, describe_simulator
from pql.remote.process.near import ProcessVec, read_spec
from pql.types import Obs, Step
from tools.bench import common
from tools.bench.common import Round, Row, compare
from tools.bench.echo import ACTIONS, OBS, Echo

GOALS = {64: 24, 4096: 114, 16384: 626}  # us: twice the bare round trip's
WAIT = 1.2


class Here:
    """A NumPy simulator in this process, whose results are copied to new tensors."""

    def __init__(self, env: Any):
        self.env, self.spec = env, read_spec(describe_simulator(env.spec), torch.device("cpu"))

    def reset(self, seed: int | None = None) -> Obs:
        return {k: torch.tensor(v) for k, v in self.env.reset(seed).items()}

    def step(self, action: Tensor) -> Step:
        step = self.env.step(action.numpy().copy())
        obs = {k: torch.tensor(v) for k, v in step.obs.items()}
        flags = [torch.tensor(getattr(step, k)) for k in FLAGS]
        terminated, truncated, first, final_ok, valid = flags
        return Step(obs, torch.tensor(step.reward), terminated, truncated, first, dict(obs), final_ok, valid, {})

    def close(self) -> None:
        self.env.close()


class Bare:
    """A bare round trip between processes: a fork, shared memory and two pipes."""

    def __init__(self, num_envs: int):
        sizes = (num_envs * ACTIONS, num_envs * OBS, num_envs * 9 // 4)  # float32; a reward and five flags
        shared = [np.frombuffer(mmap.mmap(-1, 4 * size), np.float32) for size in sizes]
        mine = [np.zeros(size, np.float32) for size in sizes]
        theirs, self._wake = os.pipe()
        self._woken, answer = os.pipe()
        if (child := os.fork()) == 0:
            while os.read(theirs, 1) == b"s":
                np.copyto(mine[0], shared[0])
                np.copyto(shared[1], mine[1])
                np.copyto(shared[2], mine[2])
                os.write(answer, b"s")
            os._exit(0)
        self._shared, self._mine, self._child, self._files = shared, mine, child, (theirs, answer)

    def step(self) -> None:
        np.copyto(self._shared[0], self._mine[0])
        os.write(self._wake, b"s")
        os.read(self._woken, 1)
        np.copyto(self._mine[1], self._shared[1])
        np.copyto(self._mine[2], self._shared[2])

    def close(self) -> None:
        os.write(self._wake, b"q")
        os.waitpid(self._child, 0)
        for file in (self._wake, self._woken, *self._files):
            os.close(file)


def round_trips(args: argparse.Namespace) -> list[Row]:
    rows = []
    for n in args.num_envs:
        with ExitStack() as opened:
            bare, here, there = Bare(n), Here(Echo(n)), ProcessVec("tools.bench.echo:Echo", n, python=args.python)
            opened.callback(bare.close)
            opened.callback(there.close)
            for env in (here, there):
                env.reset(0)
            action = torch.zeros(n, ACTIONS)
            steps: dict[str, Callable[[], Any]] = {"bare": bare.step}
            steps |= {"here": partial(here.step, action), "there": partial(there.step, action)}
            times = common.alternate(
                {k: common.microseconds(step, args.seconds) for k, step in steps.items()}, args.rounds
            )
        goal = f" (goal: at most {GOALS[n]})" if n in GOALS else ""
        rows.append(compare(f"round trip, {n} envs / bare{goal}", "us", times["there"], times["bare"]))
        rows.append(compare(f"round trip, {n} envs / in this process", "us", times["there"], times["here"]))
    return rows


def ticks_per_second(env: VecEnv, seconds: float, stack: ExitStack) -> Round:
    """Return a round of ticks of a run on ``env``, whose learners keep a thread each busy for some milliseconds."""
    config = common.small_config(env.spec.num_envs, 256, [64, 64], 4, 0.5)
    place = PlacementConfig(executor="threads", threads=ThreadsConfig(collector=1, v=1, p=1, simulator=1))
    parts = common.begun(replace(changed(config, {"algo.n_step": 1}), placement=place), env)
    stack.callback(parts.schedule.executor.close)
    return common.per_second(parts.schedule.tick, 1, seconds)


def overlap(args: argparse.Namespace) -> list[Row]:
    n = args.num_envs[0]
    with ExitStack() as opened:
        free = ticks_per_second(Here(Echo(n)), args.seconds, opened)
        free()
        hold = WAIT / free()
        there = ProcessVec("tools.bench.echo:Echo", n, python=args.python, kwargs={"hold": hold})
        opened.callback(there.close)
        both: dict[str, VecEnv] = {"here": Here(Echo(n, hold=hold)), "there": there}
        rates = common.alternate({k: ticks_per_second(e, args.seconds, opened) for k, e in both.items()}, args.rounds)
    return [compare("overlap: in another process / in this one", "ticks/s", rates["there"], rates["here"])]


def main(argv: list[str] | None = None) -> None:
    parser = common.options(__doc__, seconds=0.3)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--num-envs", type=int, nargs="+", default=[64, 256, 1024, 4096, 16384])
    args = parser.parse_args(argv)
    if args.smoke:
        args.num_envs, args.rounds, args.seconds = args.num_envs[:1], 1, 0.01
    torch.set_num_threads(1)
    keep_freed_memory()  # as every run does
    paths = (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))  # where the simulator process finds tools
    with torch.no_grad(), mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, paths))):
        common.report(round_trips(args) + overlap(args), args.json)


if __name__ == "__main__":
    main()
