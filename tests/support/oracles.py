"""Slow oracles, in plain Python loops: each formula as its source states it, sharing no code with the library.

They take and return numbers and lists; an input tensor is read entry by entry, in float64.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import NamedTuple


class Event(NamedTuple):
    """One row of one environment's history. ``obs`` numbers stand for whole observations and are unique."""

    obs: int  # acted on here
    action: float
    reward: float
    terminated: bool
    truncated: bool
    first: bool
    final_ok: bool
    valid: bool
    after: int  # Step.obs: the next one to act on
    final: int  # Step.final_obs


class Window(NamedTuple):
    """An n-step target: ``reward + discount * value(next_obs)``; ``next_obs`` is None if its value is not used."""

    mask: bool
    lost: bool  # dropped because the true final observation is gone
    reward: float = 0.0
    discount: float = 0.0
    next_obs: int | None = None


def n_step(events: Sequence[Event], start: int, n: int, gamma: float) -> Window:
    """Return the window that starts at ``events[start]``; the list ends at the reader's head.

    It ends at the first of n steps, a terminated or truncated row, the row before a filler row, a row after which
    an episode begins unannounced, or the newest row.
    """
    if not events[start].valid:
        return Window(False, False)
    reward = 0.0
    for m in range(n):
        row = events[start + m]
        reward += gamma**m * row.reward
        if row.terminated:
            return Window(True, False, reward, 0.0, row.final if row.final_ok else None)
        if row.truncated:
            if not row.final_ok:
                return Window(False, True)
            return Window(True, False, reward, gamma ** (m + 1), row.final)
        if row.first:
            return Window(False, False)
        newest = start + m + 1 == len(events)
        if m == n - 1 or newest or not events[start + m + 1].valid:
            return Window(True, False, reward, gamma ** (m + 1), row.after)
    raise AssertionError("n must be at least 1")


def c51_projection(support: Sequence[float], probs: Sequence[float], atoms: Sequence[float]) -> list[float]:
    """Bellemare et al. 2017, Algorithm 1: each mass goes to the two atoms around it, in proportion to nearness."""
    low, high = atoms[0], atoms[-1]
    gap = (high - low) / (len(atoms) - 1)
    out = [0.0] * len(atoms)
    for z, p in zip(support, probs, strict=True):
        b = (min(max(z, low), high) - low) / gap
        lower = min(math.floor(b), len(atoms) - 1)
        upper = min(lower + 1, len(atoms) - 1)
        out[upper] += p * (b - lower)
        out[lower] += p * (1 - (b - lower))
    return out


def bin_masses(mean: float, atoms: Sequence[float], sigma: float) -> list[float]:
    """HL-Gauss (Imani & White 2018): mass of Normal(mean, sigma d) in the bin around each atom, by its distribution
    function; d is the distance between atoms, and the bins at both ends are open."""
    edges = [-math.inf, *((a + b) / 2 for a, b in itertools.pairwise(atoms)), math.inf]
    normal = NormalDist(mean, sigma * (atoms[1] - atoms[0]))
    below = [normal.cdf(edge) for edge in edges]
    return [high - low for low, high in itertools.pairwise(below)]


def tanh_gaussian_log_prob(raw: Sequence[float], mean: Sequence[float], std: Sequence[float]) -> float:
    """Return the log-density of tanh(raw), raw ~ N(mean, std), by change of variables: d tanh / du = 1 / cosh(u)^2."""
    total = 0.0
    for u, mu, sigma in zip(raw, mean, std, strict=True):
        normal = -0.5 * ((u - mu) / sigma) ** 2 - math.log(sigma) - 0.5 * math.log(2 * math.pi)
        total += normal + 2 * math.log(math.cosh(u))
    return total


class AdamW:
    """Loshchilov & Hutter 2019, Algorithm 2, on a list of floats, after clipping the gradient's norm."""

    def __init__(self, lr: float, weight_decay: float = 0.0, clip: float | None = None, eps: float = 1e-8):
        self.lr, self.weight_decay, self.clip, self.eps = lr, weight_decay, clip, eps
        self.count, self.mean, self.square = 0, None, None

    def step(self, parameters: Sequence[float], grads: Sequence[float]) -> list[float]:
        """Return the new parameters."""
        norm = math.sqrt(sum(g * g for g in grads))
        if self.clip is not None and norm > self.clip:
            grads = [g * self.clip / norm for g in grads]
        self.count += 1
        old_mean, old_square = self.mean or [0.0] * len(grads), self.square or [0.0] * len(grads)
        self.mean = [0.9 * m + 0.1 * g for m, g in zip(old_mean, grads, strict=True)]
        self.square = [0.999 * v + 0.001 * g * g for v, g in zip(old_square, grads, strict=True)]
        out = []
        for p, m, v in zip(parameters, self.mean, self.square, strict=True):
            m, v = m / (1 - 0.9**self.count), v / (1 - 0.999**self.count)
            out.append(p - self.lr * (m / (math.sqrt(v) + self.eps) + self.weight_decay * p))
        return out


