"""Reference returns of tasks, by which scores are normalised: ``references.yaml`` and files of users."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.resources import as_file, files
from numbers import Real
from pathlib import Path
from typing import Any

from pql.config.files import read_yaml
from pql.errors import ConfigError

KEYS = {"zero", "one", "source", "tasks"}


@dataclass(frozen=True)
class Scale:
    """The returns that count as 0 and 1, and their meaning.

    Attributes:
        source: publication of the two returns; "" if they are the runs' own lowest and highest evaluation.
    """

    zero: float
    one: float
    zero_is: str
    one_is: str
    source: str = ""

    def __call__(self, value: float) -> float:
        """Return ``value`` on the scale; 1 if zero and one are equal."""
        return (value - self.zero) / (self.one - self.zero) if self.one > self.zero else 1.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def own_range(low: float, high: float) -> Scale:
    """Return the scale from the lowest to the highest evaluation of the runs on a task."""
    return Scale(low, high, "the lowest evaluation of these runs", "the highest")


def known(extra: Path | None = None) -> dict[str, Scale]:
    """Return the scales by task name.

    Args:
        extra: a file in the form of ``references.yaml``, whose entries are added or replace those of the library.
    Raises:
        ConfigError: the file cannot be read, or has another form.
    """
    with as_file(files("pql.reports").joinpath("references.yaml")) as path:
        found = read_scales(path)
    if extra is not None:
        try:
            found |= read_scales(extra)
        except (OSError, ValueError) as error:
            allowed = f"a YAML list of {{zero, one, source, tasks: {{NAME: [return, return]}}}} ({error})"
            raise ConfigError("references", extra, allowed) from error
    return found


def read_scales(path: Path) -> dict[str, Scale]:
    """Read a file. Raises ``ValueError`` or ``OSError``."""
    data = read_yaml(path)
    if not isinstance(data, list) or not data:
        raise ValueError("no list")
    found = {}
    for group in data:
        if not isinstance(group, dict) or set(group) != KEYS or not isinstance(group["tasks"], dict):
            raise ValueError(f"an entry without exactly {', '.join(sorted(KEYS))}")
        for name, pair in group["tasks"].items():
            if not (isinstance(pair, list) and len(pair) == 2 and all(map(is_number, pair)) and pair[0] < pair[1]):
                raise ValueError(f"{name}: {pair} is no pair of returns, the lower one first")
            words = (str(group[key]) for key in ("zero", "one", "source"))
            found[name] = Scale(float(pair[0]), float(pair[1]), *words)
    return found


def is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def reference_of(task: str, scales: Mapping[str, Scale]) -> Scale | None:
    """Return the scale of a task; its model and keywords, in parentheses, are not considered."""
    return scales.get(task.partition(" (")[0])
