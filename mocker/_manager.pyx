"""KV manager as an object of its own: holds, releases, registers and evicts the blocks of one pool on request.

Answers to dynamo-mocker 1.3.0 `kv_manager/kvbm_backend.rs` (without its offload feature) over the block store of
kvbm-logical 1.3.0 with duplicate registrations refused. For embedders; the replay engine has a pool of its own.

A pool has `max_capacity` slots, each in one of three states:
- free;
- active: a partial block (key: uuid, one holder), a full block with at least one holder, or reserved;
- inactive: a full block without holders, found by its identity (PLH) and evictable.
A full block is registered under its PLH from `Use` or `Promote` until its eviction; holders name it by sequence hash.

Cost of `process`: O(blocks of the signal) dictionary operations, plus what `_evict` says for each eviction.
A signal that the reference would answer with a panic raises `ValueError` or `KeyError` before anything has changed.
"""
from libc.stdint cimport int32_t

from mocker._evict cimport EvictionOrder, Plh, evict_insert, evict_pop, evict_remove, evict_touch, plh_from_int

import numpy as np

from mocker.sequence import MoveBlock, PrefillCost

# What a block of a Use finds, decided before anything changes.
cdef enum:
    HIT_ACTIVE = 0    # held under this sequence hash: one more hold
    HIT_LOOKUP = 1    # found by its identity: inactive, or held under another sequence hash only
    HIT_PARTIAL = 2   # this partial block is held already
    FRESH_FULL = 3
    FRESH_PARTIAL = 4


cdef class _Reservation:
    """Slots taken from the pool and held by nobody yet."""
    cdef KvManager _manager
    cdef list _slots  # free for use by the reservation, the next one last

    def __cinit__(self):
        self._slots = []

    def __init__(self):
        raise TypeError("a KvManager makes its reservations")

    def __len__(self):
        return len(self._slots)

    def release(self):
        """Give back what has not been used; harmless if called again."""
        if self._manager is not None:
            self._manager._free.extend(self._slots)
            self._slots.clear()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.release()

    def __del__(self):
        self.release()


cdef class DecodeBlockReservation(_Reservation):
    """Blocks that a burst of output tokens may need; its length is the number of those left.

    Made by `KvManager.reserve_decode_blocks`. Reserved slots count as active until they are used or released.
    """


cdef class DestinationReservation(_Reservation):
    """Blocks for a prompt whose KV will be transferred: its cached prefix, held, and a slot for each other block.

    Made by `KvManager.reserve_destination`; `KvManager.activate_destination` turns it into ordinary holds, `release`
    cancels it. Its length is the number of slots to transfer.

    Attributes
    ----------
    layout : MoveBlock.Use or None
        The blocks of the prompt.
    """
    cdef list _prefix  # (sequence hash, slot) of each held block of the cached prefix
    cdef public object layout

    def __cinit__(self):
        self._prefix = []

    @property
    def transferable_prompt_tokens(self):
        """Tokens to transfer, rounded up to blocks."""
        return len(self._slots) * self._manager.block_size

    def release(self):
        """Give everything back, the held prefix from root to leaf as the reference does; harmless if called again."""
        for _, slot in self._prefix:
            self._manager._let_go(slot)
        self._prefix = []
        _Reservation.release(self)


