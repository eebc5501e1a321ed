"""SAC(n): a stochastic policy and a temperature that keeps its entropy near a target.

Haarnoja et al. 2018b, with n-step targets; the entropy bonus enters at the bootstrap state only, as is usual with
n-step SAC. The critics' step is ``critics.critic_step``. The policy's updates draw batches of their own.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Generator, Tensor, nn

from pql.algos.builders import replay_learner
from pql.algos.critics import CriticState, critic_step, loss_share, make_critic_state
from pql.algos.off_policy import OffPolicy, PolicyDraw, ValueDraw, check_off_policy
from pql.algos.policies import PolicyState, ensemble_value, make_policy_network, make_policy_state
from pql.algos.registry import Setup
from pql.collect.actors import Noise
from pql.config import Config, SacConfig
from pql.contract.env import Box, EnvSpec
from pql.engine.flat import Flat
from pql.engine.optim import AdamW, make_lr_schedule
from pql.engine.schedule import Counts
from pql.engine.worker import Learner, State, Tensors
from pql.errors import ConfigError
from pql.nets.distributions import squashed_gaussian
from pql.nets.encoders import Outputs
from pql.nets.layers import batch_statistics
from pql.nets.mlp import Critic, GaussianPolicy
from pql.types import Batch, Metrics, Obs, ObsBatch

LogSlope = Callable[[Tensor, Tensor], Tensor | float]


class Temperature(nn.Module):
    """log(alpha) as a parameter."""

    def __init__(self, initial: float):
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor([initial]).log())


@dataclass(kw_only=True)
class TemperatureState(State):
    """The temperature's part of a learner's state.

    Attributes:
        log_alpha: [1] log(alpha): that of ``temperature``, or a copy.
        temperature: parameters of a :class:`Temperature`; None: the other learner has them.
        log_slope: (mean, log_std) -> what to subtract from log-densities in [-1, 1] for those in the unit of
            ``algo.entropy_unit``; None: nothing. See :func:`log_slope`.
    """

    log_alpha: Tensor
    temperature: Flat | None
    temperature_optimizer: AdamW | None
    log_slope: LogSlope | None

    def sample(self, mean: Tensor, log_std: Tensor, gen: Generator) -> tuple[Tensor, Tensor]:
        """Draw actions in [-1, 1], [B, A], with their log-density in the unit of densities, [B]."""
        action, log_prob = squashed_gaussian(mean, log_std, gen)
        return action, log_prob - self.log_slope(mean, log_std) if self.log_slope else log_prob


@dataclass(kw_only=True)
class SacCriticState(TemperatureState, CriticState):
    """State of SAC's V-learner, with the temperature if ``algo.alpha_updates`` is critic."""


@dataclass(kw_only=True)
class SacPolicyState(TemperatureState, PolicyState):
    """State of SAC's P-learner, with the temperature unless the V-learner has it."""


def update_temperature(state: TemperatureState, settings: SacConfig, entropy: Tensor, size: int, mask: Tensor) -> None:
    """Take a step on the temperature, if this learner has it and it is learned.

    Args:
        entropy: 0-dim mean over the rows of ``mask`` [B].
        size: dimensions of the action.
    """
    if state.temperature_optimizer is None or not settings.auto_alpha:
        return
    factor = state.log_alpha if settings.alpha_loss == "log" else state.log_alpha.exp()
    loss = (factor * (entropy - settings.entropy_goal(size))).sum()
    state.temperature_optimizer.minimize(loss, mask=mask)


def sac_value_update(state: SacCriticState, batch: Batch, settings: SacConfig, gen: Generator) -> Metrics:
    """Step the critics towards r + discount * (Q'(s', a') - alpha log pi(a'|s')), a' ~ pi. Mutates only ``state``."""
    with torch.no_grad():
        mean, log_std = state.policy(batch.next_obs)  # [B, A] each
        action, log_prob = state.sample(mean, log_std, gen)
        bonus = -state.log_alpha.exp() * log_prob
    metrics = critic_step(state, batch, settings, action, bonus, gen)
    if state.temperature is not None:
        entropy = -(loss_share(batch.followed, batch.weight) * log_prob).sum()
        update_temperature(state, settings, entropy, action.shape[-1], batch.followed)
    return metrics


