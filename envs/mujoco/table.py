"""IsaacGymEnvs' Ball Balance on MuJoCo: a tray on three legs catches a falling ball and holds it in the middle.

Sizes, scales and frames of observations and actions, reward and resets are those of IsaacGymEnvs at commit ca7a4fb
(BSD-3); the robot is built here from primitives, to its dimensions and masses. What differs, beside the simulator: the
feet are pinned by ``connect`` constraints (there: by stiff springs), joints have an armature of .005 (there: none, but
servos that the solver treats implicitly: here they would ring), the tray's force sensors report the net force on it at
each leg's place, and an episode restarts in the step that ends it.
"""

import math
from typing import ClassVar

import mujoco
import torch
from torch import Tensor

from pql.envs.mujoco.engine import Fields
from pql.envs.mujoco.rigid import into, net_wrench
from pql.envs.mujoco.task import Draw, Memory, Robot, Start, Task, Verdict
from pql.types import Obs

TRAY_HEIGHT, LEG_RADIUS, LEG_LENGTH = 0.559117, 0.02, 0.36
UPPER, KNEE, FOOT = (0.4, 0.5291), (0.1454, 0.2746), (0.4, 0.02)  # distance from the middle and height, metres
ANGLES = (0.0, 120.0, 240.0)


def robot_xml() -> str:
    """The table, from primitives."""
    legs, pins = [], []
    for number, degrees in enumerate(ANGLES):
        cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))

        def at(point: tuple[float, float], base: tuple[float, float], cos: float = cos, sin: float = sin) -> str:
            away, height = point[0] - base[0], point[1] - base[1]
            return f"{away * cos:.7g} {away * sin:.7g} {height:.7g}"

        axis = f"{-sin:.7g} {cos:.7g} 0"
        geom = f'type="capsule" size="{LEG_RADIUS}" density="1000" contype="0" conaffinity="0"'
        legs.append(f"""
        <body name="upper_{number}" pos="{at(UPPER, (0.0, TRAY_HEIGHT))}">
          <joint name="upper_{number}" axis="{axis}" range="-45 45"/>
          <geom {geom} fromto="0 0 0 {at(KNEE, UPPER)}"/>
          <body name="lower_{number}" pos="{at(KNEE, UPPER)}">
            <joint name="lower_{number}" axis="{axis}" range="-70 90"/>
            <geom {geom} fromto="0 0 0 {at(FOOT, KNEE)}"/>
          </body>
        </body>""")
        pins.append(f'<connect body1="lower_{number}" anchor="{at(FOOT, KNEE)}" solref="0.002 1"/>')
    servos = "".join(
        f'<general joint="lower_{i}" gaintype="fixed" biastype="affine" gainprm="4000" biasprm="0 -4000 -100" '
        f'ctrlrange="-1.2217305 1.5707963" ctrllimited="true"/>'
        for i in range(3)
    )
    return f"""
<mujoco model="ball balance">
  <option timestep="0.001" integrator="implicitfast" cone="elliptic"/>
  <default><joint limited="true" armature="0.005"/><geom friction="1 0.005 0.0001" rgba="0.4 0.45 0.5 1"/></default>
  <worldbody>
    <light pos="0 0 4"/>
    <geom name="floor" type="plane" size="0 0 1" rgba="0.85 0.85 0.85 1"/>
    <body name="tray" pos="0 0 {TRAY_HEIGHT}">
      <freejoint name="tray"/>
      <geom name="tray" type="cylinder" size="0.5 0.01" density="100" rgba="0.8 0.7 0.5 1"/>{"".join(legs)}
    </body>
    <body name="ball" pos="0 0 2">
      <freejoint name="ball"/>
      <geom name="ball" type="sphere" size="0.1" density="200" rgba="0.8 0.2 0.2 1"/>
    </body>
  </worldbody>
  <equality>{"".join(pins)}</equality>
  <actuator>{servos}</actuator>
  <sensor>
    <framelinacc objtype="body" objname="tray"/>
    <frameangacc objtype="body" objname="tray"/>
    <frameangvel objtype="body" objname="tray"/>
  </sensor>
</mujoco>"""


