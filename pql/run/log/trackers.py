"""Trackers of experiments, each called in the process of ``feed.py``: wandb, trackio and swanlab.

A tracker has ``log(row)``, ``video(path, step)`` and ``finish(give_up)``. Its constructor gets the options of
``loggers.Tracker`` and puts its place on the disk, its mode and a problem, if there is one, into ``verdict``.
"""

import contextlib
import os
import secrets
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pql.config.files import create_file, read_bytes
from pql.engine import deadlines

ID = "run-id"  # file in RUN/wandb


class Wandb:
    """wandb: data are written to disk first; if the server cannot be reached, ``wandb sync`` uploads them later."""

    def __init__(self, options: dict[str, Any], verdict: dict[str, str]):
        import wandb

        self.wandb, self.options, self.verdict = wandb, options, verdict
        arguments = {
            **described(options),
            "dir": options["folder"],
            "settings": self._settings(),
            "id": own_id(Path(options["folder"]) / "wandb" / ID),
        }
        self.run: Any = None
        if options["mode"] == "online":
            try:
                if not reachable(url := wandb.setup().settings.base_url):
                    raise ConnectionError(f"{url} cannot be reached")
                self.run = wandb.init(mode="online", resume="allow", **arguments)
            except Exception as error:
                verdict |= {"mode": "offline", "why": f"wandb is offline: {type(error).__name__}: {error}"}
        if self.run is None:
            self.run = wandb.init(mode="offline", **arguments)
        verdict["dir"] = str(Path(self.run.dir).parent)
        # wandb's own step may not decrease, but an evaluation is reported after later rows of training.
        self.run.define_metric("*", step_metric="steps/env")

    def _settings(self) -> Any:
        chosen = self.wandb.Settings(silent=True, console="off", init_timeout=deadlines.WANDB_INIT)
        with contextlib.suppress(Exception):  # if this version supports it: system statistics of the run's process
            chosen.x_stats_pid = os.getppid()
        with contextlib.suppress(Exception):  # by default every 15 s: what is in memory is lost when finish() gives up
            chosen.x_transaction_log_flush_interval = 1.0
        return chosen

    def log(self, row: dict[str, float]) -> None:
        self.run.log(row)

    def video(self, path: str, step: int) -> None:
        self.run.log({self.options["video"]: self.wandb.Video(path, format="mp4"), "steps/env": step})

    def finish(self, give_up: Callable[[], None]) -> None:
        """Log the final policy and the config as an artifact, and end the run.

        If the server can no longer be reached, ``give_up`` is called after some seconds and the process ends.
        """
        timer = threading.Timer(deadlines.WANDB_FINISH, self._leave, [give_up])
        if self.verdict["mode"] == "online":
            timer.start()
            if reachable(self.wandb.setup().settings.base_url):
                timer.cancel()
        self._keep_policy()
        self.run.finish()
        timer.cancel()

    def _leave(self, give_up: Callable[[], None]) -> None:
        self.verdict |= {"mode": "offline", "why": "wandb's server is unreachable"}
        give_up()
        os._exit(0)

    def _keep_policy(self) -> None:
        run, config = Path(self.options["folder"]), Path(self.options["folder"]) / "config.yaml"
        policy = run / "checkpoints" / "last"
        if not (policy.is_dir() and config.is_file()):
            return
        artifact = self.wandb.Artifact(f"policy-{self.run.id}", type="model")
        artifact.add_dir(str(policy), name="checkpoints/last")
        artifact.add_file(str(config), name="config.yaml")
        self.run.log_artifact(artifact)


class Trackio:
    """trackio: a database in ``TRACKIO_DIR`` (default: in the user's cache); online: the Space or server that the
    environment names."""

    def __init__(self, options: dict[str, Any], verdict: dict[str, str]):
        places = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
        if options["mode"] == "offline":
            for name in places:  # which would upload
                os.environ.pop(name, None)
        elif not any(os.environ.get(name) for name in places):
            verdict |= {"mode": "offline", "why": f"trackio is local: neither {' nor '.join(places)} is set"}
        import trackio

        self.trackio, self.video_key = trackio, options["video"]
        resume = "allow" if options["resumed"] else "never"
        self.run = trackio.init(**described(options), resume=resume, embed=False)

    def log(self, row: dict[str, float]) -> None:
        self.run.log(row, step=int(row["steps/env"]))

    def video(self, path: str, step: int) -> None:
        self.run.log({self.video_key: self.trackio.Video(path)}, step=step)

    def finish(self, give_up: Callable[[], None]) -> None:
        self.run.finish()


class Swanlab:
    """swanlab: files in ``RUN/swanlab``, for ``swanlab sync`` or, online, the user's workspace."""

    def __init__(self, options: dict[str, Any], verdict: dict[str, str]):
        import swanlab

        self.swanlab, self.video_key = swanlab, options["video"]
        folder = Path(options["folder"]) / "swanlab"
        folder.mkdir(exist_ok=True)
        verdict["dir"] = str(folder)
        resume = {"id": own_id(folder / ID), "resume": "allow"} if options["mode"] == "online" else {}
        self.run = swanlab.init(**described(options), log_dir=str(folder), mode=options["mode"], **resume)

    def log(self, row: dict[str, float]) -> None:
        self.run.log(row, step=int(row["steps/env"]))

    def video(self, path: str, step: int) -> None:
        """Log the video as a GIF, the only kind that swanlab shows."""
        from pql.run.log.loggers import as_gif

        gif = Path(path).with_suffix(".gif")
        gif.write_bytes(as_gif(Path(path))[0])
        self.run.log({self.video_key: self.swanlab.Video(str(gif))}, step=step)

    def finish(self, give_up: Callable[[], None]) -> None:
        self.run.finish()


TRACKERS: dict[str, Callable[[dict[str, Any], dict[str, str]], Any]] = {
    "wandb": Wandb,
    "trackio": Trackio,
    "swanlab": Swanlab,
}


def described(options: dict[str, Any]) -> dict[str, Any]:
    """Return project, name and settings of a run, as every tracker takes them."""
    name = Path(options["folder"]).resolve().name
    return {"project": options["project"], "name": name, "config": options["config"]}


def own_id(file: Path) -> str:
    """Return the id of the run with the tracker: the one of a wandb agent, or that of ``file``, created if missing.

    A link is replaced: the run directory may be somebody else's, and the id is uploaded.
    """
    if given := os.environ.get("WANDB_RUN_ID"):
        return given
    with contextlib.suppress(OSError, ValueError):
        known = "" if file.is_symlink() else read_bytes(file, 64).decode("ascii").strip()
        if known.isalnum() and len(known) >= 8:
            return known
    created = secrets.token_hex(4) + secrets.token_hex(4)
    with contextlib.suppress(OSError):
        file.parent.mkdir(exist_ok=True)
        create_file(file, created + "\n")
    return created


def reachable(url: str) -> bool:
    """Return True if the server sends any response."""
    try:
        urllib.request.urlopen(url, timeout=deadlines.WANDB_PROBE).close()
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False
    return True
