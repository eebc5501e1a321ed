"""The configuration: what may be set, its types, ranges and comments.

Knows no torch and no algorithm's code. Start reading at ``schema.py``; ``fields.py`` has the declarations' helpers.
"""

from pql.config.algorithms import AlgoConfig as AlgoConfig
from pql.config.algorithms import DdpgConfig as DdpgConfig
from pql.config.algorithms import DqnConfig as DqnConfig
from pql.config.algorithms import ImpalaConfig as ImpalaConfig
from pql.config.algorithms import PpoConfig as PpoConfig
from pql.config.algorithms import PqnConfig as PqnConfig
from pql.config.algorithms import R2d2Config as R2d2Config
from pql.config.algorithms import SacConfig as SacConfig
from pql.config.groups import CriticConfig as CriticConfig
from pql.config.groups import DeterministicPolicyConfig as DeterministicPolicyConfig
from pql.config.groups import DistributionalNetConfig as DistributionalNetConfig
from pql.config.groups import EncoderConfig as EncoderConfig
from pql.config.groups import EpsilonConfig as EpsilonConfig
from pql.config.groups import RolloutPolicyConfig as RolloutPolicyConfig
from pql.config.groups import TrainedNetConfig as TrainedNetConfig
from pql.config.groups import VtraceConfig as VtraceConfig
from pql.config.schema import BudgetConfig as BudgetConfig
from pql.config.schema import Config as Config
from pql.config.schema import PlacementConfig as PlacementConfig
from pql.config.schema import ReplayConfig as ReplayConfig
from pql.config.schema import TaskConfig as TaskConfig
from pql.config.schema import ThreadsConfig as ThreadsConfig
from pql.config.schema import changed as changed
from pql.config.schema import from_dict as from_dict
from pql.config.schema import leaves as leaves
from pql.config.schema import to_dict as to_dict
