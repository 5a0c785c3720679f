"""Queues of the KV-aware router: profiles of them, and the policy files (JSON or YAML) that describe profiles.

A request goes to the queue that it names, or to that of its family and of its prompt tokens that are not cached.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .fields import show

__all__ = ["PolicyClass", "PolicyProfile", "RouterPolicyConfig"]

QUEUE_POLICIES = ("fcfs", "lcfs", "wspt")
U64_MAX = 2**64 - 1
DEFAULT_BUSY_FRACTION = 16.0
_NAME = re.compile(r"[A-Za-z0-9_.-]+", re.ASCII)


@dataclass(frozen=True)
class PolicyClass:
    """One queue of the router.

    Attributes
    ----------
    name : str
        Its name, as errors show it.
    queue_policy : {"fcfs", "lcfs", "wspt"}
        Order within the queue.
    quantum : int
        Tokens of credit that the queue earns a round, beside other queues.
    busy_tokens : int or None
        A worker with more active prefill tokens than this is busy.
    busy_fraction : float or None
        A worker with more than this many times its token budget of active prefill tokens is busy. With neither
        threshold nothing is ever queued.
    max_requests, max_isl_tokens, max_cached_tokens : int or None
        What the queue may hold per worker before it refuses requests.
    """

    name: str
    queue_policy: str = "fcfs"
    quantum: int = 1
    busy_tokens: int | None = None
    busy_fraction: float | None = None
    max_requests: int | None = None
    max_isl_tokens: int | None = None
    max_cached_tokens: int | None = None


@dataclass(frozen=True)
class PolicyProfile:
    """The queues of a router and which request goes to which.

    Attributes
    ----------
    classes : tuple of PolicyClass
        The queues.
    explicit : mapping of str to int
        Queues that a request names itself.
    families : mapping of str to int
        Row of each family in `table`.
    default_family : int
        Row for requests that name none that exists.
    buckets : tuple of int
        Lower ends, in uncached prompt tokens, of the columns of `table`; empty: one queue for everything.
    table : tuple of int
        ``table[family * len(buckets) + bucket]`` is a queue.
    """

    classes: tuple[PolicyClass, ...]
    explicit: Mapping[str, int]
    families: Mapping[str, int]
    default_family: int = 0
    buckets: tuple[int, ...] = ()
    table: tuple[int, ...] = ()

    @staticmethod
    def single(threshold: float | None, policy: str) -> PolicyProfile:
        """One queue for everything, as the router has without a policy file."""
        return PolicyProfile((PolicyClass("default", policy, busy_fraction=threshold),), {}, {})

    def code(self, policy_class: str | None) -> int:
        """Encode what a request asks for, for the compiled router.

        Parameters
        ----------
        policy_class : str or None
            The request's own word.

        Returns
        -------
        int
            A queue (0 and up), or ``-1 - family`` where the uncached prompt tokens decide further.
        """
        if not self.buckets:
            return 0
        name = "" if policy_class is None else policy_class
        if name in self.explicit:
            return self.explicit[name]
        return -1 - self.families.get(name, self.default_family)


@dataclass(frozen=True)
class RouterPolicyConfig:
    """A policy file: a profile for all models, profiles of single models, or both.

    Attributes
    ----------
    root : PolicyProfile or None
        For models without a profile of their own.
    models : mapping of str to PolicyProfile
        Each replaces `root` as a whole.
    """

    root: PolicyProfile | None
    models: Mapping[str, PolicyProfile]

    @staticmethod
    def from_path(path: str | os.PathLike[str]) -> RouterPolicyConfig:
        """Read a policy file (YAML, or JSON); raises ``ValueError`` that names the file."""
        try:
            with open(path, encoding="utf-8") as file:
                text = file.read()
        except OSError as error:
            raise ValueError(f"failed to read router policy config {os.fspath(path)}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"failed to parse router policy config {os.fspath(path)}: {error}") from None
        return RouterPolicyConfig.from_yaml(text, os.fspath(path))

    @staticmethod
    def from_yaml(text: str, source: str = "<inline>") -> RouterPolicyConfig:
        """Read the text of a policy file.

        JSON needs nothing else; other YAML needs the package PyYAML.

        Parameters
        ----------
        text : str
            The document.
        source : str
            Its name, for errors.

        Returns
        -------
        RouterPolicyConfig

        Raises
        ------
        ValueError
            If it cannot be parsed, or breaks a rule of policy files.
        """
        return _resolve(_Reader("root").mapping(_parse(text, source), _ROOT_KEYS))

    def profile(self, model_name: str | None, threshold: float | None, policy: str) -> PolicyProfile:
        """Pick a model's profile, else the root one, else a single queue of the given kind."""
        if model_name is not None and model_name in self.models:
            return self.models[model_name]
        return self.root if self.root is not None else PolicyProfile.single(threshold, policy)


