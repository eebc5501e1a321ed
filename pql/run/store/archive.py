"""Files of a run: policies, resume points and replay, and a record of failed writes."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pql.config import Config
from pql.contract.optional import stage_of
from pql.contract.spec_json import spec_to_dict
from pql.data import transitions
from pql.engine.deadlines import start_limit
from pql.errors import ConfigError, RunError
from pql.run.components import Parts
from pql.run.policy import fresh_policy, snapshot
from pql.run.ranks import Ranks
from pql.run.store import checkpoint
from pql.run.store import run_dir as rundir
from pql.run.store.claim import Claim
from pql.run.store.manifest import config_entries
from pql.run.store.saver import Saver

TRIES = 10  # to create a run directory while ``rm -rf`` deletes it


class Archive:
    """Writes into a run directory, optionally in a background thread.

    A checkpoint that cannot be written does not end the run: it causes a warning at once and is reported at the end.

    Args:
        run_dir: the run directory, with its lock ``held``; None: another rank holds it.
        overrides: command-line overrides of the config, for creating the directory again.
        warn: receives warnings.

    Attributes:
        missing: files that could not be written or were deleted, with the reason.
    """

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        run_dir: Path,
        held: Claim | None,
        overrides: Sequence[str],
        warn: Callable[[str], None],
    ):
        self.config, self.ranks, self.run_dir, self.warn = config, ranks, run_dir, warn
        self.folder = run_dir / "checkpoints"
        self.points = checkpoint.of_rank(self.folder, ranks.rank)
        self.missing: dict[str, str] = {}
        self.saver = Saver(start_limit(config.placement))
        self._held, self._overrides = held, overrides
        self._saved = False  # a resume point was saved; older ones are not deleted yet

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def save(self, parts: Parts, counters: dict[str, float], background: bool) -> None:
        """Write the policy and, unless ``checkpoint.replay`` is off, a resume point, after earlier requests.
        ``background``: only copy them here; a thread writes them."""
        self.settle()
        facts = {"counters": counters, "ranks": self.ranks.size}
        with parts.schedule.executor.exclusive():
            parts.check_environments()
            self.ranks.check_same(parts)
            if self.ranks.first:
                self.save_policy(parts, facts, background)
            if self.config.checkpoint.replay:
                path = self.points / f"tick-{parts.schedule.ticks:012d}"
                self._save(path, "resume", parts.state_dict(), parts, facts, background)
        self._saved = True
        if not background:
            self.settle()

    def save_policy(self, parts: Parts, facts: dict[str, Any], background: bool = False) -> None:
        """Write the current policy."""
        self._save(self.folder / "last", "policy", self._policy_state(parts), parts, facts, background)

    def save_best(self, parts: Parts, state: dict[str, Any], facts: dict[str, Any]) -> None:
        """Write the policy of the best evaluation."""
        self._save(self.folder / "best", "policy", state, parts, facts, True)

    def copy_policy(self, parts: Parts, path: Path, then: Callable[[], None]) -> None:
        """Write the current policy to ``path`` in the background, and call ``then`` in the thread that wrote it."""
        facts = {"counters": stage_of(parts.env), "ranks": self.ranks.size}
        self._save(path, "policy", self._policy_state(parts), parts, facts, True)
        self.saver.do(path.name, then)

    def save_replay(self, parts: Parts) -> None:
        """Write replay.safetensors."""
        name = "replay.safetensors" if self.ranks.first else f"replay-rank{self.ranks.rank}.safetensors"
        try:
            transitions.save_replay(parts.collector.replays[0], self.run_dir / name)
        except OSError as error:
            self.lost(name, error)

    def settle(self, wait: bool = True) -> None:
        """Report finished writes and delete older resume points.

        A resume point is valid once all ranks have written theirs; until then the previous one is kept. Several ranks
        therefore delete it when the next is saved, and keep the newest ones that all of them have.

        Args:
            wait: until everything has been written.
        """
        self._report(wait)
        if self._saved and (wait or (self.saver.idle and self.ranks.size == 1)):
            self._saved = False
            written = {path.name for path in checkpoint.resume_points(self.points)}
            common = set.intersection(*self.ranks.every(written))
            keep = self.config.checkpoint.keep
            self.saver.do("older resume points", lambda: checkpoint.rotate(self.points, keep, common))
            if wait:
                self.saver.outcomes(wait)

    def _report(self, wait: bool) -> None:
        """Report failed writes, except into a deleted run directory: :meth:`restore` reports that."""
        for name, error in self.saver.outcomes(wait):
            if error is not None and not (isinstance(error, FileNotFoundError) and not self._there()):
                self.lost(f"checkpoint {name}", error, ", the run continues")

    def lost(self, name: str, error: Exception, then: str = "") -> None:
        """Warn about a failed write and report it again at the end of the run."""
        self.warn(f"{name} not written{then}: {error}")
        self.missing[name] = str(error)

    def close(self) -> None:
        """Close the saver."""
        self.saver.close()

    def _policy_state(self, parts: Parts) -> dict[str, Any]:
        """Return the current policy, without state that only training needs."""
        state = snapshot(parts)
        needed = fresh_policy(self.config, parts.env.spec, "cpu").norm.state_dict()
        return {**state, "norm": {k: state["norm"][k] for k in needed}}

    def _save(self, path: Path, kind: str, state: Any, parts: Parts, facts: dict[str, Any], background: bool) -> None:
        write = self.saver.later if background else self.saver.now
        write(path, state, self.manifest(kind, parts, facts))

    def manifest(self, kind: str, parts: Parts, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Return the manifest of a checkpoint of ``kind``, with the entries ``facts``."""
        read = {"sources": parts.sources} if parts.sources else {}
        return {"kind": kind, **config_entries(self.config), "spec": spec_to_dict(parts.env.spec), **read, **facts}

    # -- a deleted directory --------------------------------------------------------------------------------------

    def _there(self) -> bool:
        """Return True unless the run directory was deleted or emptied."""
        known = self._held is None or self._held.there()
        return known and any((self.run_dir / name).exists() for name in ("config.yaml", "metrics.jsonl"))

    def restore(self, env_steps: int) -> bool:
        """Create the run directory again if it was deleted or emptied. Return True in that case.

        If only its lock was deleted, it is locked again.

        Raises:
            RunError: it cannot be created, or another run has taken its name or its lock.
        """
        if self._held is None:
            return False
        for left in reversed(range(TRIES)):
            there = self._there()
            try:
                if there:
                    self._held.renew()
                    return False
                self._create_again(self._held)
                break
            except ConfigError as error:
                if left and isinstance(error.__cause__, FileNotFoundError):  # the deletion is still going on
                    continue
                happened = "lost its lock" if there else "was deleted"
                raise RunError(f"{self.run_dir} {happened} while the run was at work ({error})") from None
        what = f"metrics and checkpoints from before {env_steps:,} env steps"
        self.missing[what] = "the run directory was deleted"
        self.warn(f"{self.run_dir} was deleted while the run was at work: recreated, without {what}")
        return True

    def _create_again(self, held: Claim) -> None:
        """Create the run directory again. Raises ``ConfigError`` as :meth:`restore`."""
        self._report(wait=True)  # while it is known to be deleted
        if not held.there():  # else the saver may have written a resume point while it was emptied
            rundir.check_new(self.run_dir)
        held.renew()
        rundir.create_run_dir(self.run_dir, self.config, self._overrides)
