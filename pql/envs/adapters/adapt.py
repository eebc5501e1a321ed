"""Helpers shared by the adapters of torch and JAX simulators: action rescaling and nested settings."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pql.contract.env import Box
from pql.errors import ConfigError, nearest


class Actions:
    """Rescales actions [N, A] from [-1, 1] to the simulator's bounds, or to +-``bound`` for unbounded dimensions.

    Args:
        space: its ``low`` and ``high`` are arrays, or one number for all of ``shape`` (mjlab).

    Attributes:
        spec: the action specification.
        bounded: True if the simulator bounds every dimension.

    Raises:
        ConfigError: an unsupported space or bound.
    """

    def __init__(self, space: Any, bound: float):
        if not bound > 0:
            raise ConfigError("action_bound", bound, "a number above 0")
        if not hasattr(space, "low"):
            raise ConfigError("task", space, "a task whose actions are one array of numbers (a Box)")
        given = (torch.as_tensor(getattr(space, k), dtype=torch.float32) for k in ("low", "high"))
        low, high = (side.expand(space.shape).flatten() for side in given)
        free = ~(low.isfinite() & high.isfinite())
        self.bounded = not bool(free.any())
        self.low, self.high = low.masked_fill(free, -bound), high.masked_fill(free, bound)
        self.spec = Box(len(low), tuple(self.low.tolist()), tuple(self.high.tolist()))

    def __call__(self, action: Tensor) -> Tensor:
        if self.low.device != action.device:
            self.low, self.high = self.low.to(action.device), self.high.to(action.device)
        return self.low + (action.clamp(-1, 1) + 1) / 2 * (self.high - self.low)


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
