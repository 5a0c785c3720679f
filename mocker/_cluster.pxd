# Data dictionary of the cluster loop: workers on one clock, and the sessions that feed them.
from mocker._common cimport int8_t, int32_t, int64_t, uint8_t


cdef struct Lane:                  # one worker of an open-loop replay, simulated on its own
    double now                     # ms
    int64_t next                   # position of its next arrival in the order of arrivals
    double last                    # newest timestamp that it processed
    int64_t idle_passes            # passes in a row that brought nothing
    bint done
    bint stalled


cdef enum EngineKind:
    KIND_CORE = 0                  # vLLM as the reference has it, TRT-LLM
    KIND_SGLANG = 1


cdef struct View:                  # what the cluster sees of a worker after a pass
    double end_ms
    double last_start
    int64_t count                  # requests alive
    int64_t n_waiting
    int64_t made                   # tokens made in the pass
    int64_t completed              # requests gone in the pass
    int64_t admitted
    int64_t passes                 # since the start
    bint preempted                 # the next pass may differ though this one brought nothing
    bint worked                    # tokens were scheduled
    bint steady                    # fast-forward may go on
    int64_t* ended                 # [ended_used] rows gone, ~row for a first token
    int64_t ended_used
    int error


cdef struct Pending:               # an entry of a time heap
    double at                      # ms
    int64_t first                  # ties: event sequence number, or session
    int64_t second                 # what: worker, or turn
