# Eight ChaCha blocks of twelve rounds, side by side where the processor has vectors, which plain Cython has not.
from libc.stdint cimport uint32_t, uint64_t


cdef extern from *:
    """
    #include <string.h>
    #define MOCKER_TURN(v, bits) (v = (v << bits) | (v >> (32 - bits)))
    #define MOCKER_QUARTER(a, b, c, d) \\
        a += b; d ^= a; MOCKER_TURN(d, 16); c += d; b ^= c; MOCKER_TURN(b, 12); \\
        a += b; d ^= a; MOCKER_TURN(d, 8);  c += d; b ^= c; MOCKER_TURN(b, 7);

    /* As many blocks at a time as `words` has lanes. The constants are the ASCII text "expand 32-byte k". */
    #define MOCKER_CHACHA(name, words) \\
        static void name(const uint32_t *key, uint64_t counter, uint32_t *out) { \\
            static const uint32_t constant[] = {0x61707865, 0x3320646E, 0x79622D32, 0x6B206574}; \\
            enum { LANES = sizeof(words) / 4 }; \\
            words x[16], start[16]; \\
            uint32_t lanes[LANES]; \\
            for (int block = 0; block < 8; block += LANES) { \\
                for (int w = 0; w < 16; w++) { \\
                    for (int i = 0; i < (int)LANES; i++) { \\
                        uint64_t number = counter + (uint64_t)(block + i); \\
                        lanes[i] = w < 4 ? constant[w] : w < 12 ? key[w - 4] : w == 12 ? (uint32_t)number \\
                                 : w == 13 ? (uint32_t)(number >> 32) : 0; \\
                    } \\
                    memcpy(&start[w], lanes, sizeof(words)); \\
                    x[w] = start[w]; \\
                } \\
                for (int round = 0; round < 12; round += 2) {   /* of columns, then of diagonals */ \\
                    MOCKER_QUARTER(x[0], x[4], x[8], x[12])  MOCKER_QUARTER(x[1], x[5], x[9], x[13]) \\
                    MOCKER_QUARTER(x[2], x[6], x[10], x[14]) MOCKER_QUARTER(x[3], x[7], x[11], x[15]) \\
                    MOCKER_QUARTER(x[0], x[5], x[10], x[15]) MOCKER_QUARTER(x[1], x[6], x[11], x[12]) \\
                    MOCKER_QUARTER(x[2], x[7], x[8], x[13])  MOCKER_QUARTER(x[3], x[4], x[9], x[14]) \\
                } \\
                for (int w = 0; w < 16; w++) { \\
                    x[w] += start[w]; \\
                    memcpy(lanes, &x[w], sizeof(words)); \\
                    for (int i = 0; i < (int)LANES; i++) \\
                        out[16 * (block + i) + w] = lanes[i]; \\
                } \\
            } \\
        }

    #if defined(__GNUC__) || defined(__clang__)
    typedef uint32_t mocker_words __attribute__((vector_size(16)));
    #else
    typedef uint32_t mocker_words;
    #endif
    MOCKER_CHACHA(mocker_chacha_any, mocker_words)
    #if (defined(__GNUC__) || defined(__clang__)) && defined(__x86_64__)
    typedef uint32_t mocker_more_words __attribute__((vector_size(32)));
    __attribute__((target("avx2"))) MOCKER_CHACHA(mocker_chacha_avx2, mocker_more_words)
    static void mocker_chacha(const uint32_t *key, uint64_t counter, uint32_t *out) {
        if (__builtin_cpu_supports("avx2"))
            mocker_chacha_avx2(key, counter, out);
        else
            mocker_chacha_any(key, counter, out);
    }
    #else
    #define mocker_chacha mocker_chacha_any
    #endif
    """
    # The 128 words of the blocks `counter` to `counter` + 7 under a key of 8 words and a nonce of 0.
    void chacha "mocker_chacha"(const uint32_t* key, uint64_t counter, uint32_t* out) noexcept nogil
    # The same in vectors that every processor of the architecture has.
    void chacha_any "mocker_chacha_any"(const uint32_t* key, uint64_t counter, uint32_t* out) noexcept nogil
