"""The configuration: settings with types, ranges and descriptions, presets in YAML, and their composition.

It imports neither torch nor algorithms. Start reading at ``schema.py``, then ``layers.py`` and ``compose.py``.
"""

from pql.config.algorithms import (
    AlgoConfig,
    DdpgConfig,
    DqnConfig,
    ImpalaConfig,
    PpoConfig,
    PqnConfig,
    R2d2Config,
    ReppoConfig,
    SacConfig,
)
from pql.config.groups import EpsilonConfig, MunchausenConfig, VtraceConfig
from pql.config.networks import (
    CriticConfig,
    DeterministicPolicyConfig,
    EncoderConfig,
    QuantileNetConfig,
    RolloutPolicyConfig,
    TrainedNetConfig,
    ValueEncoderConfig,
)
from pql.config.schema import (
    BudgetConfig,
    Config,
    PlacementConfig,
    ReplayConfig,
    TaskConfig,
    ThreadsConfig,
    changed,
    fingerprint,
    from_dict,
    leaves,
    to_dict,
)

__all__ = [
    "AlgoConfig",
    "BudgetConfig",
    "Config",
    "CriticConfig",
    "DdpgConfig",
    "DeterministicPolicyConfig",
    "DqnConfig",
    "EncoderConfig",
    "EpsilonConfig",
    "ImpalaConfig",
    "MunchausenConfig",
    "PlacementConfig",
    "PpoConfig",
    "PqnConfig",
    "QuantileNetConfig",
    "R2d2Config",
    "ReplayConfig",
    "ReppoConfig",
    "RolloutPolicyConfig",
    "SacConfig",
    "TaskConfig",
    "ThreadsConfig",
    "TrainedNetConfig",
    "ValueEncoderConfig",
    "VtraceConfig",
    "changed",
    "fingerprint",
    "from_dict",
    "leaves",
    "to_dict",
]
