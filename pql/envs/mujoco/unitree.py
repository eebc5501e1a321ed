"""Unitree's Go1 and G1: follow commanded velocities on flat ground (based on :mod:`.velocity`).

Robots and servos are those of mjlab's velocity tasks (Zakka et al., mujocolab/mjlab 1.6.0), with servo gains computed
from the motors' inertias; observations and their scales are legged_gym's (Rudin et al. 2021). Reward terms and their
weights are those of MuJoCo Playground's joystick tasks (Zakka et al. 2025), and an episode ends by tilt, as in mjlab's
tasks. ``docs/tasks/differences.md`` lists what differs from both. ``Legacy`` is the earlier reward, a subset of
mjlab's, of which a robot that stands still earns two thirds of the maximum. Actions are clamped at ``action_scale``
times mjlab's unit (mjlab does not clamp).
"""

import math
from typing import ClassVar

import mujoco
import torch
from torch import Tensor

from pql.envs.mujoco.engine import Fields
from pql.envs.mujoco.robots import model_file
from pql.envs.mujoco.task import Memory, Robot
from pql.envs.mujoco.velocity import Joint, Lack, Motion, Servo, Velocity, bones

SOFT = 0.9  # share of a joint's range without a penalty


def servo(armature: float, effort: float) -> Servo:
    """Return the gains that give ``armature`` (kg m^2) by itself 10 Hz and a damping ratio of 2."""
    pace = 2 * math.pi * 10.0
    stiffness = armature * pace**2
    return Servo(stiffness, 2 * 2.0 * armature * pace, effort, reach=0.25 * effort / stiffness, armature=armature)


WEIGHTS = {  # per second; Playground's Go1JoystickFlatTerrain, except pose: G1JoystickFlatTerrain
    "linear": 1.0,
    "angular": 0.5,
    "vertical": -0.5,
    "tilt_rate": -0.05,
    "tilt": -5.0,
    "torque": -2e-4,
    "energy": -1e-3,
    "limits": -1.0,
    "action_rate": -0.01,
    "stand_still": -1.0,
    "pose": -0.1,
}
SIGMA = 0.25  # (m/s)^2 and (rad/s)^2: width of both tracking terms
UNIT = 0.5  # rad: Playground's action scale, in which changes of actions are counted
AT_REST = 0.01  # norm of a command below which the robot is to stand still
FALLEN = math.cos(math.radians(70.0))  # mjlab's limit of the base's tilt


class Unitree(Velocity):
    """Reward per second: exp(-|planar velocity error|^2 / .25) + .5 exp(-(yaw rate error)^2 / .25)
    - .5 (vertical velocity)^2 - .05 |roll and pitch rates|^2 - 5 |horizontal part of gravity in the base|^2
    - .0002 (|torques|_1 + |torques|_2) - .001 (sum of |torque x joint velocity|)
    - (radians beyond 90 % of the joints' ranges) - .01 |change of the targets / .5 rad|^2 - .1 |joints - pose|^2, and
    - |joints - pose|_1 where the command is to stand; at least 0. An episode ends where the base tilts by more than 70
    degrees.

    Attributes:
        robot_name: key of ``robots.ROBOTS``.
        feet: geoms with friction; all others are frictionless.
        feet_condim: MuJoCo's ``condim`` of their contacts: 3 (sliding friction) or 6 (torsional and rolling, too).
    """

    time_limit = 1000
    terms: ClassVar[tuple[str, ...]] = (*WEIGHTS, "floor")
    outputs: ClassVar[tuple[str, ...]] = ("qfrc_actuator",)
    lasting = 5.0
    resting = 0.1
    action_scale = 2.0  # twice mjlab's unit, because mjlab's actions are not bounded by 1
    robot_name: ClassVar[str]
    feet: ClassVar[tuple[str, ...]]
    feet_condim: ClassVar[int] = 3

    def __init__(self, robot: Robot):
        super().__init__(robot)
        low, high = robot.tensor(robot.model.jnt_range[[robot.model.joint(name).id for name in self.joints]]).unbind(1)
        middle, half = (low + high) / 2, SOFT * (high - low) / 2
        self._low, self._high = middle - half, middle + half
        self._weights = self.dt * robot.tensor([[weight] for weight in WEIGHTS.values()])

    @classmethod
    def source(cls) -> mujoco.MjSpec:
        spec = mujoco.MjSpec.from_file(str(model_file(cls.robot_name)))
        # visual meshes, which are slow to compile, and unused sensors
        shapes = [geom for geom in spec.geoms if geom.type == mujoco.mjtGeom.mjGEOM_MESH]
        for part in (*shapes, *spec.meshes, *spec.sensors):
            spec.delete(part)
        for geom in spec.geoms:
            geom.group, geom.rgba = 0, [0.35, 0.4, 0.45, 1]
            geom.condim, geom.solref = 1, [0.01, 1]
        for name in cls.feet:
            foot = spec.geom(name)
            foot.condim, foot.priority, foot.friction = cls.feet_condim, 1, [1, 0.005, 0.0005]
            foot.rgba = [0.1, 0.1, 0.1, 1]
        return spec

    def down(self, fields: Fields, motion: Motion) -> Tensor:
        return motion.gravity[:, 2] > -FALLEN

    def terms_of(self, fields: Fields, memory: Memory, motion: Motion, lack: Lack) -> dict[str, Tensor]:
        linear, angular, gravity = motion
        ahead, around = lack
        joints, size = fields["qpos"][:, self._q], len(self.joints)
        bent, beyond = joints - self.robot.ctrl_middle, joints - joints.clamp(self._low, self._high)
        change = (self.action(fields) - memory["action"]) * (self.robot.ctrl_half / UNIT)
        torque, pace = fields["qfrc_actuator"][:, self._v], fields["qvel"][:, self._v]
        rests = memory["command"].square().sum(1, keepdim=True) < AT_REST**2
        # squares and magnitudes of all terms at once: at small N the number of calls dominates
        squares = torch.cat((ahead, around[:, None], linear[:, 2:], angular[:, :2], gravity[:, :2], change, bent), 1)
        parts = [part.sum(1) for part in squares.square().split((2, 1, 1, 2, 2, size, size), 1)]
        planar, yaw, vertical, tilt_rate, tilt, rough, pose = parts
        sizes = torch.cat((torque, torque * pace, beyond, bent * rests), 1).abs().split(size, 1)
        effort, energy, limits, moved = (part.sum(1) for part in sizes)
        effort = effort + torch.linalg.vector_norm(torque, dim=1)
        near = (torch.stack((planar, yaw)) / -SIGMA).exp_().unbind(0)
        paid = torch.stack((*near, vertical, tilt_rate, tilt, effort, energy, limits, rough, moved, pose))
        paid = paid * self._weights
        floor = -paid.sum(0).clamp(max=0)
        return dict(zip(self.terms, (*paid.unbind(0), floor), strict=True))


