# cython: language_level=3
"""Bytes of a structure and of the arrays that it owns, out, in, or to a copy; O(bytes).

Loading an array that was there makes a new one with room for as many items as before: engines rely on room that they
have reserved.
"""
from libc.stdlib cimport malloc
from libc.string cimport memcpy, memset

from mocker._common cimport grown, int64_t


cdef void carry(Carrier* io, void* field, int64_t size) noexcept nogil:
    """A value without pointers, or a structure whose arrays follow."""
    cdef void* moved
    if io.mode == LIST:
        moved = grown(io.places, &io.places_cap, io.n_places + 1, sizeof(void*))
        if moved == NULL:
            io.error = CARRY_MEMORY
            return
        io.places = <void**>moved
        io.places[io.n_places] = field
        io.n_places += 1
    elif io.mode == COPY:
        if io.error:
            memset(field, 0, size)
        else:
            memcpy(field, io.places[io.next_place], size)
        io.next_place += 1
    else:
        pass_bytes(io, field, size)


cdef void pass_bytes(Carrier* io, void* field, int64_t size) noexcept nogil:
    """Count, save or load bytes."""
    if io.mode == LOAD and (io.error or size > io.size - io.used):
        io.error = io.error or CARRY_SHORT
        memset(field, 0, size)
        return
    if io.mode == SAVE:
        memcpy(io.data + io.used, field, size)
    elif io.mode == LOAD:
        memcpy(field, io.data + io.used, size)
    io.used += size


cdef void carry_array(Carrier* io, void** array, int64_t used, int64_t cap, size_t item) noexcept nogil:
    """The first `used` of `cap` items of an array; a structure just loaded says by its pointer whether it had one.

    In one just copied it is the source's.
    """
    cdef size_t size = <size_t>(cap if cap > used else used) * item
    cdef void* source = array[0]
    if source == NULL or io.mode == LIST:
        return
    if io.mode == LOAD or io.mode == COPY:
        array[0] = NULL
        if io.mode == LOAD and (used < 0 or used > (io.size - io.used) // <int64_t>item):
            io.error = io.error or CARRY_SHORT
        if io.error:
            return
        array[0] = malloc(size if size > 0 else 1)
        if array[0] == NULL:
            io.error = CARRY_MEMORY
            return
        if io.mode == COPY:
            memcpy(array[0], source, used * <int64_t>item)
            return
    pass_bytes(io, array[0], used * <int64_t>item)
