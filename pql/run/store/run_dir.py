"""Files of a run directory other than checkpoints and metrics: settings, machine and summary."""

import dataclasses
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pql import __version__
from pql.config import Config, from_dict, to_dict
from pql.config.files import create_file as create_file
from pql.config.files import expanded, flat, read_json, read_yaml
from pql.config.migrate import as_trained
from pql.config.trust import names_foreign_code
from pql.config.validate import resolve_device
from pql.engine import deadlines
from pql.engine.world import world
from pql.errors import ConfigError, PqlWarning, writing
from pql.run.store.claim import Claim, claim, claim_new
from pql.run.store.manifest import check_settings
from pql.run.store.own import started_here

PACKAGES = ("pql-rl", "torch", "numpy", "safetensors", "mujoco", "gymnasium")


@dataclass(frozen=True)
class Summary:
    """Summary of a run. ``summary.json`` has the same content.

    Attributes:
        return_mean, return_iqm, return_median, length_mean, episodes: of the final evaluation; without one, None and
            0 episodes.
        success: share of its successful episodes; None also if the task does not define success.
        seconds: training time of all sittings.
        checkpoint: the directory of the final policy.
        interrupted: the run was stopped before the end of its budget or of the final evaluation.
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
    """Lock ``config.run_dir``, or a new directory below ``runs``, for this process. Raises ``ConfigError``: another
    process writes to it, it cannot be written, or it holds a run and ``resume`` is False."""
    if config.run_dir is None:
        task, now = config.task.game or config.task.name, time.strftime("%Y%m%d-%H%M%S")
        task = task.replace(":", ".")  # a colon would read as a host's name in scp, and Windows refuses it
        return claim_new(Path("runs") / f"{task}-{config.algo.name}-s{config.seed}-{now}")
    held = claim(expanded("run_dir", config.run_dir))
    if not resume:
        try:
            check_new(held.path)
        except ConfigError:
            held.close()
            raise
    return held


def holds_run(run_dir: Path) -> bool:
    """Return True if the directory holds a run, even if its config.yaml is lost."""
    return (run_dir / "config.yaml").exists() or any((run_dir / "checkpoints").glob("tick-*"))


def check_new(run_dir: Path) -> None:
    """Raise ``ConfigError`` if ``run_dir`` already holds a run."""
    if holds_run(run_dir):
        try:
            again = command("resume", run_dir, from_dict(read_config(run_dir)))
        except ConfigError:  # damaged, or of another release
            again = f"pql resume {shlex.quote(str(run_dir))}"
        raise ConfigError("run_dir", run_dir, f"a new folder; to continue this run: {again}")


def command(verb: str, run: object, config: Config, words: Sequence[str] = ()) -> str:
    """Return a command for a run, ready to be pasted: ``pql VERB RUN``, with the flags and launcher that it needs. A
    run on a live environment needs Python: only there can it be given again. ``verb``: ``eval`` or ``resume``."""
    if config.task.live:
        given = ", ".join(map(repr, (str(run), *words)))
        return f"pql.load_policy({given})" if verb == "eval" else f"pql.resume({given}, env=...)"
    here, launcher = world(), "pql"
    if verb == "resume" and here.size > 1:
        alone = here.size == here.local_size  # several machines: their addresses are the user's
        options = f"--standalone --nproc-per-node {here.size}" if alone else "..."
        launcher = f"torchrun {options} -m pql.cli.main"
    trust = ["--trust"] if names_foreign_code(config) and not started_here(Path(str(run)), config) else []
    return " ".join([launcher, verb, shlex.quote(str(run)), *words, *trust])


def create_run_dir(run_dir: Path, config: Config, overrides: Sequence[str]) -> None:
    """Create the directory of a new run, with config.yaml, overrides.yaml, git.json and env.json. Raises
    ``ConfigError``: it cannot be written."""
    with writing("run_dir", run_dir):
        (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        _write_yaml(run_dir / "overrides.yaml", list(overrides))
        _write_json(run_dir / "git.json", git_state())
        _write_json(run_dir / "env.json", machine(config))
        _write_config(run_dir, config)


def check_shared(run_dir: Path) -> None:
    """Raise ``ConfigError`` if this machine does not see the run directory that rank 0 has created."""
    if not (run_dir / "config.yaml").exists():
        raise ConfigError("run_dir", run_dir, "a folder that all machines of the run share")


def amend_config(run_dir: Path, config: Config, overrides: Sequence[str]) -> None:
    """Write a resumed run's config, also into its resume points, and append its overrides to overrides.yaml.

    An earlier summary is marked as interrupted, because the run has not ended if this sitting fails.

    Raises:
        ConfigError: the directory cannot be written.
    """
    from pql.run.store import checkpoint

    said = _read_words(run_dir / "overrides.yaml")
    with writing("run_dir", run_dir):
        if (before := read_summary(run_dir)) is not None:
            _write_json(run_dir / "summary.json", {**before, "interrupted": True})
        checkpoint.amend_manifest(run_dir / "checkpoints", config)
        _write_config(run_dir, config)
        _write_yaml(run_dir / "overrides.yaml", [*said, *overrides])


def run_settings(run_dir: Path) -> dict[str, Any]:
    """Return the config of a run to resume, as plain dicts, from its newest intact resume point.

    config.yaml is used only without a resume point; otherwise a warning names the settings in which it differs.

    Raises:
        ConfigError: there is neither.
    """
    kept = None
    if (run_dir / "checkpoints").exists():
        from pql.run.store import checkpoint

        kept = checkpoint.checkpoint_settings(run_dir / "checkpoints")
    if kept is None:
        return read_config(run_dir)
    try:
        shown = read_config(run_dir)
    except ConfigError as error:
        what = f"{error}: the settings in its newest resume point are used"
        warnings.warn(what, PqlWarning, stacklevel=2)
        return kept
    one, two = ({k: repr(v) for k, v in flat(tree) if k != "run_dir"} for tree in (kept, shown))
    if other := [k for k in {**one, **two} if one.get(k) != two.get(k)]:
        names = f"{', '.join(other[:5])}{' and more' if len(other) > 5 else ''}"
        what = f"{run_dir / 'config.yaml'} differs from the run in {names}: the settings in its resume point are used"
        warnings.warn(what, PqlWarning, stacklevel=2)
    return kept


def read_config(run_dir: Path) -> dict[str, Any]:
    """Return a run's saved config, as plain dicts. Raises ``ConfigError``: no run there, or a damaged config.yaml."""
    try:
        data = read_yaml(run_dir / "config.yaml")
        check_settings("config.yaml", data)
        made = read_mapping(run_dir / "env.json")
        release = __version__ if made is None else str(made.get("release", ""))
    except (OSError, ValueError) as error:
        raise ConfigError("run", run_dir, f"a run directory, with a readable config.yaml ({error})") from error
    return as_trained(data, release)


