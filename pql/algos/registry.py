"""Families of algorithms: what ``build`` needs from one, what it gives to one, and where families are registered.

``algo.family`` names a family; a preset (``algo=NAME``) is a set of values for its settings. The functions at the end
are shared by the families: seeds, optimisers, the normaliser, the replay and checks of an environment.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pql.collect.collector import Collector
from pql.config import AlgoConfig, Config, families
from pql.config import layers as presets
from pql.config.algorithms import RECORDS, ActorCriticConfig, ReplayAlgoConfig
from pql.config.families import own
from pql.config.networks import TrainedNetConfig
from pql.contract.env import Box, Discrete, EnvSpec, MultiDiscrete, ObsSpec, VecEnv
from pql.contract.plugins import entry_points
from pql.contract.registry import import_name
from pql.data.frames import deepest, stored_spec
from pql.data.normalize import Normalizer
from pql.data.priority import least_rows
from pql.data.replay import Cursor, Replay
from pql.data.sizes import ReplayLayout, preflight
from pql.engine.graph import Capture
from pql.engine.optim import AdamW, LrSchedule
from pql.engine.placement import available_bytes
from pql.engine.schedule import Counts
from pql.engine.worker import Learner
from pql.errors import ConfigError
from pql.nets.encoders import groups_of
from pql.nets.mlp import Flat

BUILT_IN = {
    "ddpg": "pql.algos.ddpg:FAMILY",
    "sac": "pql.algos.sac:FAMILY",
    "ppo": "pql.algos.ppo:FAMILY",
    "impala": "pql.algos.impala:FAMILY",
    "dqn": "pql.algos.dqn:FAMILY",
    "r2d2": "pql.algos.r2d2:FAMILY",
    "pqn": "pql.algos.pqn:FAMILY",
    "reppo": "pql.algos.reppo:FAMILY",
}

_registered: dict[str, "Family"] = {}

Devices = dict[str, torch.device]
"""Device of each worker, by name."""


@dataclass(frozen=True)
class Setup:
    """Arguments of a family's ``wire``.

    Attributes:
        env: a live environment.
        rows: storage rows per environment, as the family's ``check`` returned them.
        devices: devices by worker.
        capture: whether graphs are captured.
    """

    config: Config
    env: VecEnv
    counts: Counts
    rows: int
    devices: Devices
    capture: Capture

    @property
    def spec(self) -> EnvSpec:
        return self.env.spec

    @property
    def init_seed(self) -> int:
        """Seed of the networks' initial weights."""
        return seeds(self.config.seed)["init"]

    def generator(self, worker: str, stream: str | None = None) -> torch.Generator:
        """Return a generator on ``worker``'s device, seeded for ``stream`` (default: the worker's name)."""
        return torch.Generator(self.devices[worker]).manual_seed(seeds(self.config.seed)[stream or worker])


@dataclass
class Role:
    """One worker's part of an algorithm: private tensors by the slot that fills them, and the tensors it publishes."""

    pulls: dict[str, list[Tensor]]
    owns: dict[str, list[Tensor]]
    learner: Learner | None = None
    cursor: Cursor | None = None


@dataclass
class Wiring:
    """Components that a family creates from a config and an environment; ``build`` adds workers, slots and a schedule.

    Attributes:
        roles: by worker: learners, in the order in which the lockstep schedule runs them, then the collector.
        policy: network that is evaluated and saved.
        gauges: 0-dim tensors for the log.
    """

    collector: Collector
    roles: dict[str, Role]
    policy: Flat | nn.Module
    gauges: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """Algorithms with the same updates, settings and data.

    Attributes:
        settings: their settings class, whose ``family`` is the name.
        counts: config -> the integers of a tick.
        check: (config, spec, counts, device) -> rows per environment in the storage; raises ``ConfigError`` for an
            unsupported environment.
        wire: setup -> wiring.
        policy: (config, spec) -> a freshly initialised policy network on the CPU.
    """

    settings: type[AlgoConfig]
    counts: Callable[[Config], Counts]
    check: Callable[[Config, EnvSpec, Counts, torch.device], int]
    wire: Callable[[Setup], Wiring]
    policy: Callable[[Config, EnvSpec], nn.Module]

    @property
    def name(self) -> str:
        return self.settings().family


