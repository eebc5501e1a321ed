"""Quarantine of environments with non-finite values: their rows are left out and counted, and they are restarted.

A NaN in a replay, a running statistic or a policy's memory would stay there. So actions are checked before the
simulator gets them, and a step before it is used. ::

    row           t - 1    t         t + 1
    acted on      o        o         o, a new episode's first
    answer        finite   NaN       finite
    recorded      row      filler    row           a filler with ``first``: the episode before it ends unannounced

All readers of rows handle filler rows, so no other code has to handle non-finite values. Other environments are not
affected.

An environment is restarted (``reset_where``) at once on the CPU if all environments step together, otherwise between
two ticks, so that the host does not wait for a device. A simulator that cannot restart single environments ends
the episode itself at some point. Until then the environment is *out*: the policy acts on its last finite observation,
and all its rows are fillers.

This file knows nothing of stores, learners or logs.
"""

import copy
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from pql.engine.graph import Graph, host_reads
from pql.errors import RunError
from pql.types import Obs, Step, chosen, column

LAG = 3
"""Ticks after which the host reads a GPU's flags; the host is at most two ahead, so they have arrived."""


class Quarantine:
    """Detects non-finite values in a collector's environments and replaces their rows by fillers.

    Args:
        together: all environments step at once, so a step without any finite row ends the run immediately.
        restart: restarts the environments of a mask [N] and returns all current observations; None: no restart within
            a step.

    Attributes:
        out: [N] bool; the current observation is not finite: the policy acts on the last finite one.
        fresh: [N] bool; restarted since its last row.
        void: [N] bool; the policy's output for the current step was not finite.
        dropped: 0-dim int64; rows left out so far.
        restarted: 0-dim int64; environments restarted here so far, without the simulator's own resets.
        over: every environment was out, which ended the run.
    """

    def __init__(
        self,
        num_envs: int,
        device: torch.device,
        together: bool = True,
        restart: Callable[[Tensor], Obs] | None = None,
    ):
        flags = functools.partial(torch.zeros, num_envs, dtype=torch.bool, device=device)
        self.out, self.fresh, self.void = flags(), flags(), flags()
        self.dropped, self.restarted = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
        # On a CPU, reading a value does not wait. A step of finite values then costs a few sums, and the rest runs only
        # where needed.
        self.host = not Graph.possible(device)
        self.together, self.over = together and self.host, False
        self.restart = restart if self.together else None
        self._flags = torch.zeros(LAG, 2, dtype=torch.bool, pin_memory=device.type == "cuda")  # (any, all) out, by tick
        self._events: list[Any] = [None] * LAG
        self._looks = 0

    # -- a step -------------------------------------------------------------------------------------------------------

    def begin(self, obs: Obs) -> Obs:
        """Take the observations of a full reset, [N, ...]; those that are not finite become zeros and are out."""
        self.out.copy_(~finite_rows(floats(obs), self.out))
        self.fresh.zero_()
        self.void.zero_()
        return {k: v.masked_fill(column(self.out, v), 0) for k, v in obs.items()}

    def begin_episodes(self, out: Tensor) -> None:
        """Begin new episodes everywhere; ``out`` [N] bool marks environments without finite observations."""
        self.out.copy_(out)
        self.fresh.zero_()

    def act(self, made: Sequence[Tensor], mask: Tensor | None = None) -> None:
        """Zero a policy's output in rows where any of it is not finite; the rows that follow are left out.

        Args:
            made: the actor's float outputs, [n, ...] each.
            mask: [n] bool; environments that it acted for; None: all.
        """
        if host_reads(self.void.device) and all_finite(made) and not self.void.any():
            return
        bad = ~finite_rows(made, self.out)
        self.void.copy_(bad if mask is None else torch.where(mask, bad, self.void))
        for tensor in made:
            tensor.masked_fill_(column(bad, tensor), 0)

    def __call__(self, step: Step, held: Obs, arrived: Tensor | None = None) -> tuple[Step, Tensor | None]:
        """Return a step that may be recorded, with filler rows for non-finite ones.

        Args:
            held: the observations that were acted on.
            arrived: [n] bool; False: no answer has arrived, so there is no row. None: all have.

        Returns:
            The step, and [n] bool: its ``obs`` is the environment's own (None: everywhere).

        Raises:
            RunError: no row is finite, if all environments step together on the CPU.
        """
        numbers = floats((step.obs, step.final_obs, step.reward))
        if self.host and all_finite(numbers) and not (self.out | self.void).any():
            return step, None
        seen = finite_rows(floats(step.obs), self.out)
        bad = self.void | ~(seen & finite_rows(floats((step.final_obs, step.reward)), self.out))
        row = torch.ones_like(bad) if arrived is None else arrived
        lost = (bad | self.out) & row
        out = lost & ~((step.first | self.fresh) & seen)  # a new episode with a finite observation is no longer out
        obs = step.obs
        if self.together and bool(lost.all()):
            self.stop()
        if self.restart is not None and bool(out.any()):
            fresh = self.restart(out)
            well = out & finite_rows(floats(fresh), out)
            self.restarted += well.sum()
            obs, out = chosen(well, fresh, obs), out & ~well
        self.dropped += lost.sum()
        self.out.copy_(torch.where(row, out, self.out))  # unchanged where no answer arrived
        self.fresh &= ~row
        return filler_step(step, lost | self.out, chosen(self.out, held, obs)), ~self.out

    def stop(self) -> NoReturn:
        """End the run."""
        self.out.fill_(True)
        self.over = True
        raise RunError("no environment gives finite observations and rewards, or receives finite actions")

    # -- between ticks ------------------------------------------------------------------------------------------------

    def look(self) -> bool:
        """Return True if any environment is out. Call it after a tick. On a GPU the answer is ``LAG`` ticks old.

        Raises:
            RunError: all environments are out.
        """
        if self.host and not self.out.any():
            return False
        flags = torch.stack((self.out.any(), self.out.all()))
        some, every = (flags if self.host else self._late(flags)).tolist()
        if every:
            self.stop()
        return some

    def check(self) -> None:
        """Raise ``RunError`` if every environment is out. Waits for the device."""
        if bool(self.out.all()):
            self.stop()

    def admit(self, mask: Tensor, fresh: Obs, held: Obs) -> Obs:
        """Return observations after a restart of the environments of ``mask``: ``fresh`` where finite, else ``held``.

        The next row is still left out, because its observation has not been recorded.
        """
        well = mask & finite_rows(floats(fresh), mask)
        self.fresh |= well
        self.restarted += well.sum()
        return chosen(well, fresh, held)

    def _late(self, flags: Tensor) -> Tensor:
        """Store ``flags`` and return those of ``LAG`` calls ago, on the host."""
        place = self._looks % LAG
        self._arrive(place)
        known = self._flags[place].clone()
        self._flags[place].copy_(flags, non_blocking=True)
        if flags.is_cuda:
            self._events[place] = torch.cuda.current_stream(flags.device).record_event()
        self._looks += 1
        return known

    def _arrive(self, place: int) -> None:
        while self._events[place] is not None and not self._events[place].query():
            time.sleep(2e-5)

    # -- the rest -----------------------------------------------------------------------------------------------------

    def gauges(self) -> dict[str, Tensor]:
        """Return the counts for the log."""
        return {"env/dropped": self.dropped, "env/restarted": self.restarted}

    def part(self, columns: slice) -> "Quarantine":
        """Return the quarantine of a range of the environments: views, with shared counts."""
        part = copy.copy(self)
        part.out, part.fresh, part.void = self.out[columns], self.fresh[columns], self.void[columns]
        part.together, part.restart = False, None
        return part

    def state_dict(self) -> dict[str, Tensor]:
        for place in range(LAG):
            self._arrive(place)
        return {**self._state(), "told": self._flags.roll(-(self._looks % LAG), 0)}  # oldest first

    def _state(self) -> dict[str, Tensor]:
        """Return the tensors to save, by their names in a checkpoint."""
        return {"out": self.out, "anew": self.fresh, "dropped": self.dropped, "restarted": self.restarted}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, value in self._state().items():
            value.copy_(state[name])
        self._flags.copy_(state["told"])
        self._looks, self._events = 0, [None] * LAG


