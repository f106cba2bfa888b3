"""Augmentation against independent references: PIL for every RandAugment operation, pad, crop and
flip written out in NumPy, torchvision for the normalisation. Equality is exact where the values
are integers."""
import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageOps
from torchvision.transforms.functional import normalize

from support import augment

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)
IDENTITY = augment.Normalise((0, 0, 0), (1 / 255,) * 3)       # keeps 0..255, as floats
POSITIVE = augment.Normalise((-1, -1, -1), (1, 1, 1))         # 0 where Cutout cuts, else at least 1

# (lo, hi) of the ildoonet RandAugment, typed in a second time to check augment.OPS
RANGES = {
    "AutoContrast": (0, 0), "Equalize": (0, 0), "Invert": (0, 0), "Rotate": (0, 30),
    "Posterize": (0, 4), "Solarize": (0, 256), "SolarizeAdd": (0, 110), "Color": (0.1, 1.9),
    "Contrast": (0.1, 1.9), "Brightness": (0.1, 1.9), "Sharpness": (0.1, 1.9), "ShearX": (0, 0.3),
    "ShearY": (0, 0.3), "Box": (0, 40), "TranslateX": (0, 100), "TranslateY": (0, 100)}
SIGNED = {"Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY"}


def apply_op(a, name, v, centre=(0.5, 0.5)):
    """One operation on images (N, H, W, 3) uint8, its strength signed and in its own unit."""
    op, v = (np.full((1, len(a)), value) for value in (augment.NAMES.index(name), float(v)))
    centre = np.broadcast_to(np.reshape(centre, (2, 1, 1)), (2, 1, len(a)))
    return augment.randaugment(planar(a), op, v, centre).permute(0, 2, 3, 1).numpy()


def pil(a, name, v, centre):
    """The operation on one (H, W, 3) uint8 array, by PIL."""
    img, (h, w, _) = Image.fromarray(a), a.shape
    matrix = {"ShearX": (1, v, 0, 0, 1, 0), "ShearY": (1, 0, 0, v, 1, 0),
              "TranslateX": (1, 0, v, 0, 1, 0), "TranslateY": (1, 0, 0, 0, 1, v)}
    if name in ("AutoContrast", "Equalize", "Invert"):
        img = getattr(ImageOps, name.lower())(img)
    elif name == "Posterize":
        img = ImageOps.posterize(img, max(1, int(v)))
    elif name == "Solarize":
        img = ImageOps.solarize(img, v)
    elif name == "SolarizeAdd":
        added = np.clip(a + float(v), 0, 255).astype(np.uint8)
        img = ImageOps.solarize(Image.fromarray(added), 128)
    elif name == "Rotate":
        img = img.rotate(v)
    elif name in matrix:
        img = img.transform(img.size, Image.Transform.AFFINE, matrix[name])
    elif name == "Box":
        x0, y0 = (int(max(0, c * side - v / 2)) for c, side in zip(centre, (w, h), strict=True))
        corners = (x0, y0, min(w, x0 + v), min(h, y0 + v))
        ImageDraw.Draw(img).rectangle(corners, (125, 123, 114))
    else:
        img = getattr(ImageEnhance, name)(img).enhance(v)
    return np.asarray(img)


