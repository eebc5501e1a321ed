"""Types, groups and shapes of what ``reset`` and ``step`` returned, against the specification.

``of(name, value, shape, dtype)`` judges one array, with :func:`array_fault`, and returns a message, "" if all is well.
This file runs on Python 3.8 with only the standard library, for simulators and actors without torch.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping, Sequence

from pql.errors import nearest

FILLS = ("zeros", "first")
FLAGS = ("terminated", "truncated", "first", "final_ok", "valid")
Judge = Callable[[str, Any, "tuple[int, ...]", Any], str]


def array_fault(name: str, value: Any, shape: tuple[int, ...], fits: bool, dtypes: tuple[Any, Any]) -> str:
    """Check an array's shape, and that its type ``fits``; ``dtypes``: its own and the wanted one, for the message."""
    if tuple(value.shape) != shape:
        return f"{name} has shape {list(value.shape)}, expected {list(shape)}"
    return "" if fits else f"{name} is {dtypes[0]}, expected {dtypes[1]}"


def groups_fault(name: str, obs: Any, spec: Any, of: Judge) -> str:
    """Check observation groups [N, ...] against ``spec.obs``."""
    if not isinstance(obs, Mapping):
        return f"{name} is a {type(obs).__name__}, expected a dict of the groups {sorted(spec.obs)}"
    if set(obs) != set(spec.obs):
        return f"{name} has groups {sorted(obs)}, expected {sorted(spec.obs)}"
    faults = (of(f"{name}[{k}]", obs[k], (spec.num_envs, *part.shape), part.dtype) for k, part in spec.obs.items())
    return next(filter(None, faults), "")


def step_fault(step: Any, spec: Any, of: Judge, real: Any, flag: Any) -> str:
    """Check a step's fields, but the log: observations, reward (dtype ``real``) and flags (dtype ``flag``)."""
    fault = groups_fault("obs", step.obs, spec, of) or groups_fault("final_obs", step.final_obs, spec, of)
    for name in ("reward", *FLAGS):
        fault = fault or of(name, getattr(step, name), (spec.num_envs,), real if name == "reward" else flag)
    return fault


def log_keys_fault(log: Any, spec: Any, of: Judge, real: Any) -> str:
    """Check that ``log`` has the keys of ``spec.log``, each [N] of dtype ``real``."""
    keys = sorted(getattr(spec, "log", ()))
    if not isinstance(log, Mapping) or sorted(log) != keys:
        have = sorted(log) if isinstance(log, Mapping) else f"of a {type(log).__name__}"
        return f"log has keys {have}, spec.log says {keys}"
    return next(filter(None, (of(f"log[{k}]", v, (spec.num_envs,), real) for k, v in log.items())), "")


def layout_fault(shape: Sequence[int], stack: int, terms: Sequence[int], fill: str) -> tuple[str, str] | None:
    """Return the first field of an ``ObsSpec`` that does not fit the others, and what it may be; None: all do."""
    if fill not in FILLS:
        return "fill", f"one of {', '.join(FILLS)}{nearest(str(fill), FILLS)}"
    size = shape[0] if shape else 1
    if terms and len(shape) != 1:
        return "terms", "none: only a flat history, shape (S * D,), has terms"
    if terms and not (min(terms) > 0 and sum(terms) * stack == size):
        return "terms", f"widths from 1 on, of which stack={stack} times the sum is {size}, the size of the history"
    if len(shape) == 1:
        return None if stack > 0 and size % stack == 0 else ("stack", f"a divisor of {size}, the size of the history")
    return None if stack in (1, size) else ("stack", f"{size}, the first axis of shape, or 1: nothing is stacked")
