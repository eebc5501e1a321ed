"""Settings of the built-in algorithms: one record per family of update functions.

A record also declares the properties of its family that validation, reports and the command line use. This package does
not import torch: the command line checks settings before it loads torch.
"""

from pql.config.algorithms.actor_critics import ActorCriticConfig as ActorCriticConfig
from pql.config.algorithms.actor_critics import DdpgConfig, SacConfig
from pql.config.algorithms.base import AlgoConfig
from pql.config.algorithms.base import ReplayAlgoConfig as ReplayAlgoConfig
from pql.config.algorithms.distill import DistillConfig
from pql.config.algorithms.rollouts import ImpalaConfig, PpoConfig, PqnConfig, ReppoConfig
from pql.config.algorithms.rollouts import RolloutAlgoConfig as RolloutAlgoConfig
from pql.config.algorithms.rollouts import StochasticConfig as StochasticConfig
from pql.config.algorithms.values import DqnConfig, R2d2Config
from pql.config.algorithms.values import DuelingConfig as DuelingConfig

RECORDS: dict[str, type[AlgoConfig]] = {
    record.family: record
    for record in (
        DdpgConfig,
        SacConfig,
        DistillConfig,
        DqnConfig,
        R2d2Config,
        PpoConfig,
        ImpalaConfig,
        PqnConfig,
        ReppoConfig,
    )
}
"""Records of the built-in families, by name."""
