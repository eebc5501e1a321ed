"""Gymnasium's copies as environments with NumPy arrays, by the rules of the contract (``pql.types.Step``).

Shared by ``task=gymnasium`` and its remote actors. Needs no torch.
"""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from gymnasium.vector import VectorEnv

from pql.contract.plain import EnvSpec, Step
from pql.contract.registry import takes
from pql.envs.adapters import gymnasium_host as host
from pql.envs.adapters.gymnasium_check import FIELDS, AnswerError, CheckFirst, first_answer
from pql.errors import ConfigError


class GymnasiumSim:
    """A vector environment of gymnasium, which this object owns. Fields are arrays [N, ...], new at every call.
    ``reset_where`` exists with gymnasium's own vector classes."""

    def __init__(self, envs: VectorEnv, spec: EnvSpec):
        self.envs, self.spec = envs, spec
        self._unseen = set(FIELDS)  # methods whose first answer is to be checked
        self._next = spec.autoreset == "next_step"
        self._ended = np.zeros(envs.num_envs, dtype=bool)
        self._shown: dict[str, np.ndarray] = {}
        if host.resets_copies(envs):
            self.reset_where = self._reset_where

    def reset(self, seed: int | None = None) -> dict[str, np.ndarray]:
        """Restart all copies; return the observations by group."""
        obs, _ = self._answer("reset", host.reset_copies, self.envs, seed)
        self._ended = np.zeros_like(self._ended)
        return self._copied(obs)

    def _reset_where(self, mask: np.ndarray) -> dict[str, np.ndarray]:
        """Restart the copies of ``mask`` [N] bool; return all current observations."""
        if not mask.any():  # gymnasium refuses an empty mask
            return self._shown
        self._ended = self._ended & ~mask
        return self._copied(self.envs.reset(options={"reset_mask": mask})[0])

    def step(self, action: np.ndarray) -> Step:
        """Step with ``action`` [N, A] in [-1, 1], or [N] or [N, K] from 0 on."""
        given = host.simulator_action(self.envs.single_action_space, action)
        obs, reward, terminated, truncated, info = self._answer("step", self.envs.step, given)
        terminated, truncated = np.array(terminated, bool), np.array(truncated, bool)
        over = terminated | truncated
        filler = self._ended if self._next else np.zeros_like(over)
        self._ended = over
        ends, cuts = terminated & ~filler, truncated & ~terminated & ~filler
        seen = final = self._copied(obs)
        known = np.ones_like(over)
        if not self._next and over.any():
            final = {k: v.copy() for k, v in seen.items()}
            for i in np.flatnonzero(over):
                row = host.final_groups(info, int(i))
                known[i] = row is not None
                for k, value in (row or {}).items():
                    final[k][i] = value
        paid, first = np.array(reward, np.float32), filler if self._next else over
        return Step(seen, paid, ends, cuts, first, final, known, ~filler, {})

    def _answer(self, method: str, call: Callable[..., Any], *given: Any) -> Any:
        """Return gymnasium's answer. Raises ``ConfigError``: the first one of a method is wrong."""
        if method not in self._unseen:
            return call(*given)
        try:
            parts = host.obs_parts(self.envs.single_observation_space)
            answer = first_answer(method, lambda: call(*given), parts, (self.spec.num_envs,))
        except AnswerError as error:
            wanted = f"{method}() to return {error}: pql doctor --env NAME tests it"
            raise ConfigError("task", self.spec.name, wanted) from error
        self._unseen.remove(method)
        return answer

    def _copied(self, obs: Any) -> dict[str, np.ndarray]:
        """Copy the groups, in the types of the specification, because gymnasium overwrites its arrays."""
        kinds = {k: str(part.dtype) for k, part in self.spec.obs.items()}
        self._shown = {k: np.asarray(v).astype(kinds[k], casting="same_kind") for k, v in host.groups_of(obs).items()}
        return self._shown

    def render(self, index: int = 0, width: int | None = None, height: int | None = None) -> np.ndarray:
        """Render copy ``index``, uint8 [H, W, 3], in the environment's own size. Raises ``ConfigError``: a size is
        asked for, or the environment was not built with ``render_mode=rgb_array``."""
        for setting, value in (("width", width), ("height", height)):
            if value is not None:
                raise ConfigError(setting, value, f"none: {self.spec.name} renders at a fixed size")
        if self.envs.render_mode != "rgb_array":
            raise ConfigError("render_mode", self.envs.render_mode, "rgb_array, given when the environment is made")
        return np.asarray(cast(Any, self.envs.render())[index], np.uint8)

    def close(self) -> None:
        self.envs.close()


@takes(host.GymnasiumSettings)
def gymnasium_sim(num_envs: int, device: Any = "cpu", **keywords: Any) -> GymnasiumSim:
    """Make ``num_envs`` copies for a remote actor. ``keywords``: fields of ``GymnasiumSettings``. Raises
    ``ConfigError``: unknown id, unsupported spaces, or a value out of range."""
    return make_copies(host.GymnasiumSettings(**keywords), num_envs, "same_step")


def make_copies(settings: host.GymnasiumSettings, num_envs: int, autoreset: str, spawn: bool = False) -> GymnasiumSim:
    """Make ``num_envs`` copies.

    Args:
        autoreset: the mode if the settings name none.
        spawn: start processes anew, instead of by a fork.
    Raises:
        ConfigError: unknown id, unsupported spaces, or a value out of range.
    """
    host.check_settings(num_envs, settings)
    if settings.vectorization == host.OWN:
        envs = host.make_vector(settings, num_envs, "")
        spec = host.spec_of_vector(envs, "vectorization", settings.id, settings.autoreset, settings.deterministic)
    else:
        spec = host.spec_of_copies(settings, num_envs, autoreset)  # refuses a space before there are processes
        envs = host.make_vector(settings, num_envs, spec.autoreset, [CheckFirst], spawn)
    return GymnasiumSim(envs, spec)
