"""Registry of algorithm families: built in, from installed packages, or registered in this process.

A family is everything that ``build`` needs from an algorithm. ``algo.family`` names it; a preset (``algo=NAME``) is a
set of values for its settings.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pql.algos.wiring import Setup, Wiring
from pql.config import AlgoConfig, Config, families
from pql.config import layers as presets
from pql.config.algorithms import RECORDS
from pql.contract.env import EnvSpec
from pql.contract.plugins import entry_points
from pql.contract.registry import import_name
from pql.engine.schedule import Counts
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
}

_registered: dict[str, "Family"] = {}


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
