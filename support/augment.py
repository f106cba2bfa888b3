"""Augmentation: uint8 batch -> weak and strong views, drawn independently for each image.

    weak    random crop with zero padding, horizontal flip, normalise
    strong  RandAugment(n, m) on the uint8 image, then as weak, then Cutout

The whole batch is processed at once, on its device. Random numbers and all other per-image
parameters come from NumPy on the host, so the draws are the same on every device and the host never
waits for a GPU. The operations match PIL's to the last grey level (tests/test_augment.py).

RandAugment is the variant of the DARP and L2AC code: sixteen operations, none of them ever
skipped. A low level is not a mild one: at level 4, Posterize keeps a single bit.
"""
import numpy as np
import torch
import torch.nn.functional as F
from torchvision.transforms.v2.functional import equalize

# Operation: strength at level 0 and at level 30, linear in between. The order matters: operations
# are drawn by their position, and those of a FAMILY are neighbours.
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
FAMILY = np.repeat(np.arange(6), (1, 1, 5, 5, 1, 3))      # (16,) which function of randaugment
SIGNED = np.isin(NAMES, ["Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY"])
IN_PIXELS = np.isin(NAMES, ["TranslateX", "TranslateY", "Box"])
BOX_COLOUR = np.array([125, 123, 114], np.uint8).reshape(3, 1, 1)
LUMA = np.array([19595, 38470, 7471], np.float32).reshape(3, 1, 1) / 65536   # ITU-R 601, as in PIL


class Normalise:
    """uint8 (N, 3, H, W) -> (x / 255 - mean) / std, float32, channels_last."""
    def __init__(self, mean, std, device="cpu"):
        mean, std = (np.array(v, dtype=np.float32).reshape(3, 1, 1) for v in (mean, std))
        self.scale = torch.from_numpy(1 / (255 * std)).to(device)
        self.shift = torch.from_numpy(-mean / std).to(device)

    def __call__(self, x, keep=None):
        x = (x.to(self.scale.device) * self.scale).add_(self.shift)   # large sets stay on the host
        if keep is not None:                              # (N, 1, H, W), 0 where Cutout cuts
            x.mul_(keep)
        # last, because broadcasting (3, 1, 1) over channels_last is ten times slower on a CPU
        return x.contiguous(memory_format=torch.channels_last)


