"""Is this GPU machine right, and how fast is it? One script, under five minutes, from a plain checkout.

python tools/gpu_check.py [--rounds 5] [--seconds 1] [--json PATH]
python tools/gpu_check.py --device cpu --smoke            the measuring part, tiny, to test the script itself

Needs torch >= 2.10, numpy, safetensors and pytest; nothing has to be installed from here. In turn:

1. what the machine is;
2. the tests marked ``gpu``, in a process of their own (a failure here means: believe no number below);
3. PQL on ``cartpole_swingup`` with the paper's networks and batch, at 4,096 and 16,384 environments;
4. DQN on ``catch``, frames and convolutions on the device, at 4,096 environments;
5. Atari, where ale_py is installed: ``bench_atari.py``'s sampling and learning with the network on the device;
6. MuJoCo Warp, where it is installed: ``bench_warp.py``, from 1,024 to 65,536 environments.

The rows of parts 3 and 4, per number of environments n:

concurrent / lockstep    env-steps/s of three streams over one, with CUDA graphs on and off: what overlap is worth
graphs on / off          env-steps/s under ``concurrent``: what capturing is worth
updates                  critic and policy updates per second, concurrent, graphs on
host per tick / tick     milliseconds in which the host launches a tick (two ticks from idle, so it never waits for the
                         device), over the time of a tick. Near 1 the host bounds the tick, far below it the device does
kernels, launches        per critic or policy update and per step of the collector: kernels that run on the device,
                         and calls by which the host starts them (one graph launch starts a whole burst)

Exit status: 0 done, 1 a test failed, 2 no CUDA device.
"""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first CUDA call, as `pql train` does

import argparse
import gc
import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
NAMES = {"v": "critic", "p": "policy"}
AHEAD = 2  # ticks that may be launched before the host has to wait
TEST_SECONDS = 180


for folder in (ROOT, ROOT / "tools"):  # this checkout, installed or not
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import bench_atari  # noqa: E402
import bench_warp  # noqa: E402
from _bench import alternate, compare, report  # noqa: E402

from pql.build import Parts, build, seeds  # noqa: E402
from pql.config import (  # noqa: E402
    AlgoConfig,
    Config,
    CriticConfig,
    PlacementConfig,
    PolicyConfig,
    ReplayConfig,
    TaskConfig,
    ThreadsConfig,
)
from pql.machine import available_cores  # noqa: E402

ONE_THREAD = PlacementConfig(threads=ThreadsConfig(1, 1, 1, 1))  # on the CPU, where a test may not have it to itself


def describe(device: torch.device) -> list[str]:
    """What a reader of the numbers must know of the machine."""
    lines = [f"python {sys.version.split()[0]}, torch {torch.__version__}, {os.cpu_count()} CPUs"]
    if tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 10):
        lines.append("warning: torch is older than 2.10, which this package is written for")
    if device.type == "cuda":
        p = torch.cuda.get_device_properties(device)
        free, total = (b / 2**30 for b in torch.cuda.mem_get_info(device))
        lines += [
            f"{torch.cuda.device_count()} x {p.name}, compute capability {p.major}.{p.minor}, "
            f"{p.multi_processor_count} multiprocessors, {free:.1f} of {total:.1f} GiB free",
            f"CUDA {torch.version.cuda}, CUBLAS_WORKSPACE_CONFIG={os.environ['CUBLAS_WORKSPACE_CONFIG']}",
        ]
    return lines


def run_tests() -> int:
    """pytest's exit status for the tests marked ``gpu``; called in a process of its own."""
    import pytest

    files = [str(f) for f in sorted((ROOT / "tests").glob("test_*.py")) if "mark.gpu" in f.read_text()]
    return int(pytest.main([*files, "-m", "gpu", "-rs", "-o", "addopts=", "-p", "no:cacheprovider", "-q"]))


def tests_in_a_process() -> int:
    """A crash of the device cannot reach the measurements."""
    try:
        command = [sys.executable, str(Path(__file__).resolve()), "--only-tests"]
        return subprocess.run(command, cwd=ROOT, timeout=TEST_SECONDS, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"the gpu tests took more than {TEST_SECONDS} s")
        return 124