def pictures(h, w):
    """(k, H, W, 3) uint8: noise, ramps, constants, low contrast, and histograms with few levels."""
    g = np.random.default_rng(0)
    noise = lambda lo, hi: g.integers(lo, hi, (h, w, 3))   # noqa: E731
    y, x = np.mgrid[:h, :w]
    ramps = np.stack([y * 255 // (h - 1), x * 255 // (w - 1), (x + y) * 255 // (h + w - 2)], -1)
    one_flat = noise(0, 256)
    one_flat[..., 1] = 9
    one_odd_pixel = np.full((h, w, 3), 5)
    one_odd_pixel[0, 0] = 200, 6, 5
    mostly_dark = noise(0, 256) * (g.random((h, w, 1)) < 0.2)      # equalize: step 0 at 32 x 32
    return np.stack([noise(0, 256), noise(0, 256), noise(60, 110), noise(100, 103), noise(0, 2),
                     noise(254, 256), ramps, 255 - ramps, 100 + ramps // 16, one_flat, mostly_dark,
                     one_odd_pixel, *(np.full((h, w, 3), c) for c in (0, 7, 128, 255))]
                    ).astype(np.uint8)


def planar(a):
    return torch.from_numpy(np.ascontiguousarray(a.transpose(0, 3, 1, 2)))


def batch(n=64, h=32, w=32):
    return planar(np.random.default_rng(0).integers(1, 256, (n, h, w, 3), dtype=np.uint8))


# ---------------------------------------------------------------------------------------------
# RandAugment


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("h, w, every", [
    (32, 32, 4), (41, 17, 4), *(pytest.param(*size, 1, marks=pytest.mark.slow)
                                for size in ((32, 32), (24, 40), (41, 17)))])
def test_every_operation_equals_pil(name, h, w, every):
    g, (lo, hi), a = np.random.default_rng(1), RANGES[name], pictures(h, w)
    # extremes, the levels in common use (4, 14), whole and half steps, arbitrary ones; 4.05 less a
    # hair, at 32 pixels a translation by 13.499999: PIL does not round it to 1/65536 pixel
    levels = [0, 4, 4.05 - 3e-7, 14, 30] + [*np.arange(0, 30, 2.5), *g.uniform(0, 30, 8)][::every]
    for level in levels if hi else [0]:
        strength = lo + level / 30 * (hi - lo)
        for v in (strength, -strength) if name in SIGNED else (strength,):
            centre = g.random(2)
            want = np.stack([pil(img, name, v, centre) for img in a])
            np.testing.assert_array_equal(apply_op(a, name, v, centre), want, f"{name} {v}")


def test_layers_equal_pil_one_after_the_other():
    """Every image gets its own n operations, in order, whatever its neighbours get."""
    x = batch()
    before = x.clone()
    op, v, centre = augment.draw_randaugment(x.shape, np.random.default_rng(2), 3, "random")
    ours = augment.randaugment(x, op, v, centre).permute(0, 2, 3, 1).numpy()
    for i, want in enumerate(x.permute(0, 2, 3, 1).numpy()):
        for layer in range(3):
            want = pil(want, augment.NAMES[op[layer, i]], v[layer, i], centre[:, layer, i])
        np.testing.assert_array_equal(ours[i], want)
    assert torch.equal(x, before)                          # the input is left alone


def test_draws_are_uniform_and_independent():
    n, N = 3, 20000
    op, v, centre = augment.draw_randaugment((N, 3, 32, 32), np.random.default_rng(4), n, 15)
    for layer in op:                                       # chi-square, 15 degrees of freedom
        assert ((np.bincount(layer, minlength=16) - N / 16) ** 2 / (N / 16)).sum() < 37.7
    for a, b in ((op[0], op[1]), (op[1], op[2]), (op[0], op[2]), (op[0, :-1], op[0, 1:])):
        pairs = np.bincount(a * 16 + b, minlength=256)     # 255 degrees of freedom, p = 0.001 too
        assert ((pairs - len(a) / 256) ** 2 / (len(a) / 256)).sum() < 330.5
    for k, name in enumerate(augment.NAMES):
        negative = (v[op == k] < 0).mean()
        assert abs(negative - (0.5 if name in SIGNED else 0)) < 4 * 0.5 / np.sqrt(n * N / 16)
    for c in centre:                                       # uniform in [0, 1): deviation 1/sqrt(12)
        assert c.min() >= 0 and c.max() < 1
        assert abs(c.mean() - 0.5) < 4 * 0.289 / np.sqrt(n * N) and abs(c.std() - 0.289) < 0.01


@pytest.mark.parametrize("m", [0, 4, 30, "random"])
@pytest.mark.parametrize("h, w, scale", [(32, 32, 1), (48, 64, 1.5)])
def test_strengths(m, h, w, scale):
    """Linear in the level; those in pixels grow with the image. A random level: of its own for
    every image and operation, uniform."""
    op, v, _ = augment.draw_randaugment((4000, 3, h, w), np.random.default_rng(5), 2, m)
    for k, name in enumerate(augment.NAMES):
        in_pixels = name in ("TranslateX", "TranslateY", "Box")
        lo, hi = (bound * (scale if in_pixels else 1) for bound in RANGES[name])
        got = np.abs(v[op == k])
        if m != "random":
            np.testing.assert_allclose(got, lo + m / 30 * (hi - lo), rtol=1e-12)
        elif hi > 0:
            level = (got - lo) / (hi - lo)                 # uniform in [0, 1)
            assert len(np.unique(got)) == len(got) and level.min() >= 0 and level.max() < 1
            assert abs(level.mean() - 0.5) < 4 * 0.289 / np.sqrt(len(got))
            assert abs(level.std() - 0.289) < 0.03


# ---------------------------------------------------------------------------------------------
# crop, flip, normalise, Cutout


def all_crops(a, pad):
    """Every view of (3, H, W) that a crop and a flip can give: {bytes: (top, left, flip)}."""
    _, h, w = a.shape
    big = np.zeros((3, h + 2 * pad, w + 2 * pad), a.dtype)
    big[:, pad:pad + h, pad:pad + w] = a
    views = {}
    for top in range(2 * pad + 1):
        for left in range(2 * pad + 1):
            crop = big[:, top:top + h, left:left + w]
            views[crop.tobytes()] = top, left, 0
            views[crop[:, :, ::-1].tobytes()] = top, left, 1
    return views


@pytest.mark.parametrize("h, w, pad", [(32, 32, 4), (40, 24, 3)])
def test_weak_is_a_crop_of_the_padded_image_maybe_mirrored(h, w, pad):
    x = batch(6, h, w)
    views, seen = [all_crops(a, pad) for a in x.numpy()], []
    rngs = np.random.default_rng(8), np.random.default_rng(8)
    for _ in range(80):
        for rng, no_flip in zip(rngs, (False, True), strict=True):
            y = augment.weak(x, rng, IDENTITY, no_flip).round().byte().contiguous().numpy()
            seen.append([views[i][y[i].tobytes()] for i in range(6)])  # KeyError: not such a view
    seen, unflipped = np.array(seen[::2]), np.array(seen[1::2])        # (80, 6, 3) each
    assert (unflipped == seen * (1, 1, 0)).all()           # the same crops, none of them mirrored
    top, left, flip = seen.reshape(-1, 3).T
    for offset in top, left:                               # all offsets occur, evenly
        expected = len(top) / (2 * pad + 1)
        counts = np.bincount(offset, minlength=2 * pad + 1)
        assert ((counts - expected) ** 2 / expected).sum() < 26.1  # chi-square, 8 dof, p = 0.001
    assert abs(flip.mean() - 0.5) < 4 * 0.5 / np.sqrt(len(top))
    for a, b in (top, left), (top, flip), (left, flip):
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 / np.sqrt(len(top))
    for draws in seen.transpose(2, 1, 0):                  # (6 images, 80 batches)
        between = np.corrcoef(draws)[np.triu_indices(6, 1)]
        assert np.abs(between).max() < 4.5 / np.sqrt(80)   # a draw per image, not per batch


def test_normalise_equals_torchvision():
    x = batch(5, 20, 28)
    want, got = normalize(x.float() / 255, MEAN, STD), augment.Normalise(MEAN, STD)(x)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert got.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("no_flip", [False, True])
def test_strong_is_randaugment_then_crop_flip_then_cutout(no_flip):
    x, rng = batch(32), np.random.default_rng(3)
    got = augment.strong(x, np.random.default_rng(3), POSITIVE, n=2, m=9, no_flip=no_flip)
    y = augment.randaugment(x, *augment.draw_randaugment(x.shape, rng, 2, 9))
    y = augment.weak(y, rng, POSITIVE, no_flip=no_flip)
    cut = (got == 0).all(1, keepdim=True).expand_as(got)
    assert torch.equal(got[~cut], y[~cut])                 # nothing but the square differs
    assert cut.flatten(1).any(1).all()


@pytest.mark.parametrize("h, w", [(32, 32), (24, 40)])
def test_cutout_is_one_square_with_uniform_centre(h, w):
    N, size = 1000, min(h, w) // 2
    white = torch.full((N, 3, h, w), 255, dtype=torch.uint8)
    y = augment.strong(white, np.random.default_rng(9), POSITIVE, n=0)
    assert ((y == 0).all(1) | (y != 0).all(1)).all()       # all three channels together
    cut = (y == 0).all(1).numpy()                          # (N, H, W)
    for axis, side in (1, h), (2, w):
        hit = cut.any(3 - axis)                            # (N, side) rows or columns that are cut
        first, count = hit.argmax(1), hit.sum(1)
        assert (np.diff(hit.astype(int), axis=1) != 0).sum(1).max() <= 2       # an interval
        inside = (first > 0) & (first + count < side)
        assert (count[inside] == size).all() and count.min() == size // 2 and count.max() == size
        # centre c covers c - size/2 .. c + size/2 - 1; recover it from the end that was not clipped
        centre = np.where(first > 0, first + size // 2, count - size // 2)
        counts = np.bincount(centre, minlength=side)
        # chi-square with side - 1 degrees of freedom: mean side - 1, variance twice that
        assert len(counts) == side
        assert ((counts - N / side) ** 2 / (N / side)).sum() < side + 4 * np.sqrt(2 * side)
    assert (cut == (cut.any(2)[:, :, None] & cut.any(1)[:, None, :])).all()    # a full rectangle
