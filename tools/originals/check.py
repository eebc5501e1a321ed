"""Comparison of the PQL paper's tasks with their originals: IsaacGymEnvs' code on the states of ours.

python tools/originals/check.py --isaacgymenvs PATH [--tasks isaac_ant ...] [--states 4096]

PATH is a checkout of github.com/isaac-sim/IsaacGymEnvs (BSD-3-Clause), of which ``isaacgymenvs/tasks``, ``utils`` and
``cfg/task`` are read. Isaac Gym is not needed: the original's classes run on a stub (``isaac_stub.py``) with the
original's settings. In each of our steps both get the same state, sensor readings and actions, and compute observation,
reward, end of episode and motor commands. Start states are compared as distributions.

Physics is not compared: the next state is always ours.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from pql.errors import ConfigError
from tools.originals.hands import AllegroHand, ShadowHand, ShadowHandFull, ShadowHandFullNoVel, ShadowHandOpenAI
from tools.originals.pairs import Ant, Anymal, BallBalance, FrankaCubeStack, FrankaCubeStackTorque, Humanoid, Pair

PAIRS: tuple[type[Pair], ...] = (
    *(Ant, Humanoid, Anymal, BallBalance, FrankaCubeStack, FrankaCubeStackTorque),
    *(ShadowHand, ShadowHandFull, ShadowHandFullNoVel, ShadowHandOpenAI, AllegroHand),
)
HEAD = ("task", "quantity", "states", "largest difference", "among them")


class Row(NamedTuple):
    task: str
    quantity: str
    states: int
    difference: float
    among: str = ""  # events among the states, counted


@contextmanager
def doubles() -> Iterator[None]:
    """Let the original create its tensors in float64, and suppress its output."""
    single, double = torch.float32, torch.float64
    torch.set_default_dtype(double)
    try:
        with redirect_stdout(StringIO()), mock.patch.multiple("torch", float=double, float32=double):
            yield
    finally:
        torch.set_default_dtype(single)


class Seen:
    """Return the results of one of our steps, before ended episodes are reset."""

    def __init__(self, pair: Pair):
        self.env, self.ended, self.solved = pair.env, 0, 0
        self._finish = pair.env._finish
        vars(pair.env)["_finish"] = self._catch

    def _catch(self, obs: dict[str, Tensor], rows: Tensor, ends: tuple[Tensor | None, ...], *rest: Any) -> Any:
        env = self.env
        self.fields = {name: field.clone() for name, field in env.engine.fields.items()}
        self.fields |= env.task.derive(self.fields)
        terminated = torch.zeros_like(env._yes) if ends[0] is None else ends[0].clone()
        self.obs, self.reward, self.terminated, self.memory = obs, rows[0].clone(), terminated, env._memory
        self.ended += int(terminated.sum())
        if "success" in env.task.metrics:
            self.solved += int((rows[1 + len(env.task.terms) + env.task.metrics.index("success")] > 0).sum())
        return self._finish(obs, rows, ends, *rest)


def gap(theirs: Tensor, ours: Tensor) -> float:
    """Return the largest difference, relative where a number's magnitude is above 1."""
    theirs, ours = theirs.double(), ours.double()
    return float(((theirs - ours).abs() / theirs.abs().clamp(min=1.0)).max())


def apart(theirs: Tensor, ours: Tensor) -> float:
    """Return the largest Kolmogorov-Smirnov distance over columns of two samples [N, D]."""
    worst = 0.0
    for a, b in zip(theirs.double().T, ours.double().T, strict=True):
        a, b = (side.mul(1e6).round().sort().values for side in (a, b))  # equal constants are equal
        points = torch.cat((a, b))
        below = [torch.searchsorted(side, points, right=True).double() / len(side) for side in (a, b)]
        worst = max(worst, float((below[0] - below[1]).abs().max()))
    return worst


def step(pair: Pair, seen: Seen, action: Tensor) -> dict[str, float]:
    """Make one of our steps and run the original on the states before and after it; return differences by quantity."""
    env, one, unit = pair.env, pair.original, action.double()
    before = {name: field.clone() for name, field in env.engine.fields.items()}
    before |= env.task.derive(before)
    one.actions = torch.zeros_like(unit)
    with doubles():
        pair.show(before, env._memory)
        one.compute_observations()
        pair.clear(env._memory)
        one.pre_physics_step(unit)
    env.step(action)
    controls = [side.clone() for side in pair.controls(seen.fields)]
    with doubles():
        pair.show(seen.fields, seen.memory)
        one.compute_observations()
        one.compute_reward(unit) if pair.ours != "ballbalance" else one.compute_reward()
    found = {"observation": gap(one.obs_buf.clamp(-pair.clip, pair.clip), seen.obs["policy"])}
    if one.states_buf.numel():
        found["critic's observation"] = gap(one.states_buf.clamp(-pair.clip, pair.clip), seen.obs["critic"])
    found["reward"] = gap(one.rew_buf, seen.reward)
    found["ended"] = gap(one.reset_buf, pair.ended(seen.terminated, seen.memory))
    found["control"] = gap(*controls)
    return found


def check(kind: type[Pair], root: Path, states: int) -> list[Row]:
    """Return the rows of one task."""
    with doubles():
        pair = kind(root, min(kind.envs, states))
    seen, gen, worst = Seen(pair), torch.Generator().manual_seed(0), dict[str, float]()
    obs, steps = pair.env.reset(seed=0)["policy"], max(1, round(states / pair.n))
    for t in range(steps):
        if t % 4 == 1:
            pair.scatter(gen)
        found = step(pair, seen, pair.act(obs, gen))
        obs = pair.env._obs["policy"]
        worst = {name: max(value, worst.get(name, 0.0)) for name, value in found.items()}
    among = {"ended": f"{seen.ended} ends", "reward": f"{seen.solved} successes" if seen.solved else ""}
    rows = [Row(kind.ours, name, steps * pair.n, value, among.get(name, "")) for name, value in worst.items()]
    pair.env.close()

    with doubles():
        many = kind(root, states)
        many.begin()
    start = many.task.start(states, many.env._draw)
    rows.append(Row(kind.ours, "start (Kolmogorov-Smirnov)", states, apart(*many.starts(start))))
    many.env.close()
    return rows


def main(words: list[str] | None = None) -> list[Row]:
    names = [pair.ours for pair in PAIRS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isaacgymenvs", type=Path, required=True, metavar="PATH")
    parser.add_argument("--tasks", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--states", type=int, default=4096)
    args = parser.parse_args(words)
    if not (args.isaacgymenvs / "isaacgymenvs" / "tasks").is_dir():
        parser.error(f"--isaacgymenvs={args.isaacgymenvs}: expected a checkout with isaacgymenvs/tasks below it")
    found: list[Row] = []
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    for pair in PAIRS:
        if pair.ours not in args.tasks:
            continue
        try:
            rows = check(pair, args.isaacgymenvs, args.states)
        except (ConfigError, FileNotFoundError, ModuleNotFoundError) as error:  # a robot or a file is missing
            print(f"{pair.ours} left out: {error}", file=sys.stderr, flush=True)
            continue
        for row in rows:
            print(
                f"| `{row.task}` | {row.quantity} | {row.states:,} | {row.difference:.1e} | {row.among} |", flush=True
            )
        found += rows
    return found


if __name__ == "__main__":
    main()
