"""A ``VecEnv`` for rsl_rl. Reached through ``pql.wrap.rsl_rl``."""

from typing import Any, cast

import torch
from rsl_rl.env import VecEnv as RslRlVecEnv
from tensordict import TensorDict
from torch import Tensor

from pql.contract.env import Box, VecEnv
from pql.contract.optional import PartialReset, supports
from pql.errors import ConfigError
from pql.run.episodes import LONGEST
from pql.types import Obs
from pql.wrap.rows import SameStep


class RslRlEnv(RslRlVecEnv):
    """Adapter for rsl_rl; see ``pql.wrap.rsl_rl``.

    ``dones`` is set at terminations and time limits, ``extras["time_outs"]`` at the latter: rsl_rl then adds
    ``gamma V(s_t)``, the value of the observation before the step, to the reward. It does not use the final
    observation; other algorithms find that in ``extras["final_obs"]``, and in ``extras["final_lost"]`` where
    it is missing.
    ``extras["log"]`` holds the means of the environment's log terms.

    Assigning ``episode_length_buf`` (as ``learn(..., init_at_random_ep_len=True)`` does) ends each first episode as if
    it had begun that many steps earlier, by a time limit; it needs an environment with ``reset_where``.
    """

    returns_final_obs = True  # for pql.lab

    def __init__(self, env: VecEnv, seed: int | None = None):
        spec = env.spec
        if not isinstance(spec.action, Box):
            raise ConfigError("env.spec.action", spec.action, "continuous actions (Box): rsl_rl supports no others")
        self.env, self._rows = env, SameStep(env)
        self.num_envs, self.num_actions, self.device = spec.num_envs, spec.action.size, spec.device
        self.max_episode_length = spec.max_episode_steps or LONGEST
        self.cfg = {"task": spec.name, "num_envs": spec.num_envs, "max_episode_length": self.max_episode_length}
        self.reset(seed)

    def reset(self, seed: int | None = None) -> tuple[TensorDict, dict[str, Any]]:
        """Restart all environments; return (observations [N, ...], {})."""
        self._obs = self._rows.reset(seed)
        self._age = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        self._cut_short = 0  # steps for which first episodes may end early
        return self.get_observations(), {}

    def get_observations(self) -> TensorDict:
        """Return the current observations by group: [N, ...] each."""
        return self._tensors(self._obs)

    @property
    def episode_length_buf(self) -> Tensor:
        """Steps of the running episodes, [N] int64."""
        return self._age

    @episode_length_buf.setter
    def episode_length_buf(self, value: Tensor) -> None:
        if not supports(self.env, PartialReset):
            wanted = "unchanged (init_at_random_ep_len=False): this environment cannot restart single environments"
            raise ConfigError("episode_length_buf", "assigned", wanted)
        self._age = value.to(self.device, torch.int64, copy=True)
        self._cut_short = self.max_episode_length

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        """Step with actions [N, A], clamped to [-1, 1]; return (observations, rewards [N], dones [N] bool, extras)."""
        # rsl_rl collects in inference mode; a simulator that keeps such a tensor could not be used outside it again
        with torch.inference_mode(False), torch.no_grad():
            row = self._rows.step(actions)
            self._age += 1
            if self._cut_short > 0:
                row = self._cut(row)
            self._age.masked_fill_(row.done, 0)
            self._obs = row.obs
            extras = {
                "time_outs": row.time_out,
                "final_obs": self._tensors(row.final_obs),
                "final_lost": row.lost,
                "log": self._log(row),
            }
            return self.get_observations(), row.reward, row.done, extras

    def close(self) -> None:
        self.env.close()

    def _cut(self, row: Any) -> Any:
        """End the episodes whose assigned age has reached the limit."""
        self._cut_short -= 1
        late = (self._age >= self.max_episode_length) & ~row.done
        self._rows.obs = cast(PartialReset, self.env).reset_where(late)
        return row._replace(obs=self._rows.obs, done=row.done | late, time_out=row.time_out | late)

    def _log(self, row: Any) -> dict[str, Tensor]:
        """Return the means of the logged values [N]: over all rows, or those that ended an episode, if any did."""
        whole = [name for name, kind in self.env.spec.log_kinds.items() if kind == "episode"]
        means = {f"step/{name}": value.mean() for name, value in row.log.items() if name not in whole}
        ends = {f"episode/{k}": row.log[k][row.done].mean() for k in whole} if whole and row.done.any() else {}
        return {**means, **ends}

    def _tensors(self, obs: Obs) -> TensorDict:
        return TensorDict(dict(obs), batch_size=[self.num_envs], device=self.device)
