"""Complete episodes of a policy on an environment: returns, lengths and successes."""

import math
import statistics
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from pql.contract.env import Box, Discrete, EnvSpec, MultiDiscrete, VecEnv
from pql.contract.rules import check_answer
from pql.engine import watchdog
from pql.errors import ConfigError
from pql.types import Obs, Step

LONGEST = 100_000  # steps of an episode, if neither the task nor the user sets a limit
CHECK_EVERY = 64  # steps between checks for the end of all episodes (a check is a host sync)


@dataclass(frozen=True)
class Evaluation:
    """Undiscounted returns, lengths (in steps) and successes of complete episodes.

    ``successes`` is None where the environment logs no term ``success``. ``terms``: mean of each logged value over
    the steps of all episodes, by name: reward terms, tracking errors. ``whole``: mean over the episodes of those values
    that a simulator logs once for an episode, at its end.
    """

    returns: list[float]
    lengths: list[float]
    successes: list[bool] | None = None
    terms: dict[str, float] = field(default_factory=dict)
    whole: dict[str, float] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.returns)

    @property
    def median(self) -> float:
        return statistics.median(self.returns)

    @property
    def iqm(self) -> float:
        """Interquartile mean: the mean of the middle half (Agarwal et al. 2021)."""
        cut = len(self.returns) // 4
        return statistics.fmean(sorted(self.returns)[cut : len(self.returns) - cut])

    @property
    def length(self) -> float:
        """Mean length in steps."""
        return statistics.fmean(self.lengths)

    @property
    def success(self) -> float | None:
        """Share of episodes that succeeded; None where the task does not define it."""
        return None if self.successes is None else statistics.fmean(self.successes)

    def measures(self) -> dict[str, float]:
        """Return the measures by name, as in metrics.jsonl (there below ``eval/``) and in summary.json."""
        out = {
            "return_mean": self.mean,
            "return_median": self.median,
            "return_iqm": self.iqm,
            "length_mean": self.length,
        }
        if self.success is not None:
            out["success"] = self.success
        for kind, values in (("step", self.terms), ("episode", self.whole)):
            out |= {f"{kind}/{name}": value for name, value in values.items()}
        return out


class StoppedError(Exception):
    """An evaluation was stopped before its episodes had ended."""


@dataclass(frozen=True)
class EpisodeRules:
    """Rules of an evaluation: the episodes that count, and how the policy acts in them.

    Attributes:
        episodes: number in all; None: the first of every environment.
        epsilon: probability of a random action, for discrete actions.
        staggered: a reset starts in the middle of episodes; these are not counted, the next ones are.
        max_steps: steps after which an episode is cut; None: ``LONGEST``, if the environment has no time limit. If it
            has none, an environment whose episode was cut contributes no later ones: they might never begin.
    """

    episodes: int | None = None
    epsilon: float = 0.0
    staggered: bool = False
    max_steps: int | None = None


@torch.no_grad()
def run_episodes(
    env: VecEnv,
    policy: Callable[[Obs], Tensor],
    seed: int,
    rules: EpisodeRules | None = None,
    stop: threading.Event | None = None,
    ended: Callable[[int], object] = lambda count: None,
) -> Evaluation:
    """Run complete episodes after a reset with ``seed``, which random actions are drawn from as well.

    Each environment runs a number of episodes fixed in advance: taking the first ones to end would favour short ones.
    Rewards after an environment's last episode do not count, nor do filler rows. An episode ends where the next one
    begins: a lost life does not end it, an unannounced restart does. It succeeded if ``log["success"]`` was above 0 on
    any of its rows. An environment that is never stepped (an empty slot for remote actors) yields no episode. A
    recurrent policy (with a method ``reset(mask)``) is reset where episodes begin.

    Args:
        ended: called from time to time with the number of episodes that have ended.
    Returns:
        All first episodes in the order of the environments, then all second ones, etc.
    Raises:
        StoppedError: ``stop`` was set.
    """
    title, forget = f"the simulator {env.spec.name}", getattr(policy, "reset", lambda first=None: None)
    rules = rules or EpisodeRules()
    watchdog.touch(title)
    check_answer("reset", obs := env.reset(seed), env.spec)
    watchdog.touch()
    forget()
    ended(0)
    explore, tally = random_actions(env, rules.epsilon, seed), _Tally(env.spec, rules)
    for i in range(1, tally.rows + 1):
        if stop is not None and stop.is_set():
            raise StoppedError
        action = explore(policy(obs))
        watchdog.touch(title)
        step = env.step(action)
        watchdog.stepped()
        if i == 1:
            check_answer("step", step, env.spec)
        tally.add(step)
        obs = step.obs
        forget(step.first)
        if i % CHECK_EVERY == 0:
            so_far, missing = tally.progress()
            ended(so_far)
            if not missing:
                break
    return tally.evaluation()


