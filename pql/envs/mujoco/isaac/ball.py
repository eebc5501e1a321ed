"""Ball Balance: a ball dropped on a tray with three legs must be caught and kept in the middle of the tray.

The task of Isaac Gym's environments (Makoviychuk et al. 2021) that PQL (Li et al. 2023) was measured on, from state and
from pixels. Differences from Isaac's task:

- MuJoCo's contacts; the legs touch only the ball.
- The ball has no angular damping (Isaac: .5 / s).
- Feet are pinned by ``connect`` (Isaac: a spring of 5e7).
- Knees have at most 60 N m (five times what the tray and a falling ball need) and an armature of 0.01.
- Four physics steps of 2.5 ms per env step (Isaac: one of 10).
- An episode restarts in the step that ends it, so no action is computed from a dead state, and it has 499 steps.
"""

import math
from typing import ClassVar

import mujoco
import torch
from torch import Tensor

from pql.contract.env import ObsSpec
from pql.envs.mujoco.engine import Fields
from pql.envs.mujoco.isaac import raster
from pql.envs.mujoco.isaac.measure import Wrench, rotation
from pql.envs.mujoco.task import Draw, Memory, Robot, Start, Task, Verdict, add_servo
from pql.types import Obs

LEGS = (0.0, 2 * math.pi / 3, 4 * math.pi / 3)  # angle of each around the tray
TRAY, BALL, THICK = 0.5, 0.1, 0.02  # radius of the tray and of the ball, the tray's thickness: metres
HEIGHT = 0.559117  # of the tray's centre at the start
TOP, KNEE, FOOT = (0.4, 0.5291), (0.1454, 0.2746), (0.4, 0.02)  # a leg's joints: distance from the axis, height
KNEE_RANGE = [-7 * math.pi / 18, math.pi / 2]  # radians
LEG = 0.02  # a leg's radius
EFFORT = 60.0  # N m of a knee; targets beyond the legs' reach would pull the feet off the ground
SENSORS = 0.4  # distance of the force sensors from the tray's centre

MODEL = """
<mujoco model="ball_balance">
  <compiler angle="radian"/>
  <option timestep="0.0025" integrator="implicitfast" cone="elliptic"/>
  <visual><headlight ambient=".4 .4 .4"/><global offwidth="1280" offheight="960"/></visual>
  <worldbody>
    <light pos="0 -1 4" dir="0 .25 -1"/>
    <geom name="floor" type="plane" size="5 5 .1" rgba=".75 .78 .8 1"/>
    <body name="tray" pos="0 0 {height}">
      <freejoint name="tray"/>
      <geom name="tray" type="cylinder" size="{tray} {half}" density="100" rgba=".3 .45 .7 1"/>
    </body>
    <body name="ball" pos="0 0 1.5">
      <freejoint name="ball"/>
      <geom name="ball" type="sphere" size="{ball}" density="200" conaffinity="3" rgba=".85 .3 .2 1"/>
    </body>
  </worldbody>
</mujoco>
"""


def _leg(tray: mujoco.MjsBody, index: int, angle: float) -> None:
    """Add a leg: two capsules in the vertical plane at ``angle``; hinges turn about that plane's normal."""
    c, s = math.cos(angle), math.sin(angle)

    def place(radius: float, height: float) -> list[float]:
        return [radius * c, radius * s, height]

    span, shin = [KNEE[i] - TOP[i] for i in (0, 1)], [FOOT[i] - KNEE[i] for i in (0, 1)]
    quiet = {"type": mujoco.mjtGeom.mjGEOM_CAPSULE, "density": 1000.0, "contype": 2, "conaffinity": 0}
    upper = tray.add_body(name=f"upper_leg{index}", pos=place(TOP[0], TOP[1] - HEIGHT))
    upper.add_joint(name=f"upper_leg{index}", axis=[-s, c, 0], range=[-math.pi / 4, math.pi / 4])
    upper.add_geom(fromto=[0, 0, 0, *place(*span)], size=[LEG, 0, 0], rgba=[0.35, 0.35, 0.4, 1], **quiet)
    lower = upper.add_body(name=f"lower_leg{index}", pos=place(*span))
    lower.add_joint(name=f"lower_leg{index}", axis=[-s, c, 0], range=KNEE_RANGE, armature=0.01)
    lower.add_geom(fromto=[0, 0, 0, *place(*shin)], size=[LEG, 0, 0], rgba=[0.6, 0.6, 0.65, 1], **quiet)


