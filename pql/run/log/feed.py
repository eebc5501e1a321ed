"""Process that feeds a tracker from a run's metrics.jsonl: ``python -m pql.run.log.feed OPTIONS``.

The run does not wait if a tracker (wandb, trackio, swanlab: ``trackers.py``) waits for a server, hangs or crashes.
Standard input has one line of JSON for each video: its path and env steps. At its end the run closes it and reads one
line of JSON from the output: the directory of the data, and the error if there was one.
"""

import contextlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from pql.engine import deadlines
from pql.run.log.trackers import TRACKERS

POLL = 0.3  # seconds between two reads of metrics.jsonl

Videos = queue.SimpleQueue[tuple[str, int]]


def main(argv: list[str]) -> int:
    """Begin, log every row until standard input ends, and finish. ``argv[0]``: see ``loggers.Tracker``."""
    options = json.loads(argv[0])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep the output of libraries out of the pipe to the run
    with contextlib.suppress(OSError):
        os.nice(10)
    verdict = {"dir": options["folder"], "mode": options["mode"], "why": ""}
    ended, videos = threading.Event(), Videos()
    threading.Thread(target=wait_for_end, args=(ended, videos), daemon=True).start()
    try:
        tracker = TRACKERS[options["kind"]](options, verdict)
        for row in rows(Path(options["metrics"]), options["offset"], ended):
            tracker.log(row)
            log_videos(tracker, videos)
        log_videos(tracker, videos)
        tracker.finish(lambda: write_result(out, verdict))
    except Exception as error:
        verdict["why"] = f"{options['kind']} stopped: {type(error).__name__}: {error}"
    write_result(out, verdict)
    return 0


def wait_for_end(ended: threading.Event, videos: Videos) -> None:
    for line in sys.stdin.buffer:
        videos.put(json.loads(line))
    ended.set()
    time.sleep(deadlines.UPLOAD)
    os._exit(1)


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


def log_videos(tracker: Any, videos: Videos) -> None:
    """Log the videos that have been named since the last call."""
    while not videos.empty():
        path, step = videos.get_nowait()
        with contextlib.suppress(OSError, ValueError):  # a file that was deleted
            tracker.video(path, step)


def write_result(out: TextIO, verdict: dict[str, str]) -> None:
    """Write the result as one line of JSON."""
    with contextlib.suppress(OSError):  # the run may have ended
        print(json.dumps(verdict), file=out, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
