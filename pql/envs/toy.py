"""Test environments with known results: ``Counter`` (closed form of every row), ``LQR`` (the Riccati equation has its
Q*) and ``Recall`` (needs a memory).

They test collectors, replay and learners, and are the smallest examples of the environment contract.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pql.contract.env import Box, EnvSpec, ObsSpec
from pql.contract.registry import takes
from pql.envs.classic import TorchEnv, Transition, positive, times
from pql.errors import ConfigError
from pql.types import Obs, Step

FILLER_REWARD = -1000.0
"""Reward of ``Counter``'s filler rows, so large that using one by mistake is visible."""

LOST = -1.0
"""Both entries of the final observation that ``Counter`` does not report under next-step autoreset."""


@dataclass(frozen=True)
class CounterSettings:
    """Keywords of :class:`Counter`.

    Attributes:
        autoreset: as in ``EnvSpec``.
        final_obs: as in ``EnvSpec``; ``never`` returns the next episode's observation as the final one (same step),
            or ``LOST`` (next step), with ``final_ok`` False.
        episode_length: time limit in rows.
        terminate_every: 0 switches terminations off.
        restart_every: 0 switches unannounced restarts off.
        stagger: episode 0 of environment i starts at step i mod episode_length.
        action_dim: A.
    """

    autoreset: str = "same_step"
    final_obs: str = "always"
    episode_length: int = 7
    terminate_every: int = 3
    restart_every: int = 0
    stagger: bool = False
    action_dim: int = 2


