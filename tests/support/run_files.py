"""Small runs by command-line overrides, for tests of sessions and files."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conftest import differences

from pql.config.compose import compose
from pql.run.resume import resume_config
from pql.run.session import Session
from pql.run.store import checkpoint
from pql.run.store.run_dir import Summary

QUICK = [
    *("scale=cpu", "device=cpu", "num_envs=16", "algo.warmup_steps=8", "algo.critic.hidden=[16]"),
    *("eval.num_envs=2", "eval.every_seconds=null", "checkpoint.every_seconds=null", "logger.every_seconds=0.02"),
    *("placement.threads.collector=1", "placement.threads.v=1"),
]
"""Settings of a very short run of any algorithm."""
WORDS = (
    *("task=pendulum", "algo=pql", *QUICK, "replay.capacity=4096", "algo.batch_size=32", "algo.policy.hidden=[16]"),
    *("budget.seconds=null", "budget.env_steps=320", "eval.final=false", "placement.threads.p=1"),
)


def words(run_dir: Path, *more: str) -> list[str]:
    """Return settings of a very short run in ``run_dir``; ``more`` overrides the defaults."""
    return [*WORDS, f"run_dir={run_dir}", *more]


def run(*overrides: str, **options: Any) -> Summary:
    """Run a complete run."""
    return Session(compose(overrides), quiet=True, overrides=overrides, **options).train()


def resume(run_dir: Path, *overrides: str, trust: bool = False) -> Summary:
    """Resume the run in ``run_dir`` from its newest resume point."""
    return Session(resume_config(run_dir, overrides, trust), resume=True, quiet=True, overrides=overrides).train()


def whole_and_resumed(
    folder: Path, words: Sequence[str], half: int, full: int, trust: bool = False
) -> tuple[Summary, Any, Any]:
    """Train ``full`` env steps at once, and in two sessions, the first of ``half``; assert that both give equal bits.

    Returns:
        the summary of the second session, and tensors and manifest of the last resume point.
    """
    whole, parts = folder / "whole", folder / "parts"
    run(*words, f"run_dir={whole}", f"budget.env_steps={full}")
    assert run(*words, f"run_dir={parts}", f"budget.env_steps={half}").env_steps == half
    second = resume(parts, f"budget.env_steps={full}", trust=trust)
    (a, facts_a), (b, facts_b) = (checkpoint.load(points(path)[-1]) for path in (whole, parts))
    assert differences(a, b) == []
    assert facts_a["sha256"] == facts_b["sha256"]
    assert {**facts_a["counters"], "seconds": 0} == {**facts_b["counters"], "seconds": 0}
    return second, a, facts_a


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def points(run_dir: Path) -> list[Path]:
    """Return resume points, oldest first."""
    return sorted((run_dir / "checkpoints").glob("tick-*"))


def manifest(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "manifest.json").read_text())


def write_run(
    path: Path,
    evals: list[tuple[float, int, float]],
    task: str = "pendulum",
    algo: str = "pql",
    seed: int = 1,
    finished: bool = True,
    rows: list[dict[str, float]] | None = None,
    **settings: Any,
) -> Path:
    """Write a run directory like training's. ``evals``: (seconds, env steps, return); ``settings``: of ``algo``."""
    path.mkdir(parents=True)
    reported = [{"time/seconds": s, "steps/env": n, "eval/return_mean": r} for s, n, r in evals]
    reported += [{"time/seconds": s, "steps/env": n, "updates/v": n // 10, "updates/p": n // 20} for s, n, _ in evals]
    lines = [json.dumps(row) + "\n" for row in [*reported, *(rows or [])]]
    (path / "metrics.jsonl").write_text("".join(lines))
    config = {"task": {"name": task, "id": None, "kwargs": {}}, "algo": {"name": algo, **settings}, "seed": seed}
    (path / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    if finished:
        (path / "summary.json").write_text(json.dumps({"return_mean": evals[-1][2] if evals else None}))
    return path


ODD = [None, -1, 0, 2**40, 1.5, "x", "", [], {}, True, "1e999", [[]], {"as_int": 2**62}, "torch.ops.aten.cat.default"]


def mutate(tree: Any, rng: random.Random) -> None:
    """Replace or drop one value at a random position in a JSON tree."""
    places: list[tuple[Any, Any]] = []
    left = [tree]
    while left:
        node = left.pop()
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            places.append((node, key))
            left += [value] if isinstance(value, dict | list) else []
    node, key = rng.choice(places)
    if rng.random() < 0.3:
        del node[key]
    else:
        node[key] = rng.choice(ODD)
