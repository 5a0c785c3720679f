"""One simulated SGLang engine rank, token by token: queue policies, chunked prefill, decode, retraction, events.

Without speculation and hand-off. Slow and literal: every token has a slot, every node its own time, every walk
begins at the root.
"""

from dataclasses import dataclass, field

from . import clock
from .sequence import chain_hash, tokens_hash


@dataclass(eq=False)
class Node:
    parent: "Node | None"
    key: list[int]
    slots: list[int]
    time: int
    lock: int = 0
    children: dict[tuple[int, ...], "Node"] = field(default_factory=dict)


class Tree:
    """Cached text by pages, the free slots, and the clock of its visits."""

    def __init__(self, total: int, page: int) -> None:
        self.page = page
        self.free = list(range(total - 1, -1, -1))
        self.ticks = 0
        self.root = Node(None, [], [], 0)

    def now(self) -> int:
        self.ticks += 1
        return self.ticks

    def nodes(self) -> list[Node]:
        found, todo = [], list(self.root.children.values())
        while todo:
            found.append(todo.pop())
            todo += found[-1].children.values()
        return found

    @property
    def evictable(self) -> int:
        return sum(len(n.key) for n in self.nodes() if n.lock == 0)

    def take(self, count: int) -> list[int] | None:
        if len(self.free) < count:
            return None
        cut = len(self.free) - count
        taken, self.free = self.free[cut:], self.free[:cut]
        return taken

    def _common(self, a: list[int], b: list[int]) -> int:
        at = 0
        while at + self.page <= min(len(a), len(b)) and a[at:at + self.page] == b[at:at + self.page]:
            at += self.page
        return at

    def _child(self, node: Node, text: list[int]) -> Node | None:
        return node.children.get(tuple(text[:self.page]))

    def _split(self, node: Node, at: int) -> Node:
        upper = Node(node.parent, node.key[:at], node.slots[:at], node.time, node.lock)
        upper.parent.children[tuple(node.key[:self.page])] = upper
        node.key, node.slots, node.parent = node.key[at:], node.slots[at:], upper
        upper.children[tuple(node.key[:self.page])] = node
        return upper

    def match(self, text: list[int]) -> tuple[int, Node]:
        now, node, done = self.now(), self.root, 0
        while done < len(text):
            child = self._child(node, text[done:])
            if child is None:
                break
            common = self._common(child.key, text[done:])
            done += common
            if common < len(child.key):
                return done, self._split(child, common) if common else node
            node = child
            node.time = now
        return done, node

    def match_length(self, text: list[int]) -> int:
        node, done = self.root, 0
        while done < len(text):
            child = self._child(node, text[done:])
            if child is None:
                break
            common = self._common(child.key, text[done:])
            done += common
            if common < len(child.key):
                break
            node = child
        return done

    def insert(self, text: list[int], slots: list[int]) -> None:
        text = text[:len(text) // self.page * self.page]
        now, node, done = self.now(), self.root, 0
        while done < len(text):
            child = self._child(node, text[done:])
            common = 0 if child is None else self._common(child.key, text[done:])
            if child is None or common < len(child.key):
                if child is not None:
                    node = self._split(child, common)
                    done += common
                if done < len(text):
                    new = Node(node, text[done:], slots[done:len(text)], self.now())
                    node.children[tuple(new.key[:self.page])] = new
                return
            done += common
            node = child
            node.time = now

    def path(self, node: Node) -> list[int]:
        slots: list[int] = []
        while node is not self.root:
            slots = node.slots + slots
            node = node.parent
        return slots

    def lock(self, node: Node, by: int) -> None:
        while node is not self.root:
            node.lock += by
            node = node.parent

    def _first(self, leaves: list[Node]) -> Node:
        return min(leaves, key=lambda n: n.time)

    def evict(self, want: int) -> list[int]:
        gone: list[int] = []
        while len(gone) < want:
            leaves = [n for n in self.nodes() if not n.children and n.lock == 0]
            if not leaves:
                break
            victim = self._first(leaves)
            gone += victim.slots
            self.free += victim.slots
            del victim.parent.children[tuple(victim.key[:self.page])]
        return gone


@dataclass(eq=False)
class Request:
    uuid: int
    prompt: list[int]
    plan: list[int]
    outputs: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)  # of the materialised tokens
    node: Node | None = None
    cached: int = 0
    reserved: int = 0

    @property
    def text(self) -> list[int]:
        return self.prompt + self.outputs

    @property
    def left(self) -> int:
        return len(self.plan) - len(self.outputs)


