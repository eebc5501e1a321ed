"""Ant of the PQL paper: a four-legged robot runs towards a distant point (based on :mod:`.run`).

Gymnasium's ant has the same bodies as Isaac's; joints, motors and friction are set to Isaac's. The differences from
Isaac Gym's task are those of :mod:`.run`.
"""

import mujoco
import torch
from torch import Tensor

from pql.envs.mujoco.engine import Fields
from pql.envs.mujoco.isaac.measure import Wrench
from pql.envs.mujoco.isaac.run import Runner
from pql.envs.mujoco.suite import ASSETS

FEET = ("front_left_foot", "front_right_foot", "left_back_foot", "right_back_foot")
JOINTS = tuple(f"{joint}_{leg}" for leg in (1, 2, 3, 4) for joint in ("hip", "ankle"))


class IsaacAnt(Runner):
    """Ant: 60 observations, 8 actions (torques of up to 15 Nm); runs towards a point far away on the x axis.
    Observations as in :class:`.run.Runner`: yaw and roll in [0, 2 pi), the net force and torque on each foot about its
    ankle. An episode ends where the torso is below 0.31 m."""

    name, contacts = "isaac_ant", (9, 36)
    obs_size, action_size = 60, 8
    links = FEET
    height, lowest, death, alive = 0.44, 0.31, -2.0, 0.5
    pace = 0.2

    @classmethod
    def source(cls) -> mujoco.MjSpec:
        return mujoco.MjSpec.from_file(str(ASSETS / "ant.xml"))

    @classmethod
    def edit(cls, spec: mujoco.MjSpec) -> None:
        spec.option.timestep = cls.dt / cls.frame_skip
        for geom in spec.geoms:
            geom.friction = (1.5, 0.1, 0.1)
        for leg, foot in enumerate(FEET, 1):
            hip, ankle = spec.joint(f"hip_{leg}"), spec.joint(f"ankle_{leg}")
            hip.range, ankle.range = (-40, 40), (30, 100) if leg in (1, 4) else (-100, -30)
            for joint in (hip, ankle):
                joint.armature, joint.damping = 0.01, [0.1, 0, 0]
            ankle.parent.name = foot
            Wrench.sense(spec, foot)
        for motor, joint_name in zip(spec.actuators, JOINTS, strict=True):  # in the joints' order
            motor.target, motor.gear = joint_name, [15, 0, 0, 0, 0, 0]

    def angles(self, yaw: Tensor, roll: Tensor, bearing: Tensor) -> Tensor:
        """Observed angles [N, 3] in radians, from [N] each."""
        around = yaw.remainder(2 * torch.pi)
        return torch.stack((around, roll.remainder(2 * torch.pi), bearing - around), 1)

    def forces(self, fields: Fields) -> list[Tensor]:
        return [0.1 * self.wrenches(fields)]

    def costs(self, fields: Fields) -> dict[str, Tensor]:
        action = fields["ctrl"]
        return {
            "action_cost": -0.005 * action.square().sum(1),
            "energy_cost": -0.05 * (action * self.pace * fields["qvel"][:, 6:]).abs().sum(1),
            "limit_cost": -0.1 * (fields["scaled"] > 0.99).sum(1),  # upper limits only
        }
