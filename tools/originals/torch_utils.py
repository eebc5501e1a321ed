"""Reimplementation of the functions of isaacgym.torch_utils that tasks import; quaternions are (x, y, z, w)."""

import math
from typing import Any

import torch
from torch import Tensor

DOUBLE = torch.float64


def to_torch(x: Any, dtype: torch.dtype = torch.float, device: str = "cpu", requires_grad: bool = False) -> Tensor:
    return torch.as_tensor(x, dtype=DOUBLE if dtype.is_floating_point else dtype)


def quat_mul(a: Tensor, b: Tensor) -> Tensor:
    v, w, u, s = a[..., :3], a[..., 3:], b[..., :3], b[..., 3:]
    return torch.cat((w * u + s * v + torch.linalg.cross(v, u), w * s - (v * u).sum(-1, keepdim=True)), -1)


def quat_conjugate(a: Tensor) -> Tensor:
    return torch.cat((-a[..., :3], a[..., 3:]), -1)


def quat_rotate(q: Tensor, v: Tensor) -> Tensor:
    across = 2.0 * torch.linalg.cross(q[..., :3], v)
    return v + q[..., 3:] * across + torch.linalg.cross(q[..., :3], across)


def quat_rotate_inverse(q: Tensor, v: Tensor) -> Tensor:
    return quat_rotate(quat_conjugate(q), v)


def quat_from_angle_axis(angle: Tensor, axis: Tensor) -> Tensor:
    half = angle.unsqueeze(-1) / 2
    return torch.cat((axis * half.sin(), half.cos()), -1)


def get_basis_vector(q: Tensor, v: Tensor) -> Tensor:
    return quat_rotate(q, v)


def normalize(x: Tensor) -> Tensor:
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def get_euler_xyz(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Roll, pitch and yaw in [0, 2 pi)."""
    x, y, z, w = q[:, 0], q[:, 1], q[:, 2], q[:, 3]
    roll = torch.atan2(2 * (w * x + y * z), w * w - x * x - y * y + z * z)
    pitch = torch.asin((2 * (w * y - z * x)).clamp(-1.0, 1.0))
    yaw = torch.atan2(2 * (w * z + x * y), w * w + x * x - y * y - z * z)
    whole = 2 * math.pi
    return torch.remainder(roll, whole), torch.remainder(pitch, whole), torch.remainder(yaw, whole)


def normalize_angle(x: Tensor) -> Tensor:
    return torch.atan2(torch.sin(x), torch.cos(x))


def scale(x: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    return lower + (x + 1.0) / 2 * (upper - lower)


def unscale(x: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    return (2.0 * x - upper - lower) / (upper - lower)


def tensor_clamp(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return torch.maximum(torch.minimum(x, high), low)


def torch_rand_float(lower: float, upper: float, shape: tuple[int, int], device: str) -> Tensor:
    return lower + (upper - lower) * torch.rand(shape[0], shape[1], dtype=DOUBLE)


def torch_random_dir_2(shape: tuple[int, int], device: str) -> Tensor:
    angle = torch_rand_float(-math.pi, math.pi, shape, device).squeeze(-1)
    return torch.stack((angle.cos(), angle.sin()), -1)


def get_axis_params(value: float, axis_idx: int, x_value: float = 0.0, n_dims: int = 3) -> list[float]:
    return [value if axis == axis_idx else x_value for axis in range(n_dims)]
