"""Notes of a run on the console: a budget with room for few rollouts; at the end, result, bottleneck and commands."""

import math
import textwrap

from pql.config import BudgetConfig, Config
from pql.run.log.console import WIDTH
from pql.run.log.displays import Row
from pql.run.store.run_dir import Summary, command

FEW, ENOUGH = 10, 30  # rollouts
LEAST = 8  # environments
ADVICE = {
    "collector": "fewer environments or a faster simulator would speed it up; more updates per step would be free",
    "v": "a smaller critic or batch, fewer updates per step or more threads for v would speed it up",
    "p": "a smaller policy or batch, or fewer policy updates per critic update would speed it up",
    "learner": "smaller networks, fewer epochs or more threads for v would speed it up",
}


def closing_words(
    summary: Summary, config: Config, busy: Row, kept: tuple[bool, bool] = (True, True), best: float = -math.inf
) -> str:
    """Return the last lines of a run: result, bottleneck, directory and the commands to use next.

    Args:
        busy: worker -> share of this sitting's ticks in which it worked; empty if there was no tick.
        kept: (policy, resume point): True for each one on disk; commands that need a missing one are not shown.
        best: mean return of the best evaluation, whose policy is kept; named if it is above the last one's.
    """
    policy, point = kept
    score = "not evaluated" if summary.return_mean is None else scores(summary)
    ended = f"interrupted{', saved' if point or policy else ''}" if summary.interrupted else "done"
    again = [] if summary.interrupted else more(summary, config.budget)
    commands = [
        *([command("eval", summary.run_dir, config)] if policy else []),
        *([command("resume", summary.run_dir, config, again)] if point else []),
    ]
    return "\n".join(
        [
            f"{ended}: {score}",
            f"{summary.seconds:,.0f} s, {summary.env_steps:,} env steps, {summary.updates_v:,} critic and "
            f"{summary.updates_p:,} policy updates",
            bounded(busy) if busy else idle(summary),
            f"run: {summary.run_dir}",
            *([f"policy: {summary.checkpoint}"] if policy else []),
            *([f"best: {summary.run_dir}/checkpoints/best, return {best:,.1f}"] if above(best, summary) else []),
            *(f"{' ' * 6 if i else 'next: '}{one}" for i, one in enumerate(commands)),
        ]
    )


def above(best: float, summary: Summary) -> bool:
    """Return True if the best evaluation has a higher return than the last one, as both are printed."""
    last = summary.return_mean
    return last is not None and math.isfinite(best) and round(best, 1) > round(last, 1)


def bounded(busy: Row) -> str:
    """Return the busiest worker, for which ticks wait, with advice."""
    bound = max(busy, key=lambda k: busy[k])
    shares = ", ".join(f"{k} {v:.0%}" for k, v in busy.items())
    return textwrap.fill(f"the tick is bounded by {bound} (busy: {shares}): {ADVICE[bound]}", WIDTH)


def idle(summary: Summary) -> str:
    """Return why a sitting ran no tick."""
    if summary.interrupted or summary.updates_v == 0:
        return "nothing was learned in this sitting: it ended before the first tick" + (
            "" if summary.interrupted else "; a longer budget, or fewer num_envs or algo.warmup_steps, reaches it"
        )
    return "nothing was learned in this sitting: the budget of the run was already used up"


def more(summary: Summary, budget: BudgetConfig) -> list[str]:
    """Suggest a budget for resuming: twice the amount used, and no bound below the run's own."""
    words = []
    if budget.seconds:
        words.append(f"budget.seconds={math.ceil(max(2 * max(summary.seconds, 1), budget.seconds))}")
    if budget.env_steps:
        words.append(f"budget.env_steps={max(2 * summary.env_steps, budget.env_steps)}")
    return words


def scores(summary: Summary) -> str:
    """Return the final evaluation as text."""
    middle = "" if summary.return_median is None else f"median {summary.return_median:,.1f}, "
    success = "" if summary.success is None else f", success {summary.success:.0%}"
    length = "" if summary.length_mean is None else f" of {summary.length_mean:,.1f} steps"
    return (
        f"return {summary.return_mean:,.1f} ({middle}IQM {summary.return_iqm:,.1f}){success} "
        f"over {summary.episodes} episodes{length}"
    )


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
