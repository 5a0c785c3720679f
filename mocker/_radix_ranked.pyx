# cython: language_level=3
"""Eviction from SGLang's radix tree by a score of the user's.

When a request gives its pages back, those that nobody else holds are the end of its sequence; each stretch of them
with equally many hits is scored once. Of the leaves that nobody holds the one with the lowest score is evicted, of
equal ones the longest unvisited. A node that becomes a leaf takes over the score of the evicted child, if that is
higher.

The tree's heap stays empty; that of `_ranks` takes its place, where nodes that somebody holds or that have children
stay until they come to the top. Costs: a score for each stretch given back, O(log nodes) for each leaf in or out.
"""
from libc.math cimport isnan

from mocker._common cimport ERR_HOOK, ERR_OK, NIL, int32_t, int64_t
from mocker._hooks cimport Hook
from mocker._radix cimport Node, Radix
from mocker._ranks cimport rank_gone, rank_put, rank_remove, ranks_reserve


cdef int radix_rank(Radix* t, Hook score, const double* now) noexcept nogil:
    """Let a score, if there is one, say what an empty tree evicts; `now` is where the engine keeps the time."""
    t.ranks.score, t.ranks.now = score, now
    return ERR_OK if score.ask == NULL else ranks_reserve(&t.ranks, t.nodes_used)


cdef void ranked_put(Radix* t, int32_t node) noexcept nogil:
    """Queue a leaf that nobody holds, by its score and its stamp."""
    rank_put(&t.ranks, node, t.nodes[node].stamp)
    t.error = t.error or t.ranks.error


cdef int32_t ranked_first(Radix* t) noexcept nogil:
    """The leaf to evict, NIL if there is none."""
    cdef int32_t node
    while t.ranks.heap_used > 0:
        node = t.ranks.heap[0]
        if t.nodes[node].lock == 0 and t.nodes[node].children == 0:
            return node
        rank_remove(&t.ranks, node)            # it comes back when it is given back, or its last child goes
    return NIL


cdef void ranked_gone(Radix* t, int32_t node, int32_t up) noexcept nogil:
    """A leaf below `up` is evicted."""
    if t.ranks.of[node].key > t.ranks.of[up].key:
        rank_remove(&t.ranks, up)
        t.ranks.of[up].key = t.ranks.of[node].key
    rank_gone(&t.ranks, node)


cdef void ranked_release(Radix* t, int32_t node) noexcept nogil:
    """Score what nobody holds any more of the path to a node that a request has given back."""
    cdef int64_t[5] facts
    cdef int32_t at = node, up
    cdef double score
    cdef Node* x
    if node == 0:
        return
    while at != 0:
        t.ranks.of[at].releases += 1
        at = t.nodes[at].parent
    t.ranks.releases += 1
    while node != 0 and t.nodes[node].lock == 0:
        x = &t.nodes[node]
        at, up = node, x.parent
        while up != 0 and t.nodes[up].lock == 0 and t.ranks.of[up].releases == t.ranks.of[node].releases:
            at, up = up, t.nodes[up].parent
        facts[0], facts[1] = <int64_t>(t.ranks.now[0] * 1000.0), t.ranks.releases
        facts[2], facts[3] = t.nodes[at].start, x.end - t.nodes[at].start
        facts[4] = t.ranks.of[node].releases - 1
        score = t.ranks.score.ask(t.ranks.score.context, facts)
        if isnan(score):
            t.error = t.error or ERR_HOOK
            score = 0.0
        while node != up:
            rank_remove(&t.ranks, node)
            t.ranks.of[node].key = score
            if t.nodes[node].children == 0:
                ranked_put(t, node)
            node = t.nodes[node].parent
