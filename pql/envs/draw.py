"""2D images of the classic tasks. World coordinates are metres, y (or z) up."""

import math
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
from torch import Tensor

from pql.errors import ConfigError

Colour = tuple[int, int, int]
Point = tuple[float, float]

PAPER, INK, GREY, PALE = (250, 250, 248), (45, 50, 60), (150, 155, 165), (214, 219, 226)
POLE, CART, BALL, SHADE, PLATE = (214, 84, 46), (52, 104, 164), (230, 140, 30), (170, 182, 196), (196, 208, 220)
SMOOTH = 3  # supersampling factor of the drawing


class Canvas:
    """Image of ``width`` x ``height`` pixels that covers at least the ``view`` ((left, bottom), (right, top)). Raises
    ``ConfigError``: pillow is not installed."""

    def __init__(self, width: int, height: int, view: tuple[Point, Point]):
        try:
            from PIL import Image, ImageDraw
        except ModuleNotFoundError as error:
            raise ConfigError("render", "2D", "the package 'pillow': pip install 'pql-rl[video]'") from error
        (left, bottom), (right, top) = view
        self.width, self.height = width, height
        self.scale = min(width / (right - left), height / (top - bottom))  # pixels per metre
        self.middle = ((left + right) / 2, (bottom + top) / 2)
        self._image = Image.new("RGB", (width * SMOOTH, height * SMOOTH), PAPER)
        self._draw = ImageDraw.Draw(self._image)

    def pixel(self, point: Point) -> Point:
        """Convert world coordinates to pixels of the finished image (x to the right, y down)."""
        (x, y), (cx, cy) = point, self.middle
        return self.width / 2 + (x - cx) * self.scale, self.height / 2 - (y - cy) * self.scale

    def line(self, a: Point, b: Point, thick: float, colour: Colour) -> None:
        """Draw a bar of ``thick`` metres with round ends."""
        across = math.hypot(b[0] - a[0], b[1] - a[1]) or 1.0
        x, y = (b[1] - a[1]) / across * thick / 2, (a[0] - b[0]) / across * thick / 2
        self.polygon([(a[0] + x, a[1] + y), (b[0] + x, b[1] + y), (b[0] - x, b[1] - y), (a[0] - x, a[1] - y)], colour)
        for end in (a, b):
            self.circle(end, thick / 2, colour)

    def circle(self, centre: Point, radius: float, colour: Colour) -> None:
        (x, y), r = self._fine(centre), radius * self.scale * SMOOTH
        self._draw.ellipse((x - r, y - r, x + r, y + r), fill=colour)

    def polygon(self, points: Sequence[Point], colour: Colour) -> None:
        self._draw.polygon([self._fine(p) for p in points], fill=colour)

    def box(self, centre: Point, width: float, height: float, colour: Colour) -> None:
        (x, y), w, h = centre, width / 2, height / 2
        self.polygon([(x - w, y - h), (x + w, y - h), (x + w, y + h), (x - w, y + h)], colour)

    def _fine(self, point: Point) -> Point:
        x, y = self.pixel(point)
        return x * SMOOTH, y * SMOOTH

    def array(self) -> np.ndarray:
        """Return the finished image, uint8 [height, width, 3]."""
        from PIL import Image

        return np.asarray(self._image.resize((self.width, self.height), Image.Resampling.BOX))


class Drawn:
    """Mixin with ``render`` for an environment of ``classic.py`` that sets ``view`` and ``paint``."""

    view: tuple[Point, Point]
    paint: ClassVar[Callable[..., None]]  # (canvas, one environment's state as floats)
    _state: Tensor

    def render(self, index: int = 0, width: int | None = None, height: int | None = None) -> np.ndarray:
        """Render environment ``index``, by default 640 x 480 pixels: uint8 [H, W, 3]. Waits for the device."""
        canvas = Canvas(width or 640, height or 480, self.view)
        type(self).paint(canvas, self._state[index].tolist())
        return canvas.array()


