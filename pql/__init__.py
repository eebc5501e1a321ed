"""pql: Parallel Q-Learning in PyTorch.

    env = pql.make_env("halfcheetah", num_envs=64)
    run = pql.train("task=halfcheetah", "algo=pql", "budget.seconds=60")
    policy = pql.load_policy(run.run_dir)

Names load on first use, so that ``import pql`` stays light.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pql.conformance import check_env as check_env
    from pql.env import make_env as make_env
    from pql.env import register as register
    from pql.evaluate import load_policy as load_policy
    from pql.session import Session as Session
    from pql.session import Summary
    from pql.types import Step as Step

_HOME = {
    "check_env": "pql.conformance", "make_env": "pql.env", "register": "pql.env", "EnvSpec": "pql.env",
    "ObsSpec": "pql.env", "Box": "pql.env", "Step": "pql.types", "load_policy": "pql.evaluate",
    "Session": "pql.session", "ConfigError": "pql.errors", "RunError": "pql.errors",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'pql' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)


def train(*overrides: str, env: Any = None, callbacks: Any = (), quiet: bool = False) -> "Summary":
    """Train with the command line's overrides: ``pql.train("task=halfcheetah", "budget.seconds=60")``.

    Args:
        env: a live ``VecEnv`` to train on instead of the task's; ``num_envs`` is then its own.
        callbacks: called as ``callback(session, row)`` with every row of metrics.
        quiet: nothing on the console.
    Returns:
        the run's ``Summary`` (``return_mean``, ``run_dir``, ``checkpoint``, ...).
    Raises:
        ConfigError: an override, or the environment, cannot work.
    """
    from pql.config import compose
    from pql.session import Session

    live = [] if env is None else ["task=env", f"task.name={env.spec.name}", f"num_envs={env.spec.num_envs}"]
    return Session(compose([*live, *overrides]), env=env, callbacks=callbacks, quiet=quiet).train()
