"""Allegro Hand of the PQL paper: four fingers of four motors each turn a cube in the palm.

The task of Isaac Gym's environments (Makoviychuk et al. 2021). The hand is that of the mani-skill package, with Isaac's
placement, joint ranges and motors; link lengths are the same, except for a thumb that is 2 mm longer. Differences from
Isaac's task, in addition to those in :mod:`.reorient`:

- Last links and fingertips have other masses (middle finger: .0388 and .0096 kg; Isaac: .0096 and .021).
- Links are the package's boxes and fingertips capsules. All of them touch the cube; among each other, only the
  fingertips touch, without friction (Isaac: convex hulls, longer fingertips, contacts between all). Contacts between
  boxes as light as these diverge in single precision.
- Joints have no friction (Isaac: a hundredth of the force on them) and no speed limit (Isaac: 6.3 rad/s).
- Eight physics steps of 4.2 ms per env step (Isaac: four of 8.3).
- The observed motor torques are 0 (Isaac observes them, but never fills them in).
"""

from typing import ClassVar

import mujoco
import torch
from torch import Tensor

from pql.envs.mujoco.engine import Fields
from pql.envs.mujoco.isaac.reorient import OBJECT, Reorient, furnish, look
from pql.envs.mujoco.robots import model_file
from pql.envs.mujoco.task import Memory, add_servo

FINGER = ((-0.5585, 0.5585), (-0.2792, 1.7278), (-0.2792, 1.7278), (-0.2792, 1.7278))
THUMB = ((0.2792, 1.5708), (-0.3316, 1.1519), (-0.2792, 1.7278), (-0.2792, 1.7627))
RANGES = (*FINGER, *FINGER, *FINGER, *THUMB)  # of joint_0.0 to joint_15.0: index, middle, ring, thumb; radians
STIFFNESS, DAMPING, EFFORT, ARMATURE = 3.0, 0.1, 0.5, 0.001  # of a joint's drive
HALF, DENSITY = 0.03, 400.0  # of the cube
# The package's base at Isaac's place. In Isaac, a mount at (0, 0, .5) is turned by Ry(pi) Rx(.47 pi) Rz(pi / 4), and
# the palm's frame on it, at (-.008219, -.02063, .08086), by Rz(pi / 4) Ry(-pi / 2). In that frame the base is at
# (.0366375, .0087771, -.0113), and its axes are the palm's z, -y and x.
BASE, TURN = (0.0, -0.117832, 0.498001), (0.475892, 0.522998, -0.522998, 0.475892)
TIP = (0.012, 0.004)  # radius and half length of a fingertip's capsule, metres


class AllegroHand(Reorient):
    """Observation (88): for each of 16 joints the position scaled to its range, 0.2 x velocity, and 0; the cube's
    position, orientation, velocity and 0.2 x angular velocity; the goal's position and orientation, and the rotation
    from goal to cube; the action. All clamped to +-5, in the world frame, quaternions (x, y, z, w). Action (16): target
    angle of each joint, scaled to its range; fingers from index to thumb, joints from palm to tip.
    """

    name, contacts = "allegro_hand", (18, 72)
    obs_size, action_size = 88, 16
    frame_skip, dt = 8, 0.03334
    place = (0.0, -0.2, 0.56)
    parts: ClassVar[tuple[str, ...]] = ("joints", "joint_speeds", "joint_forces", *OBJECT, "action")

    @classmethod
    def source(cls) -> mujoco.MjSpec:
        spec = mujoco.MjSpec.from_file(str(model_file("allegro_hand")))
        spec.compiler.balanceinertia = True  # the package's inertias are slightly unphysical
        spec.compiler.fusestatic = spec.compiler.discardvisual = False  # keep fingertips as bodies, and the visual goal
        base = spec.body("base_link")
        base.pos, base.quat = BASE, TURN
        for body in base.find_all("body"):
            body.gravcomp = 1
        for geom in spec.geoms:
            geom.friction, geom.condim = (1, 0.005, 0.001), 1  # the cube's own friction is larger and applies
            geom.contype, geom.conaffinity = 1, 0  # touches the cube
            if geom.type == mujoco.mjtGeom.mjGEOM_MESH:
                geom.type, geom.meshname = mujoco.mjtGeom.mjGEOM_CAPSULE, ""
                geom.size, geom.pos = [*TIP, 0], [0, 0, -TIP[1]]
                geom.contype, geom.conaffinity = 3, 2  # and other fingertips
        for mesh in list(spec.meshes):
            spec.delete(mesh)
        for joint, limits in zip(spec.joints, RANGES, strict=True):
            joint.range, joint.armature, joint.damping, joint.frictionloss = limits, ARMATURE, [0, 0, 0], 0
            add_servo(spec, joint.name, limits, EFFORT, STIFFNESS, DAMPING)
        furnish(spec, cls.place, HALF, DENSITY)
        look(spec, cls.place)
        return spec

    def measure(self, fields: Fields, memory: Memory) -> dict[str, Tensor]:
        measured = super().measure(fields, memory)
        return {**measured, "joint_forces": torch.zeros_like(measured["joints"])}