class SglangModel:
    """Takes the arguments of a script; requests must have planned outputs."""

    def __init__(self, args: dict, worker_id: int = 0) -> None:
        sglang = args.get("sglang") or {}
        self.page: int = args.get("block_size") or sglang.get("page_size") or 1
        self.total = args.get("num_gpu_blocks", 16384) * self.page
        self.max_seqs = args.get("max_num_seqs", 256)
        self.max_seqs = 2**64 if self.max_seqs is None else self.max_seqs
        self.max_prefill = sglang.get("max_prefill_tokens", 16384)
        self.chunk = sglang.get("chunked_prefill_size", 8192)
        self.clip = sglang.get("clip_max_new_tokens", 4096)
        self.lpm = sglang.get("schedule_policy") == "lpm"
        self.speedup = args.get("speedup_ratio", 1.0)
        self.decode_speedup = self.speedup * args.get("decode_speedup_ratio", 1.0)
        self.init_ratio = self.ratio = 0.7 * sglang.get("schedule_conservativeness", 1.0)
        self.min_ratio = self.init_ratio * 0.14
        self.step = (self.init_ratio - self.min_ratio) / 600.0
        self.worker_id = worker_id
        self.tree = Tree(self.total, self.page)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.hash_of: dict[int, int] = {}  # slot -> hash of the page that it ends
        self.refs: dict[int, int] = {}
        self.events: list[dict] = []
        self.next_event = 0
        self.output: list[list] = []

    def is_empty(self) -> bool:
        return not self.waiting and not self.running

    def receive(self, request: dict) -> None:
        self.waiting.append(Request(request["uuid"], list(request["tokens"]), list(request["output_token_ids"])))

    # -- events -----------------------------------------------------------------------------------------------------

    def _publish(self, data: dict) -> None:
        self.events.append({"worker_id": self.worker_id, "storage_tier": "device",
                            "event": {"event_id": self.next_event, "data": data, "dp_rank": 0}})
        self.next_event += 1

    def _stored(self, text: list[int], slots: list[int], first_new: int) -> None:
        page, full = self.page, min(len(text), len(slots)) // self.page * self.page
        blocks, first_parent = [], None
        for start in range(first_new // page * page, full, page) if first_new < full else ():
            slot = slots[start + page - 1]
            if slot in self.hash_of:
                continue
            local = tokens_hash(text[start:start + page])
            parent = self.hash_of.get(slots[start - 1]) if start else None
            name = local if parent is None else chain_hash(parent, local)
            self.hash_of[slot] = name
            self.refs[name] = self.refs.get(name, 0) + 1
            if self.refs[name] == 1 and not blocks:
                first_parent = parent
            if self.refs[name] == 1 or blocks:
                blocks.append({"block_hash": name, "tokens_hash": local, "mm_extra_info": None})
        if blocks:
            self._publish({"stored": {"parent_hash": first_parent, "start_position": None, "blocks": blocks}})

    def _removed(self, slots: list[int]) -> None:
        gone = []
        for slot in slots:
            name = self.hash_of.pop(slot, None)
            if name in self.refs:
                self.refs[name] -= 1
                if self.refs[name] == 0:
                    del self.refs[name]
                    gone.append(name)
        if gone:
            self._publish({"removed": {"block_hashes": gone}})

    def _free(self, slots: list[int]) -> None:
        self.tree.free += slots
        self._removed(slots)

    def _evict(self, want: int) -> None:
        if want > 0:
            self._removed(self.tree.evict(want))

    # -- phases -----------------------------------------------------------------------------------------------------

    def _floor(self, tokens: int) -> int:
        return tokens // self.page * self.page

    def _ceil(self, tokens: int) -> int:
        return -(-tokens // self.page) * self.page

    def _order(self) -> None:
        if not self.lpm or len(self.waiting) > 128:
            return
        fresh, scored = Tree(0, self.page), []
        for r in self.waiting:
            prefix, late = self.tree.match_length(r.text), False
            if prefix <= 32:
                late = fresh.match_length(r.text) >= 32
                if not late:
                    fresh.insert(r.text, list(range(len(r.text))))
            scored.append((late, -prefix, r))
        self.waiting = [r for _, _, r in sorted(scored, key=lambda s: s[:2])]

    def _extra(self) -> int:
        return sum(max(r.reserved - len(r.slots), 0) for r in self.waiting + self.running)

    def _allocate(self, r: Request, end: int) -> int | None:
        """Slots up to token `end`; the tokens that it had, or None."""
        done, text = len(r.slots), r.text[:end]
        self._evict(end - done - len(self.tree.free))
        if done:
            fresh = self.tree.take(end - done)
            if fresh is None:
                return None
        else:
            done, node = self.tree.match(text)
            fresh = self.tree.take(end - done)
            if fresh is None:
                return None
            r.node, r.slots = node, self.tree.path(node)
            self.tree.lock(node, 1)
        r.slots = r.slots + fresh
        self._stored(text, r.slots, done)
        return done

    def _admit(self) -> list[tuple[Request, int, int]]:
        reserved = sum((min(r.left, self.clip) * self.ratio for r in self.running), 0.0)
        total = float(max(len(self.tree.free) + self.tree.evictable - self._extra(), 0)) - reserved
        prefill, chunks, admitted = self.max_prefill, self.chunk, []
        while len(admitted) < self.max_seqs - len(self.running) and self.waiting and self._may_admit():
            r = self.waiting[0]
            extend = len(r.text) - len(r.slots)
            chunk = extend if extend <= self.chunk else min(self._floor(chunks), extend)
            charged = self._ceil(chunk)
            out = min(r.left, self.clip) if chunk == extend else 0
            if chunk == 0 or charged + out >= total or charged > prefill or charged > chunks:
                break
            before = r.reserved
            had = self._allocate(r, len(r.slots) + chunk)
            if had is None:
                self.ratio = self.init_ratio
                break
            self.waiting.pop(0)
            r.reserved = self._ceil(len(r.slots))
            admitted.append((r, had, chunk))
            total -= r.reserved - before + out
            prefill -= charged
            chunks -= charged
            if chunks <= 0:
                break
        return admitted

    def _cache(self, r: Request) -> None:
        full = self._floor(len(r.slots))
        if full > r.cached:
            text = r.text[:full]
            self._stored(text, r.slots, r.cached)
            self.tree.insert(text, r.slots)
            _, node = self.tree.match(text)
            self.tree.lock(node, 1)
            self.tree.lock(r.node, -1)
            r.node, r.cached = node, full

    def _finish(self, r: Request) -> None:
        full, node = self._floor(len(r.text)), r.node
        self._free(r.slots[full:])
        if full:
            text = r.text[:full]
            self._stored(text, r.slots[:full], r.cached)
            self.tree.insert(text, r.slots)
            node = self.tree.match(text)[1]
            kept = self.tree.path(node)
            self._free([s for at in range(0, full, self.page) for s in r.slots[at:at + self.page]
                        if kept[at + self.page - 1] != r.slots[at + self.page - 1]])
        self._release(r, node)

    def _release(self, r: Request, node: Node) -> None:
        """A request gives back the path to a node, which it locks as far as its own."""
        self.tree.lock(r.node, -1)

    def _may_admit(self) -> bool:
        """Whether the head of the queue may be looked at."""
        return True

    def _victim(self) -> Request:
        return min(self.running, key=lambda r: len(r.outputs))

    def _make_room(self) -> list[Request]:
        retracted = []
        while True:
            actual = len(self.tree.free) + self.tree.evictable
            logical = max(actual - sum(max(r.reserved - len(r.slots), 0) for r in self.running), 0)
            growth = sum(max(self._ceil(len(r.text) + 1) - r.reserved, 0) for r in self.running)
            if (actual >= len(self.running) and logical >= growth) or len(self.running) <= 1:
                break
            victim = self._victim()
            self.running.remove(victim)
            self._free(victim.slots[victim.cached:])
            self._release(victim, victim.node)
            victim.slots, victim.node, victim.cached, victim.reserved = [], None, 0, 0
            retracted.append(victim)
        self._evict(len(self.running) - len(self.tree.free))
        return retracted

    def _decode(self, start: float) -> tuple[float, list[Request]]:
        self.output = []
        if not self.running:
            return start, []
        retracted = self._make_room()
        context = sum(len(r.text) for r in self.running)
        fresh = self.tree.take(len(self.running))
        if fresh is None:
            return start, retracted
        ns = clock.scaled_ns(clock.predict_decode_ms(len(self.running), min(context, self.total), self.total),
                             self.decode_speedup)
        done = []
        for r, slot in zip(self.running, fresh, strict=True):
            if len(r.text) + 1 > r.reserved:
                r.reserved += self.page
            r.slots.append(slot)
            r.outputs.append(r.plan[len(r.outputs)])
            self.output.append([r.uuid, r.outputs[-1], r.left == 0, False, None])
            if r.left == 0:
                done.append(r)
            else:
                self._cache(r)
        self.running = [r for r in self.running if r.left]
        for r in done:
            self._finish(r)
        return clock.advance(start, ns), retracted

    def execute_pass(self, now: float) -> dict:
        """One pass: the parts of its recorded form that are not metrics of queues."""
        self._order()
        admitted = self._admit()
        start = now
        if admitted:
            n = len(admitted)
            isl, prefix = sum(len(r.slots) for r, _, _ in admitted) // n, sum(had for _, had, _ in admitted) // n
            start = clock.advance(now, clock.scaled_ns(clock.predict_prefill_ms(n, isl, prefix), self.speedup))
        for r, _, _ in admitted:
            if len(r.slots) < len(r.text):
                self._cache(r)
                self.waiting.insert(0, r)
            else:
                self.running.append(r)
        end, retracted = self._decode(start)
        self.waiting = retracted + self.waiting
        if retracted:
            self.ratio = self.init_ratio
        self.ratio = max(self.ratio - self.step, self.min_ratio)
        used = (self.total - len(self.tree.free) + self._extra()) % 2**64
        events, self.events = self.events, []
        return {
            "start_ms": now, "end_ms": end, "admissions": [[r.uuid, had] for r, had, _ in admitted],
            "output": self.output, "kv_events": events, "active": -(-used // self.page),
            "running": len(self.running), "waiting": len(self.waiting),
            "hit": sum(had for _, had, _ in admitted), "all": sum(had + chunk for _, had, chunk in admitted),
        }