class Legacy(Unitree):
    """Reward per second: 2 exp(-4 (|planar velocity error|^2 + vertical velocity^2))
    + 2 exp(-2 ((yaw rate error)^2 + |roll and pitch rates|^2)) + exp(-5 |horizontal part of gravity in the base|^2)
    + exp(-mean(((joint - pose) / ``slack``)^2)) - (radians beyond 90 % of the joints' ranges)
    - .1 |change of action|^2. An episode ends where a body of ``fragile`` touches the ground.

    Attributes:
        slack: scale of each joint's distance from its pose in the pose reward, rad.
    """

    terms = ("linear", "angular", "upright", "posture", "limits", "action_rate")
    outputs = ("sensordata",)
    fastest = (1.0, 1.0, 1.0)
    slack: ClassVar[tuple[float, ...]]

    def __init__(self, robot: Robot):
        super().__init__(robot)
        self._slack = robot.tensor(self.slack)
        self._narrow = robot.tensor([-4.0] * 3 + [-2.0] * 3 + [-5.0] * 2)
        self._worth = self.dt * robot.tensor([[2.0], [2.0], [1.0], [1.0]])

    def down(self, fields: Fields, motion: Motion) -> Tensor:
        return self.touched(fields)

    def terms_of(self, fields: Fields, memory: Memory, motion: Motion, lack: Lack) -> dict[str, Tensor]:
        linear, angular, gravity = motion
        ahead, around = lack
        joints = fields["qpos"][:, self._q]
        # planar and vertical error, yaw and tilt rate error, upright: the arguments of all exponentials at once (at
        # small N the number of calls dominates)
        errors = torch.cat((ahead, linear[:, 2:], around[:, None], angular[:, :2], gravity[:, :2]), 1)
        bent = (joints - self.robot.ctrl_middle) / self._slack
        narrow = torch.cat((errors.square() * self._narrow, bent.square() / -bent.shape[1]), 1)
        near = torch.stack([part.sum(1) for part in narrow.split((3, 3, 2, bent.shape[1]), 1)]).exp_()
        beyond = (joints - joints.clamp(self._low, self._high)).abs()
        change = self.action(fields) - memory["action"]
        rates = (near * self._worth).unbind(0)
        rough = (self._reach * change).square().sum(1)  # in mjlab's units
        costs = (-self.dt * beyond.sum(1), -0.1 * self.dt * rough)
        return dict(zip(self.terms, (*rates, *costs), strict=True))


HIP, CALF = servo(0.004026312, 23.7), servo(0.009059202, 35.55)  # a rotor of 1.11842e-4 kg m^2 behind 6:1 and 9:1


