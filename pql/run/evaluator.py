"""Evaluations and videos of a run: greedy episodes on separate environments, in a thread of their own."""

import math
import queue
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from pql.algos.registry import seeds
from pql.collect.actors import action_buffer
from pql.config.schema import EvalConfig
from pql.contract.env import VecEnv, capturable, make_ready
from pql.contract.optional import Capturable, WithEvaluation, set_stage, stage_of, supports
from pql.engine import crash, deadlines, watchdog
from pql.engine.deadlines import Limit, idle_get, start_limit, step_limit
from pql.engine.graph import Execution, Graph, clone_state
from pql.engine.inductor import Choice
from pql.engine.watchdog import Watch, watching
from pql.errors import ConfigError, HungError, PqlWarning, RunError, first_line
from pql.run.environment import build_eval_env, staggered
from pql.run.episodes import EpisodeRules, Evaluation, StoppedError, check_acting_epsilon, run_episodes
from pql.run.log.film import Filmer
from pql.run.play import can_film, check_video_packages
from pql.run.policy import Policy, fresh_policy, snapshot
from pql.types import Step

if TYPE_CHECKING:
    from pql.run.session import Session


def rules_of(settings: EvalConfig, staggered: bool = False) -> EpisodeRules:
    """Return the rules of a run's evaluations."""
    return EpisodeRules(epsilon=settings.epsilon, max_steps=settings.max_steps, staggered=staggered)


@dataclass(frozen=True)
class EvaluationReport:
    """Result of a request: the counters at the request, the evaluated policy, the outcome."""

    counters: dict[str, float]
    state: dict[str, Any]
    outcome: Evaluation | BaseException


class CapturedEnv:
    """Environments whose step is one CUDA graph, so that evaluations leave the host to the training."""

    def __init__(self, env: Capturable, choice: Choice):
        self._env, self._action = env, action_buffer(env.spec)
        execution = Execution(choice, worker="evaluation")
        self._graph = Graph(self._body, env.spec.device, env.generators, cast(Any, env), execution)

    def prepare(self) -> None:
        """Prepare the environments and capture a step; if that fails, one line says why, and steps are launched."""
        make_ready(self._env)
        try:
            self._graph.prepare()
        except Exception as error:  # simulators' errors have no common type
            if self._graph.required:
                raise
            why = first_line(error)
            warnings.warn(f"a step of the evaluation is not captured, {why}", PqlWarning, stacklevel=2)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def step(self, action: Tensor) -> Step:
        """Step with ``action`` [n, ...], as ``VecEnv.step``; the next step overwrites the answer."""
        self._action.copy_(action)
        self._graph()
        return self._answer

    def _body(self) -> None:
        self._answer = self._env.step(self._action)


