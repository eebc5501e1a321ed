"""The settings record of an algorithm's family, by name: built in, registered here, or of an installed package."""

from collections.abc import Mapping
from typing import Any

from pql.config.algorithms import RECORDS, AlgoConfig
from pql.errors import ConfigError, nearest

registered: dict[str, type[AlgoConfig]] = {}


def record_of(algo: Any) -> type[AlgoConfig]:
    """The record that the settings ``algo`` (a mapping) are for: that of ``family``, DDPG's where none is named.

    Raises:
        ConfigError: no such family.
    """
    family = algo.get("family", "ddpg") if isinstance(algo, Mapping) else "ddpg"
    known = {**RECORDS, **registered}
    if family not in known:
        raise ConfigError("algo.family", family, f"one of {', '.join(known)}{nearest(str(family), known)}")
    return known[family]
