# The 128-bit product, which plain Cython cannot say portably.
from libc.stdint cimport uint64_t


cdef extern from *:
    """
    #ifndef MOCKER_WIDE
    #define MOCKER_WIDE
    #if defined(_MSC_VER) && defined(_M_X64)
    #include <intrin.h>
    static __inline uint64_t mocker_multiply(uint64_t a, uint64_t b, uint64_t *high) {
        return _umul128(a, b, high);
    }
    #elif defined(__SIZEOF_INT128__)
    static inline uint64_t mocker_multiply(uint64_t a, uint64_t b, uint64_t *high) {
        unsigned __int128 product = (unsigned __int128)a * b;
        *high = (uint64_t)(product >> 64);
        return (uint64_t)product;
    }
    #else
    static uint64_t mocker_multiply(uint64_t a, uint64_t b, uint64_t *high) {
        uint64_t ll = (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu), lh = (a & 0xFFFFFFFFu) * (b >> 32);
        uint64_t hl = (a >> 32) * (b & 0xFFFFFFFFu), hh = (a >> 32) * (b >> 32);
        uint64_t middle = (ll >> 32) + (lh & 0xFFFFFFFFu) + hl;
        *high = hh + (lh >> 32) + (middle >> 32);
        return (middle << 32) | (ll & 0xFFFFFFFFu);
    }
    #endif
    #endif
    """
    uint64_t multiply "mocker_multiply"(uint64_t a, uint64_t b, uint64_t* high) noexcept nogil  # the low half
