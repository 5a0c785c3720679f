"""Scanner for Mooncake JSONL.

Answers to the row reader of the reference (`dynamo-data-gen`, `mooncake.rs`) for the rows that nearly every trace
consists of: one flat object a line, plain numbers, plain ASCII strings. Everything else is only marked here, by its
byte range, and read by `formats/mooncake.py`, which also makes every error message. So a row taken here is a valid row,
and the two readers must agree on it.

Cost: `scan_mooncake` is O(bytes), one walk after a count of the lines, without the GIL.
"""
from cpython.unicode cimport PyUnicode_DecodeASCII
from libc.math cimport NAN
from libc.stdint cimport INT32_MAX, UINT32_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memchr, memcmp

import numpy as np

from mocker._digits cimport short_integer, short_integers
from mocker._pages cimport large_pages

cdef extern from "Python.h":
    double PyOS_string_to_double(const char *text, char **end, void *overflow) except? -1.0

cdef enum:
    NOT_TAKEN = 0           # the row is for the slow reader
    TAKEN = 1
    FULL_IDS = 2            # no room for another hash id: enlarge, then scan this row again
    FULL_TOKENS = 3         # the same for planned output tokens
    PAUSED = 4              # at `Scan.limit`

cdef enum:                  # keys of a row; bits of "already seen"
    UNKNOWN = 0
    TIMESTAMP = 1
    INPUT_LENGTH = 2
    OUTPUT_LENGTH = 4
    HASH_IDS = 8
    DELAY = 16
    SESSION_ID = 32
    REQUEST_ID = 64
    PRIORITY = 128
    STRICT_PRIORITY = 256
    POLICY_CLASS = 512
    OUTPUT_TOKEN_IDS = 1024
    CANCEL_AFTER = 2048     # rare: for the slow reader

cdef struct Scan:
    const uint8_t *base     # first byte of the file
    const uint8_t *end      # one past the last newline; every row before it ends with one
    const uint8_t *pos      # start of the next line
    const uint8_t *limit    # no row that starts here or later is read before a pause; at most `end`
    int64_t lines           # lines passed, blank ones too
    int64_t rows            # rows written, slow ones too
    int64_t ids             # hash ids written
    int64_t ids_room        # length of hash_ids
    int64_t tokens          # planned output tokens written
    int64_t tokens_room     # length of token_ids
    int64_t slow            # rows left to the slow reader
    int64_t late            # numbers left to Python's float
    int64_t sessions        # rows with a session id
    int64_t requests        # rows with a request id
    int64_t policies        # rows with a policy class
    double *arrival         # [row] ms, NaN = missing
    double *delay           # [row] ms, NaN = missing
    int64_t *input          # [row] tokens, -1 = missing
    int64_t *output         # [row] tokens
    int64_t *offsets        # [row + 1] into hash_ids
    uint64_t *hash_ids
    uint32_t *token_ids     # concatenated planned output tokens
    int32_t *priority       # [row] 0 unless given, as the next one
    uint32_t *strict
    int64_t *line           # [row] 1-based
    int64_t *slow_start     # [row] byte range of a slow row, end 0 = the row was taken
    int64_t *slow_end
    int64_t *late_arrival   # [row] byte where a number starts that needs float(), 0 = none
    int64_t *late_delay
    int64_t *session_at     # [row] first byte of the string, 0 = none
    int64_t *request_at
    int64_t *policy_at
    int64_t *planned        # [row] number of planned output tokens

# Powers of ten that a double holds exactly: with a mantissa below 2**53 one division rounds once, hence correctly.
cdef double[20] TEN = [1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15, 1e16,
                       1e17, 1e18, 1e19]
cdef enum:
    MAX_LATE = 64           # longer numbers might overflow a double: slow reader
    RELEASE_BYTES = 1 << 26  # bytes between two calls of `release`


# No function below tests for the end of the buffer: each step forward passes a byte that is known not to be a newline,
# and a newline closes every row.

cdef inline const uint8_t *_blank(const uint8_t *p) noexcept nogil:
    """The first byte at or after `p` that is no JSON white space inside a line."""
    while p[0] == c' ' or p[0] == c'\t' or p[0] == c'\r':
        p += 1
    return p


