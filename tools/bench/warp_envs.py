"""Env-steps per second of MuJoCo Warp's environments on a GPU, at several numbers of environments.

Random actions; whole steps of our environment (physics, reward, observation, masked restarts): compiled and captured,
as in a run, and launched from the host. The baseline is the bare physics of the same engine, captured. Each row names
the task and its model; ``bytes`` is the memory of one environment's simulation, computed from the sizes of Warp's
arrays. The first run compiles kernels for minutes (and stores them in ``WARP_CACHE_PATH``).
"""

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from tools.bench.common import Round, Row, alternate, compare, options, per_second, report, synchronize

PACKAGES = ("mujoco", "mujoco_warp", "gymnasium")


def rate(step: Callable[[], Any], num_envs: int, seconds: float, device: torch.device) -> Round:
    """Return a round of about ``seconds`` that measures env-steps/s; the device never lags by more than 8 steps."""

    def eight() -> None:
        for _ in range(8):
            step()
        synchronize(device)

    return per_second(eight, 8 * num_envs, seconds, device)


def case(name: str, num_envs: int, device: torch.device, args: argparse.Namespace) -> list[Row]:
    from pql.contract.env import make_env
    from pql.engine.graph import Execution, Graph
    from pql.envs.mujoco.env import MujocoVec
    from pql.envs.mujoco.warp import WarpEngine

    env = make_env(name, num_envs, device, engine="warp", stagger=True)
    assert isinstance(env, MujocoVec)
    assert isinstance(env.engine, WarpEngine)
    env.reset(0)
    action = torch.rand(num_envs, env.task.action_size, device=device) * 2 - 1
    ctrl = env.task.control(action, env.engine.fields, env._memory)
    step: Any = partial(env.step, action)
    physics = partial(env.engine.step, ctrl, env.spec.info["frame_skip"])
    bodies = {
        "captured": Graph(step, device, env.generators, env, Execution("auto", "auto"), "a step"),
        "launched": Graph(step, device, env.generators, env),
        "bare": Graph(physics, device, [], env, Execution("auto")),
    }
    for body in bodies.values():
        body.prepare()
    rates = alternate({k: rate(body, num_envs, args.seconds, device) for k, body in bodies.items()}, args.rounds)
    title = f"warp {name} ({env.spec.info['model']}) n={num_envs}"
    rows = [
        compare(f"{title}, {how} / bare", "env-steps/s", rates[how], rates["bare"]) for how in ("captured", "launched")
    ]
    rows.append(compare(f"{title}: bytes", "bytes/env", [float(env.engine.bytes_per_env())]))
    env.close()
    return rows


def measure(args: argparse.Namespace) -> list[Row]:
    """Return all rows; none, with a printed note, if a package is not installed."""
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        print(f"no MuJoCo Warp rows: {' and '.join(missing)} not installed (pip install 'pql-rl[warp]')")
        return []
    device = torch.device(args.device)
    return [row for name in args.envs for n in args.num_envs for row in case(name, n, device, args)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = options(__doc__, seconds=1.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--envs", nargs="+", default=["halfcheetah", "ant", "humanoid"])
    parser.add_argument("--num-envs", nargs="+", type=int, default=[1024, 8192, 65536])
    args = parser.parse_args(argv)
    if args.smoke:
        args.envs, args.num_envs, args.rounds, args.seconds = args.envs[:1], [4], 1, 0.01
    report(measure(args), args.json)


if __name__ == "__main__":
    main()
