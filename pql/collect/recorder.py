"""Flight recorder: keeps a simulator state and the actions since, from some steps back.

``pql.run.flight_recorder`` writes it to a dump when a run fails, and replays a dump bit for bit.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pql.collect.nonfinite import LAG
from pql.contract.env import VecEnv
from pql.contract.optional import Resumable, supports
from pql.types import Obs

STEPS = 64  # least number of steps before the end, if there were as many and their actions take at most ROOM
ROOM = 16 << 20  # bytes


@dataclass
class Recording:
    """Recording of the actions sent to the environments since a simulator state.

    Attributes:
        state: the simulator's state at that time; empty if it cannot be saved.
        obs: the observation acted on next.
        actions: in the order in which they were sent; if environments step in groups, one group after the other.
        restarts: (number of actions sent before, [N] bool).
        ticks: number of ticks begun since.
    """

    state: Any
    obs: Obs
    actions: list[Tensor] = field(default_factory=list)
    restarts: list[tuple[int, Tensor]] = field(default_factory=list)
    ticks: int = 1


class FlightRecorder:
    """Records the last steps, a whole number of ticks.

    Args:
        groups: number of groups of environments that step in turn.
    """

    def __init__(self, env: VecEnv, groups: int):
        self.env, self.groups = env, groups
        spec = env.spec
        size = spec.num_envs * math.prod(spec.action.shape) * spec.action.dtype.itemsize
        self.steps = max(1, min(STEPS, ROOM // size))
        self.ticks = 1 if spec.device.type == "cpu" else LAG + 1  # the tick that ended the run must still be recorded
        self.recordings: deque[Recording] = deque(maxlen=2)

    def open(self, obs: Obs) -> None:
        """Begin a tick at ``obs`` [N, ...]; no step may be in flight."""
        if self.recordings:
            last = self.recordings[-1]
            if len(last.actions) < self.steps * self.groups or last.ticks < self.ticks:
                last.ticks += 1
                return
        state = self.env.state_dict() if supports(self.env, Resumable) else {}
        self.recordings.append(Recording(state, {k: v.clone() for k, v in obs.items()}))

    def sent(self, action: Tensor) -> None:
        """Record an ``action`` [n, ...] sent to the simulator."""
        if self.recordings:
            self.recordings[-1].actions.append(action.clone())

    def restarted(self, mask: Tensor) -> None:
        """Record a restart of the environments of ``mask`` [N] bool."""
        self.recordings[-1].restarts.append((len(self.recordings[-1].actions), mask.clone()))

    def forget(self) -> None:
        """Clear the recording, because the simulator was put into another state."""
        self.recordings.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the recording from its oldest state: ``actions`` [T, N, ...], ``restarts`` (``step``, ``mask``)."""
        if not self.recordings:
            return {}
        first, actions, restarts = self.recordings[0], list[Tensor](), list[tuple[int, Tensor]]()
        for part in self.recordings:
            restarts += [(len(actions) + step, mask) for step, mask in part.restarts]
            actions += part.actions
        length = len(actions) // self.groups
        out: dict[str, Any] = {"state": first.state, "obs": first.obs}
        if length:
            sent = torch.cat(actions[: length * self.groups])
            out["actions"] = sent.unflatten(0, (length, -1))
        if restarts:
            steps, masks = zip(*restarts, strict=True)
            out["restarts"] = {"step": torch.tensor(steps) // self.groups, "mask": torch.stack(masks)}
        return out