cdef inline const uint8_t *_string(const uint8_t *p) noexcept nogil:
    """The closing quote of the string whose first byte is `p`, or NULL for anything but printable ASCII."""
    while p[0] != c'"':
        if p[0] < 0x20 or p[0] >= 0x80 or p[0] == c'\\':
            return NULL
        p += 1
    return p


cdef inline const uint8_t *_integer(const uint8_t *p, int most, uint64_t *value) noexcept nogil:
    """Read an unsigned integer of at most `most` digits (19 fit a uint64); the byte after it, or NULL."""
    cdef const uint8_t *start = p
    cdef uint64_t v = 0
    cdef uint8_t d = <uint8_t>(p[0] - 48)
    while d <= 9:
        v = v * 10 + d
        p += 1
        d = <uint8_t>(p[0] - 48)
    if p == start or p - start > most or (start[0] == c'0' and p - start > 1):
        return NULL
    value[0] = v
    return p


cdef inline const uint8_t *_number(const uint8_t *p, double *value, bint *late) noexcept nogil:
    """Read a decimal number without exponent; the byte after it, or NULL.

    Sets `late` where the nearest double needs more than one exact operation.
    """
    cdef const uint8_t *start
    cdef const uint8_t *first = p
    cdef bint negative = p[0] == c'-'
    cdef uint64_t v = 0
    cdef uint8_t d
    cdef Py_ssize_t whole, places = 0
    if negative:
        p += 1
    start = p
    d = <uint8_t>(p[0] - 48)
    while d <= 9:
        v = v * 10 + d
        p += 1
        d = <uint8_t>(p[0] - 48)
    whole = p - start
    if whole == 0 or (start[0] == c'0' and whole > 1):
        return NULL
    if p[0] == c'.':
        p += 1
        start = p
        d = <uint8_t>(p[0] - 48)
        while d <= 9:
            v = v * 10 + d
            p += 1
            d = <uint8_t>(p[0] - 48)
        places = p - start
        if places == 0:
            return NULL
    if p[0] == c'e' or p[0] == c'E' or p - first > MAX_LATE:
        return NULL
    if negative and v == 0:
        return NULL         # the sign of a zero is the slow reader's affair (and v may have wrapped to 0)
    late[0] = whole + places > 19 or v > <uint64_t>1 << 53
    if not late[0]:
        value[0] = <double>v / TEN[places]
        if negative:
            value[0] = -value[0]
    return p


cdef inline int _key(const uint8_t *p, Py_ssize_t n) noexcept nogil:
    """Which key the `n` bytes at `p` are."""
    if n == 8:
        if memcmp(p, b"hash_ids", 8) == 0:
            return HASH_IDS
        if memcmp(p, b"delay_ms", 8) == 0:
            return DELAY
        if memcmp(p, b"priority", 8) == 0:
            return PRIORITY
    elif n == 9:
        if memcmp(p, b"timestamp", 9) == 0:
            return TIMESTAMP
    elif n == 12:
        if memcmp(p, b"input_length", 12) == 0 or memcmp(p, b"input_tokens", 12) == 0:
            return INPUT_LENGTH
        if memcmp(p, b"created_time", 12) == 0:
            return TIMESTAMP
        if memcmp(p, b"policy_class", 12) == 0:
            return POLICY_CLASS
    elif n == 13:
        if memcmp(p, b"output_length", 13) == 0 or memcmp(p, b"output_tokens", 13) == 0:
            return OUTPUT_LENGTH
    elif n == 10:
        if memcmp(p, b"session_id", 10) == 0:
            return SESSION_ID
        if memcmp(p, b"request_id", 10) == 0:
            return REQUEST_ID
    elif n == 5:
        if memcmp(p, b"delay", 5) == 0:
            return DELAY
    elif n == 15:
        if memcmp(p, b"strict_priority", 15) == 0:
            return STRICT_PRIORITY
        if memcmp(p, b"cancel_after_ms", 15) == 0:
            return CANCEL_AFTER
    elif n == 16:
        if memcmp(p, b"output_token_ids", 16) == 0:
            return OUTPUT_TOKEN_IDS
    return UNKNOWN


