"""An environment with rsl_rl's interface as a ``VecEnv``: for ``pql.train(env=)`` and ``pql.check_env``."""

import inspect
from dataclasses import replace
from typing import Any

from torch import Tensor

from pql.envs.adapters.managers import Log
from pql.lab.describe import AUTO, Described
from pql.types import Obs, Step


def from_rsl_rl(env: Any, action_bound: float | str = AUTO, final_obs: str = "auto") -> "RslRlVec":
    """Return ``env`` as a ``VecEnv``: ``pql.train("algo=pql2", env=from_rsl_rl(env))``.

    Args:
        env: with the interface of rsl_rl 5 (observations by group), wrappers included. It is reset if it has ``reset``,
            and must not be stepped elsewhere.
        action_bound: the simulator's action for an action of 1: a number, ``limits`` (the joints'), or ``auto``:
            ``limits`` where actions are joint positions, else 1.
        final_obs: where the observations before a reset come from, see docs/guides/robot_stacks.md.
    Raises:
        ConfigError: a source, a bound or observations that this environment does not have.
    """
    return RslRlVec(env, action_bound, final_obs)


class RslRlVec:
    """See :func:`from_rsl_rl`."""

    def __init__(self, env: Any, action_bound: float | str, final_obs: str):
        self.env, self._described = env, Described(env, env.get_observations(), None, action_bound, final_obs)
        self.log = Log(self._described.spec.name, getattr(env, "unwrapped", env))
        self.log.add_reset(self._reset(None))
        self.spec = replace(self._described.spec, log=self.log.kinds)

    def reset(self, seed: int | None = None) -> Obs:
        """Restart all environments; return their observations, name -> [N, ...]."""
        self.log.seen(self._reset(seed))
        return self._described.obs(self.env.get_observations())

    def step(self, action: Tensor) -> Step:
        """Step with actions [N, A] in [-1, 1]."""
        answer = self.env.step(self._described.actions(action))
        row = self._described.step(answer)
        return row._replace(log=self.log.rows(row.first, answer[3]))

    def close(self) -> None:
        self.env.close()

    def _reset(self, seed: int | None) -> dict[str, Any]:
        """Reset and return the extras. Neither is part of rsl_rl's interface."""
        given = {} if seed is None else {"seed": seed % 2**31}
        if given and "seed" not in inspect.signature(getattr(self.env, "reset", dict)).parameters:
            getattr(self.env, "seed", int)(given.pop("seed"))
        answer = self.env.reset(**given) if hasattr(self.env, "reset") else None
        return answer[1] if isinstance(answer, tuple) else {}
