"""V-trace: off-policy corrected value targets and policy-gradient advantages.

Source: Espeholt et al. 2018, "IMPALA", section 4.1. Rewards and episode ends are settled before, as in ``returns.py``.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pql.config import VtraceConfig
from pql.data.returns import backward_scan


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
