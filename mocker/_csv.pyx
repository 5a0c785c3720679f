"""Scanner for CSV files of numbers and time stamps; anything unusual is left to Python's csv module.

A row is taken if it has as many fields as the header, none of them quoted, and every wanted one is a plain number or
a time stamp. Other rows are marked by their byte range and read by `formats/tables.py`, which also makes the errors.

Cost: O(bytes), without the GIL.
"""
from libc.stdint cimport int64_t, uint8_t
from libc.string cimport memchr

import numpy as np

cdef enum:
    SKIP = 0                # a column that nobody wants
    INTEGER = 1             # digits, at most 15
    DECIMAL = 2             # digits with at most one point, 15 in all
    MOMENT = 3              # YYYY-MM-DD HH:MM:SS[.fraction][Z or offset], as ns since 1970

KINDS = {"skip": SKIP, "integer": INTEGER, "decimal": DECIMAL, "moment": MOMENT}

cdef double[16] TEN = [1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15]


# As in `_trace.pyx`: no function tests for the end of the buffer, a newline closes every row.

cdef inline const uint8_t* digits(const uint8_t* p, int least, int most, int64_t* value) noexcept nogil:
    """Read between `least` and `most` digits; the byte after them, or NULL."""
    cdef const uint8_t* start = p
    cdef int64_t v = 0
    while <uint8_t>(p[0] - 48) <= 9 and p - start < most:
        v = v * 10 + (p[0] - 48)
        p += 1
    value[0] = v
    return p if p - start >= least and <uint8_t>(p[0] - 48) > 9 else NULL


cdef inline const uint8_t* decimal(const uint8_t* p, double* value) noexcept nogil:
    """Read a decimal number whose digits a double holds exactly; the byte after it, or NULL."""
    cdef const uint8_t* start
    cdef bint negative = p[0] == c'-'
    cdef int64_t whole = 0
    cdef Py_ssize_t places = 0, count
    if negative:
        p += 1
    start = p
    while <uint8_t>(p[0] - 48) <= 9:
        whole = whole * 10 + (p[0] - 48)
        p += 1
        if p - start > 15:
            return NULL
    count = p - start
    if count == 0:
        return NULL
    if p[0] == c'.':
        p += 1
        start = p
        while <uint8_t>(p[0] - 48) <= 9:
            whole = whole * 10 + (p[0] - 48)
            p += 1
            if count + (p - start) > 15:
                return NULL
        places = p - start
        if places == 0:
            return NULL
    value[0] = <double>whole / TEN[places]
    if negative:
        value[0] = -value[0]
    return p


cdef inline int64_t days(int64_t year, int64_t month, int64_t day) noexcept nogil:
    """Days from 1970-01-01 in the Gregorian calendar: years from March on, in cycles of 400 years."""
    cdef int64_t y = year - (month <= 2)
    cdef int64_t m = month + 9 if month <= 2 else month - 3
    return 365 * y + y // 4 - y // 100 + y // 400 + (153 * m + 2) // 5 + day - 1 - 719468


cdef inline int64_t length_of(int64_t year, int64_t month) noexcept nogil:
    """Days of a month."""
    if month == 2:
        return 29 if year % 4 == 0 and (year % 100 != 0 or year % 400 == 0) else 28
    return 30 if month == 4 or month == 6 or month == 9 or month == 11 else 31


