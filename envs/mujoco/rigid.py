"""Rotations and forces of rigid bodies, batched: what observations of robots are made of.

Quaternions are MuJoCo's, (w, x, y, z); matrices map from the body's frame to the world's.
"""

import torch
from torch import Tensor


def matrix(quat: Tensor) -> Tensor:
    """[N, 4] unit quaternions -> [N, 3, 3]."""
    w, x, y, z = quat.unbind(-1)
    rows = (
        *(1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)),
        *(2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)),
        *(2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)),
    )
    return torch.stack(rows, -1).unflatten(-1, (3, 3))


def into(frame: Tensor, vector: Tensor) -> Tensor:
    """World vectors [..., 3] in the frame [..., 3, 3] of a body: ``frame^T vector``."""
    return (frame * vector[..., :, None]).sum(-2)


def out_of(frame: Tensor, vector: Tensor) -> Tensor:
    """Vectors of a body's frame in the world's: ``frame vector``."""
    return (frame * vector[..., None, :]).sum(-1)


def roll_yaw(quat: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the last of the angles about x, y and z, in (-pi, pi], each [N]."""
    w, x, y, z = quat.unbind(-1)
    roll = torch.atan2(2 * (w * x + y * z), 1 - 2 * (x * x + y * y))
    yaw = torch.atan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z))
    return roll, yaw


def net_wrench(
    mass: Tensor, inertia: Tensor, frame: Tensor, acceleration: Tensor, spin: Tensor, turning: Tensor, arm: Tensor
) -> tuple[Tensor, Tensor]:
    """What all forces and torques on bodies come to, gravity included: Newton's and Euler's equations.

    Args:
        mass: [K]; ``inertia``: [K, 3] about the principal axes, the columns of ``frame`` [N, K, 3, 3].
        acceleration: of the centre of mass, [N, K, 3]; ``spin`` and ``turning``: angular velocity and acceleration.
        arm: from the point about which torques count to the centre of mass, [N, K, 3]. All in the world's frame.

    Returns:
        Force and torque, [N, K, 3], in the world's frame.
    """
    force = mass[:, None] * acceleration
    own = into(frame, spin)
    torque = inertia * into(frame, turning) + torch.linalg.cross(own, inertia * own)
    return force, out_of(frame, torque) + torch.linalg.cross(arm, force)
