"""Gymnasium environments with bounded continuous or discrete actions: N copies, in this process or one process each.

Runs on the host: every step waits for the actions, steps the environments and copies the results through host buffers
(pinned for a CUDA device). Episode ends and observations follow ``pql.types.Step`` in both of gymnasium's autoreset
modes.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from torch import Tensor

from pql.contract.env import Box, Discrete, EnvSpec, ObsSpec
from pql.contract.registry import takes
from pql.envs.stage import Stage
from pql.errors import ConfigError, nearest
from pql.types import Obs, Step

MODES = {"next_step": AutoresetMode.NEXT_STEP, "same_step": AutoresetMode.SAME_STEP}


class CopyObservation(gymnasium.ObservationWrapper):
    """Copies each observation, because an environment that reuses its array would overwrite the final observation in
    ``reset`` (gymnasium issue 1132)."""

    def observation(self, observation: Any) -> Any:
        return copy.deepcopy(observation)


@dataclass(frozen=True)
class GymnasiumSettings:
    """Keywords of :class:`GymnasiumVec`.

    Attributes:
        id: registered name, or ``module:Name-v0``.
        autoreset: ``next_step`` (a filler row follows each end) or ``same_step``.
        vectorization: ``sync`` (one after the other, in this process) or ``async`` (a process each).
        render_mode: ``rgb_array`` makes :meth:`render` work; passed to ``gymnasium.make``.
        kwargs: keywords for ``gymnasium.make``, ``max_episode_steps`` included.
    """

    id: str = "Pendulum-v1"
    autoreset: str = "next_step"
    vectorization: str = "sync"
    kwargs: Mapping[str, Any] | None = None
    render_mode: str | None = None


class GymnasiumVec:
    """``num_envs`` copies of a registered gymnasium environment.

    Float observations become float32, uint8 ones stay uint8. A Dict space needs a ``policy`` entry; its keys become
    observation groups. Actions in [-1, 1] are clamped and rescaled to the environment's bounds. ``reset(seed)`` seeds
    copy i with ``seed + i``.

    Args:
        num_envs: N.
        device: where the tensors go; the environments run on the host.
        keywords: fields of :class:`GymnasiumSettings`.

    Raises:
        ConfigError: unknown id, unsupported space, or a value out of range.
    """

    @takes(GymnasiumSettings)
    def __init__(self, num_envs: int = 64, device: str | torch.device = "cpu", **keywords: Any):
        self.spec, settings = self.describe(num_envs, device, **keywords), GymnasiumSettings(**keywords)
        id, autoreset, vectorization = settings.id, settings.autoreset, settings.vectorization
        kwargs = dict(settings.kwargs or {})
        if settings.render_mode is not None:
            kwargs["render_mode"] = settings.render_mode
        device = self.spec.device
        vector: dict[str, Any] = {"autoreset_mode": MODES[autoreset], "copy": False}
        if vectorization == "async" and device.type == "cuda":
            vector["context"] = "spawn"  # a forked child would inherit a CUDA context that it cannot use
        wrappers = [CopyObservation] if autoreset == "same_step" else []
        self._envs = gymnasium.make_vec(id, num_envs, vectorization, vector, wrappers, **kwargs)
        self._next = autoreset == "next_step"
        self._space = self._envs.single_action_space
        if isinstance(self._space, spaces.Box):
            self._low, self._high = (b.astype(np.float64).reshape(-1) for b in (self._space.low, self._space.high))
        self._obs, self._final = ({k: self._stage(v.shape, v.dtype) for k, v in self.spec.obs.items()} for _ in "of")
        self._reward = self._stage((), torch.float32)
        self._flags = Stage((4, num_envs), torch.bool, device)
        self._true = torch.ones(num_envs, dtype=torch.bool, device=device)
        self._ended = np.zeros(num_envs, dtype=bool)
        self._sent = torch.cuda.Event() if device.type == "cuda" else None

    @classmethod
    def describe(cls, num_envs: int = 64, device: str | torch.device = "cpu", **keywords: Any) -> EnvSpec:
        """Return the ``EnvSpec`` of an environment with these arguments; makes one copy to read its spaces."""
        settings = GymnasiumSettings(**keywords)
        autoreset, vectorization = settings.autoreset, settings.vectorization
        if isinstance(num_envs, bool) or not isinstance(num_envs, int) or num_envs < 1:
            raise ConfigError("num_envs", num_envs, "a whole number, at least 1")
        for setting, value, allowed in (
            ("autoreset", autoreset, tuple(MODES)),
            ("vectorization", vectorization, ("sync", "async")),
        ):
            if value not in allowed:
                raise ConfigError(setting, value, " or ".join(allowed))
        env = _make(settings.id, dict(settings.kwargs or {}))
        try:
            limit = env.spec.max_episode_steps if env.spec else None
            rate = env.metadata.get("render_fps")
            return EnvSpec(
                name=settings.id,
                num_envs=num_envs,
                obs=_obs_spec(env.observation_space),
                action=_action_spec(env.action_space),
                device=torch.device(device),
                max_episode_steps=limit if limit and limit > 0 else None,
                autoreset=cast(Literal["same_step", "next_step"], autoreset),
                final_obs="always",
                info={"dt": 1 / rate} if rate else {},
            )
        finally:
            env.close()

    def _stage(self, shape: tuple[int, ...], dtype: torch.dtype) -> Stage:
        return Stage((self.spec.num_envs, *shape), dtype, self.spec.device)

    def reset(self, seed: int | None = None) -> Obs:
        self._wait()
        obs, _ = self._envs.reset(seed=seed)
        self._ended[:] = False
        return self._send(self._fill(self._obs, obs))

    def reset_where(self, mask: Tensor) -> Obs:
        """Restart the environments of ``mask`` ([N] bool) and return all current observations."""
        rows = mask.cpu().numpy()
        self._wait()
        if rows.any():  # gymnasium refuses an empty mask; the buffers already hold the current observations
            obs, _ = self._envs.reset(options={"reset_mask": rows})
            self._ended &= ~rows
            self._fill(self._obs, obs)
        return self._send(self._obs)

    def step(self, action: Tensor) -> Step:
        obs, reward, terminated, truncated, info = self._envs.step(self._rescale(action))
        self._wait()
        raw = terminated | truncated
        filler = self._ended if self._next else np.zeros_like(raw)
        self._flags.array[:] = (
            terminated & ~filler,
            truncated & ~terminated & ~filler,
            filler if self._next else raw,
            ~filler,
        )
        self._reward.array[:] = reward
        stages = self._fill(self._obs, obs)
        ends = np.flatnonzero(raw) if not self._next else ()
        if len(ends):  # otherwise the final observation is the observation itself
            self._fill(self._final, obs)
            for i in ends:
                for name, row in _groups(info["final_obs"][i]).items():
                    self._final[name].array[i] = row
        self._ended = raw
        flags = self._flags.send().unbind(0)
        reward_sent = self._reward.send()
        final = {name: stage.send() for name, stage in self._final.items()} if len(ends) else None
        sent = self._send(stages)
        return Step(sent, reward_sent, flags[0], flags[1], flags[2], final or dict(sent), self._true, flags[3], {})

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

    def _rescale(self, action: Tensor) -> np.ndarray:
        """[N, A] in [-1, 1] -> [N, ...] in the environment's bounds, or [N] from 0; waits for the device."""
        if isinstance(self._space, spaces.Discrete):
            return action.detach().cpu().numpy() + self._space.start
        unit = action.detach().cpu().numpy().astype(np.float64).clip(-1, 1)
        scaled = self._low + (unit + 1) / 2 * (self._high - self._low)
        return scaled.clip(self._low, self._high).reshape(-1, *(self._space.shape or ())).astype(self._space.dtype)

    def _fill(self, stages: dict[str, Stage], obs: Any) -> dict[str, Stage]:
        for name, values in _groups(obs).items():
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


