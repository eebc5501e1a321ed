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
from torch import Tensor

from pql.contract.env import Box, Discrete, EnvSpec, ObsSpec
from pql.envs.stage import Handover
from pql.errors import ConfigError, nearest
from pql.types import Obs, Step


class EnvpoolVec:
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
        if id not in (known := simulator.list_all_envs()):
            raise ConfigError("id", id, f"one of EnvPool's {len(known)} tasks{nearest(id, known)}")
        self._id = id
        self._settings: dict[str, Any] = {"num_envs": num_envs, "num_threads": threads or 0, **(kwargs or {})}
        self._envs = self._make(0)
        obs, action = self._envs.observation_space, self._envs.action_space
        limit = getattr(self._envs.spec.config, "max_episode_steps", None)
        if limit and id.startswith("gfootball/"):
            limit += 1  # its episodes are one row longer than documented
        limit = limit if limit and 0 < limit < 2**31 - 1 else None
        spaces = ({"policy": _obs_spec(obs)}, _action_spec(action))
        self.spec = EnvSpec(id, num_envs, *spaces, torch.device(device), limit, "next_step", "always")
        self._space, self._hand = action, Handover(self.spec.device)
        self._kind = np.uint8 if obs.dtype == np.uint8 else np.float32
        self._true = torch.ones(num_envs, dtype=torch.bool, device=self.spec.device)

    def _make(self, seed: int) -> Any:
        try:
            return simulator.make_gymnasium(self._id, seed=seed, **self._settings)
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError("kwargs", self._settings, f"keywords that {self._id} takes ({error})") from error

    def reset(self, seed: int | None = None) -> Obs:
        if seed is not None:
            self._envs.close()
            # EnvPool seeds environment i with seed + i: neighbouring seeds would share all environments but one.
            self._envs = self._make(int(np.random.SeedSequence(seed).generate_state(1)[0] >> 2))
        return self._send(self._envs.reset()[0])

    def step(self, action: Tensor) -> Step:
        obs, reward, terminated, truncated, info = self._envs.step(self._rescale(action))
        filler = info["elapsed_step"] == 0
        flags = np.stack((terminated & ~filler, truncated & ~terminated & ~filler, filler, ~filler))
        hand = self._hand
        hand.wait()
        seen = hand.send("obs", obs.astype(self._kind))
        sent, paid = hand.send("flags", flags), hand.send("reward", reward.astype(np.float32))
        hand.sent()
        ends, cuts, first, valid = sent.unbind(0)
        return Step({"policy": seen}, paid, ends, cuts, first, {"policy": seen}, self._true, valid, {})

    def close(self) -> None:
        self._envs.close()

    def _send(self, obs: np.ndarray) -> Obs:
        self._hand.wait()
        seen = self._hand.send("obs", obs.astype(self._kind))
        self._hand.sent()
        return {"policy": seen}

    def _rescale(self, action: Tensor) -> np.ndarray:
        """[N, A] in [-1, 1] -> [N, ...] within the task's bounds, or [N] from its first number."""
        given = action.detach().cpu().numpy()
        if isinstance(self._space, spaces.Discrete):
            return (given + self._space.start).astype(self._space.dtype)
        low, high = (np.asarray(b, np.float64).reshape(-1) for b in (self._space.low, self._space.high))
        scaled = low + (given.clip(-1, 1) + 1) / 2 * (high - low)
        return scaled.reshape(-1, *self._space.shape).astype(self._space.dtype)


def _obs_spec(space: Any) -> ObsSpec:
    if not isinstance(space, spaces.Box) or np.dtype(space.dtype).kind not in "fiub":
        raise ConfigError("observation_space", space, "one array of numbers")
    return ObsSpec(tuple(space.shape), torch.uint8 if space.dtype == np.uint8 else torch.float32)


def _action_spec(space: Any) -> Box | Discrete:
    if isinstance(space, spaces.Discrete):
        return Discrete(int(space.n), int(space.start))
    if not isinstance(space, spaces.Box) or not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
        raise ConfigError("action_space", space, "a Box with finite bounds, or Discrete")
    low, high = (tuple(np.asarray(b, float).reshape(-1).tolist()) for b in (space.low, space.high))
    return Box(int(np.prod(space.shape)), low, high)
