"""Greedy evaluation: a fixed number of episodes per environment, on separate environments, during the run."""

import math
import queue
import statistics
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from pql.config.schema import EvalConfig
from pql.contract.env import Box, Discrete, EnvSpec, MultiDiscrete, VecEnv, make_ready
from pql.contract.rules import check_answer
from pql.engine import crash, deadlines, watchdog
from pql.engine.deadlines import Limit, idle_get, start_limit, step_limit
from pql.engine.graph import clone_state
from pql.engine.placement import set_precision
from pql.engine.watchdog import Watch
from pql.errors import ConfigError, HungError, PqlWarning
from pql.run.policy import Policy, Stored, open_stored
from pql.run.store.checkpoint import home
from pql.types import Obs

LONGEST = 100_000  # steps of an episode, if neither the task nor the user sets a limit
CHECK_EVERY = 64  # steps between checks for the end of all episodes (a check is a host sync)


@dataclass(frozen=True)
class Evaluation:
    """Undiscounted returns, lengths (in steps) and successes of complete episodes.

    ``successes`` is None where the environment logs no term ``success``. ``terms``: mean of each logged value over
    the steps of all episodes, by name: reward terms, tracking errors.
    """

    returns: list[float]
    lengths: list[float]
    successes: list[bool] | None = None
    terms: dict[str, float] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.returns)

    @property
    def median(self) -> float:
        return statistics.median(self.returns)

    @property
    def iqm(self) -> float:
        """Interquartile mean: the mean of the middle half (Agarwal et al. 2021)."""
        cut = len(self.returns) // 4
        return statistics.fmean(sorted(self.returns)[cut : len(self.returns) - cut])

    @property
    def length(self) -> float:
        """Mean length in steps."""
        return statistics.fmean(self.lengths)

    @property
    def success(self) -> float | None:
        """Share of episodes that succeeded; None where the task does not define it."""
        return None if self.successes is None else statistics.fmean(self.successes)

    def measures(self) -> dict[str, float]:
        """Return the measures by name, as in metrics.jsonl (there below ``eval/``) and in summary.json."""
        out = {
            "return_mean": self.mean,
            "return_median": self.median,
            "return_iqm": self.iqm,
            "length_mean": self.length,
        }
        if self.success is not None:
            out["success"] = self.success
        return {**out, **{f"step/{name}": value for name, value in self.terms.items()}}


class StoppedError(Exception):
    """An evaluation was stopped before its episodes had ended."""


