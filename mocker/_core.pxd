# Data dictionary of one engine core: the requests it knows, its queues, the pass under way and what it says of it.
from mocker._collect cimport Gaps, Rows
from mocker._common cimport int8_t, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from mocker._hooks cimport AdmissionHook, Hook
from mocker._kv cimport Path, Pool
from mocker._spec cimport StdRng
from mocker._timing cimport Timing


cdef struct Request:
    int64_t len                    # known tokens: prompt + generated
    int64_t computed               # tokens whose KV is computed (at schedule time)
    int64_t alloc                  # tokens that its held blocks were taken for; by rules: see `counting_until`
    int64_t gen                    # generated tokens
    int64_t limit                  # generated tokens at which it ends
    int64_t prompt                 # prompt tokens
    double last_ms                 # when its newest token was made
    int32_t full                   # full (registered) blocks in its block list
    uint8_t partial                # 1: the list ends with an unregistered block
    uint8_t status                 # RequestStatus
    int32_t due_next               # asleep: next one that is due in the same pass
    int32_t place                  # with a calendar: rises along the batch
    int64_t pass_no                # pass that scheduled it last, negative for a plain decode step; of others:
    int64_t used                   # tokens scheduled
    int64_t used_prompt            # of them prompt tokens
    int64_t used_prefix            # prompt tokens before them
    int64_t work                   # its entry in `works`
    int64_t id                     # caller's handle; row in the collector
    int64_t preemptions
    Path path                      # its full blocks; elements beyond the prompt are generated ones
    uint64_t own_key               # segment of its generated blocks; 0: real tokens, an element a block
    uint32_t* tail                 # [block_size] real tokens of the last, unregistered block
    int32_t tail_used
    uint32_t* plan                 # [plan_used] tokens it will generate
    int64_t plan_used
    int64_t plan_cap
    uint8_t source                 # 1: hand-off source, its blocks are held when it is done
    uint8_t destination            # 1: hand-off destination that was activated
    int32_t pinned                 # reserved destination: cached blocks pinned
    int64_t attempt                # pending destination: capacity generation of the last try, NIL = never
    int32_t next_free              # free slots: next one; 256 bytes: a slot is found by a shift


cdef struct Work:                  # one scheduled request, for the forward-pass metrics
    int64_t id                     # as in its request
    int64_t total                  # tokens computed
    int64_t prompt_tokens          # of them prompt tokens
    int64_t prefix                 # prompt tokens before them
    int64_t prompt                 # prompt length
    int64_t length                 # known tokens when it was scheduled
    bint undone                    # preempted later in the same pass, while scheduling


cdef struct Admission:
    int64_t id
    int64_t reused                 # cached prompt tokens


cdef struct Signal:
    int64_t id
    int64_t token                  # token id, NIL without one
    uint8_t completed
    uint8_t rejected
    uint8_t terminal               # Terminal
    double handoff_ms              # NaN = none


cdef struct Spread:                # count, sum and population variance of one forward-pass metric
    int64_t count
    int64_t total
    double variance


cdef inline void spread_add(Spread* s, double* mean, int64_t value) noexcept nogil:
    """One more value; `variance` is the sum of squared deviations until it is divided by the count (Welford)."""
    cdef double delta
    s.count += 1
    s.total += value
    delta = <double>value - mean[0]
    mean[0] += delta / <double>s.count
    s.variance += delta * (<double>value - mean[0])


cdef enum WaitReason:              # why the last pass admitted nobody else
    STOP_EMPTY = 0                 # nobody waits
    STOP_SEQS = 1                  # max_num_seqs reached
    STOP_WAIT = 2                  # the head does not fit beside the running ones
    STOP_OTHER = 3                 # budget or preemption: the next pass may differ


cdef struct Calendar:              # of a large batch, see `_calendar`
    int64_t least                  # requests that run from which on it is used; 0: never
    bint is_open                   # is used
    int64_t tick                   # passes in which everybody asleep has made a token
    int64_t asleep                 # requests asleep; their `len` and `gen` are kept less `tick`
    int64_t days                   # power of two
    int32_t* first                 # [days] by the tick at which they are due: those asleep, linked; NIL = nobody
    int32_t* last                  # [days] the last one, where there is one
    uint64_t* marks                # [days / 64] a bit for each day with somebody
    int64_t* awake                 # [n_awake] the others that run, in the order of the batch: place << 32 | slot
    int64_t awake_cap
    int64_t n_awake
    int64_t odd                    # of them: do not just decode
    int32_t next_place             # of the next one to join
    int64_t at                     # see `calendar_settle`
    int64_t turns                  # passes since the last look at whether it is worth its keep
    int64_t busy                   # requests awake in them
    int64_t not_before             # pass before which it is not opened again
    int64_t base                   # sum of the `len` of those asleep as it is kept; not beside `asleep`, see `View`


