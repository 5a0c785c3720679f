# Scores from the user's own functions, as engines and routers see them. One for a hook of five numbers, in Cython:
#     from libc.stdint cimport int64_t
#     cdef double score(int64_t a, int64_t b, int64_t c, int64_t d, int64_t e) noexcept nogil
# and `mocker.hooks` takes it as `my_module.__pyx_capi__["score"]` or, from inside, as `<size_t><ScoreFive>score`.
from mocker._common cimport int32_t, int64_t

cdef enum:
    FIVE = 5                       # integers that a function may take
    NINE = 9

ctypedef double (*ScoreFive)(int64_t, int64_t, int64_t, int64_t, int64_t) noexcept nogil
ctypedef double (*ScoreNine)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                             int64_t) noexcept nogil
ctypedef double (*AskFn)(void* context, const int64_t* facts) noexcept nogil
ctypedef int64_t (*CachedFn)(void* engine, void* request) noexcept nogil


cdef struct Hook:                  # a score function
    AskFn ask                      # not a number: it failed, and the context knows how; NULL: there is none
    void* context                  # ScoreHook


cdef struct Wish:                  # what a score of waiting requests is told beyond what a core knows
    double arrived                 # ms
    int64_t priority


cdef struct AdmissionHook:
    Hook score                     # of who waits; the lowest goes first, infinity: not now
    CachedFn cached                # tokens of a request that an engine would find cached
    void* engine
    bint timed                     # the score depends on how long somebody has waited
    bint looks                     # and on what is cached; without, it gets 0
    Wish* wishes                   # [cap] by slot; kept if there is a score
    int64_t cap


cdef class ScoreHook:
    cdef void* compiled            # NULL: the Python function
    cdef int numbers               # FIVE or NINE
    cdef bint timed                # as in AdmissionHook
    cdef bint looks
    cdef object function
    cdef object keep               # owner of the compiled function's code
    cdef object failure            # exception of the Python function, or what is wrong with a score; not raised yet

    cdef double call(self, const int64_t* facts) noexcept with gil
    cdef void complain(self) noexcept with gil
    cdef int raise_failure(self) except -1


cdef Hook hook_of(ScoreHook hook) noexcept
cdef void admission_use(AdmissionHook* h, ScoreHook hook) noexcept
cdef bint wish_note(AdmissionHook* h, int32_t slot, double arrived, int64_t priority) noexcept nogil
cdef void ring_to_front(int32_t* ring, int64_t head, int64_t cap, int64_t place) noexcept nogil