def floats(tree: Any) -> list[Tensor]:
    """Return the floating-point tensors in nested tuples and dicts, each once."""

    def every(part: Any) -> Iterator[Tensor]:
        if isinstance(part, Tensor):
            if part.is_floating_point():
                yield part
        elif part is not None:
            for one in part.values() if isinstance(part, dict) else part:
                yield from every(one)

    return list({id(t): t for t in every(tree)}.values())


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return True if the sum of all numbers (any shape) is finite; an overflow counts as non-finite. CPU only."""
    return math.isfinite(sum(float(t.sum()) for t in tensors))


def finite_rows(tensors: Iterable[Tensor], like: Tensor) -> Tensor:
    """Return [n] bool: every number of the row is finite in every tensor [n, ...]."""
    good = torch.ones_like(like)
    for tensor in tensors:
        if not tensor.numel():  # the memory of a network without one
            continue
        size = tensor.abs()
        size = size.flatten(1).amax(1) if size.dim() > 1 else size
        good &= size < math.inf  # False for NaN, too
    return good


def filler_step(step: Step, lost: Tensor, obs: Obs) -> Step:
    """Replace the rows ``lost`` [n] of a step by fillers that begin an episode at ``obs`` [n, ...]."""
    kept = ~lost
    return step._replace(
        obs=obs,
        reward=step.reward.masked_fill(lost, 0),
        terminated=step.terminated & kept,
        truncated=step.truncated & kept,
        first=step.first | lost,
        final_obs=chosen(lost, obs, step.final_obs),
        final_ok=step.final_ok | lost,
        valid=step.valid & kept,
    )


def mask_and(*masks: Tensor | None) -> Tensor | None:
    """Return the conjunction of the given masks, [n] bool; None means all True."""
    given = [m for m in masks if m is not None]
    return functools.reduce(torch.logical_and, given) if given else None
