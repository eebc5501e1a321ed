"""Augmentation of images: shifts and jitter row by row, from their definitions; drawn for each row on its own."""

import pytest
import torch
from torch import Generator
from torch.nn import functional as F

from pql.data.augment import Augment, jittered, shifted

SHAPES = [((3, 7, 9), False), ((7, 9, 3), True), ((7, 9), False)]
"""Shapes of an image, and whether its last axis has the channels."""


def pictures(count, shape):
    return torch.randint(256, (count, *shape), dtype=torch.uint8, generator=Generator().manual_seed(count))


def planes(image, last):
    """An image as [C, H, W]."""
    return image.permute(2, 0, 1) if last else image.view(-1, *image.shape[-2:])


def cropped(image, down, right, most, last):
    """Pad [C, H, W] by ``most`` repeated pixels on each side, then crop it: DrQ-v2."""
    chw = planes(image, last)
    height, width = chw.shape[1:]
    padded = F.pad(chw.float().unsqueeze(0), [most] * 4, mode="replicate")[0]
    return padded[:, most + down : most + down + height, most + right : most + right + width].to(image.dtype)


@pytest.mark.parametrize(("shape", "last"), SHAPES)
def test_a_shift_is_a_crop_of_the_image_with_repeated_borders(shape, last):
    images = pictures(25, shape)
    offset = torch.cartesian_prod(torch.arange(-2, 3), torch.arange(-2, 3)).T
    out = shifted(images, offset, last)
    assert (out.shape, out.dtype) == (images.shape, images.dtype)
    for image, moved, (down, right) in zip(images, out, offset.T.tolist(), strict=True):
        assert torch.equal(planes(moved, last), cropped(image, down, right, 2, last)), (down, right)


def test_floats_are_shifted_too():
    images = pictures(4, (2, 6, 6)).float() / 255
    offset = torch.tensor([[1, -1, 0, 2], [0, 2, -2, 1]])
    for image, moved, (down, right) in zip(images, shifted(images, offset), offset.T.tolist(), strict=True):
        assert torch.equal(moved, cropped(image, down, right, 2, False))


@pytest.mark.parametrize(("shape", "last"), SHAPES)
def test_jitter_is_brightness_and_contrast(shape, last):
    images = pictures(6, shape)
    brightness, contrast = torch.tensor([1.0, 0.5, 1.5, 1, 1, 1.3]), torch.tensor([1.0, 1, 1, 0.5, 1.5, 0])
    out = jittered(images, brightness, contrast)
    assert (out.dtype, out.shape) == (torch.uint8, images.shape)
    assert torch.equal(out[0], images[0])
    for image, got, b, c in zip(images, out, brightness.tolist(), contrast.tolist(), strict=True):
        values = [b * pixel for pixel in image.flatten().tolist()]
        mean = sum(values) / len(values)
        wanted = torch.tensor([min(255.0, max(0.0, mean + c * (v - mean))) for v in values]).view(shape)
        assert (got.double() - wanted.double()).abs().max() <= 0.5 + 1e-3  # rounded


def test_every_row_and_every_call_has_an_offset_of_its_own():
    image = pictures(1, (1, 9, 9))
    augment, gen = Augment({"image": False}, 2, 0.0), Generator().manual_seed(0)
    obs = {"image": image.expand(2000, 1, 9, 9), "vector": torch.ones(2000, 3)}
    one, two = augment(obs, gen), augment(obs, gen)
    assert one["vector"] is obs["vector"]
    crops = [cropped(image[0], d, r, 2, False) for d in range(-2, 3) for r in range(-2, 3)]
    found = [torch.tensor([[torch.equal(x, crop) for crop in crops] for x in got["image"]]) for got in (one, two)]
    for which in found:
        assert which.sum(1).eq(1).all()
        assert (which.float().mean(0) - 1 / 25).abs().max() < 4 * (0.04 * 0.96 / 2000) ** 0.5  # uniform
    assert (found[0] & found[1]).any(1).float().mean() < 0.07  # 1 / 25 if independent


def test_factors_are_uniform_around_one():
    obs = {"image": torch.tensor([50, 150], dtype=torch.uint8).view(1, 1, 1, 2).expand(5000, 1, 1, 2)}
    out = Augment({"image": False}, 0, 0.4)(obs, Generator().manual_seed(0))["image"].double().flatten(1)
    brightness, contrast = out.mean(1) / 100, (out[:, 1] - out[:, 0]) / out.mean(1)
    for factor in (brightness, contrast):
        assert factor.min() >= 0.58  # rounding of bytes included
        assert factor.max() <= 1.42
        assert factor.mean().item() == pytest.approx(1, abs=0.015)
        assert factor.std().item() == pytest.approx(0.8 / 12**0.5, abs=0.01)
    assert torch.corrcoef(torch.stack((brightness, contrast)))[0, 1].abs() < 0.06


def test_without_augmentation_nothing_is_drawn():
    gen = Generator().manual_seed(0)
    before = gen.get_state()
    obs = {"image": pictures(2, (1, 4, 4))}
    assert Augment({"image": False}, 0, 0.0)(obs, gen)["image"] is obs["image"]
    assert torch.equal(gen.get_state(), before)
