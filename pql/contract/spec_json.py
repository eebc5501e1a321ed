"""Conversion of ``EnvSpec`` to and from the JSON stored in checkpoints, exports and dumps."""

from collections.abc import Mapping
from typing import Any, cast

import torch

from pql.contract.env import Box, Discrete, EnvSpec, ObsSpec


def spec_to_dict(spec: EnvSpec) -> dict[str, Any]:
    """Return the name, spaces and time limit of ``spec`` as JSON types."""
    box = spec.action if isinstance(spec.action, Box) else None
    action = box.size if box else {"discrete": cast(Discrete, spec.action).n}
    bounds: dict[str, Any] = {"action_low": box.low, "action_high": box.high} if box else {}
    if not box and (start := cast(Discrete, spec.action).start):
        bounds = {"action_start": start}
    groups = {k: _group_to_dict(s) for k, s in spec.obs.items()}
    limit = {"max_episode_steps": spec.max_episode_steps}
    return {"name": spec.name, "obs": groups, "action": action, **bounds, **limit}


def _group_to_dict(group: ObsSpec) -> dict[str, Any]:
    plain = {"shape": list(group.shape), "dtype": str(group.dtype).removeprefix("torch.")}
    return plain if group.stack == 1 else {**plain, "stack": group.stack}


def spec_from_dict(data: Mapping[str, Any]) -> EnvSpec:
    """Return the specification stored by :func:`spec_to_dict`, for one environment on the CPU."""
    obs = {k: ObsSpec(tuple(s["shape"]), getattr(torch, s["dtype"]), s.get("stack", 1)) for k, s in data["obs"].items()}
    low, high = (tuple(b) if (b := data.get(f"action_{end}")) else None for end in ("low", "high"))
    size, limit = data["action"], data["max_episode_steps"]
    action = Discrete(size["discrete"], data.get("action_start", 0)) if isinstance(size, dict) else Box(size, low, high)
    return EnvSpec(data["name"], 1, obs, action, torch.device("cpu"), max_episode_steps=limit)