class Evaluator:
    """Evaluates snapshots in its own thread. A request that comes while it is busy is dropped and counted.

    Create it before the first tick: ``env`` is prepared here, so that no graph is captured while the run is training.

    Args:
        settings: of the run's evaluations.
        step, start: seconds without progress after which an evaluation counts as hung, and the same before its first
            step; None: no limit.
    """

    def __init__(
        self,
        env: VecEnv,
        policy: Policy,
        seed: int,
        settings: EvalConfig | None = None,
        step: Limit | None = None,
        start: Limit | None = None,
    ):
        self.step, self.start = step, start or step
        self.watch: Watch | None = None  # of the current evaluation
        self.env, self.policy, self.seed = env, policy, seed
        self._rules = rules_of(settings or EvalConfig())
        make_ready(env)
        self.dropped = 0
        self.ended = 0  # episodes of the current evaluation that had ended at the last check
        self.reports: queue.SimpleQueue[EvaluationReport] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[dict[str, float] | None] = queue.SimpleQueue()
        self._idle, self._stop = threading.Event(), threading.Event()
        self._idle.set()
        device = env.spec.device
        # A separate stream on CUDA: on the default one, short work of the run would queue behind episodes.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        me = threading.current_thread()
        self._thread = threading.Thread(target=self._loop, args=(me,), name="pql-evaluator", daemon=True)
        self._thread.start()

    def request(self, state: dict[str, Any], counters: dict[str, float]) -> bool:
        """Copy a policy's ``state`` and evaluate it at the stage in ``counters``, which come back with the result.
        False if busy."""
        if not self._idle.is_set():
            self.dropped += 1
            return False
        self._idle.clear()
        self.ended = 0
        self.policy.load_state_dict(state)
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._inbox.put(counters)
        return True

    def _loop(self, owner: threading.Thread) -> None:
        crash.name_thread("the evaluator")
        torch.set_num_threads(1)
        while (counters := idle_get(self._inbox, owner)) is not None:
            outcome: Evaluation | BaseException
            try:
                with torch.cuda.stream(self._stream), self._watched():  # it ends in a host read: the stream is idle
                    set_stage(self.env, counters)
                    outcome = run_episodes(self.env, self.policy, self.seed, self._rules, self._stop, self._count)
            except BaseException as error:
                outcome = error
            # A copy: the next request may come before this report is read.
            self.reports.put(EvaluationReport(counters, clone_state(self.policy.state_dict()), outcome))
            self._idle.set()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        if self.start is None:
            yield
            return
        with watchdog.watching("the evaluation", self.start, self.step, polled=True) as self.watch:
            yield
        self.watch = None

    def hung(self) -> HungError | None:
        """Return a warning about an evaluation without progress; None if it progresses or none is running."""
        watch = self.watch
        return watch.error() if watch is not None and watch.late else None

    def _count(self, ended: int) -> None:
        self.ended = ended

    def progress(self) -> str:
        """Return how many episodes of the current evaluation had ended at the last check."""
        return f"{self.ended} of {self.env.spec.num_envs} episodes"

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the current request. Return False if it takes longer than ``timeout`` seconds."""
        return self._idle.wait(timeout)

    def close(self) -> None:
        """Stop without waiting for episodes to end."""
        self._stop.set()
        self._inbox.put(None)
        self._thread.join(timeout=0.0 if self.hung() else deadlines.EVALUATOR)
        if not self._thread.is_alive():  # else the simulator hangs, and closing it under a step could crash
            closing = f"closing {self.env.spec.name}"
            with nullcontext() if self.start is None else watchdog.watching(closing, self.start):
                self.env.close()


class Evaluations:
    """Evaluations and videos of a run's policy, beside the training and at its end.

    Attributes:
        last: the last evaluation.
        best: mean return of the best one.
        failed: error of one, with which the run ends after saving.
    """

    def __init__(self, session: "Session"):
        self.session, self.config = session, session.config
        self.last: Evaluation | None = None
        self.best = -math.inf
        self.failed: RunError | None = None
        self.evaluator: Evaluator | None = None
        self.filmer: Filmer | None = None

    # -- building -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise ``ConfigError`` for settings that the environment does not support."""
        config, spec, session = self.config, self.session.parts.env.spec, self.session
        check_acting_epsilon(config.eval.epsilon, spec)
        if session.given_env is not None and session.ranks.share.num_envs != spec.num_envs:
            allowed = f"{spec.num_envs}, as the given environment has"
            raise ConfigError("num_envs", session.ranks.share.num_envs, allowed)
        if config.budget.target_return is not None and not self._has_environments():
            allowed = "null: this environment cannot be evaluated during training"
            raise ConfigError("budget.target_return", config.budget.target_return, allowed)

    def _has_environments(self) -> bool:
        """Return True if a second simulator is possible. If not, the training simulator is evaluated at the end."""
        env = self.session.parts.env
        return self.session.given_env is None and (not env.spec.single_instance or self._beside() is not None)

    def _beside(self) -> VecEnv | None:
        """Evaluation environments that the training simulator provides."""
        env = self.session.parts.env
        return env.beside() if supports(env, WithEvaluation) else None

    def open(self, opened: ExitStack) -> None:
        """Build the environments and the recorder of videos; ``opened`` closes them."""
        with self.session.doing("building the evaluation's environments"):
            self.evaluator = self._make_evaluator()
        if self.evaluator:
            opened.callback(self.evaluator.close)
        self.filmer = self._make_filmer()
        if self.filmer:
            opened.callback(self.filmer.close)

    def _make_evaluator(self) -> Evaluator | None:
        config, ranks, parts = self.config, self.session.ranks, self.session.parts
        wanted = config.eval.every_seconds is not None or config.eval.final
        if not (wanted and self._has_environments() and ranks.first):
            return None
        step, start = step_limit(config.placement), start_limit(config.placement)
        with watching("building the evaluation's environments", start):
            env = self._beside() or build_eval_env(ranks.share, config.eval.num_envs, parts.machine)
            policy = fresh_policy(config, parts.env.spec, env.spec.device)
            if config.graphs != "off" and Graph.possible(env.spec.device) and capturable(env):
                env = cast(VecEnv, CapturedEnv(cast(Capturable, env), cast(Choice, config.graphs)))
            return Evaluator(env, policy, seeds(config.seed)["eval"], config.eval, step, start)

    def _make_filmer(self) -> Filmer | None:
        session, wanted = self.session, self.config.eval.video_every_seconds
        if wanted is None:
            return None
        if session.given_env is not None or not can_film(self.config, session.parts.env):
            allowed = "null: this environment does not render (docs/play.md)"
            raise ConfigError("eval.video_every_seconds", wanted, allowed)
        check_video_packages("eval.video_every_seconds", wanted)
        kept = self.config.eval.videos_kept
        return Filmer(session.run_dir, self.config.device, kept, session.warn) if session.ranks.first else None

    # -- beside the training --------------------------------------------------------------------------------------

    def request(self) -> None:
        """Evaluate the current policy, unless an evaluation is going on."""
        if self.evaluator:
            with self.session.parts.schedule.executor.exclusive():
                parts = self.session.parts
                self.evaluator.request(snapshot(parts), {**self.session.now(), **stage_of(parts.env)})

    def request_video(self) -> None:
        """Record the current policy, unless a video is being recorded."""
        session = self.session
        if self.filmer and not self.filmer.busy:
            self.filmer.busy = True
            with session.parts.schedule.executor.exclusive():
                start = partial(self.filmer.start, session.env_steps)
                session.archive.copy_policy(session.parts, self.filmer.policy, start)

    def collect(self) -> None:
        """Log the evaluations and videos that have ended. Never waits."""
        if self.filmer and (video := self.filmer.finished()):
            self.session.sinks.video(*video)
        while self.evaluator and not self.evaluator.reports.empty():
            self.record(self.evaluator.reports.get_nowait())
        if self.evaluator and self.failed is None:
            self.failed = self.evaluator.hung()

    def record(self, report: EvaluationReport) -> None:
        """Log a result; save its policy if it is the best so far."""
        result, session = report.outcome, self.session
        if isinstance(result, StoppedError):
            return
        if isinstance(result, BaseException):
            self.failed = RunError(f"the evaluator failed: {first_line(result)}")
            self.failed.__cause__ = result
            return
        if not result.returns:  # all remote actors left, or Ctrl-C came before the first episode ended
            if not session.interrupted:
                session.warn("an evaluation has no result: none of its episodes ended")
            return
        self.last = result
        measures = {f"eval/{k}": v for k, v in result.measures().items()}
        dropped = float(self.evaluator.dropped if self.evaluator else 0)
        session.write({**report.counters, **measures, "eval/dropped": dropped})
        if result.mean > self.best:
            self.best = result.mean
            facts = {"return_mean": result.mean, "counters": report.counters}
            session.archive.save_best(session.parts, report.state, facts)

    # -- at the end -----------------------------------------------------------------------------------------------

    def final(self) -> Evaluation | None:
        """Finish what is going on, then evaluate the final policy; None if disabled or after Ctrl-C."""
        session = self.session
        if self.filmer:
            with session.doing("the last video"):
                self.filmer.wait(lambda: session.interrupted, deadlines.LAST_VIDEO)
                self.collect()
        if self.evaluator:
            with session.doing("the last evaluation during training", self.evaluator.progress):
                self._wait(self.evaluator)
        if not self.config.eval.final or session.interrupted or not session.ranks.first or self.failed is not None:
            return None
        before = self.last
        if self.evaluator:
            with session.doing("evaluation", self.evaluator.progress):
                self.request()
                self._wait(self.evaluator)
        else:
            self._evaluate_here()
        if session.interrupted or self.failed is not None:
            return None
        if self.last is before:
            session.archive.missing["the final evaluation"] = "none of its episodes ended; pql eval repeats it"
            return None
        return self.last

    def _evaluate_here(self) -> None:
        """Evaluate on the training environments."""
        session, place = self.session, self.config.placement
        env, seed = session.parts.env, seeds(self.config.seed)["eval"]
        policy, ended = fresh_policy(self.config, env.spec, env.spec.device), [0]
        policy.load_state_dict(snapshot(session.parts))
        rules = rules_of(self.config.eval, staggered(self.config, env.spec))
        watch = watching("the evaluation", start_limit(place), step_limit(place))
        with session.doing("evaluation", lambda: f"{ended[-1]} of {env.spec.num_envs} episodes"), watch:
            outcome = run_episodes(env, policy, seed, rules, ended=ended.append)
        if not session.interrupted:
            counters = {**session.now(), **stage_of(env)}
            self.record(EvaluationReport(counters, policy.state_dict(), outcome))

    def _wait(self, evaluator: Evaluator) -> None:
        while not self.session.interrupted and self.failed is None and not evaluator.wait(deadlines.LOOK):
            self.collect()
        self.collect()