def _groups(obs: Any) -> dict[str, Any]:
    return obs if isinstance(obs, dict) else {"policy": obs}


def _make(id: str, kwargs: dict[str, Any]) -> gymnasium.Env:
    """Make one environment, converting gymnasium's errors to ``ConfigError``."""
    try:
        return gymnasium.make(id, **kwargs)
    except (gymnasium.error.UnregisteredEnv, gymnasium.error.DeprecatedEnv) as error:
        known = f"a registered gymnasium id{nearest(id, gymnasium.registry)}"
        raise ConfigError("id", id, known) from error
    except (gymnasium.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        raise ConfigError("id", id, f"an environment whose packages are installed ({error})") from error
    except TypeError as error:
        raise ConfigError("kwargs", kwargs, f"keywords that {id} takes ({error})") from error


def _obs_spec(space: spaces.Space) -> dict[str, ObsSpec]:
    parts = dict(space.spaces) if isinstance(space, spaces.Dict) else {"policy": space}
    wanted = "a Box of floats or uint8, or a Dict of these with a 'policy' entry (see gymnasium.wrappers)"
    if "policy" not in parts:
        raise ConfigError("observation_space", space, wanted)
    groups = {}
    for name, part in parts.items():
        if not isinstance(part, spaces.Box) or not (part.dtype == np.uint8 or np.issubdtype(part.dtype, np.floating)):
            raise ConfigError("observation_space", space, wanted)
        groups[name] = ObsSpec(part.shape, torch.uint8 if part.dtype == np.uint8 else torch.float32)
    return groups


def _action_spec(space: spaces.Space) -> Box | Discrete:
    if isinstance(space, spaces.Discrete):
        return Discrete(int(space.n), int(space.start))
    bounded = isinstance(space, spaces.Box) and np.isfinite(space.low).all() and np.isfinite(space.high).all()
    if not bounded or not np.issubdtype(space.dtype, np.floating):
        raise ConfigError("action_space", space, "a Box of floats with finite bounds, or Discrete")
    box = cast(spaces.Box, space)
    low, high = (tuple(b.astype(float).reshape(-1).tolist()) for b in (box.low, box.high))
    return Box(math.prod(box.shape), low, high)
