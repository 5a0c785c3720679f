# cython: language_level=3
"""Timing models other than the polynomial: a grid, a formula, compiled functions, and Python functions with a memo.

The grid answers to `from_npz` of `common/perf_model.rs` and its interpolation library: linear in prefill tokens,
bilinear in KV tokens and mean length, both continued beyond the ends of their axes by the last segment. Slopes are
made once, from the same two operations, so that a time is the reference's to the last bit; it costs a binary search
for each axis.

A Python function is called once for each distinct question; its answers are found again without the GIL by any
number of threads. Who adds an answer holds the GIL, writes the time before the page that makes it visible, and keeps
outgrown tables, so that a reader never waits and never sees half of one.
"""
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.pycapsule cimport PyCapsule_CheckExact, PyCapsule_GetName, PyCapsule_GetPointer
from libc.math cimport NAN, isnan
from libc.stdint cimport uint64_t, uintptr_t
from libc.string cimport memset

import numpy as np

from mocker._common cimport int64_t
from mocker._timing cimport model_decode, model_mixed, model_prefill

cdef extern from *:
    """
    #if defined(__GNUC__)
    #define mocker_publish(place, value) __atomic_store_n(place, value, __ATOMIC_RELEASE)
    #define mocker_observe(place) __atomic_load_n(place, __ATOMIC_ACQUIRE)
    #else
    #include <intrin.h>
    static void mocker_publish(int64_t* place, int64_t value)
    { _ReadWriteBarrier(); *(volatile int64_t*)place = value; }
    static int64_t mocker_observe(int64_t* place)
    { int64_t value = *(volatile int64_t*)place; _ReadWriteBarrier(); return value; }
    #endif
    """
    void mocker_publish(int64_t* place, int64_t value) nogil
    int64_t mocker_observe(int64_t* place) nogil

cdef enum:
    FIRST_PAGES = 1 << 10
    SLAB = 1 << 14                 # times allocated together

ctypedef double (*UserTime)(int64_t batch, int64_t tokens, int64_t depth) noexcept nogil


cdef class CompiledModel:
    """What every timing model is for an engine: two functions of three integers."""

    def __cinit__(self):
        memset(&self.model, 0, sizeof(Model))
        self.model.ranks = 1

    cdef int raise_failure(self) except -1:
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        return 0

    @property
    def ranks(self):
        """Data-parallel ranks of the attention: the functions get the batch of the busiest."""
        return self.model.ranks

    @ranks.setter
    def ranks(self, int64_t ranks):
        if ranks < 1:
            raise ValueError(f"ranks must be at least 1, got {ranks}")
        self.model.ranks = ranks

    @property
    def mixes(self):
        """Whether passes of prompts and decoding requests have times of their own."""
        return self.model.mixed != NULL

    @property
    def by_context(self):
        """Whether decode time depends on the mean length of the requests."""
        return bool(self.model.by_context)

    def prefill_ms(self, int64_t batch, int64_t tokens, int64_t prefix):
        """Unscaled ms as engines use it; 0 without requests or tokens."""
        cdef double ms
        if self.model.prefill == NULL:
            raise TypeError("this model has no functions; make one of its subclasses")
        if batch <= 0 or tokens <= 0:
            return 0.0
        ms = model_prefill(&self.model, batch, tokens, prefix)
        self.raise_failure()
        return ms

    def mixed_ms(self, int64_t batch, int64_t tokens, int64_t prefix, int64_t decodes, int64_t context):
        """Unscaled ms of a whole pass of prompts and decoding requests, at least one of each with one new token."""
        cdef double ms
        if self.model.mixed == NULL:
            raise TypeError("this model has no times of mixed passes")
        if batch <= 0 or tokens <= 0 or decodes <= 0:
            raise ValueError(f"a mixed pass has prompts, tokens and decoding requests, got {batch}, {tokens}, "
                             f"{decodes}")
        ms = model_mixed(&self.model, batch, tokens, prefix, decodes, context)
        self.raise_failure()
        return ms

    def decode_ms(self, int64_t batch, int64_t tokens, int64_t context):
        """Unscaled ms as engines use it; 0 without requests."""
        cdef double ms
        if self.model.decode == NULL:
            raise TypeError("this model has no functions; make one of its subclasses")
        if batch <= 0:
            return 0.0
        ms = model_decode(&self.model, batch, tokens, context)
        self.raise_failure()
        return ms


