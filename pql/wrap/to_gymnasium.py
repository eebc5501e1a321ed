"""A ``VectorEnv`` for code written against gymnasium. Reached through ``pql.wrap.gymnasium``."""

from typing import Any, cast

import numpy as np
import torch
from gymnasium import Space, spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor

from pql.contract.env import Box, EnvSpec, MultiDiscrete, ObsSpec, VecEnv
from pql.contract.optional import PartialReset, supports
from pql.errors import ConfigError
from pql.types import Obs, Step
from pql.wrap.rows import clamped, ends, to_device, to_host


class GymnasiumEnv(VectorEnv):
    """Adapter for Gymnasium; see ``pql.wrap.gymnasium``.

    Rewards are float64, as those of gymnasium's own vector environments, and 0 on filler rows. Under same-step
    autoreset a step that ended episodes has ``final_obs`` (an array of objects) and ``final_info`` in its ``infos``,
    with their masks; ``final_info["final_lost"]`` marks those whose true final observation was lost. The environment's
    log terms are arrays by name, in ``final_info`` where an episode ended, as gymnasium has it.
    """

    def __init__(self, env: VecEnv):
        spec = env.spec
        self.env, self._next = env, spec.autoreset == "next_step"
        for odd in ("restarts", "lost_life"):
            if self._next and spec.info.get(odd):
                wanted = "none under next-step autoreset: gymnasium treats the row after an episode's end as a filler"
                raise ConfigError(f"env.spec.info[{odd}]", True, wanted)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP if self._next else AutoresetMode.SAME_STEP}
        self.num_envs = spec.num_envs
        self.single_action_space = action_space(spec)
        self.single_observation_space = observation_space(spec)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self._obs: Obs = {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Restart all environments, or those of ``options["reset_mask"]`` ([N] bool): (observations, {}).

        Raises:
            ConfigError: other options, a seed together with a mask, or a mask where the environment lacks
                ``reset_where``.
        """
        super().reset(seed=seed)
        mask = self._mask(seed, options)
        if mask is None:
            self._obs = self.env.reset(seed)
        else:
            self._obs = cast(PartialReset, self.env).reset_where(mask)
        return _host_obs(self._obs), {}

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Step with actions [N, A], clamped, or [N] integers of the space; return the tuple of ``VectorEnv.step``."""
        step = self.env.step(clamped(self.env, to_device(actions, self.env), from_start=True))
        time_out, lost, final = ends(step, self._obs)
        self._obs = step.obs
        reward = torch.where(step.valid, step.reward, 0.0)
        terminated, truncated = to_host(step.terminated), to_host(time_out)
        infos = self._infos(step, terminated | truncated, final, lost)
        return _host_obs(step.obs), to_host(reward.double()), terminated, truncated, infos

    def close_extras(self, **kwargs: Any) -> None:
        self.env.close()

    def _infos(self, step: Step, done: np.ndarray, final: Obs, lost: Tensor) -> dict[str, Any]:
        log = {name: to_host(value) for name, value in step.log.items()}
        if self._next:
            return _masked(log, to_host(step.valid))
        infos: dict[str, Any] = _masked(log, ~done)
        if done.any():
            groups = {name: to_host(value) for name, value in final.items()}
            infos["final_obs"] = np.full(self.num_envs, None, dtype=object)
            for i in np.flatnonzero(done):
                row = {name: value[i] for name, value in groups.items()}
                infos["final_obs"][i] = row if len(row) > 1 else row["policy"]
            marks = {"final_lost": to_host(lost)} if bool(lost.any()) else {}
            infos["final_info"] = _masked(log | marks, done)
            infos["_final_obs"], infos["_final_info"] = done.copy(), done.copy()
        return infos

    def _mask(self, seed: int | None, options: dict[str, Any] | None) -> Tensor | None:
        """Return the validated ``reset_mask`` of ``options``, or None."""
        if not options:
            return None
        mask: Any = options.get("reset_mask")
        if set(options) != {"reset_mask"} or np.shape(mask) != (self.num_envs,) or np.asarray(mask).dtype != bool:
            raise ConfigError("options", options, f"only reset_mask, an array of {self.num_envs} bool")
        if seed is not None or not supports(self.env, PartialReset):
            wanted = "no seed, and an environment that can restart single environments (reset_where)"
            raise ConfigError("options.reset_mask", "given", wanted)
        return to_device(mask, self.env)


def box(part: ObsSpec) -> spaces.Box:
    """Return the space of one observation group."""
    if not part.dtype.is_floating_point:
        kind = np.dtype(str(part.dtype).removeprefix("torch."))
        low, high = (0, 1) if kind.kind == "b" else (np.iinfo(kind).min, np.iinfo(kind).max)
        return spaces.Box(low, high, part.shape, cast(Any, kind))
    return spaces.Box(-np.inf, np.inf, part.shape, np.float32)


def observation_space(spec: EnvSpec) -> Space:
    """Return the observation space: a Box for one group, a Dict for several."""
    groups: dict[str, Space] = {name: box(part) for name, part in spec.obs.items()}
    return spaces.Dict(groups) if len(groups) > 1 else groups["policy"]


def action_space(spec: EnvSpec) -> Space:
    """Return [-1, 1] in every dimension for a Box, or (Multi)Discrete with the simulator's ``start``."""
    if isinstance(spec.action, Box):
        return spaces.Box(-1.0, 1.0, (spec.action.size,), np.float32)
    if isinstance(spec.action, MultiDiscrete):
        start = None if spec.action.start is None else np.array(spec.action.start)
        return spaces.MultiDiscrete(np.array(spec.action.nvec), start=start)
    return spaces.Discrete(spec.action.n, start=spec.action.start)


def _host_obs(obs: Obs) -> Any:
    groups = {name: to_host(value) for name, value in obs.items()}
    return groups if len(groups) > 1 else groups["policy"]


def _masked(values: dict[str, np.ndarray], mask: np.ndarray) -> dict[str, np.ndarray]:
    """Return ``values`` [N], 0 where ``mask`` [N] is False, each with its mask as ``_name``, as Gymnasium does."""
    if not mask.any():
        return {}
    kept = {name: np.where(mask, value, np.zeros_like(value)) for name, value in values.items()}
    return kept | {f"_{name}": mask.copy() for name in values}
