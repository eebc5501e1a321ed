"""Tasks of mjlab (1.6) that are trained with pql: ``train Mjlab-Velocity-Flat-Unitree-Go1-Pql``.

mjlab imports this module by the entry point ``mjlab.tasks``. Every task that exists then has a second id, with the same
environments, the runner of the task (which writes its files) and the configuration below.
"""

from dataclasses import dataclass, fields
from typing import Any

import mjlab.tasks  # noqa: F401  its tasks, which are otherwise registered later
from mjlab.rl import MjlabOnPolicyRunner, RslRlBaseRunnerCfg
from mjlab.tasks.registry import list_tasks, load_env_cfg, load_rl_cfg, load_runner_cls, register_mjlab_task

from pql.lab.runner import learner_cfg

SUFFIX = "-Pql"


@dataclass
class PqlRunnerCfg(RslRlBaseRunnerCfg):
    """Options ``--agent.NAME`` in addition to those of all runners of mjlab."""

    algo: str = "pql2"
    """Algorithm: a name of ``pql train algo=``."""
    settings: tuple[str, ...] = ()
    """Settings of ``pql train``: ("algo.gamma=0.97", "algo.v_per_step=4")."""
    action_bound: str = "auto"
    """The simulator's action for an action of 1: a number, ``limits``, or ``auto``."""
    final_obs: str = "auto"
    """Source of the observations before a reset."""


def runner_for(base: type | None) -> type:
    """Return a task's runner with pql as its algorithm."""
    kind: Any = base or MjlabOnPolicyRunner

    class PqlRunner(kind):
        def __init__(
            self, env: Any, train_cfg: dict[str, Any], log_dir: str | None = None, device: str = "cpu", **more: Any
        ):
            super().__init__(env, learner_cfg(train_cfg), log_dir, device, **more)

    return PqlRunner


def add_tasks() -> None:
    """Register the second ids."""
    shared = [f.name for f in fields(RslRlBaseRunnerCfg)]
    known = list_tasks()
    for task in known:
        if not task.endswith(SUFFIX) and task + SUFFIX not in known:
            rl = load_rl_cfg(task)
            cfg = PqlRunnerCfg(**{name: getattr(rl, name) for name in shared})
            envs = load_env_cfg(task), load_env_cfg(task, play=True)
            register_mjlab_task(task + SUFFIX, *envs, cfg, runner_for(load_runner_cls(task)))


add_tasks()
