"""Find, read and group runs on disk. Only metrics.jsonl, config.yaml, summary.json and env.json are read."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pql.config import AlgoConfig, from_dict
from pql.config.families import record_of
from pql.config.files import YAML_BYTES, expanded, read_bytes
from pql.config.schema import nested
from pql.engine.watchdog import touch
from pql.errors import ConfigError, nearest, show
from pql.run.store.run_dir import read_config, read_mapping, read_summary

Row = dict[str, float]
AXES = ("seconds", "env_steps", "updates")
NAMED = 3  # settings in a label
METRICS_BYTES = 256 << 20  # weeks of a row every two seconds
# Settings that say which run it is.
IDENTITY = ("seed", "run_dir", "task.name", "task.id", "task.game", "task.model", "task.kwargs")
# Settings that do not distinguish algorithms: also budget and logging.
IGNORED = (*IDENTITY, "budget.", "eval.", "checkpoint.", "logger.", "replay.save")


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        name: its path, without the part that all runs of a page share.
        settings: the config with dotted names, ``algo.critic.tau``; lists and dicts are values.
        label: the algorithm and the settings by which runs of this algorithm on this task differ.
        rows: rows of metrics.jsonl, ordered by time.
        evals: by name, one array over the evaluations: the three axes, ``return_mean`` and their other metrics.
        complete: it ended with a final evaluation.
        reached: it ended because its target return was reached.
        machine: its hardware, from env.json; None if not recorded.
    """

    path: Path
    name: str
    task: str
    algo: str
    label: str
    seed: int | None
    settings: dict[str, Any]
    rows: list[Row]
    evals: dict[str, NDArray[np.float64]]
    complete: bool
    reached: bool
    machine: str | None = None
    notes: list[str] = field(default_factory=list)
    config: str = ""  # text of config.yaml

    def end(self, axis: str) -> float:
        """Progress of the run; nan if no row records it."""
        return max((at for row in self.rows if np.isfinite(at := position(row)[axis])), default=np.nan)


