"""Environments whose numbers are not finite: their rows are left out and counted, and they begin anew.

A NaN that gets into a replay, a running statistic or a policy's memory stays there. So what a policy does passes here
before the simulator sees it, and a step before anything is made of it. ::

    row           t - 1    t         t + 1
    acted on      o        o         o, a new episode's first
    answer        fine     NaN       fine
    recorded      as ever  filler    as ever       a filler row, with ``first``: what came before ends unannounced

All that reads rows knows fillers, so nothing else has to know of this. Other environments are not touched.

The environment is restarted (``reset_where``) at once where the host can read a step without waiting for a device: on
the CPU, where all environments step together. Elsewhere that is done between two ticks. A simulator that cannot restart
single ones ends the episode itself, some time. Until then the environment is *out*: the policy acts on the last good
observation, and all its rows are fillers.

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

from pql.engine.graph import Graph
from pql.errors import RunError
from pql.types import Obs, Step, chosen, column

LAG = 3
"""Ticks after which the host reads a GPU's flags. It is at most two ahead of the device, so these are there."""


class Quarantine:
    """Watches over the environments of a collector.

    Args:
        together: all of them step at once, so that a step with nothing finite ends the run there and then.
        restart: begins new episodes for a mask [N], and returns all current observations; None: not at once.

    Attributes:
        out: [N] bool; what the environment shows is not known: the policy acts on what it showed last.
        anew: [N] bool; restarted since its last row.
        void: [N] bool; what the policy made for the step under way was not finite.
        dropped: 0-dim int64; rows left out so far.
        restarted: 0-dim int64; environments restarted so far. Episodes that a simulator began by itself do not count.
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
        self.out, self.anew, self.void = flags(), flags(), flags()
        self.dropped, self.restarted = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
        # Reading a value back waits for nobody on a CPU. There a step in which all is well costs a few sums, and
        # everything else here runs only where it is needed.
        self.host = not Graph.possible(device)
        self.together, self.over = together and self.host, False
        self.restart = restart if self.together else None
        self._told = torch.zeros(LAG, 2, dtype=torch.bool, pin_memory=device.type == "cuda")  # (any, all) out, by tick
        self._events: list[Any] = [None] * LAG
        self._looks = 0

    # -- a step -------------------------------------------------------------------------------------------------------

    def begin(self, obs: Obs) -> Obs:
        """Take the observations of a reset of all environments; those that are not finite become zeros and are out."""
        self.out.copy_(~finite_rows(floats(obs), self.out))
        self.anew.zero_()
        self.void.zero_()
        return {k: v.masked_fill(column(self.out, v), 0) for k, v in obs.items()}

    def begin_anew(self, out: Tensor) -> None:
        """All environments begin new episodes; those of ``out`` [N] with nothing finite."""
        self.out.copy_(out)
        self.anew.zero_()

    def act(self, made: Sequence[Tensor], mask: Tensor | None = None) -> None:
        """Zero a policy's output where any of it is not finite; the row that follows is left out.

        Args:
            made: [n, ...] floats each, the actor's own.
            mask: [n] bool; whom it acted for; None: all.
        """
        if self.host and all_finite(made) and not self.void.any():
            return
        bad = ~finite_rows(made, self.out)
        self.void.copy_(bad if mask is None else torch.where(mask, bad, self.void))
        for tensor in made:
            tensor.masked_fill_(column(bad, tensor), 0)

    def __call__(self, step: Step, held: Obs, arrived: Tensor | None = None) -> tuple[Step, Tensor | None]:
        """A step as it may be recorded.

        Args:
            held: what was acted on.
            arrived: [n] bool; False: no answer has come yet, so there is no row. None: all have.
        Returns:
            the step, and [n] bool where its ``obs`` is what the environment shows (None: everywhere).
        Raises:
            RunError: nothing in it is finite, where all environments step together on the CPU.
        """
        numbers = floats((step.obs, step.final_obs, step.reward))
        if self.host and all_finite(numbers) and not (self.out | self.void).any():
            return step, None
        seen = finite_rows(floats(step.obs), self.out)
        bad = self.void | ~(seen & finite_rows(floats((step.final_obs, step.reward)), self.out))
        row = torch.ones_like(bad) if arrived is None else arrived
        lost = (bad | self.out) & row
        out = lost & ~((step.first | self.anew) & seen)  # where an episode begins, all is well again
        obs = step.obs
        if self.together and bool(lost.all()):
            self.stop()
        if self.restart is not None and bool(out.any()):
            fresh = self.restart(out)
            well = out & finite_rows(floats(fresh), out)
            self.restarted += well.sum()
            obs, out = chosen(well, fresh, obs), out & ~well
        self.dropped += lost.sum()
        self.out.copy_(torch.where(row, out, self.out))  # one of which nothing came stays where it is
        self.anew &= ~row
        return filler_step(step, lost | self.out, chosen(self.out, held, obs)), ~self.out

    def stop(self) -> NoReturn:
        """End the run."""
        self.out.fill_(True)
        self.over = True
        raise RunError("no environment gives finite observations and rewards, or is given finite actions")

    # -- between ticks ------------------------------------------------------------------------------------------------

    def look(self) -> bool:
        """A tick has ended: whether any environment is out; as of ``LAG`` ticks ago where a GPU would be waited for.

        Raises:
            RunError: all are.
        """
        if self.host and not self.out.any():
            return False
        flags = torch.stack((self.out.any(), self.out.all()))
        some, every = (flags if self.host else self._late(flags)).tolist()
        if every:
            self.stop()
        return some

    def check(self) -> None:
        """Raises RunError where every environment is out. Waits for the device."""
        if bool(self.out.all()):
            self.stop()

    def admit(self, mask: Tensor, fresh: Obs, held: Obs) -> Obs:
        """Return observations after a restart of the environments of ``mask``: ``fresh`` where finite, else ``held``.

        The row that follows is still left out: nobody has recorded what it was acted on.
        """
        well = mask & finite_rows(floats(fresh), mask)
        self.anew |= well
        self.restarted += well.sum()
        return chosen(well, fresh, held)

    def _late(self, flags: Tensor) -> Tensor:
        """``flags`` of ``LAG`` calls ago, on the host."""
        place = self._looks % LAG
        self._arrive(place)
        known = self._told[place].clone()
        self._told[place].copy_(flags, non_blocking=True)
        if flags.is_cuda:
            self._events[place] = torch.cuda.current_stream(flags.device).record_event()
        self._looks += 1
        return known

    def _arrive(self, place: int) -> None:
        while self._events[place] is not None and not self._events[place].query():
            time.sleep(2e-5)

    # -- the rest -----------------------------------------------------------------------------------------------------

    def gauges(self) -> dict[str, Tensor]:
        """For the log."""
        return {"env/dropped": self.dropped, "env/restarted": self.restarted}

    def part(self, columns: slice) -> "Quarantine":
        """For a range of the environments: views, and the same counts."""
        part = copy.copy(self)
        part.out, part.anew, part.void = self.out[columns], self.anew[columns], self.void[columns]
        part.together, part.restart = False, None
        return part

    def state_dict(self) -> dict[str, Tensor]:
        for place in range(LAG):
            self._arrive(place)
        told = self._told.roll(-(self._looks % LAG), 0)  # the oldest first
        return {"out": self.out, "anew": self.anew, "dropped": self.dropped, "restarted": self.restarted, "told": told}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name in ("out", "anew", "dropped", "restarted"):
            getattr(self, name).copy_(state[name])
        self._told.copy_(state["told"])
        self._looks, self._events = 0, [None] * LAG


def floats(tree: Any) -> list[Tensor]:
    """The floating tensors in nested tuples and dicts, each once."""

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
    """Rows in which every number of every tensor [n, ...] is finite: [n] bool."""
    good = torch.ones_like(like)
    for tensor in tensors:
        size = tensor.abs()
        size = size.flatten(1).amax(1) if size.dim() > 1 else size
        good &= size < math.inf  # nor is a NaN
    return good


def filler_step(step: Step, lost: Tensor, obs: Obs) -> Step:
    """The step with filler rows where ``lost`` [n], each of which begins an episode, from ``obs``."""
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
