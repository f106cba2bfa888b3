"""
Augmentation: uint8 batch -> weak and strong views, one independent draw per image, on the device.

    weak    random crop with zero padding, horizontal flip, normalise
    strong  RandAugment(n, m) on the uint8 image, then crop, flip and normalise, then Cutout

A data loader would do this image by image in PIL. Here the batch is processed as a whole. The host
part, in NumPy, makes all random draws and all arithmetic on per-image parameters: the same views on
every device, and nothing waits for a GPU. The device part, in torch, works on pixels and equals PIL
to the last grey level in all sixteen operations (tests/test_augment.py).

RandAugment is the flavour of the DARP and L2AC code: sixteen operations, none of them ever
skipped. Mind that a low level is not a mild one: at level 4, Posterize keeps a single bit.
No labels, no datasets, no mixup in here.
"""
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F

# Operation: strength at level 0 and at level 30, linear in between. Families share their device
# code (see randaugment); members of a family must stay neighbours, FAMILY counts them.
OPS = {
    "AutoContrast": (0, 0), "Equalize": (0, 0),           # their tables depend on the image,
    "Invert": (0, 0),                                     # those of Invert to Brightness do not
    "Posterize": (0, 4),                                  # bits kept, at least one
    "Solarize": (0, 256),                                 # invert from this level on
    "SolarizeAdd": (0, 110),                              # add this, then solarize at 128
    "Brightness": (0.1, 1.9),                             # factor, 1 is the original; see blend
    "Rotate": (0, 30),                                    # degrees
    "ShearX": (0, 0.3), "ShearY": (0, 0.3),               # pixels per pixel
    "TranslateX": (0, 100), "TranslateY": (0, 100),       # pixels, when the smaller side has 32
    "Box": (0, 40),                                       # ditto; side of a grey square
    "Contrast": (0.1, 1.9), "Color": (0.1, 1.9), "Sharpness": (0.1, 1.9),   # factors
}
NAMES = list(OPS)
LO, HI = np.array(list(OPS.values()), dtype=float).T      # (16,) each
AUTO, EQUAL, TABLE, MOVE, BOX, TONE, SHARP = range(7)
FAMILY = np.repeat(np.arange(7), (1, 1, 5, 5, 1, 2, 1))   # (16,) operation -> family
IN_PIXELS = np.isin(NAMES, ["TranslateX", "TranslateY", "Box"])


# ---- the two views ----------------------------------------------------------------------------
class Normalise:
    """uint8 (N, 3, H, W) -> (x / 255 - mean) / std, float32, channels_last."""
    def __init__(self, mean, std, device="cpu"):
        mean, std = (np.array(v, dtype=np.float32).reshape(3, 1, 1) for v in (mean, std))
        self.scale = torch.from_numpy(1 / (255 * std)).to(device)
        self.shift = torch.from_numpy(-mean / std).to(device)

    def __call__(self, x, keep=None):
        x = (x * self.scale).add_(self.shift)
        if keep is not None:                              # (N, 1, H, W), 0 where Cutout cuts
            x.mul_(keep)
        # Last: to broadcast (3, 1, 1) over interleaved channels is ten times slower on a CPU.
        return x.contiguous(memory_format=torch.channels_last)


def weak(x, rng, normalise, shard=(0, 1)):
    """x: (N, 3, H, W) uint8, rng: numpy Generator -> (N, 3, H, W) float32, channels_last.
    shard=(rank, world): x is this rank's slice of a batch of N * world images. Every rank draws for
    the whole batch and keeps its rows, so a view does not depend on the number of processes."""
    return normalise(crop_flip(x, rng, shard))


def strong(x, rng, normalise, n=3, m=4, shard=(0, 1)):
    """As weak, with n random operations of level m (0 to 30) before and a Cutout after.
    m="random": a level from [0, 30) of its own for every image and operation."""
    x = randaugment(x, *draw(x.shape, rng, n, m, shard))
    x = crop_flip(x, rng, shard)
    return normalise(x, cutout(x, rng, shard))


def mine(a, shard):
    """This rank's part of an array of draws, whose last axis is the whole batch."""
    rank, world = shard
    return np.split(a, world, axis=-1)[rank]


def ship(a, device):
    """Host to device. On CUDA without blocking, which would wait for the GPU's queue to drain; `a`
    may be freed at once, CUDA copies ordinary memory aside. Other devices do not promise that."""
    return torch.from_numpy(a).to(device, non_blocking=device.type == "cuda")


