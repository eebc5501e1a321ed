"""pql inside robot stacks, whose own commands train with it: rsl_rl (version 5), mjlab and Isaac Lab.

``Learner`` is an algorithm for rsl_rl's runners, ``Runner`` a runner for scripts that choose one, and ``from_rsl_rl``
makes a ``VecEnv`` of an environment with rsl_rl's interface. ``mjlab.py`` and ``isaaclab.py`` register tasks and
commands. The simulators and rsl_rl are imported when they are used. docs/guides/robot_stacks.md
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pql.lab.learner import LabLearner as Learner
    from pql.lab.runner import LabRunner as Runner
    from pql.lab.vec import from_rsl_rl as from_rsl_rl

_HOME = {"Learner": "learner:LabLearner", "Runner": "runner:LabRunner", "from_rsl_rl": "vec:from_rsl_rl"}

__all__ = ["Learner", "Runner", "from_rsl_rl"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'pql.lab' has no attribute {name!r}")
    module, _, attribute = _HOME[name].partition(":")
    return getattr(importlib.import_module(f"pql.lab.{module}"), attribute)
