"""The parts of ``check.py`` and their cases.

A case is a function that yields rows (``bench.common.compare``) and notes (text) as they are measured.
"""

import argparse
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pql.collect.actors import action_buffer
from pql.config import Config, DdpgConfig, PlacementConfig, ReplayConfig
from pql.contract.conformance import check_env
from pql.contract.env import make_env
from pql.engine.graph import Execution, Graph
from tools.bench import learner
from tools.bench.common import Row, alternate, compare, microseconds
from tools.gpu import runs
from tools.gpu.runs import PPO, PQL, SAC, catch_config, make_config, measure

ROOT = Path(__file__).resolve().parents[2]
TASKS = ("pendulum", "cartpole", "cartpole_swingup", "ball_balance", "catch", "tmaze")

Found = Iterator[Row | str]


class MissingError(Exception):
    """A package that the case needs is not installed."""


class Case(NamedTuple):
    name: str
    run: Callable[[], Found]


class Part(NamedTuple):
    """A group of cases that must end within ``seconds``, unless ``--limit`` is given."""

    seconds: float
    about: str
    cases: Callable[[Any], list[Case]]


def need(*packages: str) -> None:
    """Raise ``MissingError`` if one of the packages is not installed."""
    if absent := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise MissingError(f"not installed: {', '.join(absent)}")


def on_cuda(args: Any) -> bool:
    return str(args.device).startswith("cuda")


# -- env --------------------------------------------------------------------------------------------------------------


def env_cases(args: Any) -> list[Case]:
    parts = {"machine": describe, "copy": copy_rows, "products": product_rows, "launches": host_rows}
    return [Case(name, partial(run, args)) for name, run in parts.items()]


def describe(args: Any) -> Found:
    """Describe the machine."""
    yield f"python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} CPUs"
    for name in ("triton", "mujoco", "mujoco_warp", "ale_py", "hydra", "rsl_rl", "stable_baselines3", "xdist"):
        if importlib.util.find_spec(name) is None:
            yield f"without {name}"
    if not on_cuda(args):
        return
    device = torch.device(args.device)
    p, (free, total) = torch.cuda.get_device_properties(device), torch.cuda.mem_get_info(device)
    yield (
        f"{torch.cuda.device_count()} x {p.name}, compute capability {p.major}.{p.minor}, "
        f"{p.multi_processor_count} multiprocessors, CUDA {torch.version.cuda}, "
        f"CUBLAS_WORKSPACE_CONFIG={os.environ['CUBLAS_WORKSPACE_CONFIG']}"
    )
    yield compare("memory free", "GiB", [free / 2**30], [total / 2**30])
    asked = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv"]
    try:
        yield subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        yield f"nvidia-smi: {error}"


