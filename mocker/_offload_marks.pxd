# Data dictionary of numbers that KV offload notes of blocks, by runs.
from mocker._common cimport int32_t, int64_t
from mocker._offload_blocks cimport Span


cdef struct Mark:                  # consecutive blocks of a segment with the same number
    int32_t start                  # first block, offset in the segment
    int32_t end                    # one past the last block
    int32_t down                   # next mark of the segment; of a free one: next free one
    int64_t value                  # not 0


cdef struct Marks:                 # block -> number, 0 unless it was set; all zero is empty
    Mark* items                    # [1, used): place 0 is nobody's
    int64_t cap
    int64_t used
    int32_t unused                 # first free one, 0: none
    int32_t* first                 # [first_cap] by segment number: its first mark, 0 without
    int64_t first_cap
    int64_t blocks                 # with a number


cdef int32_t marks_look(Marks* m, Span* s, int64_t* value) noexcept nogil
cdef bint marks_set(Marks* m, Span* s, int64_t value) noexcept nogil
cdef void marks_free(Marks* m) noexcept nogil
