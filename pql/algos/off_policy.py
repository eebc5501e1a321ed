"""Off-policy actor-critic: a V-learner (critic), a P-learner (policy) and a collector around a replay buffer.

DDPG and SAC are instances of :class:`OffPolicy`; ``Concurrent`` makes them Parallel Q-Learning (Li et al. 2023).
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Generator, Tensor, nn

from pql.algos.registry import (
    Family,
    Role,
    Setup,
    Wiring,
    check_continuous,
    check_obs,
    make_adamw,
    make_lr_schedule,
    make_normalizer,
    make_ring,
    ring_rows,
    stored_obs,
)
from pql.collect.actors import ActFunction, NoisyActor
from pql.collect.collector import Collector
from pql.collect.exploration import Exploration
from pql.config import Config
from pql.config.algorithms import ActorCriticConfig
from pql.config.families import own
from pql.config.groups import ClimbingPolicyConfig, CriticConfig
from pql.contract.env import Box, EnvSpec
from pql.data.augment import Augment
from pql.data.normalize import Normalizer
from pql.data.replay import Cursor, Replay
from pql.engine.optim import AdamW, polyak
from pql.engine.schedule import Counts, tick_counts
from pql.engine.worker import Learner, State
from pql.errors import ConfigError
from pql.nets.encoders import (
    Outputs,
    Probe,
    channels_last,
    custom_network,
    groups_of,
    image_size,
    is_image,
    lend_encoder,
    make_input,
    make_layers,
)
from pql.nets.layers import project_weights
from pql.nets.mlp import Critic, Flat, Reads, seeded
from pql.types import Batch, Metrics, Obs, ObsBatch, split

Update = Callable[[Any, Any, Any, Generator], Metrics]
Net = TypeVar("Net", bound=nn.Module)
Tensors = dict[str, list[Tensor]]
"""Tensors by the slot that publishes or fills them."""


@dataclass
class Trainer:
    """State and update function of a learner.

    Attributes:
        state: mutated by ``update``.
        inputs: own copies of networks published by other workers.
        pulls: tensors of those copies, by the slot that fills them.
        owns: published tensors, by slot.
    """

    state: State
    update: Update
    inputs: Any
    pulls: Tensors = field(default_factory=dict)
    owns: Tensors = field(default_factory=dict)


@dataclass(kw_only=True)
class AveragedState(State):
    """A P-learner's policy and its running average, where ``algo.policy.average`` is set (Polyak & Juditsky 1992)."""

    policy: Flat
    average: Flat | None = None
    average_weight: float = 0.0

    def update_average(self) -> None:
        """Move the average towards the policy."""
        if self.average is not None:
            polyak(self.average, self.policy, self.average_weight)

    @property
    def evaluated(self) -> Flat:
        """The policy that is evaluated, saved and exported: the average, if there is one."""
        return self.policy if self.average is None else self.average


@dataclass(frozen=True)
class OffPolicy:
    """The functions that define an off-policy actor-critic algorithm.

    Attributes:
        settings: class of ``config.algo``.
        policy: (config, spec) -> policy network on the CPU.
        act: (policy, obs, noise) -> action [N, A], before exploration noise.
        value: (config, critic, policy copy, device) -> trainer of the critics.
        improve: (config, policy, critic copy, action size, device) -> trainer of the policy.
    """

    settings: type[ActorCriticConfig]
    policy: Callable[[Config, EnvSpec], nn.Module]
    act: ActFunction
    value: Callable[[Config, Critic, nn.Module, torch.device], Trainer]
    improve: Callable[[Config, nn.Module, Critic, int, torch.device], Trainer]

    def family(self) -> Family:
        """Return the entry for the algorithm registry."""
        return Family(self.settings, off_policy_counts, check_off_policy, partial(wire_off_policy, self), self.policy)


def off_policy_counts(config: Config) -> Counts:
    """Return the smallest tick with whole numbers of steps and updates."""
    algo = own(config, ActorCriticConfig)
    return tick_counts(algo.v_per_step, algo.p_per_v)


def check_off_policy(config: Config, spec: EnvSpec, counts: Counts, device: torch.device) -> int:
    """Check a config against an environment spec. Returns the replay's rows T.

    Raises:
        ConfigError: unsupported action or observation space, or a replay that is too small or too large.
    """
    check_continuous(config, spec)
    check_obs(config, spec)
    check_images(config, spec)
    return ring_rows(config, spec, counts, device)


