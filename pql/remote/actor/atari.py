"""Atari games for actors: the consoles of ``task=atari`` (``pql/envs/atari_core.py``), with NumPy arrays."""

from typing import Any, cast

import numpy as np

from pql.contract.plain import Discrete, EnvSpec, ObsSpec, Step
from pql.contract.registry import takes
from pql.envs import atari_core as core
from pql.envs.atari_core import AtariSimSettings, Consoles


class AtariSim:
    """``num_envs`` consoles with one game; settings as in ``pql.envs.atari.AtariVec``. Fields are arrays [N, ...].
    Raises ``ConfigError``: unknown game, or a value out of range."""

    @takes(AtariSimSettings)
    def __init__(self, num_envs: int, device: Any = "cpu", **keywords: Any):
        settings = AtariSimSettings(**keywords)
        core.check(num_envs, settings)
        self.consoles = Consoles(settings, num_envs)
        self.spec = EnvSpec(
            num_envs=num_envs,
            obs={"policy": ObsSpec(core.SHAPE, cast(Any, "uint8"), core.STACK)},
            action=Discrete(core.actions(settings.game, settings.full_actions)),
            device=cast(Any, "cpu"),
            **core.spec_fields(settings),
        )

    def reset(self, seed: int | None = None) -> dict[str, np.ndarray]:
        return {"policy": self.consoles.reset(core.console_seeds(seed, self.spec.num_envs))}

    def step(self, action: np.ndarray) -> Step:
        self.consoles.send(action)
        one = self.consoles.receive()
        score: Any = one.reward.astype(np.float32)
        obs, final, yes = {"policy": one.obs}, {"policy": one.final_obs}, np.ones_like(one.first)
        return Step(obs, score, one.terminated, one.truncated, one.first, final, yes, one.valid, {"score": score})

    def close(self) -> None:
        self.consoles.vec.close()
