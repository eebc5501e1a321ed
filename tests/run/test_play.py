"""Images and videos: rendering agrees with the state, and a file has the expected frames."""

import dataclasses
import importlib.machinery
import math
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from run_files import manifest, points, words
from run_files import run as run_words

import pql
from pql.cli.main import main
from pql.config.compose import compose
from pql.contract.env import Box, EnvSpec, ObsSpec, find_factory, make_env
from pql.contract.registry import register
from pql.engine import deadlines
from pql.envs.classic import Pendulum
from pql.envs.draw import Drawn
from pql.errors import ConfigError, PqlWarning
from pql.run import play
from pql.run.episodes import run_episodes
from pql.run.evaluation import EvaluationPlan, evaluate_saved
from pql.run.play import cadence, filmed_env, record_video, stream
from pql.run.policy import Stored, fresh_policy
from pql.run.session import Session

iio = pytest.importorskip("imageio.v2")
pytest.importorskip("PIL")


def centre(mask: np.ndarray) -> tuple[float, float]:
    """Mean (x, y) of the pixels in ``mask``."""
    assert mask.sum() > 20
    y, x = np.nonzero(mask)
    return float(x.mean()) + 0.5, float(y.mean()) + 0.5


def near(picture: np.ndarray, colour: tuple[int, int, int], within: int = 40) -> np.ndarray:
    """[H, W] bool: pixels of about this colour."""
    return np.abs(picture.astype(int) - colour).max(2) < within


POLE, CART, BALL, PLATE = (214, 84, 46), (52, 104, 164), (230, 140, 30), (196, 208, 220)

# -- the classic tasks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degrees", [0, 30, -70, 135, 180, -90])
def test_pendulum_hangs_where_its_angle_says(degrees: int) -> None:
    env = make_env("pendulum", num_envs=3)
    env.reset(0)
    env._state[1] = torch.tensor([math.radians(degrees), 0.0])
    picture = env.render(1)
    assert (picture.shape, picture.dtype) == ((480, 640, 3), np.uint8)
    x, y = centre(near(picture, POLE))
    dx, dy = x - 320, 240 - y  # the pivot is in the middle
    off = math.degrees(math.atan2(-dx, dy)) - degrees
    assert (off + 180) % 360 - 180 == pytest.approx(0, abs=1.5)
    scale = 480 / 2.3  # 2.3 m from top to bottom
    assert math.hypot(dx, dy) == pytest.approx(0.5 * scale, rel=0.08)  # half of 1 m; the hub covers a little
    assert not np.array_equal(picture, env.render(0))


@pytest.mark.parametrize(("position", "degrees"), [(0.0, 0), (1.5, 40), (-2.3, -90)])
def test_cart_and_pole_are_where_the_state_says(position: float, degrees: int) -> None:
    env = make_env("cartpole_swingup", num_envs=1)
    env.reset(0)
    env._state[0] = torch.tensor([position, 0.0, math.radians(degrees), 0.0])
    picture = env.render(0, 690, 300)
    assert picture.shape == (300, 690, 3)
    column = 345 + position * 100  # 6.9 m across
    cart, pole = near(picture, CART), near(picture, POLE)
    assert np.nonzero(cart)[1].min() == pytest.approx(column - 25, abs=1.5)  # 0.5 m wide
    assert np.nonzero(cart)[1].max() == pytest.approx(column + 25, abs=1.5)
    x, y = centre(pole)
    assert math.degrees(math.atan2(x - column, 150 - y)) == pytest.approx(degrees, abs=1.5)
    far = max(math.hypot(px - column, 150 - py) for py, px in np.argwhere(pole))
    assert far == pytest.approx(100 * (1 + 0.045), abs=1.5)  # 1 m long, and its round end


def test_ball_and_plate_are_where_the_state_says() -> None:
    env = make_env("ball_balance", num_envs=2)
    env.reset(0)
    env._state.zero_()
    env._state[1, :3] = torch.tensor([0.0, -0.05, 0.05])  # at 90, 210 and 330 degrees: down on the left
    env._state[:, 3:6] = torch.tensor([[0.0, 0.0, 0.05], [0.2, -0.1, 0.3]])
    level, tilted = env.render(0, 700, 500), env.render(1, 700, 500)
    for picture, (x, y, z) in ((level, (0, 0, 0.05)), (tilted, (0.2, -0.1, 0.3))):
        got = centre(near(picture, BALL))
        assert got[0] == pytest.approx(350 + 500 * x, abs=2)
        assert got[1] == pytest.approx(250 - 500 * (y * 0.5 + z * math.sqrt(0.75)), abs=2)
    for picture, fall in ((level, 0.0), (tilted, 0.1 / (0.8 * math.sqrt(0.75)))):  # slope of the plate along x
        rim = near(picture, PLATE, 8)
        columns = np.nonzero(rim.any(0))[0]
        ends = [np.nonzero(rim[:, c])[0].mean() for c in (columns[2], columns[-3])]
        assert ends[0] - ends[1] == pytest.approx(500 * fall * math.sqrt(0.75), abs=6)


