"""The benchmark runs and says what it promises. How long things take is no matter for a test; how
many operations an iteration dispatches does not depend on the machine."""
import json
from types import SimpleNamespace

import pytest

import common
from scripts import bench, bench_loader


@pytest.fixture
def no_trace(monkeypatch):
    monkeypatch.setattr(common, "Watch", bench.Stopwatch)       # as main() does; undone later


def test_json(no_trace, monkeypatch, capsys):
    monkeypatch.setattr(bench, "peak_memory", lambda args, method: 1.0)
    bench.main("--model wrn-10-1 --batch_size 4 --image_size 8 --rounds 1 --iters 1 --json".split())
    result = json.loads(capsys.readouterr().out)
    for key in "none l2ac full_unroll bare strong_per_s pil_per_s ops_none ops_l2ac".split():
        assert result[key] > 0


def test_rivals(no_trace, monkeypatch, capsys):
    monkeypatch.setattr(bench, "COUNTS", {10: (20, 40, 10), 100: (4, 8, 2)})
    bench.main("--rivals --model wrn-10-1 --batch_size 4 --image_size 8 --rounds 1 --iters 1 "
               "--json".split())
    result = json.loads(capsys.readouterr().out)
    methods = "none darp crest crest+ abc sar daso l2ac full_unroll".split()
    assert result.keys() == {f"{m} {K}" for m in methods for K in (10, 100)}
    assert all(seconds > 0 for seconds in result.values())


def test_operations_of_an_iteration_of_the_paper(no_trace):
    """Two strong views of RandAugment(3, .), WRN-28-2, optimizers and EMA included."""
    args = SimpleNamespace(model="wrn-28-2", batch_size=64, image_size=8)
    none, l2ac = (bench.count_operations(args, m) for m in ("none", "l2ac"))
    assert none < l2ac <= 1500


def test_the_loader_benchmark_runs(capsys):
    bench_loader.main("--counts 100 120 --side 8 --model wrn-10-1 --batch_size 4 --image_size 8 "
                      "--iters 3 --json".split())
    for result in json.loads(capsys.readouterr().out).values():
        assert result["seconds"] > 0 and 0 <= result["waiting"] < 1 and result["memory"] > 0
