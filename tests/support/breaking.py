"""Environments with faults, for tests of how a run handles them."""

from typing import Any

import torch
from torch import Tensor

from pql.collect.nonfinite import column
from pql.contract.env import make_env
from pql.contract.registry import register
from pql.types import Obs, Step

NAN, INF = float("nan"), float("inf")


class Breaking:
    """``env`` with faults in states and rewards.

    A state stays NaN until its environment is restarted or begins a new episode; a reward is infinite, or larger than
    a float32 can be squared, in one step.

    Args:
        faults: by number of the step: ("state", "reward" or "large", which environments).
        restarts: single environments can be restarted.
        born: environments whose state is NaN after every reset.
    """

    def __init__(self, env: Any, faults: dict[int, list[tuple[str, Any]]], restarts: bool = True, born: Any = ()):
        self.env, self.spec, self.faults, self.born, self.time = env, env.spec, faults, list(born), 0
        self.sick = torch.zeros(self.spec.num_envs, dtype=torch.bool, device=self.spec.device)
        self.asked: list[list[int]] = []  # environments that were to be restarted
        if restarts:
            self.reset_where = self._reset_where

    def reset(self, seed: int | None = None) -> Obs:
        self.time = 0
        self.sick.zero_()
        self.sick[self.born] = True
        return self._shown(self.env.reset(seed))

    def _reset_where(self, mask: Tensor) -> Obs:
        self.asked.append(mask.nonzero().flatten().tolist())
        self.sick &= ~mask
        return self._shown(self.env.reset_where(mask))

    def step(self, action: Tensor) -> Step:
        assert not action.is_floating_point() or action.isfinite().all(), "a simulator is not to see this"
        step = self.env.step(action)
        for what, ids in self.faults.get(self.time, ()):
            if what == "state":
                self.sick[ids] = True
            else:
                where = torch.as_tensor(ids, device=self.spec.device)
                value = -3e38 if what == "large" else INF
                step = step._replace(reward=step.reward.clone().index_fill_(0, where, value))
        self.time += 1
        self.sick &= step.valid | ~step.first  # a filler row has the new episode's observations only
        final = self._shown(step.final_obs)
        self.sick &= ~step.first
        return step._replace(obs=self._shown(step.obs), final_obs=final)

    def _shown(self, obs: Obs) -> Obs:
        return {k: v.masked_fill(column(self.sick, v), NAN) if v.is_floating_point() else v for k, v in obs.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"env": self.env.state_dict(), "time": self.time, "sick": self.sick.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.env.load_state_dict(state["env"])
        self.time = int(state["time"])
        self.sick.copy_(state["sick"])

    def close(self) -> None:
        self.env.close()


def breaking(num_envs: int, device: Any, at: int, name: str = "pendulum") -> Breaking:
    """Create environments that all break in step ``at``."""
    return Breaking(make_env(name, num_envs, device), {at: [("state", range(num_envs))]})


register("breaking", breaking)