class Welford:
    """Running mean and variance, one number at a time (Welford 1962)."""

    def __init__(self) -> None:
        self.count, self.mean, self.m2 = 0, 0.0, 0.0

    def add(self, x: float) -> None:
        self.count += 1
        delta = x - self.mean
        self.mean += delta / self.count
        self.m2 += delta * (x - self.mean)

    def variance(self) -> float:
        return self.m2 / self.count


def zeta_pmf(exponent: float, largest: int) -> list[float]:
    """P(k), k = 1..largest, proportional to k^-exponent."""
    weights = [k**-exponent for k in range(1, largest + 1)]
    return [w / sum(weights) for w in weights]


def chi_square_fits(counts: Sequence[float], expected: Sequence[float]) -> bool:
    """Return True if Pearson's statistic is within five standard deviations of its value under the expectation."""
    statistic = sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True))
    freedom = len(counts) - 1
    return statistic < freedom + 5 * math.sqrt(2 * freedom)


def known_end(events: Sequence[Event], row: int) -> bool:
    """Return True if a rollout knows a row's successor."""
    e = events[row]
    if not e.valid or (e.first and not e.terminated and not e.truncated):
        return False
    return e.terminated or not e.truncated or e.final_ok


def lambda_return(
    events: Sequence[Event], start: int, value: Callable[[int], float], gamma: float, lam: float
) -> float | None:
    """Return the mixture of n-step returns (Sutton & Barto 2018, Eq. 12.2), or None if the row is masked.

    G = (1 - lam) sum_{n<M} lam^{n-1} G_n + lam^{M-1} G_M, where the trajectory ends with its M-th row from ``start``:
    the first that ends an episode, the last of ``events``, or the one before a row without a known successor.
    """
    if not known_end(events, start):
        return None
    returns: list[float] = []
    reward = 0.0
    for n in range(1, len(events) - start + 1):
        row = start + n - 1
        if not known_end(events, row):
            break
        e = events[row]
        reward += gamma ** (n - 1) * e.reward
        beyond = 0.0 if e.terminated else value(e.final if e.truncated else e.after)
        returns.append(reward + gamma**n * beyond)
        if e.terminated or e.truncated or e.first:
            break
    last = len(returns)
    mixed = sum((1 - lam) * lam ** (n - 1) * returns[n - 1] for n in range(1, last))
    return mixed + lam ** (last - 1) * returns[-1]


def soft_lambda_return(
    events: Sequence[Event],
    start: int,
    q: Callable[[int], float],
    log_prob: Callable[[int], float],
    alpha: float,
    gamma: float,
    lam: float,
) -> float | None:
    """Voelcker et al. 2025: the entropy of the next action is a part of the reward; None as above.

    G_t = r_t + gamma (-alpha log pi(a'|s') + (1 - lam) Q(s', a') + lam G_{t+1}), with Q(s', a') for G_{t+1} where the
    trajectory ends; r_t after a termination.
    """
    if not known_end(events, start):
        return None
    e = events[start]
    if e.terminated:
        return e.reward
    beyond = e.final if e.truncated else e.after
    later = None
    if not e.truncated and not e.first and start + 1 < len(events):
        later = soft_lambda_return(events, start + 1, q, log_prob, alpha, gamma, lam)
    mixed = q(beyond) if later is None else (1 - lam) * q(beyond) + lam * later
    return e.reward - gamma * alpha * log_prob(beyond) + gamma * mixed


def gae(events: Sequence[Event], start: int, value: Callable[[int], float], gamma: float, lam: float) -> float | None:
    """Schulman et al. 2016, Eq. 16: sum of (gamma lam)^k delta_{t+k} to the trajectory's end; None as above."""
    if not known_end(events, start):
        return None
    total = 0.0
    for k, e in enumerate(events[start:]):
        if not known_end(events, start + k):
            break
        beyond = 0.0 if e.terminated else value(e.final if e.truncated else e.after)
        total += (gamma * lam) ** k * (e.reward + gamma * beyond - value(e.obs))
        if e.terminated or e.truncated or e.first:
            break
    return total


def importance_weights(probabilities: Sequence[float], size: int, beta: float) -> list[float]:
    """Schaul et al. 2016, section 3.4: (1 / (N P(i)))^beta, divided by the largest of them."""
    raw = [(1 / (size * p)) ** beta for p in probabilities]
    return [w / max(raw) for w in raw]


def q_target(
    reward: float, discount: float, target_values: Sequence[float], online_values: Sequence[float] | None
) -> float:
    """r + discount * Q'(s', a*): a* greedy in Q' (Mnih et al. 2015), or in Q where given (van Hasselt et al. 2016)."""
    chooser = target_values if online_values is None else online_values
    best = max(range(len(chooser)), key=lambda a: chooser[a])
    return reward + discount * target_values[best]


