"""Cases that only ``make test-all`` runs."""

from collections.abc import Collection, Iterable
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
