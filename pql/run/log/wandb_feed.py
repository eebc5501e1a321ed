"""Feeds wandb from a run's metrics.jsonl, in a separate process: ``python -m pql.run.log.wandb_feed OPTIONS``.

Whatever wandb does (wait for a server, hang, crash), the run never waits for it. The data are on the disk first: where
the server cannot be reached, at the start or later, ``wandb sync`` uploads all of them. The run closes this process's
standard input when it ends, and reads a line of JSON from its output: where the data are, and what went wrong.
"""

import contextlib
import json
import os
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

POLL = 0.3  # seconds between two looks at metrics.jsonl
PROBE = 2.0  # that a server may take to answer at all
INIT = 5.0  # that wandb may take to begin a run online
GRACE = 4.0  # that it may take to end one while the server cannot be reached
LIMIT = 120.0  # that this process outlives its run at most


def main(argv: list[str]) -> int:
    """Begin a wandb run, log every row until standard input ends, and end it. ``argv[0]``: see ``log.Wandb``."""
    options = json.loads(argv[0])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not for the run to read
    with contextlib.suppress(OSError):
        os.nice(10)
    verdict = {"dir": options["folder"], "mode": options["mode"], "why": ""}
    ended = threading.Event()
    threading.Thread(target=wait_for_end, args=(ended,), daemon=True).start()
    try:
        run = begin(options, verdict)
        for row in rows(Path(options["metrics"]), options["offset"], ended):
            run.log(row)
        finish(run, verdict, out)
    except Exception as error:
        verdict["why"] = f"wandb stopped: {type(error).__name__}: {error}"
    tell(out, verdict)
    return 0


def wait_for_end(ended: threading.Event) -> None:
    sys.stdin.buffer.read()
    ended.set()
    time.sleep(LIMIT)
    os._exit(1)


def begin(options: dict[str, Any], verdict: dict[str, str]) -> Any:
    """A wandb run, online if so asked and possible, else offline; ``verdict`` says which, and why."""
    import wandb

    folder, config = options["folder"], options["config"]
    arguments = {"dir": folder, "project": options["project"], "name": Path(folder).resolve().name, "config": config}
    arguments["settings"] = wandb_settings(wandb)
    run = None
    if options["mode"] == "online":
        try:
            if not reachable(url := wandb.setup().settings.base_url):
                raise ConnectionError(f"{url} cannot be reached")
            run = wandb.init(mode="online", **arguments)
        except Exception as error:
            verdict |= {"mode": "offline", "why": f"wandb is offline: {type(error).__name__}: {error}"}
    if run is None:
        run = wandb.init(mode="offline", **arguments)
    verdict["dir"] = str(Path(run.dir).parent)
    # Not wandb's own step, which may never fall: an evaluation is reported after later rows of training.
    run.define_metric("*", step_metric="steps/env")
    return run


def wandb_settings(wandb: Any) -> Any:
    chosen = wandb.Settings(silent=True, console="off", init_timeout=INIT)
    with contextlib.suppress(Exception):  # where this version can: statistics of the run's process, not of this one
        chosen.x_stats_pid = os.getppid()
    return chosen


def rows(path: Path, offset: int, ended: threading.Event) -> Iterator[dict[str, float]]:
    """The rows of ``path`` from byte ``offset`` on, as they are written, until ``ended`` and all are read."""
    with path.open("rb") as file:
        file.seek(offset)
        rest = b""
        while True:
            last = ended.is_set()
            *lines, rest = (rest + file.read()).split(b"\n")
            for line in lines:
                yield json.loads(line)
            if last:
                return
            ended.wait(POLL)


def finish(run: Any, verdict: dict[str, str], out: TextIO) -> None:
    """End the wandb run; where the server has gone in the meantime, not for longer than ``GRACE``."""

    def leave() -> None:
        tell(out, {**verdict, "mode": "offline", "why": "wandb's server has gone"})
        os._exit(0)

    timer = threading.Timer(GRACE, leave)
    if verdict["mode"] == "online":
        import wandb

        timer.start()
        if reachable(wandb.setup().settings.base_url):
            timer.cancel()
    run.finish()
    timer.cancel()


def reachable(url: str) -> bool:
    """Return True if the server sends any response."""
    try:
        urllib.request.urlopen(url, timeout=PROBE).close()
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False
    return True


def tell(out: TextIO, verdict: dict[str, str]) -> None:
    with contextlib.suppress(OSError):  # the run may have gone
        print(json.dumps(verdict), file=out, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
