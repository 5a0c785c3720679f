# Decimal digits without a branch for each, up to seven at once: how many there are is what a processor guesses badly.
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t


cdef extern from *:
    """
    #ifndef MOCKER_DIGITS
    #define MOCKER_DIGITS
    #if defined(__GNUC__) && defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    #include <string.h>
    /* The first `n` bytes of `v`, from 0 to 9 each, as a number; 1 <= n <= 7. */
    static inline uint64_t mocker_value(uint64_t v, int n) {
        v <<= 64 - 8 * n;                               /* zeros in front of the first digit */
        v = (v * 10 + (v >> 8)) & 0x00FF00FF00FF00FFu;
        v = (v * 100 + (v >> 16)) & 0x0000FFFF0000FFFFu;
        return (v * 10000 + (v >> 32)) & 0xFFFFFFFFu;
    }
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
        *value = mocker_value(v, n);
        return n;
    }
    #else
    static inline int mocker_digits(const uint8_t *p, uint64_t *value) { (void)p; (void)value; return 0; }
    #endif
    #if defined(__GNUC__) && defined(__SSE2__)
    #include <emmintrin.h>
    static inline uint64_t mocker_bits(__m128i a, __m128i b, __m128i c, __m128i d) {
        return (uint64_t)_mm_movemask_epi8(a) | (uint64_t)_mm_movemask_epi8(b) << 16
               | (uint64_t)_mm_movemask_epi8(c) << 32 | (uint64_t)_mm_movemask_epi8(d) << 48;
    }
    /* Where the numbers end is looked up for 64 bytes at once, so that no number waits for the one before. */
    static inline const uint8_t *mocker_numbers(const uint8_t *p, const uint8_t *end, uint32_t *to, int64_t *count,
                                                int64_t room) {
        const uint8_t *at = p, *stop;
        const __m128i comma = _mm_set1_epi8(','), blank = _mm_set1_epi8(' '), zero = _mm_set1_epi8('0');
        const __m128i nine = _mm_set1_epi8(9);
        uint64_t commas, blanks, other, v, carry = 0;
        int64_t n = *count, step = 0;
        int k;
        for (; end - at >= 72 && room - n >= 32; at += 64) {
            __m128i w[4], c[4], b[4], d[4];
            for (k = 0; k < 4; k++) {
                w[k] = _mm_loadu_si128((const __m128i *)(at + 16 * k));
                c[k] = _mm_cmpeq_epi8(w[k], comma);
                b[k] = _mm_cmpeq_epi8(w[k], blank);
                w[k] = _mm_sub_epi8(w[k], zero);
                d[k] = _mm_cmpeq_epi8(_mm_min_epu8(w[k], nine), w[k]);
            }
            commas = mocker_bits(c[0], c[1], c[2], c[3]);
            blanks = mocker_bits(b[0], b[1], b[2], b[3]);
            other = ~(mocker_bits(d[0], d[1], d[2], d[3]) | commas | blanks);
            if (other) {                                /* what comes before it still counts */
                commas &= (other & -other) - 1;
                blanks &= (other & -other) - 1;
            }
            if (step == 0)
                step = blanks ? 2 : 1;
            if (blanks != (step == 2 ? commas << 1 | carry : 0))
                break;
            carry = commas >> 63;
            for (; commas; commas &= commas - 1) {
                stop = at + __builtin_ctzll(commas);
                if ((uint64_t)(stop - p - 1) > 6 || (*p == '0' && stop - p > 1)) {
                    *count = n;
                    return p;
                }
                memcpy(&v, p, 8);
                to[n++] = (uint32_t)mocker_value(v ^ 0x3030303030303030u, (int)(stop - p));
                p = stop + step;
            }
            if (other)
                break;
        }
        if (carry)                                      /* nobody has seen whether a blank comes */
            p = at;
        *count = n;
        return p;
    }
    #else
    static inline const uint8_t *mocker_numbers(const uint8_t *p, const uint8_t *end, uint32_t *to, int64_t *count,
                                                int64_t room) {
        (void)end, (void)to, (void)count, (void)room;
        return p;
    }
    #endif
    #endif
    """
    # How many digits begin at `p`, of which 8 bytes are read; 0: none, more than seven, or not to be had here.
    int short_integer "mocker_digits"(const uint8_t* p, uint64_t* value) noexcept nogil
    # Append numbers of at most seven digits, each followed by a comma, and all by one blank or all by none, at index
    # `count[0]`: as long as there are such from `p` on, and room. Returns where the next number begins, which may be at
    # a blank. `end`: one past the last byte that may be read.
    const uint8_t* short_integers "mocker_numbers"(const uint8_t* p, const uint8_t* end, uint32_t* to, int64_t* count,
                                                   int64_t room) noexcept nogil
