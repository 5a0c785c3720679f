# Data dictionary of the router: which worker has which blocks, what each worker is busy with, who waits.
# A segment is what the pools call one (`_kv.pxd`); with real tokens every block is a segment of its own. A row is
# the caller's number of a request, a worker its number of a worker.
from mocker._common cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from mocker._hooks cimport Hook
from mocker._kv cimport Path, Pool
from mocker._offload cimport World
from mocker._offload_blocks cimport BlockSet
from mocker._spec cimport StdRng

cdef enum RouteKind:               # how a worker is chosen
    ROUTE_KV = 0                   # least cost: prefill work, cached blocks, active blocks
    ROUTE_ROUND_ROBIN = 1
    ROUTE_LEAST_REQUESTS = 2       # fewest requests in flight
    ROUTE_LEAST_TOKENS = 3         # fewest prompt tokens in flight
    ROUTE_TWO_CHOICES = 4          # of two random workers the one with fewer requests
    ROUTE_PREFIX = 5               # rendezvous hash of the first blocks
    ROUTE_RANDOM = 6
    ROUTE_CALL = 7                 # a function decides

cdef enum RouteCode:               # what router_arrival returns in place of a worker
    ROUTED_LATER = -1              # queued; router_drain will tell
    ROUTED_NEVER = -2              # refused: its queue is full
    ROUTED_ERROR = -3              # memory is short, or the function named no worker (see `Router.error`)

cdef enum QueuePolicy:
    QUEUE_FCFS = 0
    QUEUE_LCFS = 1
    QUEUE_WSPT = 2

cdef enum RouterError:
    ROUTER_OK = 0
    ROUTER_MEMORY = 1              # an allocation failed
    ROUTER_CHOICE = 2              # the function of ROUTE_CALL named no worker


cdef struct KeyTable:              # open addressing, no tombstones
    uint64_t* keys
    int32_t* values                # NIL = empty place
    uint64_t mask                  # places - 1
    int64_t used


cdef struct Hold:                  # a worker's first `depth` blocks of a segment
    int32_t worker
    int32_t depth
    int32_t refs                   # active: requests that end at just this depth; resident: 0


cdef struct Segment:
    uint64_t key
    Hold* resident                 # [resident_used] cached blocks, an entry a worker
    Hold* active                   # [active_used] blocks of requests in flight, an entry a (worker, depth)
    int32_t resident_used
    int32_t resident_cap
    int32_t active_used
    int32_t active_cap
    int32_t next_free              # free segments: next one


cdef struct Load:                  # one worker
    int64_t order                  # ties: the lowest is chosen
    uint8_t eligible               # may be chosen
    int64_t requests               # in flight
    int64_t tokens                 # their prompt tokens
    int64_t blocks                 # distinct prompt blocks of theirs
    int64_t prefill                # uncached prompt tokens of those that are in their prefill
    int64_t unmodeled              # of those, without an estimated duration
    int64_t resident               # cached blocks
    int32_t first                  # estimator only: tickets in prefill, oldest
    int32_t last                   # and newest
    int64_t anchor                 # ns, when the oldest began to count down


cdef struct Ticket:                # one request that is queued or in flight
    int64_t row
    int64_t isl                    # prompt tokens
    int32_t worker                 # NIL: queued
    int32_t n                      # path elements held (in flight), or kept (queued)
    int32_t* segments              # [n] in flight: segments held
    int32_t* depths                # [n] blocks held of each; queued: `ends` of the path
    int64_t cap                    # allocated elements of these
    int64_t alone                  # blocks held that are never shared
    int64_t prefill                # prompt tokens counted as active prefill
    int64_t duration               # ns, NIL without an estimate
    int32_t prev                   # estimator only: worker's tickets in prefill
    int32_t next                   # the same; free tickets: next one
    uint64_t* keys                 # [n] queued only
    int64_t keys_cap
    int32_t* overlaps              # [2 * overlaps_used] queued only: worker, cached blocks when it arrived
    int64_t overlaps_cap
    int32_t overlaps_used
    int32_t* lower                 # [3 * lower_used] the same of `Lower`: worker, host blocks, disk blocks
    int32_t lower_used
    int32_t queue                  # its class
    uint32_t strict                # queue order: highest first,
    double score                   # then highest,
    int64_t sequence               # then lowest
    int64_t cost                   # tokens that it costs its class
    int64_t cached                 # cached prompt tokens on the best worker when it arrived


