"""Robots of the Parallel Q-Learning paper, as IsaacGymEnvs defines their tasks, on MuJoCo's physics.

Sizes, order, scales and frames of observations and actions, rewards and resets are those of IsaacGymEnvs at commit
ca7a4fb (BSD-3). What differs here, beside the simulator: an episode restarts in the step that ends it, with its final
observation returned (there, one step later, with a row that belongs to neither), and lasts one step less for it.
"""

from typing import ClassVar

import mujoco
import torch
from torch import Tensor

from pql.envs.mujoco.engine import Fields
from pql.envs.mujoco.rigid import into, matrix, net_wrench, roll_yaw
from pql.envs.mujoco.suite import ASSETS
from pql.envs.mujoco.task import Draw, Memory, Robot, Start, Task, Verdict
from pql.types import Obs

GRAVITY = 9.81
FEET = ("front_left_foot", "front_right_foot", "left_back_foot", "right_back_foot")
JOINTS = tuple(f"{joint}_{leg}" for leg in (1, 2, 3, 4) for joint in ("hip", "ankle"))
TARGET = 1000.0  # metres along x, where the ant is to run


class IsaacAnt(Task):
    """Ant: 60 observations, 8 actions (torques of up to 15 Nm); runs towards a point far away on the x axis.

    Gymnasium's ant has the same bodies; joints, motors and friction are set to those of ``nv_ant.xml``. Observations:
    height, linear and angular velocity in the torso's frame, yaw and roll in [0, 2 pi), angle to the target (from z
    where y is expected, as there), uprightness, heading, joint positions scaled to their ranges, joint velocities, net
    force and torque on each foot about its ankle, actions. The progress of a step is computed from the difference of
    squares, exactly, where there it is that of two float32 numbers near 60,000 (steps of .004).
    """

    name = "isaac_ant"
    contacts = (9, 36)
    frame_skip = 2
    dt = 0.0166
    obs_size = 60
    action_size = 8
    time_limit = 999
    terms = ("progress", "alive", "up", "heading", "action_cost", "energy_cost", "limit_cost", "fall")
    outputs = ("xpos", "xipos", "ximat", "xmat", "sensordata")
    model = "fast"
    refused = "the task has a robot of its own"
    metrics: ClassVar[tuple[str, ...]] = ("distance",)

    def __init__(self, robot: Robot):
        super().__init__(robot)
        model = robot.model
        low, high = robot.tensor(model.jnt_range[1:]).unbind(1)
        self.low, self.high = low, high
        self.rest = torch.zeros_like(low).clamp(low, high)  # ankles: the limit nearest to 0
        self.feet = torch.tensor([robot.body(name) for name in FEET], device=robot.device)
        self.mass = robot.tensor(model.body_mass)[self.feet]
        self.inertia = robot.tensor(model.body_inertia)[self.feet]
        self.gravity = robot.tensor([0.0, 0.0, GRAVITY])

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
            for kind in ("FRAMELINACC", "FRAMEANGACC", "FRAMEANGVEL"):
                sensor, body = getattr(mujoco.mjtSensor, f"mjSENS_{kind}"), mujoco.mjtObj.mjOBJ_BODY
                spec.add_sensor(name=f"{foot}_{kind}", type=sensor, objtype=body, objname=foot)
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
        return (2 * fields["qpos"][:, 7:] - self.low - self.high) / (self.high - self.low)

    def _direction(self, fields: Fields) -> tuple[Tensor, Tensor]:
        """How upright the torso is, and how well it faces the target, each [N] in -1..1."""
        frame = matrix(fields["qpos"][:, 3:7])
        away = torch.stack((TARGET - fields["qpos"][:, 0], -fields["qpos"][:, 1]), 1)
        ahead = (frame[:, :2, 0] * torch.nn.functional.normalize(away, dim=1)).sum(1)
        return frame[:, 2, 2], ahead

    def _wrenches(self, fields: Fields) -> Tensor:
        """Net force and torque on each foot about its ankle, in the foot's frame: [N, 24]."""
        sensed = fields["sensordata"].unflatten(1, (4, 3, 3))  # foot, sensor, axis
        frame = fields["ximat"][:, self.feet].reshape(-1, 4, 3, 3)
        axes = fields["xmat"][:, self.feet].reshape(-1, 4, 3, 3)
        arm = fields["xipos"][:, self.feet] - fields["xpos"][:, self.feet]
        acceleration = sensed[:, :, 0] - self.gravity  # the sensor reads +9.81 at rest
        wrench = net_wrench(self.mass, self.inertia, frame, acceleration, sensed[:, :, 2], sensed[:, :, 1], arm)
        return torch.cat([into(axes, part) for part in wrench], 2).flatten(1)

    def observe(self, fields: Fields, memory: Memory) -> Obs:
        qpos, qvel = fields["qpos"], fields["qvel"]
        roll, yaw = roll_yaw(qpos[:, 3:7])
        up, ahead = self._direction(fields)
        angle = torch.atan2(-qpos[:, 2], TARGET - qpos[:, 0]) - yaw.remainder(2 * torch.pi)
        alone = torch.stack((yaw.remainder(2 * torch.pi), roll.remainder(2 * torch.pi), angle, up, ahead), 1)
        parts = [qpos[:, 2:3], into(matrix(qpos[:, 3:7]), qvel[:, :3]), qvel[:, 3:6], alone]
        parts += [self.scaled(fields), 0.2 * qvel[:, 6:], 0.1 * self._wrenches(fields), fields["ctrl"]]
        return {"policy": torch.cat(parts, 1)}

    def judge(self, fields: Fields, memory: Memory) -> Verdict:
        action, place, before = fields["ctrl"], fields["qpos"][:, :2], memory["place"]
        up, ahead = self._direction(fields)
        target = self.robot.tensor([TARGET, 0.0])
        nearer = ((before - place) * (before + place - 2 * target)).sum(1)  # difference of the squared distances
        both = torch.linalg.vector_norm(target - before, dim=1) + torch.linalg.vector_norm(target - place, dim=1)
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