@torch.no_grad()
def run_episodes(
    env: VecEnv,
    policy: Callable[[Obs], Tensor],
    seed: int,
    stop: threading.Event | None = None,
    episodes: int | None = None,
    epsilon: float = 0.0,
    staggered: bool = False,
    ended: Callable[[int], object] = lambda count: None,
    max_steps: int | None = None,
) -> Evaluation:
    """Run complete episodes after a reset with ``seed``: the first of every environment, or ``episodes`` in all.

    Each environment runs a number of episodes fixed in advance: taking the first ``episodes`` to end would favour
    short ones. Rewards after an environment's last episode do not count, nor do filler rows. An episode ends
    where the next one begins: a lost life does not end it, an unannounced restart does. It succeeded if
    ``log["success"]`` was above 0 on any of its rows.
    An environment that is never stepped (an empty slot for remote actors) yields no episode. A recurrent policy (with a
    method ``reset(mask)``) is reset where episodes begin.

    Args:
        epsilon: probability of a random action, for discrete actions; drawn from ``seed``.
        staggered: a reset starts in the middle of episodes; these are not counted, the next ones are.
        ended: called from time to time with the number of episodes that have ended.
        max_steps: steps after which an episode is cut; None: ``LONGEST``, if the environment has no time limit. If it
            has none, an environment whose episode was cut contributes no later ones: they might never begin.
    Returns:
        All first episodes in the order of the environments, then all second ones, etc.
    Raises:
        StoppedError: ``stop`` was set.
    """
    title, forget = f"the simulator {env.spec.name}", getattr(policy, "reset", lambda first=None: None)
    watchdog.touch(title)
    check_answer("reset", obs := env.reset(seed), env.spec)
    watchdog.touch()
    forget()
    ended(0)
    explore = random_actions(env, epsilon, seed)
    n, device, judged = env.spec.num_envs, env.spec.device, "success" in env.spec.log
    total = n if episodes is None else episodes
    most = -(-total // n)
    quota = total // n + (torch.arange(n, device=device) < total % n).long()  # [N] episodes to play
    place, count = torch.arange(most, device=device), torch.zeros_like(quota)
    running = torch.zeros(3, n, device=device)  # return, length, successful rows of the current episode
    done = torch.zeros(3, n, most, device=device)
    named = [name for name in env.spec.log if name != "success"]
    sums = torch.zeros(len(named), dtype=torch.float64, device=device)  # sums of logged values over counted rows
    live = (quota > 0) & (not staggered)  # inside a counted episode
    there = torch.zeros_like(live)  # has made a step: a slot for remote actors may be empty
    declared, filler = env.spec.max_episode_steps, env.spec.autoreset == "next_step"  # a filler row marks the end
    cap = max_steps or (math.inf if declared else LONGEST)
    between = (declared or int(cap)) + filler  # rows until the next episode begins
    last = int(min(declared or cap, cap)) + filler  # of the last one
    for i in range(1, (most - 1 + staggered) * between + last + 1):
        if stop is not None and stop.is_set():
            raise StoppedError
        action = explore(policy(obs))
        watchdog.touch(title)
        step = env.step(action)
        watchdog.stepped()
        if i == 1:
            check_answer("step", step, env.spec)
        success = (step.log["success"] > 0).float() if judged else torch.zeros_like(step.reward)
        row = torch.stack([step.reward, torch.ones_like(step.reward), success])
        full = running[1] >= cap
        counts = live & step.valid & ~full
        running += torch.where(counts, row, 0)
        if named:
            logged = torch.stack([step.log[name].double() for name in named])
            sums += torch.where(counts, logged, 0.0).sum(1)
        there |= step.valid
        cut = live & step.valid & full & ~step.first
        over = live & step.first & (running[1] > 0) | cut  # the filler row that a new actor begins with ends nothing
        if declared is None:
            quota = torch.where(cut, count + 1, quota)
        done = torch.where(over[:, None] & (place == count[:, None]), running[..., None], done)
        count += over
        running = torch.where(over, 0, running)
        live = (live & ~cut | step.first) & (count < quota)
        obs = step.obs
        forget(step.first)
        if i % CHECK_EVERY == 0:
            so_far, missing = torch.stack([count.sum(), (there & (count < quota)).sum()]).tolist()
            ended(so_far)
            if not missing:
                break
    live &= running[1] > 0
    done = torch.where(live[:, None] & (place == count[:, None]), running[..., None], done)
    played = (place < (count + live)[:, None]).T  # [most, N]
    returns, lengths, successes = done.transpose(1, 2)[:, played].tolist()
    steps = max(sum(lengths), 1.0)
    terms = dict(zip(named, (total / steps for total in sums.tolist()), strict=True))
    return Evaluation(returns, lengths, [rows > 0 for rows in successes] if judged else None, terms)


def options_of(settings: EvalConfig) -> dict[str, Any]:
    """Return the keywords of :func:`run_episodes` that a run's settings give."""
    return {"epsilon": settings.epsilon, "max_steps": settings.max_steps}


def limit_note(spec: EnvSpec, max_steps: int | None) -> str | None:
    """Return what a user should know before an evaluation with nobody's limit; None if there is one."""
    if spec.max_episode_steps is not None or max_steps is not None:
        return None
    return f"{spec.name} has no time limit: evaluations cut its episodes after {LONGEST:,} steps (eval.max_steps)"


def random_actions(env: VecEnv, epsilon: float, seed: int) -> Callable[[Tensor], Tensor]:
    """Return a function that replaces a share ``epsilon`` of discrete actions [N], or [N, K], by uniform ones.

    The identity if it is 0.

    Raises:
        ConfigError: the actions are not discrete.
    """
    check_acting_epsilon(epsilon, env.spec)
    if epsilon == 0:
        return lambda action: action
    device, space = env.spec.device, cast(Discrete | MultiDiscrete, env.spec.action)
    gen = torch.Generator(device).manual_seed(seed)

    def explore(action: Tensor) -> Tensor:
        if isinstance(space, MultiDiscrete):
            chosen = torch.rand(len(action), 1, generator=gen, device=device) < epsilon
            return torch.where(chosen, space.random(len(action), gen), action)
        random = space.random(len(action), gen)
        return torch.where(torch.rand(action.shape, generator=gen, device=device) < epsilon, random, action)

    return explore


def check_acting_epsilon(epsilon: float, spec: EnvSpec) -> None:
    """Raise ``ConfigError`` for random actions if actions are continuous."""
    if epsilon > 0 and isinstance(spec.action, Box):
        raise ConfigError("eval.epsilon", epsilon, f"0: the actions of {spec.name} are continuous")


@dataclass(frozen=True)
class EvaluationReport:
    """Result of a request: the counters at the request, the evaluated policy, the outcome."""

    counters: dict[str, float]
    state: dict[str, Any]
    outcome: Evaluation | BaseException


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
        self._options = {**options_of(settings or EvalConfig()), "ended": self._count}
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
        """Copy a policy's ``state`` and evaluate it; ``counters`` come back with the result. False if busy."""
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
                    outcome = run_episodes(self.env, self.policy, self.seed, self._stop, **self._options)
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


@dataclass(frozen=True)
class EvaluationPlan:
    """Arguments of an evaluation of a saved policy.

    Attributes:
        epsilon: probability of a random action; None: as in evaluations of the run.
        max_steps: steps after which an episode is cut; None: as in evaluations of the run.
        trust: accept runs whose settings name code, programs or paths (``docs/security.md``).
    """

    num_envs: int
    episodes: int
    seed: int = 0
    device: str = "cpu"
    epsilon: float | None = None
    trust: bool = False
    max_steps: int | None = None


def evaluate_saved(
    path: Path, plan: EvaluationPlan, ended: Callable[[int], object] = lambda count: None
) -> dict[str, Any]:
    """Evaluate the policy of a run, checkpoint or export on an environment built from its config.

    The time limits of the run's ``placement`` apply.

    Args:
        ended: called from time to time with the number of episodes that have ended.
    Returns:
        The report that ``pql eval`` writes: measures, extremes and episodes.
    Raises:
        ConfigError: no policy there, or a damaged one.
        HungError: the simulator hangs.
    """
    found, _, config = stored = open_stored(path, plan.device, plan.trust)
    set_precision(config.placement)
    num_envs = min(plan.num_envs, plan.episodes)
    epsilon = config.eval.epsilon if plan.epsilon is None else plan.epsilon
    max_steps = plan.max_steps or config.eval.max_steps
    with watchdog.guarded():
        result = _play(
            stored, num_envs, plan.seed, episodes=plan.episodes, epsilon=epsilon, ended=ended, max_steps=max_steps
        )
    return {
        "checkpoint": str(found),
        "task": config.task.title,
        "algo": config.algo.name,
        "seed": plan.seed,
        "epsilon": epsilon,
        "num_envs": num_envs,
        "episodes": len(result.returns),
        **result.measures(),
        "return_std": statistics.pstdev(result.returns),
        "return_min": min(result.returns),
        "return_max": max(result.returns),
        "length_min": min(result.lengths),
        "length_max": max(result.lengths),
        "returns": result.returns,
        "lengths": result.lengths,
        **({} if result.successes is None else {"successes": result.successes}),
    }


def _play(stored: Stored, num_envs: int, seed: int, **options: Any) -> Evaluation:
    """Run episodes of a stored policy on new environments, under time limits. ``options``: as for
    :func:`run_episodes`."""
    start, step = start_limit(stored.config.placement), step_limit(stored.config.placement)
    env = stored.make_env(num_envs)
    if note := limit_note(env.spec, options["max_steps"]):
        warnings.warn(note, PqlWarning, stacklevel=3)
    try:
        with watchdog.watching("the evaluation", start, step):
            return run_episodes(env, stored.policy, seed, **options)
    finally:
        with watchdog.watching(f"closing {env.spec.name}", start):
            env.close()


def evaluation_file(policy: Path, seed: int, episodes: int) -> Path:
    """Output folder of ``pql eval``: below the run, or next to a checkpoint or export outside a run."""
    return home(policy) / "evaluations" / f"{policy.resolve().name}-seed{seed}-{episodes}episodes.json"
