"""Rendering of a MuJoCo simulation: off-screen by EGL or OSMesa, or in MuJoCo's interactive viewer."""

import atexit
import copy
import functools
import importlib
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import mujoco
import mujoco.viewer
import numpy as np

from pql.envs.mujoco.randomize import base_dofs
from pql.errors import ConfigError

PACKAGES = {"egl": "libegl1 libgl1-mesa-dri", "osmesa": "libosmesa6"}
"""Off-screen rendering backends, in the order they are tried, and the Debian packages each needs."""


@functools.cache
def backend(asked: str) -> str:
    """Return the first backend that works: ``asked`` (the variable MUJOCO_GL) if it names one, else EGL, else OSMesa.
    Raises ``ConfigError``: none works; names the packages."""
    names = (asked,) if asked in (*PACKAGES, "glfw") else tuple(PACKAGES)
    for name in names:
        if works(name):
            return name
    what = " or ".join(f"{name} (apt-get install {PACKAGES[name]})" for name in PACKAGES)
    raise ConfigError(
        "MUJOCO_GL", asked or None, f"an OpenGL backend that works; {', '.join(names)} did not work: {what}"
    )


def works(name: str) -> bool:
    """Return True if the GL context ``name`` works. Tested in another process: a failure would break later ones."""
    code = f"from mujoco.{name} import GLContext; c = GLContext(16, 16); c.make_current(); c.free()"
    env = {k: v for k, v in os.environ.items() if k != "PYOPENGL_PLATFORM"} | {"MUJOCO_GL": name}
    try:
        command = [sys.executable, "-c", code]
        return subprocess.run(command, env=env, capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def make_context(width: int, height: int) -> Any:
    """Make an off-screen OpenGL context and make it current."""
    if sys.platform == "linux":
        name = backend(os.environ.get("MUJOCO_GL", "").lower().strip())
        context = importlib.import_module(f"mujoco.{name}").GLContext(width, height)
    else:
        context = mujoco.GLContext(width, height)
    context.make_current()
    return context


class Renderer:
    """Draws one model. The camera looks along y and follows the robot's first body, so planar robots show their side.
    Raises ``ConfigError``: off-screen OpenGL does not work on this machine."""

    def __init__(self, model: mujoco.MjModel, width: int, height: int):
        self.size = (width, height)
        self.model = for_the_eye(model, width, height)
        self._gl = make_context(width, height)
        self._context = mujoco.MjrContext(self.model, mujoco.mjtFontScale.mjFONTSCALE_100.value)
        self._finish = weakref.finalize(self, free, self._gl, self._context)  # also if it is never closed,
        self._finish.atexit = False
        atexit.register(self._finish)  # ... and before MuJoCo's hook, registered earlier, terminates EGL
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, self._context)
        self._scene, self._option = mujoco.MjvScene(self.model, maxgeom=1000), mujoco.MjvOption()
        self._scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION.value] = False  # a reflection of the robot is confusing
        self._camera = follow(self.model)
        self._picture = np.zeros((height, width, 3), np.uint8)

    def render(self, data: mujoco.MjData) -> np.ndarray:
        """Render ``data`` to a new array, uint8 [H, W, 3]."""
        self._gl.make_current()  # contexts belong to threads, and another environment may have rendered since
        everything = mujoco.mjtCatBit.mjCAT_ALL.value
        mujoco.mjv_updateScene(self.model, data, self._option, None, self._camera, everything, self._scene)
        mujoco.mjr_render(mujoco.MjrRect(0, 0, *self.size), self._scene, self._context)
        mujoco.mjr_readPixels(self._picture, None, mujoco.MjrRect(0, 0, *self.size), self._context)
        return self._picture[::-1].copy()  # OpenGL's rows begin at the bottom

    def close(self) -> None:
        self._finish()
        atexit.unregister(self._finish)


