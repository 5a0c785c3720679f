# Saving compiled state to bytes, loading it again, copying it: what every structure's `*_carry` function is made of.
# One function a structure does all of that, whatever the carrier is set to, so that the directions cannot differ.
from mocker._common cimport int64_t

cdef enum CarryMode:
    COUNT = 0                      # how many bytes saving will take
    SAVE = 1
    LOAD = 2
    LIST = 3                       # note where the values are, for a copy that is made next
    COPY = 4                       # from where they were found

cdef enum CarryError:
    CARRY_OK = 0
    CARRY_MEMORY = 1
    CARRY_SHORT = 2                # the bytes end too early


cdef struct Carrier:
    int mode                       # CarryMode
    char* data                     # [size], NULL while counting
    int64_t used
    int64_t size
    void** places                  # [n_places] LIST and COPY: addresses of the source's values, in order
    int64_t n_places
    int64_t places_cap
    int64_t next_place             # COPY: the next one
    int error                      # CarryError; once set, what is loaded is zeros and NULL, safe to free


cdef void carry(Carrier* io, void* field, int64_t size) noexcept nogil
cdef void carry_array(Carrier* io, void** array, int64_t used, int64_t cap, size_t item) noexcept nogil
cdef void pass_bytes(Carrier* io, void* field, int64_t size) noexcept nogil
