# Data dictionary of one SGLang engine core: the requests it knows, its queues, the pass under way and what it says.
# Shared with the other engines: admissions, signals, spreads (_core.pxd), events and paths (_kv.pxd).
from mocker._collect cimport Gaps, Rows
from mocker._common cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from mocker._core cimport Admission, Signal, Spread
from mocker._hooks cimport AdmissionHook, Hook
from mocker._kv cimport Event, Path, Piece
from mocker._radix cimport Map, Radix
from mocker._spec cimport StdRng
from mocker._timing cimport Timing


cdef enum:
    STRETCH = 1024                 # passes that are foreseen at a time


cdef enum SglStatus:               # where a request is; the first four as in RequestStatus
    SGL_FREE = 0                   # slot not in use
    SGL_WAITING = 1                # queued
    SGL_RUNNING = 2
    SGL_RETRACTED = 3              # queued again, keeps its generated tokens
    SGL_PREBUILT = 4               # destination activated, not running yet
    SGL_HELD = 5                   # source completed, keeps its KV until it is released
    SGL_PENDING = 6                # destination that waits for its reservation
    SGL_RESERVED = 7               # destination reserved, transfer under way

cdef enum SglRole:
    ROLE_PLAIN = 0
    ROLE_SOURCE = 1                # prefill of a hand-off, registered: its completion is held
    ROLE_DESTINATION = 2           # decode of a hand-off, from its reservation on


cdef struct SglRequest:
    int64_t len                    # known tokens: prompt + generated
    int64_t computed               # tokens with a slot in the pool
    int64_t alloc                  # tokens reserved, whole pages
    int64_t gen                    # generated tokens
    int64_t limit                  # generated tokens at which it ends
    int64_t calm                   # known tokens below which a decode step changes only counts; 0: not known
    double last_ms                 # when its newest token was made; up to here is what a plain step reads and writes
    int64_t prompt                 # prompt tokens
    int64_t prefix                 # tokens whose slots it took over from the tree when it was admitted
    int32_t full                   # full pages of its known tokens
    int32_t cached                 # pages of its text that it knows to be in the tree
    int32_t node                   # locked tree node, NIL without slots
    int32_t advertised             # pages whose slots advertise them (kept while slots are not told apart)
    uint64_t owner                 # incarnation: changes with each admission from nothing
    uint8_t status                 # SglStatus
    uint8_t role                   # SglRole
    bint done                      # has all its tokens, leaves the batch at the end of the pass
    int64_t id                     # caller's handle; row in the collector
    int64_t handoff                # caller's number of the hand-off, NIL without one
    int64_t attempt                # capacity generation at which its reservation was last tried, NIL = never
    int64_t transferable           # reserved destination: tokens to transfer
    int64_t retractions
    Path path                      # its full pages; elements beyond the prompt are generated ones
    uint64_t own_key               # segment of its generated pages; unused with real tokens (an element a page)
    uint64_t uuid[2]               # high and low half; tokens that no plan gives follow from it
    uint32_t* tail                 # [page] real tokens of the last page, while it is not full
    int64_t tail_used
    uint32_t* plan                 # [plan_used] tokens it will generate
    int64_t plan_used
    int64_t plan_cap
    int32_t* slots                 # [computed] pool slots by token (only if slots are told apart)
    int64_t slots_cap
    int32_t next_free              # free slots: next one


cdef struct Stretch:               # pages of one segment that equally many slots advertise
    uint64_t key                   # segment
    int32_t begin                  # where the segment begins, in pages from the root
    int32_t start                  # first page, counted from the root
    int32_t end                    # one past the last page
    int32_t count                  # slots
    int32_t next                   # next stretch of the segment, or of the free ones


cdef struct Chunk:                 # one admission, for the forward-pass metrics
    int64_t prompt                 # prompt tokens of the request
    int64_t prefix                 # tokens that it had before
    int64_t tokens                 # tokens of the chunk, those found in the cache included


