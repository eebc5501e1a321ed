"""Helpers shared by the adapters of torch and JAX simulators: action rescaling and nested settings."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pql.contract.env import Box
from pql.errors import ConfigError, nearest

LIMITS = "limits"


class Actions:
    """Rescales actions [N, A] from [-1, 1] to the simulator's bounds, or to +-``bound`` for unbounded dimensions.

    Args:
        env: its ``single_action_space`` has ``low`` and ``high``: arrays, or one number for all of ``shape`` (mjlab).
        bound: a number for all dimensions, or ``limits``: see :func:`limit_bounds`.
    Attributes:
        spec: the action specification.
        bounded: True if the simulator bounds every dimension.
    Raises:
        ConfigError: an unsupported space or bound.
    """

    def __init__(self, env: Any, bound: float | str):
        space = env.single_action_space
        number = isinstance(bound, (int, float)) and not isinstance(bound, bool)
        if not (bound > 0 if number else bound == LIMITS):  # type: ignore[operator]
            raise ConfigError("action_bound", bound, f"a number above 0, or {LIMITS}")
        if not hasattr(space, "low"):
            raise ConfigError("task", space, "a task whose actions are one array of numbers (a Box)")
        given = (torch.as_tensor(getattr(space, k), dtype=torch.float32) for k in ("low", "high"))
        low, high = (side.expand(space.shape).flatten() for side in given)
        free = ~(low.isfinite() & high.isfinite())
        self.bounded = not bool(free.any())
        reach = limit_bounds(env) if bound == LIMITS else torch.full_like(low, float(bound))
        self.low, self.high = torch.where(free, -reach, low), torch.where(free, reach, high)
        self.spec = Box(len(low), tuple(self.low.tolist()), tuple(self.high.tolist()))

    def __call__(self, action: Tensor) -> Tensor:
        if self.low.device != action.device:
            self.low, self.high = self.low.to(action.device), self.high.to(action.device)
        return self.low + (action.clamp(-1, 1) + 1) / 2 * (self.high - self.low)


def limit_bounds(env: Any) -> Tensor:
    """Return the actions that move joints to their limits, [A]: distance of the further limit from the offset / scale.

    Actions of 0 are then the default pose, and actions of 1 reach every position (FastSAC; arXiv 2512.01996).

    Args:
        env: a manager-based environment of Isaac Lab or mjlab.
    Raises:
        ConfigError: actions other than joint positions, or joints without limits.
    """
    found = []
    manager: Any = getattr(env, "action_manager", None)
    for name in () if manager is None else manager.active_terms:
        term = manager.get_term(name)
        kind = type(term).__name__
        owner: Any
        if kind != "JointPositionAction":
            raise ConfigError("action_bound", LIMITS, f"a number: the action term {name} is a {kind}")
        owner, ids = (
            getattr(term, a, getattr(term, b, None)) for a, b in (("_asset", "_entity"), ("_joint_ids", "_target_ids"))
        )
        limits = owner.data.soft_joint_pos_limits[0, ids]
        offset, scale = (x[0] if isinstance(x := getattr(term, k), Tensor) else x for k in ("_offset", "_scale"))
        found.append((limits - torch.as_tensor(offset, device=limits.device)[..., None]).abs().amax(-1) / scale)
    if not found:
        raise ConfigError("action_bound", LIMITS, "a number: this task's actions are not joint positions")
    reach = torch.cat(found).float().cpu()
    if not bool((reach.isfinite() & (reach > 0)).all()):
        raise ConfigError("action_bound", LIMITS, "a number: some joints have no limits")
    return reach


def change(config: Any, settings: Mapping[str, Any], within: str = "") -> None:
    """Set nested attributes of a configuration, or entries of a mapping (mjlab, Playground).

    Args:
        settings: by dotted names, or nested: ``{"scene.num_envs": 3}`` or ``{"scene": {"num_envs": 3}}``.
        within: the dotted name of ``config``, for errors.
    Raises:
        ConfigError: the configuration has no such name.
    """
    for name, value in settings.items():
        *path, last = name.split(".")
        owner = config
        for part in path:
            owner = owner.get(part) if hasattr(owner, "keys") else getattr(owner, part, None)
        keyed = hasattr(owner, "keys")
        known = [k for k in (owner.keys() if keyed else dir(owner)) if not k.startswith("_")]
        if last not in known:
            raise ConfigError(within + name, value, f"a name in the task's configuration{nearest(last, known)}")
        present = owner[last] if keyed else getattr(owner, last)
        if isinstance(value, Mapping) and (hasattr(present, "keys") or hasattr(present, "__dict__")):
            change(present, value, f"{within}{name}.")
        elif keyed:
            owner[last] = value
        else:
            setattr(owner, last, value)