def make_config(num_envs: int, args: Any) -> Config:
    """PQL on cart-pole swing-up at the paper's scale, or tiny."""
    task = TaskConfig(name="cartpole_swingup")
    if not args.smoke:
        return Config(task=task, num_envs=num_envs, device=args.device)
    critic, policy = CriticConfig(hidden=[16, 16]), PolicyConfig(hidden=[16, 16])
    algo = AlgoConfig(batch_size=32, v_per_step=2, warmup_steps=4, critic=critic, policy=policy)
    replay = ReplayConfig(capacity=64 * num_envs)
    return Config(task=task, algo=algo, replay=replay, num_envs=num_envs, device="cpu", placement=ONE_THREAD)


def catch_config(num_envs: int, args: Any) -> Config:
    """DQN on Catch, each row used eight times, in large batches; or tiny."""
    hidden, batch, warm_up = ([16], 32, 4) if args.smoke else ([512], 2 * num_envs, 32)
    algo = AlgoConfig(
        name="dqn", family="dqn", batch_size=batch, n_step=1, v_per_step=8 * num_envs / batch, warmup_steps=warm_up,
        normalize_obs=False, critic=CriticConfig(hidden=hidden, activation="relu", weight_decay=0.0),
    )  # fmt: skip
    return Config(
        task=TaskConfig(name="catch"), algo=algo, replay=ReplayConfig(capacity=1024 * num_envs), num_envs=num_envs,
        device=args.device, placement=ONE_THREAD if args.smoke else PlacementConfig(),
    )  # fmt: skip


def ready(config: Config, schedule: str, graphs: bool, warm_ticks: int = 5) -> Parts:
    """A run that has gone through its first ticks."""
    algo = replace(config.algo, schedule=schedule)
    parts = build(replace(config, algo=algo, cuda_graphs="auto" if graphs else "off"))
    parts.prepare()
    parts.collector.start(seeds(config.seed)["env"])
    parts.collector.warm_up(config.algo.warmup_steps)
    parts.begin()
    wait(parts)
    for _ in range(warm_ticks):
        parts.schedule.tick()
    wait(parts)
    return parts


def wait(parts: Parts) -> None:
    """Until the device has done everything."""
    if parts.env.spec.device.type == "cuda":
        torch.cuda.synchronize(parts.env.spec.device)


def ticks_per_second(parts: Parts, seconds: float) -> Callable[[], float]:
    def one() -> float:
        count, began = 0, time.perf_counter()
        while count == 0 or time.perf_counter() - began < seconds:
            parts.schedule.tick()
            count += 1
        wait(parts)
        return count / (time.perf_counter() - began)

    return one


def host_ms(parts: Parts, repeats: int) -> float:
    """Milliseconds that the host needs to launch a tick (median)."""
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
    """(kernels run on the device, host calls that launch work) of one ``job``."""
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
    kernels = [
        e for e in events
        if e.device_type == torch.autograd.DeviceType.CUDA
        and not e.is_user_annotation and not e.name.startswith(("Memcpy", "Memset"))
    ]  # fmt: skip
    return len(kernels), sum(e.name.startswith(LAUNCHES) for e in events)


def launch_rows(case: str, parts: Parts) -> list[dict[str, Any]]:
    """Kernels and launches per update of each learner and per step of the collector."""
    horizon = parts.counts.horizon
    jobs: dict[str, tuple[Callable[[], Any], int]] = {
        f"{NAMES[worker]} update": (partial(job, 1), job.size) for worker, job in parts.jobs.items()
    }
    jobs["collector step"] = (lambda: parts.collector.run(horizon), horizon)
    rows = []
    for name, (job, count) in jobs.items():
        kernels, launches = count_work(parts, job)
        rows.append(compare(f"{case}: kernels per {name}", "kernels", [kernels / count]))
        rows.append(compare(f"{case}: launches per {name}", "calls", [launches / count]))
    return rows


