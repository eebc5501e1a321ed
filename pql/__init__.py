"""pql: Parallel Q-Learning in PyTorch.

    env = pql.make_env("halfcheetah", num_envs=64)
    run = pql.train("task=halfcheetah", "algo=pql", "budget.seconds=60")
    policy = pql.load_policy(run.run_dir)

Names load on first use, so that ``import pql`` stays light.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

# Before the first CUDA call: cuBLAS picks its workspaces when it starts, and only these give the same bits each time.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Before torch is loaded: GNU's OpenMP lets idle threads spin for milliseconds after every operation, and occupy cores
# that a simulator's threads need. A tenth of a millisecond is enough to bridge the gap between operations.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

__version__ = "0.3.0.dev0"

if TYPE_CHECKING:
    from pql import wrap as wrap
    from pql.algos.registry import register_algorithm as register_algorithm
    from pql.api import compare as compare
    from pql.api import drive as drive
    from pql.api import evaluate as evaluate
    from pql.api import report as report
    from pql.api import resume as resume
    from pql.api import train as train
    from pql.config import Config as Config
    from pql.contract.conformance import check_env as check_env
    from pql.contract.env import Box as Box
    from pql.contract.env import Discrete as Discrete
    from pql.contract.env import EnvSpec as EnvSpec
    from pql.contract.env import MultiDiscrete as MultiDiscrete
    from pql.contract.env import ObsSpec as ObsSpec
    from pql.contract.env import make_env as make_env
    from pql.contract.registry import register as register
    from pql.errors import ConfigError as ConfigError
    from pql.errors import RunError as RunError
    from pql.run.export.writer import export_policy as export_policy
    from pql.run.play import record_video as record_video
    from pql.run.policy import load_policy as load_policy
    from pql.run.session import Session as Session
    from pql.run.store.run_dir import Summary as Summary
    from pql.types import Step as Step

_HOME = {
    "train": "pql.api",
    "drive": "pql.api",
    "resume": "pql.api",
    "evaluate": "pql.api",
    "compare": "pql.api",
    "report": "pql.api",
    "check_env": "pql.contract.conformance",
    "make_env": "pql.contract.env",
    "register": "pql.contract.registry",
    "EnvSpec": "pql.contract.env",
    "ObsSpec": "pql.contract.env",
    "Box": "pql.contract.env",
    "Discrete": "pql.contract.env",
    "MultiDiscrete": "pql.contract.env",
    "Step": "pql.types",
    "load_policy": "pql.run.policy",
    "export_policy": "pql.run.export.writer",
    "record_video": "pql.run.play",
    "Session": "pql.run.session",
    "Summary": "pql.run.store.run_dir",
    "register_algorithm": "pql.algos.registry",
    "Config": "pql.config",
    "ConfigError": "pql.errors",
    "RunError": "pql.errors",
}

__all__ = ["__version__", "wrap", *_HOME]


def __getattr__(name: str) -> Any:
    if name == "wrap":
        return importlib.import_module("pql.wrap")
    if name not in _HOME:
        raise AttributeError(f"module 'pql' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> Any:  # a list of names; this file also runs on Python 3.8, in the process of a simulator that needs it
    return sorted(__all__)
