"""Metrics against scikit-learn and numbers by hand; tables of finished runs."""
import csv
import json
import math
import resource
import shutil
import statistics
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import sklearn.metrics
import torch
from conftest import exit_of, files, stopped, train
from torch.nn.functional import one_hot

import data
import evaluate
from support import UserError, report


def first_pixel(x):
    """A stand-in for a network: the class is written in the first pixel."""
    return one_hot(x[:, 0, 0, 0].long(), 5).float()


@pytest.mark.parametrize("seed", range(5))
def test_against_scikit_learn(seed):
    """1234 images in batches of 250, the last one smaller."""
    g = np.random.default_rng(seed)
    y, predicted = g.integers(0, 5, 1234), g.integers(0, 5, 1234)
    predicted = np.where(g.random(1234) < 0.6, y, predicted)
    images = torch.from_numpy(predicted).view(-1, 1, 1, 1).expand(-1, 3, 2, 2)
    scores = evaluate.scores(first_pixel, images, normalise=lambda x: x)
    matrix = evaluate.confusion_matrix(torch.from_numpy(y), scores.argmax(1), 5)
    assert np.array_equal(matrix.numpy(), sklearn.metrics.confusion_matrix(y, predicted))
    m = evaluate.metrics(matrix)
    recall = sklearn.metrics.recall_score(y, predicted, average=None)
    assert m["recall"] == pytest.approx(100 * recall)
    assert m["bacc"] == pytest.approx(100 * sklearn.metrics.balanced_accuracy_score(y, predicted))
    assert m["acc"] == pytest.approx(100 * sklearn.metrics.accuracy_score(y, predicted))
    assert m["gm"] == pytest.approx(100 * math.prod(recall) ** (1 / 5))

    dataset = SimpleNamespace(test_images=images, test_labels=torch.from_numpy(y), num_classes=5)
    columns = evaluate.on_test_set(first_pixel, dataset, lambda x: x)        # of log.csv
    assert columns == {key: m[key] for key in ("bacc", "gm", "acc")} | {
        f"recall_{k}": value for k, value in enumerate(m["recall"])}


def test_bias_columns_against_a_loop():
    """What an attractor adds to a logit, less its mean over all logits, every class alike."""
    g = torch.Generator().manual_seed(0)
    W, y = torch.randn(5, 5, generator=g), torch.randint(5, (99,), generator=g)
    images = torch.randint(5, (99, 1, 1, 1), generator=g).expand(-1, 3, 2, 2)
    dataset = SimpleNamespace(test_images=images, test_labels=y, num_classes=5)
    columns = evaluate.on_test_set(first_pixel, dataset, lambda x: x, lambda logits: logits @ W.T)
    added = [[W[:, x] - W[:, x].mean() for x in images[y == k, 0, 0, 0]] for k in range(5)]
    mean, square = np.zeros(5), 0                            # above: the logits are 0 and 1
    for rows in added:
        mean += np.mean(rows, axis=0) / 5
        square += np.mean([(row ** 2).sum() for row in rows]) / 5
    assert [columns[f"bias_{k}"] for k in range(5)] == pytest.approx(mean, abs=1e-6)
    assert columns["bias_varies"] == pytest.approx(1 - (mean ** 2).sum() / square, abs=1e-5)


def test_bias_columns_of_the_specification():
    """Three images of three classes; the numbers are those of methods_after.md, section 5."""
    added = torch.tensor([[1., 0, -1], [2, 0, -2], [1, 1, -2]])
    columns = evaluate.describe_bias(added, torch.arange(3))
    assert list(columns.values()) == pytest.approx([1.3333, 0.3333, -1.6667, 0.1250], abs=5e-5)


def confusion_with_recalls(recalls, n=1000):
    """(K, K) counts with these recalls; misses are predicted as the next class."""
    matrix = torch.diag(torch.tensor([r * n for r in recalls])).round()
    for k in range(len(recalls)):
        matrix[k, (k + 1) % len(recalls)] = n - matrix[k, k]
    return matrix