def grid(row, column, device):
    """(K, H) and (K, W) -> (K, 1, H, 1) and (K, 1, 1, W), for the device to combine."""
    return ship(row[:, None, :, None], device), ship(column[:, None, None, :], device)


def crop_flip(x, rng, shard):
    """Zero-pad by an eighth of the smaller side (4 at 32), crop H x W, mirror with p = 0.5."""
    N, _, h, w = x.shape
    pad, total = min(h, w) // 8, N * shard[1]
    top, left = mine(rng.integers(2 * pad + 1, size=(2, total)), shard)[..., None]   # (N, 1) each
    flip = mine(rng.random(total) < 0.5, shard)[:, None]
    row = (top + np.arange(h)) * (w + 2 * pad)            # (N, H), start of a row once padded
    column = left + np.where(flip, np.arange(w)[::-1], np.arange(w))
    row, column = grid(row, column, x.device)
    source = (row + column).flatten(2).expand(-1, 3, -1)  # (N, 3, H * W)
    return F.pad(x, (pad, pad, pad, pad)).flatten(2).gather(2, source).view_as(x)


def between(start, stop, side):
    """(K,) first pixel and first pixel after -> (K, side) bool, cut off at the border."""
    return (np.arange(side) >= start[:, None]) & (np.arange(side) < stop[:, None])


def cutout(x, rng, shard):
    """(N, 1, H, W): 0 in a square of half the smaller side (16 at 32), centred anywhere, else 1."""
    N, _, h, w = x.shape
    half = min(h, w) // 4
    cy, cx = (mine(rng.integers(side, size=N * shard[1]), shard) for side in (h, w))
    hit = between(cy - half, cy + half, h), between(cx - half, cx + half, w)
    row, column = grid(*(a.astype(np.float32) for a in hit), x.device)
    return 1 - row * column                               # floats: faster than bool on a CPU


# ---- RandAugment, host part: what to do to which image; K is the number of draws at hand --------
def draw(shape, rng, n, m, shard):
    """-> operations (n, N), signed strengths (n, N), box centres (2, n, N) as fractions of W, H."""
    N, _, h, w = shape
    size = (n, N * shard[1])
    op = rng.integers(len(OPS), size=size)
    level = rng.uniform(0, 30, size=size) if m == "random" else m
    v = LO[op] + level / 30 * (HI - LO)[op]
    v = np.where(IN_PIXELS[op], v * min(h, w) / 32, v)
    v = np.where((FAMILY[op] == MOVE) & (rng.random(size) < 0.5), -v, v)
    centre = rng.random((2, *size))
    return mine(op, shard), mine(v, shard), mine(centre, shard)


def plan(op, v, centre, h, w, device):
    """Draws, as draw returns them -> n layers, and the rows that restore the order of the images.
    In every layer the images are sorted by operation. A family is then a slice whose ends the
    host knows, and nobody evaluates sixteen operations to keep one. What does not depend on
    pixels is made for all layers at once and split in the same way, k images of a family each."""
    order = np.argsort(op, axis=1, kind="stable")         # (n, N): place -> image
    back = np.argsort(order, axis=1)                      # (n, N): image -> place
    # from the given order to that of layer 0, from there to that of layer 1, ..., and back
    rows = [order[0], *(b[o] for b, o in zip(back, order[1:])), back[-1]]
    *rows, home = ship(np.stack(rows), device).unbind()   # (N,) each
    op, v, cx, cy = (np.take_along_axis(a, order, 1) for a in (op, v, *centre))
    family = FAMILY[op]                                   # (n, N), ascending in every layer
    sizes = (family[..., None] == np.arange(7)).sum(1)    # (n, 7)
    table, move, box, tone = (family == k for k in (TABLE, MOVE, BOX, TONE))
    split = lambda x, k: x.split(sizes[:, k].ravel().tolist())       # noqa: E731
    by_image = lambda a: ship(a[:, None, None, None], device)        # noqa: E731
    tables = ship(fixed_tables(op[table], v[table]), device).expand(-1, 3, -1)
    source = source_map(op[move], v[move], h, w, device)
    covered = box_mask(v[box], (cx[box], cy[box]), h, w, device)
    contrast = by_image(op[tone] == NAMES.index("Contrast"))         # (k, 1, 1, 1), else Color
    factor = split(by_image(v[family >= TONE].astype(np.float32)), slice(TONE, None))
    return zip(rows, sizes.tolist(), split(tables, TABLE), split(source, MOVE), split(covered, BOX),
               split(contrast, TONE), factor[::2], factor[1::2]), home