cdef int refuse_mixed(CompiledModel model, object whose) except -1:
    """For engines that have no use for times of mixed passes."""
    if model is not None and model.model.mixed != NULL:
        raise ValueError(f"{whose} cannot use times of mixed steps; take a timing model without mixed=True")
    return 0


cdef int raise_time(object model) except -1:
    """Raise what an engine's time error means; `model` is its CompiledModel or None."""
    if model is not None:
        (<CompiledModel>model).raise_failure()
    raise OverflowError("a pass takes longer than the clock's range; speedup_ratio is too small"
                        + ("" if model is None else ", or the timing model gave no finite time"))


# ---- grid -------------------------------------------------------------------------------------------------------

cdef inline int64_t segment(double* axis, int64_t n, double x) noexcept nogil:
    """Index of the segment that holds `x`, or of the first or last one beyond the ends; `n` >= 2."""
    cdef int64_t low = 0, high = n - 1, middle
    if x <= axis[0]:
        return 0
    if x >= axis[n - 1]:
        return n - 2
    while low + 1 < high:
        middle = (low + high) >> 1
        if axis[middle] <= x:
            low = middle
        else:
            high = middle
    return low


cdef double grid_prefill(void* data, int64_t batch, int64_t tokens, int64_t prefix) noexcept nogil:
    cdef Grid* g = <Grid*>data
    cdef double x = <double>(batch * tokens)
    cdef int64_t i = segment(g.isl, g.n_isl, x)
    return g.ttft_slope[i] * (x - g.isl[i]) + g.ttft[i]


cdef double grid_decode(void* data, int64_t batch, int64_t tokens, int64_t context) noexcept nogil:
    cdef Grid* g = <Grid*>data
    cdef double x = <double>tokens, y = <double>context, near, far, off
    cdef int64_t i = segment(g.kv, g.n_kv, x), j = segment(g.context, g.n_context, y)
    cdef double* slope = g.itl_slope + i * g.n_context + j
    cdef double* value = g.itl + i * g.n_context + j
    off = x - g.kv[i]
    near = slope[0] * off + value[0]
    far = slope[1] * off + value[1]
    return (far - near) / (g.context[j + 1] - g.context[j]) * (y - g.context[j]) + near


cdef class GridModel(CompiledModel):
    """Interpolation of a profile's arrays (checked by `mocker.timing`), which stay with this object."""

    cdef Grid grid
    cdef object arrays             # whose memory the grid points into

    def __init__(self, double[::1] isl, double[::1] ttft, double[::1] kv, double[::1] context, double[:, ::1] itl):
        cdef Grid* g = &self.grid
        cdef double[::1] ttft_slope
        cdef double[:, ::1] itl_slope
        if (isl.shape[0] < 2 or isl.shape[0] != ttft.shape[0] or kv.shape[0] < 2 or context.shape[0] < 2
                or itl.shape[0] != kv.shape[0] or itl.shape[1] != context.shape[0]):
            raise ValueError("the arrays of a profile do not fit each other")
        ttft_slope = np.diff(ttft) / np.diff(isl)
        itl_slope = np.ascontiguousarray(np.diff(itl, axis=0) / np.diff(kv)[:, None])
        self.arrays = [isl, ttft, kv, context, itl, ttft_slope, itl_slope]
        g.n_isl, g.n_kv, g.n_context = isl.shape[0], kv.shape[0], context.shape[0]
        g.isl, g.ttft, g.ttft_slope = &isl[0], &ttft[0], &ttft_slope[0]
        g.kv, g.context, g.itl, g.itl_slope = &kv[0], &context[0], &itl[0, 0], &itl_slope[0, 0]
        self.model.prefill, self.model.decode, self.model.data = grid_prefill, grid_decode, g
        self.model.by_context = True


