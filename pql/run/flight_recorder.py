"""What led to a run's end: a simulator's state some steps before, and every action since. Dumped, and replayed.

A run that ends since no environment is finite any more leaves a dump, a directory like a checkpoint's: ``replay`` does
those steps again, bit for bit where the simulator is deterministic, so that they can be looked at one by one.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pql.collect.nonfinite import LAG
from pql.config import Config, from_dict, to_dict
from pql.config.trust import check_task
from pql.contract.env import Discrete, VecEnv
from pql.errors import ConfigError, RunError
from pql.run.store import checkpoint
from pql.types import Obs, Step

if TYPE_CHECKING:
    from pql.collect.collector import Collector
    from pql.run.components import Parts

STEPS = 64  # so many lead up to the end at least, where there were as many and their actions take no more than ROOM
ROOM = 16 << 20  # bytes


@dataclass
class Reel:
    """What was done to the environments from one moment on.

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


class BlackBox:
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
        self.reels: deque[Reel] = deque(maxlen=2)

    def open(self, obs: Obs) -> None:
        """A tick begins, from ``obs``; no step is under way."""
        if self.reels:
            last = self.reels[-1]
            if len(last.actions) < self.steps * self.groups or last.ticks < self.ticks:
                last.ticks += 1
                return
        state = self.env.state_dict() if hasattr(self.env, "state_dict") else {}
        self.reels.append(Reel(state, {k: v.clone() for k, v in obs.items()}))

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


@contextmanager
def dumping(run_dir: Path, parts: "Parts", rank: int = 0) -> Iterator[None]:
    """Inside, a run that ends since nothing is finite leaves a dump, and its error says where.

    Raises:
        RunError: what ended it.
    """
    try:
        yield
    except RunError as error:
        ended = [one for one in parts.replicas if one.collector.quarantine.over]
        if not ended:
            raise
        place = f"-rank{rank}" if rank else ""
        path = run_dir / "dumps" / f"steps-{parts.env_steps:012d}{place}"
        try:
            dump(path, ended[0].config, ended[0].collector, parts.counters())
        except OSError as failed:
            raise RunError(f"{error} (no dump: {failed})") from error
        raise RunError(f"{error}; what led to it: {path}") from error


def dump(path: Path, config: Config, collector: "Collector", counters: dict[str, int]) -> None:
    """Write what the black box remembers, what was acted on last, how, and what came back.

    Raises:
        OSError: it cannot be written.
    """
    from pql.run.policy import spec_to_dict

    if collector.device.type == "cuda":  # the run is over: nobody waits for this
        torch.cuda.synchronize(collector.device)
    returned = {str(i): lane.returned() for i, lane in enumerate(collector.lanes)}
    tree = {
        **collector.box.state_dict(),
        "returned": returned,
        "gen": collector.gen.get_state(),
        "last": {"obs": collector.obs, "action": collector.actor.action},
        "out": collector.quarantine.out,
    }
    facts = {"config": to_dict(config), "spec": spec_to_dict(collector.env.spec), "seed": config.seed}
    checkpoint.save(path, tree, {"kind": "dump", "counters": counters, **facts})


def replay(path: str | Path, env: VecEnv | None = None, trust: bool = False) -> Iterator[tuple[Tensor, Step]]:
    """Do again what a dump holds: (action [N, ...], the step that followed), one after the other.

    Args:
        path: of a dump.
        env: a simulator as that of the run; None: the run's task, built anew.
        trust: also a task that names code, a program or a path of the dump's maker (``docs/security.md``).
    Raises:
        ConfigError: no such dump, or one of a simulator that cannot be put into a state.
    """
    from pql.run.task import build_env

    found, manifest = checkpoint.load(Path(path).expanduser(), ("dump",))
    config = from_dict(manifest["config"])
    if env is None and not trust:
        check_task(config, path)
    own = env or build_env(config)
    try:
        if not hasattr(own, "state_dict") or not any(k.startswith("state/") for k in found):
            raise ConfigError("dump", path, "one of a simulator that saves its state, as this one does not")
        own.reset(0)  # some have no state before
        like = {"state": own.state_dict()}
        own.load_state_dict(checkpoint.unflatten(found, like)["state"])  # type: ignore[attr-defined]
        restarts: dict[int, list[Tensor]] = {}
        if "restarts/step" in found:
            for step, mask in zip(found["restarts/step"].tolist(), found["restarts/mask"], strict=True):
                restarts.setdefault(step, []).append(mask.to(own.spec.device))
        for count, action in enumerate(found.get("actions", torch.empty(0)).to(own.spec.device)):
            for mask in restarts.get(count, ()):
                own.reset_where(mask)  # type: ignore[attr-defined]
            yield action, own.step(action)
    finally:
        if env is None:
            own.close()
