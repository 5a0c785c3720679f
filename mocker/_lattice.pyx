# cython: language_level=3
"""Measured kernels between the points of a lattice: few questions to the package, an answer in nanoseconds.

A step's time falls apart into operations that see only its number of tokens, those that see only its number of
requests (logits), and the rest, mostly attention, that see the lengths. Each part is asked at points of a lattice of
its own when a question first needs them, and is linear between them. The package's tables have their points at powers
of two and at sixteenths of an octave, and its times may jump right behind such a point; so ours lie on these and one
behind. Where the package has no answer at a point, it is asked the question itself.

Attention of prompts has two forms. `square`: by requests and whole length, linear in the root of the time (which is
nearly a square), and in the share of the square that the cached part leaves. Otherwise: by requests, new tokens and
cached ones, linear in each.

Readers need nothing; who fills a point holds the GIL. A point is 0 until then, and infinite where there are no data.
"""
from libc.math cimport INFINITY, NAN, frexp, isfinite, sqrt

import numpy as np

from mocker._common cimport int64_t
from mocker._models cimport CompiledModel

from mocker._models import checked

cdef enum:
    ROWS = 3 * 31                  # by requests: 3 an octave
    PROMPTS = 3 * 12               # the same of a prefill
    LENGTH_BITS = 3                # by length: 8 an octave and one behind its begin
    LENGTHS = 16 + 9 * 27
    CACHED_BITS = 2                # by cached tokens, where the form is not `square`
    CACHED = 8 + 5 * 28
    REST_BITS = 4                  # by tokens of a prefill: 16 an octave, each twice
    RESTS = 2 * (32 + 16 * 26)
    BATCH_BITS = 6                 # by requests, in full up to 128, then 64 an octave
    BATCHES = 128 + 64 * 24
    DECODE_REST = 0
    DECODE_ATTENTION = 1
    PREFILL_REST = 2
    PREFILL_LOGITS = 3
    PREFILL_ATTENTION = 4

LAYOUT = 1                         # of the points, for those who keep them
NAMES = ("decode_rest", "decode_attention", "prefill_rest", "prefill_logits", "prefill_attention")
cdef int64_t LARGEST = 1 << 30     # the lattice ends there
cdef int64_t MOST_PROMPTS = 1 << 11
cdef double NOTHING = 1e-300       # a time of 0 that is known


cdef struct Lattice:
    double* decode_rest            # [BATCHES] by requests
    double* decode_attention       # [ROWS, LENGTHS] by requests and length
    double* prefill_rest           # [RESTS] by tokens of the pass
    double* prefill_logits         # [BATCHES] by requests
    double* prefill_attention      # square: [PROMPTS, LENGTHS, 2], else [PROMPTS, LENGTHS, CACHED]
    bint square
    int64_t width                  # tokens of a decoding request in a pass with prompts; 0: such a pass is asked whole
    void* owner                    # the LatticeModel


# ---- axes -------------------------------------------------------------------------------------------------------
# For each: the index of the point at or below a value, how far to the next one, and the value of a point.

cdef inline int64_t even_below(int64_t value, int bits, int64_t* low, int64_t* step) noexcept nogil:
    """1 << bits an octave."""
    cdef int exponent
    cdef int64_t shifted
    if value < (2 << bits):
        low[0], step[0] = value, 1
        return value
    frexp(<double>value, &exponent)
    exponent -= 1 + bits
    shifted = value >> exponent
    low[0], step[0] = shifted << exponent, (<int64_t>1) << exponent
    return ((<int64_t>exponent) << bits) + shifted


cdef int64_t even_point(int64_t index, int bits) noexcept:
    cdef int64_t octave = index >> bits
    return index if octave < 2 else ((index & ((1 << bits) - 1)) + (1 << bits)) << (octave - 1)


cdef inline int64_t length_below(int64_t value, int bits, int64_t* low, int64_t* step) noexcept nogil:
    """The same with 2**e + 1 besides 2**e."""
    cdef int64_t index = even_below(value, bits, low, step), beyond
    if index < (2 << bits):
        return index
    index -= 2 << bits
    beyond = (index >> bits) + (2 << bits)         # one more for each octave before
    if index & ((1 << bits) - 1):
        return index + beyond + 1
    if value == low[0]:
        return index + beyond
    low[0] += 1
    step[0] -= 1
    return index + beyond + 1


cdef int64_t length_point(int64_t index, int bits) noexcept:
    cdef int64_t octave, place
    if index < (2 << bits):
        return index
    octave, place = (index - (2 << bits)) // ((1 << bits) + 1), (index - (2 << bits)) % ((1 << bits) + 1)
    if place < 2:
        return ((<int64_t>2 << bits) << octave) + place
    return ((1 << bits) + place - 1) << (octave + 1)


