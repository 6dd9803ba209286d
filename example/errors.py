"""The one exception that means "the user can mend this"."""


class UserError(Exception):
    """A mistake outside the program: bad flag, file, row, network or installation.

    Its message is one sentence with the value, the limit and what to do. `example.py` prints it from
    one rank without a traceback and exits with status 2; every other exception keeps its traceback.
    """


class LostPeerError(RuntimeError):
    """Another rank is gone, or sends nothing: this one can only end too."""
