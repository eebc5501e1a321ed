"""Statistics over a few runs, after Agarwal et al., "Deep RL at the Edge of the Statistical Precipice" (2021).

Scores are passed as strata: one array ``[draws, runs, ...]`` per task, with one draw for measurements and many for
their bootstrap. Every statistic reduces over runs.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import trim_mean

Array = NDArray[np.float64]
Strata = Sequence[Array]
Statistic = Callable[[Strata], Array]

DRAWS = 2000
CONFIDENCE = 0.95


def iqm(strata: Strata) -> Array:
    """Interquartile mean over the runs of all tasks: a quarter of them, rounded down, is cut off at either end."""
    return trim_mean(np.concatenate(strata, axis=1), 0.25, axis=1)


def mean(strata: Strata) -> Array:
    """Mean over tasks of the mean over runs."""
    return np.mean([s.mean(axis=1) for s in strata], axis=0)


def median(strata: Strata) -> Array:
    """Median over tasks of the mean over runs, as in the paper; with one task, the median over its runs."""
    if len(strata) == 1:
        return np.median(strata[0], axis=1)
    return np.median([s.mean(axis=1) for s in strata], axis=0)


def profile(taus: ArrayLike) -> Statistic:
    """Performance profile (equation 2 of the paper): the share of runs that score above each tau, mean over tasks."""
    at = np.asarray(taus, dtype=float)

    def share(strata: Strata) -> Array:
        return np.mean([(s[..., None] > at).mean(axis=1) for s in strata], axis=0)

    return share


def measured(scores: Sequence[ArrayLike], statistic: Statistic) -> Array:
    """Return the statistic of the measurements: one array ``[runs, ...]`` per task."""
    return statistic(_one_draw(scores))[0]


def interval(
    scores: Sequence[ArrayLike], statistic: Statistic, draws: int = DRAWS, confidence: float = CONFIDENCE, seed: int = 0
) -> tuple[Array, Array]:
    """Percentile interval of the stratified bootstrap: runs are drawn with replacement within each task.

    Whole curves are resampled, so that neighbouring points of a band belong to the same runs.

    Returns:
        (low, high), in the statistic's shape; nan where no task has two runs.
    """
    strata = [np.asarray(s, dtype=float) for s in scores]
    if max(len(s) for s in strata) < 2:
        nothing = np.full_like(measured(strata, statistic), np.nan)
        return nothing, nothing
    rng = np.random.default_rng(seed)
    drawn = statistic([s[rng.integers(len(s), size=(draws, len(s)))] for s in strata])
    tail = 50 * (1 - confidence)
    low, high = np.percentile(drawn, [tail, 100 - tail], axis=0)
    return low, high


def time_to(x: ArrayLike, y: ArrayLike, threshold: float) -> float:
    """Return the x at which a curve first reaches ``threshold``, with linear interpolation; inf if it never does.

    If the first evaluation is above the threshold already, return its x, an upper bound.
    """
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    above = np.flatnonzero(y >= threshold)
    if len(above) == 0:
        return float("inf")
    i = int(above[0])
    if i == 0:
        return float(x[0])
    return float(x[i - 1] + (x[i] - x[i - 1]) * (threshold - y[i - 1]) / (y[i] - y[i - 1]))


def improvement(first: Sequence[ArrayLike], second: Sequence[ArrayLike]) -> float:
    """Return the probability of improvement (section 4.3 of the paper), averaged over tasks.

    For one task it is the share of pairs (a run of each algorithm) in which the first scores higher; ties count half.

    Args:
        first, second: one array of scores ``[runs]`` per task.
    """
    return float(_improvement(_one_draw(first), _one_draw(second))[0])


def improvement_interval(
    first: Sequence[ArrayLike], second: Sequence[ArrayLike], draws: int = DRAWS, seed: int = 0
) -> tuple[float, float]:
    """95 % percentile interval of :func:`improvement`: the runs of both are drawn independently, within each task.

    Returns:
        (low, high); nan if one of the algorithms has a single run on every task.
    """
    one, two = ([np.asarray(s, dtype=float) for s in scores] for scores in (first, second))
    if any(max(map(len, strata)) < 2 for strata in (one, two)):
        return float("nan"), float("nan")
    rng = np.random.default_rng(seed)
    drawn = _improvement(*([s[rng.integers(len(s), size=(draws, len(s)))] for s in strata] for strata in (one, two)))
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(drawn, [tail, 100 - tail])
    return float(low), float(high)


def _one_draw(scores: Sequence[ArrayLike]) -> Strata:
    return [np.asarray(s, dtype=float)[None] for s in scores]


def _improvement(first: Strata, second: Strata) -> Array:
    """Share of won pairs in each draw, [draws]: (1 + won - lost) / 2 counts ties half."""
    balance = [np.sign(a[:, :, None] - b[:, None, :]).mean(axis=(1, 2)) for a, b in zip(first, second, strict=True)]
    return (1 + np.mean(balance, axis=0)) / 2