def test_gm_of_a_class_that_is_never_hit():
    m = evaluate.metrics(confusion_with_recalls([.9, .8, .7, .6, .5, .4, .3, .2, .1, 0]))
    assert m["gm"] == pytest.approx(22.697, abs=5e-4) and m["bacc"] == pytest.approx(45)


def test_the_floor_depends_on_the_number_of_classes():
    m = evaluate.metrics(confusion_with_recalls([1.0, 0.0]))
    assert m["gm"] == pytest.approx(100 * math.sqrt(1 / 200))


def test_a_class_without_test_images_is_left_out():
    m = evaluate.metrics(torch.tensor([[8, 2, 0], [5, 5, 0], [0, 0, 0]]))
    assert m["bacc"] == pytest.approx(65) and m["gm"] == pytest.approx(100 * math.sqrt(.4))
    assert math.isnan(m["recall"][2])


def test_mean_of_last_20_is_a_mean_of_gms():
    rows = [{"iter": i, "bacc": i, "gm": i * i, "acc": 1.0, "recall_0": i, "recall_1": 2}
            for i in range(50)]
    m = evaluate.mean_of_last(rows)
    assert m["bacc"] == pytest.approx(np.mean(range(30, 50)))
    assert m["gm"] == pytest.approx(np.mean(np.arange(30, 50) ** 2))
    assert m["recall"] == pytest.approx([39.5, 2])


def test_thirds_by_the_number_of_labeled_images():
    recall, counts = [10, 20, 30, 40, 50, 60, 70, 80, 90, 100], [5, 9, 9, 1, 2, 3, 4, 6, 7, 8]
    assert evaluate.thirds(recall, counts) == pytest.approx(      # order 1 2 9 | 8 7 0 6 | 5 4 3
        {"head": np.mean([20, 30, 100]), "middle": np.mean([90, 80, 10, 70]),
         "tail": np.mean([60, 50, 40])})
    two = evaluate.thirds([80.0, 20.0], [9, 1])
    assert (two["head"], two["tail"]) == (80, 20) and math.isnan(two["middle"])
    assert evaluate.thirds([math.nan, 1.0, 2.0], [3, 2, 1])["middle"] == 1


def test_pseudo_labels_against_a_count_by_hand():
    g = np.random.default_rng(0)
    logits, y, tau = g.normal(0, 2, (300, 4)), g.integers(0, 4, 300), 0.7
    logits[:, 3] = -9                                 # nobody is called 3
    told = evaluate.pseudo_labels(torch.from_numpy(logits), torch.from_numpy(y), tau)
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    rows = [(int(q.argmax()), int(t), q.max() >= tau) for q, t in zip(p, y, strict=True)]

    def share(hits, among):
        return 100 * sum(hits) / len(among) if among else math.nan
    for k in range(4):
        of_k, called_k = [r for r in rows if r[1] == k], [r for r in rows if r[0] == k]
        sure_k = [r for r in called_k if r[2]]
        assert told["recall"][k] == pytest.approx(share([r[0] == k for r in of_k], of_k))
        assert told["kept_of"][k] == pytest.approx(share([r[2] for r in of_k], of_k))
        for key, among in (("precision", called_k), ("precision_kept", sure_k)):
            by_hand = share([r[1] == k for r in among], among)
            assert told[key][k] == pytest.approx(by_hand, nan_ok=True)
        for j in range(4):
            assert told["confusion"][k][j] == pytest.approx(share([r[0] == j for r in of_k], of_k))
    sure = [r for r in rows if r[2]]
    assert told["kept"] == pytest.approx(100 * len(sure) / 300) and 0 < len(sure) < 300
    assert told["acc_kept"] == pytest.approx(share([r[0] == r[1] for r in sure], sure))
    assert told["acc"] == pytest.approx(share([r[0] == r[1] for r in rows], rows))


