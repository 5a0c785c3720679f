"""Settings of the KV-aware router.

:class:`KvRouterConfig` has the names, order, defaults and rules of the reference's Python class. Fields that only a
live router reads are accepted, checked and kept, and their text here says so: in a replay they change nothing.
"""

from __future__ import annotations

import json
import os
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
from .router_queues import QUEUE_POLICIES, PolicyProfile, RouterPolicyConfig

__all__ = [
    "KvRouterConfig",
    "decode_router_config",
    "prefill_router_config",
    "replay_router_config",
]

_POSITIVE_U32 = Int(1, U32_MAX)
_LIVE = "Live routers only; no effect in a replay."


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
        Choice(*QUEUE_POLICIES, wrong="unknown queue policy: '{value}', expected 'fcfs', 'lcfs', or 'wspt'"),
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
