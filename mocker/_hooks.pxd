# Scores from the user's own functions: which worker gets a request, which request is preempted.
from mocker._common cimport int32_t, int64_t
from mocker._core cimport Core
from mocker._router cimport Ask

ctypedef double (*ScoreFn)(int64_t, int64_t, int64_t, int64_t, int64_t) noexcept nogil


cdef class ScoreHook:
    cdef ScoreFn compiled          # NULL: the Python function
    cdef object function
    cdef object keep               # owner of the compiled function's code
    cdef object failure            # exception of the Python function, or what is wrong with a score; not raised yet

    cdef double ask(self, int64_t a, int64_t b, int64_t c, int64_t d, int64_t e) noexcept nogil
    cdef double call(self, int64_t a, int64_t b, int64_t c, int64_t d, int64_t e) noexcept with gil
    cdef void complain(self) noexcept with gil
    cdef int raise_failure(self) except -1


cdef int32_t hook_choose(void* hook, const Ask* ask) noexcept nogil
cdef int64_t hook_victim(void* hook, Core* c) noexcept nogil
