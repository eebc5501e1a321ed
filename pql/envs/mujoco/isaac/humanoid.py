"""Humanoid of the PQL paper: a two-legged robot runs towards a distant point (based on :mod:`.run`).

Isaac's and Gymnasium's humanoids descend from one model: torso, waist, thighs, shins and arms are the same capsules at
the same places. Joints, motors and feet differ and are set to Isaac's. Differences from Isaac Gym's task, in addition
to those of :mod:`.run`:

- Head and hands are part of torso and forearms (Isaac: separate bodies, welded to them).
- The joints' springs and dampers act (unknown for Isaac's torque mode).
- An observed joint force is the motor's torque (Isaac's may include the solver's share).
- Links have no angular damping (Isaac: .01).
- Four physics steps of 4.15 ms per env step (Isaac: two).
"""

from typing import ClassVar, NamedTuple

import mujoco
import torch
from torch import Tensor

from pql.envs.mujoco.engine import Fields
from pql.envs.mujoco.isaac.measure import Wrench
from pql.envs.mujoco.isaac.run import Runner
from pql.envs.mujoco.suite import ASSETS
from pql.envs.mujoco.task import Robot


class Joint(NamedTuple):
    """A hinge and its motor."""

    range: tuple[float, float]  # degrees
    gear: float  # Nm that an action of 1 exerts
    stiffness: float  # of a spring to position 0, Nm/rad
    damping: float  # Nm s/rad
    armature: float  # kg m^2


LEG = {
    "hip_x": Joint((-45, 15), 45, 10, 5, 0.01),
    "hip_z": Joint((-60, 35), 45, 10, 5, 0.01),
    "hip_y": Joint((-120, 45), 135, 20, 5, 0.01),
    "knee": Joint((-160, 2), 90, 5, 0.1, 0.007),
    "ankle_y": Joint((-50, 50), 22.5, 2, 1, 0.006),
    "ankle_x": Joint((-50, 50), 22.5, 2, 1, 0.006),
}
ARM = {
    "shoulder1": Joint((-90, 70), 67.5, 10, 5, 0.01),
    "shoulder2": Joint((-90, 70), 67.5, 10, 5, 0.01),
    "elbow": Joint((-90, 50), 45, 2, 1, 0.006),
}
JOINTS = {
    "abdomen_z": Joint((-45, 45), 67.5, 20, 5, 0.02),
    "abdomen_y": Joint((-75, 30), 67.5, 20, 5, 0.01),
    "abdomen_x": Joint((-35, 35), 67.5, 10, 5, 0.01),
    **{f"{side}_{name}": joint for limb in (LEG, ARM) for side in ("right", "left") for name, joint in limb.items()},
}
"""In the order of the model, observations and actions."""

FEET = ("right_foot", "left_foot")


def _foot(spec: mujoco.MjSpec, side: str) -> None:
    """Replace the ball at the end of the shin by two capsules under two hinges."""
    foot, inward = spec.body(f"{side}_foot"), 1 if side == "right" else -1
    spec.delete(foot.geoms[0])
    foot.pos = (0, 0, -0.39)
    for axis, name in (((0, 1, 0), "ankle_y"), ((1, 0, 0.5), "ankle_x")):
        foot.add_joint(name=f"{side}_{name}", pos=(0, 0, 0.08), axis=axis)
    for heel, toe in ((-0.02, -0.04), (0.0, 0.02)):
        ends = (-0.07, heel * inward, 0, 0.14, toe * inward, 0)
        foot.add_geom(type=mujoco.mjtGeom.mjGEOM_CAPSULE, size=(0.027, 0, 0), fromto=ends)


class IsaacHumanoid(Runner):
    """Humanoid: 108 observations, 21 actions (torques of up to 22.5 to 135 Nm); runs towards a point far away on the x
    axis. Observations as in :class:`.run.Runner`: angles in [-pi, pi], the motors' torques, the net force and torque on
    each foot about its body's origin. An episode ends where the torso is below 0.8 m."""

    name, contacts = "isaac_humanoid", (18, 36)
    frame_skip = 4
    obs_size, action_size = 108, 21
    outputs: ClassVar[tuple[str, ...]] = ("sensordata", "qfrc_actuator")
    links = FEET
    height, lowest, death, alive = 1.34, 0.8, -1.0, 2.0
    spin, pace = 0.25, 0.1

    def __init__(self, robot: Robot):
        super().__init__(robot)
        gear = robot.tensor(robot.model.actuator_gear[:, 0])
        self.strength = gear / gear.max()  # [21]; weights of the joints' costs

    @classmethod
    def source(cls) -> mujoco.MjSpec:
        return mujoco.MjSpec.from_file(str(ASSETS / "humanoid.xml"))

    @classmethod
    def edit(cls, spec: mujoco.MjSpec) -> None:
        spec.option.timestep = cls.dt / cls.frame_skip
        for side in ("right", "left"):
            _foot(spec, side)
        for name in ("left_shoulder1", "left_shoulder2"):  # Isaac's axes have the opposite sign
            spec.joint(name).axis = -spec.joint(name).axis
        for tendon in list(spec.tendons):  # unused
            spec.delete(tendon)
        for motor in list(spec.actuators):
            spec.delete(motor)
        for name, wanted in JOINTS.items():
            joint = spec.joint(name)
            joint.range, joint.armature = wanted.range, wanted.armature
            joint.stiffness, joint.damping = [wanted.stiffness, 0, 0], [wanted.damping, 0, 0]
            motor = spec.add_actuator(name=name, target=name, trntype=mujoco.mjtTrn.mjTRN_JOINT)
            motor.gear, motor.ctrllimited, motor.ctrlrange = [wanted.gear, 0, 0, 0, 0, 0], True, [-1, 1]
        for foot in FEET:
            Wrench.sense(spec, foot)

    def angles(self, yaw: Tensor, roll: Tensor, bearing: Tensor) -> Tensor:
        angle = bearing - yaw
        return torch.stack((yaw, roll, torch.atan2(angle.sin(), angle.cos())), 1)

    def forces(self, fields: Fields) -> list[Tensor]:
        return [0.01 * fields["qfrc_actuator"][:, 6:], 0.01 * self.wrenches(fields)]

    def costs(self, fields: Fields) -> dict[str, Tensor]:
        action, beyond = fields["ctrl"], fields["scaled"].abs() - 0.98
        power = (action * self.pace * fields["qvel"][:, 6:]).abs()
        return {
            "action_cost": -0.01 * action.square().sum(1),
            "energy_cost": -0.05 * (power * self.strength).sum(1),
            "limit_cost": -0.25 * (beyond.clamp(min=0) / 0.02 * self.strength).sum(1),
        }