cdef struct SglangCore:
    # configuration
    int64_t page                   # tokens a page
    int64_t total                  # tokens in the pool
    int64_t max_seqs
    int64_t max_prefill            # prompt tokens a pass
    int64_t chunk                  # prompt tokens of one request a pass
    int64_t clip                   # output tokens that admission reserves at most
    bint lpm                       # longest cached prefix first, not in order of arrival
    double init_ratio              # share of the outstanding output that admission reserves: at first,
    double min_ratio               # at least,
    double ratio_step              # and less by this each pass
    int worker_type                # WorkerType
    bint conserve                  # exact books under retraction, where the reference leaks and frees twice
    double kv_bytes                # bytes a token, NaN = unset
    double kv_bandwidth            # GB/s, NaN = unset
    int nextn                      # speculative tokens, 0 = off
    uint64_t accepted[5]           # their conditional acceptance, as `_spec` wants it
    StdRng rng                     # draws for them
    bint real_tokens               # pages are identified by token hashes, not by segments of a trace
    bint capture                   # log KV events
    Hook victim                    # score of who runs; the lowest is retracted, of equal ones as without it
    AdmissionHook admission        # who waits: the lowest score goes first, of equal ones the first
    # parts
    Radix tree
    Radix fresh                    # LPM: texts of the waiting requests scored so far in this pass
    Timing timing
    Rows* rows                     # NULL: nobody collects
    Gaps* gaps
    bint record                    # fill `admissions` and `signals`
    bint metrics                   # fill `chunks` and `lengths`
    bint note_first                # note first tokens in `notes`
    # requests
    SglRequest* req
    int64_t req_cap
    int64_t req_used               # high-water mark of slots
    int32_t free_slot
    int64_t alive                  # requests in slots
    int64_t count                  # of them waiting, prebuilt or running: what a pass can move
    int32_t* running               # [n_running] slots in the order they began
    int64_t running_cap
    int64_t n_running
    int64_t known                  # their tokens: those known,
    int64_t extra                  # those reserved beyond their slots,
    int64_t rest                   # and those that they have to generate
    int64_t hitch                  # place of the one that was last found not to only decode: the next is often near
    int64_t longest                # most tokens that any request so far was to generate
    int32_t* waiting               # ring of slots
    int64_t waiting_cap            # power of two
    int64_t waiting_head           # ring position of the first
    int64_t n_waiting
    int32_t* prebuilt              # [n_prebuilt] slots in order of activation
    int64_t prebuilt_cap
    int64_t n_prebuilt
    int64_t* pending               # [n_entries] hand-offs by arrival; cancelled ones stay until swept
    int64_t pending_cap
    int64_t n_entries
    Map pending_slots              # hand-off -> slot of those that still wait
    int64_t n_pending              # destinations that wait for a reservation
    int64_t n_reserved             # destinations reserved
    int64_t n_held                 # sources held
    int64_t generation             # capacity generation: grows when memory may have become free
    double ratio                   # new-token ratio now
    uint64_t next_own_key
    uint64_t next_owner
    # counted since the start
    int64_t preemptions            # retractions
    int64_t leaked                 # tokens that retractions and cancellations lost
    int64_t freed_twice            # tokens that they freed although the tree keeps them
    int64_t passes                 # fast-forwarded ones included
    # the pass under way
    int64_t batch                  # prompts in the prefill batch
    int64_t batch_isl              # sum of their context after the pass
    int64_t batch_prefix           # sum of their context before it
    bint preempted                 # queues or the ratio changed: the next pass may differ though nothing was made
    bint put_off                   # the score of who waits lets nobody go now
    int64_t dry                    # passes in a row without a token or an ending
    int32_t* scratch               # slots of requests, or of the pool
    int64_t scratch_cap
    int64_t* bursts                # [n_running] speculative bursts
    int64_t bursts_cap
    double last_emit               # end of the last pass that made tokens
    int64_t seen_running           # when the batch was put together: requests in it,
    int64_t seen_waiting           # requests behind it
    int64_t seen_used              # tokens of the pool that requests hold
    # what it produced
    double end_ms
    double last_start              # when the newest pass began, fast-forwarded ones included
    double* ends                   # [STRETCH + 1] when passes that are foreseen end, the one under way first
    int64_t completed              # requests gone since the pass began
    int64_t admitted               # admissions, one a chunk
    int64_t* ended                 # [ended_used] ids of the requests gone, in the order they went
    int64_t ended_cap
    int64_t ended_used
    int64_t* notes                 # [notes_used] in the order of the signals: ids of the requests gone, and with
    int64_t notes_cap              # `note_first` ~id of those that made their first token
    int64_t notes_used
    int64_t* held                  # [held_used] ids of the sources that completed and are held
    int64_t held_cap
    int64_t held_used
    int64_t made                   # tokens made
    int64_t made_by                # requests that made them
    bint steady                    # every running request made a token: `sgl_forward` may go on
    int64_t hit_tokens             # cached tokens of the admissions
    int64_t hit_total              # cached tokens and chunks of the admissions
    Chunk* chunks
    int64_t chunks_cap
    int64_t chunks_used
    int64_t* lengths               # [lengths_used] known tokens of those that were to decode
    int64_t lengths_cap
    int64_t lengths_used
    Admission* admissions
    int64_t admissions_cap
    int64_t admissions_used
    Signal* signals
    int64_t signals_cap
    int64_t signals_used
    Spread fpm[4]                  # prefill lengths, decode lengths, queued prefill, queued decode
    int64_t fpm_prefill_tokens
    int64_t fpm_prefix_tokens
    # events; as long as slots are not told apart, stretches count who advertises what
    Map segments                   # segment -> its first stretch
    Stretch* stretches
    int64_t stretches_cap
    int64_t stretches_used         # high-water mark
    int32_t free_stretch
    bint open                      # the event under way has begun
    uint64_t* slot_keys            # told: [total] page that the slot of its last token advertises: hash or segment,
    int32_t* slot_offsets          # [total] and offset in the segment (0 for a hash); NIL = none
    Map advertised                 # page -> slots that advertise it
    Event* events
    int64_t events_cap
    int64_t events_used
    Piece* pieces                  # a removed piece lists its pages in order
    int64_t pieces_cap
    int64_t pieces_used
    int error                      # ErrorCode


