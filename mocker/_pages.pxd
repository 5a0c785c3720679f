# Large pages for arrays that are written once from one end to the other: where the system has them on request, there is
# then no fault for every 4 KiB.
cdef extern from *:
    """
    #if defined(__linux__)
    #include <stdint.h>
    #include <sys/mman.h>
    #include <unistd.h>
    #endif
    static void mocker_large_pages(void *memory, size_t bytes) {
    #if defined(__linux__) && defined(MADV_HUGEPAGE)
        uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
        uintptr_t first = ((uintptr_t)memory + page - 1) / page * page;
        uintptr_t end = ((uintptr_t)memory + bytes) / page * page;
        if (end > first)
            madvise((void *)first, end - first, MADV_HUGEPAGE);
    #else
        (void)memory, (void)bytes;
    #endif
    }
    """
    void large_pages "mocker_large_pages"(void* memory, size_t bytes) noexcept nogil
