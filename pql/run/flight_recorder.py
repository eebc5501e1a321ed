"""Dumps of the flight recorder (``pql.collect.recorder``): written when a run fails, replayable bit for bit.

A run that ends because no environment is finite leaves a dump, a directory like a checkpoint's. ``replay`` repeats its
steps, bit for bit where the simulator is deterministic, so that they can be inspected one by one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from pql.config import Config, from_dict
from pql.config.files import expanded
from pql.config.trust import check_task
from pql.contract.env import VecEnv
from pql.contract.optional import PartialReset, Resumable, supports
from pql.engine.deadlines import start_limit
from pql.engine.watchdog import watching
from pql.errors import ConfigError, RunError
from pql.run.store import checkpoint
from pql.run.store.manifest import config_entries
from pql.types import Step

if TYPE_CHECKING:
    from pql.collect.collector import Collector
    from pql.run.components import Parts


@contextmanager
def dumping(run_dir: Path, parts: "Parts", rank: int = 0) -> Iterator[None]:
    """Context manager: a run that ends because no environment is finite leaves a dump; the error names its path. Raises
    ``RunError``: the error that ended the run."""
    try:
        yield
    except RunError as error:
        if (ended := parts.broken()) is None:
            raise
        place = f"-rank{rank}" if rank else ""
        path = run_dir / "dumps" / f"steps-{parts.env_steps:012d}{place}"
        try:
            with watching(f"writing {path}", start_limit(ended.config.placement)):
                dump(path, ended.config, ended.collector, parts.counters())
        except OSError as failed:
            raise RunError(f"{error} (no dump: {failed})") from error
        raise RunError(f"{error}; what led to it: {path}") from error


def dump(path: Path, config: Config, collector: "Collector", counters: dict[str, int]) -> None:
    """Write the contents of the flight recorder, and the last observation, action and step. Raises ``OSError``: it
    cannot be written."""
    from pql.contract.spec_json import spec_to_dict

    if collector.device.type == "cuda":  # the run is over: a host sync is harmless
        torch.cuda.synchronize(collector.device)
    returned = {str(i): one.returned() for i, one in enumerate(collector.slices)}
    tree = {
        **collector.recorder.state_dict(),
        "returned": returned,
        "gen": collector.gen.get_state(),
        "last": {"obs": collector.obs, "action": collector.actor.action},
        "out": collector.quarantine.out,
    }
    facts = {**config_entries(config), "spec": spec_to_dict(collector.env.spec), "seed": config.seed}
    path.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.save(path, tree, {"kind": "dump", "counters": counters, **facts})


def replay(path: str | Path, env: VecEnv | None = None, trust: bool = False) -> Iterator[tuple[Tensor, Step]]:
    """Replay a dump: yield (action [N, ...], resulting step) one after the other.

    Args:
        path: directory of the dump.
        env: a simulator like the one of the run; None: build the task of the run.
        trust: accept a task that names code, programs or paths (``docs/security.md``).
    Raises:
        ConfigError: no such dump, or its simulator cannot restore a state.
    """
    from pql.run.environment import build_env

    found, manifest = checkpoint.load(expanded("dump", path), ("dump",))
    config = from_dict(manifest["config"])
    if env is None and not trust:
        check_task(config, path)
    own = env or build_env(config)
    try:
        if not supports(own, Resumable) or not any(k.startswith("state/") for k in found):
            raise ConfigError("dump", path, "one of a simulator that saves its state, as this one does not")
        own.reset(0)  # some have no state before
        like = {"state": own.state_dict()}
        own.load_state_dict(checkpoint.unflatten(found, like)["state"])
        restarts: dict[int, list[Tensor]] = {}
        if "restarts/step" in found:
            for step, mask in zip(found["restarts/step"].tolist(), found["restarts/mask"], strict=True):
                restarts.setdefault(step, []).append(mask.to(own.spec.device))
        for count, action in enumerate(found.get("actions", torch.empty(0)).to(own.spec.device)):
            for mask in restarts.get(count, ()):
                cast(PartialReset, own).reset_where(mask)
            yield action, own.step(action)
    finally:
        if env is None:
            own.close()
