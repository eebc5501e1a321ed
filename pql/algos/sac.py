"""SAC(n): a stochastic policy and a temperature that keeps its entropy near a target.

Haarnoja et al. 2018b, with n-step targets; the entropy bonus enters at the bootstrap state only, as is usual with
n-step SAC. The critic's step is DDPG's.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Generator, Tensor, nn

from pql.algos.critics import CriticState, critic_step, loss_share, make_adam, make_atoms, value_state
from pql.algos.ddpg import PolicyInputs, ValueInputs, ensemble_value
from pql.algos.off_policy import AveragedState, OffPolicy, Tensors, Trainer, check_off_policy, make_deterministic_policy
from pql.collect.actors import Noise
from pql.config import Config, SacConfig
from pql.contract.env import Box, EnvSpec
from pql.engine.flat import Flat
from pql.engine.optim import AdamW, make_lr_schedule
from pql.engine.schedule import Counts
from pql.engine.worker import State
from pql.errors import ConfigError
from pql.nets.distributions import squashed_gaussian
from pql.nets.encoders import Outputs
from pql.nets.layers import batch_statistics
from pql.nets.mlp import Critic, GaussianPolicy
from pql.types import Batch, Metrics, Obs, ObsBatch


class Temperature(nn.Module):
    """log(alpha) as a parameter."""

    def __init__(self, initial: float):
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor([initial]).log())


@dataclass
class SacValueInputs(ValueInputs):
    log_alpha: Tensor  # [1]


@dataclass
class SacPolicyInputs(PolicyInputs):
    log_alpha: Tensor | None = None  # [1]; None: the P-learner has the temperature


@dataclass
class TemperatureState(State):
    """The temperature's part of a learner's state."""

    temperature: Flat | None = None  # of a Temperature; None: the other learner has it
    temperature_optimizer: AdamW | None = None
    target_entropy: Callable[[int], float] = float  # dimensions of the action -> target entropy
    auto_temperature: bool = True
    temperature_loss: str = "log"  # factor of the loss: log(alpha) (log) or alpha (exp)
    log_reach: float = 0.0  # logarithm of the volume of [0, 1]^A in the unit of densities (algo.entropy_unit)

    def sample(self, mean: Tensor, log_std: Tensor, gen: Generator) -> tuple[Tensor, Tensor]:
        """Draw actions in [-1, 1], [B, A], with their log-density in the unit of densities, [B]."""
        action, log_prob = squashed_gaussian(mean, log_std, gen)
        return action, log_prob - self.log_reach if self.log_reach else log_prob

    def log_alpha(self) -> Tensor:
        """Return log(alpha), [1]."""
        assert self.temperature is not None
        return cast(Temperature, self.temperature.module).log_alpha

    def temper(self, entropy: Tensor, size: int, mask: Tensor) -> None:
        """Take a step on the temperature, if it is learned.

        Args:
            entropy: 0-dim mean over the rows of ``mask`` [B].
            size: dimensions of the action.
        """
        if self.temperature_optimizer is None or not self.auto_temperature:
            return
        factor = self.log_alpha() if self.temperature_loss == "log" else self.log_alpha().exp()
        self.temperature_optimizer.zero_grad()
        (factor * (entropy - self.target_entropy(size))).sum().backward()
        self.temperature_optimizer.step(mask=mask)


@dataclass
class SacCriticState(TemperatureState, CriticState):
    """State of SAC's V-learner, with the temperature if ``algo.alpha_updates`` is critic."""


@dataclass(kw_only=True)
class SacPolicyState(TemperatureState, AveragedState):
    """State of SAC's P-learner, with the temperature unless the V-learner has it."""

    optimizer: AdamW
    reduce: str = "min"


def sac_value_update(state: SacCriticState, inputs: SacValueInputs, batch: Batch, gen: Generator) -> Metrics:
    """Step the critics towards r + discount * (Q'(s', a') - alpha log pi(a'|s')), a' ~ pi. Mutates only ``state``."""
    with torch.no_grad():
        mean, log_std = inputs.policy(batch.next_obs)
        action, log_prob = state.sample(mean, log_std, gen)
        log_alpha = inputs.log_alpha if state.temperature is None else state.log_alpha()
        bonus = -log_alpha.exp() * log_prob
    metrics = critic_step(state, batch, action, bonus, gen)
    if state.temperature is not None:
        entropy = -(loss_share(batch.followed, batch.weight) * log_prob).sum()
        state.temper(entropy, action.shape[-1], batch.followed)
    return metrics


