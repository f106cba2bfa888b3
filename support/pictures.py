"""Pictures on file: which files of a folder are pictures, and their way to uint8 arrays.

What a folder holds besides pictures is skipped and listed in one line. Files come from strangers:
only formats of SUFFIXES are ever opened, and a picture that cannot be read is named.
"""
import os
import sys
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from support import UserError, distributed

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"}
# The formats behind these suffixes and no other, whatever a file is called: PIL tells formats by
# their content, and for some (EPS) it starts another program.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
POOL = ThreadPoolExecutor(max(2, os.cpu_count() or 2), "pictures")      # PIL releases the GIL

# ---------------------------------------------------------------------------------------------
# folders


def as_paths(paths):
    array = np.empty(len(paths), object)
    array[:] = [str(p) for p in paths]
    return array


def is_hidden(name):
    return name.startswith(".") or name == "__MACOSX"


class Skipped(dict):
    """{why: [names]} of what a folder holds besides the pictures that are taken."""

    def add(self, why, *names):
        self.setdefault(why, []).extend(names)

    def __str__(self):
        def some(names):
            names = sorted({n if n.isprintable() else ascii(n) for n in names})
            return ", ".join(names[:3] + ["..."] * (len(names) > 3))
        return "; ".join(f"{why}: {len(names)} ({some(names)})" for why, names in self.items())

    def move_to(self, whole):
        for why, names in self.items():
            whole.add(why, *names)

    def tell(self, place):
        """On stderr, so that a table or JSON on stdout stays what it is."""
        if self and distributed.rank() == 0:
            print(f"{place}: skipped {self}", file=sys.stderr)


def list_pictures(path, skipped):
    """The pictures in a folder and its subfolders, sorted; headers read, so that a file that is no
    picture is found before anything else happens. What else is there goes to `skipped`."""
    path = Path(path)
    found, others = walk(path) if path.is_dir() else ([path], Skipped())
    if not found:
        raise UserError(f"{path} holds no picture ({' '.join(sorted(SUFFIXES))})"
                        f"{f', skipped {others}' if others else ''}; fill it or remove it")
    others.move_to(skipped)
    for _ in POOL.map(check_header, found):
        pass
    return found


def walk(top):
    """([pictures], Skipped). Links to files are followed, links to subfolders are not: they may
    lead round in a circle, or to pictures that are counted already."""
    found, skipped = [], Skipped()

    def unreadable(error):
        if Path(error.filename) == top:
            raise UserError(f"{top} cannot be read ({error.strerror}); change its permissions or "
                            f"remove it") from error
        skipped.add("unreadable folder", Path(error.filename).name)
    for folder, subfolders, files in os.walk(top, onerror=unreadable):
        for name in subfolders.copy():
            hidden = is_hidden(name)
            if hidden or os.path.islink(os.path.join(folder, name)):
                skipped.add("hidden" if hidden else "linked folder", name)
                subfolders.remove(name)                          # os.walk does not enter it then
        for path in (Path(folder, name) for name in files):
            if is_hidden(path.name):
                skipped.add("hidden", path.name)
            elif not os.path.exists(path):
                skipped.add("broken link", path.name)
            elif path.suffix.lower() not in SUFFIXES:
                skipped.add("of another format", path.suffix or path.name)
            elif not os.path.isfile(path):
                skipped.add("no regular file", path.name)        # reading a pipe would never end
            else:
                found.append(path)
    return sorted(found), skipped


def list_classes(folder, skipped):
    """{class name: its pictures}, sorted by name."""
    classes, others = {}, Skipped()
    for path in sorted(folder.iterdir()):
        if is_hidden(path.name):
            others.add("hidden", path.name)
        elif path.is_dir():
            classes[path.name] = list_pictures(path, skipped)
        else:
            others.add("beside the class folders", path.name)
    if not classes:
        raise UserError(f"--dataset: {folder} holds no class folders"
                        f"{f', skipped {others}' if others else ''}; make one for each class, with "
                        f"its pictures")
    others.move_to(skipped)
    return classes


# ---------------------------------------------------------------------------------------------
# single pictures


