"""Gymnasium environments for actors: the copies of ``task=gymnasium``, with NumPy arrays."""

from typing import Any

import numpy as np

from pql.contract.plain import EnvSpec, ObsSpec, Step
from pql.contract.registry import takes
from pql.envs.adapters.gymnasium_copies import Copies, spec_fields
from pql.envs.adapters.gymnasium_host import GymnasiumSettings, obs_parts


class GymnasiumSim:
    """``num_envs`` copies of an environment. Fields are arrays [N, ...]. ``keywords``: fields of ``GymnasiumSettings``.
    Raises ``ConfigError``: unknown id, unsupported spaces, or a value out of range."""

    @takes(GymnasiumSettings)
    def __init__(self, num_envs: int, device: Any = "cpu", **keywords: Any):
        self.copies = Copies.make(GymnasiumSettings(**keywords), num_envs, "same_step")
        facts = self.copies.facts
        obs = {k: ObsSpec(*part) for k, part in obs_parts(facts.obs).items()}
        self.spec = EnvSpec(num_envs=num_envs, obs=obs, device="cpu", **spec_fields(facts))

    def reset(self, seed: int | None = None) -> dict[str, np.ndarray]:
        return self.copies.reset(seed)

    def step(self, action: np.ndarray) -> Step:
        obs, reward, terminated, truncated, first, valid, ends = self.copies.step(action)
        final, final_ok = obs, np.ones_like(first)
        if ends:
            final = {k: v.copy() for k, v in obs.items()}
            for i, row in ends.items():
                final_ok[i] = row is not None
                for k, value in (row or {}).items():
                    final[k][i] = value
        return Step(obs, reward, terminated, truncated, first, final, final_ok, valid, {})

    def close(self) -> None:
        self.copies.envs.close()
