# cython: language_level=3
"""Columns as lines of text: JSON, CSV and trace events, with every number as Python's `repr` writes it.

The shortest decimal that reads back as the same double is found with one exact product (from 1 / 2 to 2**49), or with
one or two products of 128 bits (R. Giulietti, "The Schubfach way to render doubles", 2020). Cost: some ten nanoseconds
a number, four an integer; the tables that it needs (52 KB) are made at import.
"""
from libc.math cimport rint
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memmove, memset

from cpython.buffer cimport PyBUF_READ
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.memoryview cimport PyMemoryView_FromMemory

import os

import numpy as np

from mocker._bits cimport high_zero_bits, little_endian
from mocker._wide cimport multiply

cdef enum:
    LOW_POWER = -292               # of the powers of ten that a double can need
    POWERS = 617
    LOW_EXPONENT = 1022            # fields of exponents that most numbers have
    EXPONENTS = 50
    NUMBER_BYTES = 48              # that a number takes at most, with what is written behind it
    BUFFER_BYTES = 1 << 18         # of text, which stay in the processor's cache until they are written
    ALIGNMENT = 1 << 16
    ASIDE_BYTES = 1 << 23          # that are set aside at most
    SEEN = 512                     # values that are found again at once
    REAL = 0                       # kinds of columns
    WHOLE = 1
    SHORT = 2                      # 32-bit whole numbers
    HEX = 3                        # twelve hexadecimal digits of a whole number
    TEXT = 4
    ROUNDED = 5                    # reals as whole numbers
    SCALED = 6                     # reals times a factor, with three decimals

cdef extern from *:
    """
    #include <fcntl.h>
    #if defined(__linux__) && defined(FALLOC_FL_KEEP_SIZE)
    #define MOCKER_ASIDE(fd, from, n) fallocate(fd, FALLOC_FL_KEEP_SIZE, from, n)
    #else
    #define MOCKER_ASIDE(fd, from, n) -1
    #endif
    static int64_t mocker_set_aside(int fd, int64_t from, int64_t n) {
        return MOCKER_ASIDE(fd, from, n) == 0 ? from + n : -1;
    }
    """
    int64_t set_aside "mocker_set_aside"(int fd, int64_t start, int64_t n)     # where it ends; -1: not possible

cdef double LARGEST = 2.0**51
cdef uint64_t ZEROS = 0x3030303030303030       # "00000000"

cdef struct Power:
    uint64_t high
    uint64_t low

cdef Power[POWERS] POWERS_OF_TEN   # 10**i as 128 bits with the highest set, rounded up

cdef struct Exponent:              # of doubles from 1 / 2 to 2**49
    uint64_t power                 # 10**(places - 1), and where a double's 53 bits lie in it if they begin at the top
    uint64_t half                  # half of the distance of two doubles, as `f` in `put_real`
    uint64_t ten                   # 10**places, which makes them whole numbers of 16 or 17 digits
    uint64_t missing               # 10**(16 - places)

cdef Exponent[EXPONENTS] OF_EXPONENT
cdef uint32_t[10000] FOUR          # "0000" to "9999", the first digit in the lowest byte
cdef char[512] HEX_PAIRS           # "00" to "ff"


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
        POWERS_OF_TEN[i].high = wide >> 64
        POWERS_OF_TEN[i].low = wide & 0xFFFFFFFFFFFFFFFF
    for i in range(EXPONENTS):
        exact = i + LOW_EXPONENT - 1075        # the double is so many bits of 2**exact
        places = -(exact * 1262611 >> 22)
        power = 10 ** (places - 1) << exact + 53
        OF_EXPONENT[i].power, OF_EXPONENT[i].half = power, power << 10
        OF_EXPONENT[i].ten, OF_EXPONENT[i].missing = 10 ** places, 10 ** (16 - places)
    for i in range(10000):
        FOUR[i] = 0x30303030 + i // 1000 + (i // 100 % 10 << 8) + (i // 10 % 10 << 16) + (i % 10 << 24)
    memcpy(HEX_PAIRS, PyBytes_AS_STRING(bytes(range(256)).hex().encode()), 512)


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
    high, low = POWERS_OF_TEN[-k - LOW_POWER].high, POWERS_OF_TEN[-k - LOW_POWER].low
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


cdef inline uint64_t eight(uint64_t value) noexcept nogil:
    """The text of a number as eight digits, the first one in the lowest byte."""
    cdef uint64_t front = value // 10000
    return FOUR[front] | <uint64_t>FOUR[value - 10000 * front] << 32


