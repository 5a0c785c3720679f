# Up to seven decimal digits at once, without a branch for each: how many there are is what a processor guesses badly.
from libc.stdint cimport uint8_t, uint64_t


cdef extern from *:
    """
    #ifndef MOCKER_DIGITS
    #define MOCKER_DIGITS
    #if defined(__GNUC__) && defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    #include <string.h>
    static inline int mocker_digits(const uint8_t *p, uint64_t *value) {
        uint64_t v, other;
        int n;
        memcpy(&v, p, 8);
        v ^= 0x3030303030303030u;                       /* digits become 0 to 9 */
        other = ((v + 0x7676767676767676u) | v) & 0x8080808080808080u;
        if (other == 0)
            return 0;
        n = __builtin_ctzll(other) >> 3;
        if (n == 0)
            return 0;
        v <<= 64 - 8 * n;                               /* zeros in front of the first digit */
        v = (v * 10 + (v >> 8)) & 0x00FF00FF00FF00FFu;
        v = (v * 100 + (v >> 16)) & 0x0000FFFF0000FFFFu;
        *value = (v * 10000 + (v >> 32)) & 0xFFFFFFFFu;
        return n;
    }
    #else
    static inline int mocker_digits(const uint8_t *p, uint64_t *value) { (void)p; (void)value; return 0; }
    #endif
    #endif
    """
    # How many digits begin at `p`, of which 8 bytes are read; 0: none, more than seven, or not to be had here.
    int short_integer "mocker_digits"(const uint8_t* p, uint64_t* value) noexcept nogil
