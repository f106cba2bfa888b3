"""Own pictures from folder to prediction, in memory and from files; imbalanced test sets."""
import csv
import json

import numpy as np
import pytest
import torch
from archives import write_folder, write_stl10, write_sun397
from conftest import TINY, exit_of, same, train

import data
import evaluate
import train_fixmatch
import train_mixmatch
from baselines import train as baselines
from support import UserError, config, readers
from support.pictures import decode

slow = pytest.mark.slow


def flags(dataset, more=""):
    return f"--model wrn-10-1 --dataset {dataset} {more}"


def read_csv(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """About 130 pictures of mixed sizes, modes and formats."""
    return write_folder(tmp_path_factory.mktemp("own") / "farm", each=20, unlabeled=15, test=8)


@pytest.mark.parametrize("main,more", [
    (train_fixmatch.main, "--tau 0.2 --omega_every 2 --batch_size_u 9"),
    pytest.param(train_fixmatch.main, "--tau 0.2", marks=slow),
    pytest.param(train_mixmatch.main, "", marks=slow),
    pytest.param(baselines.main, "--base supervised --method resampling", marks=slow),
    pytest.param(baselines.main, "--base fixmatch --method none --tau 0.2 --batch_size_u 4",
                 marks=slow)])
@pytest.mark.slow
def test_files_train_as_memory_does(folder, tmp_path, monkeypatch, main, more):
    """Bit for bit, and three iterations + resume + three equal six on files too."""
    memory = train(tmp_path / "memory", flags(folder, more), main)
    monkeypatch.setattr(readers, "MEMORY", 0)
    assert not torch.is_tensor(data.load(str(folder), image_size=8).images)
    files = train(tmp_path / "files", flags(folder, more), main)
    assert same(memory, files)
    if main is train_fixmatch.main:
        train(tmp_path / "parts", flags(folder, f"{more} --iters 3"))
        assert same(train(tmp_path / "parts", flags(folder, f"{more} --resume")), files)


@slow
def test_an_unseen_folder_trains_evaluates_and_predicts(folder, tmp_path, capsys):
    train(tmp_path / "run", flags(folder, "--iters 30 --eval_every 10 --lr 0.01 --image_size 32"))
    text = capsys.readouterr().out
    assert "labeled: 60 images: ape 20, bee 20, cow 20\n" in text
    assert "unlabeled: 45 images: unknown 45\n" in text
    evaluate.main([str(tmp_path / "run")])
    assert "recall bee" in capsys.readouterr().out
    evaluate.main([str(tmp_path / "run"), "--predict", str(folder / "test"),
                   "--csv", str(tmp_path / "out.csv")])
    rows = read_csv(tmp_path / "out.csv")
    assert len(rows) == 24 and {r["label"] for r in rows} <= {"ape", "bee", "cow"}
    assert all(1 / 3 <= float(r["probability"]) <= 1 for r in rows)
    right = np.mean([f"/{r['label']}/" in r["file"] for r in rows])
    log = read_csv(tmp_path / "run/log.csv")
    assert 100 * right == pytest.approx(float(log[-1]["acc"]), abs=0.01)


def test_prediction_needs_the_run_folder_alone(folder, tmp_path, capsys):
    elsewhere = write_folder(tmp_path / "gone", each=4, unlabeled=4, test=2)
    train(tmp_path / "run", flags(elsewhere, "--iters 2 --eval_every 2"))
    elsewhere.rename(tmp_path / "moved")
    one = sorted((folder / "test/bee").iterdir())[0]
    capsys.readouterr()
    evaluate.main([str(tmp_path / "run"), "--predict", str(one)])
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [r["file"] for r in rows] == [str(one)]

    run = evaluate.load_run(tmp_path / "run")                        # the same by hand
    info = run.cfg.dataset_info
    x = torch.from_numpy(decode(one, (8, 8)))[None] / 255
    mean, std = (torch.tensor(info[key]).view(3, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        p = run.model((x - mean) / std).softmax(1)[0]
    assert rows[0]["label"] == info["names"][p.argmax()]
    assert float(rows[0]["probability"]) == pytest.approx(p.max().item(), abs=1e-3)


@slow
@pytest.mark.parametrize("grey", [False, True])
def test_npz_of_five_classes_at_20_pixels(tmp_path, grey):
    g = np.random.default_rng(0)
    y, y_test, shape = np.arange(60) % 5, np.arange(20) % 5, (20, 20) if grey else (20, 20, 3)

    def images(labels):
        shade = 50 * labels.reshape(-1, *[1] * len(shape))
        return (shade + g.integers(0, 40, (len(labels), *shape))).astype(np.uint8)
    np.savez(tmp_path / "own.npz", x_train=images(y), y_train=y, x_test=images(y_test),
             y_test=y_test, names=np.array(["a", "b", "c", "d", "e"]))
    split = "--n1 6 --gamma_l 3 --m1 6 --gamma_u 1 --image_size 20"
    train(tmp_path / "run", flags(tmp_path / "own.npz", split))
    evaluate.main([str(tmp_path / "run")])
    x = images(np.arange(7) % 5)
    np.savez(tmp_path / "new.npz", x=x)
    evaluate.main([str(tmp_path / "run"), "--predict", str(tmp_path / "new.npz"),
                   "--csv", str(tmp_path / "out.csv")])
    rows = read_csv(tmp_path / "out.csv")
    assert [r["file"] for r in rows] == [str(i) for i in range(7)]
    assert {r["label"] for r in rows} <= set("abcde")
    assert data.load(str(tmp_path / "own.npz")).images.shape == (60, 3, 20, 20)


def test_grey_arrays_become_three_equal_channels(tmp_path):
    x, y = np.random.default_rng(0).integers(0, 256, (12, 9, 9), dtype=np.uint8), np.arange(12) % 3
    for name, form in (("a", x), ("b", x[..., None]), ("c", np.stack([x] * 3, 3))):
        np.savez(tmp_path / f"{name}.npz", x_train=form, y_train=y, x_test=form, y_test=y)
    a, b, c = (data.load(str(tmp_path / f"{name}.npz")).images for name in "abc")
    assert torch.equal(a, c) and torch.equal(b, c)


@slow
def test_a_folder_without_unlabeled_pictures(tmp_path, capsys):
    root = write_folder(tmp_path / "own", each=12, unlabeled=1, test=2)
    for path in (root / "unlabeled").iterdir():
        path.unlink()
    (root / "unlabeled").rmdir()

    def call(more):
        argv = [*TINY.split(), *flags(root, more).split(), "--iters", "2", "--out",
                str(tmp_path / "run")]
        return exit_of(train_fixmatch.main, argv, capsys)
    code, err = call("")
    assert code == 2 and "--n1" in err and "--ratio" in err and err.count("\n") == 1
    assert call("--n1 6 --gamma_l 3 --m1 6 --gamma_u 1")[0] is None
    assert call("--ratio 2 --overwrite")[0] is None


@slow
def test_a_picture_that_breaks_during_training_is_named(tmp_path, capsys, monkeypatch):
    root = write_folder(tmp_path / "own", each=12, unlabeled=4, test=2)
    monkeypatch.setattr(readers, "MEMORY", 0)
    monkeypatch.setattr(data, "names_and_colours",           # which would read it already
                        lambda *args: (["ape", "bee", "cow"], (.5,) * 3, (.3,) * 3))
    broken = root / "train/cow/cow_1.PNG"
    broken.write_bytes(broken.read_bytes()[:-40])            # the header is intact
    argv = [*TINY.split(), *flags(root).split(), "--iters", "50", "--out", str(tmp_path / "run")]
    code, err = exit_of(train_fixmatch.main, argv, capsys)
    assert code == 2 and "cow_1.PNG cannot be read" in err and err.count("\n") == 1


@slow
def test_a_run_is_not_resumed_on_other_classes(tmp_path, capsys):
    root = write_folder(tmp_path / "own", each=4, unlabeled=4, test=2)
    train(tmp_path / "run", flags(root, "--iters 3"))
    (root / "train/cow").rename(root / "train/cat")
    (root / "test/cow").rename(root / "test/cat")
    argv = [*TINY.split(), *flags(root).split(), "--iters", "6", "--resume", "--out",
            str(tmp_path / "run")]
    code, err = exit_of(train_fixmatch.main, argv, capsys)
    assert code == 2 and "other names" in err and err.count("\n") == 1


@pytest.fixture(scope="module")
def synthetic_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    train(out, "--iters 2 --eval_every 2")
    return out


@pytest.mark.parametrize("make,words", [
    (lambda p: p / "nothing", "there is no such file"),
    (lambda p: (p / "empty").mkdir() or p / "empty", "holds no picture"),
    (lambda p: (p / "x.png").write_text("text") and p / "x.png", "x.png cannot be read"),
    (lambda p: np.savez(p / "x.npz", y=np.zeros(3)) or p / "x.npz", "array x"),
    (lambda p: np.savez(p / "z.npz", x=np.zeros((3, 9, 9, 3))) or p / "z.npz", "must be uint8")],
    ids=["nothing", "empty folder", "text", "no x", "float"])
def test_what_cannot_be_predicted(synthetic_run, tmp_path, capsys, make, words):
    (tmp_path / "in").mkdir()
    argv = [str(synthetic_run), "--predict", str(make(tmp_path / "in")), "--csv",
            str(tmp_path / "out.csv")]
    code, err = exit_of(evaluate.main, argv, capsys)
    assert code == 2 and words in err and err.count("\n") == 1
    assert not (tmp_path / "out.csv").exists()


# ---------------------------------------------------------------------------------------------
# imbalanced test sets


@pytest.mark.parametrize("kind", ["longtail", "reversed", "random"])
def test_imbalanced_test_sets(kind):
    labels = np.repeat(np.arange(10), 1000)
    index = evaluate.choose_test(labels, 10, kind, 10, seed=0)
    assert len(set(index)) == len(index)
    counts = np.bincount(labels[index], minlength=10)
    long = [1000, 774, 599, 464, 359, 278, 215, 166, 129, 100]      # 1000 * 10^(-k/9), truncated
    if kind == "random":
        assert 100 <= counts.min() and counts.max() <= 1000 and len(set(counts)) > 5
        other = np.bincount(labels[evaluate.choose_test(labels, 10, kind, 10, seed=1)])
        assert not np.array_equal(counts, other)
    else:
        assert counts.tolist() == (long if kind == "longtail" else long[::-1])


def test_accuracy_on_an_imbalanced_test_set(synthetic_run, capsys):
    folder = str(synthetic_run)
    evaluate.main([folder, "--test", "longtail", "--json"])
    result = json.loads(capsys.readouterr().out)[folder]
    counts = list(result["counts"].values())
    assert counts[0] == 20 and counts[-1] == 2 and list(result["counts"])[-1] == "ring"
    weighted = sum(n * r for n, r in zip(counts, result["recall"], strict=True)) / sum(counts)
    assert result["acc"] == pytest.approx(weighted)
    assert result["bacc"] == pytest.approx(np.mean(result["recall"]))
    evaluate.main([folder, "--test", "random", "--gamma_t", "5"])
    assert "ACC" in capsys.readouterr().out
    code, err = exit_of(evaluate.main, [folder, "--test", "longtail", "--gamma_t", "1000"], capsys)
    assert code == 2 and "--gamma_t" in err


# ---------------------------------------------------------------------------------------------
# the paper's defaults


@pytest.mark.parametrize("name,expected", [
    ("cifar100", dict(n1=150, m1=300, gamma_l=10, gamma_u=10, attractor_input="l2", ratio=None,
                      model="wrn-28-2", image_size=32, tau=0.95, ra_m=4, batch_size_u=64)),
    ("stl10", dict(n1=450, m1=None, gamma_l=10, gamma_u=None, attractor_input="softmax",
                   model="wrn-28-2", image_size=32, tau=0.95, ema=0.999)),
    ("sun397", dict(n1=None, m1=None, gamma_l=None, gamma_u=None, ratio=2, attractor_input="l2",
                    model="resnet34", image_size=224, batch_size=128, batch_size_u=256, ema=0.99,
                    tau=0.6, ra_m="random", lr=2e-3, lambda_u=1))])
def test_the_dataset_alone_chooses_the_papers_settings(name, expected):
    cfg = config.read(["--dataset", name], "fixmatch")
    assert {key: getattr(cfg, key) for key in expected} == expected


def test_beta_takes_the_place_of_counts():
    cfg = config.read("--dataset cifar10 --beta 0.1 --gamma_u 100".split(), "fixmatch")
    assert (cfg.n1, cfg.m1, cfg.beta, cfg.gamma_l) == (None, None, 0.1, 100)
    assert cfg.out.endswith("_gl100_gu100_beta0.1_s0")
    with pytest.raises(UserError, match="--beta"):
        config.read("--dataset cifar10 --beta 0.1 --n1 30".split(), "fixmatch")


def test_counts_take_the_place_of_the_ratio():
    cfg = config.read("--dataset sun397 --n1 9 --gamma_l 2 --m1 9 --gamma_u 2".split(), "fixmatch")
    assert cfg.ratio is None and cfg.n1 == 9


# ---------------------------------------------------------------------------------------------
# trainings on the other datasets of the paper


@slow
@pytest.mark.parametrize("memory", [0, 2**30])
def test_sun397_trains(tmp_path, monkeypatch, memory):
    write_sun397(tmp_path, monkeypatch)
    monkeypatch.setattr(readers, "MEMORY", memory)
    state = train(tmp_path / "run", flags("sun397", f"--batch_size_u 9 --data_dir {tmp_path}"))
    assert state["config"]["dataset_info"]["names"] == ["abbey", "beach", "cave/inside"]
    assert state["config"]["ratio"] == 2 and state["step"] == 6


@slow
def test_stl10_trains(tmp_path, monkeypatch, capsys):
    write_stl10(tmp_path, monkeypatch)
    train(tmp_path / "run", flags("stl10", f"--n1 2 --gamma_l 2 --data_dir {tmp_path}"))
    text = capsys.readouterr().out
    assert "labeled: 11 images: airplane 2, bird 1," in text and "images: unknown 25\n" in text


@slow
def test_resnet34_trains(tmp_path, folder):
    state = train(tmp_path / "run", flags(folder, "--model resnet34 --image_size 16 --iters 1"))
    assert state["model"]["classifier.weight"].shape == (3, 512)


@slow
def test_steps_and_ratios_on_synthetic_data(tmp_path):
    for i, more in enumerate(("--imbalance step --gamma_u 100", "--beta 0.1 --gamma_u 100",
                              "--ra_m random")):
        train(tmp_path / f"{i}", more)
    result = json.loads((tmp_path / "1/result.json").read_text())
    assert result["beta"] == 0.1 and result["imbalance"] == "long"