_PROFILE_KEYS = ("default_policy_family", "policy_classes", "uncached_isl_buckets")
_ROOT_KEYS = (*_PROFILE_KEYS, "models")
_LIMIT_KEYS = (
    "request_queue_limit_per_worker",
    "raw_isl_token_queue_limit_per_worker",
    "cached_token_queue_limit_per_worker",
)
_CLASS_KEYS = (
    "name",
    "policy_family",
    "cache_bucket",
    "queue_policy",
    "quantum",
    "prefill_busy_threshold",
    "prefill_busy_threshold_frac",
    *_LIMIT_KEYS,
)


def _parse(text: str, source: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        raise ValueError(
            f"failed to parse router policy config {source}: it is not JSON, and YAML needs the package PyYAML"
        ) from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"failed to parse router policy config {source}: {error}") from None


class _Reader:
    """Takes typed values out of a parsed document; every error says where."""

    def __init__(self, where: str) -> None:
        self.where = where

    def bad(self, text: str) -> ValueError:
        return ValueError(f"invalid router policy config: {self.where} {text}")

    def mapping(self, value: Any, keys: Sequence[str] | None) -> dict[str, Any]:
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise self.bad(f"must be a mapping, got {show(value)}")
        if keys is not None:
            for key in value:
                if key not in keys:
                    raise self.bad(f"has an unknown field `{key}`, expected one of {', '.join(keys)}")
        return {key: item for key, item in value.items() if item is not None}

    def rows(self, value: Any, name: str) -> list[Any]:
        if not isinstance(value, list):
            raise self.bad(f"{name} must be a list, got {show(value)}")
        if not value:
            raise self.bad(f"{name} must not be empty")
        return value

    def identifier(self, given: Mapping[str, Any], name: str, kind: str) -> str:
        value = given.get(name)
        if not isinstance(value, str) or not _NAME.fullmatch(value):
            raise self.bad(f"{kind} name {show(value)} must match [A-Za-z0-9_.-]+")
        return value

    def count(self, given: Mapping[str, Any], name: str) -> int | None:
        value = given.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= U64_MAX):
            raise self.bad(f"{name} must be an integer in 0..=2**64-1, got {show(value)}")
        return value


def _resolve(document: dict[str, Any]) -> RouterPolicyConfig:
    reader = _Reader("root profile")
    given = [name for name in _PROFILE_KEYS if name in document]
    root = None
    if given:
        if len(given) < len(_PROFILE_KEYS):
            raise reader.bad(f"must have all of {', '.join(_PROFILE_KEYS)} or none, got only {', '.join(given)}")
        root = _resolve_profile(document, reader)
    models = {}
    for name, profile in reader.mapping(document.get("models", {}), None).items():
        if not name:
            raise reader.bad("has a model without a name")
        inner = _Reader(f"model '{name}'")
        fields = inner.mapping(profile, _PROFILE_KEYS)
        for key in _PROFILE_KEYS:
            if key not in fields:
                raise inner.bad(f"has no {key}")
        models[name] = _resolve_profile(fields, inner)
    if root is None and not models:
        raise reader.bad("or at least one model profile is needed")
    return RouterPolicyConfig(root, models)


