"""A note at the start of a run whose budget has room for few rollouts."""

import textwrap

from pql.config import Config
from pql.run.log.console import WIDTH

FEW, ENOUGH = 10, 30  # rollouts
LEAST = 8  # environments


def few_rollouts(config: Config, seconds: float) -> str:
    """Return a note with fewer environments, or "" where the budget has room for ``FEW`` rollouts.

    Fewer environments make shorter rollouts. Slow simulators on the CPU make as many env steps per second with them.

    Args:
        seconds: duration of the warm-up.
    """
    horizon, budget, warmup = getattr(config.algo, "horizon", None), config.budget.seconds, config.algo.warmup_steps
    if horizon is None or budget is None or warmup == 0 or seconds <= 0:
        return ""
    count = max(budget - seconds, 0) * warmup / seconds / horizon
    fewer = 2 ** (int(max(config.num_envs * count / ENOUGH, LEAST)).bit_length() - 1)
    if count >= FEW or fewer >= config.num_envs:
        return ""
    rate, size = warmup * config.num_envs / seconds, config.num_envs * horizon
    return textwrap.fill(
        f"at {rate:,.0f} env steps/s budget.seconds={budget:g} has room for about {count:.1f} rollouts of "
        f"num_envs x algo.horizon = {size:,} env steps; num_envs={fewer} makes more and shorter ones",
        WIDTH,
    )
