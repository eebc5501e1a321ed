"""Parts that families build from a config and an environment: checks, the normaliser, the replay."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Generator

from pql.algos.mirror import make_mirror
from pql.algos.registry import A, Setup
from pql.algos.rnd import groups_of_bonus
from pql.collect.prefill import demonstrations, observe_recorded
from pql.config import Config
from pql.config.algorithms import ActorCriticConfig, ReplayAlgoConfig
from pql.config.files import expanded
from pql.contract.env import Box, Discrete, EnvSpec, MultiDiscrete, ObsSpec
from pql.data.datasets import read_dataset
from pql.data.demos import Demos
from pql.data.frames import deepest, stored_spec
from pql.data.normalize import Normalizer
from pql.data.priority import least_rows
from pql.data.replay import Cursor, Replay
from pql.data.sequences import RankedSequences, Sequences, Span, States
from pql.data.sequences import Sequence as SequenceBatch
from pql.data.sizes import ReplayLayout, preflight
from pql.data.transitions import File, read_transitions
from pql.engine.placement import available_bytes
from pql.engine.schedule import Counts
from pql.engine.worker import Learner, State, Tensors, Update
from pql.errors import ConfigError
from pql.nets.encoders import groups_of
from pql.nets.memory import CELLS


def make_normalizer(setup: Setup) -> Normalizer:
    """Create the collector's normaliser."""
    config, spec, algo = setup.config, setup.spec, setup.config.algo
    # A task's factor would shrink their normalised rewards again. On-policy presets were found with both.
    replaced = isinstance(algo, ActorCriticConfig) and algo.normalize_reward
    norm = Normalizer(
        spec.obs,
        spec.num_envs,
        setup.devices["collector"],
        algo.normalize_obs,
        algo.reward_scale * (1.0 if replaced else config.task.reward_scale),
        algo.gamma if algo.normalize_reward else None,
        config.task.reward_clip,
        algo.return_cap if algo.normalize_reward else None,
        algo.normalize_integers,
    )
    norm.mirror = make_mirror(setup.config, setup.spec, setup.devices["collector"])
    return norm


class ReplayDraw(Protocol):
    """Draws batches from a replay, with a worker's copies of cursor and normaliser."""

    cursor: Cursor
    norm: Normalizer

    @property
    def worker(self) -> str: ...

    def __call__(self, count: int, gen: Generator) -> Iterable[Any]: ...


def replay_learner(
    setup: Setup[A], state: State, update: Update[Any, Any, A], draw: ReplayDraw, pulls: Tensors, publishes: Tensors
) -> Learner:
    """Return the learner that trains ``state`` on the batches of ``draw``.

    Args:
        pulls: copies in ``state``.
    """
    name, gen = draw.worker, setup.generator(draw.worker)
    pulls = {**pulls, "norm": draw.norm.frozen(), "rows": draw.cursor.tensors()}
    return Learner(name, state, update, setup.config.algo, draw, gen, pulls, publishes, (name,), draw.cursor.lost)


def check_continuous(config: Config, spec: EnvSpec) -> None:
    """Raises ``ConfigError`` for discrete actions."""
    if not isinstance(spec.action, Box):
        raise ConfigError("task", config.task.name, f"a task with bounded continuous actions; {advice(spec)}")


def advice(spec: EnvSpec) -> str:
    """Name the actions of a task that an algorithm does not support, and algorithms that do."""
    takers = {Box: "pql, sac, ppo", Discrete: "dqn, ppo, pqn, impala", MultiDiscrete: "ppo, a2c, appo, impala"}
    return f"this one has {spec.action}: for that, algo={takers[type(spec.action)]}, ..."


def check_obs(config: Config, spec: EnvSpec) -> None:
    """Raises ``ConfigError`` for an unsupported observation, one that ``algo.symmetry`` or ``algo.rnd`` cannot use, and
    demonstrations of another task. Custom networks are not checked."""
    for which in ("policy", "critic"):
        if getattr(config.algo, which).net is None:
            groups_of(config, spec, which)
    make_mirror(config, spec, spec.device)
    groups_of_bonus(config, spec)
    check_demos(config, spec)


def ring_rows(
    config: Config[ReplayAlgoConfig],
    spec: EnvSpec,
    counts: Counts,
    device: torch.device,
    extra: Sequence[str] = (),
    prioritized: bool = False,
) -> int:
    """Return the rows per environment of a replay of ``replay.capacity`` transitions.

    Args:
        extra: names of columns stored in addition to the actions.
        prioritized: rows are drawn by priority.
    Raises:
        ConfigError: it is too small for the warm-up or a tick, or does not fit into memory.
    """
    replay, layout = config.replay, ring_layout(config, spec, 0, counts, extra)
    rows, horizon = preflight(layout, replay.capacity, available_bytes(device)), layout.horizon
    guard, n = horizon + deepest(spec.obs.values()), config.algo.n_step
    tick = least_rows(horizon, n, guard) if prioritized else guard + n + 1
    warm_up = guard + config.algo.warmup_steps + 1
    if rows < max(tick, warm_up):
        least, what = max((warm_up, "the warm-up"), (tick, "a tick and its n-step windows"))
        allowed = f"at least {least * spec.num_envs}: {least} rows of {spec.num_envs} environments for {what}"
        raise ConfigError("replay.capacity", replay.capacity, allowed)
    return rows


