"""The one exception that the command turns into a message instead of a traceback."""


class TimelineError(Exception):
    """Something the user can mend: a file that cannot be read, an option without meaning. The text says
    which."""
