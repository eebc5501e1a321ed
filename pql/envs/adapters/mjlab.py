"""mjlab's tasks (1.6): ``task=mjlab task.kwargs.task=Mjlab-Velocity-Flat-Unitree-Go1``.

mjlab needs its own MuJoCo version, so it runs in a separate Python environment: ``task.process.python``. Its managers
are those of Isaac Lab (``isaaclab.py``); its observation group ``actor`` is called ``policy`` here.

Automatic resets are switched off (``auto_reset=False``), so a step returns the final observation, and the environments
that ended are reset after it. That reset recomputes all observations with new noise; only those of the environments
that were reset are used.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pql.envs.adapters.adapt import Bound, change
from pql.envs.adapters.isaaclab import Managed, copies, ends
from pql.envs.adapters.managers import PLAIN, Course
from pql.envs.adapters.quiet import quiet
from pql.envs.adapters.robot import with_symmetry
from pql.errors import VERBOSE, ConfigError, nearest
from pql.types import Step, chosen


def mjlab(
    num_envs: int = 1024,
    device: str | torch.device = "cuda:0",
    task: str = "Mjlab-Velocity-Flat-Unitree-Go1",
    action_bound: Bound = 1.0,
    settings: Mapping[str, Any] | None = None,
    random_lengths: bool = True,
    curriculum_scale: float = 1.0,
    play: bool = False,
    render_mode: str | None = None,
    mirror: Mapping[str, Any] | None = None,
) -> "MjlabVec":
    """Make a registered task of mjlab.

    Args:
        num_envs: N.
        device: device of the simulator and the tensors.
        task: its id.
        action_bound: the simulator's action for an action of 1, if its space has no bounds: a number, or one for each
            dimension; ``limits``, ``limits_asym``: as far as the joints' limits, see ``adapt.joint_spans``.
        settings: attributes of its configuration, by dotted name: ``{"episode_length_s": 10.0}``.
        random_lengths: start the first episodes at random points of the time limit, so that they do not end together.
        curriculum_scale: factor on the steps at which stages of curricula begin; below 1: earlier; infinity: never.
        play: use the task's configuration for play, with the time limit of the one for training. Settings that it does
            not have are left out.
        render_mode: ``rgb_array`` makes ``render`` work.
        mirror: which joints are on which side, for ``algo.symmetry``: ``{"sides": {"FL": "FR"}, "odd": ["hip"]}``, see
            ``pql.contract.symmetry.of_robot``.
    Raises:
        ConfigError: no such task, or a setting that its configuration does not have.
    """
    if not os.environ.get(VERBOSE):
        os.environ.setdefault("MJLAB_WARP_QUIET", "1")  # one line for every kernel that is loaded
    with quiet():
        import mjlab.tasks  # noqa: F401  registers the tasks
        from mjlab.envs import ManagerBasedRlEnv
        from mjlab.tasks.registry import list_tasks, load_env_cfg

        if task not in (known := list_tasks()):
            raise ConfigError("task", task, f"one of {', '.join(known)}{nearest(task, known)}")
        config = load_env_cfg(task, play=play)
        config.episode_length_s = load_env_cfg(task).episode_length_s  # in play, episodes have no end
        change(config, {"scene.num_envs": num_envs, "seed": 0, "auto_reset": False})
        change(config, settings or {}, known_only=play)
        env = ManagerBasedRlEnv(config, device=str(device), render_mode=render_mode)
        made = MjlabVec(env, task, action_bound, Course(random_lengths, curriculum_scale, play))
        return with_symmetry(made, mirror)


class MjlabVec(Managed):
    """``ManagerBasedRlEnv`` without automatic resets as a ``pql.contract.env.VecEnv``."""

    runtime = "mjlab"

    def __init__(self, env: Any, name: str, action_bound: Bound = 1.0, course: Course = PLAIN):
        super().__init__(env, name, action_bound, course, final_obs="always")

    @staticmethod
    def scoped(env: Any) -> bool:
        return True

    def step(self, action: Tensor) -> Step:
        """Step all environments with ``action`` [N, A]."""
        obs, reward, terminated, time_outs, extras = self.env.step(self.actions(action))
        self.stages.count_step()
        logs = [dict(extras)]  # a reset replaces the log in it
        terminated, truncated = ends(terminated, time_outs, self.finite)
        reward, over, final = reward.float().clone(), terminated | truncated, copies(obs)
        seen = dict(final)
        ids = over.nonzero().flatten()  # synchronises with the device, as the simulator's own reset does
        if len(ids):
            new, extras = self.env.reset(env_ids=ids)
            logs.append(extras)
            seen = chosen(over, copies(new), final)
        self.seen = dict(seen)
        yes = torch.ones_like(over)
        return Step(seen, reward, terminated, truncated, over, final, yes, yes.clone(), self.log.rows(over, *logs))
