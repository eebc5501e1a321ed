"""A run: budget, log, evaluations, checkpoints and callbacks around the tick."""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path

from torch import Tensor

from pql.algos.registry import seeds
from pql.collect.prefill import prefill
from pql.config import Config
from pql.config.fields import reads
from pql.config.files import expanded
from pql.contract.env import VecEnv
from pql.contract.optional import Measured, Resumable, WithEvaluation, supports
from pql.contract.spec_json import spec_to_dict
from pql.engine import crash, deadlines
from pql.engine.deadlines import start_limit, step_limit
from pql.engine.interrupt import Interrupt
from pql.engine.watchdog import Watchdog, watching
from pql.errors import ConfigError, PqlWarning, RunError, first_line
from pql.run.build import build
from pql.run.callbacks import as_callbacks
from pql.run.components import Parts
from pql.run.evaluation import (
    Evaluation,
    EvaluationReport,
    Evaluator,
    StoppedError,
    check_acting_epsilon,
    limit_note,
    options_of,
    run_episodes,
)
from pql.run.flight_recorder import dumping
from pql.run.guard import FrozenPolicy, NonFiniteMonitor, naming_memory, short_of_memory
from pql.run.log import sinks as log
from pql.run.log.closing import closing_words
from pql.run.log.console import Console, announced
from pql.run.log.console_log import CONSOLE_LOG
from pql.run.log.film import Filmer
from pql.run.log.pace import few_rollouts
from pql.run.play import can_film, check_video_packages
from pql.run.policy import check_finite, fresh_policy, init_from, snapshot
from pql.run.ranks import Ranks
from pql.run.store import checkpoint
from pql.run.store import run_dir as rundir
from pql.run.store.archive import Archive
from pql.run.store.claim import Claim
from pql.run.store.manifest import check_storable
from pql.run.store.run_dir import Summary, command
from pql.run.task import build_env, staggered