def sequence_ring_rows(
    config: Config[Any],
    spec: EnvSpec,
    counts: Counts,
    device: torch.device,
    extra: Sequence[str] = (),
) -> int:
    """As :func:`ring_rows`, for a replay with sequences: a whole number of periods, at least one of a sequence."""
    algo, period = config.algo, config.algo.period
    size = CELLS[getattr(algo, "cell", "lstm")].states * algo.lstm  # of a state
    states = ("state",) * -(-size // period)  # stored states, as numbers per row
    rows = ring_rows(config, spec, counts, device, (*extra, *states)) // period * period
    guard = counts.horizon * spec.spread + deepest(spec.obs.values())
    least = max(algo.burn_in + algo.length + algo.n_step + period - 1, algo.warmup_steps) + guard
    least = -(-least // period) * period
    if rows < least:
        raise ConfigError(
            "replay.capacity",
            config.replay.capacity,
            f"at least {least * spec.num_envs}: {least} rows of {spec.num_envs} environments, so that there always is "
            "a whole sequence",
        )
    return rows


def make_sequences(config: Config[Any], states: States) -> Sequences:
    """Create the selection of sequences of the ring of ``states``."""
    algo = config.algo
    states.ring.constants(algo.n_step, algo.gamma)  # the copy to the device would stall the first tick
    span = Span(algo.burn_in, algo.length, algo.n_step)
    return Sequences(states, span, algo.gamma, algo.stored_state)


@dataclass
class SequenceDraw:
    """Batches of normalised sequences for one worker, drawn uniformly or by priority."""

    worker: str
    batch_size: int
    replay: Replay
    cursor: Cursor
    norm: Normalizer
    sequences: Sequences | RankedSequences
    mirror: ClassVar[None] = None

    def __call__(self, count: int, gen: Generator) -> Iterator[SequenceBatch]:
        """Yield ``count`` batches of B sequences."""
        self.sequences.open(self.cursor, self.norm.reward_scale)
        for _ in range(count):
            batch = self.sequences.sample(self.cursor, self.batch_size, gen)
            yield batch._replace(obs=self.norm(batch.obs), reward=batch.reward * self.norm.reward_scale)


def check_demos(config: Config, spec: EnvSpec) -> None:
    """Raises ``ConfigError`` for demonstrations of another task. Only their columns are checked."""
    if config.replay.demos is not None:
        setting, stored = "replay.demos", stored_obs(config, spec)
        path = expanded(setting, config.replay.demos)
        data = read_dataset(setting, path, config.replay.demo_keys, stored, spec)
        read_transitions(File(setting, path, stored, spec.obs, data), torch.empty(0, *spec.action.shape))


def make_demos(setup: Setup[A], replays: Sequence[Replay], norm: Normalizer) -> Sequence[Demos | None]:
    """Read the demonstrations, if there are any, for each of ``replays``; the observation statistics count them."""
    config, spec = setup.config, setup.spec
    if config.replay.demos is None:
        return [None] * len(replays)
    path, layout = expanded("replay.demos", config.replay.demos), ring_layout(config, spec, 0, setup.counts, ())
    found = demonstrations(path, config.replay.demo_keys, replays, layout, spec)
    observe_recorded(norm, found.taken, found.used, spec)
    return [Demos(ring, config.replay) for ring in found.rings]


def make_ring(setup: Setup, worker: str, obs_only: bool = False, extra: Sequence[str] = ()) -> Replay:
    """Create an empty replay on ``worker``'s device."""
    config, spec = setup.config, setup.spec
    layout = ring_layout(config, spec, setup.rows, setup.counts, extra)
    clip, ragged = config.task.reward_clip, spec.spread > 1
    return Replay(layout, setup.devices[worker], obs_only=obs_only, reward_clip=clip, ragged=ragged)


def stored_obs(config: Config, spec: EnvSpec) -> dict[str, ObsSpec]:
    """Return the observation groups as a run's replay stores them."""
    nets = (getattr(config.algo, name, None) for name in ("policy", "critic"))
    # A network of the user reads images as the simulator returns them.
    side = config.algo.encoder.size if all(net is None or net.net is None for net in nets) else None
    return {k: stored_spec(s, side) for k, s in spec.obs.items()}


def ring_layout(config: Config, spec: EnvSpec, rows: int, counts: Counts, extra: Sequence[str]) -> ReplayLayout:
    """Return the layout of a run's replay."""
    size, fillers = spec.action.size if isinstance(spec.action, Box) else None, spec.autoreset == "same_step"
    # Every step may end an episode; one more filler row is written when a run begins new episodes.
    horizon = counts.horizon * spec.spread * (1 + fillers) + 1
    dtype, obs = getattr(torch, config.replay.dtype), stored_obs(config, spec)
    return ReplayLayout(obs, size, spec.num_envs, rows, horizon, fillers, dtype, extra)
