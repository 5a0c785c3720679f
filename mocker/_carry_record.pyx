# cython: language_level=3
"""State of a recording: every array that a `Recorder` frees. O(bins x workers + entries of the pass log)."""
from libc.stdlib cimport free

from mocker._carry cimport COPY, LOAD, Carrier, carry, carry_array
from mocker._common cimport int64_t
from mocker._record cimport Cell, Logged, Timeline, Track


cdef void timeline_carry(Carrier* io, Timeline* t) noexcept nogil:
    cdef int64_t w, at
    cdef Track* x
    carry(io, t, sizeof(Timeline))
    carry_array(io, <void**>&t.tracks, t.workers, t.tracks_cap, sizeof(Track))
    if t.tracks == NULL:
        t.workers = 0
    for w in range(t.workers):
        x = &t.tracks[w]
        at = x.cell - x.cells if x.cell != NULL else 0         # of a loaded one both point where they did
        carry_array(io, <void**>&x.cells, t.bins, t.bins, sizeof(Cell))
        if io.mode == LOAD or io.mode == COPY:
            x.cell = x.cells + at if x.cell != NULL and x.cells != NULL else NULL
    carry_array(io, <void**>&t.queued, t.bins, t.bins, sizeof(double))
    carry_array(io, <void**>&t.disk, t.bins, t.bins, sizeof(double))
    carry_array(io, <void**>&t.remote, t.bins, t.bins, sizeof(double))
    carry_array(io, <void**>&t.log, t.log_used, t.log_cap, sizeof(Logged))


cdef void timeline_free(Timeline* t) noexcept nogil:
    """Free what a recording owns."""
    cdef int64_t w
    for w in range(t.workers):
        free(t.tracks[w].cells)
    free(t.tracks)
    free(t.queued)
    free(t.disk)
    free(t.remote)
    free(t.log)
