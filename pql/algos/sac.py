"""SAC(n): a stochastic policy and a temperature that keeps its entropy near a target.

Haarnoja et al. 2018b, with n-step targets; the entropy bonus enters at the bootstrap state only, as is usual with
n-step SAC. The critic's step is DDPG's.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Generator, Tensor, nn

from pql.algos.critics import CriticState, critic_step, loss_share, value_state
from pql.algos.ddpg import PolicyInputs, ValueInputs, ensemble_value
from pql.algos.off_policy import (
    OffPolicy,
    Tensors,
    Trainer,
    make_adam,
    make_atoms,
    make_deterministic_policy,
    make_lr_schedule,
)
from pql.collect.actors import Noise
from pql.config import Config, SacConfig
from pql.config.families import own
from pql.contract.env import EnvSpec
from pql.engine.optim import AdamW
from pql.engine.worker import State
from pql.nets.distributions import squashed_gaussian
from pql.nets.encoders import Outputs
from pql.nets.mlp import Critic, Flat, GaussianPolicy
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
class SacPolicyState(State):
    """State of SAC's P-learner: policy and temperature."""

    policy: Flat
    optimizer: AdamW
    temperature: Flat  # of a Temperature
    temperature_optimizer: AdamW
    target_entropy: float
    auto_temperature: bool = True
    reduce: str = "min"


def sac_value_update(state: CriticState, inputs: SacValueInputs, batch: Batch, gen: Generator) -> Metrics:
    """Step the critics towards r + discount * (Q'(s', a') - alpha log pi(a'|s')), a' ~ pi. Mutates only ``state``."""
    with torch.no_grad():
        mean, log_std = inputs.policy(batch.next_obs)
        action, log_prob = squashed_gaussian(mean, log_std, gen)
        bonus = -inputs.log_alpha.exp() * log_prob
    return critic_step(state, batch, action, bonus, gen)


def sac_policy_update(state: SacPolicyState, inputs: PolicyInputs, batch: ObsBatch, gen: Generator) -> Metrics:
    """Take one step on alpha log pi - Q, then one on the temperature. Mutates ``state`` only."""
    share = loss_share(batch.mask, batch.weight)
    mean, log_std = state.policy.module(batch.obs)
    action, log_prob = squashed_gaussian(mean, log_std, gen)
    q = ensemble_value(inputs, batch.obs, action, state.reduce)
    log_alpha = cast(Temperature, state.temperature.module).log_alpha
    loss = (share * (log_alpha.detach().exp() * log_prob - q)).sum()
    state.optimizer.zero_grad()
    loss.backward()
    norm = state.optimizer.step(mask=batch.mask)
    entropy = -(share * log_prob.detach()).sum()
    if state.auto_temperature:
        state.temperature_optimizer.zero_grad()
        (log_alpha * (entropy - state.target_entropy)).sum().backward()
        state.temperature_optimizer.step(mask=batch.mask)
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


def gaussian_policy(config: Config, spec: EnvSpec) -> nn.Module:
    """Create a Gaussian policy."""
    net = own(config, SacConfig).policy
    kind = partial(GaussianPolicy, log_std=(net.log_std_min, net.log_std_max))
    return make_deterministic_policy(config, spec, kind, probe_stochastic)


def sac_value_trainer(config: Config, critic: Critic, policy: nn.Module, device: torch.device) -> Trainer:
    """Create the V-learner's state and update."""
    state, log_alpha = value_state(config, critic, device), torch.zeros(1, device=device)
    pulls: Tensors = {"policy": [Flat(policy).data], "temperature": [log_alpha]}
    owns: Tensors = {"critic": [state.critic.data]}
    return Trainer(state, sac_value_update, SacValueInputs(policy, log_alpha), pulls, owns)


def sac_policy_trainer(config: Config, policy: nn.Module, critic: Critic, size: int, device: torch.device) -> Trainer:
    """Create the P-learner's state and update."""
    algo = own(config, SacConfig)
    net, flat = algo.policy, Flat(policy, trained=True)
    temperature = Flat(Temperature(algo.alpha).to(device), trained=True)
    temperature_optimizer = AdamW(temperature, algo.alpha_lr, betas=(net.beta1, net.beta2))
    temperature_optimizer.schedule = make_lr_schedule(algo, algo.p_per_v)
    state = SacPolicyState(
        flat,
        make_adam(config, flat, net, algo.p_per_v),
        temperature,
        temperature_optimizer,
        algo.entropy_goal(size),
        algo.auto_alpha,
        net.reduce,
    )
    pulls: Tensors = {"critic": [Flat(critic).data]}
    owns: Tensors = {"policy": [flat.data], "temperature": [temperature.data]}
    return Trainer(state, sac_policy_update, PolicyInputs(critic, make_atoms(config, device)), pulls, owns)


FAMILY = OffPolicy(SacConfig, gaussian_policy, sampled_action, sac_value_trainer, sac_policy_trainer).family()
