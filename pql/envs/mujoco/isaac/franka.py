"""Franka cube stacking of the PQL paper: an arm puts a small cube on a larger one and releases it.

The task of Isaac Gym's environments (Makoviychuk et al. 2021). Differences from Isaac's task:

- MuJoCo's contacts, with a plain pad on each fingertip.
- The robot has its real masses (Isaac: the meshes at the density of water); each finger has its drive's inertia, 0.1
  kg.
- A joint's speed is not cut off at its limit; instead a drag cubic in speed cancels the whole torque there.
- Torques are computed from the current state.
- The large cube begins on the table (Isaac: 1 cm inside it), and cubes have no angular damping (Isaac: .5 / s).
- The first free one of 16 places drawn for the small cube is used (Isaac: of 100).
- Eight physics steps of 2.1 ms per env step (Isaac: two of 8.3).
- An episode restarts in the step that ends it, with its final observation returned, and has 299 steps.
"""

import math
from collections.abc import Mapping
from typing import ClassVar

import mujoco
import torch
from torch import Tensor

from pql.envs.mujoco.engine import Fields
from pql.envs.mujoco.isaac.arm import Arm, OperationalSpace, Pose
from pql.envs.mujoco.robots import model_file
from pql.envs.mujoco.task import Draw, Memory, Robot, Start, Task, Verdict, add_servo
from pql.types import Obs

HINGES = tuple(f"joint{i}" for i in range(1, 8))
FINGERS = ("finger_joint1", "finger_joint2")
EFFORT = (87.0,) * 4 + (12.0,) * 3  # N m
SPEED = (2.175,) * 4 + (2.61,) * 3  # rad/s
HOME = (0.0, 0.1963, 0.0, -2.618, 0.0, 2.9416, 0.7854)
TOP = 1.025  # height of the table's top, metres
SMALL, LARGE = 0.05, 0.07  # edges of the cubes A and B
APART = math.sqrt(2) * (SMALL + LARGE)  # least distance of their centres at the start, seen from above
OPEN = 0.04  # each finger's travel from the middle, metres
# metres: from the hand's origin to the grip site and fingertips; how far a tip extends beyond its finger
GRIP, WIDER = 0.1025, 0.0015


def _furnish(spec: mujoco.MjSpec) -> None:
    """Add floor, table, the arm's stand and the cubes."""
    world, box = spec.worldbody, mujoco.mjtGeom.mjGEOM_BOX
    world.add_light(pos=[1.0, -1.0, 3.0], dir=[-0.4, 0.4, -1.0])
    world.add_geom(name="floor", type=mujoco.mjtGeom.mjGEOM_PLANE, size=[5, 5, 0.1], rgba=[0.75, 0.78, 0.8, 1])
    world.add_geom(name="table", type=box, pos=[0, 0, 1.0], size=[0.6, 0.6, 0.025], rgba=[0.55, 0.45, 0.35, 1])
    world.add_geom(name="stand", type=box, pos=[-0.5, 0, 1.075], size=[0.1, 0.1, 0.05], rgba=[0.4, 0.4, 0.42, 1])
    for name, edge, color in (("cube_a", SMALL, (0.75, 0.2, 0.15, 1)), ("cube_b", LARGE, (0.2, 0.4, 0.75, 1))):
        cube = world.add_body(name=name, pos=[0.0, 0.0, TOP + edge / 2])
        cube.add_freejoint(name=name)
        cube.add_geom(name=name, type=box, size=[edge / 2] * 3, density=1000.0, rgba=color)


def _drive(spec: mujoco.MjSpec) -> None:
    """Add motors for the arm, position servos for the fingers."""
    for element in (*spec.actuators, *spec.equalities, *spec.tendons, *spec.keys):
        spec.delete(element)
    joint = mujoco.mjtTrn.mjTRN_JOINT
    for name, effort, speed in zip(HINGES, EFFORT, SPEED, strict=True):
        spec.joint(name).armature, spec.joint(name).damping = 0.0, [0.0, 0.0, effort / speed**3]
        spec.add_actuator(name=name, target=name, trntype=joint, ctrlrange=[-effort, effort], ctrllimited=True)
    for name in FINGERS:
        spec.joint(name).armature, spec.joint(name).damping = 0.1, [0.0, 0.0, 0.0]
        add_servo(spec, name, [0.0, OPEN], 200.0, kp=5000.0, kv=100.0)


