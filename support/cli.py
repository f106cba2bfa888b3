"""A program as its user meets it: flags that are checked, and how it ends after a user error."""
import argparse
import math
import re
import sys
from contextlib import suppress
from pathlib import Path

from support import UserError, discard_output, distributed, explain, prepare_streams


def title(doc):
    """The first paragraph of a module's docstring; `python -OO` has taken those away."""
    return (doc or "").split("\n\n")[0]


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one sentence instead of the usage text and a sentence."""

    def error(self, message):
        raise UserError(f"{message}; see --help")


def number(kind, low, high=math.inf, word=None, above=False):
    """An argparse type: int or float within [low, high], or the given word. above: low is out."""
    def parse(text):
        if text == word:
            return word
        value = kind(text)
        if not low <= value <= high or value == math.inf or above and value == low:
            raise argparse.ArgumentTypeError(f"{text} is not in {'(' if above else '['}{low}, "
                                             f"{high}{')' if high == math.inf else ']'}")
        return value
    parse.__name__ = kind.__name__          # argparse names it when the text is no number at all
    return parse


def exit_cleanly(main):
    """Run a script's main: what the user or the machine is to blame for becomes one sentence on
    stderr and exit code 2. Programming errors keep their traceback.
    """
    prepare_streams()
    try:
        status = main()
        distributed.stop()
        sys.stdout.flush()                           # while an error can still be caught
        sys.exit(status)
    except BrokenPipeError:                          # `... | head` closed our output
        discard_output()
        sys.exit(1)
    except KeyboardInterrupt:                        # of a program that has nothing to save
        sys.exit(130)
    except Exception as error:
        sentence = explain(error)
        if sentence is None:
            raise
        if distributed.rank() and getattr(error, "common", False):
            sys.exit(2)                              # all ranks met it, rank 0 reports it
    discard_output()
    sentence = re.sub(r"[\x00-\x1f\x7f]", lambda c: repr(c[0])[1:-1], sentence)     # in file names
    with suppress(OSError):                          # stderr is closed
        print(f"{Path(sys.argv[0]).name}: {sentence}", file=sys.stderr, flush=True)
    sys.exit(2)
