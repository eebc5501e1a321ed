"""R2D2: double Q-learning on sequences with a recurrent network, whose stored state is refreshed by a burn-in.

Sources: Kapturowski et al. 2019 (Recurrent Experience Replay in Distributed Reinforcement Learning); value rescaling
from Pohlen et al. 2018 (Observe and Look Further), Proposition A.2.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any, cast

import torch
from torch import Generator, Tensor

from pql.algos.builders import (
    SequenceDraw,
    make_normalizer,
    make_ring,
    make_sequences,
    replay_learner,
    sequence_ring_rows,
)
from pql.algos.dqn import huber, value_step
from pql.algos.registry import Family, Setup, Wiring
from pql.algos.value import (
    ValueState,
    acting,
    check_acting,
    critic_of,
    make_optimizer,
    make_rule,
    make_value_input,
    stored_columns,
    target_updates,
    value_wiring,
    with_critic,
)
from pql.collect.actors import RecurrentActor
from pql.collect.collector import Collector
from pql.collect.epsilon import Epsilon
from pql.config import Config, R2d2Config
from pql.contract.env import Discrete, EnvSpec
from pql.contract.last_action import GROUP
from pql.data.normalize import Normalizer
from pql.data.replay import Cursor
from pql.data.sequences import RankedSequences, Sequence, Sequences, States, mixed
from pql.engine.flat import Flat
from pql.engine.optim import Clock
from pql.engine.schedule import Counts
from pql.engine.worker import Learner, Update
from pql.errors import ConfigError
from pql.nets.encoders import make_layers
from pql.nets.mlp import seeded
from pql.nets.q import RecurrentQNetwork
from pql.types import Metrics

LONGEST_HORIZON = 1024
"""Maximum steps per tick: an update uses thousands of rows, so updates are rare relative to steps."""


@dataclass(frozen=True)
class Recurrent:
    """The functions that define a recurrent value-based algorithm.

    Attributes:
        settings: class of ``config.algo``.
        update: (state, batch, settings, gen) -> metrics.
        targets: (reward, discount, value, epsilon) -> targets, for the priorities that the collector computes.
    """

    settings: type[R2d2Config]
    update: Update[Any, Sequence, Any]
    targets: Callable[..., Tensor]

    def family(self) -> Family[R2d2Config]:
        """Return the entry for the algorithm registry."""
        return Family(self.settings, r2d2_counts, check_r2d2, partial(wire_r2d2, self), make_recurrent_q_network)


def r2d2_counts(config: Config[R2d2Config]) -> Counts:
    """Return the smallest tick in which the replay ratio is exact.

    Raises:
        ConfigError: there is none up to ``LONGEST_HORIZON`` steps.
    """
    algo = config.algo
    rows = algo.batch_size * algo.length  # trained per update
    ratio = Fraction(str(algo.replay_ratio))
    updates = ratio * config.num_envs / rows  # per step of all environments
    if updates.denominator > LONGEST_HORIZON:
        steps = min(LONGEST_HORIZON, max(1, round(1 / updates)))
        near = Fraction(max(1, round(updates * steps)) * rows, steps * config.num_envs)
        raise ConfigError(
            "algo.replay_ratio",
            algo.replay_ratio,
            f"a ratio that gives a whole number of updates ({algo.batch_size} sequences of {algo.length} rows) within "
            f"{LONGEST_HORIZON} steps of {config.num_envs} environments, such as {float(near):g}",
        )
    out = Counts(updates.denominator, {"v": updates.numerator}, 1)
    assert out.updates["v"] * rows == ratio * out.horizon * config.num_envs
    return out


def check_r2d2(config: Config[R2d2Config], spec: EnvSpec, counts: Counts, device: torch.device) -> int:
    """Check a config against an environment spec. Returns the replay's rows T, a whole number of periods.

    Raises:
        ConfigError: an unsupported action or observation space, a target period that is not a whole number of updates,
            or a replay that is too small for a sequence or too large for memory.
    """
    config = showing(config)
    check_acting(config, spec)
    target_updates(config, counts)
    return sequence_ring_rows(config, spec, counts, device, stored_columns(config))


def showing(config: Config[R2d2Config]) -> Config[R2d2Config]:
    """Return the config with the network's observations named explicitly, including the last action if it is used."""
    config = acting(config)
    critic, algo = critic_of(config), config.algo
    groups = [*(critic.obs or ()), *([GROUP] if algo.feedback and GROUP not in (critic.obs or ()) else [])]
    return with_critic(config, replace(critic, obs=groups))


def wire_r2d2(kind: Recurrent, setup: Setup[R2d2Config]) -> Wiring:
    """Create the replay with its stored states, the collector and the V-learner."""
    config, spec, algo = setup.config, setup.spec, setup.config.algo
    net = seeded(partial(make_recurrent_q_network, config, spec), setup.init_seed)
    norm = make_normalizer(setup)
    ring = make_ring(setup, "v", extra=stored_columns(config))
    states = States(ring, net.carry_size, algo.period)
    epsilon = Epsilon(algo.epsilon, spec.num_envs, spec.device)
    actor = RecurrentActor(copy.deepcopy(net).to(spec.device), epsilon, spec, bool(stored_columns(config)))
    # States are allocated before the ring: see States.
    collector = Collector(setup.env, actor, norm, [states, ring], setup.generator("collector"), setup.execution)
    sequences = make_sequences(config, states)
    return value_wiring(collector, ring, sequence_learner(kind, setup, net, norm, sequences), epsilon)


