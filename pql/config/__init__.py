"""The configuration: what may be set, its types, ranges and comments.

Knows no torch and no algorithm's code. Start reading at ``schema.py``; ``fields.py`` has the declarations' helpers.
"""

from pql.config.algorithms import AlgoConfig as AlgoConfig
from pql.config.algorithms import (
    DdpgConfig,
    DqnConfig,
    ImpalaConfig,
    PpoConfig,
    PqnConfig,
    R2d2Config,
    SacConfig,
)  # fmt: skip
from pql.config.groups import (
    CentralConfig,
    CriticConfig,
    EncoderConfig,
    EpsilonConfig,
    ExploreConfig,
    NetConfig,
    PriorityConfig,
    VtraceConfig,
)  # fmt: skip
from pql.config.schema import (
    BudgetConfig,
    CheckpointConfig,
    Config,
    EvalConfig,
    LoggerConfig,
    PlacementConfig,
    ProcessConfig,
    ReplayConfig,
    TaskConfig,
    ThreadsConfig,
    from_dict,
    leaves,
    to_dict,
)  # fmt: skip

__all__ = [
    "AlgoConfig", "BudgetConfig", "CentralConfig", "CheckpointConfig", "Config", "CriticConfig", "DdpgConfig",
    "DqnConfig", "EncoderConfig", "EpsilonConfig", "EvalConfig", "ExploreConfig", "ImpalaConfig", "LoggerConfig",
    "NetConfig", "PlacementConfig", "PpoConfig", "PqnConfig", "PriorityConfig", "ProcessConfig", "R2d2Config",
    "ReplayConfig", "SacConfig", "TaskConfig", "ThreadsConfig", "VtraceConfig", "from_dict", "leaves", "to_dict",
]  # fmt: skip
