"""Common code of the benchmark scripts: timing in turn, and medians as a table and as JSON."""

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pql.engine.graph import Graph
from pql.engine.placement import processor

COLUMNS = ("name", "value", "unit", "baseline", "ratio", "runs")


def machine() -> str:
    """One line: processor, cores, GPU if there is one, Python and torch."""
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{processor()} x{os.cpu_count()}{gpu}, Python {platform.python_version()}, torch {torch.__version__}"


def alternate(fns: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
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
    graph = Graph(body, device, (), torch.nn.Module(), capture="on")
    graph.prepare()
    return graph


def compare(name: str, unit: str, rates: list[float], baseline: list[float] | None = None) -> dict[str, Any]:
    """One row for :func:`report`: medians; ``ratio`` is the median over the ratios of single rounds."""
    ratio = None if baseline is None else statistics.median(a / b for a, b in zip(rates, baseline, strict=True))
    return {
        "name": name,
        "value": statistics.median(rates),
        "unit": unit,
        "baseline": None if baseline is None else statistics.median(baseline),
        "ratio": ratio,
        "runs": len(rates),
        "machine": machine(),
    }


def measuring(parser: argparse.ArgumentParser, seconds: float) -> None:
    """Add the common options of the benchmarks; ``seconds`` is the default length of one measurement."""
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=seconds, help="length of one measurement")
    parser.add_argument("--smoke", action="store_true", help="tiny and quick, to test the script itself")
    parser.add_argument("--json", metavar="PATH")


def report(rows: list[dict[str, Any]], json_path: str | None = None) -> None:
    """Print ``rows`` (see :func:`compare`) as a table; with a path, also write them there as a JSON list."""
    cells = [COLUMNS, *(tuple(_text(row.get(column)) for column in COLUMNS) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(COLUMNS))]
    for line in cells:
        first, *rest = (
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join((first, *rest)))
    print(machine())
    save(rows, json_path)


def save(rows: list[dict[str, Any]], json_path: str | None) -> None:
    """Write ``rows`` as a JSON list if there is a path."""
    if json_path is not None:
        Path(json_path).write_text(json.dumps(rows, indent=1) + "\n")


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3f}"
    return str(value)
