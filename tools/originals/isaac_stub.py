"""Stub of Isaac Gym without physics: IsaacGymEnvs' task classes run on tensors that the caller fills.

``load`` imports one module of a checkout of IsaacGymEnvs. This file replaces ``isaacgym`` and ``VecTask``:
``acquire_*`` returns the tensors of the :class:`Scene`, ``refresh_*`` does nothing, and tensors sent to the simulator
are recorded. Everything is in float64, so that equal formulas differ only by rounding.
"""

import importlib
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import yaml
from torch import Tensor

DOUBLE = torch.float64


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


# -- isaacgym.torch_utils: reimplementation of the imported functions; quaternions are (x, y, z, w) ----------------


def to_torch(x: Any, dtype: torch.dtype = torch.float, device: str = "cpu", requires_grad: bool = False) -> Tensor:
    return torch.as_tensor(x, dtype=DOUBLE if dtype.is_floating_point else dtype)


def quat_mul(a: Tensor, b: Tensor) -> Tensor:
    v, w, u, s = a[..., :3], a[..., 3:], b[..., :3], b[..., 3:]
    return torch.cat((w * u + s * v + torch.linalg.cross(v, u), w * s - (v * u).sum(-1, keepdim=True)), -1)


def quat_conjugate(a: Tensor) -> Tensor:
    return torch.cat((-a[..., :3], a[..., 3:]), -1)


def quat_rotate(q: Tensor, v: Tensor) -> Tensor:
    across = 2.0 * torch.linalg.cross(q[..., :3], v)
    return v + q[..., 3:] * across + torch.linalg.cross(q[..., :3], across)


def quat_rotate_inverse(q: Tensor, v: Tensor) -> Tensor:
    return quat_rotate(quat_conjugate(q), v)


def quat_from_angle_axis(angle: Tensor, axis: Tensor) -> Tensor:
    half = angle.unsqueeze(-1) / 2
    return torch.cat((axis * half.sin(), half.cos()), -1)


def get_basis_vector(q: Tensor, v: Tensor) -> Tensor:
    return quat_rotate(q, v)


def normalize(x: Tensor) -> Tensor:
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def get_euler_xyz(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Roll, pitch and yaw in [0, 2 pi)."""
    x, y, z, w = q[:, 0], q[:, 1], q[:, 2], q[:, 3]
    roll = torch.atan2(2 * (w * x + y * z), w * w - x * x - y * y + z * z)
    pitch = torch.asin((2 * (w * y - z * x)).clamp(-1.0, 1.0))
    yaw = torch.atan2(2 * (w * z + x * y), w * w + x * x - y * y - z * z)
    whole = 2 * math.pi
    return torch.remainder(roll, whole), torch.remainder(pitch, whole), torch.remainder(yaw, whole)


def normalize_angle(x: Tensor) -> Tensor:
    return torch.atan2(torch.sin(x), torch.cos(x))


def scale(x: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    return lower + (x + 1.0) / 2 * (upper - lower)


def unscale(x: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    return (2.0 * x - upper - lower) / (upper - lower)


def tensor_clamp(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return torch.maximum(torch.minimum(x, high), low)


def torch_rand_float(lower: float, upper: float, shape: tuple[int, int], device: str) -> Tensor:
    return lower + (upper - lower) * torch.rand(shape[0], shape[1], dtype=DOUBLE)


def torch_random_dir_2(shape: tuple[int, int], device: str) -> Tensor:
    angle = torch_rand_float(-math.pi, math.pi, shape, device).squeeze(-1)
    return torch.stack((angle.cos(), angle.sin()), -1)


def get_axis_params(value: float, axis_idx: int, x_value: float = 0.0, n_dims: int = 3) -> list[float]:
    return [value if axis == axis_idx else x_value for axis in range(n_dims)]


UTILS = (
    to_torch,
    quat_mul,
    quat_conjugate,
    quat_rotate,
    quat_rotate_inverse,
    quat_from_angle_axis,
    get_basis_vector,
    normalize,
    get_euler_xyz,
    normalize_angle,
    scale,
    unscale,
    tensor_clamp,
    torch_rand_float,
    torch_random_dir_2,
    get_axis_params,
)

# -- importing --------------------------------------------------------------------------------------------------------


def _module(name: str, path: Path | None = None, **content: Any) -> ModuleType:
    module = ModuleType(name)
    if path is not None:
        module.__path__ = [str(path)]
    module.__dict__.update(content)
    sys.modules[name] = module
    return module


def install(root: Path) -> None:
    """Put the stubs, and the packages of ``root`` without their ``__init__``, in ``sys.modules``."""
    functions: dict[str, Any] = {function.__name__: function for function in UTILS}
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