cdef inline const uint8_t *_skip(const uint8_t *p) noexcept nogil:
    """Pass a scalar or a plain string; the byte after it, or NULL."""
    cdef double value
    cdef bint late
    if p[0] == c'"':
        p = _string(p + 1)
        if p == NULL:
            return NULL
        return p + 1
    if p[0] == c't':        # byte by byte: memcmp could look beyond the end of the buffer
        return p + 4 if p[1] == c'r' and p[2] == c'u' and p[3] == c'e' else NULL
    if p[0] == c'n':
        return p + 4 if p[1] == c'u' and p[2] == c'l' and p[3] == c'l' else NULL
    if p[0] == c'f':
        return p + 5 if p[1] == c'a' and p[2] == c'l' and p[3] == c's' and p[4] == c'e' else NULL
    return _number(p, &value, &late)


cdef inline const uint8_t *_integers(const uint8_t *p, void *to, bint tokens, int64_t *count, int64_t room,
                                     const uint8_t *end, bint *full) noexcept nogil:
    """Append the list at `p`, of hash ids (uint64) or tokens (uint32), at index `count[0]`; the byte after it, or NULL.

    NULL with `full` set means that the list would not fit. Tokens that are not as `_digits` wants them are read one by
    one: they have now this many digits, now that. Ids, which are counted up, have as many as the one before: their loop
    is guessed right. `end`: one past the buffer.
    """
    cdef int digits
    cdef int64_t n = count[0]
    cdef uint64_t value = 0
    if p[0] != c'[':
        return NULL
    p = _blank(p + 1)
    if tokens:
        p = _blank(short_integers(p, end, <uint32_t*>to, &n, room))
    while True:
        digits = short_integer(p, &value) if tokens and end - p >= 8 else 0
        if digits > 0 and (digits == 1 or p[0] != c'0'):
            p += digits
        else:
            p = _integer(p, 19, &value)
        if p == NULL or (tokens and value > UINT32_MAX):
            return NULL     # also the empty list, which is an error or rare
        if n == room:
            full[0] = True
            return NULL
        if tokens:
            (<uint32_t*>to)[n] = <uint32_t>value
        else:
            (<uint64_t*>to)[n] = value
        n += 1
        if p[0] != c',':
            p = _blank(p)
            if p[0] == c']':
                count[0] = n
                return p + 1
            if p[0] != c',':
                return NULL
        p += 1
        if p[0] == c' ':    # the usual separator is ", "
            p += 1
        if p[0] < c'0':
            p = _blank(p)


