"""Gymnasium environments: N copies, in this process or one process each, or a vector environment of the user.

Runs on the host: every step waits for the actions, steps the environments and copies the results through host buffers
(pinned for a CUDA device). Episode ends and observations follow ``pql.types.Step`` in both of gymnasium's autoreset
modes.
"""

from typing import Any, cast

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from pql.contract.env import EnvSpec, ObsSpec
from pql.contract.registry import takes
from pql.envs.adapters import gymnasium_host as host
from pql.envs.adapters.gymnasium_copies import Copies, spec_fields
from pql.envs.stage import Stage
from pql.errors import ConfigError
from pql.types import Obs, Step


class GymnasiumVec:
    """``num_envs`` copies of a registered gymnasium environment.

    Observations become float32; bytes stay uint8. A Dict space needs a ``policy`` entry; its keys become observation
    groups. Actions in [-1, 1] are clamped and rescaled to the environment's bounds. ``reset(seed)`` gives each copy a
    seed from numpy's ``SeedSequence``. ``reset_where`` exists with gymnasium's own vector classes.

    Args:
        num_envs: N.
        device: where the tensors go; the environments run on the host.
        keywords: fields of :class:`GymnasiumSettings`.
    Raises:
        ConfigError: unknown id, unsupported space, or a value out of range.
    """

    @takes(host.GymnasiumSettings)
    def __init__(self, num_envs: int = 64, device: str | torch.device = "cpu", **keywords: Any):
        device = torch.device(device)
        # A forked child would inherit a CUDA context that it cannot use.
        spawn = device.type == "cuda"
        self._hold(Copies.make(host.GymnasiumSettings(**keywords), num_envs, "next_step", spawn), device)

    @classmethod
    def of(cls, envs: VectorEnv, device: str | torch.device = "cpu") -> "GymnasiumVec":
        """Return the environments of a ``gymnasium.vector.VectorEnv``, which this object owns. Raises ``ConfigError``:
        an unsupported space or autoreset mode."""
        self = cls.__new__(cls)
        facts = host.facts_of_vector(envs, "env", type(envs.unwrapped).__name__)
        self._hold(Copies(envs, facts), torch.device(device))
        return self

    def _hold(self, copies: Copies, device: torch.device) -> None:
        self._copies, envs = copies, copies.envs
        self.spec = spec_of(copies.facts, envs.num_envs, device)
        self._obs, self._final = ({k: self._stage(v.shape, v.dtype) for k, v in self.spec.obs.items()} for _ in "of")
        self._reward = self._stage((), torch.float32)
        self._flags = Stage((5, envs.num_envs), torch.bool, device)
        self._sent = torch.cuda.Event() if device.type == "cuda" else None
        if host.resets_copies(envs):
            self.reset_where = self._reset_where

    @classmethod
    def describe(cls, num_envs: int = 64, device: str | torch.device = "cpu", **keywords: Any) -> EnvSpec | None:
        """Return the ``EnvSpec`` of an environment with these arguments; makes one copy to read its spaces. None with
        ``vector_entry_point``, which may be a simulator that a process can hold only once."""
        settings = host.GymnasiumSettings(**keywords)
        host.check_settings(num_envs, settings)
        if settings.vectorization == host.OWN:
            return None
        return spec_of(host.facts_of_copies(settings, "next_step"), num_envs, torch.device(device))

    def _stage(self, shape: tuple[int, ...], dtype: torch.dtype) -> Stage:
        return Stage((self.spec.num_envs, *shape), dtype, self.spec.device)

    def reset(self, seed: int | None = None) -> Obs:
        self._wait()
        return self._send(self._fill(self._obs, self._copies.reset(seed)))

    def _reset_where(self, mask: Tensor) -> Obs:
        """Restart the environments of ``mask`` ([N] bool) and return all current observations."""
        rows = mask.cpu().numpy()
        self._wait()
        if rows.any():  # gymnasium refuses an empty mask; the buffers already hold the current observations
            self._fill(self._obs, self._copies.reset_where(rows))
        return self._send(self._obs)

    def step(self, action: Tensor) -> Step:
        one = self._copies.step(action.detach().cpu().numpy())
        self._wait()
        self._flags.array[:4] = one.terminated, one.truncated, one.first, one.valid
        self._flags.array[4] = True
        self._reward.array[:] = one.reward
        stages = self._fill(self._obs, one.obs)
        if one.final:  # otherwise the final observation is the observation itself
            self._fill(self._final, one.obs)
            for i, row in one.final.items():
                self._flags.array[4, i] = row is not None
                for name, value in (row or {}).items():
                    self._final[name].array[i] = value
        flags = self._flags.send().unbind(0)
        reward_sent = self._reward.send()
        final = {name: stage.send() for name, stage in self._final.items()} if one.final else None
        sent = self._send(stages)
        return Step(sent, reward_sent, flags[0], flags[1], flags[2], final or dict(sent), flags[4], flags[3], {})

    def render(self, index: int = 0, width: int | None = None, height: int | None = None) -> np.ndarray:
        """Render copy ``index``, uint8 [H, W, 3], in the environment's own size. Raises ``ConfigError``: a size is
        asked for, or the environment was not built with ``render_mode=rgb_array``."""
        for setting, value in (("width", width), ("height", height)):
            if value is not None:
                raise ConfigError(setting, value, f"none: {self.spec.name} renders at a fixed size")
        if self._copies.envs.render_mode != "rgb_array":
            mode = self._copies.envs.render_mode
            raise ConfigError("render_mode", mode, "rgb_array, given when the environment is made")
        return np.asarray(cast(Any, self._copies.envs.render())[index], np.uint8)

    def close(self) -> None:
        self._copies.envs.close()

    def _fill(self, stages: dict[str, Stage], obs: dict[str, Any]) -> dict[str, Stage]:
        for name, values in obs.items():
            np.copyto(stages[name].array, values, casting="same_kind")
        return stages

    def _send(self, stages: dict[str, Stage]) -> Obs:
        obs = {name: stage.send() for name, stage in stages.items()}
        if self._sent is not None:
            self._sent.record()
        return obs

    def _wait(self) -> None:
        if self._sent is not None:
            self._sent.synchronize()  # the last step's copies still read the host buffers


def spec_of(facts: host.Facts, num_envs: int, device: torch.device) -> EnvSpec:
    """Return the specification of ``num_envs`` copies. Raises ``ConfigError`` for an unsupported space."""
    obs = {k: ObsSpec(shape, getattr(torch, dtype)) for k, (shape, dtype) in host.obs_parts(facts.obs).items()}
    return EnvSpec(num_envs=num_envs, obs=obs, device=device, **spec_fields(facts))
