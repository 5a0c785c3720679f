"""Configurations: flat mappings of names to values that say everything about one simulation but its workload.

A name is a keyword of `mocker.simulate` (``num_workers``), a field of `MockEngineArgs` (``block_size``,
``sglang.page_size``), the same for one pool only (``prefill.num_gpu_blocks``, ``decode.max_num_seqs``) or a field of
`KvRouterConfig` (``router.router_temperature``). Flat names make flat tables. Under any other name stands a mapping of
such names, which makes one axis of a grid of settings that belong together.
"""
from __future__ import annotations

import difflib
import inspect
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sized
from functools import cache
from typing import Any

import numpy as np

from ..args import MockEngineArgs
from ..replay import simulate
from ..router_config import KvRouterConfig

Config = dict[str, Any]

_ENGINE_OBJECTS = ("extra_engine_args", "prefill_engine_args", "decode_engine_args")
_OBJECTS = {*_ENGINE_OBJECTS, "router_config"}
_NOT_HERE = {"workload", "progress", "recording", "planner", "stream_to"}     # they belong to one simulation
_POOL_COUNTS = ("num_prefill_workers", "num_decode_workers")


def _parameters(function: Any) -> tuple[str, ...]:
    return tuple(name for name in inspect.signature(function).parameters if name != "self" and name[0] != "_")


@cache
def _names() -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Keywords of `simulate`, fields of the engine arguments, fields of the router's settings."""
    keywords = frozenset(_parameters(simulate)) - _OBJECTS - _NOT_HERE
    return (keywords, frozenset(_parameters(MockEngineArgs.__init__)),
            frozenset(_parameters(KvRouterConfig.__init__)))


def _unknown(name: str) -> ValueError:
    keywords, engine, router = _names()
    known = [*keywords, *engine, *(f"router.{field}" for field in router),
             *(f"{pool}.{field}" for pool in ("prefill", "decode") for field in engine)]
    close = difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return ValueError(f"{name!r} is no keyword of simulate, engine argument, 'prefill.', 'decode.' or 'router.' "
                      f"setting{hint}")


def _engine_field(values: Config, name: str, value: Any, whole: str) -> None:
    """Put an engine argument into `values`; a dot leads into an inner object."""
    first, dot, rest = name.partition(".")
    if first not in _names()[1]:
        raise _unknown(whole)
    if dot:
        values[first] = {**(values.get(first) or {}), rest: value}
    else:
        values[first] = value


