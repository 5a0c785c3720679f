"""Settings of the KV-aware router, and the queue profiles of its policy file.

:class:`KvRouterConfig` has the names, order, defaults and rules of the reference's Python class. Fields that only a
live router reads are accepted, checked and kept, and their text here says so: in a replay they change nothing.
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

from .args import MockEngineArgs
from .fields import (
    BOOL,
    FILE_PATH,
    FRACTION,
    NOT_NEGATIVE,
    U32_MAX,
    BadValue,
    Choice,
    Field,
    Int,
    Record,
    SettableField,
    read_json,
    show,
)

__all__ = [
    "KvRouterConfig",
    "PolicyClass",
    "PolicyProfile",
    "RouterPolicyConfig",
    "decode_router_config",
    "prefill_router_config",
    "replay_router_config",
]

U64_MAX = 2**64 - 1
DEFAULT_BUSY_FRACTION = 16.0
_POSITIVE_U32 = Int(1, U32_MAX)
_QUEUE_POLICIES = ("fcfs", "lcfs", "wspt")
_NAME = re.compile(r"[A-Za-z0-9_.-]+", re.ASCII)
_LIVE = "Live routers only; no effect in a replay."


# --- queue profiles --------------------------------------------------------------------------------------------------


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


# --- the router's settings -------------------------------------------------------------------------------------------


class _OldWeight(Field[float]):
    """The old name of ``prefill_load_scale``: reads as that field; a value of 0 takes the overlap credit away too."""

    settable = True

    def __get__(self, record: Record | None, owner: type) -> Any:
        return self if record is None else record._values["prefill_load_scale"]

    def __set__(self, record: Record, value: float) -> None:
        record._values = record._changed({self.name: value})


class KvRouterConfig(Record):
    """The settings of the KV-aware router.

    Parameters
    ----------
    overlap_score_weight : float, optional
        Old name of ``prefill_load_scale``, which it overrides; 0 also sets ``overlap_score_credit`` to 0. Settable.
    host_cache_hit_weight, disk_cache_hit_weight : float
        Credit for blocks in host memory, and on disk or beyond, in [0, 1]; only with ``router_lower_tiers``.
    router_temperature : float
        0: the cheapest worker. Above: workers are drawn with probability falling with their normalised cost.
    use_kv_events, durable_kv_events : bool
        Where a live index hears of blocks. No effect in a replay: events always arrive and nothing expires.
    router_replica_sync : bool
        Live routers only; no effect in a replay.
    router_track_active_blocks : bool
        Whether the cost has the part of blocks that running requests hold.
    router_track_output_blocks : bool
        Blocks of generated tokens in that part. No effect in a replay; needs ``router_track_active_blocks``.
    router_assume_kv_reuse : bool
        Whether equal prompt blocks of running requests count once; False counts each.
    router_track_prefill_tokens : bool
        Whether the cost has the part of prompt tokens that are still to be computed.
    router_prefill_load_model : {"none", "aic"}
        "aic": the prompt tokens of the oldest running prefill melt with time as an estimator says.
    router_snapshot_threshold, router_reset_states, router_ttl_secs : optional
        Live routers only; no effect in a replay.
    router_queue_threshold : float, optional
        A request waits in the router while every worker has more active prefill tokens than this many times its
        token budget. None: requests never wait.
    router_event_threads : int
        Live routers only; no effect in a replay.
    router_queue_policy : {"fcfs", "lcfs", "wspt"}
        Order of waiting requests: first come, last come, or weighted shortest prompt first.
    use_remote_indexer, serve_indexer : bool
        Live routers only; no effect in a replay.
    shared_cache_multiplier : float
        Credit for blocks of a shared cache, in [0, 1]. No effect in a replay.
    shared_cache_type : {"none", "hicache"}
        Live routers only; no effect in a replay.
    router_predicted_ttl_secs : float, optional
        Live routers only; no effect in a replay.
    overlap_score_credit : float
        How much a cached block lowers the prefill part, in [0, 1]. Settable.
    overlap_score_credit_decay : float
        How fast that credit falls on workers with more prefill work than the least loaded one. Settable.
    prefill_load_scale : float
        Factor of the prefill part. Settable.
    router_policy_config : str or os.PathLike, optional
        Policy file (see :class:`RouterPolicyConfig`), read at once.
    skip_initial_worker_wait : bool
        Live routers only; no effect in a replay.

    Raises
    ------
    ValueError
        For a value that is not allowed, or that does not go with another; the field, the value and what is allowed
        are named.
    """

    __slots__ = ("_policy",)

    overlap_score_weight = _OldWeight(NOT_NEGATIVE, "Old name of prefill_load_scale.", nullable=True)
    host_cache_hit_weight = Field[float](FRACTION, "Credit for blocks in host memory, with `router_lower_tiers`.")
    disk_cache_hit_weight = Field[float](FRACTION, "Credit for blocks on disk, with `router_lower_tiers`.")
    router_temperature = Field[float](NOT_NEGATIVE, "Temperature of the choice; 0 takes the cheapest.")
    use_kv_events = Field[bool](BOOL, "Index fed by KV events. " + _LIVE)
    durable_kv_events = Field[bool](BOOL, "Events through a durable stream. " + _LIVE)
    router_replica_sync = Field[bool](BOOL, "Routers tell each other of their load. " + _LIVE)
    router_track_active_blocks = Field[bool](BOOL, "Count blocks of running requests.")
    router_track_output_blocks = Field[bool](BOOL, "Count blocks of generated tokens. " + _LIVE)
    router_assume_kv_reuse = Field[bool](BOOL, "Equal blocks of running requests count once.")
    router_track_prefill_tokens = Field[bool](BOOL, "Count prompt tokens still to be computed.")
    router_prefill_load_model = Field[str](
        Choice("none", "aic", wrong="unknown prefill load model: '{value}', expected 'none' or 'aic'"),
        "Whether running prefills melt with time.",
    )
    router_snapshot_threshold = Field[int | None](_POSITIVE_U32, "Messages a snapshot. " + _LIVE, nullable=True)
    router_reset_states = Field[bool](BOOL, "Forget state at the start. " + _LIVE)
    router_ttl_secs = Field[float](NOT_NEGATIVE, "Life of blocks in an index without events. " + _LIVE)
    router_queue_threshold = Field[float | None](
        NOT_NEGATIVE, "Token budgets of prefill work at which a worker is busy.", nullable=True
    )
    router_event_threads = Field[int](_POSITIVE_U32, "Threads of the index. " + _LIVE)
    router_queue_policy = Field[str](
        Choice(*_QUEUE_POLICIES, wrong="unknown queue policy: '{value}', expected 'fcfs', 'lcfs', or 'wspt'"),
        "Order of waiting requests.",
    )
    use_remote_indexer = Field[bool](BOOL, "Ask another router's index. " + _LIVE)
    serve_indexer = Field[bool](BOOL, "Answer for other routers. " + _LIVE)
    shared_cache_multiplier = Field[float](FRACTION, "Credit for blocks of a shared cache. " + _LIVE)
    shared_cache_type = Field[str](
        Choice("none", "hicache", wrong="unknown shared_cache_type: '{value}', expected 'none' or 'hicache'"),
        "Kind of shared cache. " + _LIVE,
    )
    router_predicted_ttl_secs = Field[float | None](
        NOT_NEGATIVE, "Life of blocks that a routing decision predicts. " + _LIVE, nullable=True
    )
    overlap_score_credit = SettableField[float](FRACTION, "What a cached block takes off the prefill part.")
    overlap_score_credit_decay = SettableField[float](NOT_NEGATIVE, "Fall of that credit with prefill load.")
    prefill_load_scale = SettableField[float](NOT_NEGATIVE, "Factor of the prefill part.")
    router_policy_config = Field[str | None](FILE_PATH, "Policy file.", nullable=True)
    skip_initial_worker_wait = Field[bool](BOOL, "Start without workers. " + _LIVE)

    _policy: RouterPolicyConfig | None

    def __init__(
        self,
        overlap_score_weight: float | None = None,
        host_cache_hit_weight: float = 0.75,
        disk_cache_hit_weight: float = 0.25,
        router_temperature: float = 0.0,
        use_kv_events: bool = True,
        durable_kv_events: bool = False,
        router_replica_sync: bool = False,
        router_track_active_blocks: bool = True,
        router_track_output_blocks: bool = False,
        router_assume_kv_reuse: bool = True,
        router_track_prefill_tokens: bool = True,
        router_prefill_load_model: str = "none",
        router_snapshot_threshold: int | None = 1000000,
        router_reset_states: bool = False,
        router_ttl_secs: float = 120.0,
        router_queue_threshold: float | None = 16.0,
        router_event_threads: int = 4,
        router_queue_policy: str = "fcfs",
        use_remote_indexer: bool = False,
        serve_indexer: bool = False,
        shared_cache_multiplier: float = 0.0,
        shared_cache_type: str = "none",
        router_predicted_ttl_secs: float | None = None,
        *,
        overlap_score_credit: float = 1.0,
        overlap_score_credit_decay: float = 0.0,
        prefill_load_scale: float = 1.0,
        router_policy_config: str | os.PathLike[str] | None = None,
        skip_initial_worker_wait: bool = False,
    ) -> None:
        values = dict(locals())
        values.pop("__class__", None)
        self._init(values)
        self._policy = None
        self._load()

    # --- checks

    @classmethod
    def _validate(cls, values: dict[str, Any]) -> dict[str, Any]:
        weight = values["overlap_score_weight"]
        if weight is not None:                 # the old name wins over the new one
            try:
                weight = NOT_NEGATIVE(weight)
            except BadValue as bad:
                raise BadValue(("overlap_score_weight", bad.problems[0][1])) from None
            values["prefill_load_scale"] = weight
            if weight == 0.0:
                values["overlap_score_credit"] = 0.0
            values["overlap_score_weight"] = None
        return super()._validate(values)

    @classmethod
    def _finish(cls, values: dict[str, Any], names: list[str]) -> list[tuple[str, str]]:
        problems = []

        def rule(field: str, other: str, needed: str) -> None:
            problems.append((field, f"{field} requires {needed}, got {other}={values[other]!r}"))

        if values["durable_kv_events"] and not values["use_kv_events"]:
            rule("durable_kv_events", "use_kv_events", "use_kv_events=True")
        if values["router_track_output_blocks"] and not values["router_track_active_blocks"]:
            rule("router_track_output_blocks", "router_track_active_blocks", "router_track_active_blocks=True")
        if values["router_prefill_load_model"] != "none" and not values["router_track_prefill_tokens"]:
            rule("router_prefill_load_model", "router_track_prefill_tokens", "router_track_prefill_tokens=True")
        if values["use_remote_indexer"] and values["serve_indexer"]:
            problems.append(("serve_indexer", "use_remote_indexer and serve_indexer exclude each other, got both True"))
        if values["serve_indexer"] and values["overlap_score_credit"] == 0.0:
            rule("serve_indexer", "overlap_score_credit", "overlap_score_credit > 0")
        if values["router_predicted_ttl_secs"] is not None and not values["use_kv_events"]:
            rule("router_predicted_ttl_secs", "use_kv_events", "use_kv_events=True")
        return problems

    def _load(self) -> None:
        """Read the policy file, once per object."""
        if self.router_policy_config is not None:
            try:
                self._policy = RouterPolicyConfig.from_path(self.router_policy_config)
            except ValueError as error:
                raise self._error(BadValue(("router_policy_config", str(error)))) from None

    @classmethod
    def _build(cls, values: dict[str, Any], checked: bool = False) -> KvRouterConfig:
        record = super()._build(values, checked)
        record._policy = None
        return record

    # --- copies and JSON

    def copy(self) -> KvRouterConfig:
        """Make an independent copy; the policy file is not read again."""
        made = super().copy()
        made._policy = self._policy
        return made

    def replace(self, **changes: Any) -> KvRouterConfig:
        """Make a checked copy in which some fields have other values; None means None."""
        made = super().replace(**changes)
        if made.router_policy_config == self.router_policy_config:
            made._policy = self._policy
        else:
            made._load()
        return made

    def with_overrides(
        self,
        overlap_score_weight: float | None = None,
        *,
        overlap_score_credit: float | None = None,
        overlap_score_credit_decay: float | None = None,
        prefill_load_scale: float | None = None,
    ) -> KvRouterConfig:
        """Make a checked copy in which the fields that are not None here have these values."""
        changes = dict(locals())
        del changes["self"]
        return self.replace(**{name: value for name, value in changes.items() if value is not None})

    @staticmethod
    def from_json(config_json: str) -> KvRouterConfig:
        """Read the settings from a JSON object.

        Parameters
        ----------
        config_json : str
            The text of one JSON object; fields that it leaves out take their defaults.

        Returns
        -------
        KvRouterConfig

        Raises
        ------
        ValueError
            If the text is not JSON, or for an unknown field, a wrong type or a bad value.
        TypeError
            If `config_json` is not a string.
        """
        try:
            given = read_json(config_json)
            if not isinstance(given, dict):
                raise ValueError(f"invalid type: expected a JSON object of router settings, got {show(given)}")
            made = KvRouterConfig._build(KvRouterConfig._gather(given, ignore_unknown=False))
            made._load()
            return made
        except BadValue as bad:
            error = KvRouterConfig._error(bad)
        except ValueError as other:
            error = other
        raise ValueError(f"Failed to parse KvRouterConfig JSON: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """Give the fields as plain values that ``json`` can write."""
        return {name: value for name, value in self._values.items() if name != "overlap_score_weight"}

    def to_json(self) -> str:
        """Write every field as a JSON object that :meth:`from_json` reads back to equal settings."""
        return json.dumps(self.to_dict(), allow_nan=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return KvRouterConfig.from_json, (self.to_json(),)

    # --- queues

    def policy_profile(self, model_name: str | None = None) -> PolicyProfile:
        """Give the queues that these settings ask for.

        Parameters
        ----------
        model_name : str, optional
            Picks the profile of a model in the policy file.
        """
        if self._policy is None:
            return PolicyProfile.single(self.router_queue_threshold, self.router_queue_policy)
        return self._policy.profile(model_name, self.router_queue_threshold, self.router_queue_policy)


def replay_router_config(args: MockEngineArgs, config: KvRouterConfig | None = None) -> KvRouterConfig:
    """Give a replay's router settings: the engine's ``router_queue_policy`` wins over the router's own."""
    made = KvRouterConfig() if config is None else config.copy()
    if args.router_queue_policy is not None:
        made = made.replace(router_queue_policy=args.router_queue_policy)
    return made


def _derived(config: KvRouterConfig, **changes: Any) -> KvRouterConfig:
    """Change fields without the rules between fields, which concern what a user gives."""
    made = config.copy()
    made._values = {**made._values, **changes}
    return made


def prefill_router_config(args: MockEngineArgs, config: KvRouterConfig | None = None) -> KvRouterConfig:
    """Give the settings of the router before a prefill pool: the cost has its prefill part only."""
    return _derived(replay_router_config(args, config), router_track_active_blocks=False)


def decode_router_config(args: MockEngineArgs, config: KvRouterConfig | None = None) -> KvRouterConfig:
    """Give the settings of the router before a decode pool: the cost is the blocks of running requests."""
    return _derived(
        replay_router_config(args, config),
        overlap_score_credit=0.0,
        router_assume_kv_reuse=False,
        router_track_prefill_tokens=False,
        router_prefill_load_model="none",
    )
