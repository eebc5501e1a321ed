"""Watch a policy: record a video of its episodes, or show them in a window or a browser."""

import importlib
import inspect
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pql.config import Config
from pql.config.files import expanded
from pql.config.schema import TaskConfig
from pql.config.validate import EPISODES, STEPS, limits, resolve_device
from pql.contract.env import VecEnv, find_factory
from pql.contract.optional import Renderable, Viewable, WebViewable, supports
from pql.contract.rules import check_answer
from pql.engine.placement import set_precision
from pql.engine.watchdog import Timed, guarded
from pql.errors import ConfigError, writing
from pql.run.policy import Stored, open_stored
from pql.run.store import checkpoint

LONGEST = 1000  # steps of an episode, where neither the environment nor the user sets a limit
FRAMES_PER_SECOND = 30  # at most about this many: faster simulators are shown at every k-th step
SIZES = range(16, 4097)
PORT = 8422  # of a page in a browser


@dataclass(frozen=True)
class Video:
    """Result of ``pql play``: the file, its frames, their rate (simulated time), and each episode's return."""

    path: Path
    frames: int
    fps: float
    size: tuple[int, int]  # width, height
    returns: list[float]  # of episodes that ended
    lengths: list[int]


def record_video(
    path: str | Path,
    out: str | Path | None = None,
    episodes: int = 1,
    steps: int | None = None,
    width: int | None = None,
    height: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    trust: bool = False,
) -> Video:
    """Film the greedy policy of a run, checkpoint or export: an mp4 of whole episodes, one after the other.

    Args:
        out: the file; default ``videos/<checkpoint>-seed<seed>.mp4`` in the run directory.
        episodes, steps: the video ends after this many episodes or steps, whichever comes first.
        width, height: pixels, even numbers; default: the environment's choice.
        trust: accept runs whose settings name code, programs or paths (``docs/security.md``).
    Raises:
        ConfigError: no policy there, an environment that does not render, a missing package.
        HungError: the simulator exceeds the time limits of the run's ``placement``.
    """
    check_numbers(episodes, steps, width, height, seed)
    check_video_packages("play", "video")
    imageio: Any = importlib.import_module("imageio.v2")
    frames, size = 0, (0, 0)
    with Stage(path, seed, device, trust) as stage:
        file = expanded("out", out) if out is not None else stage.default_file()
        if file.suffix != ".mp4":
            raise ConfigError("out", file, "a file name that ends in .mp4")
        every, fps = cadence(stage.env.spec.info.get("dt"))
        writing = {"fps": fps, "macro_block_size": 2, "quality": 8}
        with _aside(file) as unfinished, imageio.get_writer(unfinished, **writing) as video:
            for t in stage.run(episodes, steps):
                if t % every == 0:
                    picture = stage.picture(width, height)
                    video.append_data(picture)
                    frames, size = frames + 1, (picture.shape[1], picture.shape[0])
    return Video(file, frames, fps, size, stage.returns, stage.lengths)


def watch_live(
    path: str | Path,
    episodes: int = 1,
    steps: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    trust: bool = False,
) -> None:
    """Show the greedy policy in the simulator's window, at simulated speed, until it ends or the window is closed.

    Raises:
        ConfigError: as :func:`record_video`; no screen, or an environment without a window.
    """
    check_numbers(episodes, steps, None, None, seed)
    with Stage(path, seed, device, trust) as stage:
        if not supports(stage.env, Viewable):
            raise ConfigError("--live", True, "a task with a window (MuJoCo); without --live, a video is written")
        window = stage.env.viewer()
        dt, begun = stage.env.spec.info.get("dt", 1 / FRAMES_PER_SECOND), time.perf_counter()
        for t in stage.run(episodes, steps):
            if not window.open:
                break
            window.show()
            time.sleep(max(0.0, begun + t * dt - time.perf_counter()))
        window.close()


def stream(
    path: str | Path,
    port: int = PORT,
    episodes: int = 1_000_000,
    seed: int = 0,
    device: str = "cpu",
    trust: bool = False,
) -> None:
    """Show the greedy policy in a browser, at simulated speed, until its episodes or Ctrl-C end it.

    A simulator with a page of its own (``WebViewable``) serves that; of others, viser's page shows the frames.

    Args:
        port: of the loopback address; the next free one if it is taken.
    Raises:
        ConfigError: as :func:`record_video`; viser is not installed.
    """
    check_numbers(episodes, None, None, None, seed)
    with Stage(path, seed, device, trust) as stage:
        viewer = stage.env.web_viewer(port) if supports(stage.env, WebViewable) else None
        with closing(viewer or FrameViewer(stage, port)) as page:
            print(f"{page.address} shows the policy; Ctrl-C ends it", flush=True)
            every, fps = cadence(stage.env.spec.info.get("dt"))
            begun, shown = time.perf_counter(), 0
            for t in stage.run(episodes, None):
                if t % every == 0:
                    page.show()
                    shown += 1
                    time.sleep(max(0.0, begun + shown / fps - time.perf_counter()))


