"""Base of Isaac Gym's Ant and Humanoid (Makoviychuk et al. 2021): a robot on a free base runs to a distant point.

Differences of both tasks from Isaac's: MuJoCo's contacts, with the Newton solver and elliptic cones; an episode
restarts in the step that ends it, with its final observation returned (Isaac: one step later, with a row that belongs
to neither episode), and has 999 steps; a step's progress is computed exactly, from the difference of squared distances
(Isaac: from the difference of two float32 numbers near 60,000, so in multiples of .004).
"""

from typing import ClassVar

import torch
from torch import Tensor

from pql.envs.mujoco.engine import Fields
from pql.envs.mujoco.isaac.measure import Wrench, into, roll_yaw, rotation, unscale
from pql.envs.mujoco.task import HOLD, Draw, Memory, Robot, Start, Task, Verdict
from pql.types import Obs

TARGET = 1000.0  # metres along x: the point to run to


class Runner(Task):
    """Observations: height, linear and angular velocity in the base's frame, three angles (:meth:`angles`),
    uprightness, heading, joint positions scaled to their ranges, joint velocities, forces (:meth:`forces`), actions.

    The free joint comes first in the model, and the other joints have actuators in their own order.

    Attributes:
        links: bodies whose net wrench is observed.
        height: of the base at the start of an episode, metres; below ``lowest`` it ends, with the reward ``death``.
        alive: reward per step.
        spin, pace: scales of angular and joint velocities in observations.
    """

    frame_skip, dt = 2, 0.0166
    time_limit = 999
    terms = ("progress", "alive", "up", "heading", "action_cost", "energy_cost", "limit_cost", "fall")
    metrics: ClassVar[tuple[str, ...]] = ("distance",)
    outputs: ClassVar[tuple[str, ...]] = ("sensordata",)
    model, refused = "fast", "this robot differs from the shipped model"
    impratio = HOLD
    links: ClassVar[tuple[str, ...]]
    height: ClassVar[float]
    lowest: ClassVar[float]
    death: ClassVar[float]
    alive: ClassVar[float]
    spin: ClassVar[float] = 1.0
    pace: ClassVar[float]

    def __init__(self, robot: Robot):
        super().__init__(robot)
        self.low, self.high = robot.tensor(robot.model.jnt_range[1:]).unbind(1)
        # 0, or the nearest limit if 0 is out of range
        self.rest = torch.zeros_like(self.low).clamp(self.low, self.high)
        self._target = robot.tensor([TARGET, 0.0])
        self._wrench = Wrench(robot, self.links)

    def start(self, count: int, draw: Draw) -> Start:
        joints = len(self.rest)
        qpos, qvel = self.robot.qpos0.repeat(count, 1), self.robot.qvel0.repeat(count, 1)
        qpos[:, 2].fill_(self.height)
        qpos[:, 7:] = (self.rest + draw.uniform(-0.2, 0.2, count, joints)).clamp(self.low, self.high)
        qvel[:, 6:] = draw.uniform(-0.1, 0.1, count, joints)
        return Start(qpos, qvel)

    def track(self, fields: Fields) -> Memory:
        return {"place": fields["qpos"][:, :2].clone()}

    def derive(self, fields: Fields) -> Fields:
        """Return ``frame``, the base's orientation [N, 3, 3]; ``ahead``, the cosine between its heading and the target
        [N]; ``scaled``, joint positions scaled to -1..1 in their ranges [N, J]."""
        qpos = fields["qpos"]
        frame, away = rotation(qpos[:, 3:7]), self._target - qpos[:, :2]
        ahead = (frame[:, :2, 0] * torch.nn.functional.normalize(away, dim=1)).sum(1)
        return {"frame": frame, "ahead": ahead, "scaled": unscale(qpos[:, 7:], self.low, self.high)}

    def wrenches(self, fields: Fields) -> Tensor:
        """Return net force and torque on each of ``links`` about its origin, in its frame: [N, 6 x links]."""
        return self._wrench.at_origins(fields)

    def angles(self, yaw: Tensor, roll: Tensor, bearing: Tensor) -> Tensor:
        """Return the observed yaw, roll and angle to the target, [N, 3], from yaw, roll and the target's bearing."""
        raise NotImplementedError

    def forces(self, fields: Fields) -> list[Tensor]:
        """Return scaled force observations, [N, ...] each."""
        raise NotImplementedError

    def costs(self, fields: Fields) -> dict[str, Tensor]:
        """Return the terms ``action_cost``, ``energy_cost`` and ``limit_cost``: [N] each."""
        raise NotImplementedError

    def observe(self, fields: Fields, memory: Memory) -> Obs:
        qpos, qvel, frame = fields["qpos"], fields["qvel"], fields["frame"]
        roll, yaw = roll_yaw(frame)
        # as in Isaac, z is used where y is expected
        angles = self.angles(yaw, roll, torch.atan2(-qpos[:, 2], TARGET - qpos[:, 0]))
        parts = [qpos[:, 2:3], into(frame, qvel[:, :3]), self.spin * qvel[:, 3:6]]
        parts += [angles, frame[:, 2, 2:], fields["ahead"][:, None], fields["scaled"], self.pace * qvel[:, 6:]]
        return {"policy": torch.cat([*parts, *self.forces(fields), fields["ctrl"]], 1)}

    def judge(self, fields: Fields, memory: Memory) -> Verdict:
        place, before = fields["qpos"][:, :2], memory["place"]
        up, ahead = fields["frame"][:, 2, 2], fields["ahead"]
        nearer = ((before - place) * (before + place - 2 * self._target)).sum(1)  # difference of the squared distances
        both = torch.linalg.vector_norm(torch.stack((before, place)) - self._target, dim=2).sum(0)
        fallen = fields["qpos"][:, 2] < self.lowest
        terms = {
            "progress": nearer / both / self.dt,
            "alive": torch.full_like(up, self.alive),
            "up": 0.1 * (up > 0.93),
            "heading": 0.625 * ahead.clamp(max=0.8),
            **self.costs(fields),
        }
        earned = torch.stack([*terms.values()]).masked_fill_(fallen, 0.0)
        terms = {**dict(zip(terms, earned, strict=True)), "fall": self.death * fallen.to(up)}
        return Verdict(terms, fallen, {"distance": place[:, 0] - before[:, 0]})
