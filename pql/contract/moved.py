"""Aliases for module names up to version 0.1: importing one still works for one version, with a deprecation warning.

Runs on Python 3.8, as ``pql/__init__.py`` does.
"""

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {
    "pql." + old: "pql." + new
    for old, new in {
        "main": "cli.main",
        "conformance": "contract.conformance",
        "env": "contract.env",
        "envs.plain": "contract.plain",
        "feedback": "contract.last_action",
        "grouped": "contract.grouped",
        "registry": "contract.registry",
        "rules": "contract.rules",
        "frames": "data.frames",
        "normalize": "data.normalize",
        "priority": "data.priority",
        "replay": "data.replay",
        "rollout": "data.rollout",
        "sequences": "data.sequences",
        "transitions": "data.transitions",
        "optim": "engine.optim",
        "schedule": "engine.schedule",
        "worker": "engine.worker",
        "explore": "collect.exploration",
        "actor_critic": "nets.actor_critic",
        "dist": "nets.distributions",
        "encoders": "nets.encoders",
        "qnets": "nets.q",
        "blackbox": "run.flight_recorder",
        "build": "run.build",
        "checkpoint": "run.store.checkpoint",
        "evaluation": "run.evaluation",
        "export": "run.export.writer",
        "play": "run.play",
        "policy": "run.policy",
        "rundir": "run.store.run_dir",
        "session": "run.session",
        "gymnasium": "wrap.gymnasium_ids",
    }.items()
}


SPLIT = {"pql.env": "pql.contract.registry"}
"""Old modules whose names are in two modules now: the second one."""


class _Moved(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> "ModuleSpec | None":
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        old, new = module.__name__, MOVED[module.__name__]
        warnings.warn(f"{old} is now {new}; the old name ends with version 0.3", DeprecationWarning, stacklevel=2)
        sys.modules[old] = importlib.import_module(new)
        if old in SPLIT:
            module.__dict__.update(vars(importlib.import_module(SPLIT[old])) | vars(sys.modules[old]))
            sys.modules[old] = module


def install() -> None:
    """Install the import hook for old names. It comes last, so that other imports do not pay for it."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.append(_Moved())
