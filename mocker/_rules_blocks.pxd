# The blocks of a request under the scheduler with switches; structures in _rules.pxd.
from mocker._common cimport int32_t, int64_t, uint32_t
from mocker._core cimport Request
from mocker._rules cimport RULE_FILL_EARLY, RULE_LATE, RULE_SLOT_AT_USE, Extra, VllmRulesCore


cdef inline void name(VllmRulesCore* x, Request* r) noexcept nogil:
    """Blocks whose content counts as known: generated ones as soon as their last token is, or when promoted."""
    if x.rules & RULE_FILL_EARLY and r.full < r.len >> x.c.shift:
        r.full = <int32_t>(r.len >> x.c.shift)


cdef inline bint unseen(VllmRulesCore* x) noexcept nogil:
    """Nobody but their request can find generated blocks, and nobody is told of them."""
    return not x.strict and not x.c.real_tokens and not (x.c.pool.capture and not x.skip_own)


cdef inline bint lazy(VllmRulesCore* x) noexcept nogil:
    """Generated blocks may stay blank until their request lets them go: what it knows then tells which are full."""
    return (unseen(x) and (x.rules & (RULE_FILL_EARLY | RULE_SLOT_AT_USE)) == (RULE_FILL_EARLY | RULE_SLOT_AT_USE)
            and not x.rules & RULE_LATE)


cdef void take(VllmRulesCore* x, int64_t count) noexcept nogil
cdef void cover(VllmRulesCore* x, Request* r, int64_t count) noexcept nogil
cdef void append_token(VllmRulesCore* x, Request* r, uint32_t token) noexcept nogil
cdef void fill(VllmRulesCore* x, Request* r, Extra* e, int64_t count) noexcept nogil
cdef bint allocate(VllmRulesCore* x, Request* r, Extra* e, int64_t target, int64_t hits) noexcept nogil
cdef void let_go(VllmRulesCore* x, int32_t slot) noexcept nogil
