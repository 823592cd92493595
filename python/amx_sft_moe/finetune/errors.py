"""What the command turns into a message instead of a traceback."""


class FinetuneError(Exception):
    """Something the user can mend: a file, an option, a model without routed experts. The text says which."""


class DivergedError(FinetuneError):
    """Training has led to a loss that is no number."""
