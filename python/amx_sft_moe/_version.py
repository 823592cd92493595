"""The package's version: that of the headers its compiled module was built from."""

# The first import of the compiled module: what it needs of the system is asked for here.
try:
    from amx_sft_moe._core import __version__ as __version__
except ImportError as error:
    if "libgomp" not in str(error):
        raise
    raise ImportError(
        f"{error}. amx_sft_moe needs the OpenMP library libgomp.so.1: torch brings it where both are in one "
        "environment; else install the system's package (Debian and Ubuntu: libgomp1, Fedora: libgomp)"
    ) from error
