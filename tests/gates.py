"""Learning gates: a run trains until it plays well, so that none is made to wait for what the slowest may need."""

import math
from collections.abc import Callable

from pql.build import Parts
from pql.evaluate import run_episodes
from pql.policy import fresh_policy, snapshot


def score(parts: Parts, episodes: int = 32) -> float:
    """The mean return of what has been learned, on environments of their own."""
    env = type(parts.env)(episodes, "cpu")
    policy = fresh_policy(parts.config, env.spec, env.spec.device)
    policy.load_state_dict(snapshot(parts))
    return run_episodes(env, policy, seed=7).mean


def train_until(
    parts: Parts, goal: float, ticks: int, measure: Callable[[], float] | None = None, every: int | None = None
) -> float:
    """Train for ``ticks`` ticks, or less: until two measurements in a row are above ``goal``.

    Args:
        measure: the default: :func:`score`.
        every: ticks between measurements; the default: a tenth of all.
    Returns:
        The worse of the last two measurements.
    """
    measure, every = measure or (lambda: score(parts)), every or -(-ticks // 10)
    before = last = -math.inf
    for tick in range(1, ticks + 1):
        parts.schedule.tick()
        if tick % every == 0 or tick == ticks:
            before, last = last, measure()
            if min(before, last) > goal:
                break
    return min(before, last)