cdef inline void put_word(char* out, uint64_t word) noexcept nogil:
    word = little_endian(word)
    memcpy(out, &word, 8)


cdef inline char* put_whole(char* out, uint64_t value) noexcept nogil:
    """Write a whole number; returns the place behind it. Up to 7 bytes behind that are written to.

    The number of digits comes from the number and not from its text: what follows need not wait for the text.
    """
    cdef int n
    if value < 10000:
        n = 1 + (value > 9) + (value > 99) + (value > 999)
        put_word(out, FOUR[value] >> (32 - 8 * n))
        return out + n
    if value < 100_000_000:
        n = 5 + (value > 99_999) + (value > 999_999) + (value > 9_999_999)
        put_word(out, eight(value) >> (64 - 8 * n))
        return out + n
    return put_long(out, value)


cdef char* put_long(char* out, uint64_t value) noexcept nogil:
    cdef uint64_t front = value // 100_000_000
    out = put_whole(out, front)
    put_word(out, eight(value - 100_000_000 * front))
    return out + 8


cdef char* put_digits(char* out, const char* digits, int64_t n, int64_t point) noexcept nogil:
    """Write `n` digits, without zeros at the end, of which `point` stand before the decimal point."""
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


cdef char* put_rare(char* out, uint64_t c, int64_t q) noexcept nogil:
    """Write the positive double of fraction `c` and exponent field `q`, any but an infinity."""
    cdef uint64_t d
    cdef int64_t e, n
    cdef char[32] digits
    d = shortest(c | (<uint64_t>1 << 52) if q else c, (q if q else 1) - 1075, c == 0 and q > 1, &e)
    while d % 10 == 0:
        d //= 10
        e += 1
    n = put_whole(digits, d) - digits
    return put_digits(out, digits, n, n + e)


cdef inline char* put_real(char* out, double value) noexcept nogil:
    """Write a finite number as `repr` does; returns the place behind it. Up to 16 bytes behind that are written to.

    In a unit of 10**-places by which the doubles around the number are 1 to 10 apart, a tenth of it is t + f, t whole
    and f a fraction of 64 bits, exactly. Its shortest decimal is the multiple of 10 that is less than half of that
    distance away or, if there is none, the nearest whole number. `put_rare` decides ties, and does all other numbers.
    """
    cdef uint64_t bits, c, t, f, whole, digit, near, rest, front, back
    cdef int64_t q, beyond
    cdef const Exponent* e
    cdef int zeros
    memcpy(&bits, &value, 8)
    if bits >> 63:
        out[0] = b"-"
        out += 1
        value = -value
    q = <int64_t>(bits >> 52 & 2047) - LOW_EXPONENT
    if <uint64_t>q < EXPONENTS:
        whole = <uint64_t><int64_t>value
        if value == <double><int64_t>whole:
            out = put_whole(out, whole)
            memcpy(out, b".0", 2)
            return out + 2
        e = &OF_EXPONENT[q]
        c = bits << 11 | <uint64_t>1 << 63
        f = multiply(e.power, c, &t)
        rest = multiply(f, 10, &digit)
        beyond = <int64_t>((f if f < 0 - f else 0 - f) - e.half)
        if beyond != 0 and rest != <uint64_t>1 << 63:
            # near = 10 * (f >> 63) if beyond < 0 else digit + (rest >> 63), which nobody could predict
            near = digit + (rest >> 63)
            near ^= (near ^ (10 & (0 - (f >> 63)))) & <uint64_t>(beyond >> 63)
            # Whole part and fraction: no whole number is between the decimal and the double.
            t = (10 * t + near - whole * e.ten) * e.missing
            out = put_whole(out, whole)
            out[0] = b"."
            front = t // 100_000_000
            back = eight(t - 100_000_000 * front)
            front = eight(front)
            put_word(out + 1, front)
            put_word(out + 9, back)
            back ^= ZEROS
            near = 0 - <uint64_t>(back == 0)
            zeros = high_zero_bits(back | ((front ^ ZEROS) & near)) + <int>(near & 64)
            return out + 17 - (zeros >> 3)
    if value == 0.0:
        memcpy(out, b"0.0", 3)
        return out + 3
    return put_rare(out, bits & ((<uint64_t>1 << 52) - 1), <int64_t>(bits >> 52 & 2047))


cdef inline double nearest(double value) noexcept nogil:
    """The nearest whole number, of two the even one, of a value below 2**51."""
    return value + 6755399441055744.0 - 6755399441055744.0


