"""Common code of the benchmarks: options, timing in turn, runs, and medians as a table and as JSON."""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pql.config import Config, CriticConfig, DdpgConfig, DeterministicPolicyConfig, ReplayConfig
from pql.contract.env import VecEnv
from pql.engine.graph import Execution, Graph
from pql.engine.placement import processor
from pql.run.build import build
from pql.run.components import Parts

COLUMNS = ("name", "value", "unit", "baseline", "ratio", "runs")
CPU = torch.device("cpu")

Row = dict[str, Any]
Round = Callable[[], float]


def options(doc: str | None, seconds: float | None = None) -> argparse.ArgumentParser:
    """Return a parser with the options ``--json`` and ``--smoke``.

    Args:
        doc: the script's docstring.
        seconds: the default length of one measurement; also adds ``--seconds`` and ``--rounds``.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="PATH")
    parser.add_argument("--smoke", action="store_true", help="tiny and quick, to test the script itself")
    if seconds is not None:
        parser.add_argument("--rounds", type=int, default=7)
        parser.add_argument("--seconds", type=float, default=seconds, help="length of one measurement")
    return parser


def small_config(num_envs: int, batch: int, hidden: list[int], v_per_step: float, p_per_v: float) -> Config:
    """Return the config of a run of DDPG on the CPU."""
    critic = CriticConfig(hidden=hidden, activation="relu")
    policy = DeterministicPolicyConfig(hidden=hidden, activation="relu")
    updates: dict[str, Any] = {"batch_size": batch, "v_per_step": v_per_step, "p_per_v": p_per_v, "warmup_steps": 8}
    algo = DdpgConfig(critic=critic, policy=policy, **updates)
    return Config(algo=algo, replay=ReplayConfig(capacity=1024 * num_envs), num_envs=num_envs, device="cpu")


def begun(config: Config, env: VecEnv | None = None, warm_up: int = 0, **more: Any) -> Parts:
    """Return a run that is ready for its first tick, as a session prepares it.

    Args:
        warm_up: the least number of random steps of every environment.
        more: of ``build``.
    """
    parts = build(config, env, **more)
    parts.prepare()
    parts.start()
    parts.warm_up(max(warm_up, config.algo.warmup_steps))
    parts.begin()
    return parts


def close(*runs: Parts) -> None:
    for parts in runs:
        parts.schedule.executor.close()
        parts.close_envs()


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def microseconds(fn: Callable[[], Any], seconds: float, device: torch.device = CPU) -> Round:
    """Return a round of about ``seconds`` that measures microseconds per call of ``fn``, device work included."""

    def one() -> float:
        count, began = 0, time.perf_counter()
        while count == 0 or time.perf_counter() - began < seconds:
            fn()
            count += 1
        synchronize(device)
        return (time.perf_counter() - began) / count * 1e6

    return one


def per_second(fn: Callable[[], Any], amount: float, seconds: float, device: torch.device = CPU) -> Round:
    """Return a round of about ``seconds`` that measures ``amount`` times calls of ``fn`` per second."""
    one = microseconds(fn, seconds, device)
    return lambda: amount / one() * 1e6


@contextmanager
def intra_op(threads: int) -> Iterator[None]:
    """Use ``threads`` intra-op threads inside the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def alternate(fns: dict[str, Round], rounds: int) -> dict[str, list[float]]:
    """Call every function once per round, in turn, so that a slow minute of the machine affects all of them.

    Args:
        fns: name -> function that runs one round and returns its rate.
        rounds: number of rounds; one more comes first and is discarded.

    Returns:
        name -> one rate per round.
    """
    rates: dict[str, list[float]] = {name: [] for name in fns}
    for turn in range(rounds + 1):
        for name, fn in fns.items():
            rate = fn()
            if turn > 0:
                rates[name].append(rate)
    return rates


def repeated(fn: Callable[[], Any], count: int, device: torch.device) -> Callable[[], None]:
    """Return ``count`` calls of ``fn`` as one function: on CUDA a captured graph, so that launches are not measured.

    Args:
        fn: work without state or random numbers, at fixed addresses.
    """

    def body() -> None:
        for _ in range(count):
            fn()

    if not Graph.possible(device):
        return body
    graph = Graph(body, device, (), torch.nn.Module(), Execution("on"))
    graph.prepare()
    return graph


def machine() -> str:
    """Return one line: processor, cores, GPU if there is one, Python and torch."""
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{processor()} x{os.cpu_count()}{gpu}, Python {platform.python_version()}, torch {torch.__version__}"


def row(
    name: str, value: float, unit: str, runs: int, baseline: float | None = None, ratio: float | None = None
) -> Row:
    numbers = {"value": float(value), "unit": unit, "baseline": baseline, "ratio": ratio, "runs": runs}
    return {"name": name, **numbers, "machine": machine()}


def compare(name: str, unit: str, rates: list[float], baseline: list[float] | None = None) -> Row:
    """Return a row of medians; ``ratio`` is the median over the ratios of single rounds."""
    if baseline is None:
        return row(name, statistics.median(rates), unit, len(rates))
    ratio = statistics.median(a / b for a, b in zip(rates, baseline, strict=True))
    return row(name, statistics.median(rates), unit, len(rates), statistics.median(baseline), ratio)


def report(rows: list[Row], json_path: str | None = None) -> None:
    """Print rows as a table; with a path, also write them there as a JSON list."""
    cells = [COLUMNS, *(tuple(_text(row.get(column)) for column in COLUMNS) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(COLUMNS))]
    for first, *rest in cells:
        print("  ".join([first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(rest, widths[1:], strict=True))]))
    print(machine())
    save(rows, json_path)


def save(data: Any, json_path: str | None) -> None:
    """Write ``data`` as JSON if there is a path."""
    if json_path is not None:
        Path(json_path).write_text(json.dumps(data, indent=1) + "\n")


def json_lines(path: Path | None) -> list[Any]:
    """Return the lines of a file, if there is one; a line that was cut off by an interruption is skipped."""
    found = []
    for line in path.read_text().splitlines() if path and path.exists() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            print(f"{path}: a damaged line is skipped", file=sys.stderr)
    return found


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3f}"
    return "-" if value is None else str(value)
