"""``Feedback``: an environment whose observations also say what was done last and what that was worth.

A recurrent policy takes both (Kapturowski et al. 2019, R2D2). As an observation group they are where every observation
is: in replay, in final observations, in evaluations, in the inputs of an exported policy. All of it stays on this side
of the environment, by its slot, however far away the simulator is.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pql.contract.env import Discrete, EnvSpec, ObsSpec, VecEnv
from pql.errors import ConfigError
from pql.types import Obs, Step

GROUP = "last"
"""Name of the group: [N, n + 1] float32, the last action's one-hot vector and the last reward; zeros where an episode
begins."""


class Feedback:
    """``env`` with the observation group ``last``.

    Everything else is the environment's own, what it offers beyond the contract included. The reward is as paid but for
    ``reward_clip``. A lost life begins no episode: what was done last is still told.

    Args:
        env: with discrete actions. It is this object's from now on.
        reward_clip: rewards are clipped to +- this in the observation alone; None: they are not.
    Raises:
        ConfigError: actions that are not discrete, or a group of that name that is there already.
    """

    def __init__(self, env: VecEnv, reward_clip: float | None = None):
        self.env, self.clip, self.spec = env, reward_clip, feedback_spec(env.spec)
        n, device = self.spec.num_envs, self.spec.device
        self._size = self.spec.obs[GROUP].shape[0]
        self._choices = torch.arange(self._size - 1, device=device)
        self._last = torch.zeros(n, self._size, device=device)
        self._sent = torch.zeros(n, dtype=torch.int64, device=device)  # actions of steps under way
        if hasattr(env, "state_dict"):
            self.state_dict, self.load_state_dict = self._state_dict, self._load_state_dict
        if hasattr(env, "reset_where"):
            self.reset_where = self._reset_where
        if hasattr(env, "send"):
            self.send, self.recv, self.answers = self._send, self._recv, self._answers
        if hasattr(env, "beside"):
            self.beside = self._beside

    def __getattr__(self, name: str) -> Any:
        """What an environment may offer besides, pictures say."""
        if name in ("env", "state_dict", "load_state_dict", "reset_where", "send", "recv", "answers", "beside"):
            raise AttributeError(name)
        return getattr(self.env, name)

    def reset(self, seed: int | None = None) -> Obs:
        self._last.zero_()
        return self._seen(self.env.reset(seed))

    def step(self, action: Tensor) -> Step:
        step, here = self._tell(self.env.step(action), action)
        self._last.copy_(here)
        return step

    def close(self) -> None:
        self.env.close()

    def _tell(self, step: Step, action: Tensor) -> tuple[Step, Tensor]:
        """A step [n] with what ``action`` [n] did, and what the next observation shows of it [n, ...]."""
        reward = step.reward if self.clip is None else step.reward.clamp(-self.clip, self.clip)
        one_hot = (action.unsqueeze(1) == self._choices).float()
        told = torch.cat((one_hot, reward.unsqueeze(1)), 1)
        here = torch.where(step.first.unsqueeze(1), 0.0, told)
        final = torch.where(step.valid.unsqueeze(1), told, here)  # in a filler row nothing was done
        obs, final_obs = {**step.obs, GROUP: here}, {**step.final_obs, GROUP: final}
        return step._replace(obs=obs, final_obs=final_obs), here

    def _seen(self, obs: Obs) -> Obs:
        return {**obs, GROUP: self._last.clone()}

    # -- what some environments have beyond the contract ------------------------------------------------------------

    def _reset_where(self, mask: Tensor) -> Obs:
        self._last.masked_fill_(mask.unsqueeze(1), 0.0)
        return self._seen(self.env.reset_where(mask))  # type: ignore[attr-defined]

    def _send(self, action: Tensor, ids: Tensor) -> None:
        self._sent[ids] = action
        self.env.send(action, ids)  # type: ignore[attr-defined]

    def _recv(self) -> tuple[Tensor, Step]:
        ids, step = self.env.recv()  # type: ignore[attr-defined]
        step, here = self._tell(step, self._sent[ids])
        self._last[ids] = here
        return ids, step

    def _answers(self, group: int) -> tuple[Tensor, Step]:
        """Of environments that answer when they can: whose answers have come, and the step of their whole group."""
        ids, step = self.env.answers(group)  # type: ignore[attr-defined]
        size = self.spec.num_envs // self.spec.groups
        part = slice(group * size, (group + 1) * size)
        step, here = self._tell(step, self._sent[part])
        came = torch.zeros(self.spec.num_envs, dtype=torch.bool)
        came[ids] = True
        fresh = came[part].to(here.device).unsqueeze(1)
        self._last[part] = torch.where(fresh, here, self._last[part])
        # The late ones act on what they acted on: nothing may change for them.
        return ids, step._replace(obs={**step.obs, GROUP: self._last[part].clone()})

    def _beside(self) -> VecEnv | None:
        """Its environments for evaluations, which are told the same."""
        env = self.env.beside()  # type: ignore[attr-defined]
        return None if env is None else Feedback(env, self.clip)

    def _state_dict(self) -> dict[str, Any]:
        return {"env": self.env.state_dict(), "last": self._last.clone()}  # type: ignore[attr-defined]

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        self.env.load_state_dict(state["env"])  # type: ignore[attr-defined]
        self._last.copy_(state["last"])


def feedback_spec(spec: EnvSpec) -> EnvSpec:
    """What an environment with this specification becomes.

    Raises:
        ConfigError: its actions are not discrete, or it has a group of that name.
    """
    if not isinstance(spec.action, Discrete):
        raise ConfigError("task", spec.name, f"a task with discrete actions; this one has {spec.action}")
    if GROUP in spec.obs:
        raise ConfigError("task", spec.name, f"a task without an observation group {GROUP!r}")
    return replace(spec, obs={**spec.obs, GROUP: ObsSpec((spec.action.n + 1,))})
