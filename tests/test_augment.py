"""
support/augment.py against independent references: PIL for every RandAugment operation, pad / crop /
flip written out in NumPy for the crop, torchvision for the normalisation. Equality is exact where
the values are integers. More image sizes and larger samples: pytest -m slow tests/test_augment.py
"""
import inspect
import sys
from functools import partial

import numpy as np
import pytest
import torch
from conftest import TINY, train
from PIL import Image, ImageDraw, ImageEnhance, ImageOps
from torchvision.transforms.functional import normalize

import train_fixmatch
import train_mixmatch
from baselines import train as baselines
from scripts import figures, full_unroll
from support import augment

slow = pytest.mark.slow
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)
NORMALISE = augment.Normalise(MEAN, STD, "cpu")
IDENTITY = augment.Normalise((0, 0, 0), (1 / 255,) * 3, "cpu")     # keeps 0..255, as floats

# (lo, hi) of the ildoonet RandAugment, typed in a second time to check augment.OPS
RANGES = {
    "AutoContrast": (0, 0), "Equalize": (0, 0), "Invert": (0, 0), "Rotate": (0, 30),
    "Posterize": (0, 4), "Solarize": (0, 256), "SolarizeAdd": (0, 110), "Color": (0.1, 1.9),
    "Contrast": (0.1, 1.9), "Brightness": (0.1, 1.9), "Sharpness": (0.1, 1.9), "ShearX": (0, 0.3),
    "ShearY": (0, 0.3), "Box": (0, 40), "TranslateX": (0, 100), "TranslateY": (0, 100)}
