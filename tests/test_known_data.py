"""Which data a run was trained on: the fingerprint, flags without effect, folders that are not
there or were relative to another one."""
import os
from argparse import Namespace
from dataclasses import replace

import archives
import numpy as np
import pytest
import torch
from archives import arrays, noise, refusal, write_folder
from conftest import exit_of, train
from PIL import Image

import data
import evaluate
import train_fixmatch
from support import readers

# ---------------------------------------------------------------------------------------------
# the fingerprint


@pytest.fixture(scope="module")
def dataset():
    labels = np.r_[np.arange(20) % 4, np.full(10, -1)]
    return data.Dataset(torch.from_numpy(noise(30, 3, 8, 8)), labels,
                        torch.from_numpy(noise(8, 3, 8, 8)), torch.arange(8) % 4,
                        ["a", "b", "c", "d"], (.5,) * 3, (.3,) * 3)


OTHER_DATA = {
    "inverted": lambda d: dict(images=255 - d.images),
    "one pixel": lambda d: dict(images=torch.cat([d.images[:-1], d.images[-1:] ^ 1])),
    "order": lambda d: dict(images=d.images.flip(0)),
    "layout": lambda d: dict(images=d.images.mT),
    "shuffled labels": lambda d: dict(labels=np.roll(d.labels, 1)),
    "fewer unlabeled": lambda d: dict(images=d.images[:-1], labels=d.labels[:-1]),
    "test images": lambda d: dict(test_images=d.test_images.flip(0)),
    "test labels": lambda d: dict(test_labels=d.test_labels.flip(0)),
    "reversed names": lambda d: dict(names=d.names[::-1]),
    "names cut elsewhere": lambda d: dict(names=["a', 'b", "c", "d"]),
    "an image from train to test": lambda d: dict(
        images=d.images[:-1], test_images=torch.cat([d.images[-1:], d.test_images])),
}


def test_the_fingerprint_tells_data_apart(dataset):
    prints = {name: replace(dataset, **change(dataset)).info["fingerprint"]
              for name, change in OTHER_DATA.items()}
    prints["itself"] = dataset.info["fingerprint"]
    assert len(set(prints.values())) == len(prints)
    assert all(len(p) == 32 and int(p, 16) >= 0 for p in prints.values())


def test_the_fingerprint_depends_on_the_contents_alone(dataset):
    same = replace(dataset, images=dataset.images.clone(memory_format=torch.channels_last),
                   labels=dataset.labels.copy(), names=list(dataset.names))
    assert same.to("cpu").fingerprint == dataset.fingerprint


def test_the_fingerprint_of_pictures_on_file(tmp_path, monkeypatch):
    """Of names and sizes; wherever the folder is, and without decoding anything."""
    monkeypatch.setattr(readers, "MEMORY", 0)
    folder = write_folder(tmp_path / "a", each=3, unlabeled=1, test=1)
    first = data.load(str(folder), image_size=8)
    monkeypatch.setattr("support.pictures.decode", None)
    prints = [first.fingerprint]
    folder = folder.rename(tmp_path / "b")

    def again():
        names, x = readers.read_folder(folder), first.images
        test = readers.Pictures(names["x_test"], x.size)
        parts = readers.Pictures(np.r_[names["x_train"], names["x_unlabeled"]], x.size)
        return replace(first, images=parts, test_images=test).fingerprint
    assert again() == prints[0]
    Image.fromarray(noise(50, 50, 3)).save(folder / "test/bee/bee_0.webp")
    prints.append(again())
    os.rename(folder / "train/ape/ape_0.jpeg", folder / "train/ape/ape_00.jpeg")
    prints.append(again())
    assert len(set(prints)) == 3


def test_the_fingerprint_is_in_the_checkpoint(tmp_path):
    info = train(tmp_path / "run", "--iters 1 --method none")["config"]["dataset_info"]
    assert info["fingerprint"] == data.load("synthetic", image_size=8).fingerprint


# ---------------------------------------------------------------------------------------------
# flags without effect


def flags(**changes):
    return Namespace(**dict(dataset="own", n1=6, m1=6, gamma_l=3, gamma_u=3, reverse_u=False,
                            imbalance="long", split="random", pool="disjoint", seed=0, beta=None,
                            ratio=None, recipe="paper") | changes)


AS_IT_IS = dict(n1=None, m1=None, gamma_l=None, gamma_u=None)
OWN_POOL = dict(m1=None, gamma_u=None)


def check(unlabeled, **changes):
    labels = np.r_[np.repeat(np.arange(3), 12), np.full(unlabeled, -1)]
    d = data.Dataset(None, labels, None, None, ["a", "b", "c"], None, None)
    cfg = flags(**changes)
    data.check_effect(d, cfg, data.split(d, cfg)[1])


