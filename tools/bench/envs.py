"""Env-steps per second of the MuJoCo environments, compared with bare ``mujoco.batch``, Gymnasium and EnvPool.

All run random actions, in turn. Every row names the model (``shipped`` or ``fast``), which has the largest effect on
speed. Bare MuJoCo gets exactly the physics of our run: the same states and actions step by step; only writing the
controls and stepping are timed. The others follow separate random trajectories: gymnasium on the same model, EnvPool
only on the shipped model. The PQL paper's tasks are compared only with bare MuJoCo. Tasks whose robot is not installed
are skipped. All tasks at three sizes take half an hour.
"""

import argparse
import importlib
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, chdir
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mujoco.batch import Batch

from pql.contract.env import make_env
from pql.envs.mujoco import TASKS
from pql.envs.mujoco.env import MujocoVec
from pql.envs.mujoco.task import load_spec, physics_steps
from pql.errors import ConfigError
from tools.bench.common import Round, Row, alternate, compare, options, per_second, report, save

GYMNASIUM = "HalfCheetah Hopper Walker2d Ant Humanoid HumanoidStandup Swimmer Reacher Pusher InvertedPendulum"
GYM_IDS = {name.lower(): f"{name}-v5" for name in (*GYMNASIUM.split(), "InvertedDoublePendulum")}
RECORDED = 40  # steps of the trajectory that our environment and bare MuJoCo repeat
FIRST = 40  # steps before it, to move away from the start states
UNIT = "env-steps/s"