cdef struct QueueClass:
    int policy                     # QueuePolicy
    int64_t quantum                # tokens of credit a round
    int64_t busy_tokens            # NIL: no such threshold
    double busy_fraction           # NaN: no such threshold
    int64_t max_requests           # per worker, NIL: no limit
    int64_t max_isl
    int64_t max_cached
    int32_t* heap                  # [used] tickets, best first
    int64_t used
    int64_t cap
    int64_t isl                    # prompt tokens of the queued
    int64_t cached                 # cached tokens of the queued
    int64_t credit
    bint ready                     # scratch: its head may be dispatched now


cdef struct Placement:             # a request that was given a worker
    int64_t row
    int32_t worker
    int32_t overlap                # cached blocks there when it arrived
    int64_t isl                    # prompt tokens


cdef struct Ask:                   # what the function of ROUTE_CALL may look at
    int64_t row
    int64_t isl                    # prompt tokens
    double now                     # ms
    int32_t n                      # eligible workers, in order
    const int32_t* workers         # [n]
    const int32_t* overlap         # by worker: cached blocks of this prompt
    const Load* loads              # by worker


cdef struct Lower:                 # blocks below the GPU, for a router that credits them
    double host_weight             # what a block in the host counts, where one on the GPU counts `credit`
    double disk_weight             # the same on the disk or in a remote store
    World* world                   # of a replay: its disk and remote store, of which there are no events; NULL: none
    BlockSet* sets                 # [3 * cap] blocks by worker and tier
    int32_t* host                  # [cap] of the request under way: blocks in the host that follow the cached ones
    int32_t* disk                  # [cap] and those on the disk and beyond that follow these
    int64_t cap                    # workers


cdef struct Node:                  # of the tree of eligible workers: the lowest base cost below it
    double key
    int32_t count                  # workers that have it


ctypedef int32_t (*ChooseFn)(void* context, const Ask* ask) noexcept nogil             # a worker, or NIL
ctypedef int64_t (*EstimateFn)(void* context, int64_t fresh, int64_t cached) noexcept nogil    # ns, or NIL


