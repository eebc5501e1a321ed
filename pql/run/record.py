"""Demonstrations of a trained policy: whole episodes, in a file that ``replay.demos`` and ``replay.prefill`` read."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pql.config.fields import Range
from pql.config.files import expanded
from pql.config.validate import STEPS, resolve_device
from pql.contract.env import Box, EnvSpec, VecEnv
from pql.contract.stacks import newest_frame
from pql.data.transitions import Columns, save_rows
from pql.engine import watchdog
from pql.engine.placement import set_precision
from pql.errors import ConfigError, writing
from pql.run.episodes import Evaluation, run_episodes
from pql.run.evaluation import EvaluationPlan, simulator
from pql.run.policy import open_stored
from pql.types import Obs, Step

TRIES = 200  # episodes in a row of which none is kept: then no later one is expected


@dataclass(frozen=True)
class RecordPlan(EvaluationPlan):
    """Arguments of a recording.

    Attributes:
        episodes: number that is written, in all.
        steps: replaces ``episodes``: transitions after which no further episodes begin.
        noise: standard deviation of normal noise on continuous actions, which are in [-1, 1].
        min_return: least return of an episode that is written.
        success_only: write only episodes in which ``log["success"]`` was above 0.
    """

    steps: int | None = None
    noise: float = 0.0
    min_return: float | None = None
    success_only: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        STEPS.check("steps", self.steps)
        Range(0, 10).check("noise", self.noise)

    def check(self, spec: EnvSpec) -> None:
        """Raise ``ConfigError`` for what the task does not have."""
        if self.noise > 0 and not isinstance(spec.action, Box):
            raise ConfigError("noise", self.noise, f"0: the actions of {spec.name} are discrete (epsilon=0.1)")
        if self.success_only and "success" not in spec.log:
            logged = ", ".join(spec.log) or "nothing"
            raise ConfigError("success_only", True, f"a task that logs success; {spec.name} logs {logged}")

    def kept(self, result: Evaluation) -> dict[int, int]:
        """Return the lengths of the episodes that are written, by their index."""
        good = [self.min_return is None or total >= self.min_return for total in result.returns]
        if self.success_only:
            good = [a and b for a, b in zip(good, result.successes or [], strict=True)]
        return {i: int(result.lengths[i]) for i, keep in enumerate(good) if keep}


class TapedEnv:
    """Environments that remember, on the host, every row since their last reset."""

    def __init__(self, env: VecEnv, noise: float, seed: int):
        self.env, self.spec, self.noise = env, env.spec, noise
        self.gen = torch.Generator(env.spec.device).manual_seed(seed)
        self.rows: list[Columns] = []  # [N, ...] each

    def reset(self, seed: int | None = None) -> Obs:
        self.rows, self.obs = [], self.env.reset(seed)
        return self.obs

    def step(self, action: Tensor) -> Step:
        """Step all environments; ``action``: [N, ...], before noise."""
        if self.noise > 0:
            action = action + self.noise * torch.randn(action.shape, generator=self.gen, device=action.device)
        action = action.clamp(-1, 1) if isinstance(self.spec.action, Box) else action  # as the simulator does
        step = self.env.step(action)
        row = {k: getattr(step, k) for k in ("reward", "terminated", "truncated", "first", "valid", "final_ok")}
        for k, obs in (("obs", self.obs), ("final", step.final_obs)):
            row |= {f"{k}.{group}": newest_frame(v, self.spec.obs[group]).clone() for group, v in obs.items()}
        self.rows.append({k: v.cpu() for k, v in {**row, "action": action}.items()})
        self.obs = step.obs
        return step

    def close(self) -> None:
        self.env.close()

    def first_episodes(self, lengths: dict[int, int]) -> list[Columns]:
        """Return the first episodes of the environments with ``lengths``: columns [L, ...] of rows."""
        whole = {k: torch.stack([row[k] for row in self.rows]) for k in self.rows[0]}  # [T, N, ...]
        valid = whole.pop("valid")
        at = {i: valid[:, i].nonzero().flatten()[:length] for i, length in lengths.items()}
        return [_with_end({k: v[rows, i] for k, v in whole.items()}) for i, rows in at.items()]


def _with_end(one: Columns) -> Columns:
    """Return the columns [L, ...] of an episode with its final observation, if it is known, in a filler row."""
    last = {k: v[-1:] for k, v in one.items()}
    one["truncated"][-1:] |= ~last["terminated"] & ~last["first"]  # by a limit of this recording
    known = last["final_ok"] & (last["terminated"] | last["truncated"])
    filler = {k: last["final" + k[3:]] if k.startswith("obs.") else torch.zeros_like(v) for k, v in last.items()}
    one["valid"], filler["valid"] = torch.ones_like(one["first"]), torch.zeros_like(known)
    out = {k: torch.cat((v, filler[k][known])) for k, v in one.items() if not k.startswith("final")}
    out["first"] = torch.arange(len(out["first"])) == len(out["first"]) - 1
    return out


def rows_of_episodes(episodes: list[Columns]) -> Columns:
    """Join episodes, columns [L, ...], to the rows of one environment [T, 1, ...] (``pql.data.transitions``)."""
    joined = {k: torch.cat([one[k] for one in episodes])[:, None] for k in episodes[0]}
    return {k: torch.cat((v, v[-1:])) if k.startswith("obs.") else v for k, v in joined.items()}


def record_demonstrations(
    path: str | Path, out: str | Path, plan: RecordPlan, kept: Callable[[int], object] = lambda count: None
) -> dict[str, Any]:
    """Play the policy of a run, checkpoint or export, and write the transitions of whole episodes.

    Each environment plays one episode after every reset, so that short episodes are not preferred. The seed of reset i
    is ``plan.seed + i``.

    Args:
        out: the file, replaced if it exists.
        kept: called with the number of episodes so far.
    Returns:
        ``file``, ``task``, ``steps`` (transitions), ``returns`` of the episodes, and how many were ``played``.
    Raises:
        ConfigError: no policy there, or none of its episodes is as the plan wants them.
    """
    file = expanded("out", out)
    if file.suffix != ".safetensors":
        raise ConfigError("out", out, "a file name that ends in .safetensors")
    stored = open_stored(path, resolve_device(plan.device), plan.trust).for_play(plan.play)
    with writing("out", file, "file"):  # before the episodes are played
        file.parent.mkdir(parents=True, exist_ok=True)
    set_precision(stored.config.placement)
    rules = plan.rules(stored.config)
    num_envs = plan.num_envs if plan.steps else min(plan.num_envs, plan.episodes)
    episodes: list[Columns] = []
    returns: list[float] = []
    seen: list[float] = []
    steps, idle, seed = 0, 0, plan.seed
    with watchdog.guarded(), simulator(stored, num_envs, rules, "the recording") as env:
        plan.check(env.spec)
        tape = TapedEnv(env, plan.noise, plan.seed)
        while steps < plan.steps if plan.steps else len(episodes) < plan.episodes:
            count = num_envs if plan.steps else min(num_envs, plan.episodes - len(episodes))
            result = run_episodes(tape, stored.policy, seed, replace(rules, episodes=count))
            good, seed = plan.kept(result), seed + 1
            episodes += tape.first_episodes(good)
            returns += [result.returns[i] for i in good]
            seen += result.returns
            steps, idle = steps + sum(good.values()), 0 if good else idle + count
            kept(len(episodes))
            if idle >= TRIES:
                what = f"what the policy reaches: of {idle:,} episodes none is kept; the best return is {max(seen):.6g}"
                name = "success_only" if plan.min_return is None else "min_return"
                raise ConfigError(name, getattr(plan, name), what)
    with writing("out", file, "file"):
        save_rows(rows_of_episodes(episodes), file)
    return {"file": file, "task": stored.config.task.title, "steps": steps, "returns": returns, "played": len(seen)}
