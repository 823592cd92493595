"""What the operating system and the environment say about this machine and this process, for bug reports.

Read from /proc and /sys. Each function takes the ``root`` that they hang on, for tests; what is not there is
left out, never an error.
"""
