"""Gymnasium environments for actors: Gymnasium's vector environments, with NumPy arrays.

Settings, spaces, action rescaling, seeds and episode ends equal those of ``task=gymnasium``
(``pql/envs/adapters/gymnasium.py``).
"""

from typing import Any

import numpy as np

from pql.contract.plain import EnvSpec, ObsSpec, Step
from pql.contract.registry import takes
from pql.envs.adapters.gymnasium_check import CheckFirst, FirstAnswers
from pql.envs.adapters.gymnasium_host import (
    OWN,
    GymnasiumSettings,
    action_spec,
    check_settings,
    facts_of_copies,
    facts_of_vector,
    final_groups,
    groups_of,
    make_vector,
    obs_parts,
    simulator_action,
)


class GymnasiumSim:
    """``num_envs`` copies of an environment. Fields are arrays [N, ...].

    Args:
        keywords: fields of ``GymnasiumSettings``.

    Raises:
        ConfigError: unknown id, unsupported spaces, or a value out of range.
    """

    @takes(GymnasiumSettings)
    def __init__(self, num_envs: int, device: Any = "cpu", **keywords: Any):
        settings = GymnasiumSettings(**keywords)
        check_settings(num_envs, settings)
        if settings.vectorization == OWN:
            self.envs = make_vector(settings, num_envs, "")
            facts = facts_of_vector(self.envs, "vectorization", settings.id, settings.autoreset, settings.deterministic)
        else:
            facts = facts_of_copies(settings, "same_step")
            self.envs = make_vector(settings, num_envs, facts.autoreset, [CheckFirst])
        self.space = facts.action
        self.spec = EnvSpec(
            name=facts.name,
            num_envs=num_envs,
            obs={k: ObsSpec(*part) for k, part in obs_parts(facts.obs).items()},
            action=action_spec(facts.action),
            device="cpu",
            max_episode_steps=facts.max_episode_steps,
            autoreset=facts.autoreset,
            final_obs="always",
            info=facts.info,
            deterministic=facts.deterministic,
        )
        self.answers = FirstAnswers(self.envs, facts.name, obs_parts(facts.obs))
        self.next = facts.autoreset == "next_step"
        self.ended = np.zeros(num_envs, dtype=bool)

    def reset(self, seed: int | None = None) -> dict[str, np.ndarray]:
        self.ended[:] = False
        return groups_of(self.answers.reset(seed))

    def step(self, action: np.ndarray) -> Step:
        obs, reward, terminated, truncated, info = self.answers.step(simulator_action(self.space, action))
        terminated, truncated = np.asarray(terminated, bool), np.asarray(truncated, bool)
        over = terminated | truncated
        filler = self.ended if self.next else np.zeros_like(over)
        self.ended = over
        seen = groups_of(obs)
        final, final_ok = seen, np.ones_like(over)
        if not self.next and over.any():
            final = {k: v.copy() for k, v in seen.items()}
            for i in np.flatnonzero(over):
                final_row = final_groups(info, int(i))
                final_ok[i] = final_row is not None
                for k, row in (final_row or {}).items():
                    final[k][i] = row
        return Step(
            obs=seen,
            reward=reward,
            terminated=terminated & ~filler,
            truncated=truncated & ~terminated & ~filler,
            first=filler if self.next else over,
            final_obs=final,
            final_ok=final_ok,
            valid=~filler,
            log={},
        )

    def close(self) -> None:
        self.envs.close()
