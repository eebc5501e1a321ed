"""Demonstrations of a trained policy: whole episodes, in a file that ``replay.demos`` and ``replay.prefill`` read."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pql.config.fields import Range
from pql.config.files import expanded
from pql.config.validate import STEPS, resolve_device
from pql.contract.env import Box, VecEnv
from pql.data.frames import newest_frame
from pql.data.transitions import Columns, save_rows
from pql.engine import watchdog
from pql.engine.placement import set_precision
from pql.errors import ConfigError, writing
from pql.run.episodes import EpisodeRules, Evaluation, run_episodes
from pql.run.evaluation import EvaluationPlan, simulator
from pql.run.policy import open_stored
from pql.types import Obs, Step

TRIES = 200  # episodes in a row of which none is kept: then no later one is expected


class Recording(NamedTuple):
    """What was written.

    Attributes:
        steps: transitions.
        played: episodes, those that were not kept included.
        returns: of the episodes in the file.
    """

    file: Path
    task: str
    steps: int
    played: int
    returns: list[float]


@dataclass(frozen=True)
class Wanted:
    """What is recorded.

    Attributes:
        steps: transitions after which the recording ends, with the episodes that have begun; None: the plan's episodes.
        noise: standard deviation of normal noise on continuous actions, which are in [-1, 1].
        min_return: least return of an episode that is kept.
        success_only: keep only episodes in which ``log["success"]`` was above 0.
    Raises:
        ConfigError: a number out of range.
    """

    steps: int | None = None
    noise: float = 0.0
    min_return: float | None = None
    success_only: bool = False

    def __post_init__(self) -> None:
        STEPS.check("steps", self.steps)
        Range(0, 10).check("noise", self.noise)

    def keeps(self, result: Evaluation) -> list[bool]:
        """Return which episodes are kept."""
        good = [self.min_return is None or total >= self.min_return for total in result.returns]
        return [a and (b or not self.success_only) for a, b in zip(good, result.successes or good, strict=True)]

    def check_progress(self, idle: int, best: float) -> None:
        """Raise ``ConfigError`` after ``TRIES`` episodes of which none was kept; ``best``: their best return."""
        if idle >= TRIES:
            name = "success_only" if self.min_return is None else "min_return"
            what = f"what the policy reaches: of {idle:,} episodes none is kept; the best return is {best:.6g}"
            raise ConfigError(name, getattr(self, name), what)

    def check(self, env: VecEnv) -> None:
        """Raise ``ConfigError`` for what the task does not have."""
        if self.noise > 0 and not isinstance(env.spec.action, Box):
            raise ConfigError("noise", self.noise, f"0: the actions of {env.spec.name} are discrete (epsilon=0.1)")
        if self.success_only and "success" not in env.spec.log:
            logged = ", ".join(env.spec.log) or "nothing"
            raise ConfigError("success_only", True, f"a task that logs success; {env.spec.name} logs {logged}")


class Recorder:
    """Environments that remember what happens in them since their last reset, on the host."""

    def __init__(self, env: VecEnv, noise: float, seed: int):
        self.env, self.spec, self.noise = env, env.spec, noise
        self.gen = torch.Generator(env.spec.device).manual_seed(seed)
        self.rows: list[Columns] = []  # one of each step, [N, ...]

    def reset(self, seed: int | None = None) -> Obs:
        self.rows, self.obs = [], self.env.reset(seed)
        return self.obs

    def step(self, action: Tensor) -> Step:
        """Step all environments. Noise is added to ``action`` before."""
        if isinstance(self.spec.action, Box):  # as the simulator clamps it
            if self.noise > 0:
                action = action + self.noise * torch.randn(action.shape, generator=self.gen, device=action.device)
            action = action.clamp(-1, 1)
        step = self.env.step(action)
        facts = {k: getattr(step, k) for k in ("reward", "terminated", "truncated", "first", "valid", "final_ok")}
        shown = {"obs": self.obs, "final": step.final_obs}
        for k, obs in shown.items():
            facts |= {f"{k}.{group}": newest_frame(v, self.spec.obs[group].stack) for group, v in obs.items()}
        self.rows.append({k: v.cpu() for k, v in {"action": action, **facts}.items()})
        self.obs = step.obs
        return step

    def close(self) -> None:
        self.env.close()

    def first_episodes(self, lengths: dict[int, int]) -> list[Columns]:
        """Return the first episodes of some environments as columns [L, ...] (:func:`pql.data.transitions`).

        Where the final observation is known, a filler row has it.

        Args:
            lengths: steps of the episode, by environment.
        """
        whole = {k: torch.stack([row[k] for row in self.rows]) for k in self.rows[0]}  # [T, N, ...]
        return [_episode(whole, i, length) for i, length in lengths.items()]


def _episode(whole: Columns, i: int, length: int) -> Columns:
    """Return the first ``length`` valid rows of environment ``i`` of columns [T, N, ...]."""
    at = whole["valid"][:, i].nonzero().flatten()[:length]
    one = {k: v[at, i] for k, v in whole.items()}
    last = {k: v[-1:] for k, v in one.items()}
    cut = ~last["terminated"] & ~last["first"]  # by a limit of this recording
    one["truncated"][-1:] |= cut
    known = bool((last["final_ok"] & (one["truncated"][-1:] | last["terminated"])).item())
    filler = {k: last[f"final{k[3:]}"] if k.startswith("obs.") else torch.zeros_like(v) for k, v in last.items()}
    one["first"] = torch.zeros_like(one["first"])
    kept = {k: torch.cat((v, filler[k][:known])) for k, v in one.items() if not k.startswith("final")}
    kept["first"][-1] = True
    return kept


def rows_of_episodes(episodes: list[Columns]) -> Columns:
    """Join episodes, [L, ...] each, to the rows of one environment, [T, 1, ...]; observations have T + 1."""
    joined = {k: torch.cat([one[k] for one in episodes]) for k in episodes[0]}
    ends = {k: torch.cat((v, v[-1:])) if k.startswith("obs.") else v for k, v in joined.items()}
    return {k: v[:, None].contiguous() for k, v in ends.items()}


def record_demonstrations(
    path: str | Path,
    out: str | Path,
    plan: EvaluationPlan,
    wanted: Wanted,
    kept: Callable[[int], object] = lambda count: None,
) -> Recording:
    """Play a stored policy, and write the transitions of the episodes that ``wanted`` keeps.

    Args:
        path: a run, checkpoint or export.
        out: the file, replaced if it exists.
        kept: called with the number of episodes so far.
    Raises:
        ConfigError: no policy there, or no episode that ``wanted`` keeps.
    """
    file = expanded("out", out)
    if file.suffix != ".safetensors":
        raise ConfigError("out", out, "a file name that ends in .safetensors")
    stored = open_stored(path, resolve_device(plan.device), plan.trust)
    if plan.play is not None:
        stored = stored.for_play(plan.play)
    set_precision(stored.config.placement)
    count = plan.num_envs if wanted.steps else min(plan.num_envs, plan.episodes)
    epsilon = stored.config.eval.epsilon if plan.epsilon is None else plan.epsilon
    rules = EpisodeRules(count, epsilon, max_steps=plan.max_steps or stored.config.eval.max_steps)
    with watchdog.guarded(), simulator(stored, count, rules, "the recording") as env:
        wanted.check(env)
        tape = Recorder(env, wanted.noise, plan.seed)
        episodes, returns, played = _episodes(tape, stored.policy, plan, wanted, rules, kept)
    with writing("out", file, "file"):
        save_rows(rows_of_episodes(episodes), file)
    steps = sum(int(one["valid"].sum()) for one in episodes)
    return Recording(file, stored.config.task.title, steps, played, returns)


def _episodes(
    tape: Recorder,
    policy: Callable[[Obs], Tensor],
    plan: EvaluationPlan,
    wanted: Wanted,
    rules: EpisodeRules,
    kept: Callable[[int], object],
) -> tuple[list[Columns], list[float], int]:
    """Return the episodes that are kept, their returns, and the number of episodes that were played.

    Each environment plays one episode after every reset, so that short episodes are not preferred. The seed of reset i
    is ``plan.seed + i``.
    """
    episodes: list[Columns] = []
    returns: list[float] = []
    steps, played, idle, best, seed = 0, 0, 0, -math.inf, plan.seed
    while steps < wanted.steps if wanted.steps else len(episodes) < plan.episodes:
        count = tape.spec.num_envs if wanted.steps else min(tape.spec.num_envs, plan.episodes - len(episodes))
        result = run_episodes(tape, policy, seed, replace(rules, episodes=count))
        good = {i: int(result.lengths[i]) for i, keep in enumerate(wanted.keeps(result)) if keep}
        episodes += tape.first_episodes(good)
        returns += [result.returns[i] for i in good]
        steps, played, seed = steps + sum(good.values()), played + count, seed + 1
        idle, best = 0 if good else idle + count, max(best, *result.returns)
        kept(len(episodes))
        wanted.check_progress(idle, best)
    return episodes, returns, played
