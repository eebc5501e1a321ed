"""``LastAction``: wrapper that adds the last action and the last reward to the observations.

Recurrent policies read both (Kapturowski et al. 2019, R2D2). As an observation group they are part of the replay, of
final observations, of evaluations and of the inputs of an exported policy. With remote simulators the wrapper stays in
the learner's process.
"""

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from pql.contract.env import Box, Discrete, EnvSpec, MultiDiscrete, ObsSpec, VecEnv, capturable
from pql.contract.optional import AsyncEnv, GroupedEnv, PartialReset, Resumable, WithEvaluation, supports
from pql.contract.rules import check_answer
from pql.errors import ConfigError
from pql.types import Obs, Step

GROUP = "last"
"""Name of the group: [N, n + 1] float32, the one-hot last action and the last reward; zeros where an episode begins. Of
several actions at once, each is one-hot, and n is the sum of their numbers."""


class LastAction:
    """``env`` with the additional observation group ``last``, [N, n + 1] for n discrete actions.

    All other members, optional ones included, are those of ``env``. A lost life begins no episode, and does not zero
    the group.

    Args:
        env: environment with discrete actions. This object owns it.
        reward_clip: clip the observed reward to [-reward_clip, reward_clip]; ``Step.reward`` is unchanged. None: no
            clipping.
    Raises:
        ConfigError: the actions are continuous, or ``env`` has a group ``last`` already.
    """

    def __init__(self, env: VecEnv, reward_clip: float | None = None):
        self.env, self.clip, self.spec = env, reward_clip, last_action_spec(env.spec)
        n, device = self.spec.num_envs, self.spec.device
        self._size = self.spec.obs[GROUP].shape[0]
        action = cast(Discrete | MultiDiscrete, env.spec.action)
        counts = (action.n,) if isinstance(action, Discrete) else action.nvec
        # Each number of the one-hot part belongs to one of the K actions, and to one of that action's choices.
        self._owner = torch.tensor([k for k, n in enumerate(counts) for _ in range(n)], device=device)
        self._choices = torch.tensor([i for n in counts for i in range(n)], device=device)
        self._last = torch.zeros(n, self._size, device=device)
        self._sent = torch.zeros(n, *action.shape, dtype=torch.int64, device=device)  # actions of pending steps
        self._checked = False  # that steps are as the specification says
        if supports(env, Resumable):
            self.state_dict, self.load_state_dict = self._state_dict, self._load_state_dict
        if supports(env, PartialReset):
            self.reset_where = self._reset_where
        if hasattr(env, "send"):
            self.send, self.recv, self.answers = self._send, self._recv, self._answers
        if supports(env, WithEvaluation):
            self.beside = self._beside

    def __getattr__(self, name: str) -> Any:
        """Forward other optional members, such as ``render``, to ``env``."""
        if name in ("env", "state_dict", "load_state_dict", "reset_where", "send", "recv", "answers", "beside"):
            raise AttributeError(name)
        return getattr(self.env, name)

    @property
    def capturable(self) -> bool:
        """True if the step of ``env`` can be captured."""
        return capturable(self.env)

    def reset(self, seed: int | None = None) -> Obs:
        """Restart all environments; return their observations, [N, ...]."""
        self._last.zero_()
        check_answer("reset", shown := self.env.reset(seed), self.env.spec)
        return self._seen(shown)

    def step(self, action: Tensor) -> Step:
        """Step all environments with ``action`` [N] or [N, K] int64."""
        step, here = self._add_last(self.env.step(action), action)
        self._last.copy_(here)
        return step

    def close(self) -> None:
        """Close ``env``."""
        self.env.close()

    def _add_last(self, step: Step, action: Tensor) -> tuple[Step, Tensor]:
        """Add the group to a step [n, ...] taken with ``action`` [n, ...]; return it with the group, [n, ...]."""
        if not self._checked:
            check_answer("step", step, self.env.spec, len(action))
            self._checked = True
        reward = step.reward if self.clip is None else step.reward.clamp(-self.clip, self.clip)
        one_hot = (action.view(len(action), -1).index_select(1, self._owner) == self._choices).float()
        last = torch.cat((one_hot, reward.unsqueeze(1)), 1)
        here = torch.where(step.first.unsqueeze(1), 0.0, last)
        final = torch.where(step.valid.unsqueeze(1), last, here)  # a filler row has no action
        obs, final_obs = {**step.obs, GROUP: here}, {**step.final_obs, GROUP: final}
        return step._replace(obs=obs, final_obs=final_obs), here

    def _seen(self, obs: Obs) -> Obs:
        return {**obs, GROUP: self._last.clone()}

    # -- optional members of VecEnv ---------------------------------------------------------------------------------

    def _reset_where(self, mask: Tensor) -> Obs:
        self._last.masked_fill_(mask.unsqueeze(1), 0.0)
        return self._seen(cast(PartialReset, self.env).reset_where(mask))

    def _send(self, action: Tensor, ids: Tensor) -> None:
        self._sent[ids] = action
        cast(GroupedEnv, self.env).send(action, ids)

    def _recv(self) -> tuple[Tensor, Step]:
        ids, step = cast(GroupedEnv, self.env).recv()
        step, here = self._add_last(step, self._sent[ids])
        self._last[ids] = here
        return ids, step

    def _answers(self, group: int) -> tuple[Tensor, Step]:
        """As ``AsyncEnv.answers``: ids [k] of the environments that answered, and the step of their group, [n, ...]."""
        ids, step = cast(AsyncEnv, self.env).answers(group)
        size = self.spec.num_envs // self.spec.groups
        part = slice(group * size, (group + 1) * size)
        step, here = self._add_last(step, self._sent[part])
        came = torch.zeros(self.spec.num_envs, dtype=torch.bool)
        came[ids] = True
        fresh = came[part].to(here.device).unsqueeze(1)
        self._last[part] = torch.where(fresh, here, self._last[part])
        # Late environments keep their observation: their action for it is still pending.
        return ids, step._replace(obs={**step.obs, GROUP: self._last[part].clone()})

    def _beside(self) -> VecEnv | None:
        """Return the environments for evaluation, wrapped alike."""
        env = cast(WithEvaluation, self.env).beside()
        return None if env is None else LastAction(env, self.clip)

    def _state_dict(self) -> dict[str, Any]:
        return {"env": cast(Resumable, self.env).state_dict(), "last": self._last.clone()}

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        cast(Resumable, self.env).load_state_dict(state["env"])
        self._last.copy_(state["last"])


def last_action_spec(spec: EnvSpec) -> EnvSpec:
    """Return ``spec`` with the observation group ``last``. Raises ``ConfigError``: the actions are continuous, or
    ``spec`` has a group ``last`` already."""
    if isinstance(spec.action, Box):
        raise ConfigError("task", spec.name, f"a task with discrete actions; this one has {spec.action}")
    if GROUP in spec.obs:
        raise ConfigError("task", spec.name, f"a task without an observation group {GROUP!r}")
    size = spec.action.n if isinstance(spec.action, Discrete) else sum(spec.action.nvec)
    return replace(spec, obs={**spec.obs, GROUP: ObsSpec((size + 1,))})
