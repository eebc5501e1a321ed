"""What actors answered becomes a ``Step``: rows at their places, older frames of stacks added on the device."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pql.env import EnvSpec
from pql.envs.remote.hall import Taken
from pql.frames import kept_shape
from pql.types import Obs, Step

NAMES = ("terminated", "truncated", "first", "valid", "final_ok")  # as ``pql.wire.FLAGS``
FIRST, VALID, FINAL_OK = 2, 3, 4


class Board:
    """The newest observation of every slot, and the steps of its parts.

    Attributes:
        shown: [N, ...] by group: what each environment shows now, stacks whole.
    """

    def __init__(self, spec: EnvSpec):
        self.spec, n = spec, spec.num_envs
        self.shown = {k: torch.zeros(n, *s.shape, dtype=s.dtype, device=spec.device) for k, s in spec.obs.items()}
        self._parts: dict[tuple[int, int], Part] = {}

    def step(self, part: slice, taken: Sequence[Taken]) -> Step:
        """The rows of ``part``; where nobody answered they are fillers, and nothing else changes.

        Tensors are good until the next call for the same part.
        """
        key = (part.start, part.stop)
        if key not in self._parts:
            self._parts[key] = Part(self.spec, {k: v[part] for k, v in self.shown.items()})
        return self._parts[key].step([t._replace(slots=t.slots - part.start) for t in taken])


class Part:
    """Some neighbouring slots: host buffers (pinned for CUDA) that actors' rows are gathered in."""

    def __init__(self, spec: EnvSpec, shown: Obs):
        self.spec, self.shown, self.n = spec, shown, len(shown["policy"])
        self.device, pin = spec.device, spec.device.type == "cuda"

        def buffer(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=pin)

        self.flags = buffer(5, self.n, dtype=torch.bool)
        self.numbers = buffer(1 + len(spec.log), self.n, dtype=torch.float32)  # rewards, then log terms
        self.frames = {k: buffer(self.n, *kept_shape(s), dtype=s.dtype) for k, s in spec.obs.items()}
        self.finals = {k: torch.zeros_like(v, pin_memory=pin) for k, v in self.frames.items()}
        self.host: dict[str, Any] = {k: v.numpy() for k, v in self.frames.items()}
        self.copied = torch.cuda.Event() if pin else None

    def step(self, taken: Sequence[Taken]) -> Step:
        if self.copied is not None:
            self.copied.synchronize()  # the last step's copies still read the host buffers
        flags, numbers = self.flags.numpy(), self.numbers.numpy()
        flags[:], flags[FINAL_OK], numbers[:] = False, True, 0.0
        for rows, places, slots in taken:
            self._gather(flags, numbers, rows, places, slots)
        sent, amounts = self._to_device(self.flags), self._to_device(self.numbers)
        slots = np.concatenate([t.slots for t in taken]) if taken else np.zeros(0, dtype=np.int64)
        final = self._show(slots, flags)
        if self.copied is not None:
            self.copied.record()
        bits = dict(zip(NAMES, sent.unbind(0), strict=True))
        log = dict(zip(self.spec.log, amounts[1:].unbind(0), strict=True))
        return Step(obs=dict(self.shown), reward=amounts[0], final_obs=final, log=log, **bits)

    def _gather(self, flags: Any, numbers: Any, rows: Any, places: np.ndarray, slots: np.ndarray) -> None:
        """One actor's rows to their places."""
        for k, values in rows.obs.items():
            self.host[k][slots] = values if len(places) == len(values) else values[places]
        if rows.flags is None:  # a beginning that nothing announced: the row that was acted in is lost
            flags[FIRST, slots] = True
            return
        bits = rows.flags[places]
        for i in range(len(NAMES)):
            flags[i, slots] = bits & (1 << i)
        numbers[0, slots] = rows.reward[places]
        for i, term in enumerate(rows.log):
            numbers[1 + i, slots] = term[places]
        ended, at = np.isin(places, rows.ended), np.searchsorted(rows.ended, places)
        for k, values in rows.final_obs.items():
            self.finals[k].numpy()[slots[ended]] = values[at[ended]]

    def _show(self, slots: np.ndarray, flags: Any) -> Obs:
        """Bring ``shown`` up to date for ``slots``. Returns the final observations: ``shown`` where nothing ended."""
        first = np.flatnonzero(flags[FIRST])
        ended = np.flatnonzero(flags[FIRST] & flags[VALID])
        every = len(slots) == self.n
        at = slice(None) if every else torch.from_numpy(np.sort(slots)).to(self.device)
        fresh = {k: self._to_device(v) for k, v in self.frames.items()}
        final: Obs = {}
        for k, spec in self.spec.obs.items():
            shown, rows = self.shown[k], torch.from_numpy(ended).to(self.device)
            if spec.stack > 1:
                older = shown[at, 1:].clone()
                last = older if every else shown[:, 1:]
                if len(ended):
                    ends = torch.cat((last[rows], self._to_device(self.finals[k])[rows].unsqueeze(1)), 1)
                shown[at, :-1], shown[at, -1] = older, fresh[k][at]
                if len(first):
                    shown[torch.from_numpy(first).to(self.device), :-1] = 0
            else:
                if len(ended):
                    ends = self._to_device(self.finals[k])[rows]
                shown[at] = fresh[k][at]
            final[k] = shown
            if len(ended):
                final[k] = shown.clone()
                final[k][rows] = ends
        return final

    def _to_device(self, host: Tensor) -> Tensor:
        return host if self.device.type == "cpu" else host.to(self.device, non_blocking=True)
