"""Packages that are only needed for some things, imported when they are."""
from __future__ import annotations

import contextlib
import importlib
import importlib.util
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
        raise ImportError(_missing(module, extra, what)) from error


def import_ahead(module: str, extra: str, what: str) -> None:
    """`import_extra` beside what goes on; who needs the module before it is there waits for it.

    Raises
    ------
    ImportError
        It is not installed. That it does not work is found out by who needs it.
    """
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise ImportError(_missing(module, extra, what))

    def load() -> None:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)

    threading.Thread(target=load, name=f"import {module}").start()


def _missing(module: str, extra: str, what: str) -> str:
    return f"{what} needs {module.partition('.')[0]}, which is not installed: pip install 'mocker-llm[{extra}]'"