def fixed_tables(op, v):
    """(K,) operations and strengths -> (K, 1, 256) uint8: the new value of every grey level."""
    i = np.arange(256)
    solarize = lambda i, threshold: np.where(i < threshold, i, 255 - i)   # noqa: E731
    recipes = {                                           # v (k, 1) -> (k, 256)
        "Invert": lambda v: 255 - i,
        "Posterize": lambda v: i & (256 - (256 >> np.maximum(v.astype(int), 1))),
        "Solarize": lambda v: solarize(i, v),
        "SolarizeAdd": lambda v: solarize(np.minimum(i + v, 255).astype(int), 128),
        "Brightness": lambda v: np.minimum(i.astype(np.float32) * v.astype(np.float32), 255),
    }
    tables = np.empty((len(op), 1, 256), np.uint8)
    for name, recipe in recipes.items():
        mask = op == NAMES.index(name)
        tables[mask, 0] = recipe(v[mask, None])
    return tables


def affine(op, v, h, w):
    """(K,) -> (K, 2, 3) int32: output pixel (x, y) copies the source pixel matrix @ (x, y, 1),
    in PIL's fixed point: units of 1/65536 pixel, rounded where PIL rounds."""
    only = lambda name: np.where(op == NAMES.index(name), v, 0.0)    # noqa: E731
    angle = -np.radians(only("Rotate") % 360)
    cos, sin = np.round(np.cos(angle), 15), np.round(np.sin(angle), 15)
    # PIL translates in floating point; a whole number of pixels makes the two agree
    right, down = np.floor(only("TranslateX") + 0.5), np.floor(only("TranslateY") + 0.5)
    a, b, c = cos, sin + only("ShearX"), w / 2 - cos * w / 2 - sin * h / 2 + right
    d, e, f = only("ShearY") - sin, cos, h / 2 + sin * w / 2 - cos * h / 2 + down
    # half a step in x and in y: PIL looks where the centre of the output pixel comes from
    matrix = np.stack([a, b, c + a / 2 + b / 2, d, e, f + d / 2 + e / 2], axis=1)
    return np.floor(matrix * 65536 + 0.5).astype(np.int32).reshape(-1, 2, 3)


# ---- RandAugment, device part: images are (k, 3, H, W) uint8, k those of one family -------------
def randaugment(x, op, v, centre):
    """x (N, 3, H, W) uint8 and n layers of draws, as draw returns them -> (N, 3, H, W) uint8."""
    if not len(op):
        return x
    _, _, _, grey = constants(x.device)
    layers, home = plan(op, v, centre, *x.shape[2:], x.device)
    for rows, sizes, tables, source, covered, contrast, tone_factor, sharp_factor in layers:
        x = x.index_select(0, rows)                       # a copy: families are changed in place
        auto, equal, table, move, box, tone, sharp = x.split(sizes)
        if len(auto) + len(equal) + len(table):
            look_up(x, len(auto), len(equal), tables)
        if len(move):                                     # read through a black frame, 1 pixel wide
            framed = F.pad(move, (1, 1, 1, 1)).flatten(2)
            move.copy_(framed.gather(2, source).view_as(move))
        if len(box):
            box.copy_(torch.where(covered, grey, box))
        if len(tone):
            blend(tone, tone_base(tone, contrast), tone_factor)
        if len(sharp):
            sharpen(sharp, sharp_factor)
    return x.index_select(0, home)


def apply_op(x, name, strength, centre=(0.5, 0.5)):
    """One operation on all images, its strength signed and in its own unit. For the tests."""
    v = np.broadcast_to(np.asarray(strength, dtype=float), (1, len(x)))
    centre = np.broadcast_to(np.reshape(centre, (2, 1, -1)), (2, 1, len(x)))
    return randaugment(x, np.full((1, len(x)), NAMES.index(name)), v, centre)


@lru_cache
def constants(device):
    """-> grey levels (256,), the last of them (1,), weights of R, G, B in grey, box colour."""
    # AutoContrast takes double precision to truncate as PIL does. On mps, without, it may be 1 off.
    levels = torch.arange(256, dtype=torch.float32 if device.type == "mps" else torch.float64)
    luma = torch.tensor([19595, 38470, 7471]).view(3, 1, 1) / 65536  # ITU-R 601, as PIL rounds it
    grey = torch.tensor([125, 123, 114], dtype=torch.uint8).view(3, 1, 1)
    return tuple(t.to(device) for t in (levels, levels[255:], luma, grey))


