"""
Augmentation: uint8 batch -> weak and strong views, drawn independently for each image.

    weak    random crop with zero padding, horizontal flip, normalise
    strong  RandAugment(n, m) on the uint8 image, then as weak, then Cutout

A data loader would do this image by image in PIL. Here the whole batch is processed at once, on its
device. Random numbers and all other per-image parameters come from NumPy on the host, so the draws
are the same on every device and the host never waits for a GPU. torch computes the pixels, and the
RandAugment operations match PIL's to the last grey level (tests/test_augment.py).

RandAugment is the variant of the DARP and L2AC code: sixteen operations, none of them ever
skipped. A low level is not a mild one: at level 4, Posterize keeps a single bit.
"""
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F

# Operation: strength at level 0 and at level 30, linear in between. The order matters: operations
# are drawn by their position, and those of a FAMILY must be neighbours.
OPS = {
    "AutoContrast": (0, 0), "Equalize": (0, 0), "Invert": (0, 0),
    "Posterize": (0, 4),                                  # bits kept, at least one
    "Solarize": (0, 256),                                 # invert from this grey level on
    "SolarizeAdd": (0, 110),                              # add this, then solarize at 128
    "Brightness": (0.1, 1.9),                             # factor, 1 is the original
    "Rotate": (0, 30),                                    # degrees
    "ShearX": (0, 0.3), "ShearY": (0, 0.3),               # pixels per pixel
    "TranslateX": (0, 100), "TranslateY": (0, 100),       # pixels, when the smaller side has 32
    "Box": (0, 40),                                       # side of a grey square, likewise
    "Contrast": (0.1, 1.9), "Color": (0.1, 1.9), "Sharpness": (0.1, 1.9),   # factors
}
NAMES = list(OPS)
LO, HI = np.array(list(OPS.values()), dtype=float).T      # (16,) each
# Operations of one family are computed together: FIXED from Invert to Brightness, MOVE from Rotate
# to TranslateY, and one family for each of the others.
AUTO, EQUAL, FIXED, MOVE, BOX, CONTRAST, COLOR, SHARP = range(8)
FAMILY = np.repeat(np.arange(8), (1, 1, 5, 5, 1, 1, 1, 1))             # (16,)
IN_PIXELS = np.isin(NAMES, ["TranslateX", "TranslateY", "Box"])
BOX_COLOUR = np.array([125, 123, 114], np.uint8).reshape(3, 1, 1)
LUMA = np.array([19595, 38470, 7471], np.float32).reshape(3, 1, 1) / 65536   # ITU-R 601, as in PIL


@lru_cache(4)
def constants(device):
    """Grey levels (256,), the last of them (1,), colour of a box (3, 1, 1), weights of the grey
    value (3, 1, 1); copied to the device once. AutoContrast takes double precision to truncate
    as PIL does."""
    levels = np.arange(256, dtype=float)
    return [torch.from_numpy(a).to(device) for a in (levels, levels[255:], BOX_COLOUR, LUMA)]


# ---- the two views ----------------------------------------------------------------------------
class Normalise:
    """uint8 (N, 3, H, W) -> (x / 255 - mean) / std, float32, channels_last."""
    def __init__(self, mean, std, device="cpu"):
        mean, std = (np.array(v, dtype=np.float32).reshape(3, 1, 1) for v in (mean, std))
        self.scale = torch.from_numpy(1 / (255 * std)).to(device)
        self.shift = torch.from_numpy(-mean / std).to(device)

    def __call__(self, x, keep=None):
        # large sets of images stay on the host
        x = (x.to(self.scale.device) * self.scale).add_(self.shift)
        if keep is not None:                              # (N, 1, H, W), 0 where Cutout cuts
            x.mul_(keep)
        # last, because broadcasting (3, 1, 1) over channels_last is ten times slower on a CPU
        return x.contiguous(memory_format=torch.channels_last)