def measure(case: str, config: Config, args: Any) -> list[dict[str, Any]]:
    """All variants of one algorithm at one number of environments, in turn."""
    num_envs = config.num_envs
    runs = {
        (schedule, graphs): ready(config, schedule, graphs)
        for schedule in ("concurrent", "lockstep") for graphs in (True, False)
    }  # fmt: skip
    names = {key: f"{key[0]}, graphs {'on' if key[1] else 'off'}" for key in runs}
    rates = alternate({names[k]: ticks_per_second(p, args.seconds) for k, p in runs.items()}, args.rounds)
    counts = runs["concurrent", True].counts
    rate = {k: [r * counts.horizon * num_envs for r in rates[name]] for k, name in names.items()}
    unit, both = "env-steps/s", (True, False)
    rows = [
        compare(f"{case} graphs {'on' if g else 'off'}: concurrent / lockstep", unit,
                rate["concurrent", g], rate["lockstep", g]) for g in both
    ]  # fmt: skip
    rows.append(
        compare(f"{case} concurrent: graphs on / off", unit, rate["concurrent", True], rate["concurrent", False])
    )
    ticks = rates[names["concurrent", True]]
    rows.append(compare(f"{case}: updates", "updates/s", [t * sum(counts.updates.values()) for t in ticks]))
    for key, parts in runs.items():
        tick = [1e3 / r for r in rates[names[key]]]
        host = host_ms(parts, 2 if args.smoke else 20)
        rows.append(compare(f"{case} {names[key]}: host per tick / tick", "ms", [host] * len(tick), tick))
    for graphs in both if config.device != "cpu" else (False,):
        rows += launch_rows(f"{case} graphs {'on' if graphs else 'off'}", runs["concurrent", graphs])
    for parts in runs.values():
        parts.schedule.executor.close()
        parts.env.close()
    return rows


def atari(args: Any) -> list[dict[str, Any]]:
    """Sampling and learning on a game; nothing, said in a line, where its simulator is missing."""
    missing = [m for m in ("ale_py", "gymnasium") if importlib.util.find_spec(m) is None]
    if missing:
        print(f"no Atari rows: {' and '.join(missing)} not installed (pip install 'pql-rl[atari]')")
        return []
    num_envs, batches, threads = (4, [8], 1) if args.smoke else (256, [32, 512], available_cores())
    wanted = argparse.Namespace(
        game="pong", num_envs=num_envs, batches=batches, threads=threads, device=args.device,
        rounds=args.rounds, seconds=args.seconds, smoke=args.smoke,
    )  # fmt: skip
    return bench_atari.sampling(wanted) + bench_atari.learning(wanted)


def warp(args: Any) -> list[dict[str, Any]]:
    """MuJoCo's physics on the device; nothing, said in a line, where Warp is missing."""
    sizes, envs = ([4], ["halfcheetah"]) if args.smoke else ([1024, 8192, 65536], ["halfcheetah", "ant", "humanoid"])
    wanted = argparse.Namespace(device=args.device, envs=envs, num_envs=sizes, rounds=args.rounds, seconds=args.seconds)
    return bench_warp.measure(wanted)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--num-envs", nargs="+", type=int, default=[4096, 16384])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one measurement")
    parser.add_argument("--skip-tests", action="store_true")
    parser.add_argument("--only-tests", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="tiny and quick, to test the script itself")
    parser.add_argument("--json", metavar="PATH")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing to check (--device cpu --smoke tries the measuring part)")
        return 2
    if args.only_tests:
        return run_tests()
    if args.smoke:
        args.num_envs, args.rounds, args.seconds = [8], 1, 0.02
    print("\n".join(describe(device)), flush=True)
    rows, status = [], 0
    if device.type == "cuda" and not args.skip_tests:
        status = tests_in_a_process()
        rows.append(compare("gpu tests", "exit status", [float(status)]))
    cases = {f"n={n}": make_config(n, args) for n in args.num_envs}
    catch = 8 if args.smoke else 4096
    cases[f"catch DQN n={catch}"] = catch_config(catch, args)
    for case, config in cases.items():
        rows += measure(case, config, args)
        gc.collect()
    rows += atari(args)
    rows += warp(args)
    report(rows, args.json)
    return 1 if status else 0


if __name__ == "__main__":
    sys.exit(main())
