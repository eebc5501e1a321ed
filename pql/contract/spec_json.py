"""Conversion of ``EnvSpec`` to and from the JSON stored in checkpoints, exports and dumps."""

from collections.abc import Mapping
from typing import Any

import torch

from pql.contract.env import Action, Box, Discrete, EnvSpec, MultiDiscrete, ObsSpec


def spec_to_dict(spec: EnvSpec) -> dict[str, Any]:
    """Return the name, spaces, time limit and robot's record of ``spec`` as JSON types."""
    groups = {k: _group_to_dict(s) for k, s in spec.obs.items()}
    more = {"max_episode_steps": spec.max_episode_steps} | {k: v for k, v in spec.info.items() if k == "robot"}
    return {"name": spec.name, "obs": groups, **_action_to_dict(spec.action), **more}


def _action_to_dict(space: Action) -> dict[str, Any]:
    if isinstance(space, Box):
        bounds = {"action": space.size, "action_low": space.low, "action_high": space.high}
        return bounds if space.center is None else {**bounds, "action_center": space.center}
    kind = {"discrete": space.n} if isinstance(space, Discrete) else {"multi_discrete": list(space.nvec)}
    return {"action": kind, **({"action_start": space.start} if space.start else {})}


def _group_to_dict(group: ObsSpec) -> dict[str, Any]:
    plain = {"shape": list(group.shape), "dtype": str(group.dtype).removeprefix("torch.")}
    layout = {"stack": group.stack, "terms": list(group.terms), "fill": group.fill}
    return {**plain, **{k: v for k, v in layout.items() if v not in (1, [], "zeros")}}


def _group(shape: Any, dtype: str, stack: int = 1, terms: Any = (), fill: Any = "zeros", **_: Any) -> ObsSpec:
    return ObsSpec(tuple(shape), getattr(torch, dtype), stack, tuple(terms), fill)


def spec_from_dict(data: Mapping[str, Any]) -> EnvSpec:
    """Return the specification stored by :func:`spec_to_dict`, for one environment on the CPU."""
    obs = {k: _group(**s) for k, s in data["obs"].items()}
    size, limit = data["action"], data["max_episode_steps"]
    facts = {k: data.get(f"action_{k}") for k in ("low", "high", "center", "start")}
    names = {"discrete": "n", "multi_discrete": "nvec"}
    kind = {names[k]: v for k, v in size.items()} if isinstance(size, dict) else {"size": size}
    action = action_of({**facts, **kind})
    info = {"robot": data["robot"]} if "robot" in data else {}
    return EnvSpec(data["name"], 1, obs, action, torch.device("cpu"), max_episode_steps=limit, info=info)


def action_of(facts: Mapping[str, Any]) -> Action:
    """Return the actions with the fields ``facts`` as JSON types: ``n``, ``nvec`` or ``size``, and their ends."""

    def numbers(name: str) -> Any:
        return None if facts.get(name) is None else tuple(facts[name])

    if "n" in facts:
        return Discrete(facts["n"], facts.get("start") or 0)
    if "nvec" in facts:
        return MultiDiscrete(tuple(facts["nvec"]), numbers("start"))
    return Box(facts["size"], numbers("low"), numbers("high"), numbers("center"))
