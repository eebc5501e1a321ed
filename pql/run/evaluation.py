"""Evaluation of a saved policy: of a run, a checkpoint or an export."""

import statistics
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pql.config import Config
from pql.config.validate import EPISODES, limits, resolve_device
from pql.contract.env import VecEnv
from pql.engine import watchdog
from pql.engine.deadlines import start_limit, step_limit
from pql.engine.placement import set_precision
from pql.errors import PqlWarning
from pql.run.environment import in_play
from pql.run.episodes import EpisodeRules, Evaluation, limit_note, run_episodes
from pql.run.policy import Stored, open_stored
from pql.run.store.checkpoint import home


@dataclass(frozen=True)
class EvaluationPlan:
    """Arguments of an evaluation of a saved policy.

    Attributes:
        epsilon: probability of a random action; None: as in evaluations of the run.
        max_steps: steps after which an episode is cut; None: as in evaluations of the run.
        play: use the simulator's configuration for play; None: as in evaluations of the run.
        trust: accept runs whose settings name code, programs or paths (``docs/security.md``).
    Raises:
        ConfigError: a number out of range, or no such device.
    """

    num_envs: int
    episodes: int
    seed: int = 0
    device: str = "cpu"
    epsilon: float | None = None
    trust: bool = False
    max_steps: int | None = None
    play: bool | None = None

    def __post_init__(self) -> None:
        for name, allowed in (
            ("num_envs", limits("eval.num_envs")),
            ("episodes", EPISODES),
            ("seed", limits("seed")),
            ("epsilon", limits("eval.epsilon")),
            ("max_steps", limits("eval.max_steps")),
        ):
            allowed.check(name, getattr(self, name))
        resolve_device(self.device)

    def rules(self, config: Config) -> EpisodeRules:
        """Return the rules of its episodes for a policy's config."""
        epsilon = config.eval.epsilon if self.epsilon is None else self.epsilon
        return EpisodeRules(self.episodes, epsilon, max_steps=self.max_steps or config.eval.max_steps)


def evaluate_saved(
    path: Path, plan: EvaluationPlan, ended: Callable[[int], object] = lambda count: None
) -> dict[str, Any]:
    """Evaluate the policy of a run, checkpoint or export on an environment built from its config.

    The time limits of the run's ``placement`` apply.

    Args:
        ended: called from time to time with the number of episodes that have ended.
    Returns:
        The report that ``pql eval`` writes: measures, extremes and episodes.
    Raises:
        ConfigError: no policy there, or a damaged one.
        HungError: the simulator hangs.
    """
    stored = open_stored(path, resolve_device(plan.device), plan.trust)
    stored = stored.for_play(plan.play)
    found, config = stored.path, stored.config
    set_precision(config.placement)
    num_envs = min(plan.num_envs, plan.episodes)
    rules = plan.rules(config)
    with watchdog.guarded():
        result, played = _play(stored, num_envs, plan.seed, rules, ended)
    return {
        "checkpoint": str(found),
        "task": config.task.title,
        "algo": config.algo.name,
        "seed": plan.seed,
        "epsilon": rules.epsilon,
        **({"play": True} if played else {}),
        "num_envs": num_envs,
        "episodes": len(result.returns),
        **{k: v for k, v in stored.counters.items() if k.startswith("stage/")},
        **result.measures(),
        "return_std": statistics.pstdev(result.returns),
        "return_min": min(result.returns),
        "return_max": max(result.returns),
        "length_min": min(result.lengths),
        "length_max": max(result.lengths),
        "returns": result.returns,
        "lengths": result.lengths,
        **({} if result.successes is None else {"successes": result.successes}),
    }


def _play(
    stored: Stored, num_envs: int, seed: int, rules: EpisodeRules, ended: Callable[[int], object]
) -> tuple[Evaluation, bool]:
    """Run episodes of a stored policy on new environments, under time limits. Return also if these have the simulator's
    configuration for play."""
    with simulator(stored, num_envs, rules, "the evaluation") as env:
        return run_episodes(env, stored.policy, seed, rules, ended=ended), in_play(stored.config, env.spec)


@contextmanager
def simulator(stored: Stored, num_envs: int, rules: EpisodeRules, what: str) -> Iterator[VecEnv]:
    """Context manager: new environments of a stored policy's task, under time limits. ``what``: is done with them."""
    start, step = start_limit(stored.config.placement), step_limit(stored.config.placement)
    env = stored.make_env(num_envs)
    if note := limit_note(env.spec, rules.max_steps):
        warnings.warn(note, PqlWarning, stacklevel=5)
    try:
        with watchdog.watching(what, start, step):
            yield env
    finally:
        with watchdog.watching(f"closing {env.spec.name}", start):
            env.close()


def evaluation_file(policy: Path, seed: int, episodes: int) -> Path:
    """Output folder of ``pql eval``: below the run, or next to a checkpoint or export outside a run."""
    return home(policy) / "evaluations" / f"{policy.resolve().name}-seed{seed}-{episodes}episodes.json"