def find(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Return the run directories named by ``words``, each once: a run itself, or every run below a folder.

    Returns:
        The runs, and notes on unusable directories below a folder.
    Raises:
        ConfigError: a path is missing or contains no run.
    """
    found: dict[Path, Path] = {}
    notes = []
    for word in words:
        path = expanded("run", word)
        if not path.is_dir():
            around = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
            raise ConfigError("run", word, f"a run directory, or a folder of runs{nearest(path.name, around)}")
        if (path / "config.yaml").exists() or (path / "metrics.jsonl").exists():
            found.setdefault(path.resolve(), path)
            continue
        below = sorted(p.parent for p in path.rglob("metrics.jsonl"))
        usable = [p for p in below if (p / "config.yaml").exists() and (p / "metrics.jsonl").stat().st_size]
        notes += [f"{shown(p)}: left out, it has no config.yaml or no metrics" for p in below if p not in usable]
        if not usable:
            raise ConfigError("run", word, "a run directory (with config.yaml and metrics.jsonl), or a folder of runs")
        for p in usable:
            found.setdefault(p.resolve(), p)
    return list(found.values()), notes


def read(paths: Sequence[Path]) -> list[Run]:
    """Read the runs and give them labels that distinguish them. Raises ``ConfigError``: a run has no readable config or
    no metrics."""
    settings = [flat(read_config(p)) for p in paths]
    labels = label(settings)
    names = short_names(paths)
    return [_read(p, n, s, text) for p, n, s, text in zip(paths, names, settings, labels, strict=True)]


def _read(path: Path, name: str, settings: dict[str, Any], text: str) -> Run:
    touch()  # a page of many runs makes progress
    rows, notes = read_rows(path / "metrics.jsonl")
    if one_learner(settings):  # both counters count the same updates
        rows = [{k: v for k, v in row.items() if k != "updates/p"} for row in rows]
    if not rows:
        raise ConfigError("run", path, "a run with metrics: metrics.jsonl is missing or holds no row yet")
    summary = read_summary(path)
    if summary is None:
        notes.append("no summary.json: it is still running, or was cut off")
    elif summary.get("interrupted"):
        notes.append("interrupted before its budget's end")
    elif summary.get("return_mean") is None:
        notes.append("no final evaluation")
    evals = evaluations(rows)
    if not len(evals["return_mean"]):
        notes.append("no evaluation: it has no score")
    target = settings.get("budget.target_return")
    return Run(
        path,
        name,
        task_of(settings),
        str(settings.get("algo.name", "?")),
        text,
        settings.get("seed"),
        settings,
        rows,
        evals,
        complete=bool(summary and summary.get("return_mean") is not None and not summary.get("interrupted")),
        reached=target is not None and bool((evals["return_mean"] >= target).any()),
        machine=machine_of(read_mapping(path / "env.json") or {}),
        notes=notes,
        config=read_bytes(path / "config.yaml", YAML_BYTES).decode(errors="replace"),
    )


def read_rows(path: Path) -> tuple[list[Row], list[str]]:
    """Return the readable rows, ordered by time, and notes on unreadable lines. Raises ``ConfigError``: it is not a
    regular file, or larger than ``METRICS_BYTES``."""
    try:
        lines = read_bytes(path, METRICS_BYTES).decode(errors="replace").split("\n")
    except OSError:
        return [], []
    except ValueError as error:
        raise ConfigError("run", path.parent, f"a run with metrics that can be read ({error})") from error
    rows: list[Row] = []
    bad = []
    for i, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            row = {k: float(v) for k, v in json.loads(line).items() if isinstance(v, int | float)}
            position(row)
            rows.append(row)
        except (ValueError, OverflowError, AttributeError, KeyError, RecursionError):
            bad.append(i)
    notes = []
    if bad and bad[-1] == len(lines) - 1:  # a complete line ends with a newline
        notes.append("the last line of metrics.jsonl was cut off")
        bad.pop()
    if bad:
        notes.append(f"{len(bad)} unreadable line{'s' if len(bad) > 1 else ''} in metrics.jsonl")
    return sorted(rows, key=lambda r: r["time/seconds"]), notes


def position(row: Mapping[str, float]) -> dict[str, float]:
    """Position of a row on each axis. Updates are the sum over all learners."""
    updates = [v for k, v in row.items() if k.startswith("updates/")]
    return {
        "seconds": row["time/seconds"],
        "env_steps": row["steps/env"],
        "updates": sum(updates) if updates else np.nan,
    }


def evaluations(rows: Sequence[Row]) -> dict[str, NDArray[np.float64]]:
    """Return the evaluations by metric. Missing update counts are interpolated from the training rows."""
    found = [r for r in rows if np.isfinite(r.get("eval/return_mean", np.nan))]
    at = [position(r) for r in found]
    out = {axis: np.array([p[axis] for p in at]) for axis in AXES}
    trained = [p for p in map(position, rows) if np.isfinite(p["updates"])]
    if trained:
        known = np.interp(out["seconds"], [p["seconds"] for p in trained], [p["updates"] for p in trained])
        out["updates"] = np.where(np.isfinite(out["updates"]), out["updates"], known)
    for key in sorted({k for r in found for k in r if k.startswith("eval/")}):
        out[key.removeprefix("eval/")] = np.array([r.get(key, np.nan) for r in found])
    return {"return_mean": np.array([]), **out}


def one_learner(settings: Mapping[str, Any]) -> bool:
    """Return True if one learner trained policy and value together, on rollouts."""
    try:
        return record_of({"family": settings.get("algo.family", "ddpg")}).data == "rollout"
    except ConfigError:  # of a package that is not installed here
        return False


def configured(settings: Mapping[str, Any]) -> dict[str, float]:
    """Return the requested update ratios, by the name of their counter."""
    algo = algorithm(settings)
    return {} if algo is None else {f"ratio/{k}": v for k, v in algo.ratios.items()}


def algorithm(settings: Mapping[str, Any]) -> AlgoConfig | None:
    """Return the algorithm's config from a run's settings by dotted name; None if they are damaged."""
    try:
        return from_dict({"algo": nested(settings).get("algo", {})}).algo
    except ConfigError:
        return None


# -- names ----------------------------------------------------------------------------------------------------------


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings by dotted name; ``task.kwargs`` is one value."""
    out: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        out |= flat(value, f"{name}.") if isinstance(value, Mapping) and name != "task.kwargs" else {name: value}
    return out


def task_of(settings: Mapping[str, Any]) -> str:
    """Return the task's name, with the model and the keyword arguments that distinguish it."""
    name = settings.get("task.id") or settings.get("task.game") or settings.get("task.name", "?")
    model = settings.get("task.model")
    kwargs = {**({} if model is None else {"model": model}), **(settings.get("task.kwargs") or {})}
    return f"{name} ({', '.join(f'{k}={show(v)}' for k, v in kwargs.items())})" if kwargs else str(name)


def machine_of(facts: Mapping[str, Any]) -> str | None:
    """Return GPU, processor, usable cores and the version of torch, as far as recorded."""
    gpu, cpu, torch = (show(facts[k]) if isinstance(facts.get(k), str) else "" for k in ("gpu", "cpu", "torch"))
    count = facts.get("cores")
    cores = f"{count} core{'s' * (count > 1)}" if isinstance(count, int) and count else ""
    return ", ".join(k for k in (gpu, cpu, cores, torch and f"torch {torch}") if k) or None


def label(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return a label for each run: its algorithm, and the settings in which its runs on this task differ.

    Of many differing settings (other presets) the first ones are named, and a number distinguishes the groups.
    """
    kinds = [(task_of(s), str(s.get("algo.name", "?"))) for s in runs]
    differing = [_differing([s for s, k in zip(runs, kinds, strict=True) if k == kind]) for kind in kinds]
    words: list[tuple[Any, ...]] = [
        (kind, *(f"{k.removeprefix('algo.')}={_show(s[k])}" for k in keys if k in s))
        for s, kind, keys in zip(runs, kinds, differing, strict=True)
    ]
    heads = [" ".join((w[0][1], *w[1 : 1 + NAMED])) for w in words]
    out = []
    for mine, head in zip(words, heads, strict=True):
        same = list(dict.fromkeys(w for w, h in zip(words, heads, strict=True) if h == head and w[0] == mine[0]))
        more = f" +{len(mine) - 1 - NAMED}" if len(mine) - 1 > NAMED else ""
        out.append(head + more + (f" #{same.index(mine) + 1}" if len(same) > 1 else ""))
    return out


def _differing(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return settings with more than one value. Runs of older versions may lack a setting and are then ignored."""
    names = [k for k in dict.fromkeys(k for s in runs for k in s) if not k.startswith(IGNORED)]
    return [k for k in names if len({str(s[k]) for s in runs if k in s}) > 1]


def _show(value: Any) -> str:
    return str(value).replace(" ", "") if isinstance(value, list) else show(value)


def shown(path: Path) -> str:
    """Return a path as a page shows it, without the folders of this machine: relative, or only the last two names."""
    if not path.is_absolute():
        return str(path)
    if path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return os.path.join(*path.parts[1:][-2:] or path.parts)


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return the paths relative to their common folder."""
    if len(paths) == 1:
        return [paths[0].resolve().name]
    full = [str(p.resolve()) for p in paths]
    return [os.path.relpath(p, os.path.commonpath(full)) for p in full]