cdef inline int64_t row_below(int64_t batch, int64_t* low, int64_t* step) noexcept nogil:
    """2**e, 1.5 * 2**e, 2**(e + 1) - 1."""
    cdef int exponent
    cdef int64_t first, half, last
    frexp(<double>batch, &exponent)
    exponent -= 1
    first = (<int64_t>1) << exponent
    half, last = first + (first >> 1), 2 * first - 1
    low[0], step[0] = batch, 1
    if batch == first:
        return 3 * exponent
    if batch == last:
        return 3 * exponent + 2
    if batch < half:
        low[0], step[0] = first, half - first
        return 3 * exponent
    low[0], step[0] = half, last - half
    return 3 * exponent + 1


cdef int64_t row_point(int64_t index) noexcept:
    cdef int64_t first = (<int64_t>1) << (index // 3), kind = index % 3
    if kind == 0:
        return first
    return first + (first >> 1) if kind == 1 else 2 * first - 1


# ---- parts ------------------------------------------------------------------------------------------------------

cdef inline double got(Lattice* t, double* place, int what, int64_t i, int64_t j, int64_t k) noexcept nogil:
    cdef double ms = place[0]
    return ms if ms != 0.0 else fill(t.owner, what, i, j, k)


cdef inline double part_of(int64_t value, int64_t low, int64_t step) noexcept nogil:
    return 0.0 if value == low else <double>(value - low) / <double>step


cdef inline double by_requests(Lattice* t, double* points, int what, int64_t batch) noexcept nogil:
    cdef int64_t low, step, i = even_below(batch, BATCH_BITS, &low, &step)
    cdef double ms = got(t, &points[i], what, i, 0, 0)
    if batch == low:
        return ms
    return ms + (got(t, &points[i + 1], what, i + 1, 0, 0) - ms) * part_of(batch, low, step)


cdef inline double by_tokens(Lattice* t, int64_t tokens) noexcept nogil:
    """Point 2 i is at the begin of a stretch, point 2 i + 1 one token behind."""
    cdef int64_t low, step, i = 2 * even_below(tokens, REST_BITS, &low, &step)
    cdef double ms
    if tokens == low:
        return got(t, &t.prefill_rest[i], PREFILL_REST, i, 0, 0)
    ms = got(t, &t.prefill_rest[i + 1], PREFILL_REST, i + 1, 0, 0)
    if tokens == low + 1:
        return ms
    return ms + (got(t, &t.prefill_rest[i + 2], PREFILL_REST, i + 2, 0, 0) - ms) * part_of(tokens, low + 1, step - 1)


cdef inline double decode_row(Lattice* t, int64_t i, int64_t j, double part) noexcept nogil:
    cdef double* row = t.decode_attention + i * LENGTHS
    cdef double ms = got(t, &row[j], DECODE_ATTENTION, i, j, 0)
    if part == 0.0:
        return ms
    return ms + (got(t, &row[j + 1], DECODE_ATTENTION, i, j + 1, 0) - ms) * part


cdef double decode_attention(Lattice* t, int64_t batch, int64_t context) noexcept nogil:
    cdef int64_t low, step, i, j = length_below(context, LENGTH_BITS, &low, &step)
    cdef double part = part_of(context, low, step), ms
    i = row_below(batch, &low, &step)
    ms = decode_row(t, i, j, part)
    if batch == low:
        return ms
    return ms + (decode_row(t, i + 1, j, part) - ms) * part_of(batch, low, step)


cdef double lattice_decode(void* data, int64_t batch, int64_t tokens, int64_t context) noexcept nogil:
    cdef Lattice* t = <Lattice*>data
    cdef double ms
    if 0 < batch < LARGEST and 0 <= context < LARGEST:
        ms = decode_attention(t, batch, context)
        ms += by_requests(t, t.decode_rest, DECODE_REST, batch)
        if isfinite(ms):
            return ms
    return ask(t.owner, False, batch, context, 0)


cdef inline double square_column(Lattice* t, int64_t i, int64_t j, int64_t length, double left) noexcept nogil:
    """A prompt of a length of the lattice, of whose square `left` is to be computed: all, or that of one token."""
    cdef double* points = t.prefill_attention + (i * LENGTHS + j) * 2
    cdef double least, ms = got(t, &points[0], PREFILL_ATTENTION, i, j, 0)
    if left == 1.0 or length < 2:
        return ms
    least = <double>(length - 1) / <double>length
    least = 1.0 - least * least
    return ms + (got(t, &points[1], PREFILL_ATTENTION, i, j, 1) - ms) * ((1.0 - left) / (1.0 - least))


cdef double square_row(Lattice* t, int64_t i, int64_t length, double left) noexcept nogil:
    cdef int64_t low, step, j = length_below(length, LENGTH_BITS, &low, &step)
    cdef double ms = square_column(t, i, j, low, left), next_ms
    if length == low:
        return ms
    next_ms = square_column(t, i, j + 1, low + step, left)
    if not (ms >= 0.0 and next_ms >= 0.0):
        return ms + (next_ms - ms) * part_of(length, low, step)
    ms = sqrt(ms)
    ms += (sqrt(next_ms) - ms) * part_of(length, low, step)
    return ms * ms


cdef inline double cached_row(Lattice* t, int64_t i, int64_t j, int64_t k, double part) noexcept nogil:
    cdef double* points = t.prefill_attention + (i * LENGTHS + j) * CACHED
    cdef double ms = got(t, &points[k], PREFILL_ATTENTION, i, j, k)
    if part == 0.0:
        return ms
    return ms + (got(t, &points[k + 1], PREFILL_ATTENTION, i, j, k + 1) - ms) * part


cdef double prompt_row(Lattice* t, int64_t i, int64_t tokens, int64_t prefix) noexcept nogil:
    """One row of either form."""
    cdef int64_t low, step, j, k
    cdef double share, part, ms
    if t.square:
        share = <double>prefix / <double>(tokens + prefix)
        return square_row(t, i, tokens + prefix, 1.0 - share * share)
    k = length_below(prefix, CACHED_BITS, &low, &step)
    part = part_of(prefix, low, step)
    j = length_below(tokens, LENGTH_BITS, &low, &step)
    ms = cached_row(t, i, j, k, part)
    if tokens == low:
        return ms
    return ms + (cached_row(t, i, j + 1, k, part) - ms) * part_of(tokens, low, step)


cdef double prefill_attention(Lattice* t, int64_t batch, int64_t tokens, int64_t prefix) noexcept nogil:
    cdef int64_t low, step, i = row_below(batch, &low, &step)
    cdef double ms = prompt_row(t, i, tokens, prefix)
    if batch == low:
        return ms
    return ms + (prompt_row(t, i + 1, tokens, prefix) - ms) * part_of(batch, low, step)


cdef inline bint inside(int64_t batch, int64_t tokens, int64_t prefix) noexcept nogil:
    return (0 < batch < MOST_PROMPTS and 0 < tokens < LARGEST and 0 <= prefix < LARGEST and tokens + prefix < LARGEST
            and batch * tokens < LARGEST)


cdef double lattice_prefill(void* data, int64_t batch, int64_t tokens, int64_t prefix) noexcept nogil:
    cdef Lattice* t = <Lattice*>data
    cdef double ms
    if inside(batch, tokens, prefix):
        ms = prefill_attention(t, batch, tokens, prefix)
        ms += by_tokens(t, batch * tokens)
        ms += by_requests(t, t.prefill_logits, PREFILL_LOGITS, batch)
        if isfinite(ms):
            return ms
    return ask(t.owner, True, batch, tokens, prefix)


cdef double lattice_mixed(void* data, int64_t batch, int64_t tokens, int64_t prefix, int64_t decodes,
                          int64_t context) noexcept nogil:
    """All tokens of the pass together, and the attention of either kind; the package's logits are of one row."""
    cdef Lattice* t = <Lattice*>data
    cdef int64_t together = batch * tokens + decodes * t.width
    cdef double ms
    if t.width > 0 and inside(batch, tokens, prefix) and decodes < LARGEST and 0 <= context and together < LARGEST:
        ms = prefill_attention(t, batch, tokens, prefix) + decode_attention(t, decodes, context)
        ms += by_tokens(t, together)
        ms += by_requests(t, t.prefill_logits, PREFILL_LOGITS, 1)
        if isfinite(ms):
            return ms
    return ask_mixed(t.owner, batch, tokens, prefix, decodes, context)


# ---- who fills it -----------------------------------------------------------------------------------------------

cdef double fill(void* owner, int what, int64_t i, int64_t j, int64_t k) noexcept with gil:
    return (<LatticeModel>owner).fill(what, i, j, k)


cdef double ask(void* owner, bint prefill, int64_t batch, int64_t tokens, int64_t depth) noexcept with gil:
    return (<LatticeModel>owner).ask(prefill, batch, tokens, depth)


cdef double ask_mixed(void* owner, int64_t batch, int64_t tokens, int64_t prefix, int64_t decodes,
                      int64_t context) noexcept with gil:
    return (<LatticeModel>owner).ask_mixed(batch, tokens, prefix, decodes, context)


cdef class LatticeModel(CompiledModel):
    """Times between points at which `source` is asked.

    Parameters
    ----------
    source : object
        Functions of whole numbers that give ms, or raise LookupError where there are none: `decode_rest(batch)`,
        `decode_attention(batch, context)`, `prefill_rest(tokens)`, `prefill_logits(batch)`,
        `prefill_attention(batch, tokens, prefix)`, and the sums `decode(batch, context)` and
        `prefill(batch, tokens, prefix)`, which may raise anything.
    square : bool
        The form of the attention of prompts.
    mixed : bool
        Passes of prompts and decoding requests have a time of their own, made of the parts.
    width : int
        Tokens of a decoding request in such a pass; 0: `mixed(batch, tokens, prefix, decodes, context)` of the source
        is asked instead.
    """

    cdef Lattice lattice
    cdef readonly int64_t calls    # of the source
    cdef object source
    cdef dict arrays

    def __init__(self, source, bint square, bint mixed=False, int64_t width=0):
        cdef Lattice* t = &self.lattice
        self.source = source
        shapes = ((BATCHES,), (ROWS, LENGTHS), (RESTS,), (BATCHES,), (PROMPTS, LENGTHS, 2 if square else CACHED))
        self.arrays = {name: np.zeros(shape) for name, shape in zip(NAMES, shapes)}
        t.decode_rest, t.decode_attention = place(self.arrays["decode_rest"]), place(self.arrays["decode_attention"])
        t.prefill_rest = place(self.arrays["prefill_rest"])
        t.prefill_logits = place(self.arrays["prefill_logits"])
        t.prefill_attention = place(self.arrays["prefill_attention"])
        t.square, t.width, t.owner = square, width, <void*>self
        self.model.prefill, self.model.decode, self.model.data = lattice_prefill, lattice_decode, t
        self.model.by_context = True
        if mixed:
            self.model.mixed = lattice_mixed

    @property
    def tables(self):
        """The points by part, 0 where nobody asked yet; what is written into them counts."""
        return self.arrays

    cdef double fill(self, int what, int64_t i, int64_t j, int64_t k) noexcept:
        cdef double ms
        cdef int64_t length
        try:
            if self.failure is not None:
                return INFINITY
            self.calls += 1
            name, at = NAMES[what], (i,)
            if what == DECODE_ATTENTION:
                numbers, at = (row_point(i), length_point(j, LENGTH_BITS)), (i, j)
            elif what == PREFILL_ATTENTION:
                length, at = length_point(j, LENGTH_BITS), (i, j, k)
                if self.lattice.square:
                    numbers = (row_point(i), 1 if k else length, length - 1 if k else 0)
                else:
                    numbers = (row_point(i), length, length_point(k, CACHED_BITS))
            elif what == PREFILL_REST:
                numbers = (even_point(i >> 1, REST_BITS) + (i & 1),)
            else:
                numbers = (even_point(i, BATCH_BITS),)
            try:
                ms = checked(getattr(self.source, name)(*numbers), name, *numbers, *(0,) * (3 - len(numbers)))
            except LookupError:
                ms = INFINITY
            if ms == 0.0:
                ms = NOTHING
            self.arrays[name][at] = ms
            return ms
        except BaseException as error:
            self.failure = error
        return INFINITY

    cdef double ask_mixed(self, int64_t batch, int64_t tokens, int64_t prefix, int64_t decodes,
                          int64_t context) noexcept:
        try:
            if self.failure is None:
                self.calls += 1
                return checked(self.source.mixed(batch, tokens, prefix, decodes, context), "mixed", batch, tokens,
                               context)
        except BaseException as error:
            self.failure = error
        return NAN

    cdef double ask(self, bint prefill, int64_t batch, int64_t tokens, int64_t depth) noexcept:
        try:
            if self.failure is None:
                self.calls += 1
                if prefill:
                    return checked(self.source.prefill(batch, tokens, depth), "prefill", batch, tokens, depth)
                return checked(self.source.decode(batch, tokens), "decode", batch, 0, tokens)
        except BaseException as error:
            self.failure = error
        return NAN


cdef double* place(array) except NULL:
    cdef double[::1] flat = array.reshape(-1)
    return &flat[0]


def axis_cells(what, int64_t[::1] values):
    """For tests: index, value of the point and of the next for values on the axis `even`, `length` or `row`."""
    cdef int64_t low, step, index, value
    out = []
    for value in values:
        if what == "even":
            index = even_below(value, REST_BITS, &low, &step)
            out.append((index, low, step, even_point(index, REST_BITS), even_point(index + 1, REST_BITS)))
        elif what == "length":
            index = length_below(value, LENGTH_BITS, &low, &step)
            out.append((index, low, step, length_point(index, LENGTH_BITS), length_point(index + 1, LENGTH_BITS)))
        else:
            index = row_below(value, &low, &step)
            out.append((index, low, step, row_point(index), row_point(index + 1)))
    return out