Callback = Callable[["Session", log.Row], None]
Callbacks = Callback | Sequence[Callback]
AGREE_EVERY = 32  # warm-up steps between checks of all ranks for its end


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
        stop: set to end the run after this tick, with the usual checkpoint and evaluation.
        seconds: time since the first env step, warm-up and earlier sittings included.
        best: mean return of the best evaluation so far.
    """

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
        self.ranks = Ranks(config)
        self.console = console
        # Closed again if a later step fails.
        with self._saying_what_is_kept(), self.ranks.failing_together(), ExitStack() as opened:
            self._open(opened, quiet, resume, overrides, claim)
            self.closing = opened.pop_all()

    def _open(
        self, opened: ExitStack, quiet: bool, resume: bool, overrides: Sequence[str], claim: Claim | None
    ) -> None:
        config, ranks = self.config, self.ranks
        self.stop, self.seconds, self.best = False, 0.0, float("-inf")
        self.last_eval: Evaluation | None = None
        self.prefilled = 0  # transitions in the replay at the start
        self._log_stretch = 1  # factor of the interval between rows
        self._ending = False  # all ranks have agreed to end
        self._failed: RunError | None = None  # error of an evaluation, with which the run ends after saving
        self._resumed, self._ready = resume, False  # warm-up done
        log.check_logger(config)
        check_storable(config)
        opened.callback(ranks.close)
        opened.enter_context(Watchdog(self.interrupt))
        self._held: Claim | None = None
        self.run_dir = ranks.by_first(lambda: self._hold(opened, claim or rundir.claim_directory(config, resume)))
        self.checkpoints = self.run_dir / "checkpoints"
        self.archive = Archive(config, ranks, self.run_dir, self._held, overrides, self.warn)
        opened.callback(self.archive.close)
        if self.console is None and ranks.first and not quiet:
            self.console = announced(config, self.run_dir)
        if self.console:
            opened.callback(self.console.close)
        self._make_parts(opened)
        if resume:
            ticks = self._continue()
        else:
            ticks = 0
            self._start()
            self._start_new(overrides)
        resumed_at = self.env_steps if resume else None
        if self.console and ranks.first:
            self.console.record(self.run_dir / CONSOLE_LOG)
        self._warm_up(ticks)
        self.sinks = log.Sinks([])
        if ranks.first:
            self.sinks = log.make_sinks(config, self.run_dir, self.console, resumed_at)
        opened.callback(self._close_sinks)
        if resume and ranks.first:
            rundir.amend_config(self.run_dir, config, overrides)  # after metrics.jsonl could be written
        with self.doing("building the evaluation's environments"):
            self.evaluator = self._make_evaluator()
        if self.evaluator:
            opened.callback(self.evaluator.close)
        self.filmer = self._make_filmer()
        if self.filmer:
            opened.callback(self.filmer.close)
        ranks.check_same(self.parts)
        rundir.check_shared(self.run_dir)
        self._window = self._begun = self._totals()
        updates = self.parts.updates()
        self._guard = NonFiniteMonitor(self.warn, updates, self.parts.collector.restarts)
        self._frozen = FrozenPolicy(self.warn, updates["p"], reads(config, "algo.policy.saturation_penalty"))
        self._say_more()

    def _make_parts(self, opened: ExitStack) -> None:
        """Build simulators, networks and workers, ready for the first reset."""
        with self.doing("building the simulator and the networks"):
            with watching(f"building {self.config.task.title}", start_limit(self.config.placement)):
                self.parts: Parts = _build(self.ranks.share, self.given_env)
            opened.callback(self._close_parts)
            check_storable(self.config, spec_to_dict(self.parts.env.spec))
            self._check_env()
            self.ranks.connect(self.parts)
        if self.console:
            self.console.progress.now = self._now
        with self.doing("compiling", self.parts.preparation):
            self.parts.prepare()

    def _start(self) -> None:
        with self.doing("resetting the simulator"):
            self.parts.start(self.env_steps)

    def _start_new(self, overrides: Sequence[str]) -> None:
        """Prepare a new run: initial weights, prefilled data and the run directory."""
        config, ranks = self.config, self.ranks
        if config.init_from:
            init_from(self.parts, expanded("init_from", config.init_from))
        if config.replay.prefill:
            with self.doing(f"reading {config.replay.prefill}"):
                taken = prefill(self.parts.collector, config.replay.prefill, ranks.rank, ranks.size)
            self.prefilled = sum(ranks.every(taken))
        ranks.spread(self.parts)
        if ranks.first:
            rundir.create_run_dir(self.run_dir, config, overrides)

    def _warm_up(self, ticks: int) -> None:
        """Run the rest of the warm-up, within the budget; tick ``ticks`` is next."""
        steps, start, before = self.config.algo.warmup_steps, time.perf_counter(), self.seconds
        total = steps * self.config.num_envs

        def going() -> bool:
            self.seconds = before + time.perf_counter() - start
            wanted = bool(self._to_end())
            if self.ranks.size == 1:
                return not wanted
            # Ranks must end it at the same step, so they wait for each other; rarely, for speed.
            return self.parts.collector.steps % AGREE_EVERY > 0 or not any(self.ranks.every(wanted))

        with dumping(self.run_dir, self.parts, self.ranks.rank):
            if ticks == 0:
                with self.doing("warm-up", lambda: f"{self.env_steps:,} of {total:,} random env steps"):
                    self._ready = self.parts.warm_up(steps, going)
            else:
                self._ready = True
            if self._ready:
                self.parts.begin(ticks)
        if ticks == 0:
            self.seconds = before + time.perf_counter() - start
            if self._ready and (note := few_rollouts(self.config, self.seconds)):
                self.say(note)

    def _say_more(self) -> None:
        """Report notes at the start of the run."""
        if self.prefilled:
            self.say(f"replay starts with {self.prefilled:,} transitions of {self.config.replay.prefill}")
        if not self.parts.schedule.reproducible:
            self.say("replicas run free: the same seed would give other bits (algo.central.order=turns repeats them)")
        wanted = self.config.eval.final or self.config.eval.every_seconds is not None
        if wanted and (note := limit_note(self.parts.env.spec, self.config.eval.max_steps)):
            self.say(note)
        if self._resumed:
            self.say(f"resumed at tick {self.parts.schedule.ticks:,}, {self.env_steps:,} env steps")

    def _hold(self, opened: ExitStack, claim: Claim) -> Path:
        """Hold the claim of the run directory until ``opened`` is closed."""
        self._held = opened.enter_context(claim)
        crash.name_run(claim.path, command("resume", claim.path.absolute(), self.config))
        return claim.path

    def _continue(self) -> int:
        """Start from the newest intact resume point; return its ticks."""
        with self.doing("loading the resume point"):
            tensors, manifest = self.ranks.resume_point(self.checkpoints)
            check_finite(tensors, manifest)
            self.parts.load_counters(manifest["counters"])
        self._start()
        with self.doing("loading the resume point"):
            return self._load(tensors, manifest["counters"])

    def _load(self, tensors: dict[str, Tensor], counters: dict[str, float]) -> int:
        parts = self.parts
        parts.load_state_dict(checkpoint.unflatten(tensors, parts.state_dict()))
        self.seconds = counters["seconds"]
        if not supports(parts.env, Resumable):
            self.warn(
                "this simulator cannot restore its state: episodes begin again, so the run continues with other bits"
            )
        best = self.checkpoints / "best"
        if best.exists():  # stored separately: an evaluation after the resume point may have improved it
            try:
                self.best = checkpoint.load(best)[1].get("return_mean", self.best)
            except checkpoint.CorruptCheckpointError as error:
                self.warn(f"{error}; the next evaluation replaces it")
        return int(counters["ticks"])

    def _close_sinks(self) -> None:
        with watching("closing the log", start_limit(self.config.placement)):
            self.sinks.close()

    def _close_parts(self) -> None:
        self.parts.schedule.executor.close()
        if self.given_env is None:
            self.parts.close_envs()

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
        if self.console:
            self.console.note(f"warning: {text}")
        warnings.warn(text, PqlWarning, stacklevel=2)

    def _counters(self) -> dict[str, float]:
        """State of the session for a resume point."""
        return {**self.parts.counters(), "seconds": self.seconds}

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
            result = self._final_evaluation()
            if self._failed is not None:
                raise self._failed
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
            if self.console:
                self.console.note("\n".join([f"error: {first_line(error)}", *error.__notes__]))
            raise

    def _loop(self) -> None:
        config, schedule = self.config, self.parts.schedule
        start, before = time.perf_counter(), self.seconds
        every = {
            "log": config.logger.every_seconds,
            "save": config.checkpoint.every_seconds,
            "eval": config.eval.every_seconds if self.evaluator else None,
            "video": config.eval.video_every_seconds,
        }
        due = {k: before + v for k, v in every.items() if v is not None and self.ranks.first}
        pending: log.Pending | None = None
        # A started run always completes its first tick: it can be saved only before the start or after a tick.
        while self._ready and (schedule.ticks == 0 or not self._over()):
            schedule.tick()
            self.seconds = before + time.perf_counter() - start
            if pending and pending.ready():
                self._write(pending.collect())
                pending = None
            self._collect_evaluations()
            self.archive.settle(wait=False)
            wanted = [k for k, t in due.items() if self.seconds >= t and not (k == "log" and pending)]
            due |= {k: self.seconds + (every[k] or 0.0) * self._stretch(k) for k in wanted}
            if "log" in wanted and self._keep_directory():
                wanted.append("save")  # the only copy of the policy
            for what in self.ranks.agree([*wanted, *self._to_end()]):
                if what == "log":
                    if pending:
                        self._write(pending.collect())
                    pending = self._drain()
                elif what == "save":
                    self.save(background=True)
                elif what == "eval":
                    self._request_evaluation()
                elif what == "video":
                    self._request_video()
                else:
                    self._ending = True
                    self.interrupt.asked |= what == "interrupt"
        if pending:
            self._write(pending.collect())
        if schedule.ticks > self._window["ticks"]:
            self._write(self._drain().collect())

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
        asked = self._ending if self.ranks.size > 1 else bool(self._to_end())
        return asked or (steps is not None and self.env_steps >= steps)

    def _to_end(self) -> list[str]:
        """This process's reason to end the run, except env steps, which are equal on all ranks."""
        budget, result = self.config.budget, self.last_eval
        target = budget.target_return
        stop = (
            self.stop
            or self._failed is not None
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

    def _write(self, row: log.Row) -> None:
        if row.get("train/episodes") == 0:  # no episode ended in this window: there are no means
            row = {k: v for k, v in row.items() if not k.startswith(("train/", "episode/"))}
        with watching("writing the log", start_limit(self.config.placement)):
            self.sinks.write(row)
        self._guard.look(row)
        self._frozen.look(row)
        for callback in self.callbacks if self.ranks.first else ():
            callback(self, row)

    # -- evaluation -----------------------------------------------------------------------------------------------

    def _evaluates_beside(self) -> bool:
        """Return True if a second simulator is possible. If not, the final evaluation uses the training simulator."""
        return self.given_env is None and (not self.parts.env.spec.single_instance or self._env_beside() is not None)

    def _env_beside(self) -> VecEnv | None:
        """Evaluation environments that the training simulator provides."""
        env = self.parts.env
        return env.beside() if supports(env, WithEvaluation) else None

    def _check_env(self) -> None:
        budget, spec = self.config.budget, self.parts.env.spec
        check_acting_epsilon(self.config.eval.epsilon, spec)
        if self.given_env is not None and self.ranks.share.num_envs != spec.num_envs:
            raise ConfigError("num_envs", self.ranks.share.num_envs, f"{spec.num_envs}, as the given environment has")
        if budget.target_return is not None and not self._evaluates_beside():
            raise ConfigError(
                "budget.target_return",
                budget.target_return,
                "null: this environment cannot be evaluated during training",
            )

    def _make_evaluator(self) -> Evaluator | None:
        wanted = self.config.eval.every_seconds is not None or self.config.eval.final
        if not (wanted and self._evaluates_beside() and self.ranks.first):
            return None
        place = self.config.placement
        with watching("building the evaluation's environments", start_limit(place)):
            env, seed = self._env_beside() or build_env(self.ranks.share, self.config.eval.num_envs), self.config.seed
            policy = fresh_policy(self.config, self.parts.env.spec, env.spec.device)
            limits = step_limit(place), start_limit(place)
            return Evaluator(env, policy, seeds(seed)["eval"], self.config.eval, *limits)

    def _now(self) -> log.Row:
        return {"time/seconds": self.seconds, "steps/env": float(self.env_steps)}

    def _request_evaluation(self) -> None:
        if self.evaluator:
            with self.parts.schedule.executor.exclusive():
                self.evaluator.request(snapshot(self.parts), self._now())

    def _make_filmer(self) -> Filmer | None:
        wanted = self.config.eval.video_every_seconds
        if wanted is None:
            return None
        if self.given_env is not None or not can_film(self.config, self.parts.env):
            raise ConfigError(
                "eval.video_every_seconds", wanted, "null: this environment does not render (docs/play.md)"
            )
        check_video_packages("eval.video_every_seconds", wanted)
        kept = self.config.eval.videos_kept
        return Filmer(self.run_dir, self.config.device, kept, self.warn) if self.ranks.first else None

    def _request_video(self) -> None:
        """Record the current policy, unless a video is being recorded."""
        if self.filmer and not self.filmer.busy:
            self.filmer.busy = True
            with self.parts.schedule.executor.exclusive():
                start = partial(self.filmer.start, self.env_steps)
                self.archive.copy_policy(self.parts, self.filmer.policy, start)

    def _collect_evaluations(self) -> None:
        if self.filmer and (video := self.filmer.finished()):
            self.sinks.video(*video)
        while self.evaluator and not self.evaluator.reports.empty():
            self._record(self.evaluator.reports.get_nowait())
        if self.evaluator and self._failed is None:
            self._failed = self.evaluator.hung()

    def _record(self, report: EvaluationReport) -> None:
        result = report.outcome
        if isinstance(result, StoppedError):
            return
        if isinstance(result, BaseException):
            self._failed = RunError(f"the evaluator failed: {first_line(result)}")
            self._failed.__cause__ = result
            return
        if not result.returns:  # all remote actors left, or Ctrl-C came before the first episode ended
            if not self.interrupted:
                self.warn("an evaluation has no result: none of its episodes ended")
            return
        self.last_eval = result
        self._write(
            {
                **report.counters,
                **{f"eval/{k}": v for k, v in result.measures().items()},
                "eval/dropped": float(self.evaluator.dropped if self.evaluator else 0),
            }
        )
        if result.mean > self.best:
            self.best = result.mean
            facts = {"return_mean": result.mean, "counters": report.counters}
            self.archive.save_best(self.parts, report.state, facts)

    def _final_evaluation(self) -> Evaluation | None:
        """Evaluate the current policy; None if disabled or after Ctrl-C."""
        if self.filmer:
            with self.doing("the last video"):
                self.filmer.wait(lambda: self.interrupted, deadlines.LAST_VIDEO)
                self._collect_evaluations()
        if self.evaluator:
            with self.doing("the last evaluation during training", self._episodes):
                self._wait_for_evaluator()
        if not self.config.eval.final or self.interrupted or not self.ranks.first or self._failed is not None:
            return None
        before = self.last_eval
        if self.evaluator:
            with self.doing("evaluation", self._episodes):
                self._request_evaluation()
                self._wait_for_evaluator()
        else:
            self._evaluate_here()
        if self.interrupted or self._failed is not None:
            return None
        if self.last_eval is before:
            self.archive.missing["the final evaluation"] = "none of its episodes ended; pql eval repeats it"
            return None
        return self.last_eval

    def _evaluate_here(self) -> None:
        """Evaluate on the training environments."""
        env, seed = self.parts.env, seeds(self.config.seed)["eval"]
        policy, ended = fresh_policy(self.config, env.spec, env.spec.device), [0]
        policy.load_state_dict(snapshot(self.parts))
        with self.doing("evaluation", lambda: f"{ended[-1]} of {env.spec.num_envs} episodes"):
            place = self.config.placement
            with watching("the evaluation", start_limit(place), step_limit(place)):
                options = {**options_of(self.config.eval), "staggered": staggered(self.config)}
                outcome = run_episodes(env, policy, seed, ended=ended.append, **options)
        if not self.interrupted:
            self._record(EvaluationReport(self._now(), policy.state_dict(), outcome))

    def _episodes(self) -> str:
        """Progress of the evaluator."""
        assert self.evaluator is not None
        return f"{self.evaluator.ended} of {self.evaluator.env.spec.num_envs} episodes"

    def _wait_for_evaluator(self) -> None:
        assert self.evaluator is not None
        while not self.interrupted and self._failed is None and not self.evaluator.wait(deadlines.LOOK):
            self._collect_evaluations()
        self._collect_evaluations()

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
        updates, begun = self.parts.updates(), self._begun
        summary = Summary(
            str(self.run_dir),
            result.mean if result else None,
            result.iqm if result else None,
            len(result.returns) if result else 0,
            self.seconds,
            self.env_steps,
            updates["v"],
            updates["p"],
            str(self.checkpoints / "last"),
            self.interrupted,
            **(
                {}
                if result is None
                else {"return_median": result.median, "length_mean": result.length, "success": result.success}
            ),
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
        seconds, ticks = self.seconds - begun["seconds"], int(self.parts.schedule.ticks - begun["ticks"])
        kept = (self.checkpoints / "last").exists(), bool(checkpoint.resume_points(self.checkpoints))
        best = self.best if (self.checkpoints / "best").exists() else float("-inf")
        self.say(closing_words(summary, self.parts.busy(), seconds, ticks, self.config, kept, best))
        if self.archive.missing and self.ranks.first:
            lost = "; ".join(f"{what} ({why})" for what, why in self.archive.missing.items())
            raise RunError(f"the run has come to its end, but not all of it could be kept in {self.run_dir}: {lost}")
        return summary


def _build(config: Config, env: VecEnv | None) -> Parts:
    try:
        return build(config, env)
    except ConfigError as error:
        named = {k: f"task.{k}" for k in ("id", "game", "model") if getattr(config.task, k)}
        free = {k: f"task.{group}.{k}" for group in ("kwargs", "remote") for k in getattr(config.task, group)}
        given = {**free, **named}
        if error.value is None and config.task.by_actors:  # what is to be given, too
            group = "remote" if config.task.remote else "kwargs"
            given |= {k: f"task.{group}.{k}" for k in ("token_file", "cert", "key")}
        if error.setting in given:  # as given by the user
            raise ConfigError(given[error.setting], error.value, error.allowed) from error
        raise
    except (RuntimeError, MemoryError) as error:
        if short_of_memory(error):
            less = "algo.policy.hidden, algo.critic.hidden, replay.capacity or num_envs"
            raise RunError(f"too little memory for this run: choose smaller {less} ({first_line(error)})") from None
        raise
