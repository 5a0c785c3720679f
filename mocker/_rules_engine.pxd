# An engine core under vLLM's rules as a Python object: the core of `_engine`, and what the rules keep beside it.
from mocker._common cimport int32_t, int64_t
from mocker._core cimport Spread
from mocker._engine cimport EngineCore
from mocker._rules cimport VllmRulesCore


cdef class RulesEngine(EngineCore):
    cdef VllmRulesCore x
    cdef bint configured
    cdef list owners               # [slot] what its request is called by `run_owned`
    cdef int64_t generation        # of the newest owned request; with the slot it makes the request's id

    cdef int32_t queue_at(self, int32_t slot, int64_t place, int64_t priority) except -1


cdef class PassRecord:             # what one pass did, copied as it is and turned into objects when asked for
    cdef readonly double start_ms
    cdef readonly double end_ms
    cdef readonly double tokens_ms         # when its tokens were made
    cdef readonly int64_t completed        # requests gone
    cdef readonly int64_t made             # tokens made
    cdef readonly int64_t made_by          # requests that made them
    cdef readonly list ended               # [(id, owner, terminal code)] of the requests gone
    cdef readonly list kv_events           # in the reference's JSON form
    cdef int64_t active                    # blocks held after the pass
    cdef int64_t running                   # requests running after it
    cdef int64_t waiting
    cdef int64_t preemptions               # since the start
    cdef int64_t blocks                    # usable pool
    cdef Spread fpm[4]                     # prefill lengths, decode lengths, queued prefill, queued decode
    cdef int64_t prefill_tokens
    cdef int64_t prefix_tokens
    cdef list owners                       # [slot] as in the engine when the pass was over
    cdef bytes admission_data              # Admission structures
    cdef bytes signal_data                 # Signal structures
    cdef bytes batch_data                  # Batched structures
    cdef bytes victim_data                 # int64 ids
