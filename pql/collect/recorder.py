"""Flight recorder: keeps a simulator state and the actions since, from some steps back.

``pql.run.flight_recorder`` writes it to a dump when a run fails, and replays a dump bit for bit.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pql.collect.nonfinite import LAG
from pql.contract.env import Discrete, VecEnv
from pql.types import Obs

STEPS = 64  # so many lead up to the end at least, where there were as many and their actions take no more than ROOM
ROOM = 16 << 20  # bytes


@dataclass
class Recording:
    """Recording of the actions sent to the environments since a simulator state.

    Attributes:
        state: the simulator's at that moment; empty where it cannot tell.
        obs: what was acted on next.
        actions: in the order in which they were sent; where environments step in groups, of each in turn.
        restarts: (how many actions had been sent, [N] bool).
        ticks: that have begun since.
    """

    state: Any
    obs: Obs
    actions: list[Tensor] = field(default_factory=list)
    restarts: list[tuple[int, Tensor]] = field(default_factory=list)
    ticks: int = 1


class FlightRecorder:
    """Remembers the last steps, a whole number of ticks.

    Args:
        groups: of environments that step one after the other.
    """

    def __init__(self, env: VecEnv, groups: int):
        self.env, self.groups = env, groups
        spec = env.spec
        size = spec.num_envs * (8 if isinstance(spec.action, Discrete) else 4 * spec.action.size)
        self.steps = max(1, min(STEPS, ROOM // size))
        self.ticks = 1 if spec.device.type == "cpu" else LAG + 1  # it must still know the tick that ended the run
        self.reels: deque[Recording] = deque(maxlen=2)

    def open(self, obs: Obs) -> None:
        """A tick begins, from ``obs``; no step is under way."""
        if self.reels:
            last = self.reels[-1]
            if len(last.actions) < self.steps * self.groups or last.ticks < self.ticks:
                last.ticks += 1
                return
        state = self.env.state_dict() if hasattr(self.env, "state_dict") else {}
        self.reels.append(Recording(state, {k: v.clone() for k, v in obs.items()}))

    def sent(self, action: Tensor) -> None:
        """The simulator is given ``action`` [n, ...]."""
        if self.reels:
            self.reels[-1].actions.append(action.clone())

    def restarted(self, mask: Tensor) -> None:
        """The simulator is to restart the environments of ``mask`` [N]."""
        self.reels[-1].restarts.append((len(self.reels[-1].actions), mask.clone()))

    def forget(self) -> None:
        """The simulator was put into another state."""
        self.reels.clear()

    def state_dict(self) -> dict[str, Any]:
        """From the oldest moment it remembers: ``actions`` [T, N, ...], ``restarts`` with ``step`` and ``mask``."""
        if not self.reels:
            return {}
        first, actions, restarts = self.reels[0], list[Tensor](), list[tuple[int, Tensor]]()
        for reel in self.reels:
            restarts += [(len(actions) + step, mask) for step, mask in reel.restarts]
            actions += reel.actions
        whole = len(actions) // self.groups
        out: dict[str, Any] = {"state": first.state, "obs": first.obs}
        if whole:
            sent = torch.cat(actions[: whole * self.groups])
            out["actions"] = sent.unflatten(0, (whole, -1))
        if restarts:
            steps, masks = zip(*restarts, strict=True)
            out["restarts"] = {"step": torch.tensor(steps) // self.groups, "mask": torch.stack(masks)}
        return out