def check_images(config: Config, spec: EnvSpec) -> None:
    """Check settings of images.

    Raises:
        ConfigError: policy and critic should share an encoder and read different images, or an augmentation does not
            fit the images.
    """
    algo = own(config, ActorCriticConfig)
    images = {k: s for k, s in stored_obs(config, spec).items() if is_image(s)}
    if algo.policy.encoder == "critic":
        policy, critic = ({*groups_of(config, spec, which)} & {*images} for which in ("policy", "critic"))
        if not policy or policy != critic:
            seen = [", ".join(sorted(groups)) or "none" for groups in (policy, critic)]
            allowed = f"own, or the same images for both: the policy reads {seen[0]}, the critic {seen[1]}"
            raise ConfigError("algo.policy.encoder", "critic", f"{allowed} (algo.policy.obs, algo.critic.obs)")
    for group, one in images.items():
        side = min(image_size(one.shape)[1:])
        if algo.encoder.shift >= side:
            known = f"{group!r} is stored as {list(one.shape)}"
            raise ConfigError("algo.encoder.shift", algo.encoder.shift, f"below {side}: {known}")
        if algo.encoder.jitter > 0 and one.dtype != torch.uint8:
            kind = str(one.dtype).removeprefix("torch.")
            raise ConfigError("algo.encoder.jitter", algo.encoder.jitter, f"0: {group!r} is {kind}, not bytes (uint8)")


def wire_off_policy(kind: OffPolicy, setup: Setup) -> Wiring:
    """Create networks, replay and workers. A P-learner on another device has a replay of observations only."""
    config, spec, devices = setup.config, setup.spec, setup.devices
    nets = seeded(lambda: (kind.policy(config, spec), make_critic(config, spec)), setup.init_seed)
    lend_encoder(nets[1], nets[0])  # copies of both begin with the same weights
    normalizer = make_normalizer(setup)
    replays = [make_ring(setup, "v")]
    if devices["p"] != devices["v"]:
        replays.append(make_ring(setup, "p", obs_only=True))
    actor = make_noisy_actor(kind, config, spec, nets[0])
    collector = Collector(setup.env, actor, normalizer, replays, setup.generator("collector"), setup.capture)
    roles = {
        "v": critic_role(kind, setup, *nets, normalizer, replays[0]),
        "p": policy_role(kind, setup, *nets, normalizer, replays[-1]),
        "collector": Role(
            pulls={"policy": Flat(collector.actor.policy).tensors()},
            owns={"norm": normalizer.frozen(), "rows": replays[0].live.tensors()},
        ),
    }
    cursor, learner = roles["v"].cursor, roles["p"].learner
    assert cursor is not None
    assert learner is not None
    policy = cast(AveragedState, learner.state).evaluated
    return Wiring(collector, roles, policy, {"replay/bootstrap_lost": cursor.lost})


def critic_role(
    kind: OffPolicy, setup: Setup, policy: nn.Module, critic: Critic, norm: Normalizer, replay: Replay
) -> Role:
    """Create the V-learner: critic, target, and own copies of policy, normaliser and cursor."""
    config, device = setup.config, replay.device
    algo = own(config, ActorCriticConfig)
    trainer = kind.value(config, learner_copy(critic, algo, device), learner_copy(policy, algo, device), device)
    replay.constants(algo.n_step, algo.gamma)  # the copy to the device would stall the first tick
    draw = ValueDraw(algo, replay, Cursor(replay.num_envs, device), norm.copy_to(device), make_augment(setup))
    learner = Learner("v", trainer.state, trainer.update, draw, trainer.inputs, setup.generator("v"))
    return Role({**trainer.pulls, **draw.pulls()}, trainer.owns, learner, draw.cursor)


def policy_role(
    kind: OffPolicy, setup: Setup, policy: nn.Module, critic: Critic, norm: Normalizer, replay: Replay
) -> Role:
    """Create the P-learner: policy, and own copies of critic, normaliser and cursor."""
    config, device, size = setup.config, replay.device, cast(Box, setup.spec.action).size
    algo = own(config, ActorCriticConfig)
    policy, critic = learner_copy(policy, algo, device), learner_copy(critic, algo, device)
    lend_encoder(critic, policy)
    trainer = kind.improve(config, policy, critic, size, device)
    if algo.policy.average is not None:
        state = cast(AveragedState, trainer.state)
        state.average, state.average_weight = make_follower(policy, critic), algo.policy.average
    draw = PolicyDraw(algo, replay, Cursor(replay.num_envs, device), norm.copy_to(device), make_augment(setup))
    learner = Learner("p", trainer.state, trainer.update, draw, trainer.inputs, setup.generator("p"))
    return Role({**trainer.pulls, **draw.pulls()}, trainer.owns, learner, draw.cursor)


def make_follower(policy: nn.Module, critic: Critic) -> Flat:
    """Return a copy of a policy that follows it by Polyak averaging; it shares an encoder that the critic has."""
    follower = copy.deepcopy(policy)
    lend_encoder(critic, follower)
    return Flat(follower)


