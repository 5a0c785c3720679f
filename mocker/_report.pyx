# cython: language_level=3
"""What a report says of the requests, and the dict of it: one call for a run, most of it without the interpreter lock.

Answers to `replay/collector.rs`; keys and formulas are its own. `mocker.collector` says what they mean.
"""
from libc.math cimport NAN, isnan
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from mocker._collect cimport Collector, log_describe
from mocker._common cimport int8_t, int64_t
from mocker._distribution cimport N_STATISTICS, Described, plain_described
from mocker._distribution import STATISTICS
from mocker._workers cimport Workers

cdef enum:
    TTFT, TTST, TPOT, ITL, E2E, RATE           # distributions in the order of the report
    N_DISTRIBUTIONS

TERMINAL_NAMES = ("incomplete", "completed", "rejected", "capacity", "over_budget", "failed", "canceled")
DISTRIBUTIONS = (("ttft", "_ms"), ("ttst", "_ms"), ("tpot", "_ms"), ("itl", "_ms"), ("e2e_latency", "_ms"),
                 ("output_token_throughput_per_user", ""))
cdef tuple NAMES = tuple([name for name, _ in DISTRIBUTIONS])
cdef tuple KEYS = tuple([tuple([f"{key}_{name}{suffix}" for key in STATISTICS]) for name, suffix in DISTRIBUTIONS])


cdef dict blank(bint goodput, bint reference):
    """A report without values: its keys are in order already, and it need not grow."""
    cdef list keys = [
        "num_requests", "completed_requests", "total_input_tokens", "total_output_tokens", "duration_ms",
        "wall_time_ms", "request_throughput_rps", "input_throughput_tok_s", "output_throughput_tok_s",
        "total_throughput_tok_s", "prefill_worker_seconds", "decode_worker_seconds", "prefill_gpus_per_worker",
        "decode_gpus_per_worker", "gpu_hours"]
    if goodput:
        keys += ["goodput_completed_requests", "goodput_request_throughput_rps", "goodput_output_throughput_tok_s"]
    keys += ["processed_tokens", "processed_tokens_per_s", "processed_output_tokens_per_s",
             "prefix_cache_reused_ratio", "first_admission_prefix_cache_reused_ratio"]
    for some in KEYS:
        keys += some
    if not reference:
        keys += [f"{name}_requests" for name in TERMINAL_NAMES if name != "completed"] + ["samples"]
    return dict.fromkeys(keys)


cdef list BLANKS = [blank(number & 1, number & 2) for number in range(4)]


cdef inline double positive(double x) noexcept nogil:
    return x if x > 0.0 else 0.0


cdef bint sum_up(const Table* c, int64_t n, bint reference, double sla_ttft, double sla_itl, double sla_e2e, Totals* t,
                 Described* found) noexcept nogil:
    """Totals and distributions (all but those of the gaps) of n requests; false if memory is short."""
    cdef double* ttft = <double*>malloc((6 * n + 1) * sizeof(double))
    cdef double* ttst = ttft + n
    cdef double* tpot = ttst + n
    cdef double* e2e = tpot + n
    cdef double* spare = e2e + n
    cdef int64_t i, outputs, served = 0, firsts = 0, seconds = 0, several = 0, whole_ones = 0
    cdef int64_t requests = 0, completed = 0, inputs = 0, produced = 0, reused = 0, first_reused = 0, good = 0
    cdef int64_t good_outputs = 0
    cdef double first, whole, mean_gap, last = 0.0
    cdef bint done, judged = not (isnan(sla_ttft) and isnan(sla_itl) and isnan(sla_e2e))
    if ttft == NULL:
        return False
    memset(t, 0, sizeof(Totals))
    for i in range(n):
        if isnan(c.arrival[i]):
            continue
        requests += 1
        if c.terminal[i] == 1:
            completed += 1
        else:
            t.terminal[c.terminal[i] & 7] += 1
        if isnan(c.first_admit[i]) or isnan(c.first_token[i]):
            continue
        served += 1
        done = reference or c.terminal[i] == 1
        outputs = c.output_length[i] if reference else c.output_tokens[i]
        inputs += c.input_length[i]
        produced += outputs
        reused += c.reused[i]
        first_reused += c.first_reused[i]
        if c.last_token[i] > last:
            last = c.last_token[i]
        first = positive(c.first_token[i] - c.arrival[i])
        whole = positive(c.last_token[i] - c.arrival[i])
        ttft[firsts] = first
        firsts += 1
        ttst[seconds] = c.second_gap[i]
        seconds += not isnan(c.second_gap[i])
        tpot[several] = positive(c.last_token[i] - c.first_token[i]) / <double>max(c.output_tokens[i] - 1, 1)
        several += c.output_tokens[i] >= 2
        e2e[whole_ones] = whole
        whole_ones += done
        if done and judged:
            mean_gap = (whole - first) / <double>max(outputs - 1, 1)
            if whole > sla_e2e or first > sla_ttft or (mean_gap > sla_itl and outputs > 1):
                continue
        if done:
            good += 1
            good_outputs += outputs
    t.terminal[1] = completed
    t.requests, t.completed = requests, served if reference else completed
    t.inputs, t.outputs, t.reused, t.first_reused, t.last = inputs, produced, reused, first_reused, last
    t.good, t.good_outputs = good, good_outputs
    found[TTFT] = plain_described(ttft, firsts, spare)
    found[TTST] = plain_described(ttst, seconds, spare)
    found[TPOT] = plain_described(tpot, several, spare)
    found[E2E] = plain_described(e2e, whole_ones, spare)
    free(ttft)
    return True