def _resolve_buckets(rows: list[Any], reader: _Reader) -> tuple[tuple[int, ...], dict[str, int]]:
    starts: list[int] = []
    names: dict[str, int] = {}
    for row in rows:
        fields = reader.mapping(row, ("min_tokens", "bucket"))
        start, name = reader.count(fields, "min_tokens"), reader.identifier(fields, "bucket", "cache bucket")
        if start is None:
            raise reader.bad(f"cache bucket '{name}' has no min_tokens")
        if not starts and start != 0:
            raise reader.bad(f"uncached_isl_buckets must start at min_tokens 0, got {start}")
        if starts and start <= starts[-1]:
            text = f"must be strictly increasing, got {start} after {starts[-1]}"
            raise reader.bad(f"uncached_isl_buckets min_tokens {text}")
        if name in names:
            raise reader.bad(f"has the cache bucket '{name}' twice")
        names[name] = len(starts)
        starts.append(start)
    return tuple(starts), names


def _resolve_class(fields: dict[str, Any], reader: _Reader) -> PolicyClass:
    name = reader.identifier(fields, "name", "policy class")
    inner = _Reader(f"{reader.where} policy class '{name}'")
    quantum, policy = inner.count(fields, "quantum"), fields.get("queue_policy", "fcfs")
    if not quantum:
        raise inner.bad(f"quantum must be an integer of at least 1, got {show(quantum)}")
    if policy not in ("fcfs", "wspt"):
        raise inner.bad(f"queue_policy must be fcfs or wspt, got {show(policy)}")
    tokens, fraction = inner.count(fields, "prefill_busy_threshold"), fields.get("prefill_busy_threshold_frac")
    if fraction is not None:
        number = isinstance(fraction, int | float) and not isinstance(fraction, bool)
        if not number or not math.isfinite(fraction) or fraction < 0:
            raise inner.bad(f"prefill_busy_threshold_frac must be a finite number of at least 0, got {show(fraction)}")
        fraction = float(fraction)
    if tokens is None and fraction is None:
        fraction = DEFAULT_BUSY_FRACTION
    limits = [inner.count(fields, key) for key in _LIMIT_KEYS]
    return PolicyClass(name, policy, quantum, tokens, fraction, *limits)


def _resolve_profile(document: dict[str, Any], reader: _Reader) -> PolicyProfile:
    default = reader.identifier(document, "default_policy_family", "policy family")
    rows = reader.rows(document["policy_classes"], "policy_classes")
    buckets, bucket_of = _resolve_buckets(
        reader.rows(document["uncached_isl_buckets"], "uncached_isl_buckets"), reader
    )
    classes: list[PolicyClass] = []
    families: dict[str, int] = {}
    explicit: dict[str, int] = {}
    cells: dict[tuple[int, int], int] = {}
    for row in rows:
        fields = reader.mapping(row, _CLASS_KEYS)
        made = _resolve_class(fields, reader)
        if any(made.name == other.name for other in classes):
            raise reader.bad(f"has the policy class '{made.name}' twice")
        if ("policy_family" in fields) != ("cache_bucket" in fields):
            raise reader.bad(f"policy class '{made.name}' must have both policy_family and cache_bucket, or neither")
        if "policy_family" in fields:
            family = reader.identifier(fields, "policy_family", "policy family")
            bucket = reader.identifier(fields, "cache_bucket", "cache bucket")
            if bucket not in bucket_of:
                raise reader.bad(f"policy class '{made.name}' names the unknown cache bucket '{bucket}'")
            cell = families.setdefault(family, len(families)), bucket_of[bucket]
            if cell in cells:
                raise reader.bad(f"has two policy classes for family '{family}' and bucket '{bucket}'")
            cells[cell] = len(classes)
        else:
            explicit[made.name] = len(classes)
        classes.append(made)
    if default not in families:
        raise reader.bad(f"default_policy_family '{default}' does not name a configured family")
    for name in explicit:
        if name in families:
            raise reader.bad(f"explicit policy class '{name}' has the name of a policy family")
    for family, row_index in families.items():
        for bucket, column in bucket_of.items():
            if (row_index, column) not in cells:
                raise reader.bad(f"has no policy class for family '{family}' and bucket '{bucket}'")
    table = tuple(cells[row_index, column] for row_index in families.values() for column in range(len(buckets)))
    return PolicyProfile(tuple(classes), explicit, families, families[default], buckets, table)
