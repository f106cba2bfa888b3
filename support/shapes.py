"""The synthetic dataset: tiny, for the tests."""
import numpy as np

SHAPES = "disk square cross bars triangle diamond stripes saltire frame ring".split()


def synthetic(rng, size=16, per_class=1000, per_class_test=100):
    """Ten shapes of random colour and place on a noisy ground. rng: data.rng"""
    def images(n, purpose):
        x = np.concatenate([draw_shape(s, n, size, rng(0, purpose, s)) for s in range(10)])
        return x, np.repeat(np.arange(10), n)
    (x, y), (x_test, y_test) = images(per_class, "train"), images(per_class_test, "test")
    return {"x_train": x, "y_train": y, "x_test": x_test, "y_test": y_test}


def draw_shape(shape, n, size, g):
    """n images (n, size, size, 3) uint8 of one shape."""
    v, u = np.mgrid[-1.2:1.2:size * 1j, -1.2:1.2:size * 1j][:, None] - g.uniform(
        -.3, .3, (2, n, 1, 1))                                            # (n, size, size) each
    r, box, a = np.hypot(u, v), np.maximum(abs(u), abs(v)), np.minimum(abs(u + v), abs(u - v))
    ink = [r < .8, box < .7, (np.minimum(abs(u), abs(v)) < .3) & (box < .8), abs(abs(v) - .5) < .2,
           (abs(u) * 1.5 < v + .8) & (v < .7), abs(u) + abs(v) < .9, np.sin(9 * v) > .3,
           (a < .4) & (r < .9), abs(box - .6) < .2, abs(r - .6) < .2][shape]
    ground, colour = g.uniform(.2, .5, (n, 1, 1, 3)), g.uniform(.2, .4, (n, 1, 1, 3))
    x = ground + ink[..., None] * colour + g.normal(0, .1, (n, size, size, 3))
    return (x.clip(0, 1) * 255).astype(np.uint8)
