"""Returns of a rollout: one backward scan, and what it becomes with different deltas and decays.

Every estimator here is ``x_t = delta_t + decay_t x_{t+1}``, ``x_T = 0``, over rows [T, N]. Episode ends are settled
before: a row's ``discount`` is gamma, or 0 where the task terminated; ``next_value`` is the value of its true
successor (a final observation's, where the row was cut off); ``goes_on`` says whether the next row is the successor.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pql.config import VtraceConfig


def backward_scan(delta: Tensor, decay: Tensor) -> Tensor:
    """x_t = delta_t + decay_t x_{t+1} with x_T = 0. Both [T, N]; returns [T, N]."""
    out, carry = torch.empty_like(delta), torch.zeros_like(delta[0])
    for t in range(delta.shape[0] - 1, -1, -1):
        carry = torch.addcmul(delta[t], decay[t], carry, out=out[t])
    return out


def gae(
    reward: Tensor, discount: Tensor, value: Tensor, next_value: Tensor, goes_on: Tensor, mask: Tensor, lam: float
) -> Tensor:
    """Generalised advantage estimation (Schulman et al. 2016, Eq. 16).

    A_t = sum_k (prod_{i<k} lam discount_{t+i}) delta_{t+k}, delta_t = r_t + discount_t V(s'_t) - V(s_t), over the rows
    from t to the end of the trajectory. A row with ``mask == 0`` (filler, or its successor is unknown) has no
    advantage, and a trajectory that runs into one ends before it, with the value of that row's own observation.

    Args:
        reward, value, next_value: [T, N].
        discount: [T, N] gamma, 0 where terminated.
        goes_on: [T, N] 0 where the next row belongs to another trajectory, else 1.
        mask: [T, N] 0 or 1.
    Returns:
        [T, N], 0 where masked.
    """
    delta = torch.addcmul(reward, discount, next_value).sub_(value).mul_(mask)
    return backward_scan(delta, lam * discount * goes_on * mask)


def lambda_returns(
    reward: Tensor, discount: Tensor, value: Tensor, next_value: Tensor, goes_on: Tensor, mask: Tensor, lam: float
) -> Tensor:
    """G_t = r_t + discount_t ((1 - lam) V(s'_t) + lam G_{t+1}), the TD(lambda) target (Sutton & Barto 2018, 12.1).

    Arguments, [T, N] each, as in :func:`gae`, to which it is equal up to V(s_t); at the end of a trajectory G_{t+1} is
    V(s'_t).
    """
    return gae(reward, discount, value, next_value, goes_on, mask, lam).add_(value)


class Corrected(NamedTuple):
    """Targets, advantages and weights of a rollout's rows. None carries a gradient."""

    target: Tensor  # [T, N] v_s, for values
    advantage: Tensor  # [T, N] of the policy gradient; 0 where masked
    weight: Tensor  # [T, N] that the advantage is to be given, min(pg_rho_bar, ratio)


@torch.no_grad()
def vtrace(
    log_ratio: Tensor,
    reward: Tensor,
    discount: Tensor,
    value: Tensor,
    next_value: Tensor,
    goes_on: Tensor,
    mask: Tensor,
    weights: VtraceConfig,
    lam: float = 1.0,
    pg_lam: float = 1.0,
) -> Corrected:
    """V-trace targets and advantages, with ratio_t = pi(a_t | x_t) / mu(a_t | x_t).

    v_s = V(x_s) + sum_t (prod_{s<=i<t} discount_i c_i) rho_t delta_t over the rows from s to the trajectory's end, with
    delta_t = r_t + discount_t V(x'_t) - V(x_t), rho_t = min(rho_bar, ratio_t), c_i = lam min(c_bar, ratio_i); and
    advantage_s = r_s + discount_s v_{s+1} - V(x_s), weighed with min(pg_rho_bar, ratio_s). At the trajectory's end
    v_{s+1} is V(x'_s), the value of the true successor. Rows with ``mask == 0`` are treated as by
    :func:`pql.data.returns.gae`.

    With ratios of 1, v_s is the TD(lam) return: for lam = 1, all rewards up to the end and the value beyond it.

    Args:
        log_ratio, reward, value, next_value, goes_on, mask: [T, N], as in :func:`pql.data.returns.gae`.
        discount: [T, N] gamma, 0 where terminated.
        lam: factor on c (Remark 2 of the paper).
        pg_lam: weight of v_{s+1} against V(x'_s) in the advantage. 1: the paper's; ``lam`` makes it, with ratios of 1,
            that of generalised advantage estimation.
    """
    ratio = log_ratio.exp()
    delta = torch.addcmul(reward, discount, next_value).sub_(value).mul_(mask)
    decay = lam * discount * ratio.clamp(max=weights.c_bar) * goes_on * mask
    excess = backward_scan(delta * ratio.clamp(max=weights.rho_bar), decay)  # v_s - V(x_s)
    beyond = torch.zeros_like(excess)
    beyond[:-1] = excess[1:]
    later = pg_lam * discount * beyond * goes_on * mask
    return Corrected(value + excess, delta + later, ratio.clamp(max=weights.pg_rho_bar))