# ---- formula ----------------------------------------------------------------------------------------------------

cdef double formula_prefill(void* data, int64_t batch, int64_t tokens, int64_t prefix) noexcept nogil:
    cdef Formula* f = <Formula*>data
    cdef double t = <double>(batch * tokens)
    return (f.prefill[0] + f.prefill[1] * t + f.prefill[2] * (t * t)
            + f.prefill[3] * (t * (<double>prefix + 0.5 * <double>tokens)))


cdef double formula_decode(void* data, int64_t batch, int64_t tokens, int64_t context) noexcept nogil:
    cdef Formula* f = <Formula*>data
    cdef double kv = <double>tokens, n = <double>batch
    return (f.decode[0] + f.decode[1] * n + f.decode[2] * kv + f.decode[3] * (kv * kv)
            + f.decode[4] * (n * <double>context))


cdef class FormulaModel(CompiledModel):
    """Sums of fixed terms: see `Formula` for what the coefficients belong to."""

    cdef Formula formula

    def __init__(self, prefill, decode):
        if len(prefill) != 4 or len(decode) != 5:
            raise ValueError(f"a formula has 4 prefill and 5 decode coefficients, got {len(prefill)} and {len(decode)}")
        for i in range(4):
            self.formula.prefill[i] = prefill[i]
        for i in range(5):
            self.formula.decode[i] = decode[i]
        self.model.prefill, self.model.decode, self.model.data = formula_prefill, formula_decode, &self.formula
        self.model.by_context = self.formula.decode[4] != 0.0


# ---- functions of the user --------------------------------------------------------------------------------------

cdef struct Hooks:
    UserTime prefill
    UserTime decode


cdef double hook_prefill(void* data, int64_t batch, int64_t tokens, int64_t prefix) noexcept nogil:
    return (<Hooks*>data).prefill(batch, tokens, prefix)


cdef double hook_decode(void* data, int64_t batch, int64_t tokens, int64_t context) noexcept nogil:
    return (<Hooks*>data).decode(batch, tokens, context)


def capsule_address(capsule, int numbers=3):
    """Address of a Cython function exported as a capsule; TypeError unless it takes `numbers` and gives a double."""
    cdef const char* name
    if not PyCapsule_CheckExact(capsule):
        raise TypeError(f"expected a capsule of __pyx_capi__, got {type(capsule).__name__}")
    name = PyCapsule_GetName(capsule)
    signature = "" if name == NULL else name.decode()
    if not signature.startswith("double (") or signature.count(",") != numbers - 1:
        raise TypeError(f"the function must be double ({', '.join(['int64_t'] * numbers)}), got {signature!r}")
    return <uintptr_t>PyCapsule_GetPointer(capsule, name)


cdef class AddressModel(CompiledModel):
    """Compiled functions by address: double f(int64_t, int64_t, int64_t), callable without the GIL."""

    cdef Hooks hooks
    cdef object keep               # owner of the functions' code

    def __init__(self, uintptr_t prefill, uintptr_t decode, bint by_context, keep):
        if prefill == 0 or decode == 0:
            raise ValueError("the address of a function is 0")
        self.hooks.prefill, self.hooks.decode = <UserTime>prefill, <UserTime>decode
        self.keep = keep
        self.model.prefill, self.model.decode, self.model.data = hook_prefill, hook_decode, &self.hooks
        self.model.by_context = by_context


# ---- memo -------------------------------------------------------------------------------------------------------

cdef inline uint64_t place_of(int64_t first, int64_t second, int64_t third) noexcept nogil:
    cdef uint64_t h = <uint64_t>first * <uint64_t>0x9E3779B97F4A7C15
    h = (h ^ (h >> 29) ^ <uint64_t>second) * <uint64_t>0xBF58476D1CE4E5B9
    h = (h ^ (h >> 32) ^ <uint64_t>third) * <uint64_t>0x94D049BB133111EB
    return h ^ (h >> 31)