@pytest.mark.parametrize("unlabeled,changes", [
    (5, AS_IT_IS | dict(reverse_u=True)), (5, AS_IT_IS | dict(imbalance="step")),
    (5, AS_IT_IS | dict(split="first")), (5, OWN_POOL | dict(reverse_u=True)),
    (5, AS_IT_IS | dict(recipe="official", split="random")),
    (0, AS_IT_IS | dict(ratio=2, reverse_u=True)), (0, AS_IT_IS | dict(ratio=2, imbalance="step")),
    (0, dict(gamma_u=1, reverse_u=True)), (0, dict(gamma_l=1, gamma_u=1, imbalance="step")),
    (5, AS_IT_IS | dict(ratio=2)), (5, dict(gamma_u=3))])
def test_a_flag_without_effect_is_refused(unlabeled, changes):
    flag = [key for key in changes if key not in AS_IT_IS and key != "recipe"] or ["gamma_u"]
    assert f"--{flag[-1]} " in refusal(check, unlabeled, **changes)


@pytest.mark.parametrize("unlabeled,changes", [
    (0, dict(reverse_u=True)), (0, dict(imbalance="step")), (0, dict(split="first")),
    (0, dict(gamma_l=1, imbalance="step", reverse_u=True)), (5, OWN_POOL | dict(imbalance="step")),
    (5, AS_IT_IS | dict(recipe="official", split="first")), (5, AS_IT_IS | dict(pool="union")),
    (5, OWN_POOL | dict(split="first")), (0, AS_IT_IS | dict(ratio=2, split="first")),
    (0, dict(n1=9, m1=9, gamma_l=9, gamma_u=9, reverse_u=True))])   # impossible unless reversed
def test_a_flag_with_an_effect_is_accepted(unlabeled, changes):
    check(unlabeled, **changes)


def test_a_run_with_a_flag_without_effect_is_not_started(tmp_path, capsys):
    np.savez(tmp_path / "own.npz", **arrays(x_unlabeled=noise(9, 9, 9, 3)))
    argv = f"--dataset {tmp_path}/own.npz --reverse_u --out {tmp_path}/run".split()
    code, err = exit_of(train_fixmatch.main, argv, capsys)
    assert code == 2 and "--reverse_u" in err and err.count("\n") == 1
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------------------------------
# folders that are not there


@pytest.mark.parametrize("name", readers.ARCHIVES)
def test_a_mistyped_data_folder_is_not_made(tmp_path, monkeypatch, name):
    archives.no_network(monkeypatch)
    monkeypatch.chdir(tmp_path)
    for place in (tmp_path / "dta", "dta", "data/inner"):
        text = refusal(data.load, name, place)
        assert f"--data_dir {place}" in text and "mkdir" in text
    refusal(data.load, name, "data", download=False)
    assert not list(tmp_path.iterdir())
    assert "the download failed" in refusal(data.load, name, "data")      # a fresh clone's folder


def test_reading_alone_neither_downloads_nor_unpacks(tmp_path, monkeypatch):
    archives.write_cifar10(tmp_path, monkeypatch)
    before = sorted(tmp_path.rglob("*"))
    assert "unpacked" in refusal(data.load, "cifar10", tmp_path, download=False)
    assert sorted(tmp_path.rglob("*")) == before
    unpacked = data.load("cifar10", tmp_path)
    again = data.load("cifar10", tmp_path, download=False)
    assert again.fingerprint == unpacked.fingerprint


def test_a_strangers_run_makes_no_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train(tmp_path / "run", "--iters 1 --method none")
    state = torch.load("run/last.pt", weights_only=True)
    state["config"] |= {"dataset": "cifar10", "data_dir": f"{tmp_path}/theirs", "image_size": 32}
    torch.save(state, "run/last.pt")
    capsys.readouterr()
    code, err = exit_of(evaluate.main, ["run"], capsys)
    assert code == 2 and "theirs" in err and err.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_relative_dataset_is_found_from_another_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "start").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "start")
    np.savez("own.npz", **arrays(x_unlabeled=noise(9, 9, 9, 3)))
    state = train(tmp_path / "run", "--dataset own.npz --model wrn-10-1 --iters 1")
    assert state["config"]["cwd"] == str(tmp_path / "start")
    monkeypatch.chdir(tmp_path / "elsewhere")
    evaluate.load_data.cache_clear()
    evaluate.main([str(tmp_path / "run")])
    assert "recall class 2" in capsys.readouterr().out


def test_a_data_folder_is_found_from_another_folder(tmp_path, monkeypatch):
    (tmp_path / "start/data").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    y = np.arange(20) % 10
    x = noise(20, 9, 9, 3)
    np.savez("start/data/cifar10.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    d = data.load("cifar10", "data", download=False, cwd=str(tmp_path / "start"))
    assert np.array_equal(d.images.permute(0, 2, 3, 1).numpy(), x)
    assert not (tmp_path / "data").exists()
