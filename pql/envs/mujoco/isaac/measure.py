"""Measurements shared by the Isaac Gym tasks: rotations, scaled joint positions, wrenches on a link."""

from collections.abc import Sequence
from functools import lru_cache

import mujoco
import numpy as np
import torch
from torch import Tensor

from pql.envs.mujoco.engine import Fields
from pql.envs.mujoco.task import Robot


def rotation(quat: Tensor) -> Tensor:
    """Convert unit quaternions (w, x, y, z) [..., 4] to body-to-world matrices [..., 3, 3]."""
    # at small N the number of calls dominates: every entry is a constant and two products
    products = (quat.unsqueeze(-1) * (2 * quat[..., None, 1:])).flatten(-2)
    first, second, one, signs = _entries(quat.device, quat.dtype)
    half = torch.addcmul(one, products.index_select(-1, first), signs[0])
    return half.addcmul_(products.index_select(-1, second), signs[1]).unflatten(-1, (3, 3))


@lru_cache
def _entries(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """For each of a rotation's nine entries, return the two products of (w, x, y, z) with (x, y, z) it adds, its
    constant, and the products' signs."""
    pairs = ("-yy-zz", "+xy-wz", "+xz+wy", "+xy+wz", "-xx-zz", "+yz-wx", "+xz-wy", "+yz+wx", "-xx-yy")
    where = {a + b: 3 * i + k for i, a in enumerate("wxyz") for k, b in enumerate("xyz")}
    index = [torch.tensor([where[pair[i : i + 2]] for pair in pairs], device=device) for i in (1, 4)]
    signs = torch.tensor([[float(pair[i] + "1") for pair in pairs] for i in (0, 3)], device=device, dtype=dtype)
    return *index, torch.eye(3, device=device, dtype=dtype).flatten(), signs


def right(quat: Tensor) -> Tensor:
    """Return matrices [..., 4, 4] that multiply a quaternion by ``quat`` [..., 4] from the right."""
    which, signs = _turned(quat.device, quat.dtype)
    return (quat.index_select(-1, which) * signs).unflatten(-1, (4, 4))


@lru_cache
def _turned(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return, for each of the sixteen entries, the component of (w, x, y, z), and its sign."""
    rows = ("+w-x-y-z", "+x+w+z-y", "+y-z+w+x", "+z+y-x+w")
    cells = "".join(rows)
    signs = torch.tensor([float(sign + "1") for sign in cells[::2]], device=device, dtype=dtype)
    return torch.tensor(["wxyz".index(axis) for axis in cells[1::2]], device=device), signs


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return the quaternions (w, x, y, z) [..., 4] of rotation ``b``, then ``a``."""
    # no matrix product: a GPU may compute it with a 10-bit mantissa
    return (right(b) * a.unsqueeze(-2)).sum(-1)


def conjugate(quat: Tensor) -> Tensor:
    """Return the inverse of unit quaternions (w, x, y, z) [..., 4]."""
    return torch.cat((quat[..., :1], -quat[..., 1:]), -1)


def into(matrix: Tensor, vector: Tensor) -> Tensor:
    """Rotate world vectors [..., 3] into the frame of ``matrix`` [..., 3, 3] (body to world): by its transpose. Like
    ``times``, but term by term: a sum over an axis of three is several times slower on a CPU."""
    x, y, z = vector.split(1, -1)
    first, second, third = matrix.unbind(-2)
    return torch.addcmul(torch.addcmul(x * first, y, second), z, third)


def roll_yaw(frame: Tensor) -> tuple[Tensor, Tensor]:
    """Return roll and yaw (about x and z, of roll, pitch, yaw) of rotations [N, 3, 3]: (-pi, pi], each [N]."""
    return torch.atan2(frame[:, 2, 1], frame[:, 2, 2]), torch.atan2(frame[:, 1, 0], frame[:, 0, 0])


def unscale(q: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Scale positions (any shape) from their range [low, high] to [-1, 1]."""
    return (2 * q - low - high) / (high - low)


def add_sensors(spec: mujoco.MjSpec, kinds: Sequence[str], of: mujoco.mjtObj, name: str, label: str = "") -> None:
    """Add sensors of ``kinds`` on object ``name`` of type ``of``; they are called ``name kind`` + ``label``."""
    for kind in kinds:
        sensor = getattr(mujoco.mjtSensor, f"mjSENS_{kind.upper()}")
        spec.add_sensor(name=f"{name} {kind}{label}", type=sensor, objtype=of, objname=name)


class Wrench:
    """The net wrench on a link, as Isaac Gym's force sensors report it: zero at rest, gravity included.

    Force = mass x acceleration of the centre of mass, torque about it = I alpha + omega x I omega (Newton and Euler),
    so contact and joint forces are not needed. :meth:`sense` adds the sensors to the model; :meth:`read` computes the
    wrenches in the link's frame from their readings (``sensordata``).

    Args:
        robot: the compiled model.
        links: names of the bodies given to ``sense``, K of them.
    """

    KINDS = ("framelinacc", "frameangacc", "frameangvel", "framequat")
    SIZES = (9, 4)  # three vectors and a quaternion

    def __init__(self, robot: Robot, links: tuple[str, ...]):
        model = robot.model
        ids = [model.body(name).id for name in links]
        self.mass = robot.tensor(model.body_mass[ids])  # [K]
        self.inertia = robot.tensor(model.body_inertia[ids])  # [K, 3] along the principal axes
        self.origin = -robot.tensor(model.body_ipos[ids])  # [K, 3] the link's origin, from its centre of mass
        # an accelerometer reads -gravity at rest; the other two vectors need no correction
        self.gravity = robot.tensor(np.outer([1.0, 0.0, 0.0], model.opt.gravity))
        start = [model.sensor(f"{name} {self.KINDS[0]}").adr[0] for name in links]  # the other kinds follow
        self.first, self.count = start[0], len(start)
        assert start == [self.first + 13 * i for i in range(self.count)]  # the links' sensors are contiguous
        axes = torch.tensor(model.body_iquat[ids], device=robot.device, dtype=robot.dtype)
        self.principal = rotation(axes).mT  # [K, 3, 3] link -> principal axes

    @classmethod
    def sense(cls, spec: mujoco.MjSpec, link: str) -> None:
        """Add the sensors for ``link``; acceleration is measured at the centre of mass (``objtype`` body)."""
        add_sensors(spec, cls.KINDS, mujoco.mjtObj.mjOBJ_BODY, link)

    def read(self, fields: Fields) -> tuple[Tensor, Tensor]:
        """Return force [N, K, 3] and torque about the centre of mass [N, K, 3], both in the link's frame."""
        readings = fields["sensordata"][:, self.first : self.first + 13 * self.count].unflatten(1, (self.count, 13))
        vectors, quat = readings.split(self.SIZES, -1)
        axes = rotation(quat)  # of the principal axes, in the world
        felt = into(axes.unsqueeze(-3), vectors.unflatten(-1, (3, 3)) + self.gravity)
        linear, turn, spin = felt.unbind(-2)
        torque = self.inertia * turn + torch.linalg.cross(spin, self.inertia * spin)
        both = torch.stack((self.mass[:, None] * linear, torque))
        force, torque = into(self.principal, both).unbind(0)
        return force, torque

    def at_origins(self, fields: Fields) -> Tensor:
        """Return force, and torque about the link's origin (its joint), link by link: [N, 6 K]."""
        force, torque = self.read(fields)
        return torch.cat((force, self.about(force, torque, self.origin)), 2).flatten(1)

    @staticmethod
    def about(force: Tensor, torque: Tensor, arm: Tensor) -> Tensor:
        """Return the torque about the point at ``arm`` from the centre of mass; all [..., 3] in one frame."""
        lever, push = torch.broadcast_tensors(arm, force)
        return torque - torch.linalg.cross(lever, push)
