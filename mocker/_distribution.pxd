# Data dictionary of distributions: what is said of a multiset of numbers.
from mocker._common cimport int64_t


cdef enum:
    N_PERCENTILES = 5
    N_STATISTICS = 9
    COARSE_BINS = 4096             # 64 powers of two from 2**-20, 64 bins each; the ends have all beyond
    FINE_BINS = 262144             # 64 powers of two from 2**-20, 4096 bins each


cdef struct Moments:               # of a weighted multiset
    int64_t total                  # samples
    double low                     # NaN without samples, as `high`
    double high
    double sum                     # compensated (Kahan)
    double lost                    # what `sum` has lost to rounding
    double mean
    double squares                 # sum of squared distances from the mean


cdef struct Described:             # what is said of a multiset
    int64_t samples
    double[N_STATISTICS] values    # as `STATISTICS`, if there are samples


cdef struct LogSummary:            # what is known of the entries of a weighted log of values >= 0, kept as it grows
    Moments gap                    # of the values
    Moments rate                   # of 1000 / value of those above 0
    int64_t folded                 # entries of the log in it, from the first on
    int64_t* weights               # [COARSE_BINS] samples in each bin
    int64_t* entries               # [COARSE_BINS] entries in each
    int64_t* fine                  # [FINE_BINS] samples; NULL as long as the log has every entry


cdef LogSummary* summary_new() noexcept nogil
cdef void summary_free(LogSummary* s) noexcept nogil
cdef bint summary_sketch(LogSummary* s, const double* values, const int64_t* weights) noexcept nogil
cdef void summary_add(LogSummary* s, const double* values, const int64_t* weights, int64_t n) noexcept nogil
cdef bint log_described(LogSummary* s, const double* values, const int64_t* weights, int64_t n, int64_t step,
                        Described* gap, Described* rate) noexcept nogil
cdef Described plain_described(double* v, int64_t n, double* spare) noexcept nogil
cdef dict mapping(const Described* d)
cdef double fine_value(int64_t bin) noexcept nogil