@dataclass
class PolicyDraw:
    """Sample batches of normalised observations from the rows sealed one tick earlier."""

    algo: ActorCriticConfig
    replay: Replay
    cursor: Cursor
    norm: Normalizer
    augment: Augment

    def pulls(self) -> Tensors:
        """Return the tensors to pull, by slot."""
        return {"norm": self.norm.frozen(), "rows": self.cursor.tensors()}

    def __call__(self, count: int, gen: Generator) -> list[ObsBatch]:
        """Return ``count`` batches of observations [B, ...]."""
        batch = self.replay.sample_obs(self.cursor, count * self.algo.batch_size, gen)
        batches = split(batch._replace(obs=self.norm(batch.obs)), count)
        return [one._replace(obs=self.augment(one.obs, gen)) for one in batches]


class ValueDraw(PolicyDraw):
    """Sample batches of normalised n-step transitions."""

    def __call__(self, count: int, gen: Generator) -> list[Batch]:  # type: ignore[override]
        """Return ``count`` batches of B transitions."""
        algo, norm = self.algo, self.norm
        batch = self.replay.sample(self.cursor, count * algo.batch_size, algo.n_step, algo.gamma, gen)
        reward = batch.reward * norm.reward_scale
        batches = split(batch._replace(obs=norm(batch.obs), next_obs=norm(batch.next_obs), reward=reward), count)
        return [
            one._replace(obs=self.augment(one.obs, gen), next_obs=self.augment(one.next_obs, gen)) for one in batches
        ]


def make_augment(setup: Setup) -> Augment:
    """Create the augmentation of all images of an environment."""
    encoder = own(setup.config, ActorCriticConfig).encoder
    images = {k: channels_last(s.shape) for k, s in setup.spec.obs.items() if is_image(s)}
    return Augment(images, encoder.shift, encoder.jitter)


def learner_copy(net: Net, algo: ActorCriticConfig, device: torch.device) -> Net:
    """Return a learner's copy of a network, which computes in the learners' precision."""
    net = copy.deepcopy(net).to(device)
    if isinstance(net, Reads):
        net.amp = algo.amp
    return net


# -- networks and actor -----------------------------------------------------------------------------------------------


def make_adam(config: Config, flat: Flat, net: CriticConfig | ClimbingPolicyConfig, per_update: float = 1.0) -> AdamW:
    """Create the optimiser of a network, with the algorithm's learning-rate schedule.

    Args:
        per_update: its steps per critic update.
    """
    optimizer, algo = make_adamw(flat, net), own(config, ActorCriticConfig)
    optimizer.schedule = make_lr_schedule(algo, algo.clocked(per_update))
    if net.net is None and net.projected != "none":
        optimizer.project = partial(project_weights, cast(Any, flat.module).net, net.projected)
    return optimizer


def make_atoms(config: Config, device: torch.device) -> Tensor | None:
    """Return the categorical critic's support [Z], or None for a scalar critic."""
    net = own(config, ActorCriticConfig).critic
    return None if net.atoms is None else torch.linspace(net.v_min, net.v_max, net.atoms, device=device)


def make_deterministic_policy(config: Config, spec: EnvSpec, kind: Callable[..., Reads], probe: Probe) -> nn.Module:
    """Create a ``kind`` network, or the custom ``algo.policy.net``, whose outputs are checked by ``probe``."""
    net = own(config, ActorCriticConfig).policy
    if net.net is not None:
        return custom_network(config, spec, "policy", probe)
    policy = kind(make_input(config, spec, "policy"), cast(Box, spec.action).size, make_layers(net))
    policy.borrows = net.encoder == "critic"
    return policy


def make_critic(config: Config, spec: EnvSpec) -> Critic:
    """Create the critic ensemble."""
    net = own(config, ActorCriticConfig).critic
    if net.net is not None:
        return cast(Critic, custom_network(config, spec, "critic", partial(probe_critic, atoms=net.atoms)))
    size = cast(Box, spec.action).size
    return Critic(make_input(config, spec, "critic"), size, make_layers(net), net.ensemble, net.atoms)


def probe_critic(network: nn.Module, obs: Obs, action: Tensor, atoms: int | None = None) -> Outputs:
    """Return an ensemble's outputs for two rows, with the expected shape [E, 2] or [E, 2, atoms]."""
    shape: list[Any] = ["E", 2] + ([atoms] if atoms else [])
    return [("forward(obs, action)", network(obs, action), shape)]


def make_noisy_actor(kind: OffPolicy, config: Config, spec: EnvSpec, policy: nn.Module) -> NoisyActor:
    """Create the collector's actor: a copy of the policy with exploration noise."""
    explore = own(config, ActorCriticConfig).explore
    noise = Exploration(explore, spec.num_envs, cast(Box, spec.action).size, spec.device)
    return NoisyActor(copy.deepcopy(policy).to(spec.device), kind.act, noise, spec)
