"""What a sweep is to do, read from a YAML or TOML file."""
from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..extras import import_extra

Fields = Mapping[str, tuple[type, ...]]

SWEEP_FIELDS: Fields = {
    "workload": (str, dict), "base": (dict,), "grid": (dict,), "configs": (list,), "keys": (list,), "backend": (str,),
    "workers": (int,), "out": (str,), "retry_errors": (bool,)}


def read_spec(path: str | os.PathLike[str], fields: Fields) -> dict[str, Any]:
    """Read a file of settings.

    Parameters
    ----------
    path
        The file; TOML if its name ends in ``.toml``, otherwise YAML (of which JSON is a part).
    fields : mapping
        Name to the types allowed for it.

    Returns
    -------
    dict
        The settings. Files that ``workload`` and ``out`` name are relative to the folder of `path`.

    Raises
    ------
    ValueError
        Not such a file; names the field.
    """
    name = os.fspath(path)
    data = Path(path).read_bytes()
    try:
        if name.endswith(".toml"):
            spec = _toml().loads(data.decode())
        else:
            yaml = import_extra("yaml", "yaml", "reading YAML")
            try:
                spec = yaml.safe_load(data)
            except yaml.YAMLError as error:
                raise ValueError(str(error)) from None
    except ValueError as error:            # of TOML, and of bytes that are no text
        raise ValueError(f"{name}: cannot be read as {'TOML' if name.endswith('.toml') else 'YAML'}: {error}"
                         ) from None
    if not isinstance(spec, dict):
        raise ValueError(f"{name}: expected a mapping of {', '.join(fields)}")
    for key, value in spec.items():
        if key not in fields:
            raise ValueError(f"{name}: {key}: unknown field; expected one of {', '.join(fields)}")
        if not isinstance(value, fields[key]) or (isinstance(value, bool) and bool not in fields[key]):
            raise ValueError(f"{name}: {key}: expected {' or '.join(kind.__name__ for kind in fields[key])}, got "
                             f"{value!r}")
    for key in ("workload", "out"):
        if isinstance(spec.get(key), str):
            spec[key] = str(Path(path).parent / spec[key])
    return spec


def _toml() -> Any:
    try:
        import tomllib
    except ImportError:                    # Python 3.10
        return import_extra("tomli", "toml", "reading TOML")
    return tomllib