cdef int _row(Scan *s, const uint8_t *p) noexcept nogil:
    """Read the row at `p` (first byte that is not blank) into the columns, or leave them as if untouched."""
    cdef int64_t row = s.rows, ids = s.ids, tokens = s.tokens
    cdef int64_t late_arrival = 0, late_delay = 0, session_at = 0, request_at = 0, policy_at = 0
    cdef double arrival = NAN, delay = NAN
    cdef uint64_t length = 0
    cdef int64_t input = -1, output = -1, priority = 0, strict = 0
    cdef const uint8_t *q
    cdef int key, seen = 0
    cdef bint late = False, full = False
    if p[0] != c'{':
        return NOT_TAKEN
    p = _blank(p + 1)
    while True:
        if p[0] != c'"':
            return NOT_TAKEN
        p += 1
        q = _string(p)
        if q == NULL:
            return NOT_TAKEN
        key = _key(p, q - p)
        if key & seen:
            return NOT_TAKEN
        seen |= key
        p = _blank(q + 1)
        if p[0] != c':':
            return NOT_TAKEN
        p = _blank(p + 1)
        q = p
        if key == HASH_IDS:
            p = _integers(p, s.hash_ids, False, &ids, s.ids_room, s.end, &full)
            if full:
                return FULL_IDS
        elif key == INPUT_LENGTH:
            p = _integer(p, 18, &length)
            input = <int64_t>length
        elif key == OUTPUT_LENGTH:
            p = _integer(p, 18, &length)
            output = <int64_t>length
        elif key == TIMESTAMP:
            p = _number(p, &arrival, &late)
            if late:
                late_arrival = q - s.base
        elif key == DELAY:
            p = _number(p, &delay, &late)
            if late:
                late_delay = q - s.base
        elif key == UNKNOWN:
            p = _skip(p)
        elif key == OUTPUT_TOKEN_IDS:
            p = _integers(p, s.token_ids, True, &tokens, s.tokens_room, s.end, &full)
            if full:
                return FULL_TOKENS
        elif key == PRIORITY:
            p = _integer(p + 1 if q[0] == c'-' else p, 10, &length)
            if length > INT32_MAX or (length == 0 and q[0] == c'-'):
                return NOT_TAKEN
            priority = -<int64_t>length if q[0] == c'-' else <int64_t>length
        elif key == CANCEL_AFTER:
            return NOT_TAKEN
        elif key == STRICT_PRIORITY:
            p = _integer(p, 10, &length)
            if length > UINT32_MAX:
                return NOT_TAKEN
            strict = <int64_t>length
        else:
            if p[0] != c'"':
                return NOT_TAKEN
            p = _string(q + 1)
            if p != NULL:
                p += 1
            if key == SESSION_ID:
                session_at = q + 1 - s.base
            elif key == POLICY_CLASS:
                policy_at = q + 1 - s.base
            else:
                request_at = q + 1 - s.base
        if p == NULL:
            return NOT_TAKEN
        late = False
        p = _blank(p)
        if p[0] == c'}':
            break
        if p[0] != c',':
            return NOT_TAKEN
        p = _blank(p + 1)
    p = _blank(p + 1)
    if p[0] != c'\n' or (seen & (HASH_IDS | OUTPUT_LENGTH)) != HASH_IDS | OUTPUT_LENGTH:
        return NOT_TAKEN
    if seen & OUTPUT_TOKEN_IDS and tokens - s.tokens != output:
        return NOT_TAKEN
    s.arrival[row] = arrival
    s.delay[row] = delay
    s.input[row] = input
    s.output[row] = output
    s.offsets[row + 1] = ids
    s.ids = ids
    if seen & (PRIORITY | STRICT_PRIORITY | POLICY_CLASS | OUTPUT_TOKEN_IDS):
        s.priority[row] = <int32_t>priority
        s.strict[row] = <uint32_t>strict
        s.policy_at[row] = policy_at
        s.policies += policy_at != 0
        s.planned[row] = tokens - s.tokens
        s.tokens = tokens
    if late_arrival | late_delay | session_at | request_at:
        s.late_arrival[row] = late_arrival
        s.late_delay[row] = late_delay
        s.session_at[row] = session_at
        s.request_at[row] = request_at
        s.late += (late_arrival != 0) + (late_delay != 0)
        s.sessions += session_at != 0
        s.requests += request_at != 0
    s.pos = p + 1
    return TAKEN


cdef void _mark_slow(Scan *s, const uint8_t *start, const uint8_t *stop) noexcept nogil:
    """Reserve a row for the bytes from `start` to before `stop`."""
    s.arrival[s.rows] = NAN
    s.delay[s.rows] = NAN
    s.input[s.rows] = -1
    s.output[s.rows] = -1
    s.offsets[s.rows + 1] = s.ids
    s.slow_start[s.rows] = start - s.base
    s.slow_end[s.rows] = stop - s.base
    s.slow += 1


cdef int _scan(Scan *s, bint all_slow) noexcept nogil:
    """Read rows up to the last newline; TAKEN, PAUSED, or a FULL_ code before a row that needs more room."""
    cdef const uint8_t *p
    cdef int status
    while s.pos < s.limit:
        p = s.pos
        while p[0] == c' ' or 0x0b <= p[0] <= 0x0d or p[0] == c'\t':
            p += 1
        if p[0] == c'\n':
            s.lines += 1
            s.pos = p + 1
            continue
        status = NOT_TAKEN if all_slow else _row(s, _blank(s.pos))
        if status >= FULL_IDS:
            return status
        if status == NOT_TAKEN:
            p = <const uint8_t *>memchr(p, c'\n', s.end - p)
            _mark_slow(s, s.pos, p)
            s.pos = p + 1
        s.lines += 1
        s.line[s.rows] = s.lines
        s.rows += 1
    return TAKEN if s.pos >= s.end else PAUSED


cdef int64_t _count_lines(const uint8_t *p, const uint8_t *end) noexcept nogil:
    """Newlines in a buffer."""
    cdef int64_t n = 0
    while p < end:
        p = <const uint8_t *>memchr(p, c'\n', end - p)
        if p == NULL:
            break
        p += 1
        n += 1
    return n


