"""The package's version: that of the headers its compiled module was built from."""

from amx_sft_moe._core import __version__ as __version__
