"""The version of the package and of the C++ library that it was built from."""

__version__ = "0.1.0"