def weak(x, rng, normalise, no_flip=False, cutout=False):
    """x: (N, 3, H, W) uint8, rng: numpy Generator -> (N, 3, H, W) float32, channels_last.
    no_flip: a mirror image would show something else (digits, letters, road signs).
    cutout is for the strong view."""
    N, _, h, w = x.shape
    i, j = np.arange(h), np.arange(w)

    # Zero-pad by an eighth of the smaller side (4 at 32), crop H x W, mirror with p = 0.5.
    pad = min(h, w) // 8
    top, left = rng.integers(2 * pad + 1, size=(2, N, 1))                        # (N, 1) each
    flip = (rng.random((N, 1)) < 0.5) & (not no_flip)
    row = (top + i) * (w + 2 * pad)                       # (N, H), start of the row once padded
    column = left + np.where(flip, j[::-1], j)            # (N, W)
    source = to_device(row[:, None, :, None], x) + to_device(column[:, None, None, :], x)
    source = source.flatten(2).expand(-1, 3, -1)          # (N, 3, H * W)
    x = F.pad(x, (pad, pad, pad, pad)).flatten(2).gather(2, source).view_as(x)
    if not cutout:
        return normalise(x)

    # Cut out a square of half the smaller side (16 at 32), centred anywhere in the image.
    half = min(h, w) // 4
    cy = rng.integers(h, size=(N, 1))
    cx = rng.integers(w, size=(N, 1))
    # (N, H) and (N, W), in float32 because bool is slower on a CPU
    row = ((cy - half <= i) & (i < cy + half)).astype(np.float32)
    column = ((cx - half <= j) & (j < cx + half)).astype(np.float32)
    cut = to_device(row[:, None, :, None], x) * to_device(column[:, None, None, :], x)
    return normalise(x, 1 - cut)                          # (N, 1, H, W)


def strong(x, rng, normalise, n=3, m=4, no_flip=False):
    """As weak, with n random operations of level m (0 to 30) before and Cutout after.
    m="random": a separate level from [0, 30) for every image and operation."""
    x = randaugment(x, *draw_randaugment(x.shape, rng, n, m))
    return weak(x, rng, normalise, no_flip, cutout=True)


def to_device(a, x):
    """NumPy array -> tensor on the device of x, or on the device x. A blocking copy to CUDA would
    wait for all queued work. Without blocking, `a` may still be freed at once: CUDA copies it to a
    buffer of its own before the call returns. Other devices do not guarantee that."""
    device = torch.device(getattr(x, "device", x))
    return torch.from_numpy(a).to(device, non_blocking=device.type == "cuda")


# ---- RandAugment ------------------------------------------------------------------------------
def draw_randaugment(shape, rng, n, m):
    """-> operations (n, N), signed strengths (n, N), box centres (2, n, N) as fractions of W, H."""
    N, _, h, w = shape
    op = rng.integers(len(OPS), size=(n, N))
    level = rng.uniform(0, 30, size=op.shape) if m == "random" else m
    v = LO[op] + level / 30 * (HI - LO)[op]
    v = np.where(IN_PIXELS[op], v * min(h, w) / 32, v)
    v = np.where((FAMILY[op] == MOVE) & (rng.random(op.shape) < 0.5), -v, v)
    # Box: in [0, 32) of 32 pixels; the released code's np.random.uniform(32) draws from (1, 32].
    return op, v, rng.random((2, *op.shape))


def randaugment(x, op, v, centre):
    """x (N, 3, H, W) uint8 and n layers of draws, as draw_randaugment returns them -> the new x.
    In each layer the images are sorted by operation: a family is then a slice whose bounds the host
    knows. What does not depend on the pixels is made for all layers at once."""
    if not len(op):
        return x
    order = np.argsort(op, axis=1, kind="stable")         # (n, N), place -> image
    place = np.argsort(order, axis=1)                     # (n, N), image -> place
    # from the input order to that of layer 0, from there to that of layer 1, ..., and back
    steps = [order[0], *(p[o] for p, o in zip(place[:-1], order[1:], strict=True)), place[-1]]
    *steps, last = to_device(np.stack(steps), x).unbind()                # (N,) each
    op, v, cx, cy = (np.take_along_axis(a, order, 1) for a in (op, v, *centre))
    sizes = (FAMILY[op][..., None] == np.arange(8)).sum(1)               # (n, 8)
    tables, source = fixed_tables(op, v, x), source_map(op, v, x)
    covered, factors = box_mask(op, v, cx, cy, x), enhance_factors(op, v, x)
    _, _, colour, _ = constants(x.device)
    for i, (auto, equal, fixed, move, box, contrast, color, sharp) in enumerate(sizes.tolist()):
        x = x.index_select(0, steps[i])                   # a copy: families are changed in place
        tabled, moved, boxed, toned, sharpened = x.split(
            [auto + equal + fixed, move, box, contrast + color, sharp])
        if len(tabled):
            look_up(tabled, auto, equal, tables[i])
        if move:                                          # read through a black frame, 1 pixel wide
            framed = F.pad(moved, (1, 1, 1, 1)).flatten(2)
            torch.gather(framed, 2, source[i], out=moved.view(move, 3, -1))
        if box:
            torch.where(covered[i], colour, boxed, out=boxed)
        if contrast + color + sharp:
            enhance(toned, sharpened, contrast, factors[i])
    return x.index_select(0, last)


