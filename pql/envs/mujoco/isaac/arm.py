"""An arm's kinematics and inertia from its joint positions, and operational-space control: batched torch, any device.

Engines provide Jacobians and mass matrices too, but with different layouts and for the start of the last physics step.
The results here are computed from ``qpos``, so they describe the current state, with the same code for both engines.
"""

import copy
from collections.abc import Sequence
from typing import NamedTuple

import mujoco
import numpy as np
import torch
from torch import Tensor

from pql.envs.mujoco.isaac.measure import product, right, rotation
from pql.envs.mujoco.task import Robot


class Pose(NamedTuple):
    """World poses of the arm's J links and its hand; F = J + 1."""

    place: Tensor  # [N, F, 3] origins
    quat: Tensor  # [N, F, 4] as w, x, y, z; continuous in the joint positions
    frame: Tensor  # [N, F, 3, 3] link to world


class Arm:
    """A chain of J hinges, each about its link's z axis, with a hand at its end and S sliding fingers on the hand.

    Args:
        robot: the compiled model, in float64, because products of float32 matrices may be rounded
            (``placement.matmul``).
        hinges: the joints, starting at the base.
        hand: a body fixed to the last link.
        slides: joints between the hand and its fingers.
    """

    def __init__(self, robot: Robot, hinges: Sequence[str], hand: str, slides: Sequence[str] = ()):
        model = robot.model
        joints = [model.joint(name) for name in hinges]
        assert all((joint.axis == (0, 0, 1)).all() and (joint.pos == 0).all() for joint in joints)
        links = [*(int(joint.bodyid[0]) for joint in joints), robot.body(hand)]
        self.count = len(joints)
        data = mujoco.MjData(model)
        mujoco.mj_kinematics(model, data)
        place, quat = zip(*(_relative(data, *pair) for pair in zip([0, *links], links, strict=False)), strict=True)
        # each in the previous link's frame
        self._place, self._quat = robot.tensor(np.array(place)), robot.tensor(np.array(quat))
        parts = [body for body in range(links[0], model.nbody) if _carrier(model, body, links) is not None]
        carriers = np.array([_carrier(model, body, links) for body in parts])
        self._carrier = torch.tensor(carriers, device=robot.device)
        turn = data.xmat[links].reshape(-1, 3, 3)[carriers].transpose(0, 2, 1)  # world -> carrier

        def within(points: np.ndarray) -> np.ndarray:
            return (turn @ points[..., None])[..., 0]

        self._com = robot.tensor(within(data.xipos[parts] - data.xpos[links][carriers]))  # [B, 3] in the carrier
        self._principal = robot.tensor(turn @ data.ximat[parts].reshape(-1, 3, 3))  # [B, 3, 3] principal -> carrier
        moved = [within(_slid(model, data, name)[parts] - data.xipos[parts]) for name in slides]
        self._slide = robot.tensor(np.array(moved).reshape(len(slides), len(parts), 3).transpose(1, 0, 2))  # [B, S, 3]
        self._mass = robot.tensor(np.sqrt(model.body_mass[parts]))[:, None, None]
        self._inertia = robot.tensor(np.sqrt(model.body_inertia[parts]))[:, None]
        # [B, J, 1]: 1 where the hinge moves the part
        self._moves = robot.tensor(carriers[:, None] >= np.arange(self.count))[..., None]

    def pose(self, q: Tensor) -> Pose:
        """Return the poses for joint positions [N, J]."""
        half, still = q / 2, torch.zeros_like(q)
        turns = product(self._quat[:-1], torch.stack((half.cos(), still, still, half.sin()), -1))
        steps = right(torch.cat((turns, self._quat[-1:].expand(len(q), 1, 4)), 1))  # [N, F, 4, 4]
        chain = [turns[:, 0, :, None]]
        for link in range(1, self.count + 1):
            chain.append(steps[:, link] @ chain[-1])
        quat = torch.stack(chain, 1).squeeze(-1)
        frame = rotation(quat)
        along = (frame[:, :-1] @ self._place[1:, :, None]).squeeze(-1)
        place = torch.cat((self._place[:1].expand(len(q), 1, 3), along), 1).cumsum(1)
        return Pose(place, quat, frame)

    def jacobian(self, pose: Pose, point: Tensor) -> Tensor:
        """Return the Jacobian [N, 6, J] of a hand point [N, 3]: linear and angular velocity per joint velocity."""
        axis = pose.frame[:, :-1, :, 2]
        return torch.cat((torch.linalg.cross(axis, point[:, None] - pose.place[:, :-1]), axis), -1).mT

    def mass(self, pose: Pose, slides: Tensor) -> Tensor:
        """Return the joints' inertia matrix [N, J, J] with fingers at ``slides`` [N, S], excluding motor armature. M =
        sum over bodies of m Jv' Jv + Jw' I Jw, computed as R R' with one row of R per joint."""
        com = self._com + (slides[:, None, :, None] * self._slide).sum(2)  # [N, B, 3]
        frame = pose.frame[:, self._carrier]
        com = pose.place[:, self._carrier] + (frame @ com.unsqueeze(-1)).squeeze(-1)
        axis = pose.frame[:, None, :-1, :, 2]  # [N, 1, J, 3]
        lever = com[:, :, None] - pose.place[:, None, :-1]  # [N, B, J, 3]
        linear = torch.linalg.cross(axis.expand_as(lever), lever) * self._mass
        angular = (axis @ (frame @ self._principal)) * self._inertia
        rows = (torch.cat((linear, angular), -1) * self._moves).transpose(1, 2).flatten(2)  # [N, J, 6 B]
        return rows @ rows.mT


