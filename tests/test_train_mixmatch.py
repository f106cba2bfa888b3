"""MixMatch + L2AC: three iterations by hand, exact resume."""
import pytest
from conftest import same, stopped
from conftest import train as train_tiny
from replay import MixMatch, compare

import train_mixmatch
from support import UserError


def train(out, flags=""):
    return train_tiny(out, flags, train_mixmatch.main)


@pytest.mark.parametrize("flags", [
    "--method l2ac", "--method none --pseudo_from adaptive --attractor_start prior",
    "--pseudo_from adaptive --omega_every 2 --seed 1 --no_flip",
    "--method none --temperature 0.25 --mix_alpha 0.3 --seed 2",
    pytest.param("--attractor vector --attractor_start prior --lambda_u 20",
                 marks=pytest.mark.slow),
    pytest.param("--attractor_input l2", marks=pytest.mark.slow)])
def test_three_iterations_by_hand(tmp_path, flags):
    compare(MixMatch, tmp_path, f"{flags} --eta 0.01", train_mixmatch.main)


def test_a_stopped_run_goes_on_but_not_for_longer(tmp_path):
    """Bit for bit as if it had not been stopped. The weight of the unlabeled loss grows over the
    whole run: a longer one would have been another from the second iteration on."""
    whole = train(tmp_path / "whole", "--iters 8")
    stopped(tmp_path / "parts", "--iters 8", 4, train_mixmatch.main)
    with pytest.raises(UserError, match="--iters is 9"):
        train(tmp_path / "parts", "--iters 9 --resume")
    assert same(whole, train(tmp_path / "parts", "--iters 8 --resume"))
