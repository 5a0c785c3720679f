"""Commands to an engine core and what they do: submission, and the hand-offs of disaggregated serving.

Names are the reference's (`scheduler/source_holds.rs`). `HandoffCommands` keeps the books that both engines need:
which hand-off belongs to which request, and in which role.
"""
from __future__ import annotations

import uuid as _uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import UUID

if TYPE_CHECKING:
    from .args import DirectRequest


@dataclass(frozen=True)
class SchedulerCommand:
    """A command to a core; made by its constructors."""

    op: str
    request: DirectRequest | None = None
    handoff_id: UUID | None = None

    def __post_init__(self) -> None:
        if self.handoff_id is not None and not isinstance(self.handoff_id, UUID):
            raise TypeError(f"handoff_id must be a uuid.UUID, got {self.handoff_id!r}")

    @staticmethod
    def Submit(request: DirectRequest) -> SchedulerCommand:  # noqa: N802 (the reference's names)
        """Queue a request."""
        return SchedulerCommand("submit", request)

    @staticmethod
    def SubmitHandoffPrefill(handoff_id: UUID, request: DirectRequest) -> SchedulerCommand:  # noqa: N802
        """Queue a request whose blocks are held when it is done."""
        return SchedulerCommand("submit_handoff_prefill", request, handoff_id)

    @staticmethod
    def ReleaseSource(handoff_id: UUID) -> SchedulerCommand:  # noqa: N802
        """Free a held source; one that is not done yet becomes an ordinary request."""
        return SchedulerCommand("release_source", None, handoff_id)

    @staticmethod
    def CancelSource(handoff_id: UUID) -> SchedulerCommand:  # noqa: N802
        """Free a held source, or cancel one that is not done."""
        return SchedulerCommand("cancel_source", None, handoff_id)

    @staticmethod
    def ReserveDestination(handoff_id: UUID, request: DirectRequest) -> SchedulerCommand:  # noqa: N802
        """Ask for room for a prompt that is computed elsewhere."""
        return SchedulerCommand("reserve_destination", request, handoff_id)

    @staticmethod
    def ActivateDestination(handoff_id: UUID) -> SchedulerCommand:  # noqa: N802
        """The prompt has arrived: the request may run."""
        return SchedulerCommand("activate_destination", None, handoff_id)

    @staticmethod
    def CancelDestination(handoff_id: UUID) -> SchedulerCommand:  # noqa: N802
        """Give up a destination, whether it waits, is reserved or runs."""
        return SchedulerCommand("cancel_destination", None, handoff_id)