class Go1(Unitree):
    """Go1: 48 observations, 12 actions (targets of joints, up to ``action_scale`` times .37 rad from the pose; calves
    .25)."""

    name, robot_name, contacts = "go1_velocity", "go1", (13, 39)
    obs_size, action_size = 48, 12
    joints: ClassVar[dict[str, Joint]] = {
        f"{leg}_{name}_joint": Joint(pose, drive)
        for leg in ("FR", "FL", "RR", "RL")
        for name, pose, drive in (
            ("hip", 0.1 if leg[1] == "R" else -0.1, HIP),
            ("thigh", 0.9, HIP),
            ("calf", -1.8, CALF),
        )
    }
    base = "trunk"
    fastest = (1.5, 0.8, 1.2)  # Playground's Go1JoystickFlatTerrain
    feet = tuple(f"{leg}_foot_collision" for leg in ("FR", "FL", "RR", "RL"))
    feet_condim = 6
    sides, odd = {"FL": "FR", "RL": "RR"}, ("hip",)
    height = 0.35
    spread = 0.2


class Go1Legacy(Legacy, Go1):
    """:class:`Go1` with the reward of :class:`Legacy`; an episode ends where trunk or thighs touch the ground."""

    contacts = (9, 34)
    fragile = ("trunk", *(f"{leg}_thigh" for leg in ("FR", "FL", "RR", "RL")))
    slack = (0.3, 0.3, 0.6) * 4


SMALL, WRIST = servo(0.0036097, 25.0), servo(0.00425, 5.0)  # Unitree's motors 5020 and 4010
MIDDLE, LARGE = servo(0.0101775, 88.0), servo(0.0251019, 139.0)  # 7520, behind 14.3:1 and 22.5:1
PAIR = servo(2 * 0.0036097, 2 * 25.0)  # two of 5020 on a linkage
LEG = {  # pose, servo, slack
    "hip_pitch": (-0.312, MIDDLE, 0.3),
    "hip_roll": (0.0, LARGE, 0.15),
    "hip_yaw": (0.0, MIDDLE, 0.15),
    "knee": (0.669, LARGE, 0.35),
    "ankle_pitch": (-0.363, PAIR, 0.25),
    "ankle_roll": (0.0, PAIR, 0.1),
}
WAIST = {"waist_yaw": (0.0, MIDDLE, 0.2), "waist_roll": (0.0, PAIR, 0.08), "waist_pitch": (0.0, PAIR, 0.1)}
ARM = {
    "shoulder_pitch": (0.2, SMALL, 0.15),
    "shoulder_roll": (0.2, SMALL, 0.15),  # sign of the left arm
    "shoulder_yaw": (0.0, SMALL, 0.1),
    "elbow": (0.6, SMALL, 0.15),
    "wrist_roll": (0.0, SMALL, 0.3),
    "wrist_pitch": (0.0, WRIST, 0.3),
    "wrist_yaw": (0.0, WRIST, 0.3),
}
SIDES = ("left", "right")
PARTS = {
    **{f"{side}_{name}": part for side in SIDES for name, part in LEG.items()},
    **WAIST,
    **{f"{side}_{name}": part for side in SIDES for name, part in ARM.items()},
    "right_shoulder_roll": (-0.2, SMALL, 0.15),
}


class G1(Unitree):
    """G1: 99 observations, 29 actions (joint targets, up to ``action_scale`` times .07 to .55 rad from the pose)."""

    name, robot_name, contacts = "g1_velocity", "g1", (10, 35)
    obs_size, action_size = 99, 29
    joints: ClassVar[dict[str, Joint]] = {
        f"{name}_joint": Joint(pose, drive) for name, (pose, drive, _) in PARTS.items()
    }
    base = "pelvis"
    fastest = (1.0, 1.0, 1.0)  # ahead and sideways mjlab's, around that of Playground's G1JoystickFlatTerrain
    feet = tuple(f"{side}_foot{i}_collision" for side in SIDES for i in (2, 6))
    sides, odd = {"left": "right"}, ("roll", "yaw")
    height = 0.78
    spread = 0.1

    @classmethod
    def source(cls) -> mujoco.MjSpec:
        spec = super().source()
        for side in SIDES:
            for i in (1, 3, 4, 5, 7):
                spec.delete(spec.geom(f"{side}_foot{i}_collision"))
        bones(spec, 0.02)
        return spec


class G1Legacy(Legacy, G1):
    """:class:`G1` with the reward of :class:`Legacy`; an episode ends where other parts than feet and arms touch the
    ground."""

    contacts = (9, 29)
    fragile = ("pelvis", "torso_link", *(f"{side}_{part}_link" for side in SIDES for part in ("hip_yaw", "knee")))
    slack = tuple(width for _, _, width in PARTS.values())