cdef int put(dict out, dict samples, int which, const Described* d, bint reference) except -1:
    """Add one distribution."""
    cdef int i
    cdef tuple keys = KEYS[which]
    samples[NAMES[which]] = d.samples
    if d.samples == 0 and not reference:
        return 0                               # nothing is said of nothing
    for i in range(N_STATISTICS):
        out[keys[i]] = d.values[i] if d.samples else 0.0
    return 0


cdef dict written(const Totals* t, const Described* found, bint goodput, decode_worker_seconds, prefill_worker_seconds,
                  decode_gpus, prefill_gpus, double wall_time_ms, compat):
    """The report of totals and distributions."""
    cdef bint reference = compat == "reference"
    cdef dict out = (<dict>BLANKS[goodput + 2 * reference]).copy(), samples = {}
    cdef double seconds = max(t.last / 1000.0, 1e-9), per_wall = 1000.0 / wall_time_ms if wall_time_ms > 0.0 else 0.0
    cdef double inputs = <double>t.inputs, outputs = <double>t.outputs
    cdef int i
    if decode_worker_seconds is None:
        decode_worker_seconds = seconds
    out["num_requests"] = t.requests
    out["completed_requests"] = t.completed
    out["total_input_tokens"] = t.inputs
    out["total_output_tokens"] = t.outputs
    out["duration_ms"] = t.last
    out["wall_time_ms"] = wall_time_ms
    out["request_throughput_rps"] = <double>t.completed / seconds
    out["input_throughput_tok_s"] = inputs / seconds
    out["output_throughput_tok_s"] = outputs / seconds
    out["total_throughput_tok_s"] = <double>(t.inputs + t.outputs) / seconds
    out["prefill_worker_seconds"] = prefill_worker_seconds
    out["decode_worker_seconds"] = decode_worker_seconds
    out["prefill_gpus_per_worker"] = prefill_gpus
    out["decode_gpus_per_worker"] = decode_gpus
    out["gpu_hours"] = (prefill_worker_seconds * prefill_gpus + decode_worker_seconds * decode_gpus) / 3600.0
    if goodput:
        out["goodput_completed_requests"] = t.good
        out["goodput_request_throughput_rps"] = <double>t.good / seconds
        out["goodput_output_throughput_tok_s"] = <double>t.good_outputs / seconds
    out["processed_tokens"] = t.inputs + t.outputs
    out["processed_tokens_per_s"] = <double>(t.inputs + t.outputs) * per_wall
    out["processed_output_tokens_per_s"] = outputs * per_wall
    out["prefix_cache_reused_ratio"] = <double>t.reused / inputs if t.inputs else 0.0
    out["first_admission_prefix_cache_reused_ratio"] = <double>t.first_reused / inputs if t.inputs else 0.0
    for i in range(N_DISTRIBUTIONS):
        put(out, samples, i, &found[i], reference)
    if not reference:
        out["incomplete_requests"] = t.terminal[0]
        out["rejected_requests"] = t.terminal[2]
        out["capacity_requests"] = t.terminal[3]
        out["over_budget_requests"] = t.terminal[4]
        out["failed_requests"] = t.terminal[5]
        out["canceled_requests"] = t.terminal[6]
        out["samples"] = samples
    return out


cdef Described from_mapping(stats) except *:
    """A distribution that `weighted_statistics` gave."""
    cdef Described d
    cdef int i
    memset(&d, 0, sizeof(Described))
    d.samples = stats["samples"]
    for i in range(N_STATISTICS if d.samples else 0):
        d.values[i] = stats[STATISTICS[i]]
    return d


