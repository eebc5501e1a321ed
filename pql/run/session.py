"""A run: budget, log, evaluations, checkpoints and callbacks around the tick."""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from pql.config import Config
from pql.config.fields import reads
from pql.contract.env import VecEnv
from pql.contract.optional import Measured, stage_of, supports
from pql.engine import crash
from pql.engine.deadlines import start_limit
from pql.engine.interrupt import Interrupt
from pql.engine.watchdog import watching
from pql.errors import ConfigError, PqlWarning, RunError
from pql.run.callbacks import as_callbacks
from pql.run.components import Parts
from pql.run.episodes import Evaluation
from pql.run.evaluator import Evaluations
from pql.run.flight_recorder import dumping
from pql.run.guard import FrozenPolicy, NonFiniteMonitor, naming_memory
from pql.run.log import sinks as log
from pql.run.log.closing import closing_words
from pql.run.log.console import Console
from pql.run.opening import open_run, say_notes
from pql.run.ranks import Ranks
from pql.run.store import checkpoint
from pql.run.store import run_dir as rundir
from pql.run.store.archive import Archive
from pql.run.store.claim import Claim
from pql.run.store.run_dir import Summary, command

Callback = Callable[["Session", log.Row], None]
Callbacks = Callback | Sequence[Callback]


class Session:
    """A run, new or resumed.

    Args:
        config: checked by ``validate.validate``.
        env: a live environment to train on instead of the task's; it is also the one evaluated, after training.
        callbacks: one or several, called as ``callback(session, row)`` with every row of metrics; set
            ``session.stop`` to end the run.
        quiet: print nothing.
        resume: continue the run in ``config.run_dir`` from its newest intact resume point.
        overrides: the command-line overrides of ``config``, stored with the run.
        interrupt: reports Ctrl-C; by default a new one, active while :meth:`train` runs.
        console: one that has already printed the header of the run; by default a new one.
        claim: existing claim of the run directory; closed at the end of the run.

    Attributes:
        state: output of ``Driven.state``, with which a new run begins; None: a fresh one.
        stop: set to end the run after this tick, with the usual checkpoint and evaluation.
        seconds: time since the first env step, warm-up and earlier sittings included.
    """

    state: Mapping[str, Any] | None = None

    def __init__(
        self,
        config: Config,
        env: VecEnv | None = None,
        callbacks: Callbacks = (),
        quiet: bool = False,
        resume: bool = False,
        overrides: Sequence[str] = (),
        interrupt: Interrupt | None = None,
        console: Console | None = None,
        claim: Claim | None = None,
    ):
        self.config, self.callbacks, self.given_env = config, as_callbacks(callbacks), env
        self.interrupt = interrupt or Interrupt()
        self.console, self.resumed = console, resume
        self.stop, self.seconds = False, 0.0
        self.prefilled = 0  # transitions in the replay at the start
        self.ready = False  # warm-up done
        self.claim: Claim | None = None  # of the run directory; None on ranks but the first
        self.run_dir: Path
        self.checkpoints: Path
        self.archive: Archive
        self.parts: Parts
        self.sinks = log.Sinks([])
        self._log_stretch = 1  # factor of the interval between rows
        self._ending = False  # all ranks have agreed to end
        self.ranks = Ranks(config)
        self.evaluations = Evaluations(self)
        # Closed again if a later step fails.
        with self._saying_what_is_kept(), self.ranks.failing_together(), ExitStack() as opened:
            open_run(self, opened, quiet, overrides, claim)
            updates = self.parts.updates()
            self._window = self._begun = self._totals()
            self._guard = NonFiniteMonitor(self.warn, updates, self.parts.collector.state.restarts)
            self._frozen = FrozenPolicy(self.warn, updates["p"], reads(config, "algo.policy.saturation_penalty"))
            say_notes(self)
            self.closing = opened.pop_all()

    def hold(self, claim: Claim) -> Path:
        """Take the claim of the run directory; return the directory."""
        self.claim = claim
        crash.name_run(claim.path, command("resume", claim.path.absolute(), self.config))
        return claim.path

    def close_sinks(self) -> None:
        with watching("closing the log", start_limit(self.config.placement)):
            self.sinks.close()

    @property
    def best(self) -> float:
        """Mean return of the best evaluation so far."""
        return self.evaluations.best

    @property
    def last_eval(self) -> Evaluation | None:
        """The last evaluation."""
        return self.evaluations.last

    @property
    def env_steps(self) -> int:
        """Transitions so far, summed over all environments, warm-up included."""
        return self.parts.env_steps * self.ranks.size

    @property
    def interrupted(self) -> bool:
        """True after Ctrl-C or SIGTERM."""
        return self.interrupt.asked

    def say(self, text: str) -> None:
        """Print a line, unless the run is quiet."""
        if self.console:
            self.console.say(text)

    def doing(self, what: str, detail: Callable[[], str] = str) -> AbstractContextManager[None]:
        """Context manager: show ``what`` and ``detail`` on the console, unless the run is quiet."""
        return self.console.doing(what, detail) if self.console else nullcontext()

    def warn(self, text: str) -> None:
        """Report a problem that does not end the run."""
        warnings.warn(text, PqlWarning, stacklevel=2)

    def _counters(self) -> dict[str, float]:
        """State of the session for a resume point."""
        return {**self.parts.counters(), **stage_of(self.parts.env), "seconds": self.seconds}

    def now(self) -> log.Row:
        """Return the current time and env steps, as in the log."""
        return {"time/seconds": self.seconds, "steps/env": float(self.env_steps)}

    def _totals(self) -> dict[str, float]:
        """Counters for rates."""
        return {**self.parts.totals(), "env_steps": self.env_steps, "seconds": self.seconds}

    # -- the loop -------------------------------------------------------------------------------------------------

    def train(self) -> Summary:
        """Run until the budget ends or a callback or Ctrl-C stops it; then save, evaluate and summarise. Call once.

        Raises:
            RunError: the run failed, or one of its final files could not be written.
        """
        with self._saying_what_is_kept(), self.ranks.failing_together(), self.interrupt, self.closing:
            self.closing.callback(self.interrupt.release)  # not worth waiting for at the end
            with dumping(self.run_dir, self.parts, self.ranks.rank), naming_memory(self.parts.collector.device):
                self._loop()
                self.save()
            if self.config.replay.save:
                with self.doing("saving the replay"):
                    self.archive.save_replay(self.parts)
            self.archive.missing = {k: v for one in self.ranks.every(self.archive.missing) for k, v in one.items()}
            result = self.evaluations.final()
            if self.evaluations.failed is not None:
                raise self.evaluations.failed
            return self._finish(result)

    @contextmanager
    def _saying_what_is_kept(self) -> Iterator[None]:
        """Context manager: a failure gets a note on what is on the disk, and the command that uses it."""
        try:
            yield
        except Exception as error:
            if "checkpoints" not in vars(self) or isinstance(error, ConfigError):  # nothing has changed
                raise
            if checkpoint.resume_points(self.checkpoints):
                error.add_note(f"to continue: {command('resume', self.run_dir, self.config)}")
            elif (self.checkpoints / "last").exists():
                error.add_note(f"its last policy is kept: {command('eval', self.run_dir, self.config)}")
            else:
                error.add_note("nothing had been saved")
            raise

    def _loop(self) -> None:
        config, schedule = self.config, self.parts.schedule
        start, before = time.perf_counter(), self.seconds
        every = {
            "log": config.logger.every_seconds,
            "save": config.checkpoint.every_seconds,
            "eval": config.eval.every_seconds if self.evaluations.evaluator else None,
            "video": config.eval.video_every_seconds,
        }
        due = {k: before + v for k, v in every.items() if v is not None and self.ranks.first}
        pending: log.Pending | None = None
        # A started run always completes its first tick: it can be saved only before the start or after a tick.
        while self.ready and (schedule.ticks == 0 or not self._over()):
            schedule.tick()
            self.seconds = before + time.perf_counter() - start
            if pending and pending.ready():
                self.write(pending.collect())
                pending = None
            self.evaluations.collect()
            self.archive.settle(wait=False)
            wanted = [k for k, t in due.items() if self.seconds >= t and not (k == "log" and pending)]
            due |= {k: self.seconds + (every[k] or 0.0) * self._stretch(k) for k in wanted}
            if "log" in wanted and self._keep_directory():
                wanted.append("save")  # the only copy of the policy
            for what in self.ranks.agree([*wanted, *self.to_end()]):
                if what == "log":
                    if pending:
                        self.write(pending.collect())
                    pending = self._drain()
                elif what == "save":
                    self.save(background=True)
                elif what == "eval":
                    self.evaluations.request()
                elif what == "video":
                    self.evaluations.request_video()
                else:
                    self._ending = True
                    self.interrupt.asked |= what == "interrupt"
        if pending:
            self.write(pending.collect())
        if schedule.ticks > self._window["ticks"]:
            self.write(self._drain().collect())

    def _stretch(self, what: str) -> int:
        """Return the factor of an interval: rows of a very long run come less often, see ``log.stretch``."""
        if what != "log":
            return 1
        now = log.stretch(self.run_dir)
        if now > self._log_stretch:
            self.say(f"metrics.jsonl is large: rows every {now * self.config.logger.every_seconds:g} s from now on")
        self._log_stretch = now
        return now

    def _over(self) -> bool:
        steps = self.config.budget.env_steps
        asked = self._ending if self.ranks.size > 1 else bool(self.to_end())
        return asked or (steps is not None and self.env_steps >= steps)

    def to_end(self) -> list[str]:
        """This process's reason to end the run, except env steps, which are equal on all ranks."""
        budget, result = self.config.budget, self.last_eval
        target = budget.target_return
        stop = (
            self.stop
            or self.evaluations.failed is not None
            or (target is not None and result is not None and result.mean >= target)
            or (budget.seconds is not None and self.seconds >= budget.seconds and self.ranks.first)
        )
        return [*(["stop"] if stop else []), *(["interrupt"] if self.interrupted else [])]

    # -- logging --------------------------------------------------------------------------------------------------

    def _drain(self) -> log.Pending:
        """Assemble a row of everything since the last one; device values arrive later."""
        parts, now, last, updates = self.parts, self._totals(), self._window, self.parts.updates()
        self._window = now
        span = max(now["seconds"] - last["seconds"], 1e-9)
        row: log.Row = {
            "time/seconds": now["seconds"],
            "steps/env": now["env_steps"],
            "updates/v": updates["v"],
            "updates/p": updates["p"],
            # Over the whole run from the first tick, so they equal the configured ratios exactly.
            "ratio/v_per_step": updates["v"] / (parts.steps - self.config.algo.warmup_steps - parts.counts.ahead),
            "ratio/p_per_v": updates["p"] / updates["v"],
            **parts.schedule.measures(),
            "throughput/env_steps_per_s": (now["env_steps"] - last["env_steps"]) / span,
            "throughput/updates_per_s": (now["updates"] - last["updates"]) / span,
            **{k: (v - last[k]) / span for k, v in now.items() if k.startswith("busy/")},
            **log.memory(parts.env.spec.device),
            **(parts.env.measures() if supports(parts.env, Measured) else {}),
        }
        with parts.schedule.executor.exclusive():
            return log.Pending(parts.drain(self.ranks.group), row)

    def write(self, row: log.Row) -> None:
        """Log a row of metrics, check it and call the callbacks."""
        if row.get("train/episodes") == 0:  # no episode ended in this window: there are no means
            row = {k: v for k, v in row.items() if not k.startswith(("train/", "episode/", "step/"))}
        with watching("writing the log", start_limit(self.config.placement)):
            self.sinks.write(row)
        self._guard.look(row)
        self._frozen.look(row)
        for callback in self.callbacks if self.ranks.first else ():
            callback(self, row)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def save(self, background: bool = False) -> None:
        """Write the current policy and, unless ``checkpoint.replay`` is off, a resume point. Between ticks.

        Args:
            background: only copy them here; a thread writes them during the run.
        """
        self._keep_directory()
        with self.doing("saving"):
            self.archive.save(self.parts, self._counters(), background)

    def _keep_directory(self) -> bool:
        """Return True if the run directory had been deleted: it has been created again without its old files."""
        if recreated := self.archive.restore(self.env_steps):
            self.sinks.reopen()
        return recreated

    # -- the end --------------------------------------------------------------------------------------------------

    def _finish(self, result: Evaluation | None) -> Summary:
        updates = self.parts.updates()
        summary = Summary(
            run_dir=str(self.run_dir),
            return_mean=result.mean if result else None,
            return_iqm=result.iqm if result else None,
            episodes=len(result.returns) if result else 0,
            seconds=self.seconds,
            env_steps=self.env_steps,
            updates_v=updates["v"],
            updates_p=updates["p"],
            checkpoint=str(self.checkpoints / "last"),
            interrupted=self.interrupted,
            return_median=result.median if result else None,
            length_mean=result.length if result else None,
            success=result.success if result else None,
        )
        if self.ranks.first:
            if self._keep_directory():
                self.archive.save_policy(self.parts, {"counters": self._counters(), "ranks": self.ranks.size})
            self.archive.settle()
            try:
                rundir.write_summary(self.run_dir, summary)
            except OSError as error:
                self.archive.lost("summary.json", error)
        if self.console:
            self.console.close()
        self._say_end(summary)
        if self.archive.missing and self.ranks.first:
            lost = "; ".join(f"{what} ({why})" for what, why in self.archive.missing.items())
            raise RunError(f"the run has come to its end, but not all of it could be kept in {self.run_dir}: {lost}")
        return summary

    def _say_end(self, summary: Summary) -> None:
        begun, ended = self._begun, self._totals()
        span = max(ended["seconds"] - begun["seconds"], 1e-9)
        busy = {k: v / span for k, v in self.parts.busy().items()} if ended["ticks"] > begun["ticks"] else {}
        kept = (self.checkpoints / "last").exists(), bool(checkpoint.resume_points(self.checkpoints))
        best = self.best if (self.checkpoints / "best").exists() else float("-inf")
        self.say(closing_words(summary, self.config, busy, kept, best))