def simulate_keywords(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of `mocker.simulate` that a configuration stands for.

    Parameters
    ----------
    config : mapping
        Names and values as the module describes them. ``extra_engine_args``, ``prefill_engine_args``,
        ``decode_engine_args`` and ``router_config`` may be given as objects too; single fields win over them.

    Returns
    -------
    dict

    Raises
    ------
    ValueError
        An unknown name or a bad value; the message names it.
    """
    keywords, _, router = _names()
    out: dict[str, Any] = {}
    config = _flat(config)
    common: Config = {}
    pools: dict[str, Config] = {"prefill": {}, "decode": {}}
    routing: Config = {}
    for name, value in config.items():
        first, dot, rest = name.partition(".")
        if name in keywords or name in _OBJECTS:
            out[name] = value
        elif dot and first in pools:
            _engine_field(pools[first], rest, value, name)
        elif dot and first == "router":
            if rest not in router:
                raise _unknown(name)
            routing[rest] = value
        else:
            _engine_field(common, name, value, name)
    if any(pools.values()) or any(out.get(name) is not None for name in (*_POOL_COUNTS, *_ENGINE_OBJECTS[1:])):
        if out.pop("extra_engine_args", None) is not None:
            raise ValueError("extra_engine_args is for one pool; use prefill_engine_args and decode_engine_args, or "
                             "'prefill.' and 'decode.' names, for two")
        for pool, values in pools.items():
            whole = f"{pool}_engine_args"
            out[whole] = _engine_args(out.get(whole), {"worker_type": pool, **common, **values}, whole)
    elif common:
        out["extra_engine_args"] = _engine_args(out.get("extra_engine_args"), common, "extra_engine_args")
    if routing:
        base = out.get("router_config")
        merged = {**json.loads(base.to_json()), **routing} if isinstance(base, KvRouterConfig) else routing
        out["router_config"] = KvRouterConfig.from_json(json.dumps(_plain(merged)))
    return out


def _flat(config: Mapping[str, Any]) -> Config:
    """A configuration with its groups of settings taken apart; single settings win over those of groups."""
    keywords, engine, _ = _names()
    groups = [name for name, value in config.items() if name not in engine and name not in keywords
              and name not in _OBJECTS and "." not in name and isinstance(value, Mapping)]
    if not groups:
        return dict(config)
    out: Config = {}
    for name in groups:
        if not all(isinstance(inner, str) for inner in config[name]):
            raise _unknown(name)
        out.update(_flat(config[name]))
    out.update((name, value) for name, value in config.items() if name not in groups)
    return out


def _engine_args(base: Any, values: Config, name: str) -> MockEngineArgs:
    if base is None:
        return MockEngineArgs(**values)
    if not isinstance(base, MockEngineArgs):
        raise ValueError(f"{name} must be MockEngineArgs, got {type(base).__name__}")
    return base.replace(**values)


def _plain(value: Any) -> Any:
    """A value as JSON has it; ValueError if it has no such form."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "to_json"):
        return json.loads(value.to_json())
    raise ValueError(f"a {type(value).__name__} has no form in JSON")


def plain_config(config: Mapping[str, Any]) -> Config:
    """A configuration as JSON has it, for files and tables.

    Raises
    ------
    ValueError
        A value, such as a function, has no such form; the message names it.
    """
    out = {}
    for name, value in config.items():
        try:
            out[name] = _plain(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}; it cannot be recorded in a file") from None
    return out


def config_key(config: Mapping[str, Any]) -> str:
    """Text that is equal for equal configurations, in whatever order their names come."""
    return json.dumps(plain_config(config), sort_keys=True)


def grid(axes: Mapping[str, Any]) -> Iterator[Config]:
    """All combinations of the values of some names.

    Parameters
    ----------
    axes : mapping
        Name to a list, tuple, range or array of values; any other value is the same in every combination.

    Yields
    ------
    dict
        A configuration; the last name changes fastest.

    Examples
    --------
    >>> list(grid({"num_workers": [1, 2], "block_size": 64}))
    [{'num_workers': 1, 'block_size': 64}, {'num_workers': 2, 'block_size': 64}]
    """
    values = [axis_values(value) for value in axes.values()]
    for combination in itertools.product(*values):
        yield dict(zip(axes, combination, strict=True))


def axis_values(value: Any) -> list[Any]:
    """The values of an axis: the items of a list, tuple, range or array, otherwise the value alone."""
    if isinstance(value, np.ndarray):
        return list(value.tolist())
    return list(value) if isinstance(value, (list, tuple, range)) else [value]


def as_configs(configs: Mapping[str, Any] | Iterable[Mapping[str, Any]]) -> tuple[Iterator[Config], int | None]:
    """Configurations one by one, and how many there are if that is known: a grid, a list or a generator.

    Raises
    ------
    TypeError
        It is none of these.
    """
    if isinstance(configs, Mapping):
        total = 1
        for value in configs.values():
            total *= len(axis_values(value))
        return grid(configs), total
    if isinstance(configs, (str, bytes)) or not isinstance(configs, Iterable):
        raise TypeError(f"configs must be a mapping (a grid) or an iterable of mappings, got {type(configs).__name__}")
    return map(_checked, configs), len(configs) if isinstance(configs, Sized) else None


def _checked(config: Any) -> Config:
    if not isinstance(config, Mapping) or not all(isinstance(name, str) for name in config):
        raise TypeError(f"a configuration must be a mapping of names to values, got {config!r}")
    return dict(config)
