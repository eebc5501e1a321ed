"""Policies of off-policy actor-critics: state of the P-learner, the value that a policy is trained on, networks."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from torch import Tensor, nn

from pql.algos.critics import make_adam, make_atoms
from pql.algos.memory import make_memory_input
from pql.config import Config
from pql.config.algorithms import ActorCriticConfig
from pql.contract.env import Box, EnvSpec
from pql.engine.flat import Flat
from pql.engine.optim import AdamW, polyak
from pql.engine.worker import PULLED, State
from pql.nets.encoders import Probe, custom_network, lend_encoder, make_layers
from pql.nets.mlp import Critic, Reads
from pql.types import Obs


@dataclass(kw_only=True)
class PolicyState(State):
    """State of the P-learner.

    Attributes:
        average: running average of the policy, if ``algo.policy.average`` is set (Polyak & Juditsky 1992).
        critic: copy of the critics.
        atoms: [Z] support of categorical critics, or None.
    """

    policy: Flat
    optimizer: AdamW
    average: Flat | None
    critic: Critic = field(metadata=PULLED)
    atoms: Tensor | None

    def update_average(self, weight: float | None) -> None:
        """Move the average towards the policy."""
        if self.average is not None and weight is not None:
            polyak(self.average, self.policy, weight)

    @property
    def evaluated(self) -> Flat:
        """The policy that is evaluated, saved and exported: the average, if there is one."""
        return self.policy if self.average is None else self.average


PolicyStates = TypeVar("PolicyStates", bound=PolicyState)


def ensemble_value(state: PolicyState, obs: Obs, action: Tensor, rule: str) -> Tensor:
    """Return the value of (obs, action) that a policy is trained on, [B].

    Args:
        action: [B, A].
        rule: of the ensemble's values (``algo.policy.reduce``).
    """
    q = state.critic(obs, action)  # [E, B] or [E, B, Z]
    if state.atoms is not None:
        q = q.softmax(-1) @ state.atoms
    if rule == "first":
        return q[0]
    return q.mean(0) if rule == "mean" else q.amin(0)


def make_policy_state(
    kind: type[PolicyStates], config: Config[ActorCriticConfig], policy: nn.Module, critic: Critic, **more: Any
) -> PolicyStates:
    """Create the P-learner's state.

    Args:
        kind: its class.
        critic: the P-learner's copy.
        more: fields that ``kind`` adds.
    """
    algo, flat = config.algo, Flat(policy, trained=True)
    return kind(
        policy=flat,
        optimizer=make_adam(config, flat, algo.policy, algo.p_per_v),
        average=None if algo.policy.average is None else make_follower(policy, critic),
        critic=critic,
        atoms=make_atoms(config, flat.data.device),
        **more,
    )


def make_follower(policy: nn.Module, critic: Critic) -> Flat:
    """Return a copy of a policy that follows it by Polyak averaging; it shares an encoder that the critic has."""
    follower = copy.deepcopy(policy)
    lend_encoder(critic, follower)
    return Flat(follower)


def make_policy_network(
    config: Config[ActorCriticConfig], spec: EnvSpec, kind: Callable[..., Reads], probe: Probe
) -> nn.Module:
    """Create a ``kind`` network, or the custom ``algo.policy.net``, whose outputs are checked by ``probe``."""
    net = config.algo.policy
    if net.net is not None:
        return custom_network(config, spec, "policy", probe)
    policy = kind(make_memory_input(config, spec, "policy"), cast(Box, spec.action).size, make_layers(net))
    policy.borrows = net.encoder == "critic"
    return policy
