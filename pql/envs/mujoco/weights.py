"""Constants that MuJoCo derives from a model's masses, in batched torch for N simulations, for engines without them.

They scale the softness of constraints (contacts, limits, friction). With randomised masses and the nominal constants, a
simulation would have slightly softer or harder contacts.
"""

import mujoco
import numpy as np
import torch
from torch import Tensor


class InverseWeights:
    """``dof_invweight0`` and ``body_invweight0`` as ``mj_setConst`` computes them: the mobility of degrees of freedom
    and bodies in the default pose.

    In one pose the inertia matrix is linear in the bodies' masses m and principal inertias I, M = rest + sum m A +
    sum I B, and the weights, means of diagonals of J M^-1 J', are linear in its inverse. So both are one product with
    constants, before and after an inverse.

    Args:
        model: the nominal model; armature and other constants are its own for every simulation.
        device: device of the tensors. The products are in float64, so the float32 matmul precision does not matter.
    """

    def __init__(self, model: mujoco.MjModel, device: torch.device):
        nv, nbody = model.nv, model.nbody
        data = mujoco.MjData(model)
        mujoco.mj_forward(model, data)
        jacobian = np.zeros((nbody, 2, 3, nv))  # of centres of mass, linear and angular
        for body in range(nbody):
            mujoco.mj_jacBodyCom(model, data, *jacobian[body], body)
        principal = data.ximat.reshape(-1, 3, 3).transpose(0, 2, 1) @ jacobian[:, 1]
        parts = np.concatenate((_gram(jacobian[:, 0]).sum(1, keepdims=True), _gram(principal)), 1)  # [nbody, 4, nv, nv]
        full = np.zeros((nv, nv))
        mujoco.mj_fullM(model, data, full)
        alone = model.dof_simplenum > 0  # MuJoCo leaves out their armature, only here
        full[alone, alone] -= model.dof_armature[alone]
        nominal = np.concatenate((model.body_mass[:, None], model.body_inertia), 1)
        rest = full - np.tensordot(nominal, parts)
        axes = np.einsum("di,ei,ej->dij", _alike(model), np.eye(nv), np.eye(nv))
        moved = _gram(jacobian).mean(2)  # [nbody, 2, nv, nv]
        slides = model.body_simple == 2  # bodies with only slides: MuJoCo uses 1 / mass, and no rotational part
        moved[slides, 0] = _gram(np.eye(nv)[model.body_dofadr[slides]])
        probes = np.concatenate((axes, moved.reshape(-1, nv, nv)))  # [nv + 2 nbody, nv, nv]
        self._either = torch.tensor(~slides[:, None], device=device)
        flat = (part.reshape(-1, nv * nv) for part in (parts, rest, probes))
        self._parts, self._rest, self._probes = (torch.tensor(p, device=device, dtype=torch.float64) for p in flat)
        self._nv = nv

    def __call__(self, mass: Tensor, inertia: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights [N, nv] and [N, nbody, 2], float64, from masses [N, nbody] and principal inertias [N, nbody,
        3]."""
        of_bodies = torch.cat((mass[..., None], inertia), 2).flatten(1).double()
        matrix = (self._rest + of_bodies @ self._parts).unflatten(1, (self._nv, self._nv))
        inverse = torch.linalg.inv_ex(matrix, check_errors=False)[0].flatten(1)
        weights = inverse @ self._probes.T
        dof, body = weights[:, : self._nv], weights[:, self._nv :].unflatten(1, (-1, 2))
        return dof, torch.where(self._either & (body < mujoco.mjMINVAL), body.flip(2), body)  # only slides or turns


def _gram(rows: np.ndarray) -> np.ndarray:
    """Return the rows' outer products with themselves, [..., nv] -> [..., nv, nv]."""
    return rows[..., :, None] * rows[..., None, :]


def _alike(model: mujoco.MjModel) -> np.ndarray:
    """Return [nv, nv] whose rows average the degrees of freedom that share a weight: those of a ball joint, a free
    joint's translations, and its rotations."""
    sizes = {mujoco.mjtJoint.mjJNT_FREE: (3, 3), mujoco.mjtJoint.mjJNT_BALL: (3,)}
    mean, at = np.zeros((model.nv, model.nv)), 0
    for kind in model.jnt_type:
        for size in sizes.get(mujoco.mjtJoint(kind), (1,)):
            mean[at : at + size, at : at + size] = 1 / size
            at += size
    return mean