def sequence_learner(
    kind: Recurrent, setup: Setup[R2d2Config], net: RecurrentQNetwork, norm: Normalizer, sequences: Sequences
) -> Learner:
    """Create the V-learner: network and target, priorities, and its copies of normaliser and cursor."""
    config, counts, ring = setup.config, setup.counts, sequences.ring
    algo = config.algo
    device, wanted = ring.device, algo.priority
    net.amp = algo.amp  # of the learner's own networks; the collector has its copy
    flat, old = Flat(net.to(device), trained=True), Flat(copy.deepcopy(net).to(device))
    target = partial(kind.targets, epsilon=algo.rescale) if stored_columns(config) else None
    ranked = RankedSequences(sequences, make_rule(wanted, ring, counts, algo.huber), algo.eta, target)
    every = target_updates(config, counts)
    state = ValueState(flat, old, make_optimizer(config, flat), Clock(device), every, ranked)
    cursor = Cursor(ring.num_envs, device)
    draw = SequenceDraw("v", algo.batch_size, ring, cursor, norm.copy_to(device), ranked)
    return replay_learner(setup, state, kind.update, draw, {}, {"policy": [flat.data]})


def make_recurrent_q_network(config: Config[R2d2Config], spec: EnvSpec) -> RecurrentQNetwork:
    """Create a freshly initialised network. A custom ``algo.critic.net`` computes its features."""
    config = showing(config)
    algo = config.algo
    source, layers = make_value_input(config, spec), make_layers(algo.critic)
    actions = cast(Discrete, spec.action).n
    return RecurrentQNetwork(source, algo.lstm, actions, layers, algo.dueling, algo.shared_grad)


def r2d2_update(state: ValueState, batch: Sequence, settings: R2d2Config, gen: Generator) -> Metrics:
    """Take one step of Q(s, a) on every trained row of the sequences; update priorities. Mutates ``state`` only."""
    net, target_net = (cast(RecurrentQNetwork, n) for n in state.nets)
    online_q = sequence_values(net, batch, settings.burn_in)  # [S - burn_in, B, n]
    with torch.no_grad():
        target_q = sequence_values(target_net, batch, settings.burn_in)
        best = (online_q if settings.double else target_q).argmax(-1, keepdim=True)
        ahead = target_q.gather(-1, best).squeeze(-1).gather(0, batch.successor)  # [L, B]
        target = targets(batch.reward, batch.discount, ahead, settings.rescale)
    done = batch.action[settings.burn_in :][: target.shape[0]]
    q = online_q[: target.shape[0]].gather(-1, done.unsqueeze(-1)).squeeze(-1)
    error = target - q
    loss, error = huber(error, settings.huber), error.detach()
    metrics = value_step(state, batch, loss, error, q.detach())
    assert state.priorities is not None
    state.priorities.update(batch.index, mixed(error, batch.mask, settings.eta), batch.mask.amax(0))
    return {**metrics, "replay/used": batch.mask.mean()}


def sequence_values(net: RecurrentQNetwork, batch: Sequence, burn_in: int) -> Tensor:
    """Return Q of all actions in the rows from ``burn_in`` on, [S - burn_in, B, n].

    Burn-in rows only refresh the recurrent state, without gradients. The state is reset after the filler row with an
    episode's final observation.
    """
    carry = batch.carry
    if burn_in:
        with torch.no_grad():
            carry = net.remember({k: v[:burn_in] for k, v in batch.obs.items()}, carry, batch.first[:burn_in])
    return net.unroll({k: v[burn_in:] for k, v in batch.obs.items()}, carry, batch.first[burn_in:])


def targets(reward: Tensor, discount: Tensor, ahead: Tensor, epsilon: float | None) -> Tensor:
    """Return h(reward + discount * h^-1(ahead)), [L, B]; without rescaling, h is the identity."""
    if epsilon is None:
        return torch.addcmul(reward, discount, ahead)
    return rescale_value(torch.addcmul(reward, discount, restore(ahead, epsilon)), epsilon)


def rescale_value(x: Tensor, epsilon: float) -> Tensor:
    """Return h(x) = sign(x) (sqrt(|x| + 1) - 1) + epsilon x, in x's shape."""
    return x.sign() * ((x.abs() + 1).sqrt() - 1) + epsilon * x


def restore(x: Tensor, epsilon: float) -> Tensor:
    """Inverse of :func:`rescale_value`, of any shape: sign(x) (((sqrt(1 + 4 epsilon (|x| + 1 + epsilon)) - 1) /
    (2 epsilon))^2 - 1).

    Computed in float64: the cancellation, squared, would lose half of float32's digits.
    """
    wide = x.double()
    root = (1 + 4 * epsilon * (wide.abs() + 1 + epsilon)).sqrt()
    return (wide.sign() * (((root - 1) / (2 * epsilon)).square() - 1)).to(x.dtype)


FAMILY = Recurrent(R2d2Config, r2d2_update, targets).family()
