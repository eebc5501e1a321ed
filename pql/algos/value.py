"""Wiring of value-based algorithms on a replay: an epsilon-greedy collector and a V-learner.

The V-learner's network is the policy. DQN is an instance of :class:`ValueBased`; with an epsilon ladder and initial
priorities from the collector under ``Concurrent`` it is Ape-X (Horgan et al. 2018).
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from math import gcd
from typing import Any, ClassVar, cast

import torch
from torch import Generator

from pql.algos.builders import advice, make_normalizer, make_ring, replay_learner, ring_rows
from pql.algos.registry import A, Family, Setup, Wiring
from pql.collect.actors import EpsilonActor
from pql.collect.collector import Collector
from pql.collect.epsilon import STORED, Epsilon
from pql.config import Config, DqnConfig
from pql.config.algorithms import DuelingConfig
from pql.config.groups import PriorityConfig
from pql.config.networks import CategoricalConfig, TrainedNetConfig
from pql.contract.env import Discrete, EnvSpec
from pql.data.normalize import Normalizer
from pql.data.priority import Prioritized, PriorityRule, Ranked
from pql.data.replay import Cursor, Replay
from pql.engine.flat import Flat
from pql.engine.optim import Clock, Optimizer, RMSProp, make_adamw, make_lr_schedule
from pql.engine.schedule import LONGEST_HORIZON, Counts
from pql.engine.worker import Learner, State, Update
from pql.errors import ConfigError
from pql.nets.actor_critic import OwnBody
from pql.nets.encoders import custom_network, groups_of, make_input, make_layers, read_specs
from pql.nets.mlp import NetInput, seeded
from pql.nets.q import QNetwork, QuantileNetwork
from pql.types import Batch, split

GATHERED = 16 << 20  # largest gather of observations for several batches, in bytes


@dataclass
class ValueState(State):
    """State of the V-learner: network (its greedy action is the policy), target and priorities."""

    q: Flat
    target: Flat
    optimizer: Optimizer
    clock: Clock
    target_every: int  # updates between copies to the target network
    priorities: Ranked | None = None

    @property
    def nets(self) -> tuple[QNetwork, QNetwork]:
        """Return the trained network and the target network."""
        return cast(QNetwork, self.q.module), cast(QNetwork, self.target.module)


@dataclass(frozen=True)
class ValueBased:
    """The functions that define a value-based algorithm on a replay.

    Attributes:
        settings: class of ``config.algo``.
        network: (config, spec) -> the network on the CPU.
        update: (state, batch, settings, gen) -> metrics.
    """

    settings: type[DqnConfig]
    network: Callable[[Config, EnvSpec], QNetwork]
    update: Update[Any, Batch, Any]

    def family(self) -> Family[DqnConfig]:
        """Return the entry for the algorithm registry."""
        return Family(self.settings, value_counts, check_value_based, partial(wire_value_based, self), self.network)


def value_counts(config: Config[Any]) -> Counts:
    """Return the smallest tick with whole numbers of steps and updates.

    Raises:
        ConfigError: there is none up to 64 steps.
    """
    algo = config.algo
    ratio = Fraction(str(algo.v_per_step))
    if ratio.denominator > LONGEST_HORIZON:
        allowed = f"a ratio that gives a whole number of updates within {LONGEST_HORIZON} steps, such as 0.5"
        raise ConfigError("algo.v_per_step", algo.v_per_step, allowed)
    return Counts(ratio.denominator, {"v": ratio.numerator}, 1)


def target_updates(config: Config[DuelingConfig], counts: Counts) -> int:
    """Return ``algo.target_period`` in updates.

    Raises:
        ConfigError: it is not a whole number of updates; the message names the nearest period that is.
    """
    period = config.algo.target_period
    steps, updates = counts.horizon * config.num_envs, counts.updates["v"]
    if period * updates % steps == 0:
        return period * updates // steps
    unit = steps // gcd(steps, updates)
    allowed = f"a whole number of updates, {updates} of which come with every {steps} env steps"
    nearest = unit * max(1, round(period / unit))
    raise ConfigError("algo.target_period", period, f"{allowed}: a multiple of {unit}, such as {nearest}")


def check_value_based(config: Config[DuelingConfig], spec: EnvSpec, counts: Counts, device: torch.device) -> int:
    """Check a config against an environment spec. Returns the replay's rows T.

    Raises:
        ConfigError: an unsupported action or observation space, a target period that is not a whole number of updates,
            or a replay that is too small or too large.
    """
    check_acting(config, spec)
    target_updates(config, counts)
    prioritized = config.algo.priority.alpha > 0
    leaf = ("priority",) * 2 if prioritized else ()  # the sum tree takes two numbers per row
    return ring_rows(config, spec, counts, device, (*stored_columns(config), *leaf), prioritized)


def check_acting(config: Config, spec: EnvSpec) -> None:
    """Raises ``ConfigError`` for continuous actions or an unsupported observation."""
    if not isinstance(spec.action, Discrete):
        raise ConfigError("task", config.task.name, f"a task with discrete actions; {advice(spec)}")
    if critic_of(config).net is None:
        groups_of(acting(config), spec, "critic")


def wire_value_based(kind: ValueBased, setup: Setup[DqnConfig]) -> Wiring:
    """Create the replay, its collector and the V-learner."""
    config, spec, algo = setup.config, setup.spec, setup.config.algo
    net = seeded(partial(kind.network, config, spec), setup.init_seed)
    norm = make_normalizer(setup)
    ring = make_ring(setup, "v", extra=stored_columns(config))
    epsilon = Epsilon(algo.epsilon, spec.num_envs, spec.device)
    actor = EpsilonActor(copy.deepcopy(net).to(spec.device), epsilon, spec, bool(stored_columns(config)))
    collector = Collector(setup.env, actor, norm, [ring], setup.generator("collector"), setup.execution)
    return value_wiring(collector, ring, make_q_learner(kind, setup, net, norm, ring), epsilon)


def value_wiring(collector: Collector, ring: Replay, learner: Learner, epsilon: Epsilon) -> Wiring:
    """Return the wiring of a collector that fills ``ring`` and a V-learner whose state is a :class:`ValueState`."""
    state = cast(ValueState, learner.state)
    publishes = {"norm": collector.normalizer.frozen(), "rows": ring.live.tensors()}
    gauges = {"explore/epsilon": epsilon.mean}
    if learner.lost is not None:
        gauges["replay/bootstrap_lost"] = learner.lost
    if state.priorities is not None:
        gauges["replay/beta"] = state.priorities.beta
    return Wiring(collector, {"policy": [Flat(collector.actor.policy).data]}, publishes, [learner], state.q, gauges)


def make_q_learner(kind: ValueBased, setup: Setup[DqnConfig], net: QNetwork, norm: Normalizer, ring: Replay) -> Learner:
    """Create the V-learner: network and target, optional priorities, and its copies of normaliser and cursor."""
    config, counts, device = setup.config, setup.counts, ring.device
    algo = config.algo
    net.amp = algo.amp  # of the learner's own networks; the collector has its copy
    flat, target = Flat(net.to(device), trained=True), Flat(copy.deepcopy(net).to(device))
    ranked = make_priorities(config, ring, counts)
    every = target_updates(config, counts)
    state = ValueState(flat, target, make_optimizer(config, flat), Clock(device), every, ranked)
    ring.constants(algo.n_step, algo.gamma)  # the copy to the device would stall the first tick
    cursor, norm = Cursor(ring.num_envs, device), norm.copy_to(device)
    draw = TransitionDraw(algo, ring, cursor, norm, ranked)
    learner = replay_learner(setup, state, kind.update, draw, {}, {"policy": [flat.data]})
    if ranked is not None:
        learner.begin, learner.rest = partial(ranked.begin, cursor), partial(ranked.open, cursor, norm.reward_scale)
    return learner


@dataclass
class TransitionDraw:
    """Batches of normalised n-step transitions for the V-learner, drawn uniformly or by priority."""

    worker: ClassVar[str] = "v"
    algo: DqnConfig
    ring: Replay
    cursor: Cursor
    norm: Normalizer
    ranked: Prioritized | None

    def __call__(self, count: int, gen: Generator) -> Iterator[Batch]:
        """Yield ``count`` batches of B transitions."""
        algo, ring, ranked = self.algo, self.ring, self.ranked
        if ranked is None:  # uniform draws do not depend on updates: one gather for several batches
            size = 2 * algo.batch_size * sum(v[0].nbytes * ring.stacks[k] for k, v in ring.obs.items())
            for some in update_shares(count, size):
                rows = ring.sample(self.cursor, some * algo.batch_size, algo.n_step, algo.gamma, gen)
                yield from split(self.normalized(rows), some)
            return
        ranked.open(self.cursor, self.norm.reward_scale)
        for _ in range(count):
            yield self.normalized(ranked.sample(self.cursor, algo.batch_size, gen))

    def normalized(self, batch: Batch) -> Batch:
        """Return ``batch`` with normalised observations [B, ...] and scaled rewards [B]."""
        norm, reward = self.norm, batch.reward * self.norm.reward_scale
        return batch._replace(obs=norm(batch.obs), next_obs=norm(batch.next_obs), reward=reward)


def update_shares(count: int, size: int) -> list[int]:
    """Split ``count`` batches of ``size`` bytes into gathers; returns the number of batches in each.

    Fewer gathers mean fewer calls; but a CPU's allocator returns large blocks to the kernel every time, and mapping
    them again costs several times as much as the gather.
    """
    most = max(1, GATHERED // size)
    return [min(most, count - done) for done in range(0, count, most)]


def make_priorities(config: Config[DqnConfig], ring: Replay, counts: Counts) -> Prioritized | None:
    """Create priorities over the ring, or return None if rows are drawn uniformly."""
    algo = config.algo
    wanted = algo.priority
    if wanted.alpha == 0:
        return None
    single = algo.critic.atoms is None and algo.critic.quantiles is None  # not a divergence or a sum over quantiles
    rule = make_rule(wanted, ring, counts, algo.huber if single else None)
    return Prioritized(ring, algo.n_step, algo.gamma, rule, wanted.initial == "actor")


def make_rule(wanted: PriorityConfig, ring: Replay, counts: Counts, clip: float | None) -> PriorityRule:
    """Create the sampling rule for rows or sequences of ``ring``."""
    return PriorityRule(wanted.alpha, wanted.beta, wanted.beta_steps, counts.horizon * ring.num_envs, clip)


def stored_columns(config: Config[DuelingConfig]) -> tuple[str, ...]:
    """Return the columns that the actor stores in addition to its actions."""
    wanted = config.algo.priority
    return STORED if wanted.alpha > 0 and wanted.initial == "actor" else ()


def make_optimizer(config: Config[DuelingConfig], flat: Flat) -> Optimizer:
    algo = config.algo
    net = algo.critic
    if algo.optimizer == "rmsprop":
        return RMSProp(flat, net.lr, net.grad_clip, algo.rms_decay, net.eps)
    optimizer = make_adamw(flat, net)
    optimizer.schedule = make_lr_schedule(algo)
    return optimizer


def acting(config: Config[A]) -> Config[A]:
    """Return the config with the network's observations named; the default is the policy's observations."""
    critic = critic_of(config)
    return with_critic(config, replace(critic, obs=critic.obs or ["policy"]))


def critic_of(config: Config) -> TrainedNetConfig:
    """Return the settings of the value network."""
    critic: TrainedNetConfig = config.algo.critic  # type: ignore[attr-defined]
    return critic


def with_critic(config: Config[A], critic: TrainedNetConfig) -> Config[A]:
    """Return the config with other settings of the value network."""
    algo: Any = config.algo
    return replace(config, algo=replace(algo, critic=critic))


def make_value_input(config: Config, spec: EnvSpec) -> NetInput:
    """Create the input layers of a value network from its settings, or from a custom ``algo.critic.net``."""
    if critic_of(config).net is not None:
        body = OwnBody(custom_network(config, spec, "critic"), read_specs(config, spec))
        return NetInput(groups_of(config, spec, "critic")[0], body.size, body)
    return make_input(config, spec, "critic")


def make_q_network(config: Config, spec: EnvSpec) -> QNetwork:
    """Create a freshly initialised network. A custom ``algo.critic.net`` computes its features."""
    config = acting(config)
    algo, net = config.algo, critic_of(config)
    source = make_value_input(config, spec)
    atoms = None
    if isinstance(net, CategoricalConfig) and net.atoms is not None:
        atoms = torch.linspace(net.v_min, net.v_max, net.atoms)
    layers, actions = make_layers(net), cast(Discrete, spec.action).n
    if not isinstance(algo, DqnConfig):
        return QNetwork(source, actions, layers, atoms)
    layers, critic = replace(layers, noisy=algo.noisy), algo.critic
    if critic.quantiles is None:
        return QNetwork(source, actions, layers, atoms, algo.dueling, algo.shared_grad)
    quantiles = (critic.quantiles, critic.cosines)
    return QuantileNetwork(source, actions, layers, quantiles, algo.dueling, algo.shared_grad)
