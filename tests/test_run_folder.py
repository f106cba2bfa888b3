"""Checkpoint and log. (Killed, full disk, damaged: test_reliability.py.)"""
import pytest
import torch

import run_folder
import settings


def checkpoint(step):
    return {"step": step, "config": {}, "history": [], "model": {"w": torch.ones(3)}, "ema": {}}


def test_checkpoint_round_trip_and_the_one_before(tmp_path, capsys):
    for step in (1, 2):
        run_folder.save_checkpoint(tmp_path, {}, **checkpoint(step))
    assert run_folder.load_checkpoint(tmp_path)["step"] == 2
    whole = (tmp_path / "last.pt").read_bytes()
    for damaged in (whole[:100], b"", b"junk"):
        (tmp_path / "last.pt").write_bytes(damaged)
        assert run_folder.load_checkpoint(tmp_path)["step"] == 1
        assert "last.pt cannot be used" in capsys.readouterr().err
    torch.save({"weights": 3}, tmp_path / "last.pt")          # readable, but not ours
    assert run_folder.load_checkpoint(tmp_path)["step"] == 1
    (tmp_path / "prev.pt").write_bytes(b"")
    with pytest.raises(settings.UserError, match="has to start again"):
        run_folder.load_checkpoint(tmp_path)


def test_log_is_cut_back_to_the_history(tmp_path):
    rows = [{"iter": i, "bacc": i / 3} for i in range(1, 4)]
    run_folder.write_log(tmp_path, rows)
    run_folder.write_log(tmp_path, rows[:2])
    assert (tmp_path / "log.csv").read_text() == "iter,bacc\n1,0.333333\n2,0.666667\n"