cdef inline Page* memo_page(Page* pages, uint64_t mask, int64_t first, int64_t second,
                            int64_t third) noexcept nogil:
    """The page of three numbers, or the free one where it would be; for who writes."""
    cdef uint64_t at = place_of(first, second, third) & mask
    cdef Page* p
    while True:
        p = &pages[at]
        if p.first == 0 or (p.first == first and p.second == second and p.third == third):
            return p
        at = (at + 1) & mask


cdef double memo_find(Memo* m, int64_t first, int64_t second, int64_t third) noexcept nogil:
    """The time, or NaN; for whoever reads."""
    cdef uint64_t mask = <uint64_t>mocker_observe(<int64_t*>&m.mask)    # before the pages: it fits those or newer ones
    cdef Page* pages = <Page*>mocker_observe(<int64_t*>&m.pages)
    cdef int64_t page = third >> m.shift, key
    cdef uint64_t at = place_of(first, second, page) & mask
    while True:
        key = mocker_observe(&pages[at].first)
        if key == 0:
            return NAN
        if key == first and pages[at].second == second and pages[at].third == page:
            return pages[at].ms[third & (((<int64_t>1) << m.shift) - 1)]
        at = (at + 1) & mask


cdef class MemoTable:
    """Times by three numbers. Readers need nothing; who writes holds the GIL."""

    cdef Memo* memo                # the newest table; older ones stay for readers that still use them
    cdef list owned                # capsules of everything allocated
    cdef readonly int shift

    def __cinit__(self, int shift):
        self.owned = []
        self.shift = shift
        self.memo = <Memo*>PyMem_Malloc(sizeof(Memo))
        if self.memo == NULL:
            raise MemoryError
        memset(self.memo, 0, sizeof(Memo))
        self.memo.shift = shift
        self.memo.pages = <Page*>self.take(FIRST_PAGES * sizeof(Page))
        self.memo.mask = FIRST_PAGES - 1

    def __dealloc__(self):
        PyMem_Free(self.memo)

    cdef void* take(self, size_t size) except NULL:
        """Zeroed memory that lives as long as this object."""
        cdef unsigned char[::1] room = np.zeros(size, np.uint8)
        self.owned.append(room)
        return &room[0]

    cdef int put(self, int64_t first, int64_t second, int64_t third, double ms) except -1:
        cdef Memo* m = self.memo
        cdef Page* p
        cdef double* slab
        cdef int64_t i, size = (<int64_t>1) << m.shift
        if (m.used + 1) * 2 > <int64_t>m.mask:
            self.grow()
        if m.slab_left < size:
            slab = <double*>self.take((SLAB if SLAB > size else size) * sizeof(double))
            m.slab, m.slab_left = slab, SLAB if SLAB > size else size
        p = memo_page(m.pages, m.mask, first, second, third >> m.shift)   # from here on nobody else gets the GIL
        if p.first == 0:
            p.ms = m.slab
            m.slab += size
            m.slab_left -= size
            for i in range(size):
                p.ms[i] = NAN
            p.second, p.third = second, third >> m.shift
            p.ms[third & (size - 1)] = ms
            mocker_publish(&p.first, first)
            m.used += 1
        else:
            p.ms[third & (size - 1)] = ms
        return 0

    cdef int grow(self) except -1:
        cdef Memo* m = self.memo
        cdef uint64_t i, mask = m.mask * 2 + 1
        cdef Page* pages = <Page*>self.take((mask + 1) * sizeof(Page))
        cdef Page* p
        if m.mask * 2 + 1 != mask:             # somebody else was faster while memory was fetched
            return 0
        for i in range(m.mask + 1):
            if m.pages[i].first != 0:
                p = memo_page(pages, mask, m.pages[i].first, m.pages[i].second, m.pages[i].third)
                p[0] = m.pages[i]
        mocker_publish(<int64_t*>&m.pages, <int64_t>pages)
        mocker_publish(<int64_t*>&m.mask, <int64_t>mask)
        return 0

    def __len__(self):
        return self.count()

    cdef int64_t count(self) noexcept:
        cdef Memo* m = self.memo
        cdef uint64_t i
        cdef int64_t j, n = 0
        for i in range(m.mask + 1):
            if m.pages[i].first != 0:
                for j in range((<int64_t>1) << m.shift):
                    n += not isnan(m.pages[i].ms[j])
        return n

    def export(self):
        """All entries as an array of rows (first, second, third) and an array of times."""
        cdef Memo* m = self.memo
        cdef uint64_t i
        cdef int64_t j, n = 0, size = (<int64_t>1) << m.shift
        cdef int64_t[:, ::1] keys = np.empty((self.count(), 3), np.int64)
        cdef double[::1] times = np.empty(keys.shape[0])
        for i in range(m.mask + 1):
            if m.pages[i].first != 0:
                for j in range(size):
                    if not isnan(m.pages[i].ms[j]):
                        keys[n, 0], keys[n, 1] = m.pages[i].first, m.pages[i].second
                        keys[n, 2] = (m.pages[i].third << m.shift) + j
                        times[n] = m.pages[i].ms[j]
                        n += 1
        return np.asarray(keys), np.asarray(times)

    def load(self, int64_t[:, ::1] keys, double[::1] times):
        """Add entries of `export`."""
        cdef int64_t i
        for i in range(times.shape[0]):
            if keys[i, 0] <= 0:
                raise ValueError(f"batch must be positive, got {keys[i, 0]}")
            self.put(keys[i, 0], keys[i, 1], keys[i, 2], times[i])


