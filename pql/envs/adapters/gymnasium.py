"""Gymnasium environments: N copies, in this process or one process each, or a vector environment of the user.

Runs on the host: every step waits for the actions, steps the environments and copies the results through host buffers
(pinned for a CUDA device). Episode ends and observations follow ``pql.types.Step`` in both of gymnasium's autoreset
modes.
"""

from typing import Any, Literal, cast

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from pql.contract.env import EnvSpec, ObsSpec
from pql.contract.registry import takes
from pql.envs.adapters.gymnasium_check import CheckFirst, FirstAnswers
from pql.envs.adapters.gymnasium_host import (
    OWN,
    Facts,
    GymnasiumSettings,
    action_spec,
    check_settings,
    facts_of_copies,
    facts_of_vector,
    final_groups,
    groups_of,
    make_vector,
    obs_parts,
    resets_copies,
    simulator_action,
)
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

    @takes(GymnasiumSettings)
    def __init__(self, num_envs: int = 64, device: str | torch.device = "cpu", **keywords: Any):
        settings, device = GymnasiumSettings(**keywords), torch.device(device)
        check_settings(num_envs, settings)
        if settings.vectorization == OWN:
            envs = make_vector(settings, num_envs, "")
            facts = facts_of_vector(envs, "vectorization", settings.id, settings.autoreset, settings.deterministic)
        else:
            facts = facts_of_copies(settings, "next_step")
            spec_of(facts, num_envs, device)  # refuses a space before there are processes
            # A forked child would inherit a CUDA context that it cannot use.
            envs = make_vector(settings, num_envs, facts.autoreset, [CheckFirst], spawn=device.type == "cuda")
        self._hold(envs, facts, device)

    @classmethod
    def of(cls, envs: VectorEnv, device: str | torch.device = "cpu") -> "GymnasiumVec":
        """Return the environments of a ``gymnasium.vector.VectorEnv``, which this object owns.

        Raises:
            ConfigError: an unsupported space or autoreset mode.
        """
        self = cls.__new__(cls)
        self._hold(envs, facts_of_vector(envs, "env", type(envs.unwrapped).__name__), torch.device(device))
        return self

    def _hold(self, envs: VectorEnv, facts: Facts, device: torch.device) -> None:
        self._envs, self.spec = envs, spec_of(facts, envs.num_envs, device)
        self._answers = FirstAnswers(envs, facts.name, obs_parts(facts.obs))
        self._next, self._space = facts.autoreset == "next_step", facts.action
        self._obs, self._final = ({k: self._stage(v.shape, v.dtype) for k, v in self.spec.obs.items()} for _ in "of")
        self._reward = self._stage((), torch.float32)
        self._flags = Stage((5, envs.num_envs), torch.bool, device)
        self._ended = np.zeros(envs.num_envs, dtype=bool)
        self._sent = torch.cuda.Event() if device.type == "cuda" else None
        if resets_copies(envs):
            self.reset_where = self._reset_where

    @classmethod
    def describe(cls, num_envs: int = 64, device: str | torch.device = "cpu", **keywords: Any) -> EnvSpec | None:
        """Return the ``EnvSpec`` of an environment with these arguments; makes one copy to read its spaces.

        None with ``vector_entry_point``, which may be a simulator that a process can hold only once.
        """
        settings = GymnasiumSettings(**keywords)
        check_settings(num_envs, settings)
        if settings.vectorization == OWN:
            return None
        return spec_of(facts_of_copies(settings, "next_step"), num_envs, torch.device(device))

    def _stage(self, shape: tuple[int, ...], dtype: torch.dtype) -> Stage:
        return Stage((self.spec.num_envs, *shape), dtype, self.spec.device)

    def reset(self, seed: int | None = None) -> Obs:
        self._wait()
        obs = self._answers.reset(seed)
        self._ended[:] = False
        return self._send(self._fill(self._obs, obs))

    def _reset_where(self, mask: Tensor) -> Obs:
        """Restart the environments of ``mask`` ([N] bool) and return all current observations."""
        rows = mask.cpu().numpy()
        self._wait()
        if rows.any():  # gymnasium refuses an empty mask; the buffers already hold the current observations
            obs, _ = self._envs.reset(options={"reset_mask": rows})
            self._ended &= ~rows
            self._fill(self._obs, obs)
        return self._send(self._obs)

    def step(self, action: Tensor) -> Step:
        given = simulator_action(self._space, action.detach().cpu().numpy())
        obs, reward, terminated, truncated, info = self._answers.step(given)
        self._wait()
        terminated, truncated = np.asarray(terminated, bool), np.asarray(truncated, bool)
        raw = terminated | truncated
        filler = self._ended if self._next else np.zeros_like(raw)
        self._flags.array[:4] = (
            terminated & ~filler,
            truncated & ~terminated & ~filler,
            filler if self._next else raw,
            ~filler,
        )
        self._flags.array[4] = True
        self._reward.array[:] = reward
        stages = self._fill(self._obs, obs)
        ends = np.flatnonzero(raw) if not self._next else ()
        if len(ends):  # otherwise the final observation is the observation itself
            self._fill(self._final, obs)
            for i in ends:
                final_row = final_groups(info, int(i))
                self._flags.array[4, i] = final_row is not None
                for name, row in (final_row or {}).items():
                    self._final[name].array[i] = row
        self._ended = raw
        flags = self._flags.send().unbind(0)
        reward_sent = self._reward.send()
        final = {name: stage.send() for name, stage in self._final.items()} if len(ends) else None
        sent = self._send(stages)
        return Step(sent, reward_sent, flags[0], flags[1], flags[2], final or dict(sent), flags[4], flags[3], {})

    def render(self, index: int = 0, width: int | None = None, height: int | None = None) -> np.ndarray:
        """Render copy ``index``, uint8 [H, W, 3], in the environment's own size.

        Raises:
            ConfigError: a size is asked for, or the environment was not built with ``render_mode=rgb_array``.
        """
        for setting, value in (("width", width), ("height", height)):
            if value is not None:
                raise ConfigError(setting, value, f"none: {self.spec.name} renders at a fixed size")
        if self._envs.render_mode != "rgb_array":
            raise ConfigError("render_mode", self._envs.render_mode, "rgb_array, given when the environment is made")
        return np.asarray(cast(Any, self._envs.render())[index], np.uint8)

    def close(self) -> None:
        self._envs.close()

    def _fill(self, stages: dict[str, Stage], obs: Any) -> dict[str, Stage]:
        for name, values in groups_of(obs).items():
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


def spec_of(facts: Facts, num_envs: int, device: torch.device) -> EnvSpec:
    """Return the specification of ``num_envs`` copies. Raises ``ConfigError`` for an unsupported space."""
    return EnvSpec(
        name=facts.name,
        num_envs=num_envs,
        obs={k: ObsSpec(shape, getattr(torch, dtype)) for k, (shape, dtype) in obs_parts(facts.obs).items()},
        action=action_spec(facts.action),
        device=device,
        max_episode_steps=facts.max_episode_steps,
        autoreset=cast(Literal["same_step", "next_step"], facts.autoreset),
        final_obs="always",
        info=facts.info,
        deterministic=facts.deterministic,
    )