def sac_policy_update(state: SacPolicyState, inputs: SacPolicyInputs, batch: ObsBatch, gen: Generator) -> Metrics:
    """Take one step on alpha log pi - Q, then one on the temperature. Mutates ``state`` only."""
    share = loss_share(batch.mask, batch.weight)
    with batch_statistics(state.policy.module, batch.mask, tracked=True):
        mean, log_std = state.policy.module(batch.obs)
    action, log_prob = state.sample(mean, log_std, gen)
    q = ensemble_value(inputs, batch.obs, action, state.reduce)
    log_alpha = state.log_alpha() if inputs.log_alpha is None else inputs.log_alpha
    loss = (share * (log_alpha.detach().exp() * log_prob - q)).sum()
    state.optimizer.zero_grad()
    loss.backward()
    norm = state.optimizer.step(mask=batch.mask)
    state.update_average()
    entropy = -(share * log_prob.detach()).sum()
    state.temper(entropy, action.shape[-1], batch.mask)
    return {
        "loss/policy": loss.detach(),
        "grad_norm/policy": norm,
        "policy/entropy": entropy,
        "policy/alpha": log_alpha.detach().exp().squeeze(0),
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


def gaussian_policy(config: Config[SacConfig], spec: EnvSpec) -> nn.Module:
    """Create a Gaussian policy."""
    net = config.algo.policy
    kind = partial(GaussianPolicy, log_std=(net.log_std_min, net.log_std_max), clip=net.log_std == "clip")
    policy = make_deterministic_policy(config, spec, kind, probe_stochastic)
    cast(Any, policy).log_reach = log_reach(config, spec)  # both learners are given the policy, not the specification
    return policy


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


def check_sac(config: Config[SacConfig], spec: EnvSpec, counts: Counts, device: torch.device) -> int:
    """Check a config as :func:`check_off_policy` does, and that the target entropy can be reached."""
    rows, algo = check_off_policy(config, spec, counts, device), config.algo
    size = cast(Box, spec.action).size
    most = math.log(2) + log_reach(config, spec) / size  # of each dimension: that of uniform actions
    if algo.auto_alpha and algo.entropy_goal(size) >= most * size:
        ends = {"target_entropy": most * size, "target_sigma": math.exp(most) / math.sqrt(2 * math.pi * math.e)}
        name = next((k for k in ends if getattr(algo, k) is not None), "entropy_per_action")
        allowed = (
            f"below {ends.get(name, most):.4g}, as no actions within the bounds have more entropy than uniform ones"
        )
        other = ", or algo.entropy_unit=unit" if algo.entropy_unit == "action" else ""
        raise ConfigError(f"algo.{name}", getattr(algo, name), allowed + other)
    return rows


def make_temperature(
    config: Config[SacConfig], state: TemperatureState, per_update: float, device: torch.device
) -> Flat:
    """Give a learner's state the temperature, and return it.

    Args:
        per_update: its steps per critic update.
    """
    algo = config.algo
    flat = Flat(Temperature(algo.alpha).to(device), trained=True)
    optimizer = AdamW(flat, algo.alpha_lr, betas=(algo.policy.beta1, algo.policy.beta2))
    optimizer.schedule = make_lr_schedule(algo, algo.clocked(per_update))
    state.temperature, state.temperature_optimizer = flat, optimizer
    state.target_entropy, state.temperature_loss = algo.entropy_goal, algo.alpha_loss
    state.auto_temperature = algo.auto_alpha
    return flat


def sac_value_trainer(config: Config[SacConfig], critic: Critic, policy: nn.Module, device: torch.device) -> Trainer:
    """Create the V-learner's state and update."""
    state = value_state(SacCriticState, config, critic, device)
    state.log_reach = getattr(policy, "log_reach", 0.0)
    inputs = SacValueInputs(policy, torch.zeros(1, device=device))
    pulls: Tensors = {"policy": Flat(policy).tensors()}
    owns: Tensors = {"critic": state.critic.tensors()}
    if config.algo.alpha_updates == "critic":
        owns["temperature"] = make_temperature(config, state, 1.0, device).tensors()
    else:
        pulls["temperature"] = [inputs.log_alpha]
    return Trainer(state, sac_value_update, inputs, pulls, owns)


def sac_policy_trainer(
    config: Config[SacConfig], policy: nn.Module, critic: Critic, size: int, device: torch.device
) -> Trainer:
    """Create the P-learner's state and update."""
    algo = config.algo
    net, flat = algo.policy, Flat(policy, trained=True)
    state = SacPolicyState(policy=flat, optimizer=make_adam(config, flat, net, algo.p_per_v), reduce=net.reduce)
    state.log_reach = getattr(policy, "log_reach", 0.0)
    inputs = SacPolicyInputs(critic, make_atoms(config, device))
    pulls: Tensors = {"critic": Flat(critic).tensors()}
    owns: Tensors = {"policy": flat.tensors()}
    if algo.alpha_updates == "policy":
        owns["temperature"] = make_temperature(config, state, algo.p_per_v, device).tensors()
    else:
        inputs.log_alpha = torch.zeros(1, device=device)
        pulls["temperature"] = [inputs.log_alpha]
    return Trainer(state, sac_policy_update, inputs, pulls, owns)


FAMILY = replace(
    OffPolicy(SacConfig, gaussian_policy, sampled_action, sac_value_trainer, sac_policy_trainer).family(),
    check=check_sac,
)
