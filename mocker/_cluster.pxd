# Data dictionary of the cluster loop: workers on one clock, and the sessions that feed them.
from mocker._common cimport int8_t, int32_t, int64_t, uint8_t
from mocker._core cimport Core


cdef struct Lane:                  # one worker of an open-loop replay, simulated on its own
    double now                     # ms
    int64_t next                   # position of its next arrival in the order of arrivals
    double last                    # newest timestamp that it processed
    int64_t idle_passes            # passes in a row that brought nothing
    bint done
    bint stalled


cdef struct Pending:               # an entry of a time heap
    double at                      # ms
    int64_t first                  # ties: event sequence number, or session
    int64_t second                 # what: worker, or turn
