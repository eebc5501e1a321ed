"""Rasteriser for Ball Balance: 84 x 84 grey bytes, drawn from signed distances to a few shapes, on CPU or CUDA.

The view is orthographic, from 35 degrees above the horizon. So a ball is a disc, a leg a capsule and the tray an
ellipse, each with a closed-form distance; edges are one pixel soft. The ball casts a shadow straight down on the tray;
without the shadow a single image would not show depth.
"""

import math

import torch
from torch import Tensor

SIZE = 84
WIDTH = 2.3  # metres shown by an image: from the feet to the ball's highest start
MIDDLE = 0.9  # the image's centre, metres along the view's upward axis
ELEVATION = math.radians(35)
NIGHT, LEG, SHADE, TRAY, BALL = 40.0, 100.0, 90.0, 160.0, 255.0  # brightness


class Camera:
    """Draws N scenes at once.

    Args:
        device: device of shapes and images.
        ball, tray, leg: radii in metres.
    """

    def __init__(self, device: torch.device, ball: float, tray: float, leg: float):
        self.ball, self.tray, self.leg = ball, tray, leg
        c, s = math.cos(ELEVATION), math.sin(ELEVATION)
        self.right, self.up, self.depth = (
            torch.tensor(v, device=device) for v in ((0.0, 1, 0), (-s, 0, c), (-c, 0, -s))
        )
        centres = ((torch.arange(SIZE, device=device) + 0.5) / SIZE - 0.5) * WIDTH
        self.x = centres.expand(SIZE, SIZE)  # a pixel's place in the view, metres
        self.y = (MIDDLE - centres[:, None]).expand(SIZE, SIZE)

    def picture(self, ball: Tensor, tray: Tensor, normal: Tensor, legs: Tensor) -> Tensor:
        """Render ball [N, 3], tray centre [N, 3] and unit normal [N, 3], leg segments by both ends [N, L, 2, 3], all in
        the world -> [N, 84, 84] uint8."""
        ball, tray, normal, legs = (part.float() for part in (ball, tray, normal, legs))
        image = torch.full((len(ball), SIZE, SIZE), NIGHT, device=ball.device)
        self._paint(image, LEG, self._share(self._capsules(legs)))
        disc = self._share(self._disc(ball))
        above = (((ball - tray) * normal).sum(1) >= 0)[:, None, None]
        self._paint(image, BALL, disc * ~above)
        surface, shade = (self._share(distance) for distance in self._surface(ball, tray, normal))
        self._paint(image, TRAY, surface)
        self._paint(image, SHADE, surface * shade * above)
        self._paint(image, BALL, disc * above)
        return image.round_().to(torch.uint8)

    def _share(self, distance: Tensor) -> Tensor:
        """Return the share of each pixel inside a shape, from its signed distance in metres (negative: inside), which
        is overwritten."""
        return distance.mul_(-SIZE / WIDTH).add_(0.5).clamp_(0.0, 1.0)

    def _paint(self, image: Tensor, brightness: float, share: Tensor) -> None:
        image.lerp_(image.new_full((1, 1, 1), brightness), share)

    def _view(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Project world points [..., 3] to view coordinates, [..., 1, 1] each."""
        return ((points * axis).sum(-1)[..., None, None] for axis in (self.right, self.up))  # type: ignore[return-value]

    def _disc(self, ball: Tensor) -> Tensor:
        x, y = self._view(ball)
        return ((self.x - x).square_() + (self.y - y).square_()).sqrt_().sub_(self.ball)

    def _capsules(self, ends: Tensor) -> Tensor:
        """Return each pixel's signed distance to the nearest leg, from the segments' ends [N, L, 2, 3]."""
        x, y = self._view(ends)  # [N, L, 2, 1, 1]
        nearest: Tensor | None = None
        for part in range(ends.shape[1]):
            (x0, x1), (y0, y1) = x[:, part].unbind(1), y[:, part].unbind(1)
            px, py, dx, dy = self.x - x0, self.y - y0, x1 - x0, y1 - y0
            along = (px * dx).addcmul_(py, dy).div_((dx * dx + dy * dy).clamp_(min=1e-9)).clamp_(0.0, 1.0)
            far = px.addcmul_(along, dx, value=-1).square_() + py.addcmul_(along, dy, value=-1).square_()
            nearest = far if nearest is None else torch.minimum(nearest, far, out=nearest)
        assert nearest is not None
        return nearest.sqrt_().sub_(self.leg)

    def _surface(self, ball: Tensor, tray: Tensor, normal: Tensor) -> tuple[Tensor, Tensor]:
        """Intersect each pixel's ray with the tray's plane; return distances to the edges of tray and shadow."""
        slope = (normal * self.depth).sum(1)[:, None, None]
        slope = torch.where(slope.abs() < 0.05, 0.05, slope)  # seen from the side, the plane is a line
        over, upward = ((normal * axis).sum(1)[:, None, None] for axis in (self.right, self.up))
        t = ((normal * tray).sum(1)[:, None, None] - self.x * over).sub_(self.y * upward).div_(slope)
        # of the intersection; the view's axes have zeros that need not be multiplied
        x, z = t * self.depth[0] + self.y * self.up[0], t * self.depth[2] + self.y * self.up[2]
        cx, cy, cz = (part[:, None, None] for part in tray.unbind(1))
        radius = ((x - cx).square_().add_((self.x - cy).square_()).add_((z - cz).square_())).sqrt_()
        shade = (x - ball[:, :1, None]).square_().add_((self.x - ball[:, 1:2, None]).square_()).sqrt_()
        return radius.sub_(self.tray).mul_(slope.abs()), shade.sub_(self.ball).mul_(slope.abs())