def test_the_page_names_the_tasks_that_are_drawn() -> None:
    text = (Path(__file__).parents[2] / "docs" / "play.md").read_text()
    for task in ("pendulum", "cartpole", "cartpole_swingup", "ball_balance", "catch", "tmaze"):
        assert issubclass(find_factory(task), Drawn)
        assert f"`{task}`" in text


# -- videos -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("play") / "run"
    assert main(["train", *words(path, "task.kwargs.max_episode_steps=12", "num_envs=16")]) == 0
    return path


def frames(path: Path) -> list[np.ndarray]:
    with iio.get_reader(path) as reader:
        return list(reader.iter_data())


def test_a_video_holds_whole_episodes_as_they_were(run: Path, capsys) -> None:
    capsys.readouterr()
    assert main(["play", str(run), "episodes=2", "width=160", "height=120", "seed=5"]) == 0
    said = capsys.readouterr().out.splitlines()
    file = run / "videos" / "last-seed5.mp4"
    assert said[-1] == f"{file}: 24 frames of 160 x 120, 20 per second"
    assert [f.name for f in file.parent.iterdir()] == [file.name]
    env = make_env("pendulum", num_envs=1, max_episode_steps=12)
    policy = pql.load_policy(run)
    outcome = run_episodes(env, policy, 5)
    assert said[0] == f"episode 1: return {outcome.returns[0]:.6g}, 12 steps"
    assert said[1].startswith("episode 2: return ")
    shown = frames(file)
    assert len(shown) == 24
    assert shown[0].shape == (120, 160, 3)
    obs = env.reset(5)
    for picture in shown[:12]:  # each shows the state acted in, up to compression
        want = env.render(0, 160, 120)
        assert np.abs(picture.astype(int) - want).mean() < 3
        assert np.hypot(*np.subtract(centre(near(picture, POLE, 60)), centre(near(want, POLE, 60)))) < 1
        obs = env.step(policy(obs)).obs
    assert not near(shown[0], POLE, 60)[near(shown[11], POLE, 60)].all()  # it moved


def test_a_video_shows_the_episode_that_an_evaluation_plays(run: Path, tmp_path: Path) -> None:
    """To the last bit, so with the run's own form of float32 products, whatever this process used before."""
    row = evaluate_saved(run, EvaluationPlan(1, 1, 5))
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"  # type: ignore[attr-defined]
    video = record_video(run, tmp_path / "x.mp4", seed=5, width=64, height=64)
    assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"  # type: ignore[attr-defined]  # placement.matmul=fast
    assert (video.returns, video.lengths) == (pytest.approx(row["returns"], rel=1e-6), row["lengths"])


def test_a_video_of_an_episode_that_does_not_end_has_the_steps_that_the_page_says(tmp_path, monkeypatch) -> None:
    def endless(num_envs, device):
        env = Pendulum(num_envs, device, max_episode_steps=10**9)
        env.spec = dataclasses.replace(env.spec, max_episode_steps=None)
        return env

    register("endless_film", endless)
    assert main(["train", *words(tmp_path / "run", "task=env", "task.name=endless_film")]) == 0
    assert f"{play.LONGEST:,} steps" in (Path(__file__).parents[2] / "docs" / "play.md").read_text()
    monkeypatch.setattr(play, "LONGEST", 12)
    assert record_video(tmp_path / "run", width=64, height=48).frames == 12


def test_steps_cut_a_video_short(run: Path, tmp_path: Path) -> None:
    video = record_video(run / "checkpoints" / "last", tmp_path / "a" / "b.mp4", steps=7, width=64, height=48)
    assert (video.frames, video.size, video.fps, video.returns) == (7, (64, 48), 20.0, [])
    assert len(frames(tmp_path / "a" / "b.mp4")) == 7


@pytest.mark.parametrize(
    ("dt", "want"), [(0.05, (1, 20)), (0.02, (2, 25)), (0.008, (4, 31.25)), (0.2, (1, 5)), (None, (1, 30))]
)
def test_videos_run_at_simulated_time(dt: float | None, want: tuple[int, float]) -> None:
    assert cadence(dt) == pytest.approx(want)


