"""Families of algorithms: what ``build`` needs from one, what it gives to one, and where families are registered.

``algo.family`` names a family; a preset (``algo=NAME``) is a set of values for its settings.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from pql.collect.collector import Collector
from pql.config import AlgoConfig, Config, families
from pql.config import layers as presets
from pql.config.algorithms import RECORDS
from pql.config.families import own
from pql.config.schema import A_co
from pql.contract.env import EnvSpec, VecEnv
from pql.contract.plugins import entry_points
from pql.contract.registry import import_name
from pql.engine.flat import Flat
from pql.engine.graph import Execution
from pql.engine.schedule import Counts
from pql.engine.worker import Learner, Tensors
from pql.errors import ConfigError

BUILT_IN = {
    "ddpg": "pql.algos.ddpg:FAMILY",
    "sac": "pql.algos.sac:FAMILY",
    "ppo": "pql.algos.ppo:FAMILY",
    "impala": "pql.algos.impala:FAMILY",
    "dqn": "pql.algos.dqn:FAMILY",
    "r2d2": "pql.algos.r2d2:FAMILY",
    "pqn": "pql.algos.pqn:FAMILY",
    "reppo": "pql.algos.reppo:FAMILY",
    "distill": "pql.algos.distill:FAMILY",
}

_registered: dict[str, "Family[Any]"] = {}
A = TypeVar("A", bound=AlgoConfig)

Devices = dict[str, torch.device]
"""Device of each worker, by name."""


@dataclass(frozen=True)
class Setup(Generic[A_co]):
    """Arguments of a family's ``wire``.

    Attributes:
        env: a live environment.
        rows: storage rows per environment, as the family's ``check`` returned them.
        devices: devices by worker.
        execution: whether bodies are captured and compiled.
        load: (path, device) -> a trained policy.
    """

    config: Config[A_co]
    env: VecEnv
    counts: Counts
    rows: int
    devices: Devices
    execution: Execution
    load: Callable[[str, torch.device], Any]

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
class Wiring:
    """Components that a family creates from a config and an environment; ``build`` adds workers, slots and a schedule.

    Attributes:
        pulls, publishes: the collector's tensors, by the slot that fills or publishes them.
        learners: in the order in which the lockstep schedule runs them.
        policy: network that is evaluated and saved.
        gauges: 0-dim tensors for the log.
        sources: hashes of what was read from files, by setting; a resumed run must find the same.
    """

    collector: Collector
    pulls: Tensors
    publishes: Tensors
    learners: list[Learner]
    policy: Flat | nn.Module
    gauges: dict[str, Tensor]
    sources: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Family(Generic[A]):
    """Algorithms with the same updates, settings and data.

    Attributes:
        settings: their settings class, whose ``family`` is the name.
        counts: config -> the integers of a tick.
        check: (config, spec, counts, device) -> rows per environment in the storage; raises ``ConfigError`` for an
            unsupported environment.
        wire: setup -> wiring.
        policy: (config, spec) -> a freshly initialised policy network on the CPU.
    """

    settings: type[A]
    counts: Callable[[Config[A]], Counts]
    check: Callable[[Config[A], EnvSpec, Counts, torch.device], int]
    wire: Callable[[Setup[A]], Wiring]
    policy: Callable[[Config[A], EnvSpec], nn.Module]

    @property
    def name(self) -> str:
        return self.settings().family


def register_algorithm(family: Family[Any], preset: Mapping[str, Any] | None = None) -> None:
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


def family_of(config: Config[A]) -> Family[A]:
    """Return the family of a config's algorithm.

    Raises:
        TypeError: ``config.algo`` is the record of another family.
    """
    name = config.algo.family
    family: Family[A]
    if name in _registered:
        family = _registered[name]
    elif name in RECORDS:
        family = import_name("algo.family", BUILT_IN[name])
    else:
        family = next(entry.load() for entry in entry_points(group=families.GROUP) if entry.name == name)
    own(config, family.settings)
    return family


def make_policy(config: Config, spec: EnvSpec) -> nn.Module:
    """Return a freshly initialised policy network."""
    return family_of(config).policy(config, spec)


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
