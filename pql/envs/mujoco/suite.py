"""Base of the tasks of Gymnasium's MuJoCo suite: model paths, initial states, measurements."""

import importlib.util
import math
from pathlib import Path
from typing import ClassVar

import mujoco
from torch import Tensor

from pql.envs.mujoco.engine import Fields
from pql.envs.mujoco.task import Draw, Start, Task


def assets() -> Path:
    """Return the folder of Gymnasium's models. Raises ``ModuleNotFoundError`` if it is not installed."""
    # find_spec does not run the package: importing gymnasium takes longer than building the environment
    found = importlib.util.find_spec("gymnasium")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("No module named 'gymnasium'", name="gymnasium")
    return Path(found.origin).parent / "envs" / "mujoco" / "assets"


ASSETS = assets()  # at import: without gymnasium this module cannot be imported


class GymTask(Task):
    """A ``-v5`` environment of Gymnasium, with its default arguments, on its model.

    Attributes:
        xml: model file of the installed gymnasium package.
        noise: scale of the start state's perturbation. Coordinates are uniform in +-noise around the model's
            default; velocities likewise, or normal with this standard deviation where ``normal_velocity``.
    """

    xml: ClassVar[str]
    noise: ClassVar[float]
    normal_velocity: ClassVar[bool] = False

    @classmethod
    def source(cls) -> mujoco.MjSpec:
        return mujoco.MjSpec.from_file(str(ASSETS / cls.xml))

    @classmethod
    def edit(cls, spec: mujoco.MjSpec) -> None:
        """Make ``cfrc_ext`` computable: contact forces are computed only for models with a sensor that needs them."""
        if "cfrc_ext" in cls.outputs:
            spec.body("torso").add_site(name="torso_imu")
            site = {"objtype": mujoco.mjtObj.mjOBJ_SITE, "objname": "torso_imu"}
            spec.add_sensor(name="torso_accel", type=mujoco.mjtSensor.mjSENS_ACCELEROMETER, **site)

    def start(self, count: int, draw: Draw) -> Start:
        robot, noise = self.robot, self.noise
        qpos = robot.qpos0 + draw.uniform(-noise, noise, count, len(robot.qpos0))
        shape = (count, len(robot.qvel0))
        qvel = draw.normal(noise, *shape) if self.normal_velocity else draw.uniform(-noise, noise, *shape)
        return Start(qpos, qvel)


def finite(fields: Fields) -> Tensor:
    """Return [N] bool: all coordinates and velocities are finite. (A sum is finite only if all of its terms are.)"""
    return (fields["qpos"].sum(1) + fields["qvel"].sum(1)).abs() < math.inf


def ctrl_cost(fields: Fields, weight: float) -> Tensor:
    """-weight * |ctrl|^2: [N]."""
    return fields["ctrl"].square().sum(1).mul_(-weight)