class Dark:
    """A simulator without images, whose rows after an end are fillers."""

    def __init__(self, num_envs: int, device: object):
        cpu = torch.device("cpu")
        self.spec = EnvSpec("dark", num_envs, {"policy": ObsSpec((3,))}, Box(1), cpu, 3, "next_step")
        self.t = 0

    def reset(self, seed=None):
        self.t = 0
        return {"policy": torch.zeros(1, 3)}

    def step(self, action):
        self.t += 1
        end, filler = self.t % 4 == 3, self.t % 4 == 0
        obs, flag = {"policy": torch.zeros(1, 3)}, lambda x: torch.tensor([x])
        reward = torch.tensor([100.0 if filler else 1.0])
        return pql.Step(obs, reward, flag(False), flag(end), flag(filler), obs, flag(True), flag(not filler), {})

    def close(self):
        pass


class Lit(Dark):
    def render(self, index=0, width=None, height=None):
        return np.full((32, 48, 3), 60 * (self.t % 4), np.uint8)


@pytest.fixture
def made_up(run: Path, monkeypatch: pytest.MonkeyPatch):
    """Play the run on another environment."""

    def swap(kind):
        register("made_up", lambda num_envs, device: kind(num_envs, device))
        monkeypatch.setattr(
            "pql.run.policy.build_eval_env", lambda config, num_envs, **_: make_env("made_up", num_envs)
        )

    return swap


def test_filler_rows_are_shown_but_do_not_count(run: Path, made_up, tmp_path: Path) -> None:
    made_up(Lit)
    video = record_video(run, tmp_path / "x.mp4", episodes=2)
    assert (video.returns, video.lengths, video.frames, video.size) == ([3, 3], [3, 3], 8, (48, 32))
    shades = [f.mean() for f in frames(tmp_path / "x.mp4")]
    assert shades == pytest.approx([0, 60, 120, 180] * 2, abs=8)


def test_an_environment_without_pictures_says_so_and_leaves_no_file(run: Path, made_up, tmp_path: Path) -> None:
    made_up(Dark)
    with pytest.raises(ConfigError, match="task=dark: expected an environment with a render method"):
        record_video(run, tmp_path / "x.mp4")
    assert list(tmp_path.iterdir()) == []


def test_gymnasium_environments_are_told_to_draw(run: Path, tmp_path: Path) -> None:
    gymnasium = pytest.importorskip("gymnasium")

    class Drawing(gymnasium.Env):
        metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
        observation_space, action_space = gymnasium.spaces.Box(-1, 1, (3,)), gymnasium.spaces.Box(-1, 1, (1,))

        def __init__(self, render_mode=None):
            self.render_mode, self.t = render_mode, 0

        def reset(self, *, seed=None, options=None):
            self.t = 0
            return np.zeros(3, np.float32), {}

        def step(self, action):
            self.t += 1
            return np.zeros(3, np.float32), 1.0, self.t == 4, False, {}

        def render(self):
            return np.full((32, 48, 3), 50 * self.t, np.uint8)

    gymnasium.register("PqlDrawing-v0", Drawing, disable_env_checker=True)
    env = make_env("gymnasium", 2, id="PqlDrawing-v0", render_mode="rgb_array")
    env.reset(0)
    env.step(torch.zeros(2, 1))
    assert env.render(1).mean() == 50
    with pytest.raises(ConfigError, match="width=64: expected none: PqlDrawing-v0 renders at a fixed size"):
        env.render(0, 64)
    with pytest.raises(ConfigError, match="render_mode=null: expected rgb_array"):
        make_env("gymnasium", 1, id="PqlDrawing-v0").render()
    config = compose(["task=gymnasium", "task.id=PqlDrawing-v0", "device=cpu"])
    policy = fresh_policy(config, env.spec, "cpu")
    filmed = filmed_env(Stored(run, policy, config))
    filmed.reset(0)
    assert filmed.render(0).shape == (32, 48, 3)
    assert filmed.spec.info["dt"] == pytest.approx(0.1)


# -- MuJoCo -----------------------------------------------------------------------------------------------------------


def robot(picture: np.ndarray) -> np.ndarray:
    """Pixels of the robots' warm colours; sky and ground have none."""
    return picture[..., 0].astype(int) - picture[..., 2] > 25