def look_up(x, auto, equal, tables):
    """Pass the leading images of x through tables: `auto` images through those of AutoContrast,
    the next `equal` through those of Equalize, the next through the given ones."""
    levels, white, _, _ = constants(x.device)
    k = auto + equal + len(tables)
    pixels = x[:k].view(k, 3, -1)                         # (k, 3, H * W), written to at the end
    index = pixels.long()
    made = torch.cat([auto_tables(pixels[:auto], levels, white),
                      equal_tables(index[auto:auto + equal])])
    # Channels that have nothing to stretch divided by zero; like PIL, leave them as they are.
    made = torch.where(made < torch.inf, made, levels).clamp_(0, 255).byte()
    pixels.copy_(torch.cat([made, tables]).gather(2, index))


def auto_tables(pixels, levels, white):
    """AutoContrast maps darkest..brightest, of each channel, to 0..255. -> (k, 3, 256)"""
    lo, hi = pixels.amin(2, keepdim=True), pixels.amax(2, keepdim=True)
    scale = white / (hi - lo)                             # 255 / ... would round a reciprocal
    return levels * scale - lo * scale


def equal_tables(index):
    """Equalize maps a level to the number of darker pixels, in steps. -> (k, 3, 256)"""
    # Not with bincount, which waits for the GPU. float32 counts exactly, and may divide by zero.
    count = torch.zeros(*index.shape[:2], 256, device=index.device)
    count.scatter_add_(2, index, torch.ones_like(index, dtype=torch.float32))
    darker = count.cumsum(2).sub_(count)
    step = darker.gather(2, index.amax(2, keepdim=True)) // 255      # (k, 3, 1), brightest excluded
    return (darker + step // 2) // step


def source_map(op, v, h, w, device):
    """(K, 3, H * W) int64: the pixel of the framed image (H + 2, W + 2) that each pixel copies."""
    matrix = affine(op, v, h, w)
    matrix[:, :, 2] += 65536                              # the frame moves the image by a pixel
    along = matrix[:, :, :1] * np.arange(w, dtype=np.int32) + matrix[:, :, 2:]   # (K, 2, W)
    down = matrix[:, :, 1:2] * np.arange(h, dtype=np.int32)                      # (K, 2, H)
    x, y = ((ship(along[:, :, None], device) + ship(down[..., None], device)) >> 16).unbind(1)
    # (K, H, W) each; what lies beyond the frame is as black as the frame
    source = y.clamp_(0, h + 1) * (w + 2) + x.clamp_(0, w + 1)
    return source.view(-1, 1, h * w).long().expand(-1, 3, -1)


def box_mask(v, centre, h, w, device):
    """Sides (K,) in pixels, centres (2, K) -> (K, 1, H, W) bool."""
    x, y = (np.floor(np.maximum(c * side - v / 2, 0)) for c, side in zip(centre, (w, h)))
    stop = lambda start: np.floor(start + v) + 1          # noqa: E731, PIL paints the end as well
    row, column = grid(between(y, stop(y), h), between(x, stop(x), w), device)
    return row & column


def tone_base(x, contrast):
    """What Contrast and Color start from: the image's mean grey, each pixel's own grey."""
    _, _, luma, _ = constants(x.device)                   # multiples of 2^-16: float32 is exact
    grey = (x * luma).sum(1, keepdim=True).add_(0.5).floor_()   # (k, 1, H, W)
    mean = grey.mean((2, 3), keepdim=True).add_(0.5).floor_()
    return torch.where(contrast, mean, grey)


def sharpen(x, factor):
    """In place. Starts from a 3 x 3 mean whose centre has weight 5; PIL keeps the edge pixels."""
    inner = x[:, :, 1:-1, 1:-1]
    total = x.float().unfold(2, 3, 1).sum(-1).unfold(3, 3, 1).sum(-1).add_(inner, alpha=4)
    blend(inner, total.add_(6.5) // 13, factor)           # round; thirteenths have no ties


def blend(x, base, factor):
    """x <- base + factor * (x - base), clipped and truncated as in PIL's ImageEnhance."""
    x.copy_((x - base).mul_(factor).add_(base).clamp_(0, 255))