def _drive(spec: mujoco.MjSpec, index: int) -> None:
    """Add the knee's position servo and pin the foot."""
    add_servo(spec, f"lower_leg{index}", KNEE_RANGE, EFFORT, kp=4000.0, kv=100.0)
    angle, shin = LEGS[index], [FOOT[i] - KNEE[i] for i in (0, 1)]
    anchor = [shin[0] * math.cos(angle), shin[0] * math.sin(angle), shin[1]]
    pin = spec.add_equality(type=mujoco.mjtEq.mjEQ_CONNECT, objtype=mujoco.mjtObj.mjOBJ_BODY)
    pin.name1, pin.name2, pin.data, pin.solref = f"lower_leg{index}", "world", [*anchor] + [0.0] * 9, [0.005, 1.0]


class BallBalance(Task):
    """Observation (24): position and velocity of the three driven knees; the ball's position and velocity in the world;
    0.05 x the readings of three force sensors on the tray's rim (x-force of each, then x-, y- and z-torques), in the
    tray's frame; all clamped to +-5. Action (3): moves each knee's target by up to 0.2 rad.

    reward = 1 / (1 + |p - (0, 0, 0.7)|) / (1 + |v|) of the ball. Ends where the ball is below 0.15 m.
    """

    name = "ballbalance"
    obs_size, action_size = 24, 3
    frame_skip, dt = 4, 0.01
    terms = ("balance",)
    metrics = ("distance",)  # of the ball from its place above the tray's middle, in metres
    time_limit = 499
    outputs: ClassVar[tuple[str, ...]] = ("sensordata",)
    model, refused = "fast", "this robot is built in code and has no shipped model"
    integrator = mujoco.mjtIntegrator.mjINT_IMPLICITFAST
    STRIDE: ClassVar[float] = 0.2  # radians per step

    def __init__(self, robot: Robot):
        super().__init__(robot)
        self._wrench = Wrench(robot, ("tray",))
        rim = [[SENSORS * math.cos(a), SENSORS * math.sin(a), 0.0] for a in LEGS]
        self._rim = robot.tensor(rim)
        self._place = robot.tensor([0.0, 0.0, 0.7])
        knees = [robot.model.joint(f"lower_leg{i}") for i in range(3)]
        self._knees = torch.tensor([knee.qposadr[0] for knee in knees], device=robot.device)
        self._knee_speeds = torch.tensor([knee.dofadr[0] for knee in knees], device=robot.device)
        ball = robot.model.joint("ball")
        self._ball_qpos, self._ball_qvel = (slice(at[0], at[0] + 3) for at in (ball.qposadr, ball.dofadr))
        self._low, self._high = robot.tensor(robot.model.actuator_ctrlrange).unbind(1)

    @classmethod
    def source(cls) -> mujoco.MjSpec:
        spec = mujoco.MjSpec.from_string(MODEL.format(ball=BALL, height=HEIGHT, tray=TRAY, half=THICK / 2))
        for index, angle in enumerate(LEGS):
            _leg(spec.body("tray"), index, angle)
            _drive(spec, index)
        Wrench.sense(spec, "tray")
        return spec

    def start(self, count: int, draw: Draw) -> Start:
        """Drop the ball from a height of 1 to 2 m, at 5 m/s downwards and up to 5 m/s towards the tray's axis."""
        robot = self.robot
        angle, distance = draw.uniform(-math.pi, math.pi, count), draw.uniform(0.001, 0.5, count)
        out = torch.stack((angle.cos(), angle.sin()), 1)
        speed = -(distance - 0.001) / 0.499 * draw.uniform(0.0, 5.0, count)
        qpos, qvel = robot.qpos0.repeat(count, 1), robot.qvel0.repeat(count, 1)
        place, motion = qpos[:, self._ball_qpos], qvel[:, self._ball_qvel]
        place[:, :2], place[:, 2] = distance[:, None] * out, draw.uniform(1.0, 2.0, count)
        motion[:, :2], motion[:, 2] = speed[:, None] * out, -5.0
        return Start(qpos, qvel, {"target": torch.zeros_like(place)})

    def control(self, action: Tensor, fields: Fields, memory: Memory) -> Tensor:
        """Joint targets [N, nu] from ``action`` [N, A]."""
        return (memory["target"] + self.STRIDE * action).clamp(self._low, self._high)

    def judge(self, fields: Fields, memory: Memory) -> Verdict:
        ball, velocity = fields["qpos"][:, self._ball_qpos], fields["qvel"][:, self._ball_qvel]
        distance = torch.linalg.vector_norm(ball - self._place, dim=1)
        speed = torch.linalg.vector_norm(velocity, dim=1)
        return Verdict({"balance": 1 / (1 + distance) / (1 + speed)}, ball[:, 2] < 0.15, {"distance": distance})

    def evolve(self, fields: Fields, memory: Memory, draw: Draw) -> Memory:
        return {"target": fields["ctrl"].clone()}

    def state(self, fields: Fields) -> Tensor:
        """Return the state observation [N, 24]."""
        force, torque = self._wrench.read(fields)  # [N, 1, 3]
        torques = Wrench.about(force, torque, self._rim)  # [N, 3 sensors, 3]
        felt = torch.cat((force[:, 0, :1].expand(-1, 3), torques.mT.flatten(1)), 1) / 20
        ball = (fields["qpos"][:, self._ball_qpos], fields["qvel"][:, self._ball_qvel])
        knees = (fields["qpos"][:, self._knees], fields["qvel"][:, self._knee_speeds])
        return torch.cat((*knees, *ball, felt), 1).clamp(-5.0, 5.0)

    def observe(self, fields: Fields, memory: Memory) -> Obs:
        return {"policy": self.state(fields)}