def weak(x, rng, normalise, no_flip=False, cutout=False):
    """x: (N, 3, H, W) uint8, rng: numpy Generator -> (N, 3, H, W) float32, channels_last. no_flip:
    a mirror image would show something else (digits, road signs). cutout: for the strong view."""
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
    wait for all queued work; other devices do not promise to copy `a` before the call returns."""
    device = torch.device(getattr(x, "device", x))
    return torch.from_numpy(a).to(device, non_blocking=device.type == "cuda")


def draw_randaugment(shape, rng, n, m):
    """-> operations (n, N), signed strengths (n, N), box centres (2, n, N) as fractions of W, H."""
    N, _, h, w = shape
    op = rng.integers(len(OPS), size=(n, N))
    level = rng.uniform(0, 30, size=op.shape) if m == "random" else m
    v = LO[op] + level / 30 * (HI - LO)[op]
    v = np.where(IN_PIXELS[op], v * min(h, w) / 32, v)
    v = np.where(SIGNED[op] & (rng.random(op.shape) < 0.5), -v, v)
    # Box: in [0, 32) of 32 pixels; the released code's np.random.uniform(32) draws from (1, 32].
    return op, v, rng.random((2, *op.shape))


def randaugment(x, op, v, centre):
    """x (N, 3, H, W) uint8 and n layers of draws, as draw_randaugment returns them -> the new x.
    Each of the functions gets the k images of its family, and their draws, (k,) each."""
    functions = auto_contrast, lambda x, *_: equalize(x), fixed, move, box, enhance
    for family, *draws in zip(FAMILY[op], op, v, *centre, strict=True):          # (N,) each
        rows = [np.flatnonzero(family == k) for k in range(len(functions))]
        new = [function(x.index_select(0, to_device(r, x)), *(a[r] for a in draws))
               for function, r in zip(functions, rows, strict=True) if len(r)]
        back = np.argsort(np.concatenate(rows))           # to the order of the input
        x = torch.cat(new).index_select(0, to_device(back, x))
    return x


def auto_contrast(x, *_):
    """Map darkest..brightest, in each channel, to 0..255."""
    lo, hi = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)          # (k, 3, 1, 1) each
    # double precision, to truncate as PIL does; 255 / ... would round a reciprocal
    scale = torch.full_like(lo, 255, dtype=torch.float64) / (hi - lo)
    # Channels with nothing to stretch were divided by zero; like PIL, leave them as they are.
    return torch.where(hi > lo, (x * scale - lo * scale).byte(), x)


def fixed(x, op, v, *_):
    """Invert to Brightness: look up the new value of each grey level."""
    i, v = np.arange(256), v[:, None]
    posterize, solarize_add, brightness = (
        op == NAMES.index(name) for name in ("Posterize", "SolarizeAdd", "Brightness"))
    table = np.where(i < v, i, 255 - i)                   # (k, 256) Solarize, and Invert with v = 0
    table[posterize] = i & (256 - (256 >> np.maximum(v[posterize].astype(int), 1)))
    added = np.minimum(i + v[solarize_add], 255).astype(int)
    table[solarize_add] = np.where(added < 128, added, 255 - added)
    table[brightness] = np.minimum(i.astype(np.float32) * v[brightness].astype(np.float32), 255)
    return to_device(table.astype(np.uint8), x).gather(1, x.flatten(1).long()).view_as(x)


def move(x, op, v, *_):
    """Rotate to TranslateY, in PIL's fixed point: units of 1/65536 pixel, rounded as PIL does."""
    h, w = x.shape[2:]
    ops = np.flatnonzero(SIGNED)[:, None]                 # (5, 1)
    rotate, shear_x, shear_y, right, down = np.where(op == ops, v, 0.0)          # (k,) each
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
    along = matrix[:, :, :1] * np.arange(w) + matrix[:, :, 2:]                   # (k, 2, W)
    down = matrix[:, :, 1:2] * np.arange(h)                                      # (k, 2, H)
    i, j = ((to_device(along[:, :, None], x) + to_device(down[..., None], x)) >> 16).chunk(2, 1)
    # read through a black frame, 1 pixel wide; what lies beyond it is as black
    source = (j.clamp_(0, h + 1) * (w + 2) + i.clamp_(0, w + 1)).flatten(2)      # (k, 1, H * W)
    return F.pad(x, (1, 1, 1, 1)).flatten(2).gather(2, source.expand(-1, 3, -1)).view_as(x)


def box(x, op, v, cx, cy):
    """Cover a square of side v, in pixels, whose centre is given as fractions of W and H."""
    h, w = x.shape[2:]
    side, cx, cy = (a[:, None] for a in (v, cx, cy))                             # (k, 1) each
    top = np.floor(np.maximum(cy * h - side / 2, 0))
    left = np.floor(np.maximum(cx * w - side / 2, 0))
    # <= at both ends: PIL's rectangle includes its last row and column
    row = (top <= np.arange(h)) & (np.arange(h) <= top + side)                   # (k, H)
    column = (left <= np.arange(w)) & (np.arange(w) <= left + side)              # (k, W)
    covered = to_device(row[:, None, :, None], x) & to_device(column[:, None, None, :], x)
    return torch.where(covered, to_device(BOX_COLOUR, x), x)


def enhance(x, op, v, *_):
    """PIL's ImageEnhance, Contrast to Sharpness: base + v * (x - base), clipped and truncated."""
    draws = op == NAMES.index("Contrast"), op == NAMES.index("Color"), v.astype(np.float32)
    contrast, color, v = (to_device(a, x).view(-1, 1, 1, 1) for a in draws)
    # Color's base is the grey of each pixel, Contrast's the mean grey. LUMA is in multiples of
    # 2^-16, so float32 is exact.
    grey = (x * to_device(LUMA, x)).sum(1, keepdim=True).add_(0.5).floor_()      # (k, 1, H, W)
    mean = grey.mean((2, 3), keepdim=True).add_(0.5).floor_()                    # (k, 1, 1, 1)
    # Sharpness's base is a 3 x 3 mean whose centre has weight 5. PIL leaves the edge pixels alone.
    smooth = x.float()
    inner = smooth[:, :, 1:-1, 1:-1]
    total = smooth[:, :, :-2] + smooth[:, :, 1:-1] + smooth[:, :, 2:]
    total = total[..., :-2] + total[..., 1:-1] + total[..., 2:]
    inner.copy_(total.add_(inner, alpha=4).div_(13).round_())       # thirteenths have no ties
    base = torch.where(contrast, mean, torch.where(color, grey, smooth))         # (k, 3, H, W)
    return (x - base).mul_(v).add_(base).clamp_(0, 255).byte()
