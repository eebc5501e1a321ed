"""R2D2's wiring: a collector that acts epsilon-greedily with a memory, and one V-learner on sequences.

Lockstep or concurrent, it is the value-based family (``valuebased.py``) with a recurrent network, the states that it
acted with beside the ring, and priorities of sequences instead of rows.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import cast

import torch
from torch import Generator

from pql.algos import dqn, r2d2
from pql.collect import Collector
from pql.config import Config
from pql.env import Discrete, EnvSpec, VecEnv
from pql.epsilon import Epsilon, RecurrentActor
from pql.errors import ConfigError
from pql.feedback import GROUP
from pql.frames import deepest
from pql.nets import Flat, seeded
from pql.normalize import Normalizer
from pql.optim import Clock
from pql.qnets import RecurrentQNetwork
from pql.replay import Cursor
from pql.schedule import Counts
from pql.sequences import RankedSequences, Sequence, Sequences, States
from pql.valuebased import acting, check_acting, make_features, make_optimizer, target_updates, told
from pql.wiring import Devices, Family, Role, Wiring, make_normalizer, make_ring, ring_rows, seeds
from pql.worker import Learner

LONGEST_HORIZON = 1024
"""Steps of a tick at the most: an update is on thousands of rows, so few come with many steps."""


def counts(config: Config) -> Counts:
    """The smallest tick in which the replay ratio is exact.

    Raises:
        ConfigError: none up to ``LONGEST_HORIZON`` steps has.
    """
    algo, own = config.algo, config.algo.r2d2
    rows = algo.batch_size * own.length  # trained on by an update
    ratio = Fraction(str(own.replay_ratio))
    updates = ratio * config.num_envs / rows  # per step of all environments
    if updates.denominator > LONGEST_HORIZON:
        steps = min(LONGEST_HORIZON, max(1, round(1 / updates)))
        near = Fraction(max(1, round(updates * steps)) * rows, steps * config.num_envs)
        raise ConfigError(
            "algo.r2d2.replay_ratio", own.replay_ratio,
            f"a ratio that gives a whole number of updates ({algo.batch_size} sequences of {own.length} rows) within "
            f"{LONGEST_HORIZON} steps of {config.num_envs} environments, such as {float(near):g}",
        )  # fmt: skip
    out = Counts(updates.denominator, {"v": updates.numerator}, 1)
    assert out.updates["v"] * rows == ratio * out.horizon * config.num_envs
    return out


def check_spec(config: Config, spec: EnvSpec, counts: Counts, device: torch.device) -> int:
    """What an environment and a config must agree on. Returns the replay's rows T, a whole number of periods.

    Raises:
        ConfigError: an action or observation space that no network here takes, a target period that is no whole number
            of updates, a replay that is too small for a sequence or too large for memory.
    """
    own = config.algo.r2d2
    config = showing(config)
    check_acting(config, spec)
    target_updates(config, counts)
    states = ("state",) * -(-2 * own.lstm // own.period)  # numbers a row that its share of a stored state takes
    rows = ring_rows(config, spec, counts, device, (*told(config), *states)) // own.period * own.period
    guard = counts.horizon * spec.spread + deepest(spec.obs.values())
    least = max(sequence_rows(config) + own.period - 1, config.algo.warmup_steps) + guard
    least = -(-least // own.period) * own.period
    if rows < least:
        raise ConfigError(
            "replay.capacity", config.replay.capacity,
            f"at least {least * spec.num_envs}: {least} rows of {spec.num_envs} environments, so that there always is "
            "a whole sequence",
        )  # fmt: skip
    return rows


def sequence_rows(config: Config) -> int:
    """S: rows that must be there before a sequence may be drawn."""
    return config.algo.r2d2.burn_in + config.algo.r2d2.length + config.algo.n_step


def showing(config: Config) -> Config:
    """The same with observations that the network acts on named: what was done last among them, where it is shown."""
    config = acting(config)
    critic, own = config.algo.critic, config.algo.r2d2
    groups = [*(critic.obs or ()), *([GROUP] if own.feedback and GROUP not in (critic.obs or ()) else [])]
    return replace(config, algo=replace(config.algo, critic=replace(critic, obs=groups)))


def wire(config: Config, env: VecEnv, counts: Counts, rows: int, devices: Devices, capture: bool) -> Wiring:
    """The ring and the states beside it, their collector and the V-learner."""
    spec, seed, algo = env.spec, seeds(config.seed), config.algo
    gens = {w: Generator(devices[w]).manual_seed(seed[w]) for w in ("v", "collector")}
    net = seeded(partial(make_q_network, config, spec), seed["init"])
    norm = make_normalizer(config, spec, devices["collector"])
    ring = make_ring(config, spec, rows, counts, devices["v"], extra=told(config))
    states = States(ring, net.carry_size, algo.r2d2.period)
    epsilon = Epsilon(algo.dqn.epsilon, spec.num_envs, spec.device)
    actor = RecurrentActor(copy.deepcopy(net).to(spec.device), epsilon, spec, bool(told(config)))
    collector = Collector(env, actor, norm, [states, ring], gens["collector"], capture)  # in this order: see States
    sequences = make_sequences(config, spec, states)
    value = value_role(config, net, norm, sequences, counts, gens["v"])
    acts = Role(pulls={"policy": [Flat(actor.policy).data]}, owns={
        "norm": norm.frozen(), "rows": ring.live.tensors()})  # fmt: skip
    assert value.cursor is not None
    assert value.learner is not None
    state = cast(dqn.ValueState, value.learner.state)
    assert state.priorities is not None
    gauges = {"replay/bootstrap_lost": value.cursor.lost, "explore/epsilon": epsilon.mean,
              "replay/beta": state.priorities.beta}  # fmt: skip
    return Wiring(collector, {"v": value, "collector": acts}, state.q, gauges)


def make_sequences(config: Config, spec: EnvSpec, states: States) -> Sequences:
    algo, own = config.algo, config.algo.r2d2
    states.ring.constants(algo.n_step, algo.gamma)  # now: their copy to the device would make the first tick wait
    return Sequences(
        states.ring, states, own.burn_in, own.length, algo.n_step, algo.gamma, spec.max_episode_steps, own.stored_state
    )


def value_role(
    config: Config, net: RecurrentQNetwork, norm: Normalizer, sequences: Sequences, counts: Counts, gen: Generator
) -> Role:
    """The V-learner: network and target, priorities, a private normaliser and cursor."""
    algo, own, ring = config.algo, config.algo.r2d2, sequences.ring
    device, wanted = ring.device, config.algo.dqn.priority
    flat, target = Flat(net.to(device), trained=True), Flat(copy.deepcopy(net).to(device))
    ranked = RankedSequences(
        sequences, wanted.alpha, wanted.beta, wanted.beta_steps, counts.horizon * ring.num_envs, algo.dqn.huber,
        own.eta, partial(r2d2.targets, epsilon=own.rescale) if told(config) else None,
    )  # fmt: skip
    state = dqn.ValueState(flat, target, make_optimizer(config, flat), Clock(device), ranked)
    settings = r2d2.Settings(
        own.burn_in, algo.dqn.double, algo.dqn.huber, own.rescale, own.eta, target_updates(config, counts)
    )
    cursor, private = Cursor(ring.num_envs, device), norm.copy_to(device)

    def draw(count: int, gen: Generator) -> Iterator[Sequence]:
        ranked.open(cursor, private.reward_scale)
        for _ in range(count):
            batch = ranked.sample(cursor, algo.batch_size, gen)
            yield batch._replace(obs=private(batch.obs), reward=batch.reward * private.reward_scale)

    learner = Learner("v", state, r2d2.update, draw, settings, gen)
    pulls = {"norm": private.frozen(), "rows": cursor.tensors()}
    return Role(pulls, {"policy": [flat.data]}, learner, cursor)


def make_q_network(config: Config, spec: EnvSpec) -> RecurrentQNetwork:
    """The network alone, freshly initialised. One from elsewhere (``algo.critic.net``) gives the features."""
    config, own = showing(config), config.algo.dqn
    net = config.algo.critic
    group = (net.obs or ["policy"])[0]
    encoder, size = make_features(config, spec, group)
    return RecurrentQNetwork(
        group, size, config.algo.r2d2.lstm, cast(Discrete, spec.action).n, net.hidden, net.activation, net.layer_norm,
        encoder, own.dueling, own.shared_grad,
    )  # fmt: skip


RECURRENT = Family(("v",), counts, check_spec, wire, make_q_network)
