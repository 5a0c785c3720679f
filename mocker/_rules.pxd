# Data dictionary of the scheduler with switches. It works on a `Core` (requests, queues, what a pass produced) and
# keeps beside it what the rules add: physical copies of blocks, and per request what it holds of them.
from mocker._common cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from mocker._core cimport Core


cdef enum RuleBit:                 # order of the names in mocker.rules.RULES
    RULE_LAST_TOKEN = 1            # a hit stops before the last known token
    RULE_SLOT_AT_USE = 2           # the block of a sampled token is taken when the token is computed
    RULE_LAST_SLOT = 4             # the final token never takes a block
    RULE_OWN_COPY = 8              # one look-up, at admission; equal contents may be held several times
    RULE_GEN_HIT = 16              # a resumed request hits its generated blocks too, in whole blocks
    RULE_FILL_EARLY = 32           # a generated block can be found from the pass that computes its last token
    RULE_FULL_ONLY = 64            # a block can be found once all its tokens are scheduled
    RULE_LRU = 128                 # blocks given back by a failed allocation leave root first
    RULE_WHOLE_TAIL = 256          # unchunked: prompt and generated tokens must fit the budget
    RULE_LATE = 512                # a pass is planned before the tokens of the one before are seen
    RULE_CHARGE_GENERATED = 1024   # recomputed generated tokens take prefill time


cdef struct Copy:                  # consecutive blocks of one segment with the same holders, registered together
    uint64_t key                   # segment
    int64_t stamp                  # number of its registration; of equal contents the smallest is found
    int32_t start                  # first block, offset in the segment
    int32_t end                    # one past the last block
    int32_t ref                    # requests that hold it; 0: cached, evictable
    int32_t prev                   # cached only: towards the next to be evicted
    int32_t next                   # cached only: towards the newest; unused ones: free list
    int32_t left                   # before it in the segment's list (by start), NIL: first
    int32_t right                  # after it
    int32_t upper                  # the copy that it was cut off from, whose blocks end where it starts; NIL: none
    int32_t deeper                 # inverse of `upper`


cdef struct Hold:                  # consecutive blocks of one request
    int32_t first                  # copy with the first of them; the others follow through `deeper`
    int32_t end                    # block index one past the last


cdef struct Piece2:                # a found stretch of a request's blocks
    int32_t copy                   # copy that has it (after cuts: it, or one deeper)
    int32_t at                     # first block, offset in the segment
    int32_t to                     # one past the last, offset in the segment
    int32_t begin                  # block index of the first


cdef struct Extra:                 # what a request has beside `Request`, by slot
    Hold* holds                    # [n] blocks that have their content, root first
    int32_t n
    int64_t cap                    # allocated holds
    int32_t done                   # blocks that have their content; generated ones may be in `holds` only later
    int32_t blank                  # blocks held after these: content not known yet
    int64_t pending                # tokens sampled and not seen yet (late)
    int64_t flight                 # tokens scheduled whose outcome is not seen yet (late)
    int64_t priority               # smaller goes first (policy "priority")
    int64_t order                  # of arrival


cdef struct Batched:               # one request of the batch that this pass scheduled
    int64_t id
    int64_t tokens                 # NIL: taken back
    int32_t slot                   # (later it may be somebody else's: compare the id)
    uint8_t makes                  # late: it will have a token


cdef struct VllmRulesCore:
    Core* c                        # requests, queues, results; of its pool only the counts and the event log
    int rules                      # RuleBit set
    bint by_priority               # waiting and victims by (priority, arrival)
    bint gate                      # a prompt is admitted only if the whole known sequence fits
    int64_t threshold              # most tokens of one request in a pass while others are there; 0: no cap
    bint strict                    # register every block at once and plan every decode step
    bint skip_own                  # no KV events for the generated blocks of a trace: nobody asks for them
    int64_t watermark              # blocks that an admission leaves free while somebody runs
    # memory
    Copy* copies
    int64_t copies_cap
    int64_t copies_used            # high-water mark
    int32_t free_copy              # free list through `next`
    int32_t oldest                 # next cached copy to be evicted (from its deepest block)
    int32_t newest
    uint64_t* table_keys           # open addressing: segment -> first copy of its list
    int32_t* table_heads           # NIL = empty place
    uint8_t* table_twice           # 1: some block of the segment may be there twice
    uint64_t table_mask            # places - 1
    int64_t table_used
    int64_t next_stamp
    Piece2* found                  # scratch: what the newest look-up found
    int64_t found_cap
    int64_t found_used
    int32_t* scratch               # copies of the operation under way
    int64_t scratch_cap
    # requests
    Extra* extra                   # [extra_cap] by slot, as many as the core has slots
    int64_t extra_cap
    int64_t next_order
    # the pass under way
    int64_t cap                    # most tokens of one request
    int64_t place                  # position in `running`
    bint planning                  # scheduling phases: a victim's share goes back
    Batched* batch                 # [batch_used] in batch order; filled if recorded or late
    int64_t batch_cap
    int64_t batch_used
    int64_t making                 # late: requests of the batch that will have a token
    int64_t making_length          # late: sum of their known tokens
    int64_t* victims               # [victims_used] ids in order
    int64_t victims_cap
    int64_t victims_used
    Batched* flight                # late: [flight_used] between passes the newest batch, else the one before
    int64_t flight_cap
    int64_t flight_used
    double flight_end              # late: when that batch ends, ms


cdef inline int64_t least(int64_t a, int64_t b) noexcept nogil:
    return a if a < b else b


cdef inline int64_t most(int64_t a, int64_t b) noexcept nogil:
    return a if a > b else b


cdef inline int64_t blocks_of(Core* c, int64_t tokens) noexcept nogil:
    return (tokens + c.mask) >> c.shift


cdef int rules_init(VllmRulesCore* x, Core* c, int rules) noexcept nogil
cdef void rules_free(VllmRulesCore* x) noexcept nogil
cdef bint rules_room(VllmRulesCore* x) noexcept nogil
cdef int32_t rules_new(VllmRulesCore* x, int64_t id, int64_t prompt, int64_t limit) noexcept nogil
cdef void rules_enqueue(VllmRulesCore* x, int32_t slot, int64_t place, int64_t priority) noexcept nogil
cdef int64_t rules_drop(VllmRulesCore* x, int32_t slot) noexcept nogil
cdef void rules_pass(VllmRulesCore* x, double now) noexcept nogil
cdef double rules_forward(VllmRulesCore* x, double now, double until, double last_start) noexcept nogil
cdef int64_t rules_under_way(VllmRulesCore* x) noexcept nogil