def copy_rows(args: Any) -> Found:
    size = 2**20 if args.smoke else 2**30
    one, other = (torch.rand(size // 4, device=args.device) for _ in range(2))
    times = alternate({"copy": microseconds(lambda: one.copy_(other), args.seconds, one.device)}, args.rounds)
    yield compare("a copy on the device, read and written", "GB/s", [2 * size / t / 1e3 for t in times["copy"]])


def product_rows(args: Any) -> Found:
    """Measure the rate of matrix products, as a reference for updates."""
    size = 64 if args.smoke else 8192
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    pairs = {
        name: [torch.randn(size, size, device=args.device, dtype=kind) for _ in range(2)]
        for name, kind in (("TF32", torch.float32), ("bfloat16", torch.bfloat16))
    }
    fns = {k: microseconds(partial(torch.mm, *pair), args.seconds, pair[0].device) for k, pair in pairs.items()}
    for name, times in alternate(fns, args.rounds).items():
        yield compare(f"products of {size} x {size} in {name}", "TFLOP/s", [2 * size**3 / t / 1e6 for t in times])


def host_rows(args: Any) -> Found:
    """Measure the host's cost of a launch."""
    x = torch.zeros(1, device=args.device)

    def hundred() -> None:
        for _ in range(100):
            x.add_(1)

    fns = {"launch": microseconds(hundred, args.seconds, x.device)}
    for times in alternate(fns, args.rounds).values():
        yield compare("a launch, one after the other", "us", [t / 100 for t in times])


# -- tests ------------------------------------------------------------------------------------------------------------


def test_files() -> list[Path]:
    """Return the files with tests marked ``gpu``."""
    marks = ("mark.gpu", "HERE_TOO", "everywhere(")
    return [f for f in sorted((ROOT / "tests").rglob("test_*.py")) if any(m in f.read_text() for m in marks)]


def test_cases(args: Any) -> list[Case]:
    return [Case(file.stem, partial(run_tests, file, args)) for file in test_files()] if on_cuda(args) else []


def run_tests(file: Path, args: Any) -> Found:
    """Run a file's tests marked ``gpu``, with ``args.processes`` processes if xdist is installed."""
    need("pytest")
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "junit.xml"
        command = pytest_command(file, xml, args.processes)
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        suite = next(ElementTree.parse(xml).getroot().iter("testsuite"))
    for name in ("tests", "failures", "errors", "skipped"):
        yield compare(f"{file.stem}: {name}", "tests", [float(suite.get(name, 0))])
    for case in suite.iter("testcase"):
        for what in ("failure", "error"):
            if (found := case.find(what)) is not None:
                yield f"{what}: {case.get('name')}: {(found.get('message') or '')[:300]}"
    if status not in (0, 5):  # 5: no test is marked
        raise AssertionError(f"pytest ended with status {status}: believe no number before this is understood")


def pytest_command(file: Path, xml: Path, processes: int) -> list[str]:
    several = ["-n", str(processes)] if processes > 1 and importlib.util.find_spec("xdist") else []
    own = ["-o", "addopts=", "-p", "no:cacheprovider", "-q", "-rs", "--durations=15", f"--junitxml={xml}"]
    return [sys.executable, "-m", "pytest", str(file), "-m", "gpu and not slow", *own, *several]


# -- pql, update, envs -----------------------------------------------------------------------------------------------


def sizes(args: Any) -> list[int]:
    return [8] if args.smoke else args.num_envs


def pql_configs(args: Any) -> dict[str, Config]:
    one = {f"n={n}": make_config(args, n) for n in sizes(args)}
    n = sizes(args)[0]
    more = {"sac": make_config(args, n, algo=SAC), "ppo": make_config(args, n, algo=PPO), "dqn": catch_config(args, n)}
    return {**one, **{f"{k} n={n}": config for k, config in more.items()}}


def pql_cases(args: Any) -> list[Case]:
    cases = [Case(name, partial(measure, name, config, args)) for name, config in pql_configs(args).items()]
    return [*cases, Case("orders", partial(runs.order_rows, make_config(args, sizes(args)[0]), args))]


def update_configs(args: Any) -> dict[str, Config]:
    """Return cases of updates compared with their bare products: the paper's critic, a categorical one."""
    n, plain = (8, DdpgConfig(name="pql", batch_size=16)) if args.smoke else (4096, PQL)
    atoms = replace(plain, name="pql_d", critic=replace(plain.critic, atoms=51, v_min=-10.0, v_max=10.0))
    ring = ReplayConfig(capacity=64 * n)
    place = runs.ONE_THREAD if args.smoke else PlacementConfig()
    return {
        algo.name: Config(algo=algo, replay=ring, num_envs=n, device=args.device, placement=place, budget=runs.BUDGET)
        for algo in (plain, atoms)
    }


def update_cases(args: Any) -> list[Case]:
    wanted = argparse.Namespace(**vars(args), threads=None)
    cases = []
    for name, config in update_configs(args).items():
        cases.append(Case(name, partial(rows_of, learner.bench, name, config, wanted)))
        cases.append(Case(f"{name} profile", partial(rows_of, learner.profile, name, config, wanted)))
    return cases


def rows_of(bench: Callable[..., list[Row] | None], *arguments: Any) -> Found:
    """Return a case of a benchmark that returns all its rows at once, or prints them."""
    yield from bench(*arguments) or ()


def envs_cases(args: Any) -> list[Case]:
    counts = [8] if args.smoke else [4096, 65536]
    return [Case(task, partial(step_rows, task, counts, args)) for task in (TASKS[:2] if args.smoke else TASKS)]


def step_rows(task: str, counts: list[int], args: Any) -> Found:
    """Check the environment contract on this device; measure env-steps/s of a captured against a launched step."""
    report = check_env(make_env(task, 8, args.device, max_episode_steps=12), 30)
    yield compare(f"{task}: rules broken", "rules", [float(len(report.failed))])
    for rule in report.results:
        if rule.ok is False:
            yield f"{task}: {rule.name}: {rule.message}"
    for n in counts:
        env: Any = make_env(task, n, args.device)
        env.reset(0)
        action = action_buffer(env.spec)
        graph = Graph(partial(env.step, action), env.spec.device, env.generators, env, Execution("on"))
        graph.prepare()
        fns: dict[str, Callable[[], Any]] = {"captured": graph, "eager": partial(env.step, action)}
        times = alternate({k: microseconds(fn, args.seconds, env.spec.device) for k, fn in fns.items()}, args.rounds)
        rate = {k: [n / t * 1e6 for t in found] for k, found in times.items()}
        yield compare(f"{task} n={n}: captured / eager", "env-steps/s", rate["captured"], rate["eager"])


PARTS = {
    "env": Part(60, "versions, clocks, memory; rates of copies, products and launches", env_cases),
    "tests": Part(530, "the tests marked gpu, file by file", test_cases),
    "pql": Part(
        530, "PQL, SAC, PPO on swing-up, DQN on Catch: schedules, graphs, host time, launches, orders", pql_cases
    ),
    "update": Part(240, "critic and policy updates against their bare products, and profiles", update_cases),
    "envs": Part(300, "the torch tasks: the contract, and a captured step against an eager one", envs_cases),
}
"""All parts; each ends within nine minutes."""


def configs(args: Any) -> dict[str, Config]:
    """Return every configuration that a part builds, by part and case; a test checks all of them."""
    made = {"pql": pql_configs, "update": update_configs}
    return {f"{part} {name}": config for part, make in made.items() for name, config in make(args).items()}
