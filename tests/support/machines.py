"""Settings of hypothesis' stateful tests: short and repeatable in the suite, long and random if asked for.

``PQL_THOROUGH=1 pytest -k machine`` runs 50 times as many sequences of operations, other ones at every call.
"""

import os
from typing import Any

from hypothesis import HealthCheck, settings

THOROUGH = 50 if os.environ.get("PQL_THOROUGH") else 1


def effort(examples: int, steps: int = 30) -> Any:
    """Return the settings of a state machine with ``examples`` sequences of at most ``steps`` operations."""
    return settings(
        max_examples=examples * THOROUGH,
        stateful_step_count=steps,
        deadline=None,
        derandomize=THOROUGH == 1,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],  # on a busy host everything is slow
    )
