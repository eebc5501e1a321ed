"""Greedy evaluation: exactly one episode per environment, on environments of its own, beside the run."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pql.env import VecEnv
from pql.graph import clone_state
from pql.policy import Policy
from pql.types import Obs

LONGEST = 100_000  # steps, where an environment has no time limit
CHECK_EVERY = 64  # steps between looks at whether all episodes have ended (a look is a host sync)


@dataclass(frozen=True)
class Evaluation:
    """Undiscounted returns and lengths of one episode per environment."""

    returns: list[float]
    lengths: list[float]

    @property
    def mean(self) -> float:
        return sum(self.returns) / len(self.returns)

    @property
    def iqm(self) -> float:
        """Interquartile mean: the mean of the middle half (Agarwal et al. 2021)."""
        cut = len(self.returns) // 4
        middle = sorted(self.returns)[cut : len(self.returns) - cut]
        return sum(middle) / len(middle)

    @property
    def length(self) -> float:
        """Mean length in steps."""
        return sum(self.lengths) / len(self.lengths)


class StoppedError(Exception):
    """An evaluation was told to stop before its episodes had ended."""


@torch.no_grad()
def run_episodes(
    env: VecEnv, policy: Callable[[Obs], Tensor], seed: int, stop: threading.Event | None = None
) -> Evaluation:
    """One whole episode in every environment of ``env``: the first after a reset with ``seed``.

    Rewards after an environment's own episode has ended do not count, nor do filler rows. A simulator's unannounced
    restart ends the episode. A policy with a memory (a method ``reset(mask)``) forgets where episodes begin.

    Raises:
        StoppedError: ``stop`` was set.
    """
    obs, forget = env.reset(seed), getattr(policy, "reset", lambda first=None: None)
    forget()
    n, device = env.spec.num_envs, env.spec.device
    returns, lengths = torch.zeros(n, device=device), torch.zeros(n, device=device)
    alive = torch.ones(n, dtype=torch.bool, device=device)
    for i in range(1, (env.spec.max_episode_steps or LONGEST) + 1):
        if stop is not None and stop.is_set():
            raise StoppedError
        step = env.step(policy(obs))
        counted = alive & step.valid
        returns += torch.where(counted, step.reward, 0)
        lengths += counted
        alive &= ~(((step.terminated | step.truncated) & step.valid) | step.first)
        obs = step.obs
        forget(step.first)
        if i % CHECK_EVERY == 0 and not bool(alive.any()):
            break
    return Evaluation(returns.tolist(), lengths.tolist())


@dataclass(frozen=True)
class Report:
    """What came of a request: the counters it was made with, the policy that was evaluated, the outcome."""

    counters: dict[str, float]
    state: dict[str, Any]
    outcome: Evaluation | BaseException


class Evaluator:
    """Evaluates snapshots in a thread of its own. A request that comes while it is busy is dropped and counted."""

    def __init__(self, env: VecEnv, policy: Policy, seed: int):
        self.env, self.policy, self.seed = env, policy, seed
        self.dropped = 0
        self.reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[dict[str, float] | None] = queue.SimpleQueue()
        self._idle, self._stop = threading.Event(), threading.Event()
        self._idle.set()
        device = env.spec.device
        # A stream of its own on CUDA: on the default one, the run's own short visits there would queue behind episodes.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = threading.Thread(target=self._loop, name="pql-evaluator", daemon=True)
        self._thread.start()

    def request(self, state: dict[str, Any], counters: dict[str, float]) -> bool:
        """Copy a policy's ``state`` and evaluate it; ``counters`` come back with the result. False if busy."""
        if not self._idle.is_set():
            self.dropped += 1
            return False
        self._idle.clear()
        self.policy.load_state_dict(state)
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._inbox.put(counters)
        return True

    def _loop(self) -> None:
        torch.set_num_threads(1)
        while (counters := self._inbox.get()) is not None:
            outcome: Evaluation | BaseException
            try:
                with torch.cuda.stream(self._stream):  # None: nothing. It ends in a host read, so the stream is idle
                    outcome = run_episodes(self.env, self.policy, self.seed, self._stop)
            except BaseException as error:
                outcome = error
            # A copy: the next request may come before this report is read.
            self.reports.put(Report(counters, clone_state(self.policy.state_dict()), outcome))
            self._idle.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Until the request in hand is done. False: it was not within ``timeout`` seconds."""
        return self._idle.wait(timeout)

    def close(self) -> None:
        """Stop, without waiting for episodes to end."""
        self._stop.set()
        self._inbox.put(None)
        self._thread.join(timeout=5.0)
        if not self._thread.is_alive():  # else the simulator hangs, and closing it under a step could crash
            self.env.close()
