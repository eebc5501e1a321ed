"""Quarantine of environments with non-finite values: their rows are left out and counted, and they are restarted.

A NaN in a replay, a running statistic or a policy's memory would stay there. So actions are checked before the
simulator gets them, and a step before it is used. ::

    row           t - 1    t         t + 1
    acted on      o        o         o, a new episode's first
    answer        finite   NaN       finite
    recorded      row      filler    row           a filler with ``first``: the episode before it ends unannounced

All readers of rows handle filler rows, so no other code has to handle non-finite values. Other environments are not
affected. A row that terminates needs no next observation: if its reward is finite it is kept, without a final
observation (zeros, and ``final_ok`` is False) where that is not.

An environment is restarted (``reset_where``) at once on the CPU if all environments step together, otherwise between
two ticks, so that the host does not wait for a device. A simulator that cannot restart single environments ends
the episode itself at some point. Until then the environment is *out*: the policy acts on its last finite observation,
and all its rows are fillers.

This file knows nothing of stores, learners or logs.
"""

import copy
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from pql.engine.graph import Graph, host_reads
from pql.errors import RunError
from pql.types import Obs, Step, chosen, column

LARGEST = 1e18
"""Numbers from this size on count as not finite: in float32 their squares, and sums of some hundred, overflow."""
LAG = 3
"""Ticks after which the host reads a GPU's flags; the host is at most two ahead, so they have arrived."""


class Quarantine:
    """Detects non-finite values in a collector's environments and replaces their rows by fillers.

    Args:
        together: all environments step at once, so a step without any finite row ends the run immediately.
        restart: restarts the environments of a mask [N] and returns all current observations; None: no restart within
            a step.
        next_step: the simulator begins a new episode in the row after a termination, whatever it returned with it.

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
        next_step: bool = False,
    ):
        flags = functools.partial(torch.zeros, num_envs, dtype=torch.bool, device=device)
        self.out, self.fresh, self.void = flags(), flags(), flags()
        self.dropped, self.restarted = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
        # On a CPU, reading a value does not wait. A step of finite values then costs a few sums, and the rest runs only
        # where needed.
        self.host = not Graph.possible(device)
        self.together, self.over = together and self.host, False
        self.restart = restart if self.together else None
        self.next_step = next_step
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
        paid, seen, known = (finite_rows(floats(part), self.out) for part in (step.reward, step.obs, step.final_obs))
        sound = paid & ~(self.out | self.void)
        lost = ~(sound & (step.terminated | (seen & known)))  # a termination needs no next observation
        out = ~seen | (lost & ~(step.first | self.fresh))  # the first observation of an episode ends it
        obs, first, blank = step.obs, step.first, None
        if self.next_step:  # the next row begins an episode
            blank = sound & step.terminated & ~(seen | first)
            obs, out = zeroed(blank, obs), out & ~blank
        lost = lost if arrived is None else lost & arrived
        if self.together and bool(lost.all()):
            self.stop()
        if self.restart is not None and bool(out.any()):
            fresh = self.restart(out)
            well = out & finite_rows(floats(fresh), out)
            self.restarted += well.sum()
            obs, out, first = chosen(well, fresh, obs), out & ~well, first | well
        self.dropped += lost.sum()
        fillers = self._note(out, lost, arrived)
        step = step._replace(
            first=first, final_obs=zeroed(~known, step.final_obs), final_ok=step.final_ok & (known | ~step.terminated)
        )
        shown = ~self.out if blank is None else ~(self.out | blank)
        return filler_step(step, fillers, chosen(self.out, held, obs)), shown

    def _note(self, out: Tensor, lost: Tensor, arrived: Tensor | None) -> Tensor:
        """Set who is out, unchanged where no answer ``arrived``; return the rows that become fillers. All [n] bool."""
        if arrived is None:
            self.out.copy_(out)
            self.fresh.zero_()
            return lost
        self.out.copy_(torch.where(arrived, out, self.out))
        self.fresh &= ~arrived
        return lost | (self.out & ~arrived)

    def stop(self) -> NoReturn:
        """End the run."""
        self.out.fill_(True)
        self.over = True
        raise RunError(
            f"no environment gives finite observations and rewards (below {LARGEST:g}), or receives finite actions"
        )

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
    """Return True if every number (any shape) is finite and smaller than ``LARGEST``. CPU only."""
    ends = (float(end) for t in tensors if t.numel() for end in t.aminmax())
    return all(-LARGEST < end < LARGEST for end in ends)  # NaN: False


def finite_rows(tensors: Iterable[Tensor], like: Tensor) -> Tensor:
    """Return [n] bool: every number of the row is finite, and smaller than ``LARGEST``, in every tensor [n, ...]."""
    good = None
    for tensor in tensors:
        if not tensor.numel():  # the memory of a network without one
            continue
        size = tensor.abs()
        size = size.flatten(1).amax(1) if size.dim() > 1 else size
        here = size < LARGEST  # False for NaN, too
        good = here if good is None else good & here
    return torch.ones_like(like) if good is None else good


def zeroed(mask: Tensor, obs: Obs) -> Obs:
    """Return float groups [n, ...] with zeros in the rows of ``mask`` [n]."""
    return {k: v.masked_fill(column(mask, v), 0) if v.is_floating_point() else v for k, v in obs.items()}


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