cdef struct Question:              # what the two functions of a memo read
    Memo* prefills
    Memo* decodes
    bint by_tokens
    bint by_context
    void* owner                    # the MemoModel


cdef double memo_prefill(void* data, int64_t batch, int64_t tokens, int64_t prefix) noexcept nogil:
    cdef Question* q = <Question*>data
    cdef double ms = memo_find(q.prefills, batch, prefix, tokens)
    return ask_prefill(q.owner, batch, tokens, prefix) if isnan(ms) else ms


cdef double memo_decode(void* data, int64_t batch, int64_t tokens, int64_t context) noexcept nogil:
    cdef Question* q = <Question*>data
    cdef double ms
    if not q.by_tokens:
        tokens = 0
    if not q.by_context:
        context = 0
    ms = memo_find(q.decodes, batch, tokens, context)
    return ask_decode(q.owner, batch, tokens, context) if isnan(ms) else ms


cdef double ask_prefill(void* owner, int64_t batch, int64_t tokens, int64_t prefix) noexcept with gil:
    return (<MemoModel>owner).ask_prefill(batch, tokens, prefix)


cdef double ask_decode(void* owner, int64_t batch, int64_t tokens, int64_t context) noexcept with gil:
    return (<MemoModel>owner).ask_decode(batch, tokens, context)


cdef double memo_mixed(void* data, int64_t batch, int64_t tokens, int64_t prefix, int64_t decodes,
                       int64_t context) noexcept with gil:
    return (<MemoModel>(<Question*>data).owner).ask_mixed(batch, tokens, prefix, decodes, context)


