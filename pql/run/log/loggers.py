"""Loggers that a run writes to on request: TensorBoard, and trackers in a separate process."""

import io
import json
import os
import shlex
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pql.config import Config, to_dict
from pql.engine import deadlines
from pql.errors import PqlWarning, first_line
from pql.run.log.displays import Row

VIDEO = "eval/video"  # name of videos in every logger
GIF_FPS, GIF_FRAMES, GIF_WIDTH = 12, 150, 320  # at most: TensorBoard shows videos as GIFs, which are large
LATER = {
    "wandb": "To upload what is missing: wandb sync {}",
    "swanlab": "To upload what is missing: swanlab sync {}/*",
    "trackio": "To see it: trackio show",
}


class TensorBoard:
    """Scalars and videos by env step. Needs the extra ``tensorboard``."""

    def __init__(self, folder: Path, resumed_at: int | None = None):
        from torch.utils.tensorboard import SummaryWriter

        # A resumed run's rows up to and including the resume point are kept, as in metrics.jsonl.
        self.writer: Any = SummaryWriter(str(folder), purge_step=None if resumed_at is None else resumed_at + 1)
        self.converting: list[threading.Thread] = []
        self.lacking: list[str] = []  # errors of conversions

    def write(self, row: Row) -> None:
        for key, value in row.items():
            self.writer.add_scalar(key, value, int(row["steps/env"]))

    def video(self, path: Path, step: int) -> None:
        """Convert the video to a GIF, in a thread, and log it as an image, which the page animates."""
        # A daemon: a conversion that hangs must not keep the process alive.
        thread = threading.Thread(target=self._convert, args=(path, step), name="pql-gif", daemon=True)
        self.converting.append(thread)
        thread.start()

    def _convert(self, path: Path, step: int) -> None:
        try:
            self._log_gif(path, step)
        except Exception as error:
            self.lacking.append(first_line(error))

    def _log_gif(self, path: Path, step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        gif, (width, height) = as_gif(path)
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=gif)
        self.writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=VIDEO, image=image)]), step)

    def close(self) -> None:
        end = time.monotonic() + deadlines.GIF
        for thread in self.converting:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                self.lacking.append(f"not converted within {deadlines.GIF:g} s")
        self.writer.close()
        for why in self.lacking:
            warnings.warn(f"TensorBoard lacks a video: {why}", PqlWarning, stacklevel=2)


def as_gif(path: Path) -> tuple[bytes, tuple[int, int]]:
    """Return an mp4 as a GIF, reduced to ``GIF_WIDTH``, ``GIF_FPS`` and its first ``GIF_FRAMES``; and its size."""
    import imageio.v2
    from PIL import Image

    frames: list[Any] = []
    reader: Any = imageio.v2.get_reader(path)
    with reader as video:
        fps = video.get_meta_data()["fps"]
        every = max(1, round(fps / GIF_FPS))
        for i, frame in enumerate(video):
            if i % every == 0:
                frames.append(Image.fromarray(frame))
                frames[-1].thumbnail((GIF_WIDTH, GIF_WIDTH))
            if len(frames) == GIF_FRAMES:
                break
    out = io.BytesIO()
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:], duration=1000 * every / fps, loop=0)
    return out.getvalue(), frames[0].size


class Tracker:
    """A tracker, offline by default, in a separate process that reads metrics.jsonl (``feed.py``).

    Args:
        config: settings of the run; ``logger.kind`` names the tracker.
        folder: the run directory.
        offset: byte in metrics.jsonl at which this sitting begins; above 0, the run continues.
        say: receives the place of the data and the command that uploads them.
        patience: seconds that ``close`` waits for the process. If it needs longer, it finishes after the run.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        offset: int = 0,
        say: Callable[[str], None] | None = None,
        patience: float | None = None,
    ):
        self.kind, self.folder, self.say, self.ended = config.logger.kind, folder, say, False
        self.patience = deadlines.TRACKER if patience is None else patience
        options = {
            "kind": self.kind,
            "folder": str(folder),
            "metrics": str(folder / "metrics.jsonl"),
            "offset": offset,
            "resumed": offset > 0,
            "project": config.logger.project,
            "mode": config.logger.mode,
            "config": to_dict(config),
            "video": VIDEO,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pql.run.log.feed", json.dumps(options, default=str)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            process_group=0,  # Ctrl-C is for the run, which then closes this
        )
        assert self.process.stdin is not None
        os.set_blocking(self.process.stdin.fileno(), False)

    def write(self, row: Row) -> None:
        """Write nothing: metrics.jsonl has the row. Warn if the tracker has ended before the run."""
        if not self.ended and self.process.poll() is not None:
            self.close()

    def video(self, path: Path, step: int) -> None:
        """Name the video to the tracker's process. Raises ``BlockingIOError``: the process has not read for so long
        that the pipe is full."""
        if not self.ended and self.process.poll() is None:
            assert self.process.stdin is not None
            os.write(self.process.stdin.fileno(), f"{json.dumps([str(path.resolve()), step])}\n".encode())

    def close(self) -> None:
        if self.ended:
            return
        self.ended = True
        verdict = {"dir": str(self.folder / self.kind), "why": f"{self.kind}'s process died", "mode": ""}
        if self.kind == "wandb":
            verdict["dir"] += "/latest-run"
        try:
            reply, _ = self.process.communicate(timeout=self.patience)
            verdict = json.loads(reply)
        except subprocess.TimeoutExpired:
            verdict["why"] = f"{self.kind} is still uploading and continues in the background"
        except ValueError:
            pass
        later = LATER[self.kind].format(shlex.quote(verdict["dir"]))
        if verdict["why"]:
            what = f"{verdict['why']}; the run is not affected. {later}"
            warnings.warn(what, PqlWarning, stacklevel=2)
        elif verdict["mode"] == "offline" and self.say:
            self.say(f"{self.kind}: offline. {later}")
