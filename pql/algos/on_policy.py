"""Wiring of on-policy actor-critics: a collector that fills a rollout, and one learner of policy and value.

PPO and IMPALA are instances of :class:`OnPolicy`.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Generator, Tensor, nn

from pql.algos.builders import check_obs, make_normalizer
from pql.algos.mirror import make_mirror, with_mirror_loss
from pql.algos.registry import Family, Setup, Wiring
from pql.algos.rnd import curious_rollouts, make_novelty
from pql.collect.actors import StochasticActor
from pql.collect.collector import Collector
from pql.config import Config
from pql.config.algorithms import RolloutAlgoConfig, StochasticConfig
from pql.contract.env import Box, Discrete, EnvSpec, MultiDiscrete
from pql.data.normalize import Normalizer
from pql.data.rollout import Progress, Rollout, Segment, View, rollout_bytes
from pql.data.unrolls import FULL, Reader, Unrolls
from pql.engine.flat import Flat
from pql.engine.optim import Optimizer, RMSProp, RMSPropTF, annealed, make_adamw
from pql.engine.placement import available_bytes
from pql.engine.schedule import Counts
from pql.engine.worker import Learner, State, Update
from pql.errors import ConfigError, gib
from pql.nets.actor_critic import ActorCritic, Body, OwnBody, StateValue, StochasticPolicy
from pql.nets.distributions import ActionDist, Categorical, DiagGaussian, MultiCategorical
from pql.nets.encoders import custom_network, groups_of, make_input, make_layers, read_specs
from pql.nets.mlp import seeded
from pql.types import Obs

A = TypeVar("A", bound=StochasticConfig)


class RolloutProgress(Protocol):
    """Counters of a run's progress, 0-dim tensors."""

    ticks: Tensor
    lost: Tensor  # bootstraps lost because the simulator returned no final observation


class RolloutState(Protocol):
    """State of a learner on rollouts."""

    @property
    def progress(self) -> RolloutProgress: ...

    reader: Reader | None


@dataclass(frozen=True)
class OnPolicy(Generic[A]):
    """The functions that define an on-policy actor-critic algorithm.

    Attributes:
        settings: class of ``config.algo``.
        state: (config, parameters, optimiser, environments) -> the learner's state, a :class:`RolloutState`.
        draw: (state, segment, settings, gen) -> minibatches of a tick.
        update: (state, minibatch, settings, gen) -> metrics.
    """

    settings: type[A]
    state: Callable[[Config[A], Flat, Optimizer, int], State]
    draw: Callable[[Any, Segment, Any, Generator], Iterable[Any]]
    update: Update[Any, Any, Any]

    def family(self) -> Family[A]:
        """Return the entry for the algorithm registry."""
        return Family(
            self.settings, on_policy_counts, check_on_policy, partial(wire_on_policy, self), make_stochastic_policy
        )


def on_policy_counts(config: Config[RolloutAlgoConfig]) -> Counts:
    """Return counts for one rollout per tick and all its updates; when concurrent, they use the previous rollout."""
    algo = config.algo
    updates = algo.passes * algo.minibatches
    return Counts(algo.horizon, {"learner": updates}, 1, algo.horizon if algo.schedule == "concurrent" else 0)


def check_on_policy(config: Config[StochasticConfig], spec: EnvSpec, counts: Counts, device: torch.device) -> int:
    """Check a config against an environment spec. Returns the rollout's rows T.

    Raises:
        ConfigError: an unsupported observation, settings for another kind of action or observation, or a rollout that
            does not fit into memory.
    """
    check_obs(config, spec)
    p = config.algo
    if not isinstance(spec.action, Box) and p.squash:
        raise ConfigError("algo.squash", True, f"false: the actions of {spec.name} are discrete")
    if p.shared and groups_of(config, spec, "critic") != groups_of(config, spec, "policy"):
        raise ConfigError("algo.shared", True, f"false: in {spec.name} policy and critic observe different groups")
    size = make_dist(config, spec).params_size
    parts = 1 + FULL if apart(config, spec) else 2 if counts.ahead else 1
    check_room("algo.horizon", p.horizon, spec, size, device, parts)
    return p.horizon