cdef class MemoModel(CompiledModel):
    """Python functions, asked once for each distinct question.

    Parameters
    ----------
    prefill, decode : callable
        Functions of three integers, ms; with `ahead` > 0 of three equal arrays.
    by_tokens, by_context : bool
        Decode depends on the KV tokens of the pool, on the mean length; if not, `decode` gets 0 for it.
    ahead : int
        0, or the decode times asked at once, for consecutive mean lengths: a power of two.
    mixed : callable, optional
        A function of (batch, tokens, prefix, decodes, context) that gives the ms of a pass of both; not remembered.
    """

    cdef Question question
    cdef MemoTable prefills
    cdef MemoTable decodes
    cdef readonly int64_t ahead
    cdef readonly int64_t calls    # of the functions
    cdef object prefill
    cdef object decode
    cdef object mixed

    def __init__(self, prefill, decode, bint by_tokens, bint by_context, int64_t ahead, mixed=None):
        if ahead < 0 or ahead & (ahead - 1):
            raise ValueError(f"ahead must be 0 or a power of two, got {ahead}")
        self.prefill, self.decode, self.ahead, self.mixed = prefill, decode, ahead, mixed
        self.prefills = MemoTable(0)
        self.decodes = MemoTable(ahead.bit_length() - 1 if ahead > 16 else 4)
        self.question.prefills, self.question.decodes = self.prefills.memo, self.decodes.memo
        self.question.by_tokens, self.question.by_context, self.question.owner = by_tokens, by_context, <void*>self
        self.model.prefill, self.model.decode, self.model.data = memo_prefill, memo_decode, &self.question
        if mixed is not None:
            self.model.mixed = memo_mixed
        self.model.by_context = by_context

    @property
    def tables(self):
        """The memos of prefill (batch, prefix, tokens) and decode (batch, KV tokens or 0, context)."""
        return self.prefills, self.decodes

    cdef double ask_mixed(self, int64_t batch, int64_t tokens, int64_t prefix, int64_t decodes,
                          int64_t context) noexcept:
        try:
            return checked(self.mixed(batch, tokens, prefix, decodes, context), "mixed", batch, tokens, context)
        except BaseException as error:
            self.failure = error
        return NAN

    cdef double ask_prefill(self, int64_t batch, int64_t tokens, int64_t prefix) noexcept:
        cdef double ms
        try:
            self.calls += 1
            if self.ahead:
                given = self.prefill(np.full(1, batch), np.full(1, tokens), np.full(1, prefix))
                ms = checked(times_of("prefill", given, 1)[0], "prefill", batch, tokens, prefix)
            else:
                ms = checked(self.prefill(batch, tokens, prefix), "prefill", batch, tokens, prefix)
            self.prefills.put(batch, prefix, tokens, ms)
            return ms
        except BaseException as error:
            self.failure = error
        return NAN

    cdef double ask_decode(self, int64_t batch, int64_t tokens, int64_t context) noexcept:
        cdef double ms
        cdef int64_t start, i
        try:
            self.calls += 1
            if self.ahead:
                start = context & ~(self.ahead - 1)
                first = max(start, 1) if context > 0 else context
                count = start + self.ahead - first
                given = times_of("decode", self.decode(np.full(count, batch), np.full(count, tokens),
                                                       np.arange(first, first + count)), count)
                ms = checked(given[context - first], "decode", batch, tokens, context)
                for i in range(count):
                    if given[i] >= 0.0:
                        self.decodes.put(batch, tokens, first + i, given[i])
            else:
                ms = checked(self.decode(batch, tokens, context), "decode", batch, tokens, context)
                self.decodes.put(batch, tokens, context, ms)
            return ms
        except BaseException as error:
            self.failure = error
        return NAN


def times_of(what, given, int64_t count):
    """What a vectorised function returned as an array of `count` times; raises ValueError if it is none."""
    out = np.asarray(given, np.float64)
    if out.shape != (count,):
        raise ValueError(f"the {what} function of the timing model must return {count} times for {count} questions, "
                         f"got an array of shape {out.shape}")
    return out


def checked(given, what, batch, tokens, depth):
    """A time as a finite float that is not negative; raises ValueError."""
    cdef double ms
    try:
        ms = given
    except TypeError:
        ms = NAN
    if not 0.0 <= ms < 9e12:
        raise ValueError(f"the {what} function of the timing model must return ms from 0 to 9e12, got {given!r} for "
                         f"({batch}, {tokens}, {depth})")
    return ms
