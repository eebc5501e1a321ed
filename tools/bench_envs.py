"""Env-steps per second of the MuJoCo environments, beside bare ``mujoco.batch``, Gymnasium and EnvPool.

python tools/bench_envs.py [--num-envs 128 1024] [--threads 0] [--rounds 5] [--json PATH]

All run random actions, in turn. Bare MuJoCo gets exactly the physics of our run: the same states and actions step by
step, with only writing the controls and stepping inside its clock. The others follow random trajectories of their
own. Ant's baselines use our edition of its model, except EnvPool, which has its own and is left out there.
"""

import argparse
import importlib
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, chdir
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _bench import alternate, compare, report
from mujoco.batch import Batch

from pql.env import make_env
from pql.envs.mujoco.env import MujocoVec
from pql.envs.mujoco.tasks import ANT, load_spec

GYM_IDS = {"halfcheetah": "HalfCheetah-v5", "hopper": "Hopper-v5", "walker2d": "Walker2d-v5", "ant": "Ant-v5"}
RECORDED = 40  # steps of the trajectory that ours and bare MuJoCo repeat
UNIT = "env-steps/s"

Round = Callable[[], float]


def ours_and_bare(env: MujocoVec, threads: int, seconds: float) -> tuple[Round, Round]:
    """Rounds of about ``seconds`` over one recorded trajectory."""
    n, skip = env.spec.num_envs, env.task.frame_skip
    actions = torch.rand(RECORDED, n, env.task.action_size) * 2 - 1
    env.reset(0)
    for action in actions:  # leave the start behind
        env.step(action)
    start, states = env.state_dict(), []
    began = time.perf_counter()
    for action in actions:
        states.append(env.state_dict()["physics"].numpy())
        env.step(action)
    repeats = max(1, round(seconds / (time.perf_counter() - began)))
    batch = Batch(env.model, nsim=n, nthread=threads)
    # numpy, since a parallel copy in torch would leave threads spinning that slow the physics down
    ctrl, rows = batch.bind("ctrl"), batch.state

    def ours() -> float:
        spent = 0.0
        for _ in range(repeats):
            env.load_state_dict(start)
            began = time.perf_counter()
            for action in actions:
                env.step(action)
            spent += time.perf_counter() - began
        return repeats * RECORDED * n / spent

    def bare() -> float:
        spent = 0.0
        for _ in range(repeats):
            for state, action in zip(states, actions.numpy(), strict=True):
                rows[...] = state
                began = time.perf_counter()
                ctrl[:] = action
                batch.step(nstep=skip)
                spent += time.perf_counter() - began
        return repeats * RECORDED * n / spent

    return ours, bare


def gymnasium_round(name: str, mode: str, seconds: float, stack: ExitStack) -> Round:
    """Gymnasium's 8 environments, in this process (``sync``) or in 8 (``async``)."""
    import gymnasium

    kwargs: dict[str, Any] = {}
    if name == "ant":
        spec = load_spec(ANT)
        spec.compile()
        path = Path("ant.xml").resolve()
        path.write_text(spec.to_xml())
        kwargs["xml_file"] = str(path)
    envs = gymnasium.make_vec(GYM_IDS[name], num_envs=8, vectorization_mode=mode, **kwargs)
    stack.callback(envs.close)
    envs.reset(seed=0)
    actions = (
        np.random.default_rng(0).uniform(-1, 1, (RECORDED, *np.shape(envs.action_space.sample()))).astype(np.float32)
    )

    def one() -> float:
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            envs.step(actions[count % RECORDED])
            count += 1
        return count * 8 / (time.perf_counter() - began)

    return one


def envpool_round(name: str, num_envs: int, threads: int, seconds: float, stack: ExitStack) -> Round:
    """EnvPool's environment of the same name, stepped synchronously."""
    import envpool

    envs = envpool.make(GYM_IDS[name], env_type="gymnasium", num_envs=num_envs, num_threads=threads, seed=0)
    stack.callback(envs.close)
    envs.reset()
    shape = (RECORDED, num_envs, *envs.action_space.shape)
    actions = np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float64)

    def one() -> float:
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            envs.step(actions[count % RECORDED])
            count += 1
        return count * num_envs / (time.perf_counter() - began)

    return one


def bench(name: str, num_envs: int, args: argparse.Namespace, others: set[str]) -> list[dict[str, Any]]:
    """The rows of one robot at one number of environments."""
    env = make_env(name, num_envs, "cpu", threads=args.threads)
    assert isinstance(env, MujocoVec)
    ours, bare = ours_and_bare(env, args.threads, args.seconds)
    fns = {"ours": ours, "mujoco.batch": bare}
    with ExitStack() as stack:
        stack.callback(env.close)
        if num_envs == args.num_envs[0] and "gymnasium.envs.mujoco" in others:
            for mode in ("sync", "async"):
                fns[f"gymnasium {mode} n=8"] = gymnasium_round(name, mode, args.seconds, stack)
        if "envpool" in others and name != "ant":
            fns["envpool"] = envpool_round(name, num_envs, args.threads, args.seconds, stack)
        rates = alternate(fns, args.rounds)
    mine = rates.pop("ours")
    return [compare(f"{name} n={num_envs} / {other}", UNIT, mine, rate) for other, rate in rates.items()]


def importable(package: str) -> bool:
    """Whether ``package`` imports; says so where it does not."""
    try:
        importlib.import_module(package)
    except ImportError as error:
        print(f"{package} left out: {error} (pip install 'pql[bench,dev]')")
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", nargs="+", default=list(GYM_IDS), choices=list(GYM_IDS))
    parser.add_argument("--num-envs", nargs="+", type=int, default=[128, 1024])
    parser.add_argument("--threads", type=int, default=0, help="physics threads, 0 for one per core")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one round")
    parser.add_argument("--json", metavar="PATH")
    args = parser.parse_args()
    others = {package for package in ("gymnasium.envs.mujoco", "envpool") if importable(package)}
    json_path = args.json and str(Path(args.json).resolve())
    with tempfile.TemporaryDirectory() as folder, chdir(folder):  # MuJoCo logs its warnings in the working directory
        rows = [row for n in args.num_envs for name in args.envs for row in bench(name, n, args, others)]
    report(rows, json_path)


if __name__ == "__main__":
    main()
