"""Cases that only ``make test-all`` runs."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest


def sample(cases: Iterable[Any], keep: Collection[Any]) -> list[Any]:
    """Return the cases for ``pytest.mark.parametrize``, with those not in ``keep`` marked slow.

    ``make test`` runs one case per path through the code, ``make test-all`` every case.

    Raises:
        ValueError: ``keep`` has something that is not a case.
    """
    cases = list(cases)
    if unknown := [k for k in keep if k not in cases]:
        raise ValueError(f"no such cases: {unknown}")
    return [
        c if c in keep else pytest.param(*(c if isinstance(c, tuple) else [c]), marks=pytest.mark.slow) for c in cases
    ]


def some_of(cases: Mapping[str, Any], keep: Collection[str], name: str = "variant") -> pytest.MarkDecorator:
    """Return a parametrisation over the values of ``cases``, named by its keys; as ``sample``."""
    marks = {k: getattr(case, "marks", ()) for k, case in zip(cases, sample(cases, keep), strict=True)}
    return pytest.mark.parametrize(name, [pytest.param(v, id=k, marks=marks[k]) for k, v in cases.items()])
