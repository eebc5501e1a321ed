"""Ant, as the PQL paper had it: a robot on four legs runs towards a point far away.

The task of Isaac Gym's environments (Makoviychuk et al. 2021). Differences from it: MuJoCo's contacts, with Newton's
solver and elliptic cones; an episode restarts in the step that ends it, with its final observation returned (there,
one step later, with a row that belongs to neither), and has 999 steps; the progress of a step is computed from the
difference of squared distances, exactly (there, as that of two float32 numbers near 60,000: in steps of .004).
"""

from typing import ClassVar

import mujoco
import torch
from torch import Tensor

from pql.envs.mujoco.engine import Fields
from pql.envs.mujoco.isaac.measure import Wrench, into, roll_yaw, rotation, unscale
from pql.envs.mujoco.suite import ASSETS
from pql.envs.mujoco.task import Draw, Memory, Robot, Start, Task, Verdict
from pql.types import Obs

FEET = ("front_left_foot", "front_right_foot", "left_back_foot", "right_back_foot")
JOINTS = tuple(f"{joint}_{leg}" for leg in (1, 2, 3, 4) for joint in ("hip", "ankle"))
TARGET = 1000.0  # metres along x, where the ant is to run


class IsaacAnt(Task):
    """Ant: 60 observations, 8 actions (torques of up to 15 Nm); runs towards a point far away on the x axis.

    Gymnasium's ant has the same bodies; joints, motors and friction are set to Isaac's. Observations: height, linear
    and angular velocity in the torso's frame, yaw and roll in [0, 2 pi), angle to the target (from z where y is
    expected, as there), uprightness, heading, joint positions scaled to their ranges, joint velocities, net force and
    torque on each foot about its ankle, actions.
    """

    name = "isaac_ant"
    contacts = (9, 36)
    frame_skip = 2
    dt = 0.0166
    obs_size = 60
    action_size = 8
    time_limit = 999
    terms = ("progress", "alive", "up", "heading", "action_cost", "energy_cost", "limit_cost", "fall")
    outputs = ("sensordata",)
    model = "fast"
    refused = "the task has a robot of its own"
    metrics: ClassVar[tuple[str, ...]] = ("distance",)

    def __init__(self, robot: Robot):
        super().__init__(robot)
        model = robot.model
        low, high = robot.tensor(model.jnt_range[1:]).unbind(1)
        self.low, self.high = low, high
        self.rest = torch.zeros_like(low).clamp(low, high)  # ankles: the limit nearest to 0
        self._target = robot.tensor([TARGET, 0.0])
        self._wrench = Wrench(robot, FEET)
        self._arm = robot.tensor(model.body_ipos[[robot.body(name) for name in FEET]])  # from ankle to centre of mass

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

    def start(self, count: int, draw: Draw) -> Start:
        qpos = self.robot.qpos0.repeat(count, 1)
        qpos[:, 2] = 0.44
        qpos[:, 7:] = (self.rest + draw.uniform(-0.2, 0.2, count, 8)).clamp(self.low, self.high)
        qvel = self.robot.qvel0.repeat(count, 1)
        qvel[:, 6:] = draw.uniform(-0.1, 0.1, count, 8)
        return Start(qpos, qvel)

    def track(self, fields: Fields) -> Memory:
        return {"place": fields["qpos"][:, :2].clone()}

    def scaled(self, fields: Fields) -> Tensor:
        """Joint positions, -1 to 1 in their ranges: [N, 8]."""
        return unscale(fields["qpos"][:, 7:], self.low, self.high)

    def _direction(self, fields: Fields) -> tuple[Tensor, Tensor]:
        """How upright the torso is, and how well it faces the target, each [N] in -1..1."""
        frame = rotation(fields["qpos"][:, 3:7])
        away = torch.stack((TARGET - fields["qpos"][:, 0], -fields["qpos"][:, 1]), 1)
        ahead = (frame[:, :2, 0] * torch.nn.functional.normalize(away, dim=1)).sum(1)
        return frame[:, 2, 2], ahead

    def wrenches(self, fields: Fields) -> Tensor:
        """Net force and torque on each foot about its ankle, in the foot's frame: [N, 24]."""
        force, torque = self._wrench.read(fields)
        return torch.cat((force, Wrench.about(force, torque, -self._arm)), 2).flatten(1)

    def observe(self, fields: Fields, memory: Memory) -> Obs:
        qpos, qvel = fields["qpos"], fields["qvel"]
        roll, yaw = roll_yaw(qpos[:, 3:7])
        up, ahead = self._direction(fields)
        angle = torch.atan2(-qpos[:, 2], TARGET - qpos[:, 0]) - yaw.remainder(2 * torch.pi)
        alone = torch.stack((yaw.remainder(2 * torch.pi), roll.remainder(2 * torch.pi), angle, up, ahead), 1)
        parts = [qpos[:, 2:3], into(rotation(qpos[:, 3:7]), qvel[:, :3]), qvel[:, 3:6], alone]
        parts += [self.scaled(fields), 0.2 * qvel[:, 6:], 0.1 * self.wrenches(fields), fields["ctrl"]]
        return {"policy": torch.cat(parts, 1)}

    def judge(self, fields: Fields, memory: Memory) -> Verdict:
        action, place, before = fields["ctrl"], fields["qpos"][:, :2], memory["place"]
        up, ahead = self._direction(fields)
        nearer = ((before - place) * (before + place - 2 * self._target)).sum(1)  # difference of the squared distances
        both = torch.linalg.vector_norm(self._target - before, dim=1) + torch.linalg.vector_norm(
            self._target - place, dim=1
        )
        fallen = fields["qpos"][:, 2] < 0.31
        terms = {
            "progress": nearer / both / self.dt,
            "alive": torch.full_like(up, 0.5),
            "up": 0.1 * (up > 0.93),
            "heading": torch.where(ahead > 0.8, 0.5, 0.5 * ahead / 0.8),
            "action_cost": -0.005 * action.square().sum(1),
            "energy_cost": -0.05 * (action * 0.2 * fields["qvel"][:, 6:]).abs().sum(1),
            "limit_cost": -0.1 * (self.scaled(fields) > 0.99).sum(1),
        }
        terms = {name: value.to(up) * ~fallen for name, value in terms.items()}
        terms["fall"] = -2.0 * fallen.to(up)
        return Verdict(terms, fallen, {"distance": place[:, 0] - before[:, 0]})
