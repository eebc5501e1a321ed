"""Assembly of actors' answers into a ``Step``: rows are put into their slots, frame stacks rebuilt on the device."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pql.contract.env import EnvSpec
from pql.remote.protocol import frames_sent
from pql.remote.slot_table import Answer
from pql.types import Obs, Step

NAMES = ("terminated", "truncated", "first", "valid", "final_ok")  # as ``pql.remote.protocol.FLAGS``
FIRST, VALID, FINAL_OK = 2, 3, 4
SHIFTS = np.arange(len(NAMES), dtype=np.uint8)[:, None]


class StepAssembler:
    """Builds the steps of parts of the slots, and keeps the newest observation of every slot.

    Attributes:
        shown: name -> [N, ...], the current observation of each environment, with complete frame stacks.
    """

    def __init__(self, spec: EnvSpec):
        self.spec, n = spec, spec.num_envs
        self.shown = {k: torch.zeros(n, *s.shape, dtype=s.dtype, device=spec.device) for k, s in spec.obs.items()}
        self._parts: dict[tuple[int, int], Part] = {}

    def step(self, part: slice, answers: Sequence[Answer]) -> Step:
        """Return the step of the slots ``part``, fields [n, ...]. Slots without an answer get filler rows. The tensors
        are overwritten by the next call for the same part."""
        key = (part.start, part.stop)
        if key not in self._parts:
            self._parts[key] = Part(self.spec, {k: v[part] for k, v in self.shown.items()})
        return self._parts[key].step([t._replace(slots=t.slots - part.start) for t in answers])


class Part:
    """Contiguous range of n slots: host buffers for actors' rows (pinned for CUDA), and views of their observations."""

    def __init__(self, spec: EnvSpec, shown: Obs):
        self.spec, self.shown, self.n = spec, shown, len(shown["policy"])
        self.device, pin = spec.device, spec.device.type == "cuda"

        def buffer(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=pin)

        self.flags = buffer(5, self.n, dtype=torch.bool)
        self.numbers = buffer(1 + len(spec.log), self.n, dtype=torch.float32)  # rewards, then log terms
        self.stacks = {k for k, s in spec.obs.items() if frames_sent(s.shape, s.stack) > 1}  # others come whole
        self.newest = {k: v[:, -1] if k in self.stacks else v for k, v in shown.items()}
        # On the CPU frames are written directly into the observations.
        frames = {k: buffer(*v.shape, dtype=v.dtype) for k, v in self.newest.items()} if pin else self.newest
        self.frames = frames
        self.finals = {k: buffer(*v.shape, dtype=v.dtype) for k, v in frames.items()}
        self.host: dict[str, Any] = {k: v.numpy() for k, v in frames.items()}
        self.copied = torch.cuda.Event() if pin else None
        self._flags, self._numbers = self.flags.numpy(), self.numbers.numpy()
        self._pairs: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        self._fields = self._named(self.flags, self.numbers)  # constant on the CPU

    def step(self, answers: Sequence[Answer]) -> Step:
        """Return the step of these slots, fields [n, ...]."""
        if self.copied is not None:
            self.copied.synchronize()  # copies of the last step may still read the host buffers
        self._flags[:], self._flags[FINAL_OK], self._numbers[:] = False, True, 0.0
        at = self._places(answers)
        self._shift(at)
        for one in answers:
            self._gather(*one)
        fields = self._fields
        if self.copied is not None:
            fields = self._named(self._to_device(self.flags), self._to_device(self.numbers))
        final = self._show(at)
        if self.copied is not None:
            self.copied.record()
        return Step(obs=dict(self.shown), final_obs=final, **fields)

    def _named(self, flags: Tensor, numbers: Tensor) -> dict[str, Any]:
        """Return all fields of a step except the observations."""
        log = dict(zip(self.spec.log, numbers[1:].unbind(0), strict=True))
        return {"reward": numbers[0], "log": log, **dict(zip(NAMES, flags.unbind(0), strict=True))}

    def _places(self, answers: Sequence[Answer]) -> slice | Tensor:
        """Return all slots in ``answers``, ascending."""
        slots = answers[0].slots if len(answers) == 1 else np.sort(np.concatenate([[], *(t.slots for t in answers)]))
        at = run_of(slots.astype(np.int64, copy=False))
        return at if isinstance(at, slice) else torch.from_numpy(at).to(self.device)

    def _shift(self, at: slice | Tensor) -> None:
        """Shift the frame stacks of slots ``at`` by one frame, dropping the oldest."""
        if isinstance(at, slice):
            for older, newer in self._steps_back(at.start, at.stop):
                older.copy_(newer)
            return
        for k in self.stacks:
            self.shown[k][at, :-1] = self.shown[k][at, 1:]  # the right side is a copy

    def _steps_back(self, start: int, stop: int) -> list[tuple[Tensor, Tensor]]:
        """Return (target, source) views to shift frame stacks, oldest first: a single copy would overlap itself."""
        if (start, stop) not in self._pairs:
            stacks = [v[start:stop] for k, v in self.shown.items() if k in self.stacks]
            self._pairs[start, stop] = [(v[:, i], v[:, i + 1]) for v in stacks for i in range(v.shape[1] - 1)]
        return self._pairs[start, stop]

    def _gather(self, rows: Any, places: np.ndarray, slots: np.ndarray) -> None:
        """Write one actor's rows into the host buffers."""
        flags, numbers = self._flags, self._numbers
        to, every = run_of(slots), len(places) == len(rows.obs["policy"])
        for k, values in rows.obs.items():
            self.host[k][to] = values if every else values[places]
        if rows.flags is None:  # the answer to a reset: an episode begins, and the row before has no successor
            flags[FIRST, to] = True
            return
        flags[:, to] = rows.flags[places] >> SHIFTS & 1
        numbers[0, to] = rows.reward[places]
        for i, term in enumerate(rows.log):
            numbers[1 + i, to] = term[places]
        if len(rows.ended):
            ended, at = np.isin(places, rows.ended), np.searchsorted(rows.ended, places)
            for k, values in rows.final_obs.items():
                self.finals[k].numpy()[slots[ended]] = values[at[ended]]

    def _show(self, at: slice | Tensor) -> Obs:
        """Update ``shown`` for slots ``at``. Return the final observations, ``shown`` itself where nothing ended."""
        if self.frames is not self.newest:
            for k, newest in self.newest.items():
                newest[at] = self._to_device(self.frames[k])[at]
        final, flags = dict(self.shown), self._flags
        if not flags[FIRST].any():
            return final
        begun, over = np.flatnonzero(flags[FIRST]), np.flatnonzero(flags[FIRST] & flags[VALID])
        first, ended = (torch.from_numpy(rows).to(self.device) for rows in (begun, over))
        for k, spec in self.spec.obs.items():
            shown, ends = self.shown[k], self._to_device(self.finals[k])[ended]
            if k in self.stacks:
                ends = torch.cat((shown[ended, :-1], ends.unsqueeze(1)), 1)
                shown[first, :-1] = 0 if spec.fill == "zeros" else shown[first, -1:]
            if len(over):
                final[k] = shown.clone()
                final[k][ended] = ends
        return final

    def _to_device(self, host: Tensor) -> Tensor:
        return host if self.device.type == "cpu" else host.to(self.device, non_blocking=True)


def run_of(slots: np.ndarray) -> Any:
    """Return ascending ``slots`` as a slice if they are contiguous, for faster indexing."""
    count = len(slots)
    return slice(int(slots[0]), int(slots[0]) + count) if count and slots[-1] - slots[0] == count - 1 else slots