def free(gl: Any, context: mujoco.MjrContext) -> None:
    """Free the render context inside its GL context, before the interpreter exits."""
    gl.make_current()
    context.free()
    gl.free()


def for_the_eye(model: mujoco.MjModel, width: int = 640, height: int = 480) -> mujoco.MjModel:
    """Return a copy for rendering: infinite ground (the shipped one ends after 40 m), a buffer of the image's size."""
    model = copy.copy(model)
    model.vis.global_.offwidth, model.vis.global_.offheight = width, height
    model.vis.quality.shadowsize = 2048
    for geom in np.flatnonzero(model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE.value):
        model.geom_size[geom, :2] = 0  # 0: infinite
        material = model.geom_matid[geom]
        if material >= 0:
            model.mat_texuniform[material], model.mat_texrepeat[material] = True, 0.5
    return model


def follow(model: mujoco.MjModel) -> mujoco.MjvCamera:
    """Return a camera centred on body 1, the robot's first. If that body is fixed, the view is the model's:
    ``statistic`` (center, extent) and ``visual/global`` (azimuth, elevation)."""
    camera = mujoco.MjvCamera()
    if not base_dofs(model):
        mujoco.mjv_defaultFreeCamera(model, camera)
        return camera
    camera.type = mujoco.mjtCamera.mjCAMERA_TRACKING.value
    camera.trackbodyid = 1
    camera.azimuth, camera.elevation, camera.distance = 90.0, -12.0, 4.0
    return camera


class Viewer:
    """MuJoCo's interactive viewer on a simulation that other code steps. ``load``: fills an ``MjData`` (a new one for
    None) with the simulation's current state. Raises ``ConfigError``: there is no screen."""

    def __init__(self, model: mujoco.MjModel, load: Callable[[mujoco.MjData | None], mujoco.MjData]):
        if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
            screen = "a screen (neither DISPLAY nor WAYLAND_DISPLAY is set); without --live, a video is written"
            raise ConfigError("--live", True, screen)
        self._load, self._data = load, load(None)
        before = {*threading.enumerate()}
        self._window = mujoco.viewer.launch_passive(
            for_the_eye(model), self._data, show_left_ui=False, show_right_ui=False
        )
        self._threads = [t for t in threading.enumerate() if t not in before]
        with self._window.lock():
            camera = follow(model)
            self._window.cam.type, self._window.cam.trackbodyid = camera.type, camera.trackbodyid
            self._window.cam.lookat[:] = camera.lookat
            self._window.cam.azimuth, self._window.cam.elevation = camera.azimuth, camera.elevation
            self._window.cam.distance = camera.distance

    @property
    def open(self) -> bool:
        """Return True until the user closes the window."""
        return self._window.is_running()

    def show(self) -> None:
        """Draw the simulation's current state."""
        with self._window.lock():
            self._load(self._data)
        self._window.sync()

    def close(self) -> None:
        self._window.close()
        for thread in self._threads:  # a thread still drawing when the interpreter exits would crash it
            thread.join(timeout=5.0)


class WebViewer:
    """mjviser's page on a simulation that other code steps: a camera that each visitor moves, contacts, forces.

    Args:
        load: fills an ``MjData`` (a new one for None) with the simulation's current state.
        port: of the loopback address; the next free one if it is taken.
    """

    def __init__(self, model: mujoco.MjModel, load: Callable[[mujoco.MjData | None], mujoco.MjData], port: int):
        import mjviser
        import viser

        self._load, self._data = load, load(None)
        self._server = viser.ViserServer(host="127.0.0.1", port=port, verbose=False)
        self._scene = mjviser.ViserMujocoScene(self._server, for_the_eye(model), 1)
        self._scene.create_visualization_gui()
        self.address = f"http://127.0.0.1:{self._server.get_port()}/"

    def show(self) -> None:
        """Send the simulation's current state to the visitors."""
        self._load(self._data)
        self._scene.update_from_mjdata(self._data)

    def close(self) -> None:
        self._server.stop()