cdef class MooncakeRows:
    """What `scan_mooncake` found, one entry a row in file order; rows of the slow reader have placeholders.

    Attributes
    ----------
    arrival_ms, delay_ms : float64[n]
        As written in the row, NaN where the row has none.
    input_length, output_length : int64[n]
        Tokens; -1 for an input length that the row does not give.
    hash_offsets : int64[n + 1]
    hash_ids : uint64[hash_offsets[n]]
    line : int64[n]
        1-based line in the file.
    slow : int64[k, 3]
        Row, first byte and one past the last byte of each row that was not taken.
    session_ids, request_ids, policy_class : list of (str or None), or None
        None when no taken row has one.
    priority : int32[n]
    strict_priority : uint32[n]
        0 unless given.
    planned : int64[n]
        Number of planned output tokens.
    output_token_ids : uint32[sum(planned)]
    """
    cdef readonly object arrival_ms, delay_ms, input_length, output_length, hash_offsets, hash_ids, line, slow
    cdef readonly object priority, strict_priority, planned, output_token_ids
    cdef readonly list session_ids, request_ids, policy_class


cdef int64_t _let_go(object release, int64_t kept, int64_t at) except -1:
    """Give back the stretch from `kept` to `at` if it is long enough; where the next one begins."""
    if release is None or at - kept < RELEASE_BYTES:
        return kept
    release(kept, at - kept)
    return at


cdef list _strings(const uint8_t *base, const int64_t *at, int64_t rows, object release):
    """The plain strings that start at `at` (0 = None)."""
    cdef list found = [None] * rows
    cdef int64_t kept = 0
    cdef const uint8_t *p
    cdef int64_t row
    for row in range(rows):
        if at[row]:
            p = base + at[row]
            found[row] = PyUnicode_DecodeASCII(<const char *>p, _string(p) - p, NULL)
            kept = _let_go(release, kept, at[row])
    return found


cdef int _read_late(const uint8_t *base, const int64_t *at, double *column, int64_t rows, object release) except -1:
    """Fill in the numbers that need more than one exact operation, as Python's float rounds them."""
    cdef int64_t row, kept = 0
    cdef char *end
    for row in range(rows):
        if at[row]:
            # Stops at what ends the number; the newline of the row at the latest.
            column[row] = PyOS_string_to_double(<const char *>base + at[row], &end, NULL)
            kept = _let_go(release, kept, at[row])
    return 0


cdef object _wider(object ids, int64_t used, int64_t least):
    """A larger copy of an array of which the first `used` values count."""
    wider = np.empty(max(2 * len(ids), least), ids.dtype)
    wider[:used] = ids[:used]
    return wider


