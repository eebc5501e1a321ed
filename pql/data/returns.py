"""Returns of a rollout: one backward scan, with different deltas and decays.

Every estimator here is ``x_t = delta_t + decay_t x_{t+1}``, ``x_T = 0``, over rows [T, N]. Episode ends are already
encoded in the rows: ``discount`` is gamma, or 0 after termination; ``next_value`` is the value of the true successor
(of the final observation after a truncation); ``goes_on`` is 1 if the next row is the successor.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pql.config import VtraceConfig


def backward_scan(delta: Tensor, decay: Tensor) -> Tensor:
    """Compute x_t = delta_t + decay_t x_{t+1} with x_T = 0. Both [T, N]; returns [T, N]."""
    out, carry = torch.empty_like(delta), torch.zeros_like(delta[0])
    for t in range(delta.shape[0] - 1, -1, -1):
        carry = torch.addcmul(delta[t], decay[t], carry, out=out[t])
    return out


class ValuedRows(NamedTuple):
    """Rows of a rollout with the values of their observations and successors, [T, N] each."""

    reward: Tensor
    discount: Tensor  # gamma; 0 if terminated
    value: Tensor
    next_value: Tensor
    goes_on: Tensor  # 0 if the next row belongs to another trajectory, else 1
    mask: Tensor  # 0: a filler row, or its successor is unknown; else 1


class RolloutRows(Protocol):
    """Fields of a rollout's segment that returns are computed from, [T, N] each."""

    @property
    def reward(self) -> Tensor: ...
    @property
    def alive(self) -> Tensor: ...
    @property
    def successor(self) -> Tensor: ...
    @property
    def goes_on(self) -> Tensor: ...
    @property
    def mask(self) -> Tensor: ...


def valued_rows(rows: RolloutRows, gamma: float, values: Tensor) -> ValuedRows:
    """Combine ``rows`` with ``values`` [T + 1 + K + 1, N] of all observations of the segment."""
    beyond = values.gather(0, rows.successor)
    count = rows.mask.shape[0]
    return ValuedRows(rows.reward, gamma * rows.alive, values[:count], beyond, rows.goes_on, rows.mask)


def gae(rows: ValuedRows, lam: float) -> Tensor:
    """Generalised advantage estimation (Schulman et al. 2016, Eq. 16), [T, N]; 0 where masked.

    A_t = sum_k (prod_{i<k} lam discount_{t+i}) delta_{t+k}, delta_t = r_t + discount_t V(s'_t) - V(s_t), over the rows
    from t to the end of the trajectory. A trajectory also ends before a masked row, with the value of that row's
    observation.
    """
    delta = torch.addcmul(rows.reward, rows.discount, rows.next_value).sub_(rows.value).mul_(rows.mask)
    return backward_scan(delta, lam * rows.discount * rows.goes_on * rows.mask)


def lambda_returns(rows: ValuedRows, lam: float) -> Tensor:
    """TD(lambda) targets (Sutton & Barto 2018, 12.1), [T, N].

    G_t = r_t + discount_t ((1 - lam) V(s'_t) + lam G_{t+1}); at the end of a trajectory G_{t+1} is V(s'_t). Equal to
    :func:`gae` plus V(s_t).
    """
    return gae(rows, lam).add_(rows.value)


class Corrected(NamedTuple):
    """Targets, advantages and weights of a rollout's rows. None carries a gradient."""

    target: Tensor  # [T, N] v_s, for values
    advantage: Tensor  # [T, N] of the policy gradient; 0 where masked
    weight: Tensor  # [T, N] of the advantage, min(pg_rho_bar, ratio)


@torch.no_grad()
def vtrace(
    log_ratio: Tensor, rows: ValuedRows, weights: VtraceConfig, lam: float = 1.0, pg_lam: float = 1.0
) -> Corrected:
    """V-trace targets and advantages, with ratio_t = pi(a_t | x_t) / mu(a_t | x_t).

    v_s = V(x_s) + sum_t (prod_{s<=i<t} discount_i c_i) rho_t delta_t over the rows from s to the trajectory's end, with
    delta_t = r_t + discount_t V(x'_t) - V(x_t), rho_t = min(rho_bar, ratio_t), c_i = lam min(c_bar, ratio_i); and
    advantage_s = r_s + discount_s v_{s+1} - V(x_s), with weight min(pg_rho_bar, ratio_s). At the trajectory's end
    v_{s+1} is V(x'_s), the value of the true successor. Rows with ``mask == 0`` are treated as in :func:`gae`.

    With ratios of 1, v_s is the TD(lam) return; with lam = 1 also, the sum of all rewards and the final value.

    Args:
        log_ratio: [T, N].
        lam: factor on c (Remark 2 of the paper).
        pg_lam: weight of v_{s+1} relative to V(x'_s) in the advantage. 1: as in the paper; ``lam``: with ratios of 1,
            generalised advantage estimation.
    """
    ratio = log_ratio.exp()
    delta = torch.addcmul(rows.reward, rows.discount, rows.next_value).sub_(rows.value).mul_(rows.mask)
    decay = lam * rows.discount * ratio.clamp(max=weights.c_bar) * rows.goes_on * rows.mask
    excess = backward_scan(delta * ratio.clamp(max=weights.rho_bar), decay)  # v_s - V(x_s)
    beyond = torch.zeros_like(excess)
    beyond[:-1] = excess[1:]
    later = pg_lam * rows.discount * beyond * rows.goes_on * rows.mask
    return Corrected(rows.value + excess, delta + later, ratio.clamp(max=weights.pg_rho_bar))