cdef inline char* put_signed(char* out, int64_t value) noexcept nogil:
    if value < 0:
        out[0] = b"-"
        out += 1
    return put_whole(out, <uint64_t>value if value >= 0 else <uint64_t>(-(value + 1)) + 1)


cdef inline char* put_thousandths(char* out, double value) noexcept nogil:
    """Write value / 1000 of a whole number as `repr` does."""
    cdef uint64_t whole, rest
    if not 0.0 < value < 1e15:                 # above, not all decimals are those of a double
        return put_real(out, value / 1000.0)
    whole = <uint64_t><int64_t>value
    rest = whole % 1000
    out = put_whole(out, whole // 1000)
    put_word(out, FOUR[rest] - 2)              # a point for the 0 in front
    if rest % 10:
        return out + 4
    return out + (3 if rest % 100 else 2)


cdef inline char* put_hex(char* out, uint64_t value) noexcept nogil:
    """Write the last twelve hexadecimal digits of a number; returns the place behind them."""
    cdef int i
    for i in range(10, -2, -2):
        memcpy(out + i, &HEX_PAIRS[2 * (value & 255)], 2)
        value >>= 8
    return out + 12


cdef struct Column:
    int kind
    bint gaps                      # -1 is a missing value, of whole numbers
    double factor                  # of scaled reals
    const char* before             # what stands before the value; 32 bytes can be read at any place of it
    int64_t length
    const double* real
    const int64_t* whole
    const int32_t* short           # also the numbers of texts; NULL: each has its own
    const char** text              # of objects that are alive in a list
    int64_t* lengths               # of them


cdef inline char* put_piece(char* out, const char* piece, int64_t n) noexcept nogil:
    """Copy, 32 bytes at a time; returns the place behind it. Up to 31 bytes behind that are written to."""
    cdef char* end = out + n
    while True:
        memcpy(out, piece, 32)
        out += 32
        if out >= end:
            return end
        piece += 32


cdef class Rows:
    """Rows of text that are yet to be made of columns (see `lines`)."""

    cdef Column* table
    cdef int64_t k, rows, step     # columns; rows; bytes that a row takes at most, without its texts
    cdef int64_t row               # that comes next
    cdef bytes arena, missing
    cdef const char* last          # what stands behind a row
    cdef const char* gap           # what stands for a missing value
    cdef int64_t last_length, gap_length
    cdef list keep                 # arrays and lists that pointers point into

    def __cinit__(self, list pieces, list columns, bytes missing):
        cdef int64_t i, at
        cdef Column* c
        cdef const double[::1] real
        cdef const int64_t[::1] whole
        cdef const int32_t[::1] short
        self.k = len(columns)
        if len(pieces) != self.k + 1:
            raise ValueError(f"{self.k} columns need {self.k + 1} pieces, got {len(pieces)}")
        self.table = <Column*>calloc(self.k + 1, sizeof(Column))
        if self.table == NULL:
            raise MemoryError
        self.missing = missing + bytes(32)
        self.gap, self.gap_length = PyBytes_AS_STRING(self.missing), len(missing)
        self.arena = b"".join(pieces) + bytes(32)
        self.keep = []
        self.step = 64
        at = 0
        for i in range(self.k):
            values = columns[i]
            c = &self.table[i]
            c.before, c.length = PyBytes_AS_STRING(self.arena) + at, len(pieces[i])
            at += c.length
            self.step += c.length + max(<int64_t>NUMBER_BYTES, len(missing) + 32)
            texts = None
            if isinstance(values, tuple):
                values, how = values
                if isinstance(how, list):
                    texts = how
                elif how == "hex":
                    c.kind = HEX
                elif values.dtype.kind == "f":
                    c.kind, c.factor = (ROUNDED, 1.0) if how == "whole" else (SCALED, how)
                else:
                    c.gaps = how
            elif isinstance(values, list):
                texts = values
            if i and len(values) != self.rows:
                raise ValueError(f"columns differ in length: {self.rows} and {len(values)}")
            self.rows = len(values)
            if texts is not None:
                c.kind = TEXT
                self.find(c, texts)
                if values is texts:
                    continue
                short = values = np.ascontiguousarray(values, np.int32)
                if self.rows and not 0 <= values.min() <= values.max() < len(texts):
                    raise ValueError(f"a number of a text is not below {len(texts)}")
                c.short = &short[0] if self.rows else NULL
            elif values.dtype.kind == "f":
                real = values = np.ascontiguousarray(values, np.float64)
                c.real = &real[0] if self.rows else NULL
            elif values.dtype == np.int32 and c.kind != HEX:
                c.kind = SHORT
                short = values = np.ascontiguousarray(values)
                c.short = &short[0] if self.rows else NULL
            else:
                c.kind = c.kind if c.kind == HEX else WHOLE
                whole = values = np.ascontiguousarray(values, np.int64)
                c.whole = &whole[0] if self.rows else NULL
            self.keep.append(values)
        self.last, self.last_length = PyBytes_AS_STRING(self.arena) + at, len(pieces[self.k])
        self.step += self.last_length

    def __dealloc__(self):
        free(self.table)

    cdef int find(self, Column* c, list texts) except -1:
        """Where the texts of a list are, and their lengths."""
        cdef int64_t[:, ::1] places
        cdef int64_t i = 0, n = len(texts)
        found = np.empty((2, max(n, 1)), np.int64)
        places = found
        c.text, c.lengths = <const char**>&places[0, 0], &places[1, 0]
        for text in texts:
            if not isinstance(text, bytes):
                raise TypeError(f"a text must be bytes, got {type(text).__name__}")
            c.text[i], c.lengths[i] = PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text)
            i += 1
        self.keep += (found, list(texts))
        return 0

    cdef int64_t fill(self, char* buffer, int64_t size) noexcept nogil:
        """Write as many rows as fit; returns the bytes. None fits if it is 0 and rows are left."""
        cdef char* out = buffer
        cdef char* start
        cdef const char* end = buffer + size
        cdef int64_t i, w, n
        cdef int64_t k = self.k, row
        cdef double x
        cdef Column* c
        for row in range(self.row, self.rows):
            start = out
            if end - out < self.step:
                self.row = row
                return start - buffer
            for i in range(k):
                c = &self.table[i]
                out = put_piece(out, c.before, c.length)
                if c.kind == REAL:
                    x = c.real[row]
                    if x - x == 0.0:
                        out = put_real(out, x)
                        continue
                elif c.kind == TEXT:
                    w = c.short[row] if c.short != NULL else row
                    n = c.lengths[w]
                    if end - out < self.step + n:
                        self.row = row
                        return start - buffer
                    memcpy(out, c.text[w], n)
                    out += n
                    continue
                elif c.kind == HEX:
                    out = put_hex(out, <uint64_t>c.whole[row])
                    continue
                elif c.kind == ROUNDED:
                    x = c.real[row]
                    if -LARGEST < x < LARGEST:
                        out = put_signed(out, <int64_t>nearest(x))
                        continue
                elif c.kind == SCALED:
                    x = c.real[row] * c.factor * 1000.0
                    if x - x == 0.0:
                        out = put_thousandths(out, nearest(x) if -LARGEST < x < LARGEST else rint(x))
                        continue
                else:
                    w = c.short[row] if c.kind == SHORT else c.whole[row]
                    if not (c.gaps and w == -1):
                        out = put_signed(out, w)
                        continue
                out = put_piece(out, self.gap, self.gap_length)
            out = put_piece(out, self.last, self.last_length)
        self.row = self.rows
        return out - buffer