class FrankaCubeStack(Task):
    """Observation (19): orientation (x, y, z, w) and position of the small cube, vector from it to the large one,
    position and orientation of the grip between the fingers, both fingers' positions; all clamped to +-5, in the world.
    Action (7): the hand's displacement, up to 0.1 m and 0.5 rad along and about each world axis, by operational-space
    control, once per step; and the fingers: open (>= 0) or shut.

    reward = 16 where the small cube rests on the large one and the grip is away from it, which ends the episode as a
    success; else 0.1 max(near, align) + 1.5 [lifted] + 2 align.
    """

    name, contacts = "franka_cube_stack", (18, 54)
    obs_size, action_size = 19, 7
    frame_skip, dt = 8, 0.01667
    time_limit = 299
    terms = ("reach", "lift", "align", "stack")
    metrics: ClassVar[tuple[str, ...]] = ("success",)
    model, refused = "fast", "the scene is built in code"
    integrator = mujoco.mjtIntegrator.mjINT_IMPLICITFAST
    DELTA: ClassVar[tuple[float, ...]] = (0.1, 0.1, 0.1, 0.5, 0.5, 0.5)
    TRIES: ClassVar[int] = 16  # at most 36 % are too near: all 16 in at most one of ten million episodes

    def __init__(self, robot: Robot):
        super().__init__(robot)
        self._low, self._high = robot.tensor(robot.model.jnt_range[:7]).unbind(1)
        self._home, self._effort = robot.tensor(HOME), robot.tensor(EFFORT)
        # the arm uses float64 on any engine: a GPU may compute float32 matrix products with a 10-bit mantissa
        exact = Robot(robot.model, robot.device, torch.float64)
        self.arm, self._law = Arm(exact, HINGES, "hand", FINGERS), OperationalSpace(exact.tensor(HOME))
        self._delta = exact.tensor(self.DELTA)
        a, b = (int(robot.model.joint(name).qposadr[0]) for name in ("cube_a", "cube_b"))
        self._a, self._b, self._turn_a = slice(a, a + 3), slice(b, b + 3), slice(a + 3, a + 7)
        self._turn_b = slice(b + 3, b + 7)
        self._ahead = exact.tensor([0.0, 0.0, GRIP])  # in the hand
        self._sideways = exact.tensor([[0.0, 1.0, 0.0], [0.0, -1.0, 0.0]])
        self._above = robot.tensor([0.0, 0.0, (SMALL + LARGE) / 2])

    @classmethod
    def source(cls) -> mujoco.MjSpec:
        return mujoco.MjSpec.from_file(str(model_file("panda")))

    @classmethod
    def edit(cls, spec: mujoco.MjSpec) -> None:
        spec.option.timestep = cls.dt / cls.frame_skip
        spec.body("link0").pos = [-0.45, 0.0, 1.125]
        for body in spec.bodies[1:]:
            body.gravcomp = 1.0
        _drive(spec)
        for geom in [g for g in spec.geoms if g.type == mujoco.mjtGeom.mjGEOM_BOX and max(g.size) < 0.005]:
            spec.delete(geom)  # four pins on each fingertip, which touch a cube at every corner: the pad replaces them
        _furnish(spec)
        for geom in spec.geoms:  # fingers press with up to 200 N: stiff contacts, which yield less than a
            # millimetre, and less along the pads, too (``impratio`` 10 does not reduce the drift of a held cube)
            geom.friction = [1.0, 0.005, 0.0001]
            geom.solref, geom.solimp = [0.005, 1.0], [0.99, 0.999, 0.001, 0.5, 2.0]
        spec.stat.center, spec.stat.extent = [-0.1, 0.0, 1.35], 1.0
        spec.visual.global_.azimuth, spec.visual.global_.elevation = 140.0, -15.0
        spec.visual.headlight.ambient = [0.4, 0.4, 0.4]

    def start(self, count: int, draw: Draw) -> Start:
        """Start the arm near ``HOME`` and the cubes within half a metre, turned by up to 45 degrees, not too near."""
        qpos, qvel = self.robot.qpos0.repeat(count, 1), self.robot.qvel0.repeat(count, 1)
        qpos[:, :7] = (self._home + draw.uniform(-0.25, 0.25, count, 7)).clamp(self._low, self._high)
        qpos[:, 7:9] = 0.035
        large, tried = draw.uniform(-0.25, 0.25, count, 2), draw.uniform(-0.25, 0.25, count, self.TRIES, 2)
        free = torch.linalg.vector_norm(tried - large[:, None], dim=2) >= APART
        first = free.to(torch.uint8).argmax(1)
        qpos[:, self._a][:, :2] = tried.gather(1, first[:, None, None].expand(-1, 1, 2))[:, 0]
        qpos[:, self._b][:, :2] = large
        for turn in (self._turn_a, self._turn_b):
            half = draw.uniform(-0.785, 0.785, count) / 2
            still = torch.zeros_like(half)
            qpos[:, turn] = torch.stack((half.cos(), still, still, half.sin()), 1)
        return Start(qpos, qvel)

    def pose(self, fields: Fields) -> Pose:
        return self.arm.pose(fields["qpos"][:, :7].double())

    def derive(self, fields: Fields) -> Fields:
        return self.pose(fields)._asdict()

    def track(self, fields: Fields) -> Memory:
        """Return the pose, used by ``observe`` now and by the next ``control``."""
        return self.posed(fields)._asdict()

    @staticmethod
    def posed(values: Mapping[str, Tensor]) -> Pose:
        """Rebuild the pose from the fields that :meth:`derive` or :meth:`track` stored."""
        return Pose(*(values[part] for part in Pose._fields))

    def grip(self, pose: Pose) -> Tensor:
        """Return the point between the fingertips: [N, 3]."""
        return pose.place[:, -1] + pose.frame[:, -1] @ self._ahead

    def control(self, action: Tensor, fields: Fields, memory: Memory) -> Tensor:
        fingers = OPEN * (action[:, -1:] >= 0).to(action).expand(-1, 2)
        torque = self.torque(action[:, :-1], fields, memory)
        return torch.cat((torque.clamp(-self._effort, self._effort), fingers), 1)

    def torque(self, action: Tensor, fields: Fields, memory: Memory) -> Tensor:
        """Return motor torques [N, 7] before their limits. As in Isaac, the velocity is the grip's, the Jacobian the
        hand's."""
        qpos, dq, pose = fields["qpos"].double(), fields["qvel"][:, :7].double(), self.posed(memory)
        velocity = (self.arm.jacobian(pose, self.grip(pose)) @ dq.unsqueeze(-1)).squeeze(-1)
        hand = self.arm.jacobian(pose, pose.place[:, -1])
        mass = self.arm.mass(pose, qpos[:, 7:9])
        return self._law.torque(mass, hand, velocity, action * self._delta, qpos[:, :7], dq)

    def judge(self, fields: Fields, memory: Memory) -> Verdict:
        qpos, pose = fields["qpos"], self.posed(fields)
        small, large, grip = qpos[:, self._a], qpos[:, self._b], self.grip(pose)
        offsets = (qpos[:, 7:9] + WIDER)[..., None] * self._sideways  # [N, 2, 3] in the hand
        tips = grip[:, None] + (pose.frame[:, None, -1] @ offsets.unsqueeze(-1)).squeeze(-1)
        distance = torch.linalg.vector_norm(torch.cat((grip[:, None], tips), 1) - small[:, None], dim=2)  # [N, 3]
        near = 1 - torch.tanh(10 * distance.mean(1))
        height, gap = small[:, 2] - TOP, large - small
        lifted = height - SMALL > 0.04
        align = (1 - torch.tanh(10 * torch.linalg.vector_norm(gap + self._above, dim=1))) * lifted
        level = (height - (LARGE + SMALL / 2)).abs() < 0.02
        stacked = (torch.linalg.vector_norm(gap[:, :2], dim=1) < 0.02) & level & (distance[:, 0] > 0.04)
        on_the_way = (~stacked).to(near)
        terms = {
            "reach": 0.1 * torch.maximum(near, align) * on_the_way,
            "lift": 1.5 * lifted * on_the_way,
            "align": 2.0 * align * on_the_way,
            "stack": 16.0 * stacked.to(near),
        }
        return Verdict(terms, stacked, {"success": stacked.to(near)})

    def joints(self, fields: Fields) -> Tensor:
        """Return the observed positions of the finger joints, [N, 2]."""
        return fields["qpos"][:, 7:9]

    def observe(self, fields: Fields, memory: Memory) -> Obs:
        qpos, pose = fields["qpos"], self.posed(memory)
        small, turns = qpos[:, self._a], (qpos[:, self._turn_a], pose.quat[:, -1])
        turn, held = (quat.roll(-1, 1) for quat in turns)  # x, y, z, w
        parts = (turn, small, qpos[:, self._b] - small, self.grip(pose), held, self.joints(fields))
        return {"policy": torch.cat(parts, 1).clamp(-5.0, 5.0)}


class FrankaCubeStackTorque(FrankaCubeStack):
    """FrankaCubeStack with torque control: action (8), a share of each motor's maximum torque, and the fingers;
    observation (26), with all nine joints' positions. Isaac Gym's ``joint_tor``."""

    name = "franka_cube_stack_torque"
    obs_size, action_size = 26, 8

    def torque(self, action: Tensor, fields: Fields, memory: Memory) -> Tensor:
        """Motor torques [N, 7] proportional to ``action`` [N, A]."""
        return action * self._effort

    def joints(self, fields: Fields) -> Tensor:
        return fields["qpos"][:, :9]
