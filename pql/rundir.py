"""The files of a run directory, checkpoints and metrics aside: what was run, on what, and what came of it."""

import dataclasses
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from pql.claim import Claim, claim, claim_new
from pql.config import Config, to_dict
from pql.errors import ConfigError
from pql.files import read_json, read_yaml
from pql.machine import available_cores, processor
from pql.manifest import check_settings
from pql.validate import resolve_device
from pql.world import world

PACKAGES = ("pql-rl", "torch", "numpy", "safetensors", "mujoco", "gymnasium")


@dataclass(frozen=True)
class Summary:
    """What a run came to. ``summary.json`` holds the same.

    Attributes:
        return_mean, return_iqm, return_median, length_mean, episodes: of the final evaluation; None and 0 episodes
            where there was none.
        success: share of its episodes that succeeded; None also where the task does not define it.
        seconds: of training, all sittings together.
        checkpoint: the directory of the final policy.
        interrupted: stopped from outside, before its budget's end or the final evaluation's.
    """

    run_dir: str
    return_mean: float | None
    return_iqm: float | None
    episodes: int
    seconds: float
    env_steps: int
    updates_v: int
    updates_p: int
    checkpoint: str
    interrupted: bool = False
    return_median: float | None = None
    length_mean: float | None = None
    success: float | None = None


def claim_directory(config: Config, resume: bool = False) -> Claim:
    """``config.run_dir``, or a new directory below ``runs``, locked for this process.

    Raises:
        ConfigError: another process writes to it, it cannot be written, or it holds a run and none is to be resumed.
    """
    if config.run_dir is None:
        task, now = config.task.game or config.task.name, time.strftime("%Y%m%d-%H%M%S")
        return claim_new(Path("runs") / f"{task}-{config.algo.name}-s{config.seed}-{now}")
    held = claim(Path(config.run_dir).expanduser())
    if not resume:
        try:
            check_new(held.path)
        except ConfigError:
            held.close()
            raise
    return held


def check_new(run_dir: Path) -> None:
    """Raises ``ConfigError`` where ``run_dir`` holds a run already."""
    if (run_dir / "config.yaml").exists():
        raise ConfigError(
            "run_dir", run_dir, f"a new folder; to go on with this run: pql resume {shlex.quote(str(run_dir))}"
        )


def create(run_dir: Path, config: Config, overrides: Sequence[str]) -> None:
    """A new run's directory: config.yaml, overrides.yaml, git.json and env.json.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        _write_yaml(run_dir / "overrides.yaml", list(overrides))
        _write_json(run_dir / "git.json", git_state())
        _write_json(run_dir / "env.json", machine(config))
        _write_yaml(run_dir / "config.yaml", to_dict(config))
    except OSError as error:
        raise ConfigError("run_dir", run_dir, f"a folder that can be written ({error})") from error


def check_shared(run_dir: Path) -> None:
    """Raises ``ConfigError`` where this machine does not see the run that another one's process has begun."""
    if not (run_dir / "config.yaml").exists():
        raise ConfigError("run_dir", run_dir, "a folder that all machines of the run share")


def amend(run_dir: Path, config: Config, overrides: Sequence[str]) -> None:
    """A resumed run's config, and the words that changed it after those it was started with.

    A summary of the sitting before is no longer the run's end, should this one not come to one.
    """
    if (before := read_summary(run_dir)) is not None:
        _write_json(run_dir / "summary.json", {**before, "interrupted": True})
    _write_yaml(run_dir / "config.yaml", to_dict(config))
    _write_yaml(run_dir / "overrides.yaml", [*(_read_yaml(run_dir / "overrides.yaml") or ()), *overrides])


def read_config(run_dir: Path) -> dict[str, Any]:
    """A run's saved config, as plain dicts.

    Raises:
        ConfigError: no run there, or a damaged config.yaml.
    """
    try:
        data = read_yaml(run_dir / "config.yaml")
        check_settings("config.yaml", data)
    except (OSError, ValueError) as error:
        raise ConfigError("run", run_dir, f"a run directory, with a readable config.yaml ({error})") from error
    return data


def write_summary(run_dir: Path, summary: Summary) -> None:
    """summary.json. Raises ``OSError`` where it cannot be written."""
    _write_json(run_dir / "summary.json", dataclasses.asdict(summary))


def read_summary(run_dir: Path) -> dict[str, Any] | None:
    """summary.json, or None where there is none that can be read."""
    try:
        data = read_json(run_dir / "summary.json")
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def state(run_dir: Path) -> Literal["missing", "interrupted", "finished"]:
    """How far the run in ``run_dir`` has come. One that failed counts as interrupted, as does one still at work."""
    if not (run_dir / "config.yaml").exists():
        return "missing"
    summary = read_summary(run_dir)
    return "interrupted" if summary is None or summary.get("interrupted") else "finished"


def machine(config: Config) -> dict[str, Any]:
    """Versions and devices: what another run must share to give the same bits."""
    device = resolve_device(config.device)
    return {
        "argv": sys.argv, "python": platform.python_version(), "torch": torch.__version__, "packages": versions(),
        "platform": platform.platform(), "cpu": processor(), "cpus": os.cpu_count(), "cores": available_cores(),
        "device": device, "gpu": torch.cuda.get_device_name() if device.startswith("cuda") else None,
        "processes": world().size,
    }  # fmt: skip


def versions() -> dict[str, str]:
    """Installed packages that matter to a run."""
    return {name: version for name in PACKAGES if (version := _version(name))}


def git_state() -> dict[str, Any]:
    """Commit and cleanliness of this package's source, where that is a git checkout; else null."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # a checkout of this, not of something around it
        dirty = bool(git("status", "--porcelain", "--untracked-files=no").strip())
        return {"commit": git("rev-parse", "HEAD").strip(), "dirty": dirty}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _read_yaml(path: Path) -> Any:
    try:
        return read_yaml(path)
    except (OSError, ValueError):
        return None


def _write_yaml(path: Path, data: Any) -> None:
    import yaml

    _write(path, yaml.safe_dump(data, sort_keys=False))


def _write_json(path: Path, data: Any) -> None:
    _write(path, json.dumps(data, indent=1) + "\n")


def _write(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}")
    aside.write_text(text)
    aside.replace(path)