def fixed_tables(op, v, x):
    """Invert to Brightness: (n, N) operations and strengths -> for each layer the new values of the
    256 grey levels, (k, 3, 256) uint8."""
    chosen = FAMILY[op] == FIXED                          # (n, N), K of them true
    i, op, v = np.arange(256), op[chosen], v[chosen, None]
    posterize, solarize_add, brightness = (
        op == NAMES.index(name) for name in ("Posterize", "SolarizeAdd", "Brightness"))
    table = np.where(i < v, i, 255 - i)                   # (K, 256) Solarize, and Invert with v = 0
    table[posterize] = i & (256 - (256 >> np.maximum(v[posterize].astype(int), 1)))
    added = np.minimum(i + v[solarize_add], 255).astype(int)
    table[solarize_add] = np.where(added < 128, added, 255 - added)
    table[brightness] = np.minimum(i.astype(np.float32) * v[brightness].astype(np.float32), 255)
    table = table.astype(np.uint8)[:, None].repeat(3, axis=1)
    return to_device(table, x).split(chosen.sum(1).tolist())


def look_up(x, auto, equal, tables):
    """x (k, 3, H, W) <- table[x], in place: the first `auto` images through AutoContrast's tables,
    the next `equal` through Equalize's, the others through the given ones."""
    pixels = x.view(len(x), 3, -1)                        # (k, 3, H * W)
    index = pixels.long()

    # AutoContrast maps darkest..brightest, in each channel, to 0..255.
    levels, white, _, _ = constants(x.device)
    stretch, flatten, _ = index.split([auto, equal, len(tables)])
    lo, hi = stretch.aminmax(dim=2, keepdim=True)         # (auto, 3, 1) each
    scale = white / (hi - lo)                             # 255 / ... would round a reciprocal
    stretched = levels * scale - lo * scale               # (auto, 3, 256)

    # Equalize maps a level to the number of darker pixels, in steps. Not with bincount, which waits
    # for the GPU. float32 counts exactly, and may divide by zero.
    count = torch.zeros(equal, 3, 256, device=x.device)
    count.scatter_add_(2, flatten, torch.ones_like(flatten, dtype=torch.float32))
    darker = count.cumsum(2).sub_(count)
    step = darker.gather(2, flatten.amax(2, keepdim=True)) // 255         # brightest level excluded
    equalized = (darker + step // 2).div_(step).floor_()  # (equal, 3, 256); // is slow on a CPU

    # Channels with nothing to stretch were divided by zero; like PIL, leave them as they are.
    made = torch.cat([stretched, equalized])
    made = torch.where(made < torch.inf, made, levels).clamp_(0, 255).byte()
    torch.gather(torch.cat([made, tables]), 2, index, out=pixels)


def source_map(op, v, x):
    """Rotate to TranslateY: (n, N) operations and strengths -> for each layer the pixels to copy,
    (k, 3, H * W) int64, as positions in the framed image (H + 2, W + 2). In PIL's fixed point:
    units of 1/65536 pixel, rounded where PIL rounds."""
    h, w = x.shape[2:]
    chosen = FAMILY[op] == MOVE                           # (n, N), K of them true; below (K,) each
    ops = np.flatnonzero(FAMILY == MOVE)[:, None]         # (5, 1)
    rotate, shear_x, shear_y, right, down = np.where(op[chosen] == ops, v[chosen], 0.0)
    angle = -np.radians(rotate % 360)
    cos, sin = np.round(np.cos(angle), 15), np.round(np.sin(angle), 15)
    # PIL translates in floating point; whole pixels give the same in fixed point
    right, down = np.floor(right + 0.5), np.floor(down + 0.5)
    # the output pixel (x, y) copies the source pixel (ax + by + c, dx + ey + f)
    a, b, c = cos, sin + shear_x, w / 2 - cos * w / 2 - sin * h / 2 + right
    d, e, f = shear_y - sin, cos, h / 2 + sin * w / 2 - cos * h / 2 + down
    # half a step in x and in y, because PIL maps the centre of the output pixel
    matrix = np.stack([a, b, c + a / 2 + b / 2, d, e, f + d / 2 + e / 2], axis=1)
    matrix = np.floor(matrix * 65536 + 0.5).astype(np.int64).reshape(-1, 2, 3)
    matrix[:, :, 2] += 65536                              # the frame shifts the image by a pixel
    along = matrix[:, :, :1] * np.arange(w) + matrix[:, :, 2:]                   # (K, 2, W)
    down = matrix[:, :, 1:2] * np.arange(h)                                      # (K, 2, H)
    x, y = ((to_device(along[:, :, None], x) + to_device(down[..., None], x)) >> 16).unbind(1)
    # (K, H, W) each; what lies beyond the frame is as black as the frame
    source = y.clamp_(0, h + 1) * (w + 2) + x.clamp_(0, w + 1)
    return source.view(-1, 1, h * w).expand(-1, 3, -1).split(chosen.sum(1).tolist())


def box_mask(op, v, cx, cy, x):
    """(n, N) operations, sides in pixels, centres as fractions of W and H -> for each layer the
    pixels that Box covers, (k, 1, H, W) bool."""
    h, w = x.shape[2:]
    chosen = FAMILY[op] == BOX                            # (n, N), K of them true
    side, cx, cy = (a[chosen, None] for a in (v, cx, cy))                        # (K, 1) each
    top = np.floor(np.maximum(cy * h - side / 2, 0))
    left = np.floor(np.maximum(cx * w - side / 2, 0))
    # <= at both ends: PIL's rectangle includes its last row and column
    row = (top <= np.arange(h)) & (np.arange(h) <= top + side)                   # (K, H)
    column = (left <= np.arange(w)) & (np.arange(w) <= left + side)              # (K, W)
    covered = to_device(row[:, None, :, None], x) & to_device(column[:, None, None, :], x)
    return covered.split(chosen.sum(1).tolist())


def enhance_factors(op, v, x):
    """Contrast to Sharpness: (n, N) operations and strengths -> for each layer those of Contrast
    and Color, and those of Sharpness, (k, 1, 1, 1) float32."""
    chosen, sharp = FAMILY[op] >= CONTRAST, FAMILY[op] == SHARP
    sizes = np.stack([(chosen & ~sharp).sum(1), sharp.sum(1)], axis=1)                 # (n, 2)
    factors = to_device(v[chosen].astype(np.float32)[:, None, None, None], x)
    factors = factors.split(sizes.ravel().tolist())
    return list(zip(factors[::2], factors[1::2], strict=True))


def enhance(toned, sharp, contrast, factors):
    """PIL's ImageEnhance, in place: x <- base + v * (x - base), clipped and truncated. The first
    `contrast` images of toned get Contrast, the rest Color; those of sharp get Sharpness."""
    # Color's base is the grey of each pixel, Contrast's the mean grey. LUMA is in multiples of
    # 2^-16, so float32 is exact.
    *_, luma = constants(toned.device)
    grey = (toned * luma).sum(1, keepdim=True).add_(0.5).floor_()                 # (k, 1, H, W)
    flat = grey[:contrast]
    flat.copy_(flat.mean((2, 3), keepdim=True).add_(0.5).floor_())
    # Sharpness's base is a 3 x 3 mean whose centre has weight 5. PIL leaves the edge pixels alone.
    inner = sharp[:, :, 1:-1, 1:-1]
    total = sharp.unfold(2, 3, 1).sum(-1, dtype=torch.float32).unfold(3, 3, 1).sum(-1)
    smooth = total.add_(inner, alpha=4).div_(13).round_()           # thirteenths have no ties
    for x, base, v in zip((toned, inner), (grey, smooth), factors, strict=True):
        x.copy_((x - base).mul_(v).add_(base).clamp_(0, 255))
