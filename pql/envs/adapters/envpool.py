"""EnvPool's environments, stepped by its C++ threads: ``task=envpool task.id=HalfCheetah-v5``.

EnvPool uses next-step autoreset: the row that ends an episode has its final observation, and a filler row follows,
which EnvPool marks by a step count of 0. A failure in the row of the time limit is reported as a truncation. EnvPool is
seeded when it is made and ignores the seed of a reset, so ``reset(seed)`` rebuilds it.

Google Research Football is included (``task=football``): the super mini map of one controlled player, [72, 96, 4]
bytes, with the scenarios' rewards (a goal scored or conceded: +-1).
"""

from collections.abc import Mapping
from typing import Any

import envpool as simulator
import numpy as np
import torch
from gymnasium import spaces

from pql.contract.plain import EnvSpec, ObsSpec, Step
from pql.envs.adapters.gymnasium_host import action_spec, simulator_action
from pql.envs.stage import Tensors
from pql.errors import ConfigError, nearest


class EnvpoolVec(Tensors):
    """``num_envs`` environments of one of EnvPool's tasks.

    obs [N, ...] float32, or uint8 if the task's is; action [N, A] in [-1, 1], rescaled to the task's bounds, or
    [N] int64.

    Args:
        num_envs: N.
        device: device of the tensors; the environments run on the host.
        id: EnvPool's name of the task.
        threads: threads that step the environments; None or 0: one per core.
        kwargs: further keywords of ``envpool.make``, such as ``max_episode_steps``.
    Raises:
        ConfigError: no such task, a keyword that it does not accept, or an unsupported space.
    """

    def __init__(
        self,
        num_envs: int = 64,
        device: str | torch.device = "cpu",
        id: str = "HalfCheetah-v5",
        threads: int | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ):
        settings = {"num_envs": num_envs, "num_threads": threads or 0, **(kwargs or {})}
        super().__init__(EnvpoolSim(id, settings), torch.device(device))


class EnvpoolSim:
    """EnvPool's environments with NumPy arrays [N, ...]. ``settings``: keywords of ``envpool.make``."""

    def __init__(self, id: str, settings: dict[str, Any]):
        if id not in (known := simulator.list_all_envs()):
            raise ConfigError("id", id, f"one of EnvPool's {len(known)} tasks{nearest(id, known)}")
        self._id, self._settings = id, settings
        self._envs = self._make(0)
        obs = self._envs.observation_space
        limit = getattr(self._envs.spec.config, "max_episode_steps", None)
        if limit and id.startswith("gfootball/"):
            limit += 1  # its episodes are one row longer than documented
        limit = limit if limit and 0 < limit < 2**31 - 1 else None
        if not isinstance(obs, spaces.Box) or np.dtype(obs.dtype).kind not in "fiub":
            raise ConfigError("observation_space", obs, "one array of numbers")
        self._kind = "uint8" if obs.dtype == np.uint8 else "float32"
        groups = {"policy": ObsSpec(tuple(obs.shape), self._kind)}
        action = action_spec(self._envs.action_space)
        self.spec = EnvSpec(id, settings["num_envs"], groups, action, "cpu", limit, "next_step", "always")

    def _make(self, seed: int) -> Any:
        try:
            return simulator.make_gymnasium(self._id, seed=seed, **self._settings)
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError("kwargs", self._settings, f"keywords that {self._id} takes ({error})") from error

    def reset(self, seed: int | None = None) -> dict[str, np.ndarray]:
        if seed is not None:
            self._envs.close()
            # EnvPool seeds environment i with seed + i: neighbouring seeds would share all environments but one.
            self._envs = self._make(int(np.random.SeedSequence(seed).generate_state(1)[0] >> 2))
        return {"policy": self._envs.reset()[0].astype(self._kind)}

    def step(self, action: np.ndarray) -> Step:
        given = simulator_action(self._envs.action_space, action).astype(self._envs.action_space.dtype)
        obs, reward, terminated, truncated, info = self._envs.step(given)
        filler = info["elapsed_step"] == 0
        ends, cuts = terminated & ~filler, truncated & ~terminated & ~filler
        seen = {"policy": obs.astype(self._kind)}
        return Step(seen, reward.astype(np.float32), ends, cuts, filler, seen, np.ones_like(filler), ~filler, {})

    def close(self) -> None:
        self._envs.close()