cdef struct Router:
    # configuration
    int kind                       # RouteKind
    bint reads                     # keep track of cached blocks
    int64_t block_size
    int64_t budget                 # tokens a pass of a worker
    double credit                  # overlap_score_credit
    double credit_decay
    double prefill_scale
    double temperature
    bint track_blocks
    bint share_blocks              # equal blocks of requests in flight count once
    bint track_prefill
    bint random_ties
    bint skip_own                  # keys with the top bit set are generated blocks that no prompt can have
    int32_t prefix_blocks          # ROUTE_PREFIX: blocks that are hashed
    double prefix_bound            # ROUTE_PREFIX: times the mean number of requests that a worker may have, 0: any
    ChooseFn choose
    void* choose_context
    Lower* lower                   # NULL: only blocks on the GPU count
    EstimateFn estimate            # NULL: active prefill tokens do not melt
    void* estimate_context
    StdRng rng
    # index
    KeyTable table                 # key -> segment
    Segment* segments
    int64_t segments_cap
    int64_t segments_used          # high-water mark
    int32_t free_segment
    # workers
    Load* loads                    # [workers]
    int64_t workers                # numbers in use, eligible or not
    int64_t workers_cap
    int32_t* eligible              # [n_eligible] by `order`
    int32_t n_eligible
    int32_t* position              # [workers] index in `eligible`, NIL if not there
    int32_t tree_from              # eligible workers from which on the tree is used
    bint tree_exact                # base costs order workers alike for every request
    Node* tree                     # [2 * leaves] root at 1, leaf of position i at leaves + i; NULL: not used
    int32_t leaves
    int64_t turn                   # round robin
    int64_t in_flight              # requests
    # requests
    KeyTable rows                  # row -> ticket
    Ticket* tickets
    int64_t tickets_cap
    int64_t tickets_used           # high-water mark
    int32_t free_ticket
    # queue
    QueueClass* classes            # [n_classes]
    int32_t n_classes
    int32_t next_class
    int64_t queued
    int64_t next_sequence
    int64_t* bucket_starts         # [n_buckets] uncached prompt tokens
    int32_t* bucket_classes        # [families * n_buckets]
    int32_t n_buckets
    Placement* placed              # [placed_used] what the last router_drain placed
    int64_t placed_cap
    int64_t placed_used
    # the request under way
    int32_t* overlap               # [workers] cached blocks
    int32_t* shared                # [workers] blocks active already
    int32_t* warm                  # [n_warm] workers where one of these is not 0
    int32_t n_warm
    double* cost                   # [n_eligible], or of the warm workers
    int32_t* scratch               # [n_eligible]
    int32_t* found                 # [found_used] segments of its path that exist
    int64_t found_cap
    int32_t found_used
    int64_t walks                  # path elements looked at since the start
    int32_t last_overlap           # of the request that was placed last
    double last_cost               # its cost
    int32_t full_class             # after ROUTED_NEVER: the class,
    int full_kind                  # which limit (0 requests, 1 prompt tokens, 2 cached tokens),
    int64_t full_current           # what it holds
    int64_t full_limit             # and may hold
    int error                      # RouterError


# What the cluster loop calls, in the order of the reference's events at one timestamp:
#   pass ends      router_events first if the engine's events are visible then (SGLang); then per output signal:
#                  the request has ended, however: router_completed; else its first one: router_prefill_completed;
#                  after each of them router_drain, whose `placed` are dispatched before the next signal
#   worker ready   router_add_worker(worker, order = worker), router_drain
#   arrival        router_arrival; a worker: dispatch; ROUTED_LATER: it waits, and counts as in flight
#   pass starts    router_events at once if the events are visible then (vLLM, TRT-LLM), before the next worker's pass
#   scaling        router_remove_worker, later router_finalize_worker when it has drained, then router_drain
# An engine without prefix caching has no events, but its requests' paths are still needed: active blocks are shared
# by content. A queued request that is cancelled: router_cancel; one in flight: router_completed.
# What is not below is in `_router_choice.pxd`.
cdef void router_finalize_worker(Router* r, int32_t worker) noexcept nogil
cdef void router_events(Router* r, int32_t worker, Pool* pool) noexcept nogil
cdef int32_t router_arrival(Router* r, int64_t row, Path* path, int64_t isl, int64_t priority, uint32_t strict,
                            int32_t policy, double now) noexcept nogil
cdef bint router_prefill_completed(Router* r, int64_t row, double now) noexcept nogil
cdef bint router_completed(Router* r, int64_t row, double now) noexcept nogil
cdef bint router_cancel(Router* r, int64_t row) noexcept nogil
cdef int64_t router_drain(Router* r, double now) noexcept nogil


cdef class RouterCore:
    cdef Router r
    cdef readonly object profile   # PolicyProfile
    cdef object function           # Python function of ROUTE_CALL
    cdef object estimator          # Python estimator
    cdef object failure            # exception of one of them
    cdef object hook               # ScoreHook of ROUTE_CALL
    cdef object world              # OffloadWorld that `lower` looks into
    cdef Hook score                # what the choice asks of it
