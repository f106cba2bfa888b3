"""What every run needs and no reader of L2AC has to know: flags, files, processes, augmentation."""


class UserError(Exception):
    """One sentence for the user: which flag or file is wrong, and what to do. Exit code 2."""
