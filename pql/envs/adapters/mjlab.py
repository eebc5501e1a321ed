"""mjlab's tasks (1.6): ``task=mjlab task.kwargs.task=Mjlab-Velocity-Flat-Unitree-Go1``.

mjlab needs its own MuJoCo version, so it runs in a separate Python environment: ``task.process.python``. Its managers
are those of Isaac Lab (``isaaclab.py``); its observation group ``actor`` is called ``policy`` here.

Automatic resets are switched off (``auto_reset=False``), so a step returns the final observation, and the environments
that ended are reset after it. That reset recomputes all observations with new noise; only those of the environments
that were reset are used.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pql.envs.adapters.adapt import change
from pql.envs.adapters.isaaclab import Managed, copies, ends
from pql.errors import ConfigError, nearest
from pql.types import Step, chosen


def mjlab(
    num_envs: int = 1024,
    device: str | torch.device = "cuda:0",
    task: str = "Mjlab-Velocity-Flat-Unitree-Go1",
    action_bound: float | str = 1.0,
    settings: Mapping[str, Any] | None = None,
    random_lengths: bool = False,
) -> "MjlabVec":
    """Make a registered task of mjlab.

    Args:
        num_envs: N.
        device: device of the simulator and the tensors.
        task: its id.
        action_bound: the simulator's action for an action of 1, as its action space has no bounds; or ``limits``:
            the joints'.
        settings: attributes of its configuration, by dotted name: ``{"episode_length_s": 10.0}``.
        random_lengths: start the first episodes at random points of the time limit, so that they do not end together.
    Raises:
        ConfigError: no such task, or a setting that its configuration does not have.
    """
    import mjlab.tasks  # noqa: F401  registers the tasks
    from mjlab.envs import ManagerBasedRlEnv
    from mjlab.tasks.registry import list_tasks, load_env_cfg

    if task not in (known := list_tasks()):
        raise ConfigError("task", task, f"one of {', '.join(known)}{nearest(task, known)}")
    config = load_env_cfg(task)
    change(config, {"scene.num_envs": num_envs, "seed": 0, "auto_reset": False, **(settings or {})})
    return MjlabVec(ManagerBasedRlEnv(config, device=str(device)), task, action_bound, random_lengths)


class MjlabVec(Managed):
    """``ManagerBasedRlEnv`` without automatic resets as a ``pql.contract.env.VecEnv``."""

    def __init__(self, env: Any, name: str, action_bound: float | str = 1.0, random_lengths: bool = False):
        info = {"dt": float(env.step_dt)}
        super().__init__(env, name, action_bound, random_lengths, final_obs="always", info=info)

    def step(self, action: Tensor) -> Step:
        """Step all environments with ``action`` [N, A]."""
        obs, reward, terminated, time_outs, extras = self.env.step(self.actions(action))
        terminated, truncated = ends(terminated, time_outs, self.finite)
        reward, over, final = reward.float().clone(), terminated | truncated, copies(obs)
        seen = dict(final)
        ids = over.nonzero().flatten()  # synchronises with the device, as the simulator's own reset does
        if len(ids):
            new, extras = self.env.reset(env_ids=ids)
            seen = chosen(over, copies(new), final)
        yes = torch.ones_like(over)
        return Step(seen, reward, terminated, truncated, over, final, yes, yes.clone(), self.log.rows(extras, over))
