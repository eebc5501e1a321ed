"""Off-policy actor-critic: a V-learner (critic), a P-learner (policy) and a collector around a replay buffer.

DDPG and SAC are instances of :class:`OffPolicy`; ``Concurrent`` makes them Parallel Q-Learning (Li et al. 2023).
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, ClassVar, Generic, TypeVar, cast

import torch
from torch import Generator, Tensor, nn

from pql.algos.builders import (
    SequenceDraw,
    check_continuous,
    check_obs,
    make_demos,
    make_normalizer,
    make_ring,
    make_sequences,
    ring_rows,
    sequence_ring_rows,
    stored_obs,
)
from pql.algos.memory import (
    critics_remember,
    make_memory_input,
    policies_on_sequences,
    remembers,
    values_on_sequences,
)
from pql.algos.mirror import make_mirror, with_mirror_loss
from pql.algos.policies import PolicyState
from pql.algos.registry import Family, Setup, Wiring
from pql.algos.rnd import curious_values, make_novelty
from pql.collect.actors import ActFunction, NoisyActor, RememberingActor
from pql.collect.collector import Collector
from pql.collect.exploration import Exploration
from pql.config import Config
from pql.config.algorithms import ActorCriticConfig
from pql.config.algorithms.distill import DistillConfig
from pql.contract.env import Box, EnvSpec
from pql.data.augment import Augment
from pql.data.demos import Demos
from pql.data.mirror import Mirror
from pql.data.normalize import Normalizer
from pql.data.replay import Cursor, Replay
from pql.data.sequences import States
from pql.data.tensorfile import digest_of
from pql.engine.flat import Flat
from pql.engine.schedule import Counts, tick_counts
from pql.engine.worker import Learner
from pql.errors import ConfigError
from pql.nets.encoders import (
    Outputs,
    channels_last,
    custom_network,
    groups_of,
    image_size,
    is_image,
    lend_encoder,
    make_layers,
)
from pql.nets.mlp import Critic, Reads, seeded
from pql.types import AnyBatch, Batch, Obs, ObsBatch, split

A = TypeVar("A", bound=ActorCriticConfig)
Net = TypeVar("Net", bound=nn.Module)


@dataclass(frozen=True)
class OffPolicy(Generic[A]):
    """The functions that define an off-policy actor-critic algorithm.

    Attributes:
        settings: class of ``config.algo``.
        policy: (config, spec) -> policy network on the CPU.
        act: (policy, obs, noise) -> action [N, A], before exploration noise.
        value_learner: (setup, critic, policy copy, draw) -> the V-learner.
        policy_learner: (setup, policy, critic copy, draw) -> the P-learner, whose state is a :class:`PolicyState`.
    """

    settings: type[A]
    policy: Callable[[Config[A], EnvSpec], nn.Module]
    act: ActFunction
    value_learner: "Callable[[Setup[A], Critic, nn.Module, ValueDraw], Learner]"
    policy_learner: "Callable[[Setup[A], nn.Module, Critic, PolicyDraw], Learner]"

    def family(self) -> Family[A]:
        """Return the entry for the algorithm registry."""
        return Family(self.settings, off_policy_counts, check_off_policy, partial(wire_off_policy, self), self.policy)


def off_policy_counts(config: Config[ActorCriticConfig]) -> Counts:
    """Return the smallest tick with whole numbers of steps and updates."""
    return tick_counts(config.algo.v_per_step, config.algo.p_per_v)


def check_off_policy(config: Config[ActorCriticConfig], spec: EnvSpec, counts: Counts, device: torch.device) -> int:
    """Check a config against an environment spec. Returns the replay's rows T.

    Raises:
        ConfigError: unsupported action or observation space, demonstrations of another task, or a replay that is too
            small or too large.
    """
    check_continuous(config, spec)
    check_obs(config, spec)
    check_images(config, spec)
    if config.algo.lstm is None:
        return ring_rows(config, spec, counts, device)
    critics_remember(config, spec)
    return sequence_ring_rows(config, spec, counts, device)


def check_images(config: Config[ActorCriticConfig], spec: EnvSpec) -> None:
    """Check settings of images.

    Raises:
        ConfigError: policy and critic should share an encoder and read different images, or an augmentation does not
            fit the images.
    """
    algo = config.algo
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


def wire_off_policy(kind: OffPolicy[A], setup: Setup[A]) -> Wiring:
    """Create networks, replay and workers. A P-learner on another device has its own replay."""
    config, spec, devices = setup.config, setup.spec, setup.devices
    nets = seeded(lambda: (kind.policy(config, spec), make_critic(config, spec)), setup.init_seed)
    lend_encoder(nets[1], nets[0])  # copies of both begin with the same weights
    normalizer = make_normalizer(setup)
    replays = [make_ring(setup, "v")]
    if devices["p"] != devices["v"]:
        replays.append(make_ring(setup, "p", obs_only=config.algo.lstm is None))
    demos = make_demos(setup, replays, normalizer)
    actor = make_noisy_actor(kind.act, config, spec, nets[0])
    # States are allocated before their ring: see States.
    states = [States(ring, actor.before.shape[1], config.algo.period) for ring in replays if actor.before is not None]
    stores = [*states, *replays]
    collector = Collector(setup.env, actor, normalizer, stores, setup.generator("collector"), setup.execution)
    drawn = [Drawn(*parts) for parts in zip(replays, demos, states or repeat(None), strict=False)]
    v = make_value_learner(kind, setup, *nets, normalizer, drawn[0])
    p = make_policy_learner(kind, setup, *nets, normalizer, drawn[-1])
    pulls = {"policy": Flat(collector.actor.policy).tensors()}
    publishes = {"norm": normalizer.frozen(), "rows": replays[0].live.tensors()}
    if config.replay.demo_share_end is not None:
        collector.count = torch.zeros((), dtype=torch.int64, device=spec.device)
        publishes["env_steps"] = [collector.count]
        for learner in (v, p):
            cursor = cast(PolicyDraw, learner.draw).cursor
            cursor.env_steps = torch.zeros_like(cursor.lost)
            learner.pulls["env_steps"] = [cursor.env_steps]
    gauges = {} if v.lost is None else {"replay/bootstrap_lost": v.lost}
    sources = {} if demos[0] is None else {"replay.demos": digest_of(demos[0].ring.state_dict())}
    return Wiring(collector, pulls, publishes, [v, p], cast(PolicyState, p.state).evaluated, gauges, sources)


@dataclass(frozen=True)
class Drawn:
    """Rows that a learner draws from."""

    replay: Replay
    demos: Demos | None
    states: States | None

    def draw(self, kind: "type[PolicyDraw]", setup: Setup[A], norm: Normalizer) -> Any:
        """Return a worker's draws of rows, or of sequences if there are states."""
        if self.states is None:
            return kind(*self.parts(setup, norm))
        ring, algo = self.replay, setup.config.algo
        own, sequences = self.own(norm), make_sequences(setup.config, self.states)
        return SequenceDraw(kind.worker, algo.batch_size // algo.length, ring, *own, sequences)

    def own(self, norm: Normalizer) -> tuple[Cursor, Normalizer]:
        """Return a worker's copies of cursor and normaliser."""
        return Cursor(self.replay.num_envs, self.replay.device), norm.copy_to(self.replay.device)

    def parts(self, setup: Setup[A], norm: Normalizer) -> tuple[Any, ...]:
        """Return the parts of a :class:`PolicyDraw`."""
        mirror = make_mirror(setup.config, setup.spec, self.replay.device)
        return setup.config.algo, self.replay, *self.own(norm), make_augment(setup), mirror, self.demos


def make_value_learner(
    kind: OffPolicy[A], setup: Setup[A], policy: nn.Module, critic: Critic, norm: Normalizer, source: Drawn
) -> Learner:
    """Create the V-learner, with its copies of networks, normaliser and cursor."""
    algo, device = setup.config.algo, source.replay.device
    for ring in (source.replay, *([source.demos.ring] if source.demos else [])):
        ring.constants(algo.n_step, algo.gamma)  # the copy to the device would stall the first tick
    draw = source.draw(ValueDraw, setup, norm)
    learner = kind.value_learner(setup, learner_copy(critic, algo, device), learner_copy(policy, algo, device), draw)
    if (novelty := make_novelty(setup, device)) is not None:
        learner.state.add("rnd", novelty)
        learner.update = curious_values(learner.update, novelty)
    if source.states is not None:
        learner.update = values_on_sequences(learner.update)
    return learner


def make_policy_learner(
    kind: OffPolicy[A], setup: Setup[A], policy: nn.Module, critic: Critic, norm: Normalizer, source: Drawn
) -> Learner:
    """Create the P-learner, with its copies of networks, normaliser and cursor."""
    algo, device = setup.config.algo, source.replay.device
    policy, critic = learner_copy(policy, algo, device), learner_copy(critic, algo, device)
    lend_encoder(critic, policy)
    draw = source.draw(PolicyDraw, setup, norm)
    learner = kind.policy_learner(setup, policy, critic, draw)
    if draw.mirror is not None and algo.symmetry.mirror_coef > 0:
        learner.update = with_mirror_loss(learner.update, mean_action, draw.mirror)
    if source.states is not None:
        learner.update = policies_on_sequences(learner.update)
    return learner


def mean_action(policy: nn.Module, obs: Obs) -> Tensor:
    """Return a policy's action without noise, [B, A]."""
    return cast(Tensor, policy.mean_action(obs))  # type: ignore[operator]


@dataclass
class PolicyDraw:
    """Sample batches of normalised observations from the rows below the pulled cursor."""

    worker: ClassVar[str] = "p"
    algo: ActorCriticConfig
    replay: Replay
    cursor: Cursor
    norm: Normalizer
    augment: Augment
    mirror: Mirror | None = None
    demos: Demos | None = None

    def __call__(self, count: int, gen: Generator) -> list[ObsBatch]:
        """Return ``count`` batches of observations [B, ...]."""
        batch = self.drawn(lambda ring, cursor, rows: ring.sample_obs(cursor, rows, gen), count)
        batches = split(self.reflected(batch._replace(obs=self.norm(batch.obs)), count, gen), count)
        return [one._replace(obs=self.augment(one.obs, gen)) for one in batches]

    def drawn(self, draw: Callable[[Replay, Cursor, int], AnyBatch], count: int) -> AnyBatch:
        """Return the rows of ``count`` batches, [count * B, ...], with a share of demonstrations if there are any."""
        size = self.algo.batch_size
        if self.demos is None:
            return draw(self.replay, self.cursor, count * size)
        return self.demos.mixed(draw, (self.replay, self.cursor), (count, size))

    def reflected(self, batch: AnyBatch, count: int, gen: Generator) -> AnyBatch:
        """Reflect rows of ``count`` normalised batches, [count * B, ...], as ``algo.symmetry`` says."""
        return batch if self.mirror is None else self.mirror.rows(batch, count, gen)


class ValueDraw(PolicyDraw):
    """Sample batches of normalised n-step transitions."""

    worker = "v"

    def __call__(self, count: int, gen: Generator) -> list[Batch]:  # type: ignore[override]
        """Return ``count`` batches of B transitions."""
        n, gamma, norm = self.algo.n_step, self.algo.gamma, self.norm
        batch = self.drawn(lambda ring, cursor, rows: ring.sample(cursor, rows, n, gamma, gen), count)
        reward = batch.reward * norm.reward_scale
        batch = batch._replace(obs=norm(batch.obs), next_obs=norm(batch.next_obs), reward=reward)
        batches = split(self.reflected(batch, count, gen), count)
        return [
            one._replace(obs=self.augment(one.obs, gen), next_obs=self.augment(one.next_obs, gen)) for one in batches
        ]


def make_augment(setup: Setup[Any]) -> Augment:
    """Create the augmentation of all images of an environment."""
    encoder = setup.config.algo.encoder
    images = {k: channels_last(s.shape) for k, s in setup.spec.obs.items() if is_image(s)}
    return Augment(images, encoder.shift, encoder.jitter)


def learner_copy(net: Net, algo: ActorCriticConfig | DistillConfig, device: torch.device) -> Net:
    """Return a learner's copy of a network, which computes in the learners' precision."""
    net = copy.deepcopy(net).to(device)
    if isinstance(net, Reads):
        net.amp = algo.amp
    return net


# -- networks and actor -----------------------------------------------------------------------------------------------


def make_critic(config: Config[ActorCriticConfig], spec: EnvSpec) -> Critic:
    """Create the critic ensemble."""
    net = config.algo.critic
    if net.net is not None:
        return cast(Critic, custom_network(config, spec, "critic", partial(probe_critic, atoms=net.atoms)))
    size = cast(Box, spec.action).size
    return Critic(make_memory_input(config, spec, "critic"), size, make_layers(net), net.ensemble, net.atoms)


def probe_critic(network: nn.Module, obs: Obs, action: Tensor, atoms: int | None = None) -> Outputs:
    """Return an ensemble's outputs for two rows, with the expected shape [E, 2] or [E, 2, atoms]."""
    shape: list[Any] = ["E", 2] + ([atoms] if atoms else [])
    return [("forward(obs, action)", network(obs, action), shape)]


def make_noisy_actor(act: ActFunction, config: Config[Any], spec: EnvSpec, policy: nn.Module) -> NoisyActor:
    """Create the collector's actor: a copy of the policy with exploration noise on ``act``."""
    noise = Exploration(config.algo.explore, spec.num_envs, cast(Box, spec.action).size, spec.device)
    kind = RememberingActor if remembers(policy) else NoisyActor
    return kind(copy.deepcopy(policy).to(spec.device), act, noise, spec)