def register_algorithm(family: Family, preset: Mapping[str, Any] | None = None) -> None:
    """Make a family available in this process, with a preset of its name.

    Packages use the entry-point group ``pql.algos``.

    Args:
        preset: as in ``pql/config/presets/algo/NAME.yaml``; ``scales`` has the settings at each scale. None: the
            family's defaults, at every scale.
    Raises:
        ConfigError: a built-in family has this name.
    """
    name = family.name
    if name in BUILT_IN:
        raise ConfigError("family", name, "a name that no built-in family has: a default of the record's field family")
    _registered[name], families.registered[name] = family, family.settings
    every: dict[str, dict[str, Any]] = {"cpu": {}, "gpu": {}}
    presets.registered[name] = {"family": name, "scales": every, **(preset or {})}


def family_of(config: Config) -> Family:
    """Return the family of a config's algorithm."""
    name = config.algo.family
    if name in _registered:
        return _registered[name]
    if name in RECORDS:
        family: Family = import_name("algo.family", BUILT_IN[name])
        return family
    return next(entry.load() for entry in entry_points(group=families.GROUP) if entry.name == name)


# -- shared by the families --------------------------------------------------------------------------------------------


def seeds(seed: int) -> dict[str, int]:
    """Derive a seed for every generator and for the simulator. The generator of a single learner has "v"."""
    root = torch.Generator().manual_seed(seed)
    names = ("init", "env", "collector", "v", "p", "eval")
    return dict(zip(names, torch.randint(2**62, (len(names),), generator=root).tolist(), strict=True))


def env_seed(seed: int, steps: int = 0) -> int:
    """Return the seed of a run's simulator that begins new episodes after ``steps`` env steps of the run.

    With the first seed again, a resumed run would repeat the initial states and goals of its beginning.
    """
    first = seeds(seed)["env"]
    return first if steps == 0 else int(np.random.SeedSequence((first, steps)).generate_state(1, np.uint64)[0] >> 2)


def own_seed(seed: int, number: int) -> int:
    """Derive the seed of process or replica ``number`` of a run. Number 0 has the run's seed."""
    if number == 0:
        return seed
    return int(torch.randint(2**62, (number,), generator=torch.Generator().manual_seed(seed))[-1])


def make_adamw(flat: Flat, net: TrainedNetConfig, kind: type[AdamW] = AdamW) -> AdamW:
    """Create the optimiser of a network with its settings."""
    return kind(flat, net.lr, net.grad_clip, net.weight_decay, net.eps, (net.beta1, net.beta2))


def make_lr_schedule(algo: ReplayAlgoConfig, per_update: float = 1.0) -> LrSchedule | None:
    """Return the schedule of an optimiser that takes ``per_update`` steps per critic update; None: constant."""
    if algo.lr_schedule == "constant":
        return None
    return LrSchedule(algo.lr_schedule, algo.lr_updates * per_update, algo.lr_final)


def make_normalizer(setup: Setup) -> Normalizer:
    """Create the collector's normaliser."""
    config, spec, algo = setup.config, setup.spec, setup.config.algo
    # A task's factor would shrink their normalised rewards again. On-policy presets were found with both.
    replaced = isinstance(algo, ActorCriticConfig) and algo.normalize_reward
    return Normalizer(
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


def check_continuous(config: Config, spec: EnvSpec) -> None:
    """Raises ``ConfigError`` for discrete actions."""
    if not isinstance(spec.action, Box):
        raise ConfigError("task", config.task.name, f"a task with bounded continuous actions; {advice(spec)}")


def advice(spec: EnvSpec) -> str:
    """Name the actions of a task that an algorithm does not support, and algorithms that do."""
    takers = {Box: "pql, sac, ppo", Discrete: "dqn, ppo, pqn, impala", MultiDiscrete: "ppo, a2c, appo, impala"}
    return f"this one has {spec.action}: for that, algo={takers[type(spec.action)]}, ..."


def check_obs(config: Config, spec: EnvSpec) -> None:
    """Raises ``ConfigError`` for an unsupported observation. Custom networks are not checked."""
    for which in ("policy", "critic"):
        if getattr(config.algo, which).net is None:
            groups_of(config, spec, which)


def ring_rows(
    config: Config,
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
    guard, n = horizon + deepest(spec.obs.values()), own(config, ReplayAlgoConfig).n_step
    tick = least_rows(horizon, n, guard) if prioritized else guard + n + 1
    warm_up = guard + config.algo.warmup_steps + 1
    if rows < max(tick, warm_up):
        least, what = max((warm_up, "the warm-up"), (tick, "a tick and its n-step windows"))
        raise ConfigError(
            "replay.capacity",
            replay.capacity,
            f"at least {least * spec.num_envs}: {least} rows of {spec.num_envs} environments for {what}",
        )
    return rows


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
