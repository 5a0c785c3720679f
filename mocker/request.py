"""One request to an engine: `DirectRequest`."""

from __future__ import annotations

import uuid as uuid_module
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .fields import SIZE, TEXT, U32, BadValue, Field, Float, Int, Record, TokenIds, UuidValue


class DirectRequest(Record):
    """One request to an engine.

    Parameters
    ----------
    tokens : sequence of int or numpy.ndarray
        The prompt. A one-dimensional ``uint32`` array is kept without a copy, and must not be changed afterwards;
        anything else becomes such an array.
    max_output_tokens : int
        Tokens to generate.
    output_token_ids : sequence of int or numpy.ndarray, optional
        The very tokens that are generated. Their count has precedence over ``max_output_tokens``.
    uuid : uuid.UUID, int or str, optional
        The request's id; an engine makes one for a request that has none.
    dp_rank : int
        Data-parallel rank that the request is for.
    arrival_timestamp_ms : float, optional
        When the request arrives.
    priority, strict_priority : int
        Order in a router's queue. An engine reads ``priority`` with ``vllm_scheduling_policy="priority"``, where the
        smallest comes first; else engines do not read them.
    policy_class : str, optional
        The router's policy class.

    Raises
    ------
    ValueError
        For a value that is not allowed; a bad token's position is named.
    """

    __slots__ = ()

    tokens = Field[npt.NDArray[np.uint32]](TokenIds(), "The prompt.")
    max_output_tokens = Field[int](SIZE, "Tokens to generate.")
    output_token_ids = Field[npt.NDArray[np.uint32] | None](TokenIds(), "Tokens that are generated.", nullable=True)
    uuid = Field[uuid_module.UUID | None](UuidValue(), "The request's id.", nullable=True)
    dp_rank = Field[int](U32, "Data-parallel rank that the request is for.")
    arrival_timestamp_ms = Field[float | None](Float(), "When the request arrives.", nullable=True)
    priority = Field[int](Int(-(2**31), 2**31 - 1), "Order in a router's queue.")
    strict_priority = Field[int](U32, "Order in a router's queue, before all else.")
    policy_class = Field[str | None](TEXT, "The router's policy class.", nullable=True)

    def __init__(
        self,
        tokens: Sequence[int] | npt.NDArray[np.integer[Any]],
        max_output_tokens: int,
        output_token_ids: Sequence[int] | npt.NDArray[np.integer[Any]] | None = None,
        uuid: uuid_module.UUID | int | str | None = None,
        dp_rank: int = 0,
        arrival_timestamp_ms: float | None = None,
        priority: int = 0,
        strict_priority: int = 0,
        policy_class: str | None = None,
    ) -> None:
        self._init(locals())

    def router_priorities(self) -> tuple[float, int]:
        """Give ``(priority, strict_priority)`` as a router reads them: a negative priority counts as 0."""
        return float(max(self.priority, 0)), self.strict_priority

    def to_dict(self) -> dict[str, Any]:
        """Give the request in its JSON form: priorities of 0 and absent optional parts are left out."""
        values = dict(self._values)
        values["tokens"] = self.tokens.tolist()
        planned, uuid = self.output_token_ids, self.uuid
        values["output_token_ids"] = None if planned is None else planned.tolist()
        values["uuid"] = None if uuid is None else str(uuid)
        for name in ("output_token_ids", "policy_class"):
            if values[name] is None:
                del values[name]
        for name in ("priority", "strict_priority"):
            if values[name] == 0:
                del values[name]
        return values

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DirectRequest:
        """Read a request from the form of :meth:`to_dict`; unknown keys are ignored, with a warning in the log."""
        if not isinstance(data, Mapping):
            raise TypeError(f"from_dict() takes a mapping, got {type(data).__name__}")
        try:
            return cls._build(cls._gather(data))
        except BadValue as bad:
            raise cls._error(bad) from None

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        mine, its = self._values, other._values
        for name, value in mine.items():
            if isinstance(value, np.ndarray):
                if not np.array_equal(value, its[name]):
                    return False
            elif value != its[name]:
                return False
        return True

    def __repr__(self) -> str:
        words = [f"tokens=<{len(self.tokens)} tokens>", f"max_output_tokens={self.max_output_tokens}"]
        if self.output_token_ids is not None:
            words.append(f"output_token_ids=<{len(self.output_token_ids)} tokens>")
        for name in list(self._fields)[3:]:
            if self._values[name] != self._defaults[name]:
                words.append(f"{name}={self._values[name]!r}")
        return f"DirectRequest({', '.join(words)})"