class IsaacBallBalance(Task):
    """Ball Balance: 24 observations, 3 actions, which move the knees' targets by up to 0.2 rad a step.

    Observations: angle and velocity of the driven knees, ball position and velocity, then forces and torques on the
    tray at the three legs (x forces, x, y and z torques, leg by leg) over 20. The knees' targets are its memory.
    """

    name = "isaac_ball_balance"
    frame_skip = 10
    dt = 0.01
    obs_size = 24
    action_size = 3
    time_limit = 499
    terms = ("balance",)
    metrics: ClassVar[tuple[str, ...]] = ("success",)
    outputs = ("xpos", "xipos", "ximat", "sensordata")
    model = "fast"
    refused = "the task has a robot of its own"
    integrator = mujoco.mjtIntegrator.mjINT_IMPLICITFAST  # the servos are stiff
    contacts = (4, 20)
    speed = 20 * 0.01  # radians a step, of a knee's target

    def __init__(self, robot: Robot):
        super().__init__(robot)
        model = robot.model
        self.tray = robot.body("tray")
        self.mass = robot.tensor(model.body_mass)[[self.tray]]
        self.inertia = robot.tensor(model.body_inertia)[[self.tray]]
        self.gravity = robot.tensor([0.0, 0.0, 9.81])
        knees = [model.joint(f"lower_{i}") for i in range(3)]
        self.knees = torch.tensor([int(knee.qposadr[0]) for knee in knees], device=robot.device)
        self.turns = torch.tensor([int(knee.dofadr[0]) for knee in knees], device=robot.device)
        ball = model.joint("ball")
        self.ball, self.move = int(ball.qposadr[0]), int(ball.dofadr[0])
        self.low, self.high = robot.tensor(model.actuator_ctrlrange).unbind(1)
        radians = robot.tensor(ANGLES).deg2rad()
        self.places = UPPER[0] * torch.stack((radians.cos(), radians.sin(), torch.zeros_like(radians)), 1)

    @classmethod
    def source(cls) -> mujoco.MjSpec:
        return mujoco.MjSpec.from_string(robot_xml())

    def start(self, count: int, draw: Draw) -> Start:
        """The ball comes from above, towards the middle, the faster the further away it is."""
        away, turn = draw.uniform(0.001, 0.5, count), draw.uniform(-math.pi, math.pi, count)
        side = torch.stack((turn.cos(), turn.sin()), 1)
        qpos, qvel = self.robot.qpos0.repeat(count, 1), self.robot.qvel0.repeat(count, 1)
        ball, move = self.ball, self.move
        qpos[:, ball : ball + 2] = away[:, None] * side
        qpos[:, ball + 2] = draw.uniform(1.0, 2.0, count)
        qvel[:, move : move + 2] = -((away - 0.001) / 0.499 * draw.uniform(0.0, 5.0, count))[:, None] * side
        qvel[:, move + 2] = -5.0
        return Start(qpos, qvel, {"target": torch.zeros(count, 3, device=qpos.device, dtype=qpos.dtype)})

    def control(self, action: Tensor, fields: Fields, memory: Memory) -> Tensor:
        return (memory["target"] + self.speed * action).clamp(self.low, self.high)

    def evolve(self, fields: Fields, memory: Memory, draw: Draw) -> Memory:
        return {"target": fields["ctrl"].clone()}

    def _sensors(self, fields: Fields) -> tuple[Tensor, Tensor]:
        """Force [N, 3] on the tray and torques [N, 3 legs, 3] about the legs' places, in the tray's frame."""
        linear, angular, spin = fields["sensordata"].unflatten(1, (3, 1, 3)).unbind(1)
        frame = fields["ximat"][:, self.tray].reshape(-1, 1, 3, 3)
        still = torch.zeros_like(linear)
        force, torque = net_wrench(self.mass, self.inertia, frame, linear - self.gravity, spin, angular, still)
        force, torque = into(frame, force), into(frame, torque)  # [N, 1, 3]
        return force[:, 0], torque - torch.linalg.cross(self.places.expand(len(force), 3, 3), force.expand(-1, 3, 3))

    def observe(self, fields: Fields, memory: Memory) -> Obs:
        force, torque = self._sensors(fields)
        parts = [fields["qpos"][:, self.knees], fields["qvel"][:, self.turns]]
        parts += [fields["qpos"][:, self.ball : self.ball + 3], fields["qvel"][:, self.move : self.move + 3]]
        parts += [force[:, :1].expand(-1, 3) / 20, torque.transpose(1, 2).flatten(1) / 20]
        return {"policy": torch.cat(parts, 1)}

    def judge(self, fields: Fields, memory: Memory) -> Verdict:
        ball, velocity = fields["qpos"][:, self.ball : self.ball + 3], fields["qvel"][:, self.move : self.move + 3]
        gap = torch.linalg.vector_norm(ball - self.robot.tensor([0.0, 0.0, 0.7]), dim=1)
        speed = torch.linalg.vector_norm(velocity, dim=1)
        reward = 1 / (1 + gap) / (1 + speed)
        return Verdict({"balance": reward}, ball[:, 2] < 0.15, {"success": ((gap < 0.1) & (speed < 0.1)).to(reward)})
