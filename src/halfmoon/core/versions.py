"""Versions of installed packages."""

from functools import cache
from importlib import metadata


@cache
def installed_version(package: str) -> str:
    """Find the version of an installed package.

    It is read once in a process: each time takes milliseconds, because the package's whole description is parsed.

    Raises:
        importlib.metadata.PackageNotFoundError: the package is not installed.
    """
    return metadata.version(package)