def reserve(int fd, int64_t size):
    """Set aside room for `size` bytes at the beginning of a file where the system can: writing them takes less then."""
    set_aside(fd, 0, size)


cdef class Writer:
    """Text on its way to a file, whose pages are written whole: one that is begun twice costs as much as three.

    Parameters
    ----------
    write : callable
        Is given the text part by part, in memoryviews that are only good until it returns.
    fd : int
        The file that it goes to, from its beginning, if that is known: where the system can, room in it is set aside
        ahead of the text, which halves the cost of writing it. `close` gives back what is left, which takes as long
        as writing a megabyte: so only what is as good as certain to come is set aside.
    """

    cdef object into
    cdef char* buffer
    cdef int64_t size, used        # of the buffer
    cdef int64_t written, aside    # bytes of the file: with text, and set aside; -1: not possible
    cdef int64_t ahead             # bytes that are still to be written, as far as anybody knows
    cdef int fd

    def __cinit__(self, write, int fd=-1):
        self.into, self.fd = write, fd
        self.size = BUFFER_BYTES + ALIGNMENT
        self.buffer = <char*>malloc(self.size)
        if self.buffer == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.buffer)

    def write(self, const unsigned char[::1] text not None):
        """Add bytes."""
        while self.size - self.used < len(text):
            self.make_room()
        if len(text):
            memcpy(self.buffer + self.used, &text[0], len(text))
            self.used += len(text)

    cdef int make_room(self) except -1:
        """Write what ends with a page of the file, or get a larger buffer."""
        cdef int64_t end = (self.written + self.used) // ALIGNMENT * ALIGNMENT - self.written
        cdef char* grown
        if end > 0:
            return self.give(end)
        grown = <char*>realloc(self.buffer, 2 * self.size)
        if grown == NULL:
            raise MemoryError
        self.buffer, self.size = grown, 2 * self.size
        return 0

    cdef int give(self, int64_t n) except -1:
        if self.fd >= 0 and 0 <= self.aside < self.written + n and n >= BUFFER_BYTES:
            self.aside = set_aside(self.fd, self.written, max(n, min(self.ahead, <int64_t>ASIDE_BYTES)))
        self.into(PyMemoryView_FromMemory(self.buffer, n, PyBUF_READ))
        self.written += n
        self.used -= n
        memmove(self.buffer, self.buffer + n, self.used)
        return 0

    def flush(self):
        """Write everything."""
        if self.used:
            self.give(self.used)

    def close(self):
        """Write everything and end the file behind it."""
        self.flush()
        if self.aside > self.written:
            os.ftruncate(self.fd, self.written)


