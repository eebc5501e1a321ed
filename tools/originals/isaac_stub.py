"""Stub of Isaac Gym without physics: IsaacGymEnvs' task classes run on tensors that the caller fills.

``load`` imports one module of a checkout of IsaacGymEnvs. This file replaces ``isaacgym`` and ``VecTask``:
``acquire_*`` returns the tensors of the :class:`Scene`, ``refresh_*`` does nothing, and tensors sent to the simulator
are recorded. Everything is in float64, so that equal formulas differ only by rounding.
"""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import yaml
from torch import Tensor

from tools.originals import torch_utils

DOUBLE = torch_utils.DOUBLE


@dataclass
class Scene:
    """The simulator's state and constants.

    Attributes:
        num_envs: N.
        tensors: by their name in ``acquire_*_tensor``.
        known: attributes that the task would read from its assets.
        begin: called with the task when its scene would have been created.
    """

    num_envs: int
    tensors: dict[str, Tensor]
    known: dict[str, Any]
    begin: Callable[[Any], None] = lambda task: None
    sent: dict[str, Tensor] = field(default_factory=dict)  # recorded tensors, by the name of the ``set_*`` function


class Gym:
    """The functions of Isaac Gym that tasks call after their scene was created."""

    def __init__(self, scene: Scene):
        self._scene = scene

    def __getattr__(self, name: str) -> Callable[..., Any]:
        scene = self._scene
        if name.startswith("acquire_"):
            return lambda *args: scene.tensors[name.removeprefix("acquire_").removesuffix("_tensor")]
        if name.startswith("set_"):
            return lambda sim, *args: scene.sent.update({name: args[0]})
        if name == "get_sim_dof_count":
            return lambda sim: scene.num_envs * scene.known["num_dofs"]
        if name == "find_actor_rigid_body_handle":
            return lambda env, actor, body: scene.known["bodies"].get(body, 0)
        if name == "get_actor_joint_dict":
            return lambda env, actor: {"panda_hand_joint": 0}
        if name.startswith(("refresh_", "apply_")):
            return lambda *args: True
        raise AttributeError(name)


class VecTask:
    """Base class of the tasks, without simulation and ``step``: only its buffers and the scene."""

    def __init__(self, config: dict[str, Any], **_: Any):
        scene, env = config["scene"], config["env"]
        n = self.num_envs = scene.num_envs
        self.device, self.viewer, self.sim, self.gym = "cpu", None, None, Gym(scene)
        self.sim_params, self.extras = SimpleNamespace(dt=config["sim"]["dt"]), dict[str, Any]()
        self.dt = config["sim"]["dt"]
        self.num_actions, self.up_axis_idx = env["numActions"], 2
        self.obs_buf = torch.zeros(n, env["numObservations"], dtype=DOUBLE)
        self.states_buf = torch.zeros(n, env.get("numStates", 0), dtype=DOUBLE)
        self.rew_buf = torch.zeros(n, dtype=DOUBLE)
        self.reset_buf, self.progress_buf = torch.zeros(n, dtype=torch.long), torch.zeros(n, dtype=torch.long)
        self.randomize_buf = torch.zeros(n, dtype=torch.long)
        self.__dict__.update(scene.known)
        scene.begin(self)

    def apply_randomizations(self, wanted: Any) -> None:
        """Return None: there are no simulator parameters here."""


def _module(name: str, path: Path | None = None, **content: Any) -> ModuleType:
    module = ModuleType(name)
    if path is not None:
        module.__path__ = [str(path)]
    module.__dict__.update(content)
    sys.modules[name] = module
    return module


def install(root: Path) -> None:
    """Put the stubs, and the packages of ``root`` without their ``__init__``, in ``sys.modules``."""
    functions: dict[str, Any] = {name: one for name, one in vars(torch_utils).items() if isinstance(one, FunctionType)}
    gymtorch = _module("isaacgym.gymtorch", wrap_tensor=lambda tensor: tensor, unwrap_tensor=lambda tensor: tensor)
    gymapi = _module("isaacgym.gymapi", LOCAL_SPACE=0)
    gymutil = _module("isaacgym.gymutil", AxesGeometry=lambda *args: None)
    utils = _module("isaacgym.torch_utils", np=importlib.import_module("numpy"), torch=torch, **functions)
    _module("isaacgym", root, gymtorch=gymtorch, gymapi=gymapi, gymutil=gymutil, torch_utils=utils)
    package = root / "isaacgymenvs"
    for name in ("", ".tasks", ".tasks.base", ".utils"):
        _module(f"isaacgymenvs{name}", package.joinpath(*name.split(".")))
    _module("isaacgymenvs.tasks.base.vec_task", VecTask=VecTask)


@cache
def load(root: Path, module: str, name: str) -> type[Any]:
    """Class ``name`` of ``isaacgymenvs/tasks/<module>.py`` below ``root``; ``sys.modules`` is left as it was."""
    scripted = mock.patch("torch.jit.script", lambda function: function)  # avoids compiling every helper
    with mock.patch.dict(sys.modules), scripted:
        install(root)
        return getattr(importlib.import_module(f"isaacgymenvs.tasks.{module}"), name)


def settings(root: Path, name: str) -> dict[str, Any]:
    """``isaacgymenvs/cfg/task/<name>.yaml``; interpolations stay unresolved, since no task reads them here."""
    return yaml.safe_load((root / "isaacgymenvs" / "cfg" / "task" / f"{name}.yaml").read_text())


def build(root: Path, module: str, name: str, config: dict[str, Any], scene: Scene) -> Any:
    """Return the task, constructed by its own code."""
    where = {"rl_device": "cpu", "sim_device": "cpu", "graphics_device_id": -1}
    shown = {"headless": True, "virtual_screen_capture": False, "force_render": False}
    return load(root, module, name)({**config, "scene": scene}, **where, **shown)
