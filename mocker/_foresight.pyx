# cython: language_level=3
"""Passes that are known before they happen: where nobody can say when a worker's next request comes.

In a closed loop a request comes when another has ended, maybe on another worker; to a decode worker of two pools after
a prefill pass. So a worker that only decodes does not run ahead: the ends of its passes up to the next that is not
plain are worked out, its event is the last of them, and they happen then. Whoever comes before meets the worker in one
of them: those that have not begun are forgotten. SGLang's cores can do that (`sgl_foresee`, `sgl_follow`). O(passes) in
vector instructions, O(running) for all of them, O(workers) for whoever comes.
"""
from libc.math cimport INFINITY
from libc.stdlib cimport free

from mocker._common cimport int64_t
from mocker._heap cimport heap_earlier, heap_pop, order_of
from mocker._sglang cimport SglangCore, sgl_follow, sgl_foresee
from mocker._workers cimport ROUND, View


cdef class Foresight(Lanes):
    """Workers whose passes may be foreseen; arguments as of `Workers`."""

    def __dealloc__(self):
        free(self.events.items)

    cdef void foresee(self, int64_t worker) noexcept nogil:
        """A worker has begun a pass: find out when those after it end, as long as they are plain."""
        cdef View* c = &self.views[worker]
        cdef SglangCore* g = <SglangCore*>self.cores[worker]
        cdef int64_t m = sgl_foresee(g, c.end_ms, INFINITY, self.cap) if c.steady else 0
        if m > 0:
            c.foreseen = m
            c.end_ms, c.last_start = g.ends[m], g.ends[m - 1]

    cdef void fulfil(self, int64_t worker) noexcept nogil:
        """All of the passes foreseen have ended."""
        sgl_follow(<SglangCore*>self.cores[worker], self.views[worker].foreseen)
        self.views[worker].foreseen = 0

    cdef void meet(self, int64_t worker, double at, bint begun) noexcept nogil:
        """Of the passes foreseen those happen that begin before `at`, or (`begun`) then; the last of them is under way.

        If it ends at `at`, where nothing else ends any more, the worker is idle.
        """
        cdef View* c = &self.views[worker]
        cdef SglangCore* g = <SglangCore*>self.cores[worker]
        cdef int64_t i, m = 0
        while m < c.foreseen and (g.ends[m] < at or (begun and g.ends[m] == at)):
            m += 1
        self.cut(worker, m)
        for i in range(self.events.used):
            if self.events.items[i].second % ROUND == worker:
                heap_earlier(&self.events, i, c.end_ms, order_of(c.last_start), self.events.items[i].second)
                break
        if c.end_ms <= at and not begun:
            heap_pop(&self.events)
            self.busy[worker] = 0

    cdef void cut(self, int64_t worker, int64_t m) noexcept nogil:
        """The first `m` of the passes foreseen happen, and the others do not."""
        cdef View* c = &self.views[worker]
        cdef SglangCore* g = <SglangCore*>self.cores[worker]
        cdef double end = g.ends[m]
        if m > 0:
            sgl_follow(g, m)
        c.foreseen = 0
        self.look(worker)
        c.end_ms = end
