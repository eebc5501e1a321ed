"""Base of all policies that act: observations in, actions out, as tensors or NumPy arrays, with or without a memory."""

from collections.abc import Mapping
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from pql.contract.env import EnvSpec
from pql.errors import ConfigError
from pql.types import Obs, column


class BasePolicy:
    """Interface of loaded policies, from a run or an export.

    ``policy(obs)``: [N, D] tensor (or groups by name) -> [N, A] in [-1, 1] (or [N] int64), without exploration. NumPy
    arrays are accepted, too; the action is then a NumPy array.

    A recurrent policy keeps its state between calls, for the same N environments: call ``policy.reset()`` before the
    first episode and ``policy.reset(mask)`` where new ones begin. :meth:`act` takes and returns the state instead.

    Attributes:
        spec: specification of the training environment.
        groups: the observation groups it reads.
        state_shapes: name -> shape of the state of one environment; empty for a feed-forward policy.
    """

    spec: EnvSpec
    groups: tuple[str, ...]
    state_shapes: dict[str, tuple[int, ...]]
    device: torch.device
    _state: Obs | None = None

    @overload
    def __call__(self, obs: Obs | Tensor) -> Tensor: ...

    @overload
    def __call__(self, obs: Mapping[str, np.ndarray] | np.ndarray) -> np.ndarray: ...

    @torch.no_grad()
    def __call__(self, obs: Any) -> Any:
        arrays = obs.values() if isinstance(obs, Mapping) else (obs,)
        if any(isinstance(x, np.ndarray) for x in arrays):
            return self._remembering(self.readable(obs)).cpu().numpy()
        return self._remembering(obs)

    def _remembering(self, obs: Obs | Tensor) -> Tensor:
        if not self.state_shapes:
            return self.act(obs, {})[0]
        count = (next(iter(obs.values())) if isinstance(obs, dict) else obs).shape[0]
        if self._state is None:
            self._state = self.initial_state(count)
        elif (known := next(iter(self._state.values())).shape[0]) != count:
            raise ValueError(f"{count} observations for a memory of {known} environments: policy.reset() starts again")
        action, self._state = self.act(obs, self._state)
        return action

    def act(self, obs: Obs | Tensor, state: Obs) -> tuple[Tensor, Obs]:
        """Return (action, next state). The state of a feed-forward policy is an empty dict."""
        raise NotImplementedError

    def digest(self) -> str:
        """Return a hash of its content."""
        raise NotImplementedError

    def readable(self, obs: Any) -> Obs:
        """Return the groups that the policy reads, as tensors [N, ...] of its dtypes and shapes.

        Numbers are converted to float32 for float32 groups.

        Raises:
            ValueError: a group is missing.
            ConfigError: a wrong shape, or other numbers for a group of integers or booleans.
        """
        known = obs if isinstance(obs, Mapping) else {"policy": obs}
        if missing := [k for k in self.groups if k not in known]:
            raise ValueError(f"this policy reads the observation groups {self.groups}: {missing} not among those given")
        return {k: self._group(k, known[k]) for k in self.groups}

    def _group(self, name: str, given: Any) -> Tensor:
        wanted = self.spec.obs[name]
        x = torch.from_numpy(given).to(self.device) if isinstance(given, np.ndarray) else given
        if isinstance(x, Tensor) and x.dtype != wanted.dtype and wanted.dtype.is_floating_point:
            x = x.to(wanted.dtype)
        if not isinstance(x, Tensor) or x.dtype != wanted.dtype or tuple(x.shape[1:]) != wanted.shape or x.dim() < 1:
            shape = ", ".join(map(str, ("N", *wanted.shape)))
            of = (
                f"{list(given.shape)} {given.dtype}" if isinstance(given, Tensor | np.ndarray) else type(given).__name__
            )
            kind = str(wanted.dtype).removeprefix("torch.")
            raise ConfigError(f"obs.{name}", of, f"a tensor or NumPy array [{shape}] of {kind}")
        return x

    def initial_state(self, num_envs: int) -> Obs:
        """Initial recurrent state: zeros [N, ...] by name; empty if the policy has no state."""
        return {k: torch.zeros(num_envs, *shape, device=self.device) for k, shape in self.state_shapes.items()}

    def reset(self, mask: Tensor | None = None) -> None:
        """Reset the recurrent state of all environments, or of those in ``mask`` ([N] bool)."""
        if mask is None:
            self._state = None
        elif self._state is not None:
            self._state = {k: v * ~column(mask, v) for k, v in self._state.items()}
