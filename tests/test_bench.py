"""The benchmarks run and print what they promise.

No test asserts a time. The number of operations of an iteration does not depend on the machine.
"""
import json
from functools import partial
from types import SimpleNamespace

import pytest
from conftest import exit_of

from scripts import bench, bench_loader, timing

QUICK = "--model wrn-10-1 --batch_size 4 --image_size 8 --iters 2"
METHODS = ("none darp crest crest+ abc sar daso la_all la la_post_hoc darp_crt cdmad flexda adello "
           "acr l2ac full_unroll").split()


@pytest.mark.slow
def test_costs(capsys):
    bench.main([*QUICK.split(), "--json"])
    result = json.loads(capsys.readouterr().out)
    names = ("none", "l2ac", "full_unroll")
    pairs = ("l2ac_none", "l2ac_bare", "full_unroll_none")
    assert result.keys() == {*names, "bare", "strong_per_s", "pil_per_s"} | {
        f"{kind}_{name}" for kind in ("ops", "memory") for name in names} | {
        f"{kind}_{pair}" for kind in ("ratio", "spread") for pair in pairs}
    assert all(value > 0 for key, value in result.items() if not key.startswith("spread"))
    assert result["ops_none"] < result["ops_l2ac"] < result["ops_full_unroll"]


def test_cost_table():
    seconds = dict(none=2.0, l2ac=2.2, full_unroll=8.0, bare=2.1, strong_per_s=90, pil_per_s=30)
    more = {f"{kind}_{m}": n for kind in ("ops", "memory") for m, n in
            (("none", 700), ("l2ac", 1100), ("full_unroll", 7000))}
    more |= dict(ratio_l2ac_none=1.1, spread_l2ac_none=0.021, ratio_l2ac_bare=1.05,
                 spread_l2ac_bare=0.001, ratio_full_unroll_none=4.0, spread_full_unroll_none=0.1)
    args = SimpleNamespace(model="wrn-28-2", batch_size=64, image_size=32, iters=2, device="cpu")
    rows = [line.split() for line in bench.cost_table(args, seconds | more).splitlines()]
    assert ["l2ac", "2.2000", "1100", "1100"] in rows and ["bare", "2.1000"] in rows
    assert ["l2ac", "/", "none", "1.100,", "spread", "2.1%"] in rows
    assert ["full_unroll", "/", "none", "4.000,", "spread", "10.0%"] in rows


def test_candidates_take_turns_and_the_first_iteration_is_left_out():
    seen = []
    runs = {name: timing.repeated(partial(seen.append, name), n)
            for name, n in zip("abc", (3, 1, 2), strict=True)}
    times = timing.take_turns(runs, "cpu")
    assert "".join(seen) == "abc" "ac" "a"
    assert {name: len(t) for name, t in times.items()} == {"a": 2, "b": 0, "c": 1}
    with pytest.raises(ZeroDivisionError):
        timing.take_turns({"a": timing.repeated(lambda: 1 / 0, 2)}, "cpu")


def test_a_ratio_is_taken_within_a_round():
    """A machine that becomes twice as slow halfway does not change it."""
    assert timing.by_round([2, 4, 4], [1, 2, 2, 9]) == [2, 2, 2]


def test_spread():
    assert timing.spread([10, 11, 12, 9, 30]) == pytest.approx(1 / 11)      # distances 1 0 1 2 19


@pytest.mark.slow
def test_rivals(monkeypatch, capsys):
    monkeypatch.setattr(bench, "COUNTS", {10: (20, 40, 10), 100: (4, 8, 2)})
    bench.main([*QUICK.split(), "--rivals", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result.keys() == {f"{m} {K}" for m in METHODS for K in (10, 100)}
    assert all(seconds > 0 for seconds in result.values())


def test_rivals_table():
    seconds = {(m, K): 2.0 for m in METHODS for K in (10, 100)} | {("abc", 10): 3.0}
    args = SimpleNamespace(model="wrn-28-2", batch_size=64, image_size=32, iters=2, device="cpu")
    _, _, *lines = bench.rivals_table(args, seconds).splitlines()
    rows = {name: numbers for name, *numbers in map(str.split, lines)}
    assert list(rows) == METHODS and rows["abc"] == ["3.000", "1.50", "2.000", "1.00"]


@pytest.mark.slow
def test_operations_of_an_iteration_of_the_paper():
    """Two strong views of RandAugment(3, 4), WRN-28-2, optimizers and EMA included."""
    args = SimpleNamespace(model="wrn-28-2", batch_size=64, image_size=8)
    none, l2ac = (bench.count_operations(args, m) for m in ("none", "l2ac"))
    assert none <= 650 and none < l2ac <= 1000


@pytest.mark.slow
def test_the_loader_benchmark(capsys):
    bench_loader.main("--counts 100 120 --side 8 --model wrn-10-1 --batch_size 4 --image_size 8 "
                      "--iters 3 --json".split())
    results = json.loads(capsys.readouterr().out)
    assert list(results) == ["100", "120"]
    for result in results.values():
        assert result["seconds"] > 0 and 0 <= result["waiting"] < 1 and result["memory"] > 0
    assert exit_of(bench_loader.main, "--counts 100 --side 8 --model resnet".split(), capsys) == (
        2, "")                                       # the run that it started has said why
