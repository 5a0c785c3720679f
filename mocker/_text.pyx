# cython: language_level=3
"""Columns as lines of text: JSON, CSV and trace events, with every number as Python's `repr` writes it.

The shortest decimal that reads back as the same double is found with one or two 128-bit products (R. Giulietti, "The
Schubfach way to render doubles", 2020). Cost: some ten nanoseconds a number; the powers of ten that it needs (10 KB)
are made at import.
"""
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memset

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE

import numpy as np

from mocker._wide cimport multiply

cdef enum:
    LOW_POWER = -292               # of the powers of ten that a double can need
    POWERS = 617
    NUMBER_BYTES = 32              # that a number has at most
    REAL = 0                       # kinds of columns
    WHOLE = 1
    TEXT = 2

cdef uint64_t[POWERS] POWER_HIGH   # 10**i as 128 bits with the highest set, rounded up
cdef uint64_t[POWERS] POWER_LOW
cdef char[200] PAIRS               # "00" to "99"


cdef void make_tables():
    cdef int i
    for i in range(POWERS):
        exact = i + LOW_POWER
        power = 10 ** abs(exact)
        if exact >= 0:
            shift = power.bit_length() - 128
            wide = -(-power >> shift) if shift > 0 else power << -shift
        else:
            wide = -(-(1 << (power.bit_length() + 127)) // power)
        POWER_HIGH[i] = wide >> 64
        POWER_LOW[i] = wide & 0xFFFFFFFFFFFFFFFF
    for i in range(100):
        PAIRS[2 * i], PAIRS[2 * i + 1] = 48 + i // 10, 48 + i % 10


make_tables()


cdef inline uint64_t scaled(uint64_t high, uint64_t low, uint64_t value) noexcept nogil:
    """value * (high, low) / 2**128, with the last bit set if it is not exact."""
    cdef uint64_t carry, top, middle
    multiply(low, value, &carry)
    middle = multiply(high, value, &top)
    middle += carry
    if middle < carry:
        top += 1
    return top | (middle > 1)


cdef uint64_t shortest(uint64_t c, int64_t q, bint lopsided, int64_t* exponent) noexcept nogil:
    """Digits d and exponent e so that d * 10**e is the shortest decimal that reads as c * 2**q."""
    cdef uint64_t odd = c & 1, left, middle, right, s, t, high, low
    cdef int64_t k, h
    cdef bint below, above
    # floor(log10(2**q)), of 3/4 of it where the gap to the left is half as wide; floor(log2(10**-k)).
    k = (q * 1262611 - (524031 if lopsided else 0)) >> 22
    h = q + ((-k * 1741647) >> 19) + 1
    high, low = POWER_HIGH[-k - LOW_POWER], POWER_LOW[-k - LOW_POWER]
    left = scaled(high, low, (4 * c - (1 if lopsided else 2)) << h) + odd
    middle = scaled(high, low, (4 * c) << h)
    right = scaled(high, low, (4 * c + 2) << h) - odd
    s = middle // 4
    if s >= 10:
        t = s // 10
        below, above = left <= 40 * t, 40 * t + 40 <= right
        if below != above:
            exponent[0] = k + 1
            return t + above
    below, above = left <= 4 * s, 4 * s + 4 <= right
    exponent[0] = k
    if below == above:             # both neighbours read back, or none: the nearer one, of two alike the even one
        above = middle > 4 * s + 2 or (middle == 4 * s + 2 and s % 2 == 1)
    return s + above


cdef inline char* put_whole(char* out, uint64_t value) noexcept nogil:
    """Write a whole number; returns the place behind it."""
    cdef char[24] digits
    cdef int n = 24
    cdef uint64_t pair
    while value >= 100:
        pair = value % 100
        value //= 100
        n -= 2
        memcpy(&digits[n], &PAIRS[2 * pair], 2)
    if value >= 10:
        n -= 2
        memcpy(&digits[n], &PAIRS[2 * value], 2)
    else:
        n -= 1
        digits[n] = <char>(48 + value)
    memcpy(out, &digits[n], 24 - n)
    return out + 24 - n


cdef char* put_real(char* out, double value) noexcept nogil:
    """Write a finite number as `repr` does; returns the place behind it."""
    cdef uint64_t bits, c, d
    cdef int64_t q, e, n, point
    cdef char[24] digits
    memcpy(&bits, &value, 8)
    if bits >> 63:
        out[0] = b"-"
        out += 1
        value = -value
    if value < 1e15 and value == <double><uint64_t>value:
        out = put_whole(out, <uint64_t>value)
        memcpy(out, b".0", 2)
        return out + 2
    q = <int64_t>(bits >> 52 & 2047)
    c = bits & ((<uint64_t>1 << 52) - 1)
    d = shortest(c | (<uint64_t>1 << 52) if q else c, (q if q else 1) - 1075, c == 0 and q > 1, &e)
    while d % 10 == 0:
        d //= 10
        e += 1
    n = put_whole(digits, d) - digits
    point = n + e                  # digits before the decimal point
    if -4 < point <= 0:
        memcpy(out, b"0.000", 5)
        out += 2 - point
        memcpy(out, digits, n)
        return out + n
    if 0 < point < n:
        memcpy(out, digits, point)
        out[point] = b"."
        memcpy(out + point + 1, &digits[point], n - point)
        return out + n + 1
    if 0 < point <= 16:
        memcpy(out, digits, n)
        memset(out + n, 48, point - n)
        memcpy(out + point, b".0", 2)
        return out + point + 2
    out[0] = digits[0]
    out += 1
    if n > 1:
        out[0] = b"."
        memcpy(out + 1, &digits[1], n - 1)
        out += n
    point -= 1
    out[0] = b"e"
    out[1] = b"-" if point < 0 else b"+"
    point = -point if point < 0 else point
    if point < 10:
        out[2] = 48
        out += 1
    return put_whole(out + 2, <uint64_t>point)


cdef struct Column:
    int kind
    bint gaps                      # WHOLE: -1 is a missing value
    const double* real
    const int64_t* whole
    void** text                    # bytes objects, each alive in a list


def lines(list pieces, list columns, bytes missing):
    """Rows of text.

    Parameters
    ----------
    pieces : list of bytes, k + 1
        What stands before each value of a row and after its last.
    columns : list, k
        Of each column, all of one length: an array of float64; of int64; a pair of such and True: -1 in it is a
        missing value; or a list of bytes, which are written as they are.
    missing : bytes
        The text of a missing value: NaN, an infinity, -1 as above.

    Returns
    -------
    bytes
    """
    cdef int64_t k = len(columns), rows = 0, i, row, size = 0, used = 0, step, need
    cdef Column* table = <Column*>malloc((k + 1) * sizeof(Column))
    cdef const char** before = <const char**>malloc((k + 1) * sizeof(char*))
    cdef int64_t* lengths = <int64_t*>malloc((k + 1) * sizeof(int64_t))
    cdef const char* gap = PyBytes_AS_STRING(missing)
    cdef int64_t gap_length = PyBytes_GET_SIZE(missing)
    cdef char* buffer = NULL
    cdef char* out
    cdef char* grown
    cdef const double[::1] real
    cdef const int64_t[::1] whole
    cdef double x
    cdef int64_t w
    cdef Column* c
    keep = []                      # the arrays that pointers point into
    try:
        if table == NULL or before == NULL or lengths == NULL:
            raise MemoryError
        if len(pieces) != k + 1:
            raise ValueError(f"{k} columns need {k + 1} pieces, got {len(pieces)}")
        step = gap_length
        for i in range(k + 1):
            before[i] = PyBytes_AS_STRING(pieces[i])
            lengths[i] = PyBytes_GET_SIZE(pieces[i])
            step += lengths[i]
        step += k * max(<int64_t>NUMBER_BYTES, gap_length)
        for i in range(k):
            values = columns[i]
            c = &table[i]
            c.gaps = isinstance(values, tuple)
            if c.gaps:
                values = values[0]
            if i and len(values) != rows:
                raise ValueError(f"columns differ in length: {rows} and {len(values)}")
            rows = len(values)
            if isinstance(values, list):
                c.kind = TEXT
                texts = np.empty(rows, object)
                texts[:] = values
                for text in values:
                    if not isinstance(text, bytes):
                        raise TypeError(f"a text must be bytes, got {type(text).__name__}")
                keep.append(texts)
                c.text = <void**><size_t>texts.ctypes.data
            elif values.dtype == np.float64:
                c.kind = REAL
                values = np.ascontiguousarray(values)
                keep.append(values)
                real = values
                c.real = &real[0] if rows else NULL
            else:
                c.kind = WHOLE
                values = np.ascontiguousarray(values, np.int64)
                keep.append(values)
                whole = values
                c.whole = &whole[0] if rows else NULL
        for row in range(rows):
            if size - used < step:
                size = max(2 * size, used + step + 65536)
                grown = <char*>realloc(buffer, size)
                if grown == NULL:
                    raise MemoryError
                buffer = grown
            out = buffer + used
            for i in range(k):
                c = &table[i]
                memcpy(out, before[i], lengths[i])
                out += lengths[i]
                if c.kind == REAL:
                    x = c.real[row]
                    if x - x == 0.0:
                        out = put_real(out, x)
                        continue
                elif c.kind == WHOLE:
                    w = c.whole[row]
                    if not (c.gaps and w == -1):
                        if w < 0:
                            out[0] = b"-"
                            out += 1
                        out = put_whole(out, <uint64_t>w if w >= 0 else <uint64_t>(-(w + 1)) + 1)
                        continue
                else:
                    need = PyBytes_GET_SIZE(<object>c.text[row])
                    used = out - buffer
                    if size - used < step + need:
                        size = max(2 * size, used + step + need)
                        grown = <char*>realloc(buffer, size)
                        if grown == NULL:
                            raise MemoryError
                        buffer = grown
                        out = buffer + used
                    memcpy(out, PyBytes_AS_STRING(<object>c.text[row]), need)
                    out += need
                    continue
                memcpy(out, gap, gap_length)
                out += gap_length
            memcpy(out, before[k], lengths[k])
            used = out + lengths[k] - buffer
        return PyBytes_FromStringAndSize(buffer, used) if used else b""
    finally:
        free(table)
        free(before)
        free(lengths)
        free(buffer)


def encoded(list values, encode):
    """The texts of values: `encode` of each, called once for each different string or int."""
    cdef dict known = {}
    cdef list out = []
    cdef object value, text
    for value in values:
        if type(value) is not str and type(value) is not int:
            out.append(encode(value))
            continue
        text = known.get(value)
        if text is None:
            text = known[value] = encode(value)
        out.append(text)
    return out
