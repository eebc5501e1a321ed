"""First answers of gymnasium environments, checked against their spaces before anything is copied. Needs no torch.

Later answers are not checked, so a step costs no more.
"""

import traceback
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np

from pql.contract.shapes import array_fault, groups_fault
from pql.envs.adapters.gymnasium_host import groups_of, obs_parts
from pql.errors import first_line

FIELDS = {"reset": "(obs, info)", "step": "(obs, reward, terminated, truncated, info)"}
Parts = Mapping[str, tuple[tuple[int, ...], str]]  # of ``obs_parts``


class AnswerError(Exception):
    """A wrong answer; the message completes "expected ...". It has one argument, as ``AsyncVectorEnv`` re-raises it."""


class CheckFirst(gymnasium.Wrapper):
    """Checks the first ``reset`` and the first ``step`` of one copy, whose answers a vector environment would copy."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        answer = self._first("reset", lambda: self.env.reset(seed=seed, options=options))
        setattr(self, "reset", self.env.reset)  # noqa: B010  (mypy refuses an assignment to a method)
        return answer

    def step(self, action: Any) -> Any:
        answer = self._first("step", lambda: self.env.step(action))
        setattr(self, "step", self.env.step)  # noqa: B010
        return answer

    def _first(self, method: str, call: Callable[[], Any]) -> Any:
        return first_answer(method, call, obs_parts(self.observation_space), ())


def first_answer(method: str, call: Callable[[], Any], parts: Parts, rows: tuple[int, ...]) -> Any:
    """Return what ``call`` returns. ``rows``: (N,), or () for a single environment. Raises ``AnswerError``: it has not
    the groups and shapes of ``parts``, or a wrapper of gymnasium could not read it."""
    try:
        answer = call()
    except (ValueError, TypeError, AssertionError, gymnasium.error.Error) as error:
        if _of_answer(error):
            raise AnswerError(f"{FIELDS[method]}, but: {first_line(error)}") from error
        raise
    if fault := answer_fault(method, answer, parts, rows):
        raise AnswerError(fault)
    return answer


def _of_answer(error: Exception) -> bool:
    """Return True if gymnasium, not the environment, raised ``error``, because of what the environment returned."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    module = frame.f_globals.get("__name__", "")
    inside = module.startswith(("gymnasium.wrappers.", "gymnasium.vector.", "gymnasium.core"))
    return module == "gymnasium.utils.passive_env_checker" or (inside and "unpack" in str(error))


def answer_fault(method: str, answer: Any, parts: Parts, rows: tuple[int, ...]) -> str:
    """Return the completion of "expected reset() to return ...", "" if the groups and shapes are right."""

    def of(name: str, value: Any, shape: tuple[int, ...], dtype: str | None) -> str:
        array, shape = value if hasattr(value, "shape") else np.asarray(value), (*rows, *shape[1:])
        castable = not dtype or not isinstance(array, np.ndarray) or np.can_cast(array.dtype, dtype, "same_kind")
        return array_fault(name, array, shape, castable, (getattr(array, "dtype", None), dtype))

    count = FIELDS[method].count(",") + 1
    if not isinstance(answer, tuple) or len(answer) != count:
        kind = f"a tuple of {len(answer)}" if isinstance(answer, tuple) else f"a {type(answer).__name__}"
        return f"{FIELDS[method]}, not {kind}"
    groups = {name: SimpleNamespace(shape=shape, dtype=dtype) for name, (shape, dtype) in parts.items()}
    fault = groups_fault("obs", groups_of(answer[0]), SimpleNamespace(num_envs=0, obs=groups), of)
    for name, value in zip(("reward", "terminated", "truncated"), answer[1:-1], strict=False):
        fault = fault or of(name, value, (0,), None)
    return fault and f"what its spec says, but {fault}"