cdef int sgl_init(SglangCore* c) noexcept nogil
cdef void sgl_free(SglangCore* c) noexcept nogil
cdef int32_t sgl_new(SglangCore* c, int64_t id, int64_t prompt, int64_t limit) noexcept nogil
cdef void sgl_enqueue(SglangCore* c, int32_t slot) noexcept nogil
cdef void sgl_enqueue_source(SglangCore* c, int32_t slot, int64_t handoff) noexcept nogil
cdef void sgl_drop(SglangCore* c, int32_t slot) noexcept nogil
cdef void sgl_release_source(SglangCore* c, int32_t slot) noexcept nogil
cdef bint sgl_reserve(SglangCore* c, int32_t slot, int64_t handoff) noexcept nogil
cdef int32_t sgl_retry(SglangCore* c) noexcept nogil
cdef void sgl_activate(SglangCore* c, int32_t slot) noexcept nogil
cdef void sgl_pass(SglangCore* c, double now) noexcept nogil
cdef double sgl_forward(SglangCore* c, double now, double until, double last_start) noexcept nogil
cdef int64_t sgl_foresee(SglangCore* c, double now, double until, double last_start) noexcept nogil
cdef double sgl_follow(SglangCore* c, int64_t m) noexcept nogil
cdef void sgl_metrics(SglangCore* c) noexcept nogil
cdef uint64_t sgl_active_blocks(SglangCore* c) noexcept nogil