def sac_policy_update(state: SacPolicyState, batch: ObsBatch, settings: SacConfig, gen: Generator) -> Metrics:
    """Take one step on alpha log pi - Q, then one on the temperature. Mutates ``state`` only."""
    net, share = settings.policy, loss_share(batch.mask, batch.weight)
    with batch_statistics(state.policy.module, batch.mask, tracked=True):
        mean, log_std = state.policy.module(batch.obs)  # [B, A] each
    action, log_prob = state.sample(mean, log_std, gen)
    q = ensemble_value(state, batch.obs, action, net.reduce)
    alpha = state.log_alpha.detach().exp()  # [1]
    loss = (share * (alpha * log_prob - q)).sum()

    norm = state.optimizer.minimize(loss, mask=batch.mask)
    state.update_average(net.average)
    entropy = -(share * log_prob.detach()).sum()
    update_temperature(state, settings, entropy, action.shape[-1], batch.mask)
    return {
        "loss/policy": loss.detach(),
        "grad_norm/policy": norm,
        "policy/entropy": entropy,
        "policy/alpha": state.log_alpha.detach().exp().squeeze(0),
    }


# -- wiring -----------------------------------------------------------------------------------------------------------


def probe_stochastic(network: nn.Module, obs: Obs, action: Tensor) -> Outputs:
    """Return a Gaussian policy's outputs for two rows, [2, A] each."""
    mean, log_std = network(obs)
    outputs = {
        "forward(obs)'s mean": mean,
        "forward(obs)'s log_std": log_std,
        "mean_action": cast(Any, network).mean_action(obs),
    }
    return [(call, output, list(action.shape)) for call, output in outputs.items()]


def sampled_action(policy: nn.Module, obs: Obs, noise: Noise) -> Tensor:
    """Sample an action from the policy, [N, A]."""
    mean, log_std = policy(obs)
    return torch.tanh(mean + log_std.exp() * noise(mean))


def gaussian_policy(config: Config[Any], spec: EnvSpec) -> nn.Module:
    """Create a Gaussian policy."""
    net = config.algo.policy
    kind = partial(GaussianPolicy, log_std=(net.log_std_min, net.log_std_max), clip=net.log_std == "clip")
    return make_policy_network(config, spec, kind, probe_stochastic)


def log_reach(config: Config[SacConfig], spec: EnvSpec) -> float:
    """Return the sum over the action's dimensions of log(``spec.action_reach``), or 0 for densities in [-1, 1].

    Raises:
        ConfigError: a dimension without a finite range.
    """
    if config.algo.entropy_unit == "unit":
        return 0.0
    reach = spec.action_reach
    for i, one in enumerate(reach):
        if not 0 < one < math.inf:
            raise ConfigError("algo.entropy_unit", "action", f"unit: an action of 1 is {one:g} in dimension {i}")
    return sum(map(math.log, reach))


def log_slope(config: Config[SacConfig], spec: EnvSpec, device: torch.device) -> LogSlope | None:
    """Return the function of :class:`TemperatureState`: sum over dimensions of log |d simulator's action / d action|.

    The slope is a number for each dimension, unless an action of 0 is not the bounds' middle (``Box.center``). It then
    is ``down`` below 0 and ``up`` above, and its expectation over the policy's Gaussian is used, log(down) +
    P(action > 0) (log(up) - log(down)), because the gradient of a sampled slope would lack that of the probability.
    """
    box = cast(Box, spec.action)
    if config.algo.entropy_unit == "unit" or box.center is None:
        total = log_reach(config, spec)
        return (lambda mean, log_std: total) if total else None
    low, center, high = (torch.tensor(x, device=device) for x in (box.low, box.center, box.high))
    down, up = (center - low).log(), (high - center).log()

    def expected(mean: Tensor, log_std: Tensor) -> Tensor:
        return (down + torch.special.ndtr(mean / log_std.exp()) * (up - down)).sum(-1)

    return expected