# ---------------------------------------------------------------------------------------------
# finished runs

SETTING = "--n1 40 --m1 20 --gamma_l 20 --tau 0.2 --eval_every 2 --iters 4 --method "


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two seeds of FixMatch, one of L2AC."""
    out = tmp_path_factory.mktemp("runs")
    for name in ("none_s0", "none_s1", "l2ac_s0"):
        train(out / name, f"{SETTING}{name[:-3]} --seed {name[-1]}")
    return out


def folders(runs):
    return [str(runs / name) for name in ("none_s0", "l2ac_s0", "none_s1")]


def test_seeds_become_mean_and_deviation(runs, capsys):
    evaluate.main([*folders(runs), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert list(told) == [str(runs / "none_s0,1"), str(runs / "l2ac_s0")]
    none, l2ac = told.values()
    single = [json.loads((runs / f"none_s{s}/result.json").read_text()) for s in range(2)]
    for key in ("bacc", "gm"):
        values = [r[key] for r in single]
        assert none["mean_of_last"][key] == pytest.approx(statistics.mean(values))
        assert none["std"]["mean_of_last"][key] == pytest.approx(statistics.stdev(values))
    recall = np.array([r["recall"] for r in single])
    assert none["mean_of_last"]["recall"] == pytest.approx(recall.mean(0))
    assert none["mean_of_last"]["tail"] == pytest.approx(recall[:, 7:].mean())
    assert none["mean_of_last"]["middle"] == pytest.approx(recall[:, 3:7].mean())
    assert "std" not in l2ac and len(none["runs"]) == 2


def by_class(measure):
    return [f"{measure} {name}" for name in data.SHAPES]


def test_table_markdown_csv_and_json_agree(runs, capsys, tmp_path):
    arguments = [*folders(runs), "--pseudo"]
    evaluate.main([*arguments, "--json"])
    none = json.loads(capsys.readouterr().out)[str(runs / "none_s0,1")]
    evaluate.main([*arguments, "--markdown", "--csv", str(tmp_path / "table.csv")])
    lines = [[c.strip() for c in line.strip("|").split("|")]
             for line in capsys.readouterr().out.splitlines()]
    evaluate.main(arguments)
    text = capsys.readouterr().out
    rows = list(csv.reader(open(tmp_path / "table.csv")))
    assert rows[0] == ["section", "measure", "none_s0,1", "none_s0,1 std", "l2ac_s0"]
    assert lines[0] == ["", "none_s0,1", "l2ac_s0"]
    body = [line for line in lines[2:] if line[1]]    # without the headings
    for line, row in zip(body, rows[1:], strict=True):
        assert line[0] == row[1] and line[1] in text
        if row[2] != "nan":
            assert line[1] == f"{float(row[2]):.2f} ± {float(row[3]):.2f}"
    value = {(row[0], row[1]): float(row[2]) for row in rows[1:]}
    section, pseudo = "mean of the last 2 evaluations", "pseudo-labels, last checkpoint"
    single = ["bACC", "GM", "accuracy", *(f"recall of the {x}" for x in ("head", "middle", "tail"))]
    measures = {
        section: [*single, *by_class("recall")], "last checkpoint": [*single, *by_class("recall")],
        pseudo: ["accuracy", "kept by tau", "accuracy of the kept", *by_class("recall"),
                 *by_class("precision"), *by_class("kept of"), *by_class("precision, kept")]}
    assert list(value) == [(where, what) for where in measures for what in measures[where]]
    assert value[section, "bACC"] == pytest.approx(none["mean_of_last"]["bacc"], rel=1e-5)
    assert value[section, "recall ring"] == pytest.approx(none["mean_of_last"]["recall"][9])
    assert value[pseudo, "kept of disk"] == pytest.approx(none["pseudo"]["kept_of"][0], rel=1e-5)


def test_the_same_seed_twice_or_another_setting_stands_alone(runs, tmp_path, capsys):
    shutil.copytree(runs / "none_s0", tmp_path / "copy")
    train(tmp_path / "other", f"{SETTING}none --seed 1 --gamma_u 3")
    capsys.readouterr()
    evaluate.main([str(runs / "none_s0"), str(tmp_path / "copy"), str(tmp_path / "other"),
                   "--json"])
    assert [len(told["runs"]) for told in json.loads(capsys.readouterr().out).values()] == [1, 1, 1]


@pytest.mark.parametrize("flags", ["--csv", "--predict {here}/new.npz --csv"])
def test_a_csv_file_survives_a_failed_write(runs, tmp_path, capsys, flags):
    """The new file does not fit on the disk: after a few bytes, writing fails."""
    np.savez(tmp_path / "new.npz", x=np.zeros((30, 8, 8, 3), np.uint8))
    table = tmp_path / "table.csv"
    argv = [str(runs / "none_s0"), *flags.format(here=tmp_path).split(), str(table)]
    evaluate.main(argv)
    before = files(tmp_path)
    assert len(before["table.csv"]) > 300
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
    try:
        code, err = exit_of(evaluate.main, argv, capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 2 and "table.csv" in err and err.count("\n") == 1
    assert files(tmp_path) == before


# ---------------------------------------------------------------------------------------------
# what must not stand side by side, and flags without effect


@pytest.fixture(scope="module")
def unfinished(runs, tmp_path_factory):
    """A third seed, stopped after three iterations: it has one evaluation of two."""
    out = tmp_path_factory.mktemp("unfinished") / "none_s2"
    stopped(out, f"{SETTING}none --seed 2", after=3)
    return out


def test_unfinished_runs_are_folded_only_when_asked(runs, unfinished, capsys):
    both = [str(runs / "none_s0"), str(unfinished)]
    code, err = exit_of(evaluate.main, both, capsys)
    assert code == 2 and f"{unfinished} is not finished (evaluated up to iteration 2 of 4)" in err
    evaluate.main([*both, "--unfinished", "--json"])
    told, = json.loads(capsys.readouterr().out).values()
    assert told["evaluations"] == [2, 1] and told["finished"] is False
    logs = [list(csv.DictReader(open(f"{run}/log.csv"))) for run in both]
    means = [statistics.mean(float(row["bacc"]) for row in rows) for rows in logs]
    assert told["mean_of_last"]["bacc"] == pytest.approx(statistics.mean(means), rel=1e-4)
    evaluate.main([*both, "--unfinished"])
    out, err = capsys.readouterr()
    assert "mean of the last 1 to 2 evaluations" in out and "iteration 2 of 4" in out.split("\n")[0]
    assert err == f"{unfinished}: not finished, evaluated up to iteration 2 of 4\n"


def test_a_table_says_how_many_evaluations_it_averages(runs, unfinished, tmp_path, capsys):
    evaluate.main([str(runs / "l2ac_s0")])
    assert "mean of the last 2 evaluations" in capsys.readouterr().out
    evaluate.main([str(runs / "l2ac_s0"), str(unfinished)])          # not folded: side by side
    out = capsys.readouterr().out
    assert "(l2ac_s0: 2, none_s2 (not finished: evaluated up to iteration 2 of 4): 1)" in out
    stopped(tmp_path / "run", f"{SETTING}none --seed 3", after=1)
    evaluate.main([str(tmp_path / "run")])
    assert "no evaluation yet" in capsys.readouterr().out


def fake(folder, rows, seed, iters=6, **info):
    cfg = SimpleNamespace(seed=seed, iters=iters, dataset="synthetic", lr=1.0,
                          dataset_info={"names": ["a"]} | info)
    return SimpleNamespace(folder=Path(folder), cfg=cfg, history=[{"iter": i} for i in rows])


def test_runs_that_were_evaluated_differently_are_not_folded():
    runs = [fake("x_s0", [3, 6], 0), fake("x_s1", [2, 4, 6], 1)]
    with pytest.raises(UserError, match="x_s0 and x_s1"):
        report.grouped(runs)
    assert len(report.grouped(runs, unfinished=True)) == 1
    other = fake("y_s2", [3, 6], 2, fingerprint="other data under the same path")
    assert len(report.grouped([runs[0], other])) == 2
    other.cfg.dataset = "other.npz"
    with pytest.raises(UserError, match="other.npz"):
        report.grouped([runs[0], other])


def test_a_run_in_the_working_folder_has_a_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    group, = report.grouped([fake(".", [6], 0), fake("x", [6], 1)])
    assert group.path.name == f"{tmp_path.name} (seeds 0,1)"


def test_columns_of_the_same_name_are_told_apart(runs, tmp_path, capsys):
    shutil.copytree(runs / "none_s0", tmp_path / "none_s0")
    both = [str(runs / "none_s0"), str(tmp_path / "none_s0")]
    evaluate.main([*both, "--csv", str(tmp_path / "table.csv")])
    assert next(csv.reader(open(tmp_path / "table.csv"))) == ["section", "measure", *both]
    code, err = exit_of(evaluate.main, [both[0], f"{runs}/../{runs.name}/none_s0"], capsys)
    assert code == 2 and "named twice" in err


@pytest.mark.parametrize("flags,named", [
    ("--test random --csv x.csv", "--csv"), ("--test random --pseudo", "--pseudo"),
    ("--test random --markdown", "--markdown"), ("--test random --unfinished", "--unfinished"),
    ("--predict p --test random", "--test"), ("--predict p --json", "--json"),
    ("--predict p --pseudo", "--pseudo"), ("--predict p --seed 0", "--seed"),
    ("--predict p --gamma_t 10", "--gamma_t"), ("--gamma_t 10", "--gamma_t"),
    ("--seed 0", "--seed"), ("--json --markdown", "--markdown"),
    ("--csv no/such/folder/x.csv", "--csv"), ("--csv .", "--csv"),
    ("other --predict p", "one run")])
def test_flags_without_effect_are_refused(flags, named, capsys, tmp_path, monkeypatch):
    """Before anything is loaded: there is no run."""
    monkeypatch.chdir(tmp_path)
    code, err = exit_of(evaluate.main, ["run", *flags.split()], capsys)
    assert code == 2 and named in err and "no run" not in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_environment_of_torchrun_does_not_swallow_the_file(runs, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    evaluate.main([str(runs / "none_s0"), "--csv", str(tmp_path / "table.csv")])
    assert (tmp_path / "table.csv").exists()


def test_an_imbalanced_test_set_says_how_it_was_made(runs, capsys):
    evaluate.main([str(runs / "none_s0"), "--test", "longtail", "--json"])
    told, = json.loads(capsys.readouterr().out).values()
    assert (told["kind"], told["gamma_t"], told["seed"]) == ("longtail", 10, 0)
    assert list(told["counts"].values()) == data.class_counts(20, 10, 10)


def test_an_imbalanced_test_set_needs_every_class():
    with pytest.raises(UserError, match="--test needs test images of every class"):
        evaluate.choose_test(np.array([0, 0, 2]), 3, "longtail", 10, 0)


def test_columns_of_different_images_are_told(runs, tmp_path, capsys):
    """none_s0 and l2ac_s0 share their split; another seed or gamma_u is another set of images."""
    evaluate.main([str(runs / "none_s0"), str(runs / "l2ac_s0")])
    assert capsys.readouterr().err == ""
    train(tmp_path / "run", f"{SETTING}none --gamma_u 3 --seed 1")
    capsys.readouterr()
    evaluate.main([str(runs / "none_s0"), str(tmp_path / "run")])
    assert "--gamma_u, --seed" in capsys.readouterr().err