@dataclass(frozen=True)
class SchedulerCommandEffects:
    """What a command did.

    Attributes
    ----------
    op : str
    result : tuple of (str, UUID), str or None
        ("submitted", uuid), ("destination_accepted", uuid), "applied", "noop"; None of a retry.
    lifecycle_events : list of dict
        In the recorded form.
    kv_events : list of dict
        Only of a retry: those of other commands come with the next pass, as in the reference.
    """

    op: str
    result: tuple[str, UUID] | str | None
    lifecycle_events: list[dict[str, Any]] = field(default_factory=list)
    kv_events: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The recorded form; UUIDs as their integer value."""
        out: dict[str, Any] = {"op": self.op}
        if isinstance(self.result, tuple):
            out["result"] = {self.result[0]: self.result[1].int}
        elif self.result is not None:
            out["result"] = self.result
        out.update(lifecycle=self.lifecycle_events, kv_events=self.kv_events)
        return out


class PendingOrder:
    """Order of the pending destinations by hand-off (`PendingDestinations`).

    A cancelled one leaves a gap, which the same hand-off fills if it comes again. Gaps are closed at the front, and
    everywhere when they are the larger part.
    """

    def __init__(self) -> None:
        self._queue: list[UUID] = []
        self._pending: set[UUID] = set()

    def add(self, handoff: UUID) -> int:
        """Queue a hand-off; its position among the pending ones."""
        at = len(self._pending)
        if len(self._queue) > at and handoff in self._queue:
            at = len(self._pending.intersection(self._queue[:self._queue.index(handoff)]))
        self._queue.append(handoff)
        self._pending.add(handoff)
        return at

    def retried(self, reserved: bool) -> None:
        """The first one was tried; `reserved`: it is pending no more."""
        while self._queue and self._queue[0] not in self._pending:
            del self._queue[0]
        if reserved:
            self._pending.discard(self._queue.pop(0))
            self._close_gaps()

    def cancel(self, handoff: UUID) -> None:
        """A hand-off is pending no more, if it was."""
        if handoff in self._pending:
            self._pending.discard(handoff)
            self._close_gaps()

    def _close_gaps(self) -> None:
        if len(self._queue) > 2 * len(self._pending):
            self._queue = [handoff for handoff in self._queue if handoff in self._pending]


class HandoffCommands:
    """The command half of a core. A subclass brings the compiled core (`_core`), the tables and the hooks below."""

    args: Any
    _core: Any
    _ids: dict[int, UUID]                      # handle -> request
    _slots: dict[UUID, tuple[int, int]]        # request -> (handle, slot)

    def _init_commands(self, order: PendingOrder | None = None) -> None:
        self._order = order                            # None: the compiled core keeps it
        self._sources: dict[UUID, UUID] = {}           # hand-off -> request, until it is released or cancelled
        self._destinations: dict[UUID, UUID] = {}      # hand-off -> request, until it ends
        self._handoff_of: dict[UUID, UUID] = {}        # request -> hand-off of either kind

    def receive(self, request: DirectRequest) -> UUID:
        """Queue a request; returns its UUID."""
        raise NotImplementedError

    def drop_request(self, uuid: UUID) -> bool:
        """Cancel a request, wherever it is."""
        raise NotImplementedError

    def drain_kv_events(self) -> list[dict[str, Any]]:
        """Take the KV events that no pass result took."""
        raise NotImplementedError

    def _submit_source(self, uuid: UUID, request: DirectRequest, handoff: UUID) -> None:
        raise NotImplementedError

    def _reserve_slot(self, uuid: UUID, request: DirectRequest, handoff: UUID) -> bool:
        raise NotImplementedError

    def _fresh_id(self, request: DirectRequest) -> UUID:
        uuid = request.uuid if request.uuid is not None else _uuid.uuid4()
        if uuid in self._slots:
            raise ValueError(f"request {uuid} is already active")
        return uuid

    def apply_command(self, command: SchedulerCommand,
                      allow_destination_admission: bool = True) -> SchedulerCommandEffects:
        """Apply a command.

        Parameters
        ----------
        command : SchedulerCommand
        allow_destination_admission : bool
            Whether a new destination may be reserved at once.

        Raises
        ------
        ValueError
            The command is refused; nothing is changed.
        """
        op, handoff, request = command.op, command.handoff_id, command.request
        if op == "submit" and request is not None:
            return SchedulerCommandEffects(op, ("submitted", self.receive(request)))
        if handoff is None:
            raise ValueError(f"command {op!r} needs a handoff_id")
        if op == "submit_handoff_prefill" and request is not None:
            uuid = self._fresh_id(request)
            if handoff in self._sources:
                raise ValueError(f"handoff HandoffId({handoff}) is already active")
            self._submit_source(uuid, request, handoff)
            self._sources[handoff] = uuid
            self._handoff_of[uuid] = handoff
            return SchedulerCommandEffects(op, ("submitted", uuid))
        if op == "reserve_destination" and request is not None:
            return self._reserve(handoff, request, allow_destination_admission)
        if op in ("release_source", "cancel_source"):
            return SchedulerCommandEffects(op, *self._end_source(handoff, op == "cancel_source"))
        if op == "activate_destination":
            holder = self._destinations.get(handoff)
            if holder is None or self._status(holder) != "reserved":
                return SchedulerCommandEffects(op, "noop")
            self._activate(holder)
            return SchedulerCommandEffects(op, "applied", self._retry())
        if op == "cancel_destination":
            if handoff not in self._destinations:
                return SchedulerCommandEffects(op, "noop")
            self.drop_request(self._destinations[handoff])
            return SchedulerCommandEffects(op, "applied", self._retry())
        raise ValueError(f"unknown or incomplete command {op!r}")

    def _reserve(self, handoff: UUID, request: DirectRequest, now: bool) -> SchedulerCommandEffects:
        uuid = self._fresh_id(request)
        holder = self._destinations.get(handoff)
        if holder is not None:
            state = "pending" if self._status(holder) == "pending" else "active"
            raise ValueError(f"destination handoff HandoffId({handoff}) is already {state}")
        if not self._reserve_slot(uuid, request, handoff):
            raise ValueError("destination prompt exceeds the KV pool capacity")
        self._destinations[handoff] = uuid
        self._handoff_of[uuid] = handoff
        if self._order is not None:
            self._core.hasten(self._slots[uuid][1], self._order.add(handoff))
        return SchedulerCommandEffects("reserve_destination", ("destination_accepted", uuid),
                                       self._retry() if now else [])

    def _activate(self, uuid: UUID) -> None:
        self._core.activate(self._slots[uuid][1])

    def _status(self, uuid: UUID) -> str:
        return str(self._core.request(self._slots[uuid][1])["status"])

    def _end_source(self, handoff: UUID, cancel: bool) -> tuple[str, list[dict[str, Any]]]:
        if handoff not in self._sources:
            return "noop", []
        uuid = self._sources.pop(handoff)
        if cancel or self._status(uuid) == "held":
            self.drop_request(uuid)
        else:                                  # released before it completed: from now on a plain request
            self._core.release(self._slots[uuid][1])
            del self._handoff_of[uuid]
        return "applied", self._retry()

    def _retry(self) -> list[dict[str, Any]]:
        found = self._core.retry()
        if self._order is not None:
            self._order.retried(found is not None)
        if found is None:
            return []
        return [{"destination_reserved": self._ids[found[0]].int, "transferable_prompt_tokens": found[1]}]

    def _forget(self, uuid: UUID) -> None:
        """A request is gone, and with it its hand-off."""
        del self._ids[self._slots.pop(uuid)[0]]
        handoff = self._handoff_of.pop(uuid, None)
        for table in (self._sources, self._destinations):
            if handoff is not None and table.get(handoff) == uuid:
                del table[handoff]
                if self._order is not None and table is self._destinations:
                    self._order.cancel(handoff)

    def retry_pending_destinations(self) -> SchedulerCommandEffects:
        """Try to reserve for the first pending destination; with the KV events since the last pass."""
        return SchedulerCommandEffects("retry_destinations", None, self._retry(), self.drain_kv_events())

    def _source_held(self, handle: int) -> dict[str, Any]:
        uuid = self._ids[handle]
        return {"source_held": uuid.int, "transfer_timing": {
            "mode": self.args.kv_transfer_timing_mode,
            "full_prompt_tokens": self._core.request(self._slots[uuid][1])["prompt"],
            "kv_bytes_per_token": self.args.kv_bytes_per_token, "bandwidth_gb_s": self.args.kv_transfer_bandwidth}}
