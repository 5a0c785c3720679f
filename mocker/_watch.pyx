# cython: language_level=3
"""What a planner is told at a tick: the forward-pass metrics of every pass since the last one, and the traffic.

Answers to `TrafficAccumulator` in `replay/offline/components/types.rs` and to the metric buffers beside it. O(1) a
pass, a request and an admission; memory: 120 bytes a pass between two ticks.
"""
from libc.math cimport isfinite, isnan
from libc.stdlib cimport free

import numpy as np

from mocker._common cimport grown, int64_t
from mocker._core cimport Spread

NOTE = np.dtype([
    ("worker_id", np.int64), ("wall_time", np.float64), ("num_prefill_requests", np.int64),
    ("sum_prefill_tokens", np.int64), ("var_prefill_length", np.float64), ("sum_prefill_kv_tokens", np.int64),
    ("num_decode_requests", np.int64), ("sum_decode_kv_tokens", np.int64), ("var_decode_kv_tokens", np.float64),
    ("num_queued_prefill", np.int64), ("sum_queued_prefill_tokens", np.int64),
    ("var_queued_prefill_length", np.float64), ("num_queued_decode", np.int64),
    ("sum_queued_decode_kv_tokens", np.int64), ("var_queued_decode_kv_tokens", np.float64)])
"""One pass: worker number within its pool, duration in s, and the metrics as in `mocker.ForwardPassSnapshot`."""


cdef class Watch:
    """Metrics between two ticks.

    Parameters
    ----------
    collect : bool
        Note the metrics of passes.
    """

    def __cinit__(self, bint collect):
        self.s.collect = collect

    def __dealloc__(self):
        free(self.s.notes[0])
        free(self.s.notes[1])

    cdef void saw_pass(self, int role, int64_t number, double seconds, const Spread* fpm, int64_t prefill,
                       int64_t prefix) noexcept nogil:
        cdef Note* note
        cdef void* moved = grown(self.s.notes[role], &self.s.cap[role], self.s.used[role] + 1, sizeof(Note))
        if moved == NULL:
            self.s.short_of_memory = True
            return
        self.s.notes[role] = <Note*>moved
        note = &self.s.notes[role][self.s.used[role]]
        note.worker_id, note.wall_time = number, seconds
        note.num_prefill_requests, note.var_prefill_length = fpm[0].count, fpm[0].variance
        note.sum_prefill_tokens, note.sum_prefill_kv_tokens = prefill, prefix
        note.num_decode_requests, note.sum_decode_kv_tokens, note.var_decode_kv_tokens = (
            fpm[1].count, fpm[1].total, fpm[1].variance)
        note.num_queued_prefill, note.sum_queued_prefill_tokens, note.var_queued_prefill_length = (
            fpm[2].count, fpm[2].total, fpm[2].variance)
        note.num_queued_decode, note.sum_queued_decode_kv_tokens, note.var_queued_decode_kv_tokens = (
            fpm[3].count, fpm[3].total, fpm[3].variance)
        self.s.used[role] += 1

    cdef void saw_tokens(self, int64_t made, int64_t made_by) noexcept nogil:
        """Tokens that a pass of the decode role made."""
        if made > 0 and made_by > 0:
            self.s.made += made
            self.s.made_by += made_by

    cdef void saw_end(self, int64_t prompt, int64_t output, double arrival, double first, double last,
                      int64_t tokens) noexcept nogil:
        """A request ended: its prompt, the output it asked for, its times (NaN: no token), the tokens it got."""
        cdef double itl
        self.s.requests += 1
        self.s.prompt_tokens += prompt
        self.s.output_tokens += output
        if isnan(first):
            return
        if first - arrival > 0.0:
            self.s.ttft += first - arrival
            self.s.ttfts += 1
        if output > 1:
            itl = 0.0
            if tokens > 1 and last > first:
                itl = (last - first) / <double>(tokens - 1)
            if isfinite(itl):
                self.s.itl += itl
                self.s.itls += 1

    cdef void saw_admission(self, int64_t overlap, int64_t blocks) noexcept nogil:
        """A router let a request go to a worker that has `overlap` of its prompt's blocks."""
        if blocks > 0:
            self.s.hit_rate += <double>overlap / <double>blocks
            self.s.hits += 1

    def stop(self):
        """Note no more passes, and forget those noted."""
        self.s.collect = False
        self.s.used[0] = self.s.used[1] = 0

    def take_passes(self, int role):
        """Take the noted passes of a role (0: prefill, 1: decode), in the order they ended: an array of `NOTE`."""
        cdef int64_t i, n = self.s.used[role]
        out = np.empty(n, NOTE)
        cdef Note[::1] view
        if n:
            view = out
            for i in range(n):
                view[i] = self.s.notes[role][i]
        self.s.used[role] = 0
        return out

    def take_traffic(self, double now):
        """Take the traffic since the last time, as a dict with the reference's keys; `now` in ms."""
        out = {
            "duration_s": (now - self.s.began) / 1000.0, "num_req": self.s.requests,
            "avg_isl": <double>self.s.prompt_tokens / <double>self.s.requests if self.s.requests else 0.0,
            "avg_osl": <double>self.s.output_tokens / <double>self.s.requests if self.s.requests else 0.0,
            "avg_ttft_ms": self.s.ttft / <double>self.s.ttfts if self.s.ttfts else 0.0,
            "avg_itl_ms": self.s.itl / <double>self.s.itls if self.s.itls else 0.0,
            "avg_accept_length": <double>self.s.made / <double>self.s.made_by if self.s.made_by else None,
            "avg_kv_hit_rate": self.s.hit_rate / <double>self.s.hits if self.s.hits else 0.0,
            "hit_rate_count": self.s.hits, "accept_length_forward_count": self.s.made_by}
        self.s.began = now
        self.s.requests = self.s.prompt_tokens = self.s.output_tokens = self.s.ttfts = self.s.itls = self.s.hits = 0
        self.s.made = self.s.made_by = 0
        self.s.ttft = self.s.itl = self.s.hit_rate = 0.0
        return out
