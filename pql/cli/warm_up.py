"""``pql warm-up``: do ahead what a run compiles at its start. What is compiled stays on this machine."""

import time
from collections.abc import Sequence
from contextlib import closing


def warm_up(overrides: Sequence[str]) -> int:
    """Build the run, compile what its simulator and networks need, and return 0. No step is made, no file written.
    Raises ``ConfigError``: a wrong setting, or a run that does not fit into memory."""
    from pql.config.compose import compose
    from pql.engine.watchdog import guarded
    from pql.run.build import build
    from pql.run.log.console import Console

    config, began = compose(overrides), time.monotonic()
    with guarded(), closing(Console("pql warm-up", {})) as console:
        with console.doing("building the simulator and the networks"):
            parts = build(config)
        device = parts.machine.devices["collector"]
        try:
            built = time.monotonic()
            with console.doing("compiling", parts.preparation):
                parts.prepare()
        finally:
            parts.close()
    run = f"{config.algo.name} on {config.task.title}, {config.num_envs:,} environments on {device}"
    print(f"{run}: built in {built - began:.1f} s, compiled in {time.monotonic() - built:.1f} s")
    return 0