SIGNED = {"Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY"}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """For hundreds of small calls, on a busy machine, two threads take up to 50 times longer."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


def batch(n=64, h=32, w=32, seed=0):
    return planar(np.random.default_rng(seed).integers(1, 256, (n, h, w, 3), dtype=np.uint8))


# -----------------------------------------------------------------------------------------------
# RandAugment

def test_operations_and_ranges():
    assert augment.OPS == RANGES and len(augment.NAMES) == 16


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("h, w, every", [
    (32, 32, 3), (41, 17, 3), *(pytest.param(*size, 1, marks=slow)
                                for size in ((32, 32), (24, 40), (41, 17)))])
def test_every_operation_equals_pil(name, h, w, every):
    g, (lo, hi), a = np.random.default_rng(1), RANGES[name], pictures(h, w)
    x, before = planar(a), planar(a)
    # extremes, the levels in common use (4, 14), whole and half steps, arbitrary ones
    levels = [0, 4, 14, 30] + [*np.arange(0, 30, 2.5), *g.uniform(0, 30, 8)][::every]
    for level in levels if hi else [0]:
        strength = lo + level / 30 * (hi - lo)
        for v in (strength, -strength) if name in SIGNED else (strength,):
            centre = g.random(2)
            ours = augment.apply_op(x, name, v, centre).permute(0, 2, 3, 1).numpy()
            want = np.stack([pil(img, name, v, centre) for img in a])
            np.testing.assert_array_equal(ours, want, f"{name} {v}")
    assert torch.equal(x, before)                          # the input is left alone


def test_box_reaches_every_border():
    a = pictures(32, 32)[:1]
    for centre in (0, 0), (0.999, 0.999), (0, 0.5), (0.5, 0.999):
        ours = augment.apply_op(planar(a), "Box", 13.3, centre).permute(0, 2, 3, 1).numpy()
        np.testing.assert_array_equal(ours[0], pil(a[0], "Box", 13.3, centre))


@pytest.mark.parametrize("name", ["TranslateX", "TranslateY"])
def test_translation_next_to_half_a_pixel(name):
    """PIL translates in double precision, not in steps of 1/65536 pixel as it rotates."""
    a = pictures(32, 32)[:2]
    for v in (13.5, 13.5 - 1e-6, 13.5 + 1e-6, -13.5, -13.5 - 1e-6, -13.5 + 1e-6):
        ours = augment.apply_op(planar(a), name, v).permute(0, 2, 3, 1).numpy()
        np.testing.assert_array_equal(ours, np.stack([pil(img, name, v, None) for img in a]))


@pytest.mark.parametrize("m", [4, 14, "random"])
def test_layers_equal_pil_one_after_the_other(m):
    """Every image gets its own n operations, in order, whatever its neighbours get."""
    x, N = batch(), 64
    op, v, centre = augment.draw_randaugment(x.shape, np.random.default_rng(2), 3, m, (0, 1))
    ours = augment.randaugment(x, op, v, centre).permute(0, 2, 3, 1).numpy()
    for i in range(N):
        want = x[i].permute(1, 2, 0).numpy().copy()
        for layer in range(3):
            want = pil(want, augment.NAMES[op[layer, i]], v[layer, i], centre[:, layer, i])
        np.testing.assert_array_equal(ours[i], want)


@pytest.mark.parametrize("no_flip", [False, True])
def test_strong_is_randaugment_then_crop_flip_then_cutout(no_flip):
    x, keep = batch(32), np.random.default_rng(3)
    got = augment.strong(x, np.random.default_rng(3), IDENTITY, n=2, m=9, no_flip=no_flip)
    y = augment.randaugment(x, *augment.draw_randaugment(x.shape, keep, 2, 9, (0, 1)))
    y = augment.weak(y, keep, IDENTITY, no_flip=no_flip)
    cut = (got == 0).all(1, keepdim=True).expand_as(got)
    assert torch.equal(got[~cut], y[~cut])                 # nothing but the square differs
    assert (y[cut] != 0).any()


def test_operations_are_uniform_and_independent():
    n, N = 3, 20000
    rng = np.random.default_rng(4)
    op, v, centre = augment.draw_randaugment((N, 3, 32, 32), rng, n, 15, (0, 1))
    expected = N / 16
    for layer in range(n):                                 # chi-square, 15 degrees of freedom
        counts = np.bincount(op[layer], minlength=16)
        assert ((counts - expected) ** 2 / expected).sum() < 37.7          # p = 0.001
    for a, b in ((op[0], op[1]), (op[1], op[2]), (op[0], op[2]), (op[0, :-1], op[0, 1:])):
        pairs = np.bincount(a * 16 + b, minlength=256)     # 255 degrees of freedom
        assert ((pairs - len(a) / 256) ** 2 / (len(a) / 256)).sum() < 330.5
    signed = np.isin(np.array(augment.NAMES)[op], list(SIGNED))
    assert (v[~signed] >= 0).all()
    for k in SIGNED:
        negative = (v[op == augment.NAMES.index(k)] < 0).mean()
        assert abs(negative - 0.5) < 4 * 0.5 / np.sqrt(n * N / 16)
    assert (centre >= 0).all() and (centre < 1).all()
    for c in centre:
        assert abs(c.mean() - 0.5) < 4 * 0.289 / np.sqrt(n * N)
        assert abs(c.std() - 0.289) < 0.01


@pytest.mark.parametrize("m", [0, 4, 30])
def test_a_fixed_level_gives_the_strength_of_the_range(m):
    rng = np.random.default_rng(5)
    op, v, _ = augment.draw_randaugment((3000, 3, 32, 32), rng, 2, m, (0, 1))
    for k, name in enumerate(augment.NAMES):
        lo, hi = RANGES[name]
        np.testing.assert_allclose(np.abs(v[op == k]), lo + m / 30 * (hi - lo), rtol=1e-12)


def test_a_random_level_varies_by_image_and_operation():
    rng = np.random.default_rng(6)
    op, v, _ = augment.draw_randaugment((8000, 3, 32, 32), rng, 2, "random", (0, 1))
    for k, name in enumerate(augment.NAMES):
        (lo, hi), got = RANGES[name], np.abs(v[op == k])
        if hi == 0:
            continue
        level = (got - lo) / (hi - lo)                     # uniform in [0, 1)
        assert len(np.unique(got)) == len(got)
        assert level.min() >= 0 and level.max() < 1
        assert abs(level.mean() - 0.5) < 4 * 0.289 / np.sqrt(len(got))
        assert abs(level.std() - 0.289) < 0.03


def test_pixel_ranges_grow_with_the_image():
    for h, w, scale in (96, 96, 3), (48, 64, 1.5), (32, 16, 0.5):
        rng = np.random.default_rng(7)
        op, v, _ = augment.draw_randaugment((4000, 3, h, w), rng, 1, 6, (0, 1))
        for name, at_32 in ("TranslateX", 20), ("TranslateY", 20), ("Box", 8):
            np.testing.assert_allclose(np.abs(v[op == augment.NAMES.index(name)]), at_32 * scale)
        np.testing.assert_allclose(np.abs(v[op == augment.NAMES.index("Rotate")]), 6)


# -----------------------------------------------------------------------------------------------
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


@pytest.mark.parametrize("h, w, pad", [(32, 32, 4), (40, 24, 3),
                                       pytest.param(16, 40, 2, marks=slow)])
def test_weak_is_a_crop_of_the_padded_image_maybe_mirrored(h, w, pad):
    x = batch(6, h, w)
    views, seen = [all_crops(a, pad) for a in x.numpy()], []
    rng = np.random.default_rng(8)
    for _ in range(80):
        y = augment.weak(x, rng, IDENTITY).round().byte().contiguous().numpy()
        seen += [views[i][y[i].tobytes()] for i in range(6)]       # KeyError: not such a view
    top, left, flip = np.array(seen).T
    for offset in top, left:                               # all offsets occur, evenly
        counts = np.bincount(offset, minlength=2 * pad + 1)
        expected = len(seen) / (2 * pad + 1)
        assert ((counts - expected) ** 2 / expected).sum() < 26.1  # chi-square, 8 dof, p = 0.001
    assert abs(flip.mean() - 0.5) < 4 * 0.5 / np.sqrt(len(seen))
    for a, b in (top, left), (top, flip), (left, flip):
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 / np.sqrt(len(seen))
    for draws in np.array(seen).reshape(80, 6, 3).transpose(2, 1, 0):  # (6 images, 80 batches)
        between = np.corrcoef(draws)[np.triu_indices(6, 1)]
        assert np.abs(between).max() < 4.5 / np.sqrt(80)   # a draw per image, not per batch


def test_without_flips_the_crops_and_all_later_draws_are_the_same():
    """Of a few hundred views none is mirrored. The generator moves on as it does with flips, so
    Cutout takes the same squares."""
    x, black = batch(100), augment.Normalise((-1, -1, -1), (1, 1, 1), "cpu")    # 0: cut, else >= 1
    views = [all_crops(a, 4) for a in x.numpy()]
    mirrored = 0
    for seed in range(4):
        draws = [np.random.default_rng(seed) for _ in range(2)]
        seen = [[views[i][a.tobytes()] for i, a in enumerate(augment.weak(
                    x, rng, IDENTITY, no_flip=no_flip).round().byte().contiguous().numpy())]
                for rng, no_flip in zip(draws, (False, True), strict=True)]
        mirrored += sum(flip for _, _, flip in seen[0])
        assert seen[1] == [(top, left, 0) for top, left, _ in seen[0]]
        assert draws[0].random() == draws[1].random()
        squares = [augment.strong(x, np.random.default_rng(seed), black, no_flip=no_flip) == 0
                   for no_flip in (False, True)]
        assert torch.equal(*squares) and squares[0].any()
    assert 150 < mirrored < 250


def test_normalise_equals_torchvision():
    x = batch(5, 20, 28)
    want = normalize(x.float() / 255, MEAN, STD)
    torch.testing.assert_close(NORMALISE(x), want, rtol=1e-5, atol=1e-6)


def squares(rng, N, h, w):
    """(N, H, W) bool: where strong cuts, seen on white images without other operations."""
    white = torch.full((N, 3, h, w), 255, dtype=torch.uint8)
    half_black = augment.Normalise((-1, -1, -1), (1, 1, 1), "cpu")     # padding is 1, white is 2
    y = augment.strong(white, rng, half_black, n=0)
    assert ((y == 0).all(1) | (y != 0).all(1)).all()       # all three channels together
    return (y == 0).all(1).numpy()


@pytest.mark.parametrize("N", [1000, pytest.param(4000, marks=slow)])
@pytest.mark.parametrize("h, w", [(32, 32), (24, 40)])
def test_cutout_is_one_square_with_uniform_centre(h, w, N):
    size = min(h, w) // 2
    cut = squares(np.random.default_rng(9), N, h, w)
    for axis, side in (1, h), (2, w):
        hit = cut.any(3 - axis)                            # (N, side) rows or columns that are cut
        first, count = hit.argmax(1), hit.sum(1)
        assert (np.diff(hit.astype(int), axis=1) != 0).sum(1).max() <= 2       # an interval
        inside = (first > 0) & (first + count < side)
        assert (count[inside] == size).all()
        assert count.min() == size // 2 and count.max() == size
        # centre c covers c - size/2 .. c + size/2 - 1; recover it from the end that was not clipped
        centre = np.where(first > 0, first + size // 2, count - size // 2)
        counts = np.bincount(centre, minlength=side)
        assert len(counts) == side
        expected = N / side
        assert ((counts - expected) ** 2 / expected).sum() < side + 4 * np.sqrt(2 * side)
    both = cut.any(2)[:, :, None] & cut.any(1)[:, None, :]
    assert (cut == both).all()                             # a full rectangle


# -----------------------------------------------------------------------------------------------
# what holds for all views

VIEWS = {"weak": augment.weak, "strong": augment.strong,
         "random level": lambda *a, **k: augment.strong(*a, m="random", **k),
         "one layer": lambda *a, **k: augment.strong(*a, n=1, m=10, **k),
         "not mirrored": partial(augment.strong, no_flip=True)}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("h, w", [(32, 32), (24, 40), pytest.param(96, 96, marks=slow)])
def test_output_format(view, h, w):
    x = batch(48, h, w)
    before = x.clone()
    y = view(x, np.random.default_rng(10), NORMALISE)
    assert y.shape == x.shape and y.dtype == torch.float32
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert torch.isfinite(y).all()
    lo, hi = (NORMALISE(torch.full((1, 3, 1, 1), c, dtype=torch.uint8)) for c in (0, 255))
    assert (y >= lo).all() and (y <= hi).all()
    assert torch.equal(x, before)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_the_seed_decides(view):
    x = batch()
    a, b, c = (view(x, np.random.default_rng(seed), NORMALISE) for seed in (11, 11, 12))
    assert torch.equal(a, b)
    assert (a != c).flatten(1).any(1).float().mean() > 0.9
    rng = np.random.default_rng(11)
    view(x, rng, NORMALISE)
    assert not torch.equal(a, view(x, rng, NORMALISE))     # the generator has moved on


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_images_are_drawn_for_independently(view):
    """The same image sixty-four times gives different views."""
    x = batch(1).expand(64, -1, -1, -1)
    y = view(x, np.random.default_rng(13), NORMALISE)
    # of the 162 weak views, 64 draws hit 53 different ones on average, give or take 3
    assert len({a.numpy().tobytes() for a in y.contiguous()}) > 40


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("size", [2, 4])
def test_shards_equal_the_whole_batch(view, size):
    x = batch(32)
    whole = view(x, np.random.default_rng(14), NORMALISE)
    for rank, part in enumerate(x.chunk(size)):
        got = view(part, np.random.default_rng(14), NORMALISE, shard=(rank, size))
        assert torch.equal(got, whole.chunk(size)[rank])


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_the_memory_layout_of_the_input_does_not_matter(view):
    x = batch()
    turned = batch(h=32, w=32).permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2)
    want = view(x, np.random.default_rng(15), NORMALISE)
    for same in x.contiguous(memory_format=torch.channels_last), turned:
        got = view(same, np.random.default_rng(15), NORMALISE)
        assert not same.is_contiguous() and torch.equal(got, want)
        assert got.is_contiguous(memory_format=torch.channels_last)


def test_a_single_image():
    for seed in range(40):                                 # all families but one are empty
        y = augment.strong(batch(1), np.random.default_rng(seed), NORMALISE, n=1)
        assert y.shape == (1, 3, 32, 32) and torch.isfinite(y).all()


# -----------------------------------------------------------------------------------------------
# --no_flip reaches every view

@pytest.fixture
def asked(monkeypatch):
    """The no_flip of every call of weak and strong so far, whoever has imported them."""
    seen = []
    for function in (augment.weak, augment.strong):
        def spy(*args, function=function, **kwargs):
            bound = inspect.signature(function).bind(*args, **kwargs)
            bound.apply_defaults()
            seen.append(bound.arguments["no_flip"])
            return function(*args, **kwargs)
        for module in list(sys.modules.values()):
            if getattr(module, function.__name__, None) is function:
                monkeypatch.setattr(module, function.__name__, spy)
    return seen


@pytest.mark.parametrize("main,flags,calls", [
    (train_fixmatch.main, "", 5), pytest.param(train_mixmatch.main, "", 4, marks=slow),
    pytest.param(full_unroll.main, "", 5, marks=slow),
    pytest.param(baselines.main, "--base supervised --method vanilla", 1, marks=slow),
    pytest.param(baselines.main, "--base pseudolabel", 2, marks=slow),
    pytest.param(baselines.main, "", 4, marks=slow),         # strong calls weak, of its own module
    (baselines.main, "--base mixmatch --method abc", 5),
    pytest.param(baselines.main, "--method darp --darp_warm 0 --darp_estimate --n1 20 --m1 20 "
                 "--gamma_l 2", 14, marks=slow)])
def test_no_flip_reaches_every_view(tmp_path, asked, main, flags, calls):
    for no_flip in ("", " --no_flip"):
        asked.clear()
        train(tmp_path / no_flip.strip(), f"--iters 1 {flags}{no_flip}", main)
        assert len(asked) >= calls and set(asked) == {bool(no_flip)}


@slow
def test_no_flip_reaches_the_figure_of_views(tmp_path, asked):
    train(tmp_path / "run", "--iters 1 --no_flip")
    asked.clear()
    assert figures.main([str(tmp_path / "run"), "--only", "views", "--out", str(tmp_path)]) == 0
    assert len(asked) == 5 and all(asked)


def test_digits_are_never_mirrored(tmp_path, asked):
    """Without the flag: the last --dataset of a command line counts."""
    argv = [*TINY.split(), *"--dataset digits --iters 1 --out".split(), str(tmp_path)]
    train_fixmatch.main(argv)
    assert len(asked) == 5 and all(asked)
