"""Time: polynomial predictions in milliseconds, durations in whole nanoseconds, the clock as a float in milliseconds.

Floating-point expressions are evaluated from left to right in double precision, as written.
"""

NS = 10**9


def duration_ns(seconds: float) -> int:
    """Nearest whole nanosecond of the exact value, ties to even (the exact product, not the rounded one)."""
    numerator, denominator = seconds.as_integer_ratio()
    if numerator < 0:
        raise ValueError(f"negative duration: {seconds}")
    whole, rest = divmod(numerator * NS, denominator)
    if 2 * rest > denominator or (2 * rest == denominator and whole % 2 == 1):
        whole += 1
    return whole


def duration_secs(ns: int) -> float:
    return float(ns // NS) + float(ns % NS) / 1e9


def scaled_ns(predicted_ms: float, ratio: float) -> int:
    """A prediction becomes a duration first and is divided by the speedup second, rounded both times."""
    ns = duration_ns(predicted_ms / 1000.0)
    if ratio <= 0.0 or ns == 0:
        return ns
    return duration_ns(duration_secs(ns) / ratio)


def advance(clock_ms: float, ns: int) -> float:
    return clock_ms + duration_secs(ns) * 1000.0


def predict_prefill_ms(batch: int, isl: int, prefix: int) -> float:
    new = max(isl - prefix, 0)
    if batch == 0 or new == 0:
        return 0.0
    tokens = float(batch * new)
    return max(4.209989e-07 * (tokens * tokens) + 1.518344e-02 * tokens + 1.650142e01, 0.0)


def predict_decode_ms(batch: int, active_tokens: int, total_tokens: int) -> float:
    if batch == 0:
        return 0.0
    share = active_tokens / total_tokens if total_tokens > 0 else 1.0
    return max(-25.74 * (share * share) + 54.01 * share + 5.74, 1.0)


def handoff_delay_ms(tokens: int, bytes_per_token: int | None, bandwidth_gb_s: float | None) -> float | None:
    if bytes_per_token is None or bandwidth_gb_s is None or bandwidth_gb_s <= 0.0:
        return None
    return float(tokens) * float(bytes_per_token) / (bandwidth_gb_s * 1e9) * 1000.0
