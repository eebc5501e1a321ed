"""PPO; A2C is PPO with one pass over one batch. One learner trains policy and value on fresh rollouts.

Sources: Schulman et al. 2017 (PPO), 2016 (GAE); Mnih et al. 2016 (A2C). Value normalisation by running statistics of
the returns follows rl_games and omits PopArt's correction of the last layer. The adaptive learning rate, which keeps
the KL near a target, follows rsl_rl. Advantages are normalised once, over the whole segment.

With V-trace (APPO), an older policy may have collected the rollout. The clip is then around the policy at the start of
the tick, and V-trace weights correct from the behaviour policy to that one: the decoupled objective of Hilton et al.
2022.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Generator, Tensor, nn

from pql.algos.on_policy import OnPolicy
from pql.config import Config, PpoConfig
from pql.config.algorithms import StochasticConfig
from pql.data.mirror import Mirror
from pql.data.normalize import EPSILON, Moments, pack_moments, pooled
from pql.data.returns import ValuedRows, gae, vtrace
from pql.data.rollout import Progress, Segment, by_parts, minibatches
from pql.data.unrolls import Reader
from pql.engine.collectives import ALONE, Group
from pql.engine.flat import Flat
from pql.engine.optim import Optimizer, annealed
from pql.engine.worker import State
from pql.nets.actor_critic import ActorCritic, cut
from pql.types import Metrics, Obs

LR_MIN, LR_MAX, LR_FACTOR = 1e-5, 1e-2, 1.5
"""Bounds and step of the adaptive learning rate (rsl_rl's)."""


class PpoProgress(Progress):
    """Counters of the run and of the tick, 0-dim tensors on the device."""

    def __init__(self, device: torch.device, num_envs: int, carry_size: int, steps_per_tick: int):
        super().__init__(device, steps_per_tick)
        self.fraction = torch.ones((), device=device)  # current factor of the learning rate (and clip) under annealing
        self.go = torch.ones((), device=device)  # 0 once the KL of this tick exceeds ``kl_stop``
        self.carry = torch.zeros(num_envs, carry_size, device=device)  # [N, C] recurrent state of the value, if its own


@dataclass
class PpoState(State):
    """State of the learner. ``policy`` and ``value`` are parts of ``net``, whose flat parameters are optimised."""

    policy: nn.Module
    value: nn.Module
    optimizer: Optimizer
    returns: Moments | None  # statistics of the returns; None: values are not normalised
    progress: PpoProgress
    group: Group = ALONE  # processes that train the same weights on different rollouts
    reader: Reader | None = None  # read position in unrolls of environments that answer late
    mirror: Mirror | None = None

    def connect(self, group: Group) -> None:
        super().connect(group)
        self.group = group

    @property
    def net(self) -> ActorCritic:
        return cast(ActorCritic, self.optimizer.flat.module)


def make_state(
    config: Config[StochasticConfig], flat: Flat, optimizer: Optimizer, num_envs: int, normalize_value: bool = False
) -> PpoState:
    """Create the learner's state from the parameters of an :class:`ActorCritic`."""
    net, device = cast(ActorCritic, flat.module), flat.data.device
    moments = Moments((), device) if normalize_value else None
    carry_size = net.value.body.carry_size if net.value.body else 0
    steps = config.algo.horizon * num_envs
    return PpoState(net.policy, net.value, optimizer, moments, PpoProgress(device, num_envs, carry_size, steps))


class Lag(NamedTuple):
    """Lag of the acting weights behind the learner's, in ticks, over the valid rows; 0-dim."""

    mean: Tensor
    largest: Tensor

    def measures(self) -> Metrics:
        return {"lag/rows_mean": self.mean, "lag/rows_max": self.largest}


class Minibatch(NamedTuple):
    """Rows [B] of a segment; with memory, [T, B]: all rows of B environments.

    Target and old value are in units of the normalised value.
    """

    obs: Obs  # [B, ...] normalised
    action: Tensor  # [B, A] raw, or [B]
    params: Tensor  # [B, P] distribution before the tick's first update (without V-trace, the one that acted)
    log_prob: Tensor  # [B] under it
    advantage: Tensor  # [B]
    target: Tensor  # [B] lambda-return
    value: Tensor  # [B] before the tick's first update
    mask: Tensor  # [B] 0 or 1
    explained: Tensor  # 0-dim; explained variance of the values, over the segment
    fresh: bool  # first minibatch of the tick: no update has been made
    lag: Lag | None = None  # over the segment, with V-trace
    first: Tensor | None = None  # [T, B] bool; the next row begins an episode (with memory)
    carry: Tensor | None = None  # [1, B, C] the policy's recurrent state before row 0
    value_carry: Tensor | None = None  # [1, B, C] the value's recurrent state before row 0


def draw_ppo(state: PpoState, segment: Segment, settings: PpoConfig, gen: Generator) -> Iterator[Minibatch]:
    """Yield a tick's minibatches: compute values, advantages and targets once, then shuffle all rows in each epoch.

    With recurrent networks, environments are shuffled and each keeps its rows in order.
    """
    begin_ppo_tick(state, segment, settings)
    lag = None if not settings.vtrace.enabled else rows_lag(state, segment.version, segment.mask)
    memory = state.net.policy.body.carry_size > 0
    start = {"carry": segment.carry.unsqueeze(0), "value_carry": value_carry(state, segment).unsqueeze(0)}
    rows, explained = prepare(state, segment, settings)
    columns = {**rows, "first": segment.first, **start} if memory else {k: v.flatten(0, 1) for k, v in rows.items()}
    dim = 1 if memory else 0
    for i, part in enumerate(minibatches(columns, settings.epochs, settings.minibatches, dim, gen)):
        obs, rest = grouped(part if state.mirror is None else mirrored(state.mirror, part, gen))
        yield Minibatch(obs=obs, explained=explained, fresh=i == 0, lag=lag, **rest)


def mirrored(mirror: Mirror, part: dict[str, Tensor], gen: Generator) -> dict[str, Tensor]:
    """Reflect rows of a minibatch's columns, [B, ...] each, as ``algo.symmetry`` says. A reflected action keeps the
    probability of the original (rsl_rl)."""
    if mirror.augment == "off":
        return part
    turned = {k: mirror.reflected(k.removeprefix("obs/"), v) for k, v in part.items() if k.startswith("obs/")}
    turned |= {"action": mirror.reflected("action", part["action"]), "params": mirror.params(part["params"])}
    return mirror.mixed(part, turned, 1, gen)


def grouped(part: dict[str, Tensor]) -> tuple[Obs, dict[str, Any]]:
    """Split named columns into observation groups (the columns ``obs/<group>``) and the others."""
    obs = {k.removeprefix("obs/"): v for k, v in part.items() if k.startswith("obs/")}
    return obs, {k: v for k, v in part.items() if not k.startswith("obs/")}


@torch.no_grad()
def begin_ppo_tick(state: PpoState, segment: Segment, settings: StochasticConfig) -> None:
    """Count the tick, open the KL gate, and set the annealed learning rate."""
    now = state.progress
    now.go.fill_(1.0)
    now.lost += segment.lost
    if settings.anneal_steps is not None:
        now.fraction.copy_(annealed(now.ticks, now.steps_per_tick, settings.anneal_steps))
        state.optimizer.lr.copy_(settings.policy.lr * now.fraction)
    now.ticks += 1


def rows_lag(state: PpoState, version: Tensor, mask: Tensor) -> Lag:
    """Return the age of the weights that acted in rows [...] of the current tick."""
    lag = (state.progress.ticks - 1 - version) * mask
    return Lag(lag.sum() / mask.sum().clamp(min=1), lag.max())


@torch.no_grad()
def prepare(state: PpoState, segment: Segment, settings: PpoConfig) -> tuple[dict[str, Tensor], Tensor]:
    """Return columns [T, N, ...] of the segment for :class:`Minibatch`, and the explained variance.

    Values are predicted in normalised units and mapped back with the statistics of earlier ticks; targets are
    normalised with statistics that include this tick's returns.
    """
    mask, rows = segment.mask, segment.mask.shape[0]
    values = segment_values(state, segment, settings.minibatches)  # [T + 1 + K + 1, N]
    scale, shift = value_scale(state.returns)
    values = values * scale + shift
    value, discount = values[:rows], settings.gamma * segment.alive
    next_value = values.gather(0, segment.successor)
    valued = ValuedRows(segment.reward, discount, value, next_value, segment.goes_on, mask)
    params, log_prob, target, advantage, weight = advantages_and_targets(state, segment, settings, valued)
    mean, var = masked_moments(target, mask)
    explained = 1 - masked_moments(target - value, mask)[1] / (var + EPSILON)
    if state.returns is not None:
        state.returns.update(target.flatten(), mask.flatten() > 0, state.group)
        scale, shift = value_scale(state.returns)
        target, value = (target - shift) / scale, (value - shift) / scale
    if settings.normalize_advantage:
        mean, var = masked_moments(advantage, mask, state.group)
        advantage = (advantage - mean) * (var + EPSILON).rsqrt()
    if weight is not None:
        advantage = advantage * weight
    columns = {
        **{f"obs/{k}": v[:rows] for k, v in segment.obs.items()},
        "action": segment.action,
        "params": params,
        "log_prob": log_prob,
        "advantage": advantage,
        "target": target,
        "value": value,
        "mask": mask,
    }
    return columns, explained


def value_carry(state: PpoState, segment: Segment) -> Tensor:
    """Return the value's recurrent state before row 0, [N, C]: its own, reset at episode starts, or the policy's."""
    if state.net.value.body is None:
        return segment.carry
    return state.progress.carry * ~segment.fresh.unsqueeze(1)


def segment_values(state: PpoState, segment: Segment, parts: int = 1) -> Tensor:
    """Return the network's raw values, [T + 1 + K + 1, N], and advance the value's recurrent state by one segment.

    Without recurrence, the rows are computed in ``parts`` to bound memory.
    """
    net = state.net
    if not net.value_body.carry_size:
        return by_parts(net.values, segment.obs, parts)
    values, carry = net.unroll_values(segment.obs, value_carry(state, segment), segment.first, segment.final_row)
    if net.value.body is not None:
        state.progress.carry.copy_(carry)
    return values


def advantages_and_targets(
    state: PpoState, segment: Segment, settings: PpoConfig, rows: ValuedRows
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Compute the targets of the tick's updates over all rows.

    Returns:
        the distribution's parameters before the first update, [T, N, P]; log-probabilities under it, returns and
        advantages, [T, N] each; weights of the advantages [T, N], or None if all are 1.
    """
    dist, value, lam = state.net.policy.dist, rows.value, settings.gae_lambda
    acted = dist.log_prob(segment.params, segment.action)
    if not settings.vtrace.enabled:
        advantage = gae(rows, lam)
        return segment.params, acted, advantage + value, advantage, None
    params = present(state, segment, settings.minibatches)
    log_prob = dist.log_prob(params, segment.action)
    return params, log_prob, *vtrace(log_prob - acted, rows, settings.vtrace, lam, pg_lam=lam)


def present(state: PpoState, segment: Segment, parts: int) -> Tensor:
    """Return the current policy's parameters for the segment's rows, [T, N, P]; without recurrence, in ``parts``."""
    policy, rows = state.net.policy, cut(segment.obs, segment.mask.shape[0])[0]
    if not policy.body.carry_size:
        return by_parts(policy, rows, parts)
    return policy.unroll(rows, segment.carry, segment.first)


def evaluate_minibatch(net: ActorCritic, batch: Minibatch) -> tuple[Tensor, Tensor]:
    """Return distribution parameters and values of a minibatch's rows, with gradients."""
    if batch.first is None or batch.carry is None or batch.value_carry is None:
        return net(batch.obs)
    return net.unroll(batch.obs, batch.carry[0], batch.value_carry[0], batch.first)


def value_scale(returns: Moments | None) -> tuple[Tensor | float, Tensor | float]:
    """Return standard deviation and mean of the returns so far: value = output * scale + shift."""
    if returns is None:
        return 1.0, 0.0
    mean, variance = returns.statistics()
    return (variance + EPSILON).sqrt().float(), mean.float()


def masked_moments(x: Tensor, mask: Tensor, group: Group = ALONE) -> tuple[Tensor, Tensor]:
    """Return mean and population variance of ``x`` [B] where ``mask`` [B] is 1, over the processes of ``group``; 0
    if the mask is 0 everywhere."""
    count = mask.sum()
    mean = (x * mask).sum() / count.clamp(min=1)
    squares = ((x - mean).square() * mask).sum()
    if group.size > 1:
        count, mean, squares = pooled(group.gather(pack_moments(count, mean, squares)), ())
    return mean, squares / count.clamp(min=1)


def ppo_update(state: PpoState, batch: Minibatch, settings: PpoConfig, gen: Generator) -> Metrics:
    """Take one step on policy, value and entropy. Mutates ``state`` only.

    The loss is -E[min(rho A, clip(rho) A)] + value_coef E[(V - target)^2] - entropy_coef E[H].
    """
    params, value = evaluate_minibatch(state.net, batch)
    share = batch.mask / batch.mask.sum().clamp(min=1)
    dist = state.net.policy.dist
    ratio = torch.exp(dist.log_prob(params, batch.action) - batch.log_prob)
    clip: float | Tensor | None = settings.clip
    if clip is not None and settings.anneal_clip:
        clip = clip * state.progress.fraction
    policy_loss = (share * surrogate_loss(ratio, batch.advantage, clip)).sum()
    critic_loss = (share * value_loss(value, batch.target, batch.value, settings.value_clip)).sum()
    entropy = (share * dist.entropy(params, gen)).sum()
    loss = policy_loss + settings.value_coef * critic_loss - settings.entropy_coef * entropy

    with torch.no_grad():
        kl = (share * dist.kl(batch.params, params)).sum()
        if settings.lr_schedule == "adaptive" or settings.kl_stop is not None:
            kl = state.group.mean(kl, batch.mask)
        skip = steer(state, settings, kl, batch.fresh)
        clipped = torch.zeros_like(kl) if clip is None else (share * ((ratio - 1).abs() > clip)).sum()
    norm = state.optimizer.minimize(loss, skip, batch.mask)
    return {
        "loss/policy": policy_loss.detach(),
        "loss/critic": critic_loss.detach(),
        "grad_norm/policy": norm,
        "policy/entropy": entropy.detach(),
        "policy/kl": kl,
        "policy/clip_fraction": clipped,
        "policy/lr": state.optimizer.lr,
        "policy/updates_kept": state.progress.go,
        "value/explained_variance": batch.explained,
        **(batch.lag.measures() if batch.lag else {}),
    }


def surrogate_loss(ratio: Tensor, advantage: Tensor, clip: float | Tensor | None) -> Tensor:
    """Return -min(rho A, clip(rho, 1 - c, 1 + c) A) (Schulman et al. 2017, Eq. 7); without ``clip``, -rho A. [B]."""
    if clip is None:
        return -ratio * advantage
    held = torch.clamp(ratio, 1 - clip, 1 + clip)  # type: ignore[arg-type]  # both are floats, or both tensors
    return -torch.minimum(ratio * advantage, held * advantage)


def value_loss(value: Tensor, target: Tensor, old: Tensor, clip: float | None) -> Tensor:
    """Return (V - target)^2; with ``clip``, the maximum of it and the same for V clipped around the old value. [B]."""
    loss = (value - target).square()
    if clip is None:
        return loss
    return torch.maximum(loss, (old + (value - old).clamp(-clip, clip) - target).square())


def steer(state: PpoState, settings: PpoConfig, kl: Tensor, fresh: bool) -> Tensor | None:
    """Set learning rate and gate from ``kl`` (a scalar) between the behaviour policy and the current one.

    Returns:
        1 if this step and the tick's remaining ones are skipped, else 0; None without ``kl_stop``.
    """
    if settings.lr_schedule == "adaptive" and not fresh:  # before the first step the KL is zero or is due to lag
        adapt_lr(state.optimizer.lr, kl, settings.kl_target)
    if settings.kl_stop is None:
        return None
    state.progress.go.mul_(kl <= settings.kl_stop)
    return 1 - state.progress.go


def adapt_lr(lr: Tensor, kl: Tensor, target: float) -> None:
    """Divide the scalar ``lr`` by 1.5 if the scalar ``kl`` is above twice the target; multiply it if below half."""
    factor = 1 + (LR_FACTOR - 1) * (kl < target / 2) + (1 / LR_FACTOR - 1) * (kl > target * 2)
    lr.mul_(factor).clamp_(LR_MIN, LR_MAX)


# -- wiring -----------------------------------------------------------------------------------------------------------


def own_state(config: Config[PpoConfig], flat: Flat, optimizer: Optimizer, num_envs: int) -> PpoState:
    """Create the learner's state."""
    return make_state(config, flat, optimizer, num_envs, config.algo.normalize_value)


FAMILY = OnPolicy(PpoConfig, own_state, draw_ppo, ppo_update).family()
