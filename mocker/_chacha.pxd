# Four ChaCha blocks of twelve rounds, side by side where the compiler has vectors, which plain Cython has not.
from libc.stdint cimport uint32_t, uint64_t


cdef extern from *:
    """
    #include <string.h>
    #if defined(__GNUC__) || defined(__clang__)
    typedef uint32_t mocker_words __attribute__((vector_size(16)));
    #else
    typedef uint32_t mocker_words;
    #endif
    enum { MOCKER_LANES = sizeof(mocker_words) / 4 };
    #define MOCKER_TURN(v, bits) (v = (v << bits) | (v >> (32 - bits)))
    #define MOCKER_QUARTER(a, b, c, d) \\
        a += b; d ^= a; MOCKER_TURN(d, 16); c += d; b ^= c; MOCKER_TURN(b, 12); \\
        a += b; d ^= a; MOCKER_TURN(d, 8);  c += d; b ^= c; MOCKER_TURN(b, 7);

    static void mocker_chacha(const uint32_t *key, uint64_t counter, uint32_t *out) {
        static const uint32_t constant[4] = {0x61707865, 0x3320646E, 0x79622D32, 0x6B206574};  /* expand 32-byte k */
        mocker_words x[16], start[16];
        for (int block = 0; block < 4; block += MOCKER_LANES) {
            for (int w = 0; w < 16; w++) {
                uint32_t lanes[4];
                for (int i = 0; i < 4; i++) {
                    uint64_t number = counter + (uint64_t)(block + i);
                    lanes[i] = w < 4 ? constant[w] : w < 12 ? key[w - 4] : w == 12 ? (uint32_t)number
                             : w == 13 ? (uint32_t)(number >> 32) : 0;
                }
                memcpy(&start[w], lanes, sizeof(mocker_words));
                x[w] = start[w];
            }
            for (int round = 0; round < 12; round += 2) {   /* of columns, then of diagonals */
                MOCKER_QUARTER(x[0], x[4], x[8], x[12])  MOCKER_QUARTER(x[1], x[5], x[9], x[13])
                MOCKER_QUARTER(x[2], x[6], x[10], x[14]) MOCKER_QUARTER(x[3], x[7], x[11], x[15])
                MOCKER_QUARTER(x[0], x[5], x[10], x[15]) MOCKER_QUARTER(x[1], x[6], x[11], x[12])
                MOCKER_QUARTER(x[2], x[7], x[8], x[13])  MOCKER_QUARTER(x[3], x[4], x[9], x[14])
            }
            for (int w = 0; w < 16; w++) {
                uint32_t lanes[4];
                x[w] += start[w];
                memcpy(lanes, &x[w], sizeof(mocker_words));
                for (int i = 0; i < (int)MOCKER_LANES; i++)
                    out[16 * (block + i) + w] = lanes[i];
            }
        }
    }
    """
    # The 64 words of the blocks `counter` to `counter` + 3 under a key of 8 words and a nonce of 0.
    void chacha "mocker_chacha"(const uint32_t* key, uint64_t counter, uint32_t* out) noexcept nogil
