"""Mirroring: batches with the reflected transitions of a robot that is the same on its left and on its right."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from pql.contract.env import Box, EnvSpec
from pql.contract.symmetry import check_reflection
from pql.errors import ConfigError
from pql.types import AnyBatch, Obs, interleaved, selected


class Mirror:
    """Reflects batches of an environment.

    Args:
        augment: ``half``: every row with probability 1/2; ``double``: the reflected rows are added; ``off``: none.
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
        if not isinstance(spec.action, Box):
            raise ConfigError("algo.symmetry.augment", augment, f"off: the actions of {spec.name} are not continuous")
        shapes = {**{k: s.shape for k, s in spec.obs.items()}, "action": spec.action.shape}
        self.augment, self.device = augment, device
        self.maps: dict[str, tuple[Tensor, Tensor]] = {}
        for name in declared.keys() & shapes.keys():
            index, sign = check_reflection(name, declared[name], shapes[name][-1])
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
        if self.augment == "off":
            return batch
        fields = batch._asdict()
        turned: dict[str, Any] = {k: self.obs(fields[k]) for k in ("obs", "next_obs") if k in fields}
        if "action" in fields:
            turned["action"] = self.reflected("action", fields["action"])
        return batch._replace(**self.mixed(fields, turned, count, gen))

    def mixed(self, fields: dict[str, Any], turned: dict[str, Any], count: int, gen: Generator) -> dict[str, Any]:
        """Return ``fields`` [count * B, ...] with the reflected ones, ``turned``, as :meth:`rows` does."""
        if self.augment == "double":
            return interleaved([fields, {**fields, **turned}], count)
        rows = len(next(v for v in fields.values() if isinstance(v, Tensor)))
        which = torch.rand(rows, generator=gen, device=self.device) < 0.5
        return {k: selected(which, turned[k], v) if k in turned else v for k, v in fields.items()}
