"""The synthetic dataset: tiny, for the tests."""
import numpy as np

# Head and tail are pairs of look-alikes (disk and ring, square and frame, ...): a biased
# classifier takes images of a rare class for its common look-alike.
SHAPES = "disk square cross bars triangle diamond stripes saltire frame ring".split()


def synthetic(rng, size=16, per_class=1000, per_class_test=100):
    """Ten shapes of random colour, place, size and tilt on a noisy ground. rng: data.rng"""
    def images(n, purpose):
        x = np.concatenate([draw_shape(s, n, size, rng(0, purpose, s)) for s in range(10)])
        return x, np.repeat(np.arange(10), n)
    (x, y), (x_test, y_test) = images(per_class, "train"), images(per_class_test, "test")
    return {"x_train": x, "y_train": y, "x_test": x_test, "y_test": y_test}


def draw_shape(shape, n, size, g):
    """n images (n, size, size, 3) uint8 of one shape."""
    def uniform(lo, hi, *dims):
        return g.uniform(lo, hi, (n, *(dims or (1, 1))))
    v, u = np.mgrid[-1:1:size * 1j, -1:1:size * 1j]                       # rows, columns
    u, v = u - uniform(-.35, .35), v - uniform(-.35, .35)                 # place   (n, size, size)
    tilt, scale = uniform(-.4, .4), uniform(.5, .75)                     # radians; half-width
    u, v = ((u * np.cos(tilt) + v * np.sin(tilt)) / scale,
            (v * np.cos(tilt) - u * np.sin(tilt)) / scale)
    r, box, a, b = np.hypot(u, v), np.maximum(abs(u), abs(v)), abs(u + v) / 1.4, abs(u - v) / 1.4
    # How far outside the shape a point is, in units of its half-width; negative inside.
    outside = [r - 1, box - .9, np.maximum(np.minimum(abs(u), abs(v)) - .3, box - 1),
               np.maximum(abs(abs(v) - .6) - .25, box - .95),
               np.maximum(abs(u) * 1.7 - v - .8, v - .8), abs(u) + abs(v) - 1.15,
               np.maximum(abs(v - .7 * np.round(v / .7)) - .18, box - .95),
               np.maximum(np.minimum(a, b) - .3, r - 1.2), abs(box - .65) - .3,
               abs(r - .68) - .34][shape]
    ink = np.clip(.5 - outside * scale * size / 2, 0, 1)[..., None]       # soft edge of one pixel
    ground, colour = uniform(.15, .85, 1, 1, 3), uniform(-.4, .4, 1, 1, 3)
    colour += .2 * np.sign(colour.sum(-1, keepdims=True))                # some contrast for all
    x = ground + ink * colour + g.normal(0, .14, (n, size, size, 3))
    return (x.clip(0, 1) * 255).astype(np.uint8)
