"""States of MuJoCo tasks, reflected at the plane between left and right."""

from typing import TYPE_CHECKING, Any

import torch

from pql.contract.symmetry import COMMAND, reflect

if TYPE_CHECKING:
    from pql.envs.mujoco.env import MujocoVec


def reflected(env: "MujocoVec", state: dict[str, Any]) -> dict[str, Any] | None:
    """Return ``state``, a ``state_dict`` of ``env``, reflected. See ``Reflectable``."""
    declared, coordinates, model = env.spec.info.get("symmetry"), env.task.coordinates(), env.model
    if declared is None or coordinates is None:
        return None
    sizes = [1, model.nq, model.nv, model.nv]  # time, positions, velocities, the solver's first guess
    sizes.append(state["physics"].shape[1] - sum(sizes))
    time, *parts, rest = state["physics"].split(sizes, 1)
    parts = [reflect(one, part) for one, part in zip((*coordinates, coordinates[1]), parts, strict=True)]
    maps = {**declared, "command": COMMAND}
    memory = {k: reflect(maps[k], v) if k in maps else v for k, v in state["memory"].items()}
    obs = {k: reflect(maps[k], v) if k in maps else v for k, v in state["obs"].items()}
    return {**state, "physics": torch.cat((time, *parts, rest), 1), "memory": memory, "obs": obs}
