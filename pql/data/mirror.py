"""Mirroring: transitions of a robot that is the same on its left and on its right, reflected.

A reflection is a signed permutation of observations and actions, ``Reflection``; a task declares those of its groups in
``EnvSpec.info["symmetry"]``. Learners then train on the reflected rows as well (``algo.symmetry``).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Generator, Tensor, nn

from pql.contract.env import EnvSpec
from pql.engine.worker import Update
from pql.errors import ConfigError
from pql.types import AnyBatch, Metrics, Obs, column

Reflection = tuple[tuple[int, ...], tuple[float, ...]]
"""Index and sign: element i of the reflection is ``sign[i] * x[index[i]]``."""

MeanAction = Callable[[nn.Module, Obs], Tensor]

POLAR: Reflection = ((0, 1, 2), (1, -1, 1))  # reflected at the plane y = 0: positions, velocities, forces
AXIAL: Reflection = ((0, 1, 2), (-1, 1, -1))  # angular velocities, torques
QUATERNION: Reflection = ((0, 1, 2, 3), (1, -1, 1, -1))  # w, x, y, z
COMMAND: Reflection = ((0, 1, 2), (1, -1, -1))  # velocity ahead, to the left, around the vertical
SCALAR: Reflection = ((0,), (1,))


def joined(*parts: Reflection) -> Reflection:
    """Return the reflection of a vector made of ``parts``, one after the other."""
    index, sign = list[int](), list[float]()
    for part, signs in parts:
        index += [len(sign) + i for i in part]
        sign += signs
    return tuple(index), tuple(sign)


def by_names(names: Sequence[str], sides: Mapping[str, str], odd: Sequence[str] = ()) -> Reflection:
    """Return the reflection of values named ``names``, such as joints.

    Args:
        sides: parts of names that replace each other: ``{"left": "right"}``. A name without any is its own partner.
        odd: parts of the names of joints whose angle changes its sign, such as roll and yaw.
    Raises:
        ConfigError: a partner is not among the names.
    """
    both = {**sides, **{b: a for a, b in sides.items()}}
    index = []
    for name in names:
        part = next((one for one in both if one in name), None)
        partner = name if part is None else name.replace(part, both[part])
        if partner not in names:
            raise ConfigError("symmetry", name, f"joints in pairs: there is no {partner}")
        index.append(list(names).index(partner))
    return tuple(index), tuple(-1.0 if any(one in name for one in odd) else 1.0 for name in names)


def check_reflection(name: str, value: Any, size: int) -> Reflection:
    """Return the declared reflection of group ``name``.

    Raises:
        ConfigError: it is not one of ``size`` elements, or not its own inverse.
    """
    index, sign = (tuple(part) for part in value)
    fits = len(index) == len(sign) == size and sorted(index) == [*range(size)] and {*map(abs, sign)} <= {1}
    if not fits or any(index[j] != i or sign[i] != sign[j] for i, j in enumerate(index)):
        allowed = f"{size} indices and {size} signs that give the identity when applied twice"
        raise ConfigError(f"symmetry of {name}", value, allowed)
    return index, sign


class Mirror:
    """Reflects batches of an environment.

    Args:
        augment: ``half``: every row with probability 1/2; ``double``: the reflected rows are added.
        read: observation groups that networks read.
    Raises:
        ConfigError: the task does not declare a symmetry of these groups and of actions.
    """

    def __init__(self, spec: EnvSpec, augment: str, read: Sequence[str], device: torch.device):
        declared = spec.info.get("symmetry") or {}
        for name in (*read, "action"):
            if name not in declared:
                what = f"off: {spec.name} declares no symmetry of {name!r} (EnvSpec.info)"
                raise ConfigError("algo.symmetry.augment", augment, what)
        shapes = {**{k: s.shape for k, s in spec.obs.items()}, "action": spec.action.shape}
        self.device = device
        self.double, self.maps = augment == "double", dict[str, tuple[Tensor, Tensor]]()
        for name, value in declared.items():
            index, sign = check_reflection(name, value, shapes[name][-1])
            self.maps[name] = torch.tensor(index, device=device), torch.tensor(sign, device=device)

    def reflected(self, name: str, x: Tensor) -> Tensor:
        """Return ``x`` [..., D] of a group, or of ``action``, reflected; of a group without a symmetry, as it is."""
        if name not in self.maps:
            return x
        index, sign = self.maps[name]
        return x.index_select(-1, index) * sign

    def params(self, params: Tensor) -> Tensor:
        """Return parameters of a diagonal Gaussian, [..., 2 A] (means, log standard deviations), reflected."""
        mean, log_std = params.chunk(2, -1)
        return torch.cat((self.reflected("action", mean), log_std.index_select(-1, self.maps["action"][0])), -1)

    def obs(self, obs: Obs) -> Obs:
        """Return reflected observations [..., D]."""
        return {k: self.reflected(k, v) for k, v in obs.items()}

    def rows(self, batch: AnyBatch, count: int, gen: Generator) -> AnyBatch:
        """Return ``count`` batches of B rows, one after the other, [count * B, ...], some of them reflected; or
        ``count`` of 2 B rows, the second half of each reflected."""
        fields = batch._asdict()
        turned: dict[str, Any] = {k: self.obs(fields[k]) for k in ("obs", "next_obs") if k in fields}
        if "action" in fields:
            turned["action"] = self.reflected("action", fields["action"])
        return batch._replace(**self.mixed(fields, turned, count, gen))

    def mixed(self, fields: dict[str, Any], turned: dict[str, Any], count: int, gen: Generator) -> dict[str, Any]:
        """Return ``fields`` [count * B, ...] with the reflected ones, ``turned``, as :meth:`rows` does."""
        if self.double:
            return {k: self._added(v, turned.get(k, v), count) for k, v in fields.items()}
        rows = len(next(v for v in fields.values() if isinstance(v, Tensor)))
        which = torch.rand(rows, generator=gen, device=self.device) < 0.5
        return {k: picked(which, turned[k], v) if k in turned else v for k, v in fields.items()}

    def _added(self, x: Any, turned: Any, count: int) -> Any:
        if isinstance(x, dict):
            return {k: self._added(v, turned[k], count) for k, v in x.items()}
        pair = [t.view(count, -1, *t.shape[1:]) for t in (x, turned)]
        return torch.cat(pair, 1).flatten(0, 1)


def picked(which: Tensor, one: Any, other: Any) -> Any:
    """Return the rows of ``one`` where ``which`` [B] is True, else of ``other``; tensors or groups, [B, ...]."""
    if isinstance(one, dict):
        return {k: picked(which, v, other[k]) for k, v in one.items()}
    return torch.where(column(which, one), one, other)


def with_mirror_loss(update: Update[Any, Any, Any], mean: MeanAction, mirror: Mirror) -> Update[Any, Any, Any]:
    """Return ``update`` with the mirror loss added to its policy's loss.

    ``algo.symmetry.mirror_coef`` times E[|mu(M o) - M mu(o)|^2] / A, where the second term has no gradient (rsl_rl).

    Args:
        mean: (policy, obs [B, ...]) -> its mean action [B, A].
    """

    def updated(state: Any, batch: Any, settings: Any, gen: Generator) -> Metrics:
        policy = state.policy.module if hasattr(state.policy, "module") else state.policy
        parts: list[Tensor] = []

        def added() -> Tensor:
            wanted = mirror.reflected("action", mean(policy, batch.obs).detach())
            apart = (mean(policy, mirror.obs(batch.obs)) - wanted).square().mean(-1)
            parts.append((apart * batch.mask).sum() / batch.mask.sum().clamp(min=1))
            return settings.symmetry.mirror_coef * parts[0]

        state.optimizer.extra = added
        metrics = update(state, batch, settings, gen)
        state.optimizer.extra = None
        return {**metrics, "loss/mirror": parts[0].detach()}

    return updated