def pendulum(canvas: Canvas, state: Sequence[float]) -> None:
    """Draw the state: angle (0 is up, positive turns to the left), velocity."""
    angle = state[0]
    tip = (-math.sin(angle), math.cos(angle))
    canvas.line((0, 0), tip, 0.16, POLE)
    canvas.circle((0, 0), 0.05, INK)


def cartpole(canvas: Canvas, state: Sequence[float], rail: float = 2.4, length: float = 1.0) -> None:
    """Draw the state: position, velocity, angle (0 is up, positive leans to the right), velocity."""
    x, angle = state[0], state[2]
    canvas.box((0, 0), 2 * rail, 0.03, GREY)
    for end in (-rail, rail):
        canvas.box((end, 0), 0.03, 0.25, GREY)
    canvas.box((x, 0), 0.5, 0.26, CART)
    canvas.line((x, 0), (x + length * math.sin(angle), length * math.cos(angle)), 0.09, POLE)
    canvas.circle((x, 0), 0.035, INK)


def catch(canvas: Canvas, state: Sequence[float], size: int = 8) -> None:
    """Draw the state: the ball's phase, drift, row, the paddle's column, ...; one metre per pixel of the frames."""
    far = size - 1
    ball = (far - abs(state[0] % (2 * far) - far), far - state[2])
    canvas.box((far / 2, far / 2), size, size, PALE)
    canvas.box((state[3], 0), 1, 1, CART)
    canvas.circle(ball, 0.5, BALL)


def tmaze(canvas: Canvas, state: Sequence[float]) -> None:
    """Draw the state: sign and cell; one metre per cell. The sign is in the first cell, the junction at the right."""
    end = canvas.middle[0] * 2
    canvas.box((end / 2, 0), end + 1, 1, PALE)
    canvas.box((end, 0), 1, 3, PALE)
    canvas.line((0, -0.3 * state[0]), (0, 0.3 * state[0]), 0.08, POLE)
    canvas.circle((0, 0.3 * state[0]), 0.12, POLE)
    canvas.circle((state[1], 0), 0.25, CART)


def ball_balance(
    canvas: Canvas, state: Sequence[float], plate: float = 0.5, leg: float = 0.4, ball: float = 0.05
) -> None:
    """Draw the state: three leg heights, ball position, ...; from the front, 30 degrees above."""
    heights, (x, y, z) = state[:3], state[3:6]
    turns = [math.radians(a) for a in (90, 210, 330)]
    middle = sum(heights) / 3
    slope = [2 / (3 * leg) * sum(h * f(t) for h, t in zip(heights, turns, strict=True)) for f in (math.cos, math.sin)]

    def seen(x: float, y: float, z: float) -> Point:
        return x, y * math.sin(math.radians(30)) + z * math.cos(math.radians(30))

    def above(x: float, y: float) -> Point:
        return seen(x, y, middle + slope[0] * x + slope[1] * y)

    feet = [(leg * math.cos(t), leg * math.sin(t)) for t in turns]
    for (fx, fy), h in zip(feet, heights, strict=True):
        canvas.line(seen(fx, fy, -0.3), seen(fx, fy, h), 0.025, GREY)
        canvas.circle(seen(fx, fy, -0.3), 0.03, GREY)
    around = [2 * math.pi * i / 72 for i in range(72)]
    rim = [above(plate * math.cos(t), plate * math.sin(t)) for t in around]
    canvas.polygon([(px, py - 0.02) for px, py in rim], SHADE)
    canvas.polygon(rim, PLATE)
    for radius, colour in ((0.36, PALE), (0.02, GREY)):
        canvas.polygon([above(radius * math.cos(t), radius * math.sin(t)) for t in around], colour)
    for fx, fy in feet:
        canvas.circle(above(fx, fy), 0.012, GREY)
    if math.hypot(x, y) <= plate:
        canvas.polygon([above(x + ball * math.cos(t), y + ball * math.sin(t)) for t in around], SHADE)
    canvas.circle(seen(x, y, z), ball, BALL)
    canvas.circle((seen(x, y, z)[0] - 0.015, seen(x, y, z)[1] + 0.018), 0.012, (255, 214, 150))