def huber(error: float, delta: float | None) -> float:
    """Huber 1964: quadratic near zero, linear from ``delta`` on, both with the same slope there."""
    if delta is None or abs(error) <= delta:
        return error * error / 2
    return delta * abs(error) - delta * delta / 2


def quantile_loss(taus: Sequence[float], q: Sequence[float], target: Sequence[float], delta: float) -> float:
    """Dabney et al. 2018 (IQN), Eq. 3: sum over the predicted quantiles q of the mean over those of the target."""
    total = 0.0
    for tau, predicted in zip(taus, q, strict=True):
        for goal in target:
            error = goal - predicted
            total += abs(tau - (1.0 if error < 0 else 0.0)) * huber(error, delta) / delta
    return total / len(target)


def soft_policy(values: Sequence[float], tau: float) -> list[float]:
    """The softmax of values / tau."""
    largest = max(values)
    weights = [math.exp((v - largest) / tau) for v in values]
    return [w / sum(weights) for w in weights]


def munchausen_bonus(values: Sequence[float], action: int, alpha: float, tau: float, clip: float) -> float:
    """Vieillard et al. 2020, section 3: alpha times tau log pi(a|s), clipped to [clip, 0]."""
    largest = max(values)
    log_sum = math.log(sum(math.exp((v - largest) / tau) for v in values))
    log_pi = (values[action] - largest) / tau - log_sum
    return alpha * min(0.0, max(clip, tau * log_pi))


def munchausen_value(values: Sequence[float], policy: Sequence[float], tau: float) -> float:
    """Vieillard et al. 2020, section 3: sum over a of pi(a) (q(a) - tau log pi(a))."""
    return sum(p * (v - tau * math.log(p)) for v, p in zip(values, policy, strict=True) if p > 0)


def kl_divergence(p: Sequence[float], q: Sequence[float]) -> float:
    """sum p log(p / q), with 0 log 0 = 0."""
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def dueling(value: float, advantages: Sequence[float]) -> list[float]:
    """Wang et al. 2016, Eq. 9."""
    mean = sum(advantages) / len(advantages)
    return [value + a - mean for a in advantages]


def noisy_linear(
    x: Sequence[float],
    mu: Sequence[Sequence[float]],
    sigma: Sequence[Sequence[float]],
    mu_b: Sequence[float],
    sigma_b: Sequence[float],
    z_in: Sequence[float],
    z_out: Sequence[float],
) -> list[float]:
    """Fortunato et al. 2018, Eq. 9 with factorised noise, Eq. 10 and 11: w = mu + sigma f(z_out) f(z_in)^T."""

    def f(z: float) -> float:
        return math.copysign(math.sqrt(abs(z)), z)

    out = []
    for j in range(len(mu_b)):
        total = mu_b[j] + sigma_b[j] * f(z_out[j])
        for i in range(len(x)):
            total += (mu[j][i] + sigma[j][i] * f(z_out[j]) * f(z_in[i])) * x[i]
        out.append(total)
    return out


def epsilon_ladder(count: int) -> list[float]:
    """Horgan et al. 2018, section 4.1: .4^(1 + 7 i / (N - 1))."""
    return [0.4 ** (1 + 7 * i / (count - 1)) for i in range(count)]


def vtrace(
    events: Sequence[Event],
    ratios: Sequence[float],
    start: int,
    value: Callable[[int], float],
    gamma: float,
    lam: float,
    rho_bar: float,
    c_bar: float,
) -> tuple[float, float] | None:
    """Espeholt et al. 2018, Eq. 1, as written, and r_s + gamma v_{s+1} - V(x_s); None as in :func:`lambda_return`.

    v_s = V(x_s) + sum_t gamma^(t-s) (prod_{s<=i<t} c_i) rho_t delta_t, to the trajectory's end.
    """
    if not known_end(events, start):
        return None
    target = value(events[start].obs)
    for t in range(start, len(events)):
        if not known_end(events, t):
            break
        e = events[t]
        beyond = 0.0 if e.terminated else value(e.final if e.truncated else e.after)
        traces = math.prod(lam * min(c_bar, ratios[i]) for i in range(start, t))
        delta = e.reward + gamma * beyond - value(e.obs)
        target += gamma ** (t - start) * traces * min(rho_bar, ratios[t]) * delta
        if e.terminated or e.truncated or e.first:
            break
    e, following = events[start], None
    if not (e.terminated or e.truncated or e.first) and start + 1 < len(events):
        following = vtrace(events, ratios, start + 1, value, gamma, lam, rho_bar, c_bar)
    beyond = 0.0 if e.terminated else value(e.final if e.truncated else e.after)
    later = beyond if following is None else following[0]
    return target, e.reward + gamma * later - value(e.obs)
