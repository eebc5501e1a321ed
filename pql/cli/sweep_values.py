"""Words of the command line with several values: ``seed=1,2,3``, ``algo.n_step=range(1,6)``,
``algo.critic.lr=interval(1e-4,1e-2)``, in Hydra's grammar. Does not depend on runs or tuners."""

from dataclasses import dataclass
from typing import Any

from pql.config.compose import parse_override, plain_text_keys, split_word
from pql.config.layers import GROUPS, Presets
from pql.errors import ConfigError


@dataclass(frozen=True)
class Space:
    """The values that a setting may take.

    Attributes:
        text: as written on the command line.
        values: each value as written on the command line; empty for an interval.
        low, high: ends of an interval or a range, both included.
        step: of a range.
        log: sampled log-uniformly: ``tag(log, interval(...))``.
        integer: an interval of integers: ``int(interval(1,9))``.
    """

    text: str
    values: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    step: float | None = None
    log: bool = False
    integer: bool = False


def parse_space(word: str) -> tuple[str, str | Space]:
    """Parse ``key=value``: return the key with the text of a single value, or with a ``Space``. Raises ``ConfigError``:
    an invalid form, a value that cannot be read, an empty space, or a repeated value."""
    from hydra.core.override_parser.types import IntervalSweep, RangeSweep

    key, text = split_word(word)
    is_text = key in plain_text_keys()
    try:
        override = parse_override(key, text)
    except ConfigError:
        if is_text:
            return key, text
        raise
    if not override.is_sweep_override():
        return key, text
    sweep = override.value()
    known = {"log"} if isinstance(sweep, IntervalSweep) else set()
    unknown: set[str] = getattr(sweep, "tags", set()) - known
    if unknown:
        raise ConfigError(key, text, f"no tag but an interval's log, not {', '.join(sorted(unknown))}")
    if isinstance(sweep, IntervalSweep):
        return key, _interval(key, text, sweep)
    values = _values(key, text, override, is_text)
    if isinstance(sweep, RangeSweep):  # multiples of the step, rounded: 0.95 instead of 0.9500000000000001
        values = tuple(f"{float(v):.12g}" for v in values)
    if not values or len(set(values)) < len(values):
        raise ConfigError(key, text, "values that differ" if values else "at least one value")
    if isinstance(sweep, RangeSweep):
        numbers = [float(v) for v in values]
        integer = all(isinstance(n, int) for n in (sweep.start, sweep.stop, sweep.step))
        return key, Space(text, values, min(numbers), max(numbers), abs(float(sweep.step)), integer=integer)
    return key, Space(text, values)


def _interval(key: str, text: str, sweep: Any) -> Space:
    log = bool(sweep.tags)
    if not sweep.start < sweep.end or (log and sweep.start <= 0):
        raise ConfigError(
            key, text, "an interval from a smaller to a larger number" + (", both above 0" if log else "")
        )
    return Space(text, (), sweep.start, sweep.end, None, log, isinstance(sweep.start, int))


def _values(key: str, text: str, override: Any, is_text: bool) -> tuple[str, ...]:
    from hydra.core.override_parser.types import Glob, QuotedString

    if isinstance(override.value(), Glob):
        if key not in GROUPS:
            raise ConfigError(key, text, f"glob only for {', '.join(GROUPS)}")
        return tuple(override.value().filter(Presets().names(key)))
    if not is_text:
        return tuple(override.sweep_string_iterator())
    plain = (v.text if isinstance(v, QuotedString) else v for v in override.sweep_iterator())
    return tuple("null" if v is None else str(v) for v in plain)