def fewer(steps: int, num_envs: int) -> int:
    """Return ``steps``; with more than 512 environments fewer, for an equal number of rows; at least 8."""
    return max(8, min(steps, steps * 512 // num_envs))


def ours_and_bare(env: MujocoVec, threads: int, seconds: float) -> tuple[Round, Round]:
    """Return rounds of about ``seconds`` over one recorded trajectory: our environment's and bare MuJoCo's."""
    n, skip = env.spec.num_envs, env.spec.info["frame_skip"]
    actions = torch.rand(fewer(RECORDED, n), n, env.task.action_size) * 2 - 1
    env.reset(0)
    for _ in range(fewer(FIRST, n)):
        env.step(torch.rand(n, env.task.action_size) * 2 - 1)
    start, states, ctrls = env.state_dict(), [], []
    began = time.perf_counter()
    for action in actions:
        states.append(env.state_dict()["physics"].numpy())
        ctrls.append(env.task.control(action.double(), env.engine.fields, env._memory).numpy().copy())
        env.step(action)
    repeats = max(1, round(seconds / (time.perf_counter() - began)))
    batch = Batch(env.model, nsim=n, nthread=threads)
    # numpy, since a parallel copy in torch would leave spinning threads that slow the physics down
    ctrl, rows = batch.bind("ctrl"), batch.state

    def ours() -> float:
        spent = 0.0
        for _ in range(repeats):
            env.load_state_dict(start)
            began = time.perf_counter()
            for action in actions:
                env.step(action)
            spent += time.perf_counter() - began
        return repeats * len(actions) * n / spent

    def bare() -> float:
        spent = 0.0
        for _ in range(repeats):
            for state, held in zip(states, ctrls, strict=True):
                rows[...] = state
                began = time.perf_counter()
                ctrl[:] = held
                batch.step(nstep=skip)
                spent += time.perf_counter() - began
        return repeats * len(actions) * n / spent

    return ours, bare


def gymnasium_round(name: str, model: str, seconds: float, stack: ExitStack) -> Round:
    """Return a round of 8 of gymnasium's environments in this process."""
    import gymnasium

    kwargs: dict[str, Any] = {}
    if model != "shipped":
        spec = load_spec(TASKS[name].task, model)
        spec.compile()
        path = Path(f"{name}.xml").resolve()
        path.write_text(spec.to_xml())
        kwargs |= {"xml_file": str(path), "frame_skip": physics_steps(TASKS[name].task, model)}
    envs = gymnasium.make_vec(GYM_IDS[name], num_envs=8, vectorization_mode="sync", **kwargs)
    stack.callback(envs.close)
    envs.reset(seed=0)
    space: Any = envs.action_space
    high = space.high
    actions = np.random.default_rng(0).uniform(-high, high, (RECORDED, *high.shape)).astype(np.float32)
    turns = cycle(actions)
    return per_second(lambda: envs.step(next(turns)), 8, seconds)


def envpool_round(name: str, num_envs: int, threads: int, seconds: float, stack: ExitStack) -> Round:
    """Return a round of EnvPool's environment of the same name, stepped synchronously."""
    import envpool

    envs = envpool.make(GYM_IDS[name], env_type="gymnasium", num_envs=num_envs, num_threads=threads, seed=0)
    stack.callback(envs.close)
    envs.reset()
    shape, limit = (RECORDED, num_envs, *envs.action_space.shape), TASKS[name].task.ctrl_limit
    actions = np.random.default_rng(0).uniform(-limit, limit, shape).astype(np.float64)
    turns = cycle(actions)
    return per_second(lambda: envs.step(next(turns)), num_envs, seconds)


def bench(name: str, model: str, num_envs: int, args: argparse.Namespace, others: set[str]) -> list[Row]:
    """Return the rows of one task on one model at one number of environments."""
    env = make_env(name, num_envs, "cpu", threads=args.threads, model=model)
    assert isinstance(env, MujocoVec)
    ours, bare = ours_and_bare(env, args.threads, args.seconds)
    fns = {"ours": ours, "mujoco.batch": bare}
    with ExitStack() as stack:
        stack.callback(env.close)
        if num_envs == args.num_envs[0] and "gymnasium.envs.mujoco" in others and name in GYM_IDS:
            fns["gymnasium sync n=8"] = gymnasium_round(name, model, args.seconds, stack)
        if "envpool" in others and model == "shipped" and name in GYM_IDS:
            fns["envpool"] = envpool_round(name, num_envs, args.threads, args.seconds, stack)
        rates = alternate(fns, args.rounds)
    mine = rates.pop("ours")
    return [compare(f"{name} ({model}) n={num_envs} / {other}", UNIT, mine, rate) for other, rate in rates.items()]


def installed() -> list[str]:
    """Return the tasks whose models are installed; print the others."""
    found = []
    for name, maker in TASKS.items():
        try:
            load_spec(maker.task)
        except ConfigError as error:
            print(f"{name} left out: {error}")
        else:
            found.append(name)
    return found


def importable(package: str) -> bool:
    """Return whether ``package`` can be imported; print the error if not."""
    try:
        importlib.import_module(package)
    except ImportError as error:
        print(f"{package} left out: {error} (pip install 'pql-rl[bench,dev]')")
        return False
    return True


def main(argv: Sequence[str] | None = None) -> None:
    parser = options(__doc__, seconds=1.0)
    parser.set_defaults(rounds=3)
    parser.add_argument("--envs", nargs="+", choices=list(TASKS), help="default: all whose robot is installed")
    parser.add_argument("--num-envs", nargs="+", type=int, default=[64, 512, 4096])
    parser.add_argument("--threads", type=int, default=0, help="physics threads, 0 for one per core")
    args = parser.parse_args(argv)
    if args.smoke:
        args.envs, args.num_envs, args.rounds, args.seconds = args.envs or ["hopper"], [2], 1, 0.01
    others = {package for package in ("gymnasium.envs.mujoco", "envpool") if importable(package)}
    json_path = args.json and str(Path(args.json).resolve())
    with tempfile.TemporaryDirectory() as folder, chdir(folder):  # MuJoCo logs its warnings in the working directory
        cases = [(name, TASKS[name].task.model) for name in args.envs or installed()]
        rows: list[Row] = []
        for num_envs in args.num_envs:
            for name, model in cases:
                found = bench(name, model, num_envs, args, others)
                print(*(f"{row['name']}: {row['ratio']:.2f}" for row in found), sep="\n", flush=True)
                rows += found
                save(rows, json_path)  # after every case, since all of them take half an hour
    report(rows, json_path)


if __name__ == "__main__":
    main()
