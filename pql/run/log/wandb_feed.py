"""Process that feeds wandb from a run's metrics.jsonl: ``python -m pql.run.log.wandb_feed OPTIONS``.

The run does not wait if wandb waits for a server, hangs or crashes. Data are written to disk first; if the server
cannot be reached, ``wandb sync`` uploads all of them later. Standard input has one line of JSON for each video: its
path and env steps. At its end the run closes it and reads one line of JSON from the output: the directory of the data,
and the error if there was one.
"""

import contextlib
import json
import os
import queue
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

# All in seconds.
POLL = 0.3  # between two reads of metrics.jsonl
PROBE = 2.0  # limit for a first answer of the server
INIT = 5.0  # limit for the start of an online run
GRACE = 4.0  # limit for the end of a run while the server cannot be reached
LIMIT = 120.0  # limit for this process after the end of its run

Videos = queue.SimpleQueue[tuple[str, int]]


def main(argv: list[str]) -> int:
    """Begin a wandb run, log every row until standard input ends, and end it. ``argv[0]``: see ``loggers.Wandb``."""
    options = json.loads(argv[0])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep the output of libraries out of the pipe to the run
    with contextlib.suppress(OSError):
        os.nice(10)
    verdict = {"dir": options["folder"], "mode": options["mode"], "why": ""}
    ended, videos = threading.Event(), Videos()
    threading.Thread(target=wait_for_end, args=(ended, videos), daemon=True).start()
    try:
        run = begin(options, verdict)
        for row in rows(Path(options["metrics"]), options["offset"], ended):
            run.log(row)
            log_videos(run, options["video"], videos)
        log_videos(run, options["video"], videos)
        finish(run, verdict, out)
    except Exception as error:
        verdict["why"] = f"wandb stopped: {type(error).__name__}: {error}"
    write_result(out, verdict)
    return 0


def wait_for_end(ended: threading.Event, videos: Videos) -> None:
    for line in sys.stdin.buffer:
        videos.put(json.loads(line))
    ended.set()
    time.sleep(LIMIT)
    os._exit(1)


def begin(options: dict[str, Any], verdict: dict[str, str]) -> Any:
    """Start a wandb run: online if requested and possible, else offline; mode and reason are put into ``verdict``."""
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
    # wandb's own step may not decrease, but an evaluation is reported after later rows of training.
    run.define_metric("*", step_metric="steps/env")
    return run


def wandb_settings(wandb: Any) -> Any:
    chosen = wandb.Settings(silent=True, console="off", init_timeout=INIT)
    with contextlib.suppress(Exception):  # if this version supports it: system statistics of the run's process
        chosen.x_stats_pid = os.getppid()
    return chosen


def rows(path: Path, offset: int, ended: threading.Event) -> Iterator[dict[str, float]]:
    """Yield the rows of ``path`` from byte ``offset`` on as they are written, until ``ended`` is set."""
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


def log_videos(run: Any, key: str, videos: Videos) -> None:
    """Log the videos that have been named since the last call."""
    import wandb

    while not videos.empty():
        path, step = videos.get()
        with contextlib.suppress(OSError, ValueError):  # a file that was deleted
            run.log({key: wandb.Video(path, format="mp4"), "steps/env": step})


def finish(run: Any, verdict: dict[str, str], out: TextIO) -> None:
    """End the wandb run, within ``GRACE`` if the server can no longer be reached."""

    def leave() -> None:
        write_result(out, {**verdict, "mode": "offline", "why": "wandb's server is unreachable"})
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


def write_result(out: TextIO, verdict: dict[str, str]) -> None:
    """Write the result as one line of JSON."""
    with contextlib.suppress(OSError):  # the run may have ended
        print(json.dumps(verdict), file=out, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