def scan_mooncake(const uint8_t[::1] data not None, Py_ssize_t start=0, bint all_slow=False, release=None):
    """Read the usual rows of a Mooncake JSONL buffer, and mark the others.

    Parameters
    ----------
    data : bytes-like
        The file; it must not change during the call.
    start : int
        First byte to read, e.g. after a byte order mark.
    all_slow : bool
        Mark every row (tests compare the two readers with it).
    release : callable, optional
        ``release(first byte, bytes)`` is told of stretches that are not needed for a while, so that the pages of a
        mapped file need not all stay in memory.

    Returns
    -------
    MooncakeRows
    """
    cdef Py_ssize_t size = data.shape[0]
    cdef Scan s
    cdef const uint8_t *p
    cdef int64_t most = 0, room, i, k = 0
    cdef Py_ssize_t step = RELEASE_BYTES if release is not None else size + 1
    cdef bint open_end
    cdef int status
    cdef double[::1] arrival, delay
    cdef int64_t[::1] input, output, offsets, line
    cdef int64_t[:, ::1] marks, slow
    cdef int32_t[::1] priority
    cdef uint32_t[::1] strict, token_ids
    cdef uint64_t[::1] ids
    cdef int64_t guess = (size - start) // 6 + 16       # values: each takes some nine bytes in practice
    cdef MooncakeRows out = MooncakeRows.__new__(MooncakeRows)
    if not 0 <= start <= size:
        raise ValueError(f"start must be in [0, {size}], is {start}")
    s.base = &data[0] if size else NULL
    s.end = s.base + size
    s.pos = s.base + start
    s.lines = s.rows = s.ids = s.tokens = s.slow = s.late = s.sessions = s.requests = s.policies = 0
    with nogil:
        while s.end > s.pos and (s.end - 1)[0] != c'\n':
            s.end -= 1
        p = s.end
        while p < s.base + size and (p[0] == c' ' or 0x09 <= p[0] <= 0x0d):
            p += 1
        open_end = p < s.base + size
    p = s.pos
    while p < s.end:
        with nogil:
            most += _count_lines(p, s.end if s.end - p < step else p + step)
        if release is not None:
            release(p - s.base, step)
        p += step if s.end - p > step else s.end - p
    most += open_end
    room = most if most else 1          # so that every column has an element to point to
    out.arrival_ms, out.delay_ms = np.empty(room), np.empty(room)
    out.input_length, out.output_length = np.empty(room, np.int64), np.empty(room, np.int64)
    out.line, out.hash_offsets = np.empty(room, np.int64), np.empty(room + 1, np.int64)
    out.hash_ids = np.empty(guess, np.uint64)           # pages that stay untouched cost nothing
    tokens = np.empty(1, np.uint32)
    out.priority, out.strict_priority = np.zeros(room, np.int32), np.zeros(room, np.uint32)
    arrival, delay, input, output = out.arrival_ms, out.delay_ms, out.input_length, out.output_length
    line, offsets, ids, token_ids = out.line, out.hash_offsets, out.hash_ids, tokens
    priority, strict = out.priority, out.strict_priority
    notes = np.zeros((8, room), np.int64)
    marks = notes
    s.arrival, s.delay, s.input, s.output = &arrival[0], &delay[0], &input[0], &output[0]
    s.line, s.offsets, s.hash_ids, s.ids_room = &line[0], &offsets[0], &ids[0], ids.shape[0]
    s.priority, s.strict, s.token_ids, s.tokens_room = &priority[0], &strict[0], &token_ids[0], 1
    s.slow_start, s.slow_end, s.late_arrival = &marks[0, 0], &marks[1, 0], &marks[2, 0]
    s.late_delay, s.session_at, s.request_at = &marks[3, 0], &marks[4, 0], &marks[5, 0]
    s.policy_at, s.planned = &marks[6, 0], &marks[7, 0]
    s.offsets[0] = 0
    s.limit = s.pos
    while True:
        if s.pos >= s.limit:
            if release is not None and s.pos > s.base + start:
                release(s.pos - s.base - step, step)
            s.limit = s.end if s.end - s.pos < step else s.pos + step
        with nogil:
            status = _scan(&s, all_slow)
        if status == FULL_IDS:
            out.hash_ids = _wider(out.hash_ids, s.ids, guess)
            ids = out.hash_ids
            s.hash_ids, s.ids_room = &ids[0], ids.shape[0]
        elif status == FULL_TOKENS:
            tokens = _wider(tokens, s.tokens, guess)
            token_ids = tokens
            large_pages(&token_ids[0], tokens.nbytes)
            s.token_ids, s.tokens_room = &token_ids[0], token_ids.shape[0]
        elif status == TAKEN:
            break
    if open_end:            # a last line without newline: the scanner may not run into the end of the buffer
        _mark_slow(&s, s.end, s.base + size)
        s.line[s.rows] = s.lines + 1
        s.rows += 1
    if s.late:
        _read_late(s.base, s.late_arrival, s.arrival, s.rows, release)
        _read_late(s.base, s.late_delay, s.delay, s.rows, release)
    out.session_ids = _strings(s.base, s.session_at, s.rows, release) if s.sessions else None
    out.request_ids = _strings(s.base, s.request_at, s.rows, release) if s.requests else None
    out.policy_class = _strings(s.base, s.policy_at, s.rows, release) if s.policies else None
    out.planned = notes[7, :s.rows].copy()
    out.slow = np.empty((s.slow, 3), np.int64)
    slow = out.slow
    for i in range(s.rows if s.slow else 0):
        if s.slow_end[i]:
            slow[k, 0], slow[k, 1], slow[k, 2] = i, s.slow_start[i], s.slow_end[i]
            k += 1
    arrival = delay = None      # an array with a view on it must not be resized
    input = output = line = offsets = None
    priority = None
    strict = token_ids = None
    ids = None
    for column in (out.arrival_ms, out.delay_ms, out.input_length, out.output_length, out.line, out.priority,
                   out.strict_priority):
        column.resize(s.rows, refcheck=False)
    out.hash_offsets.resize(s.rows + 1, refcheck=False)
    out.hash_ids.resize(s.ids, refcheck=False)      # gives the spare pages back, without a copy
    tokens.resize(s.tokens, refcheck=False)
    out.output_token_ids = tokens
    return out
