"""Settings of the built-in algorithms: one record per family of update functions.

A record also declares the properties of its family that validation, reports and the command line use. This package does
not import torch: the command line checks settings before it loads torch.
"""

from pql.config.algorithms.actor_critics import ActorCriticConfig, DdpgConfig, SacConfig
from pql.config.algorithms.base import AlgoConfig, ReplayAlgoConfig
from pql.config.algorithms.rollouts import (
    ImpalaConfig,
    PpoConfig,
    PqnConfig,
    ReppoConfig,
    RolloutAlgoConfig,
    StochasticConfig,
)
from pql.config.algorithms.values import DqnConfig, DuelingConfig, R2d2Config

__all__ = [
    "RECORDS",
    "ActorCriticConfig",
    "AlgoConfig",
    "DdpgConfig",
    "DqnConfig",
    "DuelingConfig",
    "ImpalaConfig",
    "PpoConfig",
    "PqnConfig",
    "R2d2Config",
    "ReplayAlgoConfig",
    "ReppoConfig",
    "RolloutAlgoConfig",
    "SacConfig",
    "StochasticConfig",
]

RECORDS: dict[str, type[AlgoConfig]] = {
    record.family: record
    for record in (DdpgConfig, SacConfig, DqnConfig, R2d2Config, PpoConfig, ImpalaConfig, PqnConfig, ReppoConfig)
}
"""Records of the built-in families, by name."""
