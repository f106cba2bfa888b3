"""What every run needs and no reader of L2AC has to know: flags, files, processes, augmentation."""
import os
import sys


class UserError(Exception):
    """One sentence for the user: which flag or file is wrong, and what to do. Exit code 2."""


def exit_cleanly(main):
    """Run a script's main. Programming errors keep their traceback."""
    sys.stdout.reconfigure(errors="backslashreplace")    # a terminal may lack some letters
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:                              # `... | head` closed our output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (UserError, PermissionError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:                            # of a program that has nothing to save
        sys.exit(130)
