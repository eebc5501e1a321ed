"""pql: Parallel Q-Learning in PyTorch.

    env = pql.make_env("halfcheetah", num_envs=64)
    run = pql.train("task=halfcheetah", "algo=pql", "budget.seconds=60")
    policy = pql.load_policy(run.run_dir)

Names load on first use, so that ``import pql`` stays light.
"""

import os
from typing import TYPE_CHECKING, Any

# Before the first CUDA call: cuBLAS picks its workspaces when it starts, and only these give the same bits each time.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Before torch is loaded: GNU's OpenMP lets idle threads spin for milliseconds after every operation, on cores that a
# simulator's threads then wait for. A tenth of a millisecond bridges one operation to the next as well.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pql import wrap as wrap
    from pql.conformance import check_env as check_env
    from pql.env import make_env as make_env
    from pql.env import register as register
    from pql.export import export_policy as export_policy
    from pql.play import record_video as record_video
    from pql.policy import load_policy as load_policy
    from pql.rundir import Summary as Summary
    from pql.session import Session as Session
    from pql.types import Step as Step

_HOME = {
    "check_env": "pql.conformance", "make_env": "pql.env", "register": "pql.env", "EnvSpec": "pql.env",
    "ObsSpec": "pql.env", "Box": "pql.env", "Discrete": "pql.env", "Step": "pql.types", "load_policy": "pql.policy",
    "export_policy": "pql.export", "record_video": "pql.play", "Session": "pql.session",
    "Summary": "pql.rundir", "Config": "pql.config", "ConfigError": "pql.errors", "RunError": "pql.errors",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    import importlib

    if name == "wrap":
        return importlib.import_module("pql.wrap")
    if name not in _HOME:
        raise AttributeError(f"module 'pql' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def train(*overrides: str, env: Any = None, callbacks: Any = (), quiet: bool = False) -> "Summary":
    """Train with the command line's overrides: ``pql.train("task=halfcheetah", "budget.seconds=60")``.

    Ctrl-C ends the run after its tick and saves it, as on the command line.

    Args:
        env: a live ``VecEnv`` to train on instead of a task; ``num_envs`` and ``device`` are then its own. It is
            evaluated once, after training, and stays open.
        callbacks: called as ``callback(session, row)`` with every row of metrics; ``session.stop = True`` ends the run.
        quiet: nothing on the console.
    Returns:
        the run's ``Summary`` (``return_mean``, ``run_dir``, ``checkpoint``, ...).
    Raises:
        ConfigError: an override, or the environment, cannot work.
        RunError: the run failed after it started.
    """
    from pql.compose import compose
    from pql.errors import ConfigError
    from pql.session import Session
    from pql.world import world

    words = list(overrides)
    if env is not None:
        named = ("task", "task.name", "task.id", "task.game", "task.live")
        if clash := [w for w in words if w.partition("=")[0] in named]:
            raise ConfigError("task", clash[0].partition("=")[2], "no task beside env=, which is trained on instead")
        spec = env.spec
        words = [
            "task=env",
            f"task.name={spec.name}",
            "task.live=true",
            f"num_envs={spec.num_envs * world().size}",
            f"device={spec.device}",
            *words,
        ]
        words.append(f"placement.collector={spec.device}")
    return Session(compose(words), env=env, callbacks=callbacks, quiet=quiet, overrides=words).train()
