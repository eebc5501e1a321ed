"""Model card of a policy: task, algorithm, returns, and the commands that use and repeat it."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pql.config import from_dict
from pql.config.files import read_yaml
from pql.errors import printable
from pql.run.store import checkpoint
from pql.run.store.run_dir import read_summary

CARD_BYTES = 256 << 10
LOCAL = (
    "run_dir=",
    "multirun_dir=",
    "init_from=",
    "logger",
    "replay.prefill=",
    "replay.demo",  # and its share, which is nothing without it
    "task.process",
    "task.remote",
)
"""Overrides that name places on a machine."""


def card(repo: str, path: Path, manifest: Mapping[str, Any]) -> str:
    """Return the text of README.md.

    Args:
        path: the policy's checkpoint; the run directory around it has the returns and the overrides.
        manifest: the checkpoint's.
    """
    import yaml

    config, run = from_dict(manifest["config"]), checkpoint.home(path)
    task, algo = printable(config.task.title), printable(config.algo.name)
    returns = known_returns(path, manifest)
    head = {
        "library_name": "pql",
        "pipeline_tag": "reinforcement-learning",
        "tags": ["reinforcement-learning", "pql", task, algo],
        "model-index": [model_index(repo, task, algo, returns["return, mean"])] if "return, mean" in returns else [],
    }
    rows = {"task": task, "algorithm": algo, "seed": str(config.seed), **{k: f"{v:,.6g}" for k, v in returns.items()}}
    command = train_command(run)
    return "\n".join(
        [
            "---",
            yaml.safe_dump({k: v for k, v in head.items() if v}, sort_keys=False).rstrip(),
            "---",
            "",
            f"# {algo} on {task}",
            "",
            "A policy trained with pql: weights (safetensors), a manifest (JSON) and this text, no code.",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in rows.items()),
            "",
            "```",
            f"pql pull {repo}",
            f"pql eval policies/{repo.replace('/', '--')} episodes=100",
            "```",
            *(["", "Trained by:", "", "```", command, "```"] if command else []),
            "",
        ]
    )


def known_returns(path: Path, manifest: Mapping[str, Any]) -> dict[str, float]:
    """Return measured returns and the size of the run: of the last policy from summary.json, of the best its own."""
    summary = read_summary(checkpoint.home(path)) or {}
    counters = manifest.get("counters", {})
    found = {"return, mean": manifest.get("return_mean")}
    if path.name == "last":
        found = {
            "return, mean": summary.get("return_mean"),
            "return, IQM": summary.get("return_iqm"),
            "episodes": summary.get("episodes"),
            "env steps": summary.get("env_steps"),
            "seconds": summary.get("seconds", counters.get("seconds")),
        }
    return {k: float(v) for k, v in found.items() if isinstance(v, int | float) and not isinstance(v, bool)}


def model_index(repo: str, task: str, algo: str, mean: float) -> dict[str, Any]:
    """Return the entry of the card's metadata from which a hub shows the return."""
    result = {
        "task": {"type": "reinforcement-learning", "name": "reinforcement-learning"},
        "dataset": {"name": task, "type": task},
        "metrics": [{"type": "mean_reward", "value": round(mean, 2), "name": "mean return"}],
    }
    return {"name": f"{repo.partition('/')[2]} ({algo})", "results": [result]}


def train_command(run: Path) -> str:
    """Return the command that trained the policy, without words that name places on this machine; "" if unknown."""
    try:
        words = read_yaml(run / "overrides.yaml")
    except (OSError, ValueError):
        return ""
    if not isinstance(words, list):
        return ""
    kept = [printable(str(word)) for word in words if not str(word).lstrip("+~").startswith(LOCAL)]
    return shlex.join(["pql", "train", *kept])