def check_room(
    setting: str, horizon: int, spec: EnvSpec, params_size: int, device: torch.device, parts: int = 1
) -> None:
    """Raises ``ConfigError`` for ``setting`` if a rollout of ``horizon`` rows does not fit into memory."""
    # One segment or several, the normalised copy, and the same amount again for a minibatch and its activations.
    need, free = (2 + parts) * rollout_bytes(spec, horizon, params_size), available_bytes(device)
    if need > free:
        most = f"at most about {max(1, horizon * free // need)} with num_envs={spec.num_envs}"
        raise ConfigError(setting, horizon, f"{most}: this needs {gib(need)}, {gib(free)} are free")


def wire_on_policy(kind: OnPolicy[A], setup: Setup[A]) -> Wiring:
    """Create the rollout, its collector and its learner."""
    config, spec = setup.config, setup.spec
    net = seeded(partial(make_network, config, spec), setup.init_seed)
    actor = StochasticActor(copy.deepcopy(net.policy).to(spec.device), spec)
    norm = make_normalizer(setup)
    source = make_source(setup, norm, net)
    collector = Collector(setup.env, actor, norm, [source.store], setup.generator("collector"), setup.execution)
    flat = Flat(net.to(setup.devices["learner"]), trained=True)
    learner = make_learner(kind, setup, flat, source)
    progress = cast(RolloutState, learner.state).progress
    pulls = {"policy": [Flat(actor.policy).data, actor.version]}
    publishes = {"rollout": source.full} if source.full else {}
    return Wiring(collector, pulls, publishes, [learner], net.policy, {"rollout/bootstrap_lost": progress.lost})


@dataclass(frozen=True)
class Source:
    """Storage of rows, and a learner's access to it.

    Attributes:
        read: returns the segment that a tick's updates use.
        full, seen: tensors of the storage that the collector publishes, and the learner's copies of them.
        reader: the learner's read position, for unrolls that are not aligned with ticks; else None.
    """

    store: Rollout | Unrolls
    read: Callable[[], Segment]
    full: list[Tensor]
    seen: list[Tensor]
    reader: Reader | None = None


def make_source(setup: Setup[StochasticConfig], norm: Normalizer, net: ActorCritic) -> Source:
    """Create a rollout (two halves if the collector runs ahead), or unrolls per environment if they may answer late."""
    spec, device, halves = setup.spec, setup.devices["learner"], 2 if setup.counts.ahead else 1
    sizes = (setup.rows, net.policy.dist.params_size, device, net.policy.body.carry_size)
    if apart(setup.config, spec):
        unrolls = Unrolls(spec, norm, *sizes)
        reader = Reader(unrolls)
        return Source(unrolls, reader.segment, unrolls.tensors(), reader.tensors(), reader)
    rollout, view = Rollout(spec, norm, *sizes, halves), View(norm, device)
    if halves == 1:
        return Source(rollout, rollout.segment, [], [])
    return Source(rollout, partial(rollout.segment, view), rollout.sealed.tensors(), view.tensors())


def apart(config: Config[StochasticConfig], spec: EnvSpec) -> bool:
    """Return True if each environment fills unrolls independently.

    Such an unroll contains actions of several policies, which V-trace corrects. A separate recurrent state of the value
    is not supported: the learner reads an environment's unrolls in order, but not one in every tick.
    """
    algo = config.algo
    return spec.spread > 1 and algo.on_policy_corrected and (algo.lstm is None or algo.shared)