class _Tally:
    """Sums and counts of N environments' episodes, on their device.

    Attributes:
        rows: number of steps after which all episodes have ended.
    """

    def __init__(self, spec: EnvSpec, rules: EpisodeRules):
        n, device = spec.num_envs, spec.device
        total = n if rules.episodes is None else rules.episodes
        most = -(-total // n)
        self.quota = total // n + (torch.arange(n, device=device) < total % n).long()  # [N] episodes to play
        self.place, self.count = torch.arange(most, device=device), torch.zeros_like(self.quota)
        self.running = torch.zeros(3, n, device=device)  # return, length, successful rows of the current episode
        self.done = torch.zeros(3, n, most, device=device)
        self.judged, self.named = "success" in spec.log, {k: v for k, v in spec.log_kinds.items() if k != "success"}
        self.sums = torch.zeros(len(self.named), dtype=torch.float64, device=device)  # of logged values
        self.ended = torch.zeros((), dtype=torch.int64, device=device)  # episodes that nobody cut short
        self.live = (self.quota > 0) & (not rules.staggered)  # inside a counted episode
        self.there = torch.zeros_like(self.live)  # has made a step: a slot for remote actors may be empty
        declared, filler = spec.max_episode_steps, spec.autoreset == "next_step"  # a filler row marks the end
        self.unlimited, self.cap = declared is None, rules.max_steps or (math.inf if declared else LONGEST)
        between = (declared or int(self.cap)) + filler  # rows until the next episode begins
        last = int(min(declared or self.cap, self.cap)) + filler  # of the last one
        self.rows = (most - 1 + rules.staggered) * between + last

    def add(self, step: Step) -> None:
        """Count a step, fields [N, ...]."""
        success = (step.log["success"] > 0).float() if self.judged else torch.zeros_like(step.reward)
        row = torch.stack([step.reward, torch.ones_like(step.reward), success])
        full = self.running[1] >= self.cap
        counts = self.live & step.valid & ~full
        self.running += torch.where(counts, row, 0)
        if self.named:
            logged = torch.stack([step.log[name].double() for name in self.named])
            self.sums += torch.where(counts, logged, 0.0).sum(1)
        self.there |= step.valid
        cut = self.live & step.valid & full & ~step.first
        # The filler row that a new actor begins with ends nothing.
        over = self.live & step.first & (self.running[1] > 0) | cut
        if self.unlimited:
            self.quota = torch.where(cut, self.count + 1, self.quota)
        self._store(over)
        self.ended += (over & ~cut).sum()
        self.count += over
        self.running = torch.where(over, 0, self.running)
        self.live = (self.live & ~cut | step.first) & (self.count < self.quota)

    def _store(self, over: Tensor) -> None:
        """Store the running episodes of the environments ``over`` [N] bool."""
        at = over[:, None] & (self.place == self.count[:, None])
        self.done = torch.where(at, self.running[..., None], self.done)

    def progress(self) -> tuple[int, int]:
        """Return the number of episodes that have ended, and of environments with more to come. A host sync."""
        so_far, missing = torch.stack([self.count.sum(), (self.there & (self.count < self.quota)).sum()]).tolist()
        return so_far, missing

    def evaluation(self) -> Evaluation:
        """Count what still runs as ended, and return all episodes."""
        self.live &= self.running[1] > 0
        self._store(self.live)
        played = (self.place < (self.count + self.live)[:, None]).T  # [most, N]
        returns, lengths, successes = self.done.transpose(1, 2)[:, played].tolist()
        sums, steps, ended = (
            dict(zip(self.named, self.sums.tolist(), strict=True)),
            max(sum(lengths), 1.0),
            int(self.ended),
        )
        whole = [name for name, kind in self.named.items() if kind == "episode"]
        terms = {name: total / steps for name, total in sums.items() if name not in whole}
        ends = {name: sums[name] / ended for name in whole if ended}
        return Evaluation(returns, lengths, [rows > 0 for rows in successes] if self.judged else None, terms, ends)


def limit_note(spec: EnvSpec, max_steps: int | None) -> str | None:
    """Return what a user should know before an evaluation with nobody's limit; None if there is one."""
    if spec.max_episode_steps is not None or max_steps is not None:
        return None
    return f"{spec.name} has no time limit: evaluations cut its episodes after {LONGEST:,} steps (eval.max_steps)"


def random_actions(env: VecEnv, epsilon: float, seed: int) -> Callable[[Tensor], Tensor]:
    """Return a function that replaces a share ``epsilon`` of discrete actions [N], or [N, K], by uniform ones. The
    identity if it is 0. Raises ``ConfigError``: the actions are not discrete."""
    check_acting_epsilon(epsilon, env.spec)
    if epsilon == 0:
        return lambda action: action
    device, space = env.spec.device, cast(Discrete | MultiDiscrete, env.spec.action)
    gen = torch.Generator(device).manual_seed(seed)

    def explore(action: Tensor) -> Tensor:
        if isinstance(space, MultiDiscrete):
            chosen = torch.rand(len(action), 1, generator=gen, device=device) < epsilon
            return torch.where(chosen, space.random(len(action), gen), action)
        random = space.random(len(action), gen)
        return torch.where(torch.rand(action.shape, generator=gen, device=device) < epsilon, random, action)

    return explore


def check_acting_epsilon(epsilon: float, spec: EnvSpec) -> None:
    """Raise ``ConfigError`` for random actions if actions are continuous."""
    if epsilon > 0 and isinstance(spec.action, Box):
        raise ConfigError("eval.epsilon", epsilon, f"0: the actions of {spec.name} are continuous")
