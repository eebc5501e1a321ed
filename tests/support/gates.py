"""Learning gates: a run trains until it reaches its goal, so that fast seeds need not run for the full length."""

import math
import os
from collections.abc import Callable

from pql.run.components import Parts
from pql.run.episodes import run_episodes
from pql.run.policy import fresh_policy, snapshot

SEED = "PQL_LEARNING_SEED"  # the only seed to train with; tools/pass_rates.py sets it


class LearningGate:
    """Asserts that training reaches a goal with one of a few seeds.

    Equal seeds give equal bits on one processor, but other bits on another processor, whose matrix kernels sum in
    another order. A test with a single seed therefore passes or fails by chance on a new machine; with a pass rate of
    .9 per seed, all of three seeds fail once in a thousand runs. ``tools/pass_rates.py`` measures the rates.

    Args:
        record: stores the results with the test's report.
    """

    def __init__(self, record: Callable[[str, object], None]):
        self._record = record

    def __call__(self, train: Callable[[int], float], goal: float, attempts: int = 3) -> None:
        """Call ``train(seed)`` for the seeds 0, 1, ... until one returns more than ``goal``.

        Raises:
            AssertionError: none of ``attempts`` seeds did.
        """
        asked = os.environ.get(SEED)
        seeds = range(attempts) if asked is None else [int(asked)]
        reached = []
        for seed in seeds:
            reached.append(train(seed))
            self._record("learned", f"{reached[-1]:.6g} of {goal:g}")
            if reached[-1] > goal:
                return
        raise AssertionError(f"seeds {list(seeds)} reach {reached}; the goal is {goal}")


def score(parts: Parts, episodes: int = 32) -> float:
    """Return the mean return of the learned policy, on separate environments."""
    env = type(parts.env)(episodes, "cpu")
    policy = fresh_policy(parts.config, env.spec, env.spec.device)
    policy.load_state_dict(snapshot(parts))
    return run_episodes(env, policy, seed=7).mean


def train_until(
    parts: Parts, goal: float, ticks: int, measure: Callable[[], float] | None = None, every: int | None = None
) -> float:
    """Train until two consecutive measurements are above ``goal``, for at most twice ``ticks``.

    Args:
        ticks: enough for most seeds; slow ones get the same number again.
        measure: default: :func:`score`.
        every: ticks between measurements; default: a tenth of ``ticks``.
    Returns:
        The lower of the last two measurements.
    """
    measure, every = measure or (lambda: score(parts)), every or -(-ticks // 10)
    before = last = -math.inf
    for tick in range(1, 2 * ticks + 1):
        parts.schedule.tick()
        if tick % every == 0 or tick == 2 * ticks:
            before, last = last, measure()
            if min(before, last) > goal:
                break
    return min(before, last)
