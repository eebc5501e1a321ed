"""Lookup of settings records by family: built in, registered in this process, or from an installed package."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from pql.config.algorithms import RECORDS, AlgoConfig
from pql.contract.plugins import entry_points
from pql.errors import ConfigError, nearest

if TYPE_CHECKING:
    from pql.config.schema import Config

A = TypeVar("A", bound=AlgoConfig)
GROUP = (
    "pql.algos"  # entry points: NAME = "module:family" (a ``pql.algos.registry.Family``), NAME.yaml beside the module
)

registered: dict[str, type[AlgoConfig]] = {}


def record_of(algo: Any) -> type[AlgoConfig]:
    """Return the record class of ``algo.family`` (``algo`` is a mapping), DDPG's if none is named. Raises
    ``ConfigError``: no such family."""
    family = algo.get("family", "ddpg") if isinstance(algo, Mapping) else "ddpg"
    known = {**RECORDS, **registered}
    if isinstance(family, str) and family in known:
        return known[family]
    entries = {entry.name: entry for entry in entry_points(group=GROUP)}
    if isinstance(family, str) and family in entries:
        record: type[AlgoConfig] = entries[family].load().settings
        return record
    names = [*known, *entries]
    raise ConfigError("algo.family", family, f"one of {', '.join(names)}{nearest(str(family), names)}")


def own(config: "Config", record: type[A]) -> A:
    """Return ``config.algo``, which is a ``record``. Families have no use for it: what they are given is a
    ``Config[RECORD]``. Raises ``TypeError``: it is another family's."""
    if not isinstance(config.algo, record):
        raise TypeError(f"algo={config.algo.name} has {type(config.algo).__name__}, not {record.__name__}")
    return config.algo