def test_mujocos_camera_follows_the_robot_over_endless_ground() -> None:
    pytest.importorskip("mujoco")
    env = make_env("halfcheetah", num_envs=2, threads=1)
    env.reset(0)
    try:
        first = env.render(0, 160, 120)
    except ConfigError as error:
        pytest.skip(str(error))
    assert (first.shape, first.dtype) == ((120, 160, 3), np.uint8)
    env.engine.fields["qpos"][1] = env.engine.fields["qpos"][0]
    env.engine.fields["qpos"][1, 0] += 200
    before = env.engine.state().clone()
    away = env.render(1, 160, 120)
    for picture in (first, away):
        x, y = centre(robot(picture))
        assert x == pytest.approx(80, abs=12)
        assert y == pytest.approx(60, abs=15)
        assert robot(picture).mean() > 0.01
        ground = picture[100:].reshape(-1, 3).mean(1)
        assert ground.std() > 20  # checks, not void
        assert picture[:20].reshape(-1, 3).std(0).max() < 20  # the sky
    assert robot(away).sum() == pytest.approx(robot(first).sum(), rel=0.1)
    assert torch.equal(env.engine.state(), before)  # looking changes nothing
    env.engine.fields["qpos"][1, 2] = math.pi / 2  # on its tail
    y, x = np.nonzero(robot(env.render(1, 160, 120)))
    assert np.ptp(y) > 1.2 * np.ptp(np.nonzero(robot(first))[0])
    env.close()


def test_without_a_way_to_draw_the_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mujoco")
    from pql.envs.mujoco import render

    tried: list[str] = []
    monkeypatch.setattr(render, "works", lambda name: tried.append(name) or name == "osmesa")
    render.backend.cache_clear()
    assert render.backend("") == "osmesa"
    assert tried == ["egl", "osmesa"]
    monkeypatch.setattr(render, "works", lambda name: False)
    render.backend.cache_clear()
    with pytest.raises(ConfigError, match=r"GL=null: .*egl, osmesa did not.*libegl1 libgl1-mesa-dri.*libosmesa6"):
        render.backend("")
    with pytest.raises(ConfigError, match=r"MUJOCO_GL=osmesa: .*; osmesa did not"):
        render.backend("osmesa")
    render.backend.cache_clear()


def test_a_window_needs_a_screen_and_a_simulator_that_has_one(run: Path, monkeypatch, capsys) -> None:
    pytest.importorskip("mujoco")
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    if sys.platform == "linux":
        with pytest.raises(ConfigError, match=r"--live=true: expected a screen \(neither DISPLAY"):
            make_env("hopper", num_envs=1, threads=1).viewer()
    capsys.readouterr()
    assert main(["play", str(run), "--live"]) == 2
    assert capsys.readouterr().err.startswith("pql: --live=true: expected a task with a window (MuJoCo)")


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["episodes=0"], "episodes=0: expected a number from 1 up to 1000000"),
        (
            ["widht=64"],
            "widht=64: expected one of episodes, steps, width, height, seed, device, out (did you mean width?)",
        ),
        (["width=65"], "width=65: expected an even number of pixels from 16 to 4096"),
        (["height=8"], "height=8: expected an even number of pixels from 16 to 4096"),
        (["steps=1.5"], "steps=1.5: expected a whole number"),
        (["out=x.gif"], "out=x.gif: expected a file name that ends in .mp4"),
        (["out=/proc/no/x.mp4"], "out=/proc/no/x.mp4: expected a file that can be written ("),
        (["--live", "width=64"], "width=64: expected one of episodes, steps, seed, device"),
    ],
)
def test_mistakes_are_one_line(run: Path, capsys, more: list[str], message: str) -> None:
    capsys.readouterr()
    assert main(["play", str(run), *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"pql: {message}")
    assert error.count("\n") == 1


def test_missing_packages_are_named_with_what_installs_them(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(ConfigError, match=r"the package 'imageio-ffmpeg'.*pip install 'pql-rl\[video\]'"):
        record_video(run)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"the package 'pillow': pip install 'pql-rl\[video\]'"):
        make_env("pendulum", num_envs=1).render()


# -- during a run -----------------------------------------------------------------------------------------------------


def film_words(run_dir, *more):
    short = "task.kwargs.max_episode_steps=12"
    return words(run_dir, short, "eval.video_every_seconds=0.01", "budget.env_steps=640", *more)


def test_a_video_of_an_episode_is_recorded_beside_the_training_and_changes_no_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(deadlines, "LAST_VIDEO", 250.0)  # on a busy machine
    shown = []
    session = Session(compose(film_words(tmp_path / "film", "eval.videos_kept=1")), quiet=True)
    (tmp_path / "film" / "videos").mkdir()
    (tmp_path / "film" / "videos" / "steps-000000000001.mp4").touch()  # of an earlier sitting
    session.sinks.sinks.append(Shown(shown))
    session.train()
    run_words(*words(tmp_path / "plain", "task.kwargs.max_episode_steps=12", "budget.env_steps=640"))
    ((path, steps),) = shown
    assert path.name == f"steps-{steps:012d}.mp4"
    assert 128 < steps <= 640
    assert path.read_bytes()[4:8] == b"ftyp"
    assert [*(tmp_path / "film" / "videos").iterdir()] == [path]  # neither the older video nor the copy of the policy
    hashes = {manifest(points(tmp_path / name)[-1])["sha256"] for name in ("film", "plain")}
    assert len(hashes) == 1


class Shown:
    def __init__(self, shown):
        self.shown = shown

    def write(self, row):
        pass

    def video(self, path, step):
        self.shown.append((path, step))

    def close(self):
        pass


def test_a_recording_that_fails_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr("pql.run.log.film.sys.executable", "/bin/false")
    with pytest.warns(PqlWarning, match="no video of .* env steps: exit status 1"):
        run_words(*film_words(tmp_path / "run"))


def test_a_task_that_does_not_render_is_refused_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match=r"^eval.video_every_seconds=0.01: expected null: this environment does not"):
        Session(compose(film_words(tmp_path, "task=lqr")), quiet=True)
    with pytest.raises(ConfigError, match=r"eval\.videos_kept=3: expected eval\.video_every_seconds with it"):
        compose(["task=pendulum", "eval.videos_kept=3", "device=cpu"])


