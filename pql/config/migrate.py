"""Migration of configurations from older run directories, checkpoints and exports."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from pql.config.families import record_of
from pql.config.fields import types_of
from pql.errors import ConfigError

OWN = {**{name: (name,) for name in ("sac", "ppo", "impala", "dqn", "pqn")}, "r2d2": ("dqn", "r2d2")}
"""Former groups below ``algo`` with the settings of one family."""


COMMON = {"name", "family", "schedule", "gamma", "warmup_steps", "normalize_obs", "reward_scale", "normalize_reward"}
"""Settings of every algorithm in every release: a config that has all of them was stored as a whole."""

REDEFINED = ("ant", "humanoid", "humanoidstandup", "go1_velocity", "g1_velocity")
"""Tasks of which version 0.2.0 had another form, now ``task.kwargs.legacy=true``."""


def as_trained(data: dict[str, Any], release: str) -> dict[str, Any]:
    """Return a stored config with its task in the form that it had in ``release``; empty: stored before 0.2.0."""
    task, old = data.get("task"), not release or release.startswith(("0.1.", "0.2."))
    if not old or not isinstance(task, Mapping) or task.get("name") not in REDEFINED:
        return data
    return {**data, "task": {**task, "kwargs": {"legacy": True, **(task.get("kwargs") or {})}}}


def migrated(data: Any) -> Any:
    """Return ``data`` reduced to the chosen algorithm's settings if it has those of all (up to version 0.1.0). Raises
    ``ConfigError``: an unknown family, or a value in the place of a group."""
    if isinstance(data, Mapping) and "cuda_graphs" in data:  # its name up to version 0.2.0
        data = {("graphs" if k == "cuda_graphs" else k): v for k, v in data.items()}
    algo = data.get("algo") if isinstance(data, Mapping) else None
    if isinstance(algo, Mapping) and algo.keys() >= COMMON:
        stored = {k: v for k, v in algo.items() if k != "policy_lag"}  # of experiments up to version 0.2.0
        algo = {"normalize_integers": False, **stored}  # stored before the setting existed
        data = {**data, "algo": algo}
    if not isinstance(algo, Mapping) or not all(isinstance(algo.get(k), Mapping) for k in ("ppo", "dqn", "sac")):
        return data
    record, family = record_of(algo), algo.get("family", "ddpg")
    found = dict(algo)
    for name in OWN.get(family, ()):
        found |= part(algo, name)
    if family == "ppo":
        found["vtrace"] = {**part(algo, "vtrace"), "enabled": algo["ppo"].get("vtrace", False)}
    return {**data, "algo": known(record, found)}


def part(algo: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a group of ``algo``, or an empty one. Raises ``ConfigError``: a value in its place."""
    values = algo.get(name, {})
    if not isinstance(values, Mapping):
        raise ConfigError(f"algo.{name}", values, "a group of settings")
    return values


def known(record: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``values`` that ``record`` and its groups have."""
    hints, found = types_of(record), {}
    for field in dataclasses.fields(record):
        if field.name in values:
            value, hint = values[field.name], hints[field.name]
            group = dataclasses.is_dataclass(hint) and isinstance(value, Mapping)
            found[field.name] = known(typing.cast(type, hint), value) if group else value
    return found
