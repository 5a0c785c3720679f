"""Packages that are only needed for some things, imported when they are."""
from __future__ import annotations

import importlib
from typing import Any

__all__ = ["import_extra"]


def import_extra(module: str, extra: str, what: str) -> Any:
    """An optional package, or an error that says how to get it.

    Parameters
    ----------
    module : str
        The module to import.
    extra : str
        The extra of this package that brings it.
    what : str
        What needs it.

    Raises
    ------
    ImportError
        It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{what} needs {module.partition('.')[0]}, which is not installed: pip install "
                          f"'mocker-llm[{extra}]'") from error
