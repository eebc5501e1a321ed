"""The configuration: settings with types, ranges and descriptions, presets in YAML, and their composition.

It imports neither torch nor algorithms. Start reading at ``schema.py``, then ``layers.py`` and ``compose.py``.
"""

from pql.config.algorithms import AlgoConfig as AlgoConfig
from pql.config.algorithms import DdpgConfig as DdpgConfig
from pql.config.algorithms import DqnConfig as DqnConfig
from pql.config.algorithms import ImpalaConfig as ImpalaConfig
from pql.config.algorithms import PpoConfig as PpoConfig
from pql.config.algorithms import PqnConfig as PqnConfig
from pql.config.algorithms import R2d2Config as R2d2Config
from pql.config.algorithms import ReppoConfig as ReppoConfig
from pql.config.algorithms import SacConfig as SacConfig
from pql.config.groups import EpsilonConfig as EpsilonConfig
from pql.config.groups import MunchausenConfig as MunchausenConfig
from pql.config.groups import VtraceConfig as VtraceConfig
from pql.config.networks import CriticConfig as CriticConfig
from pql.config.networks import DeterministicPolicyConfig as DeterministicPolicyConfig
from pql.config.networks import EncoderConfig as EncoderConfig
from pql.config.networks import QuantileNetConfig as QuantileNetConfig
from pql.config.networks import RolloutPolicyConfig as RolloutPolicyConfig
from pql.config.networks import TrainedNetConfig as TrainedNetConfig
from pql.config.networks import ValueEncoderConfig as ValueEncoderConfig
from pql.config.schema import BudgetConfig as BudgetConfig
from pql.config.schema import Config as Config
from pql.config.schema import PlacementConfig as PlacementConfig
from pql.config.schema import ReplayConfig as ReplayConfig
from pql.config.schema import TaskConfig as TaskConfig
from pql.config.schema import ThreadsConfig as ThreadsConfig
from pql.config.schema import changed as changed
from pql.config.schema import fingerprint as fingerprint
from pql.config.schema import from_dict as from_dict
from pql.config.schema import leaves as leaves
from pql.config.schema import to_dict as to_dict