def broken(path, error):
    return UserError(f"{path} cannot be read as a picture ({type(error).__name__}); remove or "
                     f"replace it")


def check_header(path):
    try:
        if not os.path.isfile(path):
            raise FileNotFoundError(path)
        Image.open(path, formats=FORMATS).close()
    except Exception as error:                # PIL raises a dozen kinds
        raise broken(path, error) from error


def decode(path, size):
    """A picture of any size and mode -> (3, H, W) uint8.

    The whole picture is squeezed into the shape of the network's input, as arrays are: a centre
    crop would keep the proportions, but may cut off what the picture shows.
    """
    image = open_picture(path, size)
    if image.mode[0] in "IF":                 # 16 bits, or floats from 0 to 1
        image = to_eight_bits(image, path)
    try:
        image = to_rgb(image).resize(size[::-1], Image.Resampling.BILINEAR)  # antialiased; (W, H)
    except (OSError, ValueError, MemoryError) as error:
        raise broken(path, error) from error
    return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))


def open_picture(path, size):
    try:
        with Image.open(path, formats=FORMATS) as image:
            image.draft(None, size[::-1])     # a large JPEG is shrunk while it is being decoded
            return ImageOps.exif_transpose(image)
    except Exception as error:                # PIL raises a dozen kinds
        raise broken(path, error) from error


def to_eight_bits(image, path):
    """Scaled down; PIL would clip."""
    levels = np.asarray(image, np.float64) * (255 if image.mode == "F" else 1 / 257)
    if not (abs(levels - 127.5) <= 128).all():                   # also where one is NaN
        raise UserError(f"{path} has pixels that are not from 0 to "
                        f"{'1, as floats have to be' if image.mode == 'F' else '65535'}; scale "
                        f"it, or replace it")
    return Image.fromarray(levels.round().clip(0, 255).astype(np.uint8))


def to_rgb(image):
    """What is transparent becomes white."""
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


class Pictures:
    """Files in the guise of a uint8 tensor (N, 3, H, W), decoded by background threads.

    `expect(index)` begins, `[index]` collects; what was not expected is decoded then. At most
    `capacity` pictures are held, which bounds the memory: collected ones go first, then the oldest.
    """

    def __init__(self, paths, size):
        self.paths, self.size, self.device = paths, size or (32, 32), torch.device("cpu")
        self.shape = (len(paths), 3, *self.size)
        self.begun, self.capacity = OrderedDict(), 0     # index -> future; first: next to drop

    def __len__(self):
        return len(self.paths)

    def to(self, device):
        self.device = torch.device(device)
        return self

    def expect(self, index, batches=6):
        """index (B,). batches: how many of this size are held; 6: now and next of three streams."""
        self.capacity = max(self.capacity, batches * len(index))
        for i in index.tolist():
            if i not in self.begun:
                self.begun[i] = POOL.submit(decode, self.paths[i], self.size)
            self.begun.move_to_end(i)
        while len(self.begun) > self.capacity:
            self.begun.popitem(last=False)[1].cancel()

    def __getitem__(self, index):
        index = np.arange(len(self))[index]
        self.expect(index, batches=1)
        rows = torch.from_numpy(np.stack([self.begun[i].result() for i in index.tolist()]))
        for i in index.tolist():
            self.begun.move_to_end(i, last=False)
        if self.device.type == "cuda":
            rows = rows.pin_memory()          # so that the copy does not wait for the GPU's queue
        return rows.to(self.device, non_blocking=self.device.type == "cuda")

    def split(self, size):
        """As torch's, but one after the other, the next one being decoded meanwhile."""
        chunks = np.split(np.arange(len(self)), range(size, len(self), size))
        for now, following in zip(chunks, [*chunks[1:], chunks[-1]], strict=True):
            self.expect(now, batches=2)
            self.expect(following, batches=2)
            yield self[now]

    def in_memory(self):
        whole = torch.empty(self.shape, dtype=torch.uint8)
        for place, chunk in zip(whole.split(1000), self.split(1000), strict=True):
            place.copy_(chunk)
        return whole