cdef const uint8_t* moment(const uint8_t* p, int64_t* value) noexcept nogil:
    """Read a time stamp; the byte after it, or NULL."""
    cdef int64_t year, month, day, hour, minute, second, fraction = 0, ahead = 0, more = 0
    cdef int64_t total
    cdef int sign = 1
    cdef const uint8_t* start
    if (p := digits(p, 4, 4, &year)) == NULL or p[0] != c'-' or (p := digits(p + 1, 2, 2, &month)) == NULL:
        return NULL
    if p[0] != c'-' or (p := digits(p + 1, 2, 2, &day)) == NULL or (p[0] != c' ' and p[0] != c'T'):
        return NULL
    if (p := digits(p + 1, 2, 2, &hour)) == NULL or p[0] != c':' or (p := digits(p + 1, 2, 2, &minute)) == NULL:
        return NULL
    if p[0] != c':' or (p := digits(p + 1, 2, 2, &second)) == NULL:
        return NULL
    if p[0] == c'.':
        start = p + 1
        if (p := digits(start, 1, 9, &fraction)) == NULL:
            return NULL
        for _ in range(9 - (p - start)):
            fraction *= 10
    if p[0] == c'Z':
        p += 1
    elif p[0] == c'+' or p[0] == c'-':
        sign = -1 if p[0] == c'-' else 1
        if (p := digits(p + 1, 2, 2, &ahead)) == NULL or p[0] != c':' or (p := digits(p + 1, 2, 2, &more)) == NULL:
            return NULL
        if ahead > 23 or more > 59:
            return NULL
    if not (1970 <= year <= 2200 and 1 <= month <= 12 and 1 <= day <= length_of(year, month) and hour < 24
            and minute < 60 and second < 60):
        return NULL
    total = ((days(year, month, day) * 24 + hour) * 60 + minute - sign * (ahead * 60 + more)) * 60 + second
    value[0] = total * 1000000000 + fraction
    return p


cdef const uint8_t* read_row(const uint8_t* p, const int64_t[::1] kinds, int64_t[:, ::1] whole, double[:, ::1] real,
                             int64_t row) noexcept nogil:
    """Read a row; the first byte of the next one, or NULL if it is not usual."""
    cdef Py_ssize_t n = kinds.shape[0], k
    for k in range(n):
        if kinds[k] == SKIP:
            while p[0] != c',' and p[0] != c'\n' and p[0] != c'"':
                p += 1
        elif kinds[k] == INTEGER:
            p = digits(p, 1, 15, &whole[k, row])
        elif kinds[k] == DECIMAL:
            p = decimal(p, &real[k, row])
        else:
            p = moment(p, &whole[k, row])
        if p == NULL:
            return NULL
        if k < n - 1:
            if p[0] != c',':
                return NULL
            p += 1
    if p[0] == c'\r':
        p += 1
    return p + 1 if p[0] == c'\n' else NULL


def scan_csv(const uint8_t[::1] data not None, Py_ssize_t start, const int64_t[::1] kinds not None):
    """Read the rows of a CSV buffer after its header.

    Parameters
    ----------
    data : bytes-like
    start : int
        First byte after the header row.
    kinds : int64[columns]
        One of `KINDS` for each column.

    Returns
    -------
    whole : int64[columns, rows]
        Values of integer and moment columns (ns).
    real : float64[columns, rows]
        Values of decimal columns.
    line : int64[rows]
        Lines after the header before each row.
    slow : int64[k, 3]
        Row, first byte and one past the last byte of each row that was not taken.
    """
    cdef Py_ssize_t size = data.shape[0]
    cdef int64_t rows = 0, lines = 0, count = 0, most = 1
    cdef const uint8_t* base = &data[0] if size else NULL
    cdef const uint8_t* p = base + start
    cdef const uint8_t* end = base + size
    cdef const uint8_t* stop = end
    cdef const uint8_t* q
    if not 0 <= start <= size or not kinds.shape[0]:
        raise ValueError("start must be a place in the data, and there must be a column")
    with nogil:
        while stop > p and (stop - 1)[0] != c'\n':
            stop -= 1
        q = p
        while q < stop:
            q = <const uint8_t*>memchr(q, c'\n', stop - q) + 1
            most += 1
    whole_of, real_of = np.zeros((kinds.shape[0], most), np.int64), np.zeros((kinds.shape[0], most))
    line_of, marks_of = np.empty(most, np.int64), np.zeros((most, 3), np.int64)
    cdef int64_t[:, ::1] whole = whole_of, marks = marks_of
    cdef double[:, ::1] real = real_of
    cdef int64_t[::1] line = line_of
    with nogil:
        while p < end:
            if p < stop:
                q = <const uint8_t*>memchr(p, c'\n', stop - p)
            else:
                q = end
            lines += 1
            if q == p or (q == p + 1 and p[0] == c'\r'):
                p = q + 1
                continue
            line[rows] = lines
            if q == end or read_row(p, kinds, whole, real, rows) != q + 1:
                marks[count, 0], marks[count, 1], marks[count, 2] = rows, p - base, q - base
                count += 1
            rows += 1
            p = q + 1
    return whole_of[:, :rows], real_of[:, :rows], line_of[:rows], marks_of[:count]
