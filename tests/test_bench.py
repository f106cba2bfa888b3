"""The benchmark: its arithmetic, and real training loops that take turns."""
import json

import numpy as np
import pytest
import torch

from scripts import bench


def test_the_ratio_is_the_median_within_rounds(monkeypatch, capsys):
    """A machine that becomes slower halfway does not change it, nor does one slow block."""
    none, own = np.array([1.0, 1, 1, 4, 4]), np.array([1.5, 9, 1.5, 6, 6])

    def take_turns(methods, argv, block, rounds):
        assert methods == ("none", "l2ac") and (block, rounds) == (2, 5)
        assert argv[-2:] == ["--model", "wrn-10-1"]      # other flags reach the training script
        return np.stack([none, own], axis=1)
    monkeypatch.setattr(bench, "take_turns", take_turns)
    bench.main("--methods l2ac --block 2 --rounds 5 --model wrn-10-1".split())
    assert json.loads(capsys.readouterr().out) == {"none 10": 0.5, "l2ac 10": 0.75}


@pytest.mark.slow
def test_all_kinds_of_methods_take_turns(tmp_path):
    """FixMatch, L2AC, the full unroll, and methods of baselines/ which begin late in a run."""
    g = np.random.default_rng(0)
    x, y = g.integers(0, 256, (300, 8, 8, 3), np.uint8), np.arange(300) % 10
    np.savez(tmp_path / "cifar10.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    argv = (f"--dataset cifar10 --data_dir {tmp_path} --n1 10 --m1 10 --gamma_l 2 --gamma_u 1 "
            f"--model wrn-10-1 --image_size 8 --batch_size 4 --threads 1 --device cpu "
            f"--out {tmp_path / 'run'} --overwrite").split()
    last = "daso:bfloat16" if torch.cpu._is_avx512_bf16_supported() else "daso"
    times = bench.take_turns(("none", "l2ac", "full_unroll", "darp", last), argv, 2, 3)
    assert times.shape == (3, 5) and (times > 0).all()
    assert np.median(times[:, 2] / times[:, 1]) > 1.3    # differentiated twice: about 2 here