cdef class KvManager:
    """Blocks of one simulated GPU rank.

    Parameters
    ----------
    max_capacity : int
        Blocks of the pool, at least 1.
    block_size : int
        Tokens a block: a power of two in 1..=1024.
    eviction_backend : {"lineage", "lru", "multi_lru"}
        Which inactive block goes first; see `_evict`.
    capture_events : bool
        Keep Stored and Removed events for `drain_events`.
    worker_id, dp_rank : int
        What the events say about their origin.

    Raises
    ------
    ValueError
        If an argument is out of range.
    """
    cdef readonly Py_ssize_t max_capacity
    cdef readonly Py_ssize_t block_size
    cdef readonly object worker_id
    cdef readonly object dp_rank
    cdef readonly bint capture_events
    cdef EvictionOrder _order
    cdef list _free           # free slots; which one is taken is invisible
    cdef object _holders      # int32 array: holders of the slot's full block; 0 = inactive, or no full block
    cdef int32_t[::1] _refs   # view of _holders
    cdef dict _partial        # uuid -> slot
    cdef dict _active         # sequence hash -> slots, one entry a hold
    cdef dict _registered     # PLH as int -> slot
    cdef list _identity       # slot -> (PLH as int, sequence hash at registration), None without a full block
    cdef list _events
    cdef object _next_event_id

    def __cinit__(self, max_capacity, block_size, *, eviction_backend="lineage", capture_events=False, worker_id=0,
                  dp_rank=0):
        if not 1 <= block_size <= 1024 or block_size & (block_size - 1):
            raise ValueError(f"block_size must be a power of two in 1..=1024, got {block_size}")
        if max_capacity < 1:
            raise ValueError(f"max_capacity must be at least 1, got {max_capacity}")
        self._order = EvictionOrder(max_capacity, eviction_backend)
        self.max_capacity, self.block_size = max_capacity, block_size
        self.worker_id, self.dp_rank, self.capture_events = worker_id, dp_rank, capture_events
        self._free = list(range(max_capacity - 1, -1, -1))
        self._holders = np.zeros(max_capacity, dtype=np.int32)
        self._refs = self._holders
        self._partial, self._active, self._registered = {}, {}, {}
        self._identity = [None] * max_capacity
        self._events = []
        self._next_event_id = 0

    # ---- slots

    cdef Plh _plh(self, int32_t slot):
        return plh_from_int(self._identity[slot][0])

    cdef int _hold(self, int32_t slot) except -1:
        """One more holder of a registered block; an inactive one leaves the eviction order and loses its place."""
        if self._refs[slot] == 0:
            evict_remove(&self._order.c, slot)
        self._refs[slot] += 1
        return 0

    cdef int _let_go(self, int32_t slot) except -1:
        """One holder less; without any, the block becomes inactive, as the newest in the eviction order."""
        self._refs[slot] -= 1
        if self._refs[slot] == 0:
            evict_insert(&self._order.c, slot, self._plh(slot))
        return 0

    cdef int _look_up(self, int32_t slot) except -1:
        """Hold a block that was found by its identity, which counts as an access."""
        self._hold(slot)
        evict_touch(&self._order.c, self._plh(slot))
        return 0

    cdef int _register(self, int32_t slot, object seq_hash, object plh) except -1:
        """Make a slot the full block of an identity that no other slot has, with one holder."""
        self._identity[slot] = (plh, seq_hash)
        self._registered[plh] = slot
        self._refs[slot] = 1
        self._active.setdefault(seq_hash, []).append(slot)
        evict_touch(&self._order.c, self._plh(slot))
        return 0

    cdef tuple _take(self, Py_ssize_t count):
        """Take slots, free ones first, then by eviction: (slots, evicted sequence hashes), or None if too few."""
        if count > len(self._free) + self._order.c.n:
            return None
        cdef Py_ssize_t from_free = min(count, <Py_ssize_t>len(self._free))
        cdef list slots = [self._free.pop() for _ in range(from_free)]
        cdef list evicted = []
        for _ in range(count - from_free):
            slot = evict_pop(&self._order.c)
            plh, seq_hash = self._identity[slot]
            del self._registered[plh]
            self._identity[slot] = None
            evicted.append(seq_hash)
            slots.append(slot)
        return slots, evicted

    # ---- events

    cdef _publish(self, object data):
        if not self.capture_events:
            return
        self._events.append({
            "event": {"data": data, "dp_rank": self.dp_rank, "event_id": self._next_event_id},
            "storage_tier": "device", "worker_id": self.worker_id})
        self._next_event_id += 1

    cdef _publish_stored(self, list blocks, object parent):
        """Publish [(sequence hash, local hash or None)] behind the block with sequence hash `parent`, and empty it."""
        if blocks:
            self._publish({"stored": {
                "blocks": [{"block_hash": seq_hash, "mm_extra_info": None, "tokens_hash": local or 0}
                           for seq_hash, local in blocks],
                "parent_hash": parent, "start_position": None}})
            blocks.clear()

    cdef _publish_removed(self, list seq_hashes):
        if seq_hashes:
            self._publish({"removed": {"block_hashes": seq_hashes}})

    def drain_events(self):
        """Return the events since the last call, oldest first, in the reference's JSON form, and forget them.

        Event ids count from 0 over the life of the manager. The list stays empty without `capture_events`.
        """
        events, self._events = self._events, []
        return events

    # ---- Use

    cdef _check_use(self, object signal):
        """Raise if a Use does not fit together."""
        full = sum(1 for block in signal.blocks if block.hash is not None)
        if len(signal.plhs) != full:
            raise ValueError(f"Use: {len(signal.plhs)} plhs for {full} full blocks")
        if len(signal.block_hashes) not in (0, full):
            raise ValueError(f"Use: {len(signal.block_hashes)} block hashes for {full} full blocks")
        if signal.token_ids is not None and len(signal.token_ids) != full:
            raise ValueError(f"Use: {len(signal.token_ids)} token id lists for {full} full blocks")
        if signal.parent is not None and signal.parent.hash is None:
            raise ValueError("Use: the parent must be a full block")

    cdef tuple _plan(self, object signal):
        """Decide what each block finds, and change nothing: ([(kind, block, PLH as int)], number of fresh blocks)."""
        cdef list plan = []
        cdef set fresh = set()  # keys that this signal itself brings
        cdef Py_ssize_t full = 0
        for block in signal.blocks:
            plh = None
            if block.hash is None:
                kind, key = (HIT_PARTIAL if block.uuid in self._partial else FRESH_PARTIAL), block.uuid
            else:
                plh = key = signal.plhs[full].value
                full += 1
                kind = HIT_ACTIVE if block.hash in self._active else (
                    HIT_LOOKUP if plh in self._registered else FRESH_FULL)
            if kind >= FRESH_FULL:
                if key in fresh:
                    raise ValueError(f"Use: the new block {block} occurs twice")
                fresh.add(key)
            plan.append((kind, block, plh))
        return plan, len(fresh)

    cdef list _hold_hits(self, list plan):
        """Hold the blocks that are there, left to right; the slot of each hit, None for the others."""
        cdef list slots = []
        for kind, block, plh in plan:
            slot = None
            if kind == HIT_ACTIVE:
                slot = self._active[block.hash][0]
                self._hold(slot)
            elif kind == HIT_LOOKUP:
                slot = self._registered[plh]
                self._look_up(slot)
            slots.append(slot)
        return slots

    cdef object _use(self, object signal, _Reservation reservation):
        self._check_use(signal)
        plan, n_fresh = self._plan(signal)
        if reservation is not None and n_fresh > len(reservation._slots):
            raise ValueError(f"Use: {n_fresh} new blocks, but only {len(reservation._slots)} are reserved")
        cdef list held = self._hold_hits(plan)
        cdef list evicted = []
        cdef list slots
        if reservation is not None:
            slots = reservation._slots
        else:
            taken = self._take(n_fresh)
            if taken is None:
                for slot in held:  # root first: a parent may become older than its child, as in the reference
                    if slot is not None:
                        self._let_go(slot)
                return None
            slots, evicted = taken
        self._commit_use(signal, plan, held, slots)
        self._publish_removed(evicted)  # after every Stored of the same signal
        return len(plan)

    cdef _commit_use(self, object signal, list plan, list held, list slots):
        """Record the holds, register the fresh blocks, and publish each run of them."""
        cdef list run = []  # fresh full blocks since the last hit
        cdef Py_ssize_t full = 0
        before = None if signal.parent is None else signal.parent.hash
        run_parent = before
        for (kind, block, plh), slot in zip(plan, held, strict=True):
            if kind == FRESH_PARTIAL:
                self._partial[block.uuid] = slots.pop()
            if block.hash is None:
                continue
            if kind == FRESH_FULL:
                if not run:
                    run_parent = before
                self._register(slots.pop(), block.hash, plh)
                run.append((block.hash, signal.block_hashes[full] if signal.block_hashes else None))
            else:
                self._publish_stored(run, run_parent)
                self._active.setdefault(block.hash, []).append(slot)
            before = block.hash
            full += 1
        self._publish_stored(run, run_parent)

    # ---- Deref, Promote

    cdef _deref(self, object signal):
        cdef dict wanted = {}
        for block in signal.blocks:
            wanted[block] = wanted.get(block, 0) + 1
        for block, count in wanted.items():
            held = block.uuid in self._partial if block.hash is None else len(self._active.get(block.hash, ()))
            if held < count:
                raise KeyError(f"Deref: {block} is held {int(held)} times, not {count}")
        for block in signal.blocks:
            if block.hash is None:
                self._free.append(self._partial.pop(block.uuid))
                continue
            holds = self._active[block.hash]
            self._let_go(holds.pop())
            if not holds:
                del self._active[block.hash]

    cdef bint _commit_full(self, int32_t slot, object seq_hash, object plh) except -1:
        """Make a slot a held full block; if the block is there already, hold that and free the slot. True if new."""
        if seq_hash in self._active:
            canonical = self._active[seq_hash][0]
            self._hold(canonical)
        elif plh in self._registered:
            canonical = self._registered[plh]
            self._look_up(canonical)
        else:
            self._register(slot, seq_hash, plh)
            return True
        self._free.append(slot)
        self._active.setdefault(seq_hash, []).append(canonical)
        return False

    cdef _promote(self, object signal):
        if signal.uuid not in self._partial:
            raise KeyError(f"Promote: no partial block {signal.uuid} is held")
        if self._commit_full(self._partial.pop(signal.uuid), signal.seq_hash, signal.plh.value):
            self._publish_stored([(signal.seq_hash, signal.block_hash)], signal.parent_hash)

    cdef object _process(self, object signal, _Reservation reservation):
        if isinstance(signal, MoveBlock.Use):
            return self._use(signal, reservation)
        if isinstance(signal, MoveBlock.Deref):
            self._deref(signal)
        elif isinstance(signal, MoveBlock.Promote):
            self._promote(signal)
        else:
            raise TypeError(f"expected a MoveBlock signal, got {type(signal).__name__}")
        return 1

    def process(self, signal):
        """Carry out a signal.

        Parameters
        ----------
        signal : MoveBlock.Use, MoveBlock.Deref or MoveBlock.Promote

        Returns
        -------
        int or None
            Use: the number of its blocks, all of them held now; or None if free and inactive blocks do not suffice.
            None changes no hold and publishes nothing, but inactive blocks that the signal had found are the newest
            in the eviction order afterwards, in signal order (a rule of the reference). Deref, Promote: 1.

        Raises
        ------
        ValueError
            Use: the number of plhs, block hashes or token id lists does not match the full blocks, the parent is
            partial, or a new block occurs twice. Nothing has changed.
        KeyError
            Deref: a block is not held so many times. Promote: the partial block is not held. Nothing has changed.
        """
        return self._process(signal, None)

    # ---- reservations

    def reserve_decode_blocks(self, count):
        """Take slots for the blocks that output tokens may open, evicting (and publishing Removed) now.

        Returns
        -------
        DecodeBlockReservation or None
            None, and nothing changed, if free and inactive blocks do not suffice.

        Raises
        ------
        ValueError
            If `count` is negative.
        """
        if count < 0:
            raise ValueError(f"count must be at least 0, got {count}")
        taken = self._take(count)
        if taken is None:
            return None
        self._publish_removed(taken[1])
        cdef DecodeBlockReservation reservation = DecodeBlockReservation.__new__(DecodeBlockReservation)
        reservation._manager, reservation._slots = self, taken[0]
        return reservation

    cdef _own(self, _Reservation reservation):
        if reservation is None or reservation._manager is not self:
            raise ValueError("the reservation is not one of this manager")

    def process_decode_signal(self, signal, DecodeBlockReservation reservation):
        """Carry out a signal of an output token; a Use takes its new blocks from the reservation.

        Raises
        ------
        ValueError
            If the reservation is of another manager or too small, or as for `process`. Nothing has changed.
        """
        self._own(reservation)
        return self._process(signal, reservation)

    def reserve_destination(self, sequence):
        """Hold the cached prefix of a prompt and take a slot for each other block, the partial one included.

        Returns
        -------
        DestinationReservation or None
            None if free and inactive blocks do not suffice; then inactive blocks of the prefix are the newest in the
            eviction order, from root to leaf, and nothing else has changed.
        """
        layout = sequence.prepare_allocation(sequence.num_input_tokens)
        cdef DestinationReservation reservation = DestinationReservation.__new__(DestinationReservation)
        reservation._manager, reservation.layout = self, layout
        if layout is None:
            return reservation
        for block, plh in zip(layout.blocks, layout.plhs):  # noqa: B905 - a partial block has no plh and comes last
            if block.hash in self._active:
                slot = self._active[block.hash][0]
                self._hold(slot)
            elif plh.value in self._registered:
                slot = self._registered[plh.value]
                self._look_up(slot)
            else:
                break
            reservation._prefix.append((block.hash, slot))
        taken = self._take(len(layout.blocks) - len(reservation._prefix))
        if taken is None:
            reservation.release()
            return None
        reservation._slots = taken[0]
        self._publish_removed(taken[1])
        return reservation

    cdef _check_destination(self, DestinationReservation reservation):
        """Raise if the layout of a reservation and what it holds do not fit together."""
        layout, prefix = reservation.layout, reservation._prefix
        if len(layout.blocks) != len(prefix) + len(reservation._slots):
            raise ValueError(f"destination: {len(layout.blocks)} blocks, but {len(prefix)} cached and "
                             f"{len(reservation._slots)} reserved")
        self._check_use(layout)
        for block, (seq_hash, _) in zip(layout.blocks, prefix):  # noqa: B905 - the prefix may be shorter
            if block.hash != seq_hash:
                raise ValueError(f"destination: cached block {seq_hash} is not the {block} of the layout")
        partial = [block.uuid for block in layout.blocks if block.hash is None]
        if len(set(partial)) != len(partial) or any(uuid in self._partial for uuid in partial):
            raise ValueError("destination: a partial block is held already")

    def activate_destination(self, DestinationReservation reservation):
        """Turn a reservation into holds of its blocks, registered and published where they are new.

        A block that someone else has registered meanwhile is held instead of the reserved slot, which becomes free.
        The reservation is empty afterwards.

        Raises
        ------
        ValueError
            If the reservation is of another manager, was used or released, or does not match its layout. Nothing has
            changed.
        """
        self._own(reservation)
        layout = reservation.layout
        if layout is None:
            return
        self._check_destination(reservation)
        cdef list run = []
        cdef list prefix = reservation._prefix
        cdef list slots = reservation._slots
        cdef Py_ssize_t i
        before = run_parent = None if layout.parent is None else layout.parent.hash
        slots.reverse()
        for i, block in enumerate(layout.blocks):
            if block.hash is None:
                self._partial[block.uuid] = slots.pop()
                continue
            if i < len(prefix):
                self._active.setdefault(block.hash, []).append(prefix[i][1])
            elif self._commit_full(slots.pop(), block.hash, layout.plhs[i].value):
                if not run:
                    run_parent = before
                run.append((block.hash, layout.block_hashes[i] if layout.block_hashes else None))
            else:
                self._publish_stored(run, run_parent)
            before = block.hash
        self._publish_stored(run, run_parent)
        reservation._prefix = []

    # ---- state

    def num_active_blocks(self):
        """Blocks that are neither free nor inactive, reserved ones included."""
        return self.max_capacity - len(self._free) - self._order.c.n

    def num_active_block_refs(self):
        """Holds by signals: one a partial block, one a holder of a full block; reservations do not count."""
        return len(self._partial) + sum(map(len, self._active.values()))

    def num_inactive_blocks(self):
        """Cached blocks that nobody holds."""
        return self._order.c.n

    def get_active_perc(self):
        """Share of the pool that is active, 0..1."""
        return self.num_active_blocks() / self.max_capacity

    @property
    def eviction_backend(self):
        """Name of the eviction order."""
        return self._order.backend

    @property
    def holders(self):
        """Holders of each slot's full block: int32 array, shape (max_capacity,); read only."""
        view = self._holders.view()
        view.flags.writeable = False
        return view

    def get_prefill_cost(self, sequence):
        """Return the `PrefillCost` of a sequence: what its longest cached prefix leaves to be done. Changes nothing.

        Blocks count as cached while they are registered, and as active while a signal holds them; a hold by a
        destination reservation alone does not. Generated blocks may hit too, but tokens are capped by the prompt.
        """
        cdef Py_ssize_t cached = 0
        cdef Py_ssize_t active = 0
        blocks = sequence.unique_blocks
        if sequence.enable_prefix_caching:
            for block, plh in zip(blocks, sequence.positional_lineage_hashes):  # noqa: B905 - a partial one comes last
                if block.hash in self._active:
                    active += 1
                elif plh.value not in self._registered:
                    break
                cached += 1
        prompt = sequence.num_input_tokens
        cached_tokens = min(cached * self.block_size, prompt)
        return PrefillCost(len(blocks) - cached, prompt - cached_tokens, cached_tokens,
                           min(active * self.block_size, prompt))
