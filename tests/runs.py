"""Small runs in the words of the command line, for the tests of what surrounds the tick."""

import json
from pathlib import Path
from typing import Any

WORDS = (
    "task=pendulum", "scale=cpu", "device=cpu", "num_envs=16", "replay.capacity=4096", "algo.batch_size=32",
    "algo.warmup_steps=8", "algo.critic.hidden=[16]", "algo.policy.hidden=[16]", "budget.seconds=null",
    "budget.env_steps=320", "eval.num_envs=2", "eval.every_seconds=null", "eval.final=false",
    "checkpoint.every_seconds=null", "logger.every_seconds=0.02",
    "placement.threads.collector=1", "placement.threads.v=1", "placement.threads.p=1",
)  # fmt: skip


def words(run_dir: Path, *more: str) -> list[str]:
    """A run of a fraction of a second in ``run_dir``; ``more`` wins over the defaults."""
    return [*WORDS, f"run_dir={run_dir}", *more]


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl, read back."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def points(run_dir: Path) -> list[Path]:
    """Resume points, oldest first."""
    return sorted((run_dir / "checkpoints").glob("tick-*"))


def manifest(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "manifest.json").read_text())
