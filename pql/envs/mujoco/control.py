"""Arms and pendulums of Gymnasium's MuJoCo suite, with the definitions of its ``-v5`` classes."""

import math

import torch
from torch import Tensor

from pql.envs.mujoco.engine import Fields
from pql.envs.mujoco.suite import GymTask, ctrl_cost, finite
from pql.envs.mujoco.task import Draw, Memory, Robot, Start, Verdict
from pql.types import Obs


class Reacher(GymTask):
    name, xml, contacts = "reacher", "reacher.xml", (0, 2)
    frame_skip, dt = 2, 0.02
    obs_size, action_size = 10, 2
    terms = ("reward_dist", "reward_ctrl")
    time_limit = 50
    noise = 0.1
    outputs = ("xpos",)

    def __init__(self, robot: Robot):
        super().__init__(robot)
        self._tip, self._target = robot.body("fingertip"), robot.body("target")

    def start(self, count: int, draw: Draw) -> Start:
        """Draw the target uniformly in a disc of radius 0.2, equivalent to gymnasium's rejection sampling."""
        robot = self.robot
        qpos = robot.qpos0 + draw.uniform(-0.1, 0.1, count, 4)
        radius, angle = 0.2 * draw.uniform(0.0, 1.0, count).sqrt_(), draw.uniform(-math.pi, math.pi, count)
        qpos[:, 2:] = torch.stack((radius * angle.cos(), radius * angle.sin()), 1)
        qvel = robot.qvel0 + draw.uniform(-0.005, 0.005, count, 4)
        qvel[:, 2:] = 0.0
        return Start(qpos, qvel)

    def _gap(self, fields: Fields) -> Tensor:
        return fields["xpos"][:, self._tip] - fields["xpos"][:, self._target]

    def observe(self, fields: Fields, memory: Memory) -> Obs:
        angle = fields["qpos"][:, :2]
        parts = (angle.cos(), angle.sin(), fields["qpos"][:, 2:], fields["qvel"][:, :2], self._gap(fields)[:, :2])
        return {"policy": torch.cat(parts, 1)}

    def judge(self, fields: Fields, memory: Memory) -> Verdict:
        distance = torch.linalg.vector_norm(self._gap(fields), dim=1)
        return Verdict({"reward_dist": -distance, "reward_ctrl": ctrl_cost(fields, 1.0)})


class Pusher(GymTask):
    name, xml, contacts = "pusher", "pusher_v5.xml", (7, 7)
    frame_skip, dt = 5, 0.05
    obs_size, action_size, ctrl_limit = 23, 7, 2.0
    terms = ("reward_dist", "reward_ctrl", "reward_near")
    time_limit = 100
    noise = 0.005  # of the arm's velocities; its pose is the default
    outputs = ("xpos",)
    TRIES = 24  # 38 % are too near the goal: all 24, once in ten thousand million episodes

    def __init__(self, robot: Robot):
        super().__init__(robot)
        self._tip, self._object, self._goal = (robot.body(name) for name in ("tips_arm", "object", "goal"))

    def start(self, count: int, draw: Draw) -> Start:
        """Draw the object uniformly in a rectangle without a disc around the goal: use the first draw outside it."""
        tried = torch.stack((draw.uniform(-0.3, 0.0, count, self.TRIES), draw.uniform(-0.2, 0.2, count, self.TRIES)), 2)
        far = torch.linalg.vector_norm(tried, dim=2) > 0.17  # [K, TRIES]
        first = far.to(torch.uint8).argmax(1)
        place = tried.gather(1, first[:, None, None].expand(-1, 1, 2))[:, 0]
        qpos = self.robot.qpos0.repeat(count, 1)
        qpos[:, -4:-2], qpos[:, -2:] = place, 0.0
        qvel = self.robot.qvel0 + draw.uniform(-self.noise, self.noise, count, len(self.robot.qvel0))
        qvel[:, -4:] = 0.0
        return Start(qpos, qvel)

    def observe(self, fields: Fields, memory: Memory) -> Obs:
        places = (fields["xpos"][:, body] for body in (self._tip, self._object, self._goal))
        return {"policy": torch.cat((fields["qpos"][:, :7], fields["qvel"][:, :7], *places), 1)}

    def judge(self, fields: Fields, memory: Memory) -> Verdict:
        tip, pushed, goal = (fields["xpos"][:, body] for body in (self._tip, self._object, self._goal))
        terms = {
            "reward_dist": -torch.linalg.vector_norm(pushed - goal, dim=1),
            "reward_ctrl": ctrl_cost(fields, 0.1),
            "reward_near": -0.5 * torch.linalg.vector_norm(pushed - tip, dim=1),
        }
        return Verdict(terms)


class InvertedPendulum(GymTask):
    name, xml, contacts = "invertedpendulum", "inverted_pendulum.xml", (0, 2)
    frame_skip, dt = 2, 0.04
    obs_size, action_size, ctrl_limit = 4, 1, 3.0
    terms = ("reward_survive",)
    noise = 0.01

    def observe(self, fields: Fields, memory: Memory) -> Obs:
        return {"policy": torch.cat((fields["qpos"], fields["qvel"]), 1)}

    def judge(self, fields: Fields, memory: Memory) -> Verdict:
        upright = finite(fields) & (fields["qpos"][:, 1].abs() <= 0.2)
        return Verdict({"reward_survive": upright.to(fields["qpos"])}, ~upright)


class InvertedDoublePendulum(GymTask):
    name, xml, contacts = "inverteddoublependulum", "inverted_double_pendulum.xml", (0, 4)
    frame_skip, dt = 5, 0.05
    obs_size, action_size = 9, 1
    terms = ("reward_survive", "distance_penalty", "velocity_penalty")
    noise, normal_velocity = 0.1, True
    outputs = ("site_xpos", "qfrc_constraint")

    def observe(self, fields: Fields, memory: Memory) -> Obs:
        angle, velocity = fields["qpos"][:, 1:], fields["qvel"].clamp(-10.0, 10.0)
        push = fields["qfrc_constraint"][:, :1].clamp(-10.0, 10.0)
        return {"policy": torch.cat((fields["qpos"][:, :1], angle.sin(), angle.cos(), velocity, push), 1)}

    def judge(self, fields: Fields, memory: Memory) -> Verdict:
        x, height = fields["site_xpos"][:, 0, 0], fields["site_xpos"][:, 0, 2]
        upright, spin = height > 1.0, fields["qvel"][:, 1:].square()
        terms = {
            "reward_survive": upright.to(x) * 10.0,
            "distance_penalty": -(0.01 * x.square() + (height - 2.0).square()),
            "velocity_penalty": -(0.001 * spin[:, 0] + 0.005 * spin[:, 1]),
        }
        return Verdict(terms, ~upright)