def make_learner(kind: OnPolicy[A], setup: Setup[A], flat: Flat, source: Source) -> Learner:
    """Create the learner of policy and value."""
    config, settings = setup.config, setup.config.algo
    state = kind.state(config, flat, make_rollout_optimizer(config, flat), setup.spec.num_envs)
    cast(RolloutState, state).reader = source.reader
    progress = cast(RolloutState, state).progress

    from_segment, update = kind.draw, mirrored_update(kind.update, setup, state)
    if (novelty := make_novelty(setup, setup.devices["learner"])) is not None:
        state.add("rnd", novelty)
        from_segment, update = curious_rollouts(from_segment, update, novelty)

    def draw(count: int, gen: Generator) -> Iterable[Any]:
        return from_segment(state, source.read(), settings, gen)

    size = sum(p.numel() for p in cast(ActorCritic, flat.module).policy.parameters())  # they come first
    return Learner(
        "learner",
        state,
        update,
        settings,
        draw,
        setup.generator("learner", "v"),
        pulls={"rollout": source.seen} if source.seen else {},
        publishes={"policy": [flat.data[:size], progress.ticks]},
        trains=("v", "p"),
        clock=progress.ticks,
    )


def mirrored_update(update: Update[Any, Any, Any], setup: Setup[Any], state: Any) -> Update[Any, Any, Any]:
    """Give ``state`` the reflection that ``algo.symmetry`` wants; return ``update``, with the mirror loss if wanted."""
    mirror = make_mirror(setup.config, setup.spec, setup.devices["learner"])
    if mirror is None:
        return update
    state.mirror = mirror
    return with_mirror_loss(update, mean_of_params, mirror) if setup.config.algo.symmetry.mirror_coef > 0 else update


def mean_of_params(policy: nn.Module, obs: Obs) -> Tensor:
    """Return the means of a policy's Gaussians, [B, A]."""
    return cast(Tensor, policy(obs).chunk(2, -1)[0])


@torch.no_grad()
def begin_rollout_tick(
    now: Progress, segment: Segment, anneal_steps: int | None, rates: Sequence[tuple[Optimizer, float]]
) -> None:
    """Count the tick, and set the annealed learning rates of the optimisers from their first ones."""
    now.lost += segment.lost
    if anneal_steps is not None:
        left = annealed(now.ticks, now.steps_per_tick, anneal_steps)
        for optimizer, lr in rates:
            optimizer.lr.copy_(lr * left)
    now.ticks += 1


def make_dist(config: Config[StochasticConfig], spec: EnvSpec) -> ActionDist:
    """Create a Gaussian for continuous actions, a categorical distribution for discrete ones, or a product of these."""
    if isinstance(spec.action, Discrete):
        return Categorical(spec.action.n)
    if isinstance(spec.action, MultiDiscrete):
        return MultiCategorical(spec.action.nvec)
    return DiagGaussian(spec.action.size, config.algo.squash)


def make_body(config: Config[Any], spec: EnvSpec, which: str, lstm: int | None = None) -> Body | OwnBody:
    """Create the hidden layers of "policy" or "critic" on the observations it may use, or the custom network."""
    net = config.algo.policy if which == "policy" else config.algo.critic
    if net.net is not None:
        return OwnBody(custom_network(config, spec, which), read_specs(config, spec))
    return Body(make_input(config, spec, which), make_layers(net), lstm)


def make_stochastic_policy(config: Config[StochasticConfig], spec: EnvSpec, amp: bool = False) -> StochasticPolicy:
    """Create a freshly initialised policy network. Evaluation, loading and export compute in float32."""
    body, dist = make_body(config, spec, "policy", config.algo.lstm), make_dist(config, spec)
    return StochasticPolicy(body, dist, config.algo.init_std, amp)


def make_network(config: Config[StochasticConfig], spec: EnvSpec) -> ActorCritic:
    """Create freshly initialised policy and value networks."""
    policy = make_stochastic_policy(config, spec, config.algo.amp)
    body = None if config.algo.shared else make_body(config, spec, "critic", config.algo.lstm)
    return ActorCritic(policy, StateValue(body, (body or policy.body).size))


def make_rollout_optimizer(config: Config[StochasticConfig], flat: Flat) -> Optimizer:
    """Create one optimiser for both networks, with the policy's settings."""
    algo = config.algo
    net, name = algo.policy, algo.optimizer
    if name != "adam":
        kind = RMSProp if name == "rmsprop" else RMSPropTF
        return kind(flat, net.lr, net.grad_clip, eps=net.eps)
    return make_adamw(flat, net)
