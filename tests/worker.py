"""Functions in processes of their own: forks of this one, which has imported everything already."""
import multiprocessing
import os
import sys


def start(function, *args, folder, **environment):
    """A process that runs function(*args); what it prints goes to folder/out and folder/err."""
    folder.mkdir(exist_ok=True)

    def child():
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
        sys.argv = ["command"]
        os.environ |= environment
        function(*args)
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    return process


def end(process, folder, seconds=120):
    """(exit code, stdout, stderr)"""
    process.join(seconds)
    process.kill()
    return process.exitcode, (folder / "out").read_text(), (folder / "err").read_text()


def run(function, *args, folder):
    code, _, err = end(start(function, *args, folder=folder), folder)
    assert code == 0, err
