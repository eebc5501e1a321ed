"""ANYmal-C of the PQL paper: follows commanded velocities (based on :mod:`..velocity`).

The task of Isaac Gym's environments (Makoviychuk et al. 2021). Differences from Isaac's task:

- MuJoCo's contacts, with the Newton solver and elliptic cones.
- The URDF of the package genesis-world, with the same dimensions and masses but simpler collision shapes (one capsule
  for the base, one for each knee, none for hips and thighs).
- Joint speeds are not limited (Isaac: 20 rad/s).
- Four physics steps of 5 ms per env step (Isaac: two of 10 ms).
- An episode restarts in the step that ends it, with its final observation returned (Isaac: one step later, with a row
  that belongs to neither episode), and has 2499 steps.
"""

import math
from typing import ClassVar

import mujoco
import torch
from torch import Tensor

from pql.envs.mujoco.engine import Fields
from pql.envs.mujoco.robots import model_file
from pql.envs.mujoco.task import Memory
from pql.envs.mujoco.velocity import Joint, Lack, Motion, Servo, Velocity, bones

SERVO = Servo(stiffness=85.0, damping=2.0, effort=80.0, reach=0.5)
LEGS = ("LF", "LH", "RF", "RH")


def _leg(name: str) -> dict[str, Joint]:
    side, end = 1 if name[0] == "L" else -1, 1 if name[1] == "F" else -1
    poses = {"HAA": 0.03 * side, "HFE": 0.4 * end, "KFE": -0.8 * end}
    return {f"{name}_{joint}": Joint(pose, SERVO) for joint, pose in poses.items()}


class Anymal(Velocity):
    """ANYmal-C: 48 observations, 12 actions (targets of the joints, up to .5 rad from the pose).

    Observations are those of :class:`..velocity.Velocity`, except gravity: as in Isaac, its direction is rotated *with*
    the base instead of into its frame (x and y have the other sign). Reward: .02 exp(-4 |planar velocity error|^2)
    + .01 exp(-4 (yaw rate error)^2) - 5e-7 |torques|^2, at least 0. An episode ends where base or thighs touch the
    ground; hips, shanks and feet may touch it.
    """

    name, contacts = "anymal", (22, 66)
    obs_size, action_size = 48, 12
    time_limit = 2499
    terms = ("linear", "angular", "torque", "floor")
    outputs: ClassVar[tuple[str, ...]] = ("sensordata", "qfrc_actuator")
    joints: ClassVar[dict[str, Joint]] = {joint: made for leg in LEGS for joint, made in _leg(leg).items()}
    base = "base"
    fragile = ("base", *(f"{leg}_THIGH" for leg in LEGS))
    fastest = (2.0, 1.0, 1.0)
    gravity = ("gravity_with_base", "gravity_with_base", 3, 1.0)
    sides, odd = {"LF": "RF", "LH": "RH"}, ("HAA",)
    height = 0.62
    spread = 0.5

    @classmethod
    def source(cls) -> mujoco.MjSpec:
        spec = mujoco.MjSpec.from_file(str(model_file("anymal_c")))
        shapes = [geom for geom in spec.geoms if geom.type == mujoco.mjtGeom.mjGEOM_MESH]
        for part in (*shapes, *spec.meshes):  # visual only, and in a format that MuJoCo does not read
            spec.delete(part)
        spec.compiler.discardvisual = False  # the floor's colours
        spec.compiler.balanceinertia = True  # the file's inertias are not physical
        spec.body("hatch").fullinertia = [1e-3, 1e-3, 1e-3, 0, 0, 0]  # the file has .001 in all nine entries
        spec.body(cls.base).add_freejoint()
        for name in cls.joints:  # the file sets no limits
            side = 1 if name[0] == "L" else -1
            limits = sorted((-0.72 * side, 0.49 * side)) if name.endswith("HAA") else (-3 * math.pi, 3 * math.pi)
            spec.joint(name).limited, spec.joint(name).range = True, limits
        for geom in spec.geoms:
            geom.density = 0  # the file sets the masses
            geom.rgba = [0.55, 0.12, 0.1, 1]
            if geom.type == mujoco.mjtGeom.mjGEOM_CYLINDER:
                geom.type = mujoco.mjtGeom.mjGEOM_CAPSULE  # as in Isaac
        bones(spec, 0.03)
        return spec

    @staticmethod
    def upward(frame: Tensor) -> Tensor:
        """Observed upward vector [N, 3] of base frames [N, 3, 3]."""
        return frame[:, :, 2]  # rotated the wrong way, as in Isaac: the base's z axis in the world

    def terms_of(self, fields: Fields, memory: Memory, motion: Motion, lack: Lack) -> dict[str, Tensor]:
        ahead, around = lack
        linear = 0.02 * torch.exp(-ahead.square().sum(1) / 0.25)
        angular = 0.01 * torch.exp(-around.square() / 0.25)
        torque = -5e-7 * fields["qfrc_actuator"][:, self._v].square().sum(1)
        floor = -(linear + angular + torque).clamp(max=0)
        return {"linear": linear, "angular": angular, "torque": torque, "floor": floor}
