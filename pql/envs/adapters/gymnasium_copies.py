"""Steps of gymnasium's copies with NumPy arrays, by the rules of the contract (``pql.types.Step``). Needs no torch.

Shared by ``task=gymnasium`` and its remote actors.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from gymnasium.vector import VectorEnv

from pql.envs.adapters import gymnasium_host as host
from pql.envs.adapters.gymnasium_check import CheckFirst, FirstAnswers


class Answer(NamedTuple):
    """A step of N copies, in arrays [N, ...].

    Attributes:
        obs: by group.
        final: of the copies that were reset (same-step autoreset), by index: the final observation by group, or None
            if the simulator did not return it.
    """

    obs: dict[str, Any]
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    first: np.ndarray
    valid: np.ndarray
    final: Mapping[int, dict[str, Any] | None]


class Copies:
    """A vector environment whose answers follow the contract."""

    def __init__(self, envs: VectorEnv, facts: host.Facts):
        self.envs, self.facts = envs, facts
        self._answers = FirstAnswers(envs, facts.name, host.obs_parts(facts.obs))
        self._next = facts.autoreset == "next_step"
        self._ended = np.zeros(envs.num_envs, dtype=bool)

    @classmethod
    def make(cls, settings: host.GymnasiumSettings, num_envs: int, autoreset: str, spawn: bool = False) -> "Copies":
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
            facts = host.facts_of_vector(envs, "vectorization", settings.id, settings.autoreset, settings.deterministic)
        else:
            facts = host.facts_of_copies(settings, autoreset)
            host.obs_parts(facts.obs)  # refuses a space before there are processes
            host.action_spec(facts.action)
            envs = host.make_vector(settings, num_envs, facts.autoreset, [CheckFirst], spawn)
        return cls(envs, facts)

    def reset(self, seed: int | None) -> dict[str, Any]:
        """Restart all copies; return the observations by group."""
        obs = self._answers.reset(seed)
        self._ended[:] = False
        return host.groups_of(obs)

    def reset_where(self, rows: np.ndarray) -> dict[str, Any]:
        """Restart the copies of ``rows`` [N] bool, of which there is one; return all current observations."""
        obs, _ = self.envs.reset(options={"reset_mask": rows})
        self._ended &= ~rows
        return host.groups_of(obs)

    def step(self, action: np.ndarray) -> Answer:
        """Step with ``action`` [N, A] in [-1, 1], or [N] or [N, K] from 0 on."""
        given = host.simulator_action(self.facts.action, action)
        obs, reward, terminated, truncated, info = self._answers.step(given)
        terminated, truncated = np.asarray(terminated, bool), np.asarray(truncated, bool)
        over = terminated | truncated
        filler = self._ended if self._next else np.zeros_like(over)
        self._ended = over
        ends = () if self._next else np.flatnonzero(over)
        return Answer(
            host.groups_of(obs),
            reward,
            terminated & ~filler,
            truncated & ~terminated & ~filler,
            filler if self._next else over,
            ~filler,
            {int(i): host.final_groups(info, int(i)) for i in ends},
        )


def spec_fields(facts: host.Facts) -> dict[str, Any]:
    """Return the fields of ``EnvSpec`` that need no torch. Raises ``ConfigError`` for unsupported actions."""
    return {
        "name": facts.name,
        "action": host.action_spec(facts.action),
        "max_episode_steps": facts.max_episode_steps,
        "autoreset": facts.autoreset,
        "final_obs": "always",
        "info": facts.info,
        "deterministic": facts.deterministic,
    }