class FrameViewer:
    """viser's page, with the stage's newest frame as its background. Raises ``ConfigError``: viser is missing."""

    def __init__(self, stage: "Stage", port: int):
        try:
            viser: Any = importlib.import_module("viser")
        except ModuleNotFoundError as error:
            what = f"the package {error.name!r}, which is not installed: pip install 'pql-rl[viser]'"
            raise ConfigError("--browser", True, what) from error
        self._stage = stage
        self._server = viser.ViserServer(host="127.0.0.1", port=port, label=stage.env.spec.name, verbose=False)
        self.address = f"http://127.0.0.1:{self._server.get_port()}/"

    def show(self) -> None:
        """Send the current frame to the visitors."""
        self._server.scene.set_background_image(self._stage.picture(None, None))

    def close(self) -> None:
        self._server.stop()


class Stage:
    """One environment and the policy that acts in it. While it is open, a hung simulator ends the command."""

    def __init__(self, path: str | Path, seed: int, device: str, trust: bool = False):
        stored = open_stored(path, resolve_device(device), trust)
        set_precision(stored.config.placement)
        self.source, self.policy = stored.path, stored.policy
        with ExitStack() as opened:  # closed again if a later step fails
            opened.enter_context(guarded())
            self.env: Any = Timed(filmed_env(stored), stored.config.placement)
            opened.callback(self.env.close)
            self.closing = opened.pop_all()
        self.seed = seed
        self.returns: list[float] = []
        self.lengths: list[int] = []

    def __enter__(self) -> "Stage":
        return self

    def __exit__(self, *error: object) -> None:
        self.closing.close()

    def default_file(self) -> Path:
        return checkpoint.home(self.source) / "videos" / f"{self.source.resolve().name}-seed{self.seed}.mp4"

    def picture(self, width: int | None, height: int | None) -> np.ndarray:
        if not supports(self.env, Renderable):
            raise ConfigError(
                "task", self.env.spec.name, "an environment with a render method (pql.contract.env.VecEnv)"
            )
        return self.env.render(0, width, height)

    def run(self, episodes: int, steps: int | None) -> Iterator[int]:
        """Yield t before each step, when the rendered state is the one acted in."""
        env, declared = self.env, self.env.spec.max_episode_steps
        rows = LONGEST if declared is None else declared + (env.spec.autoreset == "next_step")  # a filler row ends it
        check_answer("reset", obs := env.reset(self.seed), env.spec)
        state = self.policy.initial_state(1)
        total, length = 0.0, 0
        for t in range(episodes * rows if steps is None else steps):
            yield t
            action, state = self.policy.act(obs, state)
            step = env.step(action)
            if t == 0:
                check_answer("step", step, env.spec)
            obs = step.obs
            if step.valid:
                total, length = total + float(step.reward), length + 1
            if step.first:  # a lost life ends no episode
                self.returns.append(total)
                self.lengths.append(length)
                total, length, state = 0.0, 0, self.policy.initial_state(1)
                if len(self.returns) == episodes:
                    return


def filmed_env(stored: Stored) -> VecEnv:
    """Build one environment of the task, with rendering requested if its factory takes that."""
    return stored.make_env(1, render_mode="rgb_array")


def takes_render_mode(task: TaskConfig) -> bool:
    """Return True if the task's factory has to be asked for rendering."""
    near = not task.live and task.process.python is None
    return near and "render_mode" in inspect.signature(find_factory(task.name)).parameters


def can_film(config: Config, env: VecEnv) -> bool:
    """Return True if ``pql play`` can record the task of which ``env`` is an instance."""
    return not config.task.live and (supports(env, Renderable) or takes_render_mode(config.task))


def cadence(dt: float | None) -> tuple[int, float]:
    """Return (k, frames per second): frames that show every k-th step at simulated speed."""
    if dt is None:
        return 1, float(FRAMES_PER_SECOND)
    every = max(1, round(1 / (FRAMES_PER_SECOND * dt)))
    return every, 1 / (every * dt)


def check_numbers(episodes: int, steps: int | None, width: int | None, height: int | None, seed: int) -> None:
    for name, value, allowed in (
        ("episodes", episodes, EPISODES),
        ("steps", steps, STEPS),
        ("seed", seed, limits("seed")),
    ):
        allowed.check(name, value)
    for name, value in (("width", width), ("height", height)):
        if value is not None and (value not in SIZES or value % 2):
            raise ConfigError(name, value, f"an even number of pixels from {SIZES[0]} to {SIZES[-1]}")


def check_video_packages(setting: str, value: object) -> None:
    """Raise ``ConfigError`` for a setting that needs the extra ``video`` if one of its modules is not installed."""
    try:
        for module in ("imageio.v2", "imageio_ffmpeg"):
            importlib.import_module(module)
    except ModuleNotFoundError as error:
        name = (error.name or "").replace("_", "-")
        what = f"the package {name!r}, which is not installed: pip install 'pql-rl[video]'"
        raise ConfigError(setting, value, what) from error


@contextmanager
def _aside(file: Path) -> Iterator[Path]:
    """Yield a temporary path; the file is renamed once it is complete."""
    temporary = file.with_name(f".writing-{file.name}")
    with writing("out", file, "file"):
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
    try:
        yield temporary
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
