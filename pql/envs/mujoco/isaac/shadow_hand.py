"""Shadow Hand of the PQL paper: 20 motors turn a block in the palm.

The task of Isaac Gym's environments (Makoviychuk et al. 2021) on the hand and block of the gymnasium-robotics package,
which have the same dimensions, masses, motors and colliding finger pairs. Differences from Isaac's task, in addition to
those in :mod:`.reorient`:

- The tendons that couple the last two joints of a finger have MuJoCo's hard limits (Isaac: a spring of 30).
- Only the motor's force is limited; a joint's damping is separate from it.
- Four physics steps of 4.2 ms per env step (Isaac: two of 8.3). A fingertip's force, torque and motion are those at the
  start of the last one.
- The forces in an episode's first observation are 0, because no step has been taken.
"""

from typing import ClassVar

import mujoco
import torch
from torch import Tensor

from pql.envs.mujoco.engine import Fields
from pql.envs.mujoco.isaac.measure import Wrench, add_sensors
from pql.envs.mujoco.isaac.reorient import DISPLAYED, OBJECT, Reorient, look
from pql.envs.mujoco.robots import model_file
from pql.envs.mujoco.task import Memory, Robot

PREFIX = "robot0:"
TIPS = tuple(f"{PREFIX}{finger}distal" for finger in ("ff", "mf", "rf", "lf", "th"))
MOTION = ("framepos", "framequat", "framelinvel", "frameangvel")  # of a fingertip: 13 numbers
ORDER = (0, 1, 2, 4, 5, 6, 3, 7, 8, 9, 10, 11, 12)  # MuJoCo's w, x, y, z -> x, y, z, w
STATE = ("joints", "joint_speeds", "joint_forces", *OBJECT, "fingertips", "fingertip_forces", "action")


class ShadowHand(Reorient):
    """Observation (211): for each of 24 joints the position scaled to its range, 0.2 x velocity, 10 x motor torque;
    the block's position, orientation, velocity and 0.2 x angular velocity; the goal's position and orientation, and the
    rotation from goal to block; for each of the five last phalanges position, orientation, velocity and angular
    velocity; 10 x net force and torque on each, in its frame; the action. All are clamped to +-5 and in the world
    frame unless said otherwise, with quaternions (x, y, z, w). Action (20): target angle of each driven joint, scaled
    to its range; the last joints of the four fingers are coupled to the joints before them.
    """

    name, contacts = "shadow_hand", (18, 96)
    obs_size, action_size = 211, 20
    frame_skip, dt = 4, 0.01667
    outputs = ("sensordata", "qfrc_actuator")
    place = (0.0, -0.39, 0.60)
    parts: ClassVar[tuple[str, ...]] = STATE

    def __init__(self, robot: Robot):
        super().__init__(robot)
        model = robot.model
        self._wrench = Wrench(robot, TIPS)
        first = model.sensor(f"{TIPS[0]} {MOTION[0]} of joint").adr[0]
        order = torch.tensor(ORDER, device=robot.device)
        self._tips = first + 13 * torch.arange(len(TIPS), device=robot.device)[:, None] + order  # [5, 13] columns

    @classmethod
    def source(cls) -> mujoco.MjSpec:
        spec = mujoco.MjSpec.from_file(str(model_file("shadow_hand")))
        spec.body(f"{PREFIX}hand mount").pos = (0, 0, 0.5)
        for body in spec.bodies:
            body.gravcomp = float(body.name.startswith(PREFIX))
        spec.body("object").pos = cls.place
        spec.joint("object:joint").damping = [0, 0, 0]
        goal = spec.body("target")
        spec.delete(spec.joint("target:joint"))
        goal.mocap, goal.pos = True, [a + b for a, b in zip(cls.place, DISPLAYED, strict=True)]
        spec.geom("floor0").pos = (0, 0, 0)
        look(spec, cls.place)
        return spec

    @classmethod
    def edit(cls, spec: mujoco.MjSpec) -> None:
        super().edit(spec)
        for sensor in list(spec.sensors):
            spec.delete(sensor)
        for tip in TIPS:
            add_sensors(spec, MOTION, mujoco.mjtObj.mjOBJ_XBODY, tip, " of joint")
        for tip in TIPS:
            Wrench.sense(spec, tip)

    def measure(self, fields: Fields, memory: Memory) -> dict[str, Tensor]:
        tips = fields["sensordata"][:, self._tips]  # [N, 5, 13]
        begun = memory["begun"][:, None]
        return {
            **super().measure(fields, memory),
            "joint_forces": 10 * fields["qfrc_actuator"][:, : self.joints] * begun,
            "fingertips": tips.flatten(1),
            "fingertip_places": tips[:, :, :3].flatten(1),
            "fingertip_forces": 10 * self._wrench.at_origins(fields) * begun,
        }


class ShadowHandFull(ShadowHand):
    """ShadowHand observed without forces (157)."""

    name = "shadow_hand_full"
    obs_size = 157
    parts: ClassVar[tuple[str, ...]] = tuple(part for part in STATE if not part.endswith("forces"))


class ShadowHandFullNoVel(ShadowHand):
    """ShadowHand observed without forces and velocities (77)."""

    name = "shadow_hand_full_no_vel"
    obs_size = 77
    parts: ClassVar[tuple[str, ...]] = ("joints", "pose", "goal", "error", "fingertip_places", "action")