cdef struct Core:
    # configuration
    int64_t block_size
    int64_t mask                   # block_size - 1
    int shift                      # log2(block_size)
    int64_t max_seqs
    int64_t max_tokens             # budget of a pass
    bint caching
    bint chunked
    bint end_over_budget           # end a head that no pass can hold, where the reference waits for ever
    bint fifo                      # preempt the oldest running request, not the newest
    Hook victim                    # score of who runs; the lowest is preempted, of equal ones the newest or the oldest
    AdmissionHook admission        # who waits: the lowest score goes first, of equal ones the first
    int policy                     # Policy
    int worker_type                # WorkerType
    double kv_bytes                # bytes a token, NaN = unset
    double kv_bandwidth            # GB/s, NaN = unset
    int nextn                      # speculative tokens, 0 = off
    uint64_t accepted[5]           # their conditional acceptance, as `_spec` wants it
    StdRng rng                     # draws for them
    StdRng token_rng               # tokens that no plan gives (real tokens only)
    bint real_tokens               # blocks are identified by token hashes, not by segments of a trace
    int32_t tokens_per_block       # > 0: paths keep their tokens for the events
    void* tiers                    # Offload* of `_offload`; NULL: no tiers below the pool
    # parts
    Pool pool
    Timing timing
    Calendar calendar
    Rows* rows                     # NULL: nobody collects
    Gaps* gaps
    bint record                    # fill `admissions` and `signals`
    bint metrics                   # fill `works`
    bint note_first                # note first tokens in `ended`
    # requests
    Request* req
    int64_t req_cap
    int64_t req_used               # high-water mark of slots
    int32_t free_slot
    int64_t count                  # requests alive
    int32_t* running               # [n_running] slots in admission order
    int64_t running_cap
    int64_t n_running
    int32_t* waiting               # ring of slots; < NIL: place kept for a dropped request
    int64_t waiting_cap            # power of two
    int64_t waiting_head           # ring position of the first
    int64_t waiting_places         # places in use, kept ones included
    int64_t n_waiting              # requests among them
    int32_t next_place             # newest mark of a kept place
    int64_t preemptions
    uint64_t next_own_key
    int32_t* pending               # [n_pending] slots of destinations that wait for a reservation, in order
    int64_t pending_cap
    int64_t n_pending
    int64_t n_reserved             # destinations reserved
    int64_t n_held                 # sources held
    int64_t generation             # grows whenever capacity may have become free
    int64_t* held                  # [held_used] ids of the sources that the pass left held
    int64_t held_cap
    int64_t held_used
    # the pass under way
    int64_t pass_no
    int64_t budget
    int64_t batch                  # prompts in the prefill batch
    int64_t batch_isl              # sum of their context after the pass
    int64_t batch_prefix           # sum of their context before it
    bint preempted
    int reason                     # WaitReason
    int32_t* ready                 # slots that will make a token, in batch order
    int64_t ready_cap
    int64_t n_ready                # known while scheduling, if nobody is passed over: NIL
    int64_t ready_length           # sum of their known tokens
    double last_emit               # end of the last pass that made tokens
    int64_t seen_running           # when the batch was put together: requests in it,
    int64_t seen_waiting           # requests behind it
    int64_t seen_used              # blocks held
    # what it produced
    double end_ms
    double last_start              # when the newest pass began, fast-forwarded ones included
    int64_t completed              # requests gone since the pass began
    int64_t admitted               # admissions
    int64_t* ended                 # [ended_used] ids of the requests gone, and with `note_first` ~id of those that
    int64_t ended_cap              # made their first token, in the order of their signals
    int64_t ended_used
    int64_t* gone_late             # [gone_late_used] ids of those whose signals follow the tokens of the pass
    int64_t gone_late_cap
    int64_t gone_late_used
    int64_t made                   # tokens made
    int64_t made_by                # requests that made them
    bint steady                    # every running request decodes and made its token
    Work* works
    int64_t works_cap
    int64_t works_used
    Admission* admissions
    int64_t admissions_cap
    int64_t admissions_used
    Signal* signals
    int64_t signals_cap
    int64_t signals_used
    Signal* late                   # signals that follow the tokens of the pass
    int64_t late_cap
    int64_t late_used
    Spread fpm[4]                  # prefill lengths, decode lengths, queued prefill, queued decode
    int64_t fpm_prefill_tokens
    int64_t fpm_prefix_tokens
    int64_t passes                 # passes since the start, fast-forwarded ones included
    int error                      # ErrorCode