@pytest.mark.parametrize("word", ["seed=-5", "episodes=0", "port=70000", "width=64"])
def test_wrong_numbers_for_a_live_page_are_named(run, word, capsys):
    assert main(["play", str(run), "--browser", word]) == 2
    assert f"pql: {word}: expected" in capsys.readouterr().err


@pytest.fixture
def viser(monkeypatch):
    """In place of viser: a list of what its server is asked for, and a list of the frames that it shows."""
    calls, frames = [], []

    class Server:
        def __init__(self, **options):
            calls.append(("serve", options["host"], options["port"]))
            self.scene = types.SimpleNamespace(set_background_image=frames.append)

        def get_port(self):
            return 4711

        def stop(self):
            calls.append("stop")

    module = types.ModuleType("viser")
    module.__dict__.update(ViserServer=Server, __spec__=importlib.machinery.ModuleSpec("viser", None))
    monkeypatch.setitem(sys.modules, "viser", module)
    monkeypatch.setattr("pql.run.play.time.sleep", lambda seconds: None)
    return calls, frames


def test_a_policy_in_a_browser_is_shown_by_viser(run, viser, capsys, monkeypatch):
    calls, frames = viser
    stream(str(run), port=8000, episodes=2)
    assert calls == [("serve", "127.0.0.1", 8000), "stop"]
    assert "http://127.0.0.1:4711/ shows the policy" in capsys.readouterr().out
    assert {(frame.shape[2], frame.dtype.name) for frame in frames} == {(3, "uint8")}
    assert len(frames) == 24
    monkeypatch.setitem(sys.modules, "viser", None)
    assert main(["play", str(run), "--browser"]) == 2
    assert "the package 'viser', which is not installed: pip install 'pql-rl[viser]'" in capsys.readouterr().err


def test_a_simulator_with_a_page_of_its_own_shows_its_states_there(viser, monkeypatch, capsys):
    """mjviser's scene gets the states that a video would show, and its server is stopped at the end."""
    mujoco = pytest.importorskip("mujoco")
    (calls, _), heights = viser, []

    class Scene:
        def __init__(self, server, model, num_envs):
            assert server.get_port() == 4711
            assert (model.nq, num_envs) == (9, 1)

        def create_visualization_gui(self):
            calls.append("controls")

        def update_from_mjdata(self, data):
            assert isinstance(data, mujoco.MjData)
            heights.append(data.qpos[1])

    module = types.ModuleType("mjviser")
    module.__dict__.update(ViserMujocoScene=Scene, __spec__=importlib.machinery.ModuleSpec("mjviser", None))
    monkeypatch.setitem(sys.modules, "mjviser", module)
    policy = Path(__file__).parents[2] / "docs" / "policies" / "walker2d"
    stream(str(policy), port=8000, episodes=1)
    assert calls == [("serve", "127.0.0.1", 8000), "controls", "stop"]
    assert "http://127.0.0.1:4711/ shows the policy" in capsys.readouterr().out
    assert len(heights) == 250  # every fourth of 1,000 steps of 8 ms
    assert 0.7 < min(heights) < max(heights) < 1.6  # it walks upright