def write_summary(run_dir: Path, summary: Summary) -> None:
    """Write summary.json. Raises ``OSError``."""
    _write_json(run_dir / "summary.json", dataclasses.asdict(summary))


def read_summary(run_dir: Path) -> dict[str, Any] | None:
    """Return the content of summary.json, or None if it cannot be read."""
    return read_mapping(run_dir / "summary.json")


def read_mapping(path: Path) -> dict[str, Any] | None:
    """Return the mapping in a JSON file, or None if it cannot be read or holds something else."""
    try:
        data = read_json(path)
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def state(run_dir: Path) -> Literal["missing", "interrupted", "finished"]:
    """Return the state of the run in ``run_dir``. Failed runs and runs still at work count as interrupted."""
    if not holds_run(run_dir):
        return "missing"
    summary = read_summary(run_dir)
    return "interrupted" if summary is None or summary.get("interrupted") else "finished"


def machine(config: Config) -> dict[str, Any]:
    """Return versions and devices, which must be equal for two runs to agree bit for bit."""
    import torch

    from pql.engine.placement import available_cores, processor

    device = resolve_device(config.device)
    return {
        "release": __version__,
        "argv": sys.argv,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "packages": versions(),
        "platform": platform.platform(),
        "cpu": processor(),
        "cpus": os.cpu_count(),
        "cores": available_cores(),
        "device": device,
        "gpu": torch.cuda.get_device_name() if device.startswith("cuda") else None,
        "processes": world().size,
    }


def versions() -> dict[str, str]:
    """Return the versions of the installed packages that affect a run."""
    return {name: found for name in PACKAGES if (found := version(name))}


@cache
def git_state() -> dict[str, Any]:
    """Return commit and dirty flag of this package's source; None if it is not a git checkout.

    Of this process's first run: later changes of the source are not what is running.
    """

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=deadlines.PROGRAM, check=True).stdout

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # of this package, not of a project around it
        dirty = bool(git("status", "--porcelain", "--untracked-files=no").strip())
        return {"commit": git("rev-parse", "HEAD").strip(), "dirty": dirty}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}


def version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _read_words(path: Path) -> list[str]:
    try:
        words = read_yaml(path)
    except (OSError, ValueError):
        return []
    return [str(word) for word in words] if isinstance(words, list) else []


def _write_yaml(path: Path, data: Any) -> None:
    import yaml

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    _write(path, yaml.dump(data, Dumper=dumper, sort_keys=False))


def _write_config(run_dir: Path, config: Config) -> None:
    """Write config.yaml and sync it to disk."""
    from pql.run.store import checkpoint

    _write_yaml(run_dir / "config.yaml", to_dict(config))
    for path in (run_dir / "config.yaml", run_dir):
        checkpoint.sync(path)


def _write_json(path: Path, data: Any) -> None:
    _write(path, json.dumps(data, indent=1) + "\n")


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}")
    create_file(temporary, text)
    temporary.replace(path)
