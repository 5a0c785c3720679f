# Where the bits of a word are and in which order its bytes lie in memory, which plain Cython cannot say portably.
from libc.stdint cimport uint64_t


cdef extern from *:
    """
    #ifndef MOCKER_BITS
    #define MOCKER_BITS
    #if defined(_MSC_VER)
    #include <intrin.h>
    static __inline int mocker_high_zeros(uint64_t x) {
        unsigned long i;
        _BitScanReverse64(&i, x);
        return 63 - (int)i;
    }
    #else
    #define mocker_high_zeros(x) __builtin_clzll(x)
    #endif
    #if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    #define mocker_little(x) __builtin_bswap64(x)
    #else
    #define mocker_little(x) (x)
    #endif
    #endif
    """
    int high_zero_bits "mocker_high_zeros"(uint64_t x) noexcept nogil      # above the highest that is set; x is not 0
    uint64_t little_endian "mocker_little"(uint64_t x) noexcept nogil      # the word whose lowest byte lies first
