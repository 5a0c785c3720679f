"""Packages that are only needed for some things, imported when they are."""
from __future__ import annotations

import contextlib
import importlib
import threading
from typing import Any

__all__ = ["import_ahead", "import_extra"]


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


def import_ahead(module: str) -> None:
    """Begin to import an optional package beside what goes on; who needs it before it is there waits for it.

    That it is not installed is found out then.
    """
    def load() -> None:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)

    threading.Thread(target=load, name=f"import {module}").start()