def lines(list pieces, list columns, bytes missing, Writer out=None):
    """Rows of text.

    Parameters
    ----------
    pieces : list of bytes, k + 1
        What stands before each value of a row and after its last.
    columns : list, k
        Of each column, all of one length: an array of float64; a pair of such and "whole": the nearest whole number
        (one that is not below 2**51 is missing), or and a factor: that many times the value, with three decimals; an
        array of int64 or int32; a pair of such and True: -1 in it is a missing value, or and "hex": the last twelve
        hexadecimal digits; a list of bytes, which are written as they are; or a pair of the numbers of texts and a
        list of these.
    missing : bytes
        The text of a missing value: NaN, an infinity, -1 as above.
    out : Writer, optional
        Where to add them.

    Returns
    -------
    bytes
        The text; empty with `out`.
    """
    cdef Rows rows = Rows(pieces, columns, missing)
    cdef list parts = []
    cdef Writer to = Writer(lambda part: parts.append(bytes(part))) if out is None else out
    cdef int64_t before = to.written + to.used
    while True:
        with nogil:
            to.used += rows.fill(to.buffer + to.used, to.size - to.used)
        if rows.row == rows.rows:
            break
        if rows.row:                           # seven of eight bytes that the others will take
            to.ahead = to.used + (to.written + to.used - before) // rows.row * (rows.rows - rows.row) * 7 // 8
        to.make_room()
    to.ahead = 0
    if out is None:
        to.flush()
    return b"".join(parts)


def encoded(values, encode):
    """Values as a column of texts for `lines`: `encode` of each, called once for a string, an int or None.

    Parameters
    ----------
    values : list or array of int64
    encode : callable
        The text of a value as bytes.

    Returns
    -------
    ndarray of int32, list of bytes
        The numbers of the texts, and the texts.
    """
    cdef dict known = {}
    cdef list texts = []
    cdef object value, number, last = None
    cdef int32_t[::1] out
    cdef const int64_t[::1] whole
    cdef int64_t[SEEN] seen
    cdef int32_t[SEEN] numbers                 # of the values seen, by their last bits
    cdef Py_ssize_t i
    cdef int32_t current = -1
    cdef int64_t slot
    found = np.empty(len(values), np.int32)
    out = found
    if not isinstance(values, list):
        whole = values
        memset(numbers, 255, sizeof(numbers))
        for i in range(whole.shape[0]):
            slot = (whole[i] ^ whole[i] >> 31) & (SEEN - 1)
            if numbers[slot] < 0 or seen[slot] != whole[i]:
                value = whole[i]
                number = known.get(value)
                if number is None:
                    known[value] = number = len(texts)
                    texts.append(encode(value))
                seen[slot], numbers[slot] = whole[i], number
            out[i] = numbers[slot]
        return found, texts
    for i in range(len(values)):
        value = values[i]
        if value is not last or current < 0:
            plain = type(value) is str or type(value) is int or value is None
            number = known.get(value) if plain else None
            if number is None:
                number = len(texts)
                texts.append(encode(value))
                if plain:
                    known[value] = number
            current, last = number, value
        out[i] = current
    return found, texts
