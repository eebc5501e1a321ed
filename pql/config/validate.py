"""Validation of a configuration: each value against its declaration, and combinations of settings.

This file imports only the standard library (and torch, to look for a device).
"""

import contextlib
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

from pql.config import Config
from pql.config.algorithms import RECORDS
from pql.config.fields import Range, settings
from pql.config.groups import CentralConfig
from pql.config.schema import logger_names
from pql.contract.registry import check_chosen
from pql.errors import ConfigError, nearest, show

WIDEST = 65536  # of a layer

# Limits of command options that are not settings.
EPISODES = STEPS = Range(1, 1_000_000)


def limits(name: str) -> Range:
    """Return the range of a setting that every run has."""
    found = next(one.declaration.range for one in settings(Config()) if one.name == name)
    assert found is not None, name
    return found


def validate(config: Config) -> Config:
    """Check every value against its declaration, and combinations of settings. Raises ``ConfigError``: names the first
    setting that is wrong, its value, and what is allowed."""
    found = {one.name: one for one in settings(config)}
    for name, one in found.items():
        if one.declaration.choices:
            one.declaration.check(name, one.value)
    for name, one in found.items():
        one.declaration.check(name, one.value)
        check_list(name, one.value)
    for name in ("device", "placement.collector", "placement.v_learner", "placement.p_learner"):
        if found[name].value is not None:
            resolve_device(found[name].value, name)
    if config.logger.kind not in (known := logger_names()):
        kind = config.logger.kind
        raise ConfigError("logger.kind", kind, f"one of {', '.join(known)}{nearest(kind, known)}")
    config.algo.check_schedule(RECORDS)
    _check_replicas(config)
    _check_together(config)
    return config


def check_list(name: str, value: list[Any] | None) -> None:
    """Raise ``ConfigError`` for an invalid list of layer widths or observation groups."""
    if value is None:
        return
    if name.endswith(".obs") and (not value or len({*value}) < len(value)):
        raise ConfigError(name, value, "null, or a list of observation groups, each once: [policy,image]")
    empty = name.endswith(".hidden")  # no hidden layers: a linear output on the features
    if (empty or name.endswith(".channels")) and not (1 <= min(value) <= max(value) <= WIDEST if value else empty):
        raise ConfigError(name, value, f"a list of layer widths, each from 1 to {WIDEST}, such as [128,128]")


def _check_together(config: Config) -> None:
    algo, budget = config.algo, config.budget
    if not config.task.live:
        task = config.task
        chosen = {k for k, v in (("id", task.id), ("game", task.game)) if v is not None} | task.kwargs.keys()
        check_chosen(task.name, chosen, {"": "task.kwargs.", "id": "task.", "game": "task."})
    if config.task.live and config.task.process.python is not None:
        raise ConfigError("task.process.python", config.task.process.python, "null: a live environment is where it is")
    if config.task.remote and config.task.name == "remote":
        raise ConfigError("task.remote", config.task.remote, "nothing with task=remote, whose keywords are task.kwargs")
    if config.task.remote and config.task.process.python is not None:
        raise ConfigError("task.process.python", config.task.process.python, "null: actors step it, by task.remote")
    kind = algo.encoder.kind
    most = {"nature": 3, "hadamax": 3, "squint": 2}.get(kind, WIDEST)
    if len(algo.encoder.channels or ()) > most:
        number = {2: "two", 3: "three"}[most]
        raise ConfigError(
            "algo.encoder.channels", algo.encoder.channels, f"{number} at most with algo.encoder.kind={kind}"
        )
    if kind == "resnet" and algo.encoder.layer_norm:
        raise ConfigError("algo.encoder.layer_norm", True, "false: the residual network is taken as it is published")
    if budget.seconds is budget.env_steps is budget.target_return is None:
        raise ConfigError("budget", None, "at least one of budget.seconds, budget.env_steps, budget.target_return")
    groups, envs = config.placement.groups or 1, f"num_envs={config.num_envs}"
    envs += f" / algo.replicas={config.replicas}" if config.replicas > 1 else ""
    if config.num_envs // config.replicas % groups:
        raise ConfigError("placement.groups", groups, f"null, or a divisor of {envs}")
    first = algo.warmup_steps * config.num_envs
    if budget.env_steps is not None and budget.env_steps <= first:
        raise ConfigError("budget.env_steps", budget.env_steps, f"more than the warm-up's {first}")
    if budget.target_return is not None and config.eval.every_seconds is None:
        raise ConfigError("budget.target_return", budget.target_return, "evaluations: eval.every_seconds is null")
    algo.check(config)


def _check_replicas(config: Config) -> None:
    algo, place, count = config.algo, config.placement, config.replicas
    if algo.schedule != "replicas":
        for name, given, unset in (("algo.replicas", count, 1), ("placement.replicas", place.replicas, None)):
            if given != unset:
                raise ConfigError(name, given, f"{show(unset)} with algo.schedule={algo.schedule}")
        return
    if config.num_envs % count:
        near = max(1, config.num_envs // count) * count
        raise ConfigError("num_envs", config.num_envs, f"a multiple of algo.replicas={count}, such as {near}")
    if place.replicas is not None and len(place.replicas) != count:
        raise ConfigError("placement.replicas", place.replicas, f"one device for each of algo.replicas={count}")
    for place_of in place.replicas or ():
        resolve_device(place_of, "placement.replicas")
    for name, device in (("placement.collector", place.collector), ("placement.v_learner", place.v_learner)):
        if device is not None and count > 1 and not config.task.live:
            raise ConfigError(name, device, "null: placement.replicas places whole replicas")
    if place.executor == "streams":
        raise ConfigError("placement.executor", "streams", "auto, threads or inline with algo.schedule=replicas")
    central: CentralConfig = algo.central  # type: ignore[attr-defined]
    if place.executor == "inline" and central.order == "turns" and count > 1:
        raise ConfigError("algo.central.order", "turns", "free with placement.executor=inline: whole ticks take turns")
    for name, value in (("graphs", config.graphs), ("placement.compile", place.compile)):
        if value == "on":
            raise ConfigError(name, "on", "auto or off with algo.schedule=replicas: a push takes locks")


def likely_device(name: str) -> str:
    """Return the result of :func:`resolve_device`, assuming that a visible GPU works. Does not import torch."""
    return name if name != "auto" else "cuda" if gpu_in_sight() else "cpu"


def gpu_in_sight() -> bool:
    """Return True if torch has CUDA support and a driver is present. Does not import torch."""
    if torch := sys.modules.get("torch"):
        return torch.cuda.is_available()
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return True
    with contextlib.suppress(OSError):
        build = Path(spec.origin).with_name("version.py").read_text()
        if re.search(r"^cuda\b.*= None$", build, re.M) and re.search(r"^hip\b.*= None$", build, re.M):
            return False
    return sys.platform != "linux" or any(Path(p).exists() for p in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))


def resolve_device(name: str, setting: str = "device") -> str:
    """Resolve ``auto`` to ``cuda`` if available, else ``cpu``. The error lists the available devices. Raises
    ``ConfigError``: no such device."""
    if name == "cpu" or (name == "auto" and not gpu_in_sight()):
        return "cpu"
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    found = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if name in found or (name == "cuda" and len(found) > 1):
        return name
    raise ConfigError(setting, name, f"a device of this machine: auto, {', '.join(found)}{nearest(name, found)}")
