"""Helpers shared by the adapters of torch and JAX simulators: action rescaling and nested settings."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pql.contract.bounds import Bounds
from pql.contract.env import Box
from pql.envs.adapters.robot import action_terms, joints_of
from pql.errors import ConfigError, nearest

LIMITS, ASYMMETRIC = "limits", "limits_asym"
ALLOWED = f"a number above 0, a list with one for each of the {{}} actions, {LIMITS} or {ASYMMETRIC}"

Bound = float | str | Sequence[float]


class Actions:
    """Rescales actions [N, A] from [-1, 1] to the simulator's bounds, or to ``bound`` for unbounded dimensions.

    Args:
        env: its ``single_action_space`` has ``low`` and ``high``: arrays, or one number for all of ``shape`` (mjlab).
        bound: +-a number for all dimensions or for each; ``limits`` or ``limits_asym``: see :func:`joint_spans`.
    Attributes:
        spec: the action specification.
        bounded: True if the simulator bounds every dimension.
    Raises:
        ConfigError: an unsupported space or bound.
    """

    def __init__(self, env: Any, bound: Bound):
        space = env.single_action_space
        if not hasattr(space, "low"):
            raise ConfigError("task", space, "a task whose actions are one array of numbers (a Box)")
        given = (torch.as_tensor(getattr(space, k), dtype=torch.float32) for k in ("low", "high"))
        low, high = (side.expand(space.shape).flatten() for side in given)
        free = ~(low.isfinite() & high.isfinite())
        self.bounded = not bool(free.any())
        down, up = spans(env, bound, len(low))
        ends = [torch.where(free, down, low), torch.where(free, up, high)]
        if bound == ASYMMETRIC and not self.bounded:
            ends.append(torch.where(free, torch.zeros_like(low), (low + high) / 2))
        self.act_within(Box(len(low), *(tuple(x.tolist()) for x in ends)))

    def act_within(self, box: Box) -> None:
        """Rescale to the bounds of ``box`` from now on."""
        self.spec, self.bounds = box, Bounds(box)

    def __call__(self, action: Tensor) -> Tensor:
        if self.bounds.low.device != action.device:
            self.bounds.to(action.device)
        return self.bounds(action)


def spans(env: Any, bound: Bound, size: int) -> tuple[Tensor, Tensor]:
    """Return the simulator's actions for -1 and for 1, [A] each, from ``action_bound``. Raises ``ConfigError``."""
    if bound in (LIMITS, ASYMMETRIC):
        down, up = joint_spans(env, str(bound))
        if bound == LIMITS:
            up = torch.maximum(down.abs(), up.abs())
            down = -up
        return down, up
    each = bound if isinstance(bound, Sequence) and not isinstance(bound, str) else [bound] * size
    if len(each) != size or any(isinstance(x, (bool, str)) or not 0 < x < math.inf for x in each):
        near = nearest(bound, (LIMITS, ASYMMETRIC)) if isinstance(bound, str) else ""
        raise ConfigError("action_bound", bound, ALLOWED.format(size) + near)
    up = torch.tensor([float(x) for x in each])
    return -up, up


def joint_spans(env: Any, bound: str) -> tuple[Tensor, Tensor]:
    """Return the actions that move joints to their lower and upper limits, [A] each: (limit - offset) / scale.

    ``limits`` takes the further one for both directions (FastSAC; arXiv 2512.01996): actions of 0 are the default pose,
    and actions of +-1 reach every position. With ``limits_asym`` -1, 0 and 1 are a limit, the pose and the other limit.

    Args:
        env: a manager-based environment of Isaac Lab or mjlab.
    Raises:
        ConfigError: actions other than joint positions; joints without limits; for ``limits_asym``, a default position
            that is not within them.
    """
    found, names = [], []
    for name, term in action_terms(env):
        if (kind := type(term).__name__) != "JointPositionAction":
            raise ConfigError("action_bound", bound, f"a number: the action term {name} is a {kind}")
        joints = joints_of(term)
        limits = joints.of("soft_joint_pos_limits").float()
        offset, scale = (torch.tensor(joints.each(x), device=limits.device) for x in (term._offset, term._scale))
        found.append((limits - offset[:, None]) / scale[:, None])
        names += joints.names
    if not found:
        raise ConfigError("action_bound", bound, "a number: this task's actions are not joint positions")
    ends = torch.cat(found).cpu()
    if not bool(ends.isfinite().all() and (ends.abs().amax(1) > 0).all()):
        raise ConfigError("action_bound", bound, "a number: some joints have no limits")
    down, up = ends.amin(1), ends.amax(1)
    outside = [name for name, a, b in zip(names, down.tolist(), up.tolist(), strict=True) if not a < 0 < b]
    if outside and bound == ASYMMETRIC:
        wanted = f"{LIMITS} or a number: {outside[0]}'s pose is not within its limits"
        raise ConfigError("action_bound", bound, wanted)
    return down, up


def change(config: Any, settings: Mapping[str, Any], within: str = "", known_only: bool = False) -> None:
    """Set nested attributes of a configuration, or entries of a mapping (mjlab, Playground).

    Args:
        settings: by dotted names, or nested: ``{"scene.num_envs": 3}`` or ``{"scene": {"num_envs": 3}}``.
        within: the dotted name of ``config``, for errors.
        known_only: leave out names that the configuration does not have.
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
            if known_only:
                continue
            raise ConfigError(within + name, value, f"a name in the task's configuration{nearest(last, known)}")
        present = owner[last] if keyed else getattr(owner, last)
        if isinstance(value, Mapping) and (hasattr(present, "keys") or hasattr(present, "__dict__")):
            change(present, value, f"{within}{name}.", known_only)
        elif keyed:
            owner[last] = value
        else:
            setattr(owner, last, value)