class BallBalancePixels(BallBalance):
    """Ball Balance from pixels: ``policy`` observes the latest 4 grey frames of 84 x 84, one per step (:mod:`.raster`);
    ``critic``, used only in training, observes the state. The view is this library's, not the PQL paper's; it contains
    the ball when an episode begins."""

    name = "ballbalance_pixels"
    outputs = ("sensordata", "xpos", "xquat")
    STACK: ClassVar[int] = 4

    def __init__(self, robot: Robot):
        super().__init__(robot)
        self._camera = raster.Camera(robot.device, BALL, TRAY, LEG)
        self._ball, self._tray = robot.body("ball"), robot.body("tray")
        self._hips, self._knee_bodies = (  # on the device: a list would be copied to it in each step
            torch.tensor([robot.body(f"{part}_leg{i}") for i in range(3)], device=robot.device)
            for part in ("upper", "lower")
        )
        self._feet = robot.tensor([[FOOT[0] * math.cos(a), FOOT[0] * math.sin(a), FOOT[1]] for a in LEGS])

    @classmethod
    def obs_spec(cls) -> dict[str, ObsSpec]:
        frames = ObsSpec((cls.STACK, raster.SIZE, raster.SIZE), torch.uint8, stack=cls.STACK)
        return {"policy": frames, "critic": ObsSpec((cls.obs_size,))}

    def start(self, count: int, draw: Draw) -> Start:
        start = super().start(count, draw)
        shape = (count, self.STACK - 1, raster.SIZE, raster.SIZE)
        before = torch.zeros(shape, dtype=torch.uint8, device=self.robot.device)
        return start._replace(memory={**start.memory, "before": before})

    def evolve(self, fields: Fields, memory: Memory, draw: Draw) -> Memory:
        before = torch.cat((memory["before"][:, 1:], memory["frame"].unsqueeze(1)), 1)
        return {**super().evolve(fields, memory, draw), "before": before}

    def track(self, fields: Fields) -> Memory:
        """Render the frame, from the poses at the start of the last physics step, which are all of the same time."""
        at = fields["xpos"]
        hips, knees = at[:, self._hips], at[:, self._knee_bodies]
        ends = (torch.cat((hips, knees), 1), torch.cat((knees, self._feet.expand(len(at), -1, -1)), 1))
        normal = rotation(fields["xquat"][:, self._tray])[:, :, 2]
        frame = self._camera.picture(at[:, self._ball], at[:, self._tray], normal, torch.stack(ends, 2))
        return {"frame": frame}

    def observe(self, fields: Fields, memory: Memory) -> Obs:
        frames = torch.cat((memory["before"], memory["frame"].unsqueeze(1)), 1)
        return {"policy": frames, "critic": self.state(fields)}