class Counter:
    """obs = [episode id, step]: [N, 2] float32, both from 0, so a transition identifies itself. Actions have no effect.

    Everything is a function of environment i, episode e and step s, in every autoreset mode:

        reward     reward_of(i, e, s) = (i mod 8) + 10 (e mod 8) + s / 8     (exact in float32)
        length     episodes with (i + e) mod terminate_every == 0 terminate after 1 + (2 i + 3 e) mod episode_length
                   rows (also on the limit itself, where terminated wins); the others are truncated after
                   ``episode_length`` rows
        restart    episodes with (i + e) mod restart_every == restart_every - 1 that last longer than two rows restart
                   unannounced on their second row: ``first`` without an end, and the true successor is lost

    Filler rows have the reward ``FILLER_REWARD``. ``log["rows"]`` is 1 on valid rows, so it sums to the episode's
    length.

    Keywords: those of :class:`CounterSettings`.

    Raises:
        ConfigError: a value out of range.
    """

    capturable = True
    generators: tuple[()] = ()  # nothing is drawn

    @takes(CounterSettings)
    def __init__(self, num_envs: int = 64, device: str | torch.device = "cpu", **keywords: Any):
        self.spec, settings = self.describe(num_envs, device, **keywords), CounterSettings(**keywords)
        device = self.spec.device
        self.episode_length, self.terminate_every = settings.episode_length, settings.terminate_every
        self.restart_every = settings.restart_every
        self._env = torch.arange(num_envs, device=device)
        self._start = self._env % settings.episode_length if settings.stagger else torch.zeros_like(self._env)
        self._episode = torch.zeros_like(self._env)
        self._step = self._start.clone()
        self._pending = torch.zeros(num_envs, dtype=torch.bool, device=device)  # the next row is a filler

    @classmethod
    def describe(cls, num_envs: int = 64, device: str | torch.device = "cpu", **keywords: Any) -> EnvSpec:
        """Return the ``EnvSpec`` of an environment with these arguments."""
        settings = CounterSettings(**keywords)
        if settings.autoreset not in ("same_step", "next_step"):
            raise ConfigError("autoreset", settings.autoreset, "same_step or next_step")
        if settings.final_obs not in ("always", "on_done", "never"):
            raise ConfigError("final_obs", settings.final_obs, "always, on_done or never")
        for setting in ("terminate_every", "restart_every"):
            if getattr(settings, setting) != 0:
                positive(setting, getattr(settings, setting))
        return EnvSpec(
            name="counter",
            num_envs=positive("num_envs", num_envs),
            obs={"policy": ObsSpec((2,))},
            action=Box(positive("action_dim", settings.action_dim)),
            device=torch.device(device),
            max_episode_steps=positive("episode_length", settings.episode_length),
            autoreset=settings.autoreset,  # type: ignore[arg-type]
            final_obs=settings.final_obs,  # type: ignore[arg-type]
            log=("rows",),
            info={"restarts": True} if settings.restart_every else {},
        )

    def reward_of(self, env: Tensor, episode: Tensor, step: Tensor) -> Tensor:
        """Reward of the row in which ``env`` acts at ``step`` of ``episode`` (integers, any one shape): float32."""
        return (env % 8).float() + 10.0 * (episode % 8) + step / 8

    def terminates(self, env: Tensor, episode: Tensor) -> Tensor:
        """Return True where the episode ends by termination, False where by the time limit."""
        if not self.terminate_every:
            return torch.zeros_like(env + episode, dtype=torch.bool)
        return (env + episode) % self.terminate_every == 0

    def length_of(self, env: Tensor, episode: Tensor) -> Tensor:
        """Return the step count at which the episode ends, int64, ignoring restarts."""
        short = 1 + (2 * env + 3 * episode) % self.episode_length
        return torch.where(self.terminates(env, episode), short, self.episode_length)

    def restarts(self, env: Tensor, episode: Tensor) -> Tensor:
        """Return True where the episode restarts unannounced on its second row."""
        if not self.restart_every:
            return torch.zeros_like(env + episode, dtype=torch.bool)
        return ((env + episode) % self.restart_every == self.restart_every - 1) & (self.length_of(env, episode) > 2)

    def _obs(self) -> Tensor:
        return torch.stack((self._episode, self._step), 1).float()

    def reset(self, seed: int | None = None) -> Obs:
        """Return to episode 0; ``seed`` has no effect."""
        self._episode.zero_()
        self._step.copy_(self._start)
        self._pending.zero_()
        return {"policy": self._obs()}

    def reset_where(self, mask: Tensor) -> Obs:
        """Start the next episode where ``mask`` [N] bool is set; return all current observations, [N, ...]."""
        self._episode += mask.long()
        self._step.masked_fill_(mask, 0)
        self._pending &= ~mask
        return {"policy": self._obs()}

    def step(self, action: Tensor) -> Step:
        filler = self._pending.clone()
        reward = self.reward_of(self._env, self._episode, self._step).masked_fill(filler, FILLER_REWARD)
        step = self._step + 1
        ended = (step >= self.length_of(self._env, self._episode)) & ~filler
        terminated = ended & self.terminates(self._env, self._episode)
        restart = (step == 2) & self.restarts(self._env, self._episode) & ~ended & ~filler
        same = self.spec.autoreset == "same_step"
        final = torch.stack((self._episode, step), 1).float()
        first = restart | (ended if same else filler)
        self._episode += first.long()
        self._step.copy_(torch.where(first, torch.zeros_like(step), step))
        self._pending.copy_(ended if not same else torch.zeros_like(ended))
        obs = self._obs()
        lost = ended if self.spec.final_obs == "never" else torch.zeros_like(ended)
        if not same:
            obs = obs.masked_fill(lost[:, None], LOST)
        final = torch.where((ended & ~lost)[:, None], final, obs)
        seen, ends, log = {"policy": obs}, {"policy": final}, {"rows": (~filler).float()}
        return Step(seen, reward, terminated, ended & ~terminated, first, ends, ~(lost | restart), ~filler, log)

    def close(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"episode": self._episode.clone(), "step": self._step.clone(), "pending": self._pending.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._episode.copy_(state["episode"])
        self._step.copy_(state["step"])
        self._pending.copy_(state["pending"])


class Recall(TorchEnv):
    """A cue of -1 or 1 is in the first observation only; the reward of the last action is cue * action.

    obs [N, 2]: cue (0 after the first row), rows so far / the time limit. action [N, 1] in [-1, 1]. The best return is
    1, and 0 without a memory. The row at the time limit terminates, as a success if the action has the cue's sign.
    """

    name, obs_size, action_size, state_size, time_limit = "recall", 2, 1, 2, 6
    terms = ("success",)
    capturable = True

    def draw(self) -> Tensor:
        cue = torch.where(self.uniform(1) < 0, -1.0, 1.0)
        return torch.cat((cue, torch.zeros_like(cue)), 1)

    def observe(self, state: Tensor) -> Tensor:
        cue, row = state.unbind(1)
        return torch.stack((torch.where(row == 0, cue, 0.0), row / self._limit), 1)

    def advance(self, state: Tensor, action: Tensor) -> Transition:
        cue, row = state.unbind(1)
        last = row + 1 >= self._limit
        reward = torch.where(last, cue * action[:, 0], 0.0)
        return Transition(torch.stack((cue, row + 1), 1), reward, last, {"success": (reward > 0).float()})


class LQR(TorchEnv):
    """Linear-quadratic regulator: x' = A x + B u, reward = -(x' Q x + u' R u) of the state before the step, no noise.

    Two damped, coupled masses: x = (positions, velocities), obs = x [N, 4], action = u [N, 2] in [-1, 1]. Starts are
    uniform in [-0.5, 0.5]; episodes are cut by the time limit only, so the value of a truncated row is the value of
    an endless problem. From those starts no sequence of allowed actions reaches a state in which the optimal control
    would leave [-1, 1] (for any discount up to 1), so the Q* of the unbounded problem is exact on all reachable data.
    """

    name, obs_size, action_size, state_size, time_limit = "lqr", 4, 2, 4, 50
    terms = ("state_cost", "action_cost")
    capturable = True
    start_range = 0.5

    def setup(self) -> None:
        wide = partial(torch.tensor, dtype=torch.float64, device=self.spec.device)
        self.A = wide([[1.0, 0.0, 0.2, 0.0], [0.0, 1.0, 0.0, 0.2], [-0.4, 0.1, 0.5, 0.0], [0.1, -0.4, 0.0, 0.5]])
        self.B = wide([[0.0, 0.0], [0.0, 0.0], [0.2, 0.0], [0.0, 0.2]])
        self.Q = torch.diag(wide([1.0, 1.0, 0.1, 0.1]))
        self.R = torch.diag(wide([0.5, 0.5]))
        self._float = tuple(m.float() for m in (self.A, self.B, self.Q, self.R))

    def draw(self) -> Tensor:
        return self.uniform(4) * self.start_range

    def observe(self, state: Tensor) -> Tensor:
        return state.clone()

    def advance(self, state: Tensor, action: Tensor) -> Transition:
        A, B, Q, R = self._float
        log = {"state_cost": -(times(state, Q) * state).sum(1), "action_cost": -(times(action, R) * action).sum(1)}
        reward = log["state_cost"] + log["action_cost"]
        return Transition(times(state, A.T) + times(action, B.T), reward, torch.zeros_like(self._true), log)