class OperationalSpace:
    """Torques that give the hand an acceleration independent of the arm's inertia (Khatib 1987), with a null-space term
    that pulls the joints to ``home``:

        torque = J' L a + (1 - J' L J M^-1) M b,    L = (J M^-1 J')^-1,
        a = kp delta - kd v,    b = kp0 (home - q) - kd0 dq/dt,    kd = 2 sqrt(kp).
    """

    KP, KP_HOME = 150.0, 10.0

    def __init__(self, home: Tensor):
        self.home = home

    def torque(self, mass: Tensor, jacobian: Tensor, velocity: Tensor, delta: Tensor, q: Tensor, dq: Tensor) -> Tensor:
        """Return torques [N, J] from M [N, J, J], J [N, 6, J], the hand's velocity v [N, 6], its commanded displacement
        delta [N, 6], and the joints' positions q and velocities dq [N, J]."""
        wanted = self.KP * delta - 2 * self.KP**0.5 * velocity
        away = (self.home - q + torch.pi).remainder(2 * torch.pi) - torch.pi
        back = mass @ (self.KP_HOME * away - 2 * self.KP_HOME**0.5 * dq).unsqueeze(-1)
        eased = _solve(mass, jacobian.mT)  # M^-1 J'
        push = _solve(jacobian @ eased, wanted.unsqueeze(-1) - eased.mT @ back)
        return (jacobian.mT @ push + back).squeeze(-1)


def _solve(matrix: Tensor, right_side: Tensor) -> Tensor:
    """Solve without the singularity check, which would synchronise with the host."""
    return torch.linalg.solve_ex(matrix, right_side, check_errors=False)[0]


def _relative(data: mujoco.MjData, parent: int, body: int) -> tuple[np.ndarray, np.ndarray]:
    """Return position and orientation of a body in the frame of another."""
    place, quat, back = np.zeros(3), np.zeros(4), np.zeros(4)
    mujoco.mju_negQuat(back, data.xquat[parent])
    mujoco.mju_rotVecQuat(place, data.xpos[body] - data.xpos[parent], back)
    mujoco.mju_mulQuat(quat, back, data.xquat[body])
    return place, quat


def _carrier(model: mujoco.MjModel, body: int, links: Sequence[int]) -> int | None:
    """Return the link that carries a body: the body itself or its nearest ancestor link. None: not part of the arm."""
    while body:
        if body in links:
            return links.index(body)
        body = int(model.body_parentid[body])
    return None


def _slid(model: mujoco.MjModel, data: mujoco.MjData, joint: str) -> np.ndarray:
    """Return all bodies' centres of mass with a slide moved on by one metre."""
    data = copy.copy(data)
    data.qpos[model.joint(joint).qposadr[0]] += 1.0
    mujoco.mj_kinematics(model, data)
    return data.xipos.copy()
