# Data dictionary of the report: requests as columns, what they come to.
from mocker._common cimport int8_t, int64_t


cdef struct Table:                 # requests; NaN = never happened, those without an arrival do not count
    const double* arrival          # ms, as all times
    const double* first_admit
    const double* first_token
    const double* second_gap
    const double* last_token
    const int64_t* input_length    # tokens, as all counts
    const int64_t* output_length
    const int64_t* output_tokens
    const int64_t* reused
    const int64_t* first_reused
    const int8_t* terminal


cdef struct Totals:
    int64_t requests               # that arrived
    int64_t completed
    int64_t inputs                 # prompt tokens of the served
    int64_t outputs                # tokens of the served
    int64_t reused                 # prompt tokens of the served that were cached
    int64_t first_reused           # the same at the first admission
    int64_t good                   # requests within every goodput bound
    int64_t good_outputs           # their tokens
    double last                    # ms, end of the last token
    int64_t[8] terminal            # requests by how they ended