def check_sac(config: Config[SacConfig], spec: EnvSpec, counts: Counts, device: torch.device) -> int:
    """Check a config as :func:`check_off_policy` does, and that the target entropy can be reached."""
    rows, algo = check_off_policy(config, spec, counts, device), config.algo
    size = cast(Box, spec.action).size
    most = math.log(2) + log_reach(config, spec) / size  # of each dimension: that of uniform actions
    if algo.auto_alpha and algo.entropy_goal(size) >= most * size:
        ends = {"target_entropy": most * size, "target_sigma": math.exp(most) / math.sqrt(2 * math.pi * math.e)}
        name = next((k for k in ends if getattr(algo, k) is not None), "entropy_per_action")
        bound, why = ends.get(name, most), "no actions within the bounds have more entropy than uniform ones"
        other = ", or algo.entropy_unit=unit" if algo.entropy_unit == "action" else ""
        raise ConfigError(f"algo.{name}", getattr(algo, name), f"below {bound:.4g}, as {why}{other}")
    return rows


def temperature_fields(
    setup: Setup[SacConfig], device: torch.device, learner: str, per_update: float
) -> dict[str, Any]:
    """Return the fields of a :class:`TemperatureState`.

    Args:
        learner: ``critic`` or ``policy``; it has the temperature if it is ``algo.alpha_updates``.
        per_update: its steps per critic update.
    """
    algo, flat, optimizer = setup.config.algo, None, None
    log_alpha = torch.zeros(1, device=device)  # filled by the first pull, unless the temperature is here
    if algo.alpha_updates == learner:
        module = Temperature(algo.alpha).to(device)
        flat, log_alpha = Flat(module, trained=True), module.log_alpha
        optimizer = AdamW(flat, algo.alpha_lr, betas=(algo.policy.beta1, algo.policy.beta2))
        optimizer.schedule = make_lr_schedule(algo, algo.clocked(per_update))
    return {
        "log_alpha": log_alpha,
        "temperature": flat,
        "temperature_optimizer": optimizer,
        "log_slope": log_slope(setup.config, setup.spec, device),
    }


def exchange_temperature(state: TemperatureState, pulls: Tensors, publishes: Tensors) -> None:
    """Add the temperature to what a learner publishes, or to what it pulls."""
    if state.temperature is None:
        pulls["temperature"] = [state.log_alpha]
    else:
        publishes["temperature"] = state.temperature.tensors()


def sac_value_learner(setup: Setup[SacConfig], critic: Critic, policy: nn.Module, draw: ValueDraw) -> Learner:
    """Create the V-learner."""
    more = temperature_fields(setup, draw.replay.device, "critic", 1.0)
    state = make_critic_state(SacCriticState, setup.config, critic, policy, **more)
    pulls, publishes = {"policy": Flat(policy).tensors()}, {"critic": state.critic.tensors()}
    exchange_temperature(state, pulls, publishes)
    return replay_learner(setup, state, sac_value_update, draw, pulls, publishes)


def sac_policy_learner(setup: Setup[SacConfig], policy: nn.Module, critic: Critic, draw: PolicyDraw) -> Learner:
    """Create the P-learner."""
    more = temperature_fields(setup, draw.replay.device, "policy", setup.config.algo.p_per_v)
    state = make_policy_state(SacPolicyState, setup.config, policy, critic, **more)
    pulls, publishes = {"critic": Flat(critic).tensors()}, {"policy": state.policy.tensors()}
    exchange_temperature(state, pulls, publishes)
    return replay_learner(setup, state, sac_policy_update, draw, pulls, publishes)


FAMILY = replace(
    OffPolicy(SacConfig, gaussian_policy, sampled_action, sac_value_learner, sac_policy_learner).family(),
    check=check_sac,
)