def report_of(int64_t requests, totals, latencies, gaps, rates, *, bint goodput, decode_worker_seconds,
              prefill_worker_seconds, decode_gpus, prefill_gpus, wall_time_ms, compat):
    """The report of totals and distributions.

    Parameters
    ----------
    requests : int
        That arrived.
    totals : mapping
        ``completed``, ``inputs``, ``outputs``, ``reused``, ``first_reused``, ``good``,
        ``good_outputs``, ``duration_ms`` and ``terminal`` (requests by how they ended).
    latencies : sequence of mapping
        Distributions of TTFT, TTST, TPOT and end-to-end latency, ms, as `weighted_statistics` gives them.
    gaps, rates : mapping
        As of `mocker.collector.assemble_report`, and so is all that follows.
    goodput : bool
        Say what is good.

    Returns
    -------
    dict
    """
    cdef Totals t
    cdef Described[N_DISTRIBUTIONS] found
    cdef int i
    t.requests, t.completed, t.inputs, t.outputs = (
        requests, totals["completed"], totals["inputs"], totals["outputs"])
    t.reused, t.first_reused, t.good, t.good_outputs = (
        totals["reused"], totals["first_reused"], totals["good"], totals["good_outputs"])
    t.last = totals["duration_ms"]
    for i in range(8):
        t.terminal[i] = totals["terminal"][i]
    found[TTFT], found[TTST] = from_mapping(latencies[0]), from_mapping(latencies[1])
    found[TPOT], found[E2E] = from_mapping(latencies[2]), from_mapping(latencies[3])
    found[ITL], found[RATE] = from_mapping(gaps), from_mapping(rates)
    return written(&t, found, goodput, decode_worker_seconds, prefill_worker_seconds, decode_gpus, prefill_gpus,
                   wall_time_ms, compat)


def report_of_columns(const double[::1] arrival, const double[::1] first_admit, const double[::1] first_token,
                      const double[::1] second_gap, const double[::1] last_token, const int64_t[::1] input_length,
                      const int64_t[::1] output_length, const int64_t[::1] output_tokens, const int64_t[::1] reused,
                      const int64_t[::1] first_reused, const int8_t[::1] terminal, gaps, rates, sla, *,
                      decode_worker_seconds, prefill_worker_seconds, decode_gpus, prefill_gpus, wall_time_ms, compat):
    """The report of the columns of `mocker.collector.Columns`; `sla` has the goodput bounds, ms, None for none."""
    cdef Totals t
    cdef Described[N_DISTRIBUTIONS] found
    cdef Table c
    cdef int64_t n = arrival.shape[0]
    cdef double ttft = bound(sla[0]), itl = bound(sla[1]), e2e = bound(sla[2])
    cdef bint reference = compat == "reference", ok = True
    memset(&c, 0, sizeof(Table))
    if n:
        c.arrival, c.first_admit, c.first_token = &arrival[0], &first_admit[0], &first_token[0]
        c.second_gap, c.last_token = &second_gap[0], &last_token[0]
        c.input_length, c.output_length, c.output_tokens = &input_length[0], &output_length[0], &output_tokens[0]
        c.reused, c.first_reused, c.terminal = &reused[0], &first_reused[0], &terminal[0]
    with nogil:
        ok = sum_up(&c, n, reference, ttft, itl, e2e, &t, found)
    if not ok:
        raise MemoryError
    found[ITL], found[RATE] = from_mapping(gaps), from_mapping(rates)
    return written(&t, found, not (isnan(ttft) and isnan(itl) and isnan(e2e)), decode_worker_seconds,
                   prefill_worker_seconds, decode_gpus, prefill_gpus, wall_time_ms, compat)


def report_of_run(Workers cluster, const int64_t[::1] input_length, const int64_t[::1] output_length, sla, *,
                  decode_worker_seconds, prefill_worker_seconds, decode_gpus, prefill_gpus, wall_time_ms, compat):
    """The same of a run in one pool and its gap log, straight from where they were written."""
    cdef Totals t
    cdef Described[N_DISTRIBUTIONS] found
    cdef Table c
    cdef Collector k = cluster.collector
    cdef int64_t n = cluster.arrived.shape[0]
    cdef double ttft = bound(sla[0]), itl = bound(sla[1]), e2e = bound(sla[2])
    cdef bint reference = compat == "reference", ok = True
    memset(&c, 0, sizeof(Table))
    if n:
        c.arrival, c.first_admit, c.first_token = &cluster.arrived[0], k.rows.first_admit, k.rows.first_token
        c.second_gap, c.last_token, c.output_tokens = k.rows.second_gap, k.rows.last_token, k.rows.tokens
        c.input_length, c.output_length = &input_length[0], &output_length[0]
        c.reused, c.first_reused, c.terminal = k.rows.reused, k.rows.first_reused, k.rows.terminal
    with nogil:
        ok = (log_describe(&k.gaps, &found[ITL], &found[RATE])
              and sum_up(&c, n, reference, ttft, itl, e2e, &t, found))
    if not ok:
        raise MemoryError
    return written(&t, found, not (isnan(ttft) and isnan(itl) and isnan(e2e)), decode_worker_seconds,
                   prefill_worker_seconds, decode_gpus, prefill_gpus, wall_time_ms, compat)


cdef double bound(value) except? -1.0:
    return NAN if value is None else <double>value
