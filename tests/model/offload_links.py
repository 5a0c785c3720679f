"""Links between storage tiers, on which transfers under way share the bandwidth equally (processor sharing)."""

import math


class Link:
    """One direction of a link of `gbps` GB/s (10^9 bytes/s); 0 means unlimited.

    Transfers keep the reference's list order (the last one takes a finished one's place), because the sums behind a
    deadline are floating-point. Of transfers with equally much left, the first in the list is done first.
    """

    def __init__(self, gbps: float, latency: float = 0.0) -> None:
        if not math.isfinite(gbps) or gbps < 0:
            raise ValueError(f"bandwidth must be finite and not negative, got {gbps}")
        self.rate = gbps * 1e6 if gbps > 0 else math.inf  # bytes/ms
        self.latency = latency  # ms that a transfer takes after its bytes have moved
        self.landing: list[tuple[float, object]] = []  # (when it is done, what)
        self.active: list[list] = []  # [start number, bytes left, what]
        self.last = 0.0  # ms up to which `active` is true
        self.starts = 0
        self.moved = 0  # bytes

    def start(self, now: float, size: int, what: object) -> None:
        """Begin at `now`, but not before the link's own time."""
        assert not self.active or now <= self.last, "the link must be advanced first"
        self.last = max(now, self.last)
        self.active.append([self.starts, float(size) if math.isfinite(self.rate) else 0.0, what])
        self.starts += 1
        self.moved += size

    def advance(self, now: float) -> list:
        """Let time pass; what finished, in order."""
        done = []
        if now < self.last:
            return []
        while self.active:
            rate = self.rate / len(self.active)
            index = min(range(len(self.active)), key=lambda i: self.active[i][1])
            need = self.active[index][1] / rate if math.isfinite(rate) else 0.0
            end = self.last + need
            if end > now + 1e-9:
                if math.isfinite(rate) and now > self.last:
                    self._progress((now - self.last) * rate)
                break
            if math.isfinite(rate) and need > 0.0:
                self._progress(need * rate)
            self.last = end
            self.landing.append((end + self.latency, self.active[index][2]))
            self.active[index] = self.active[-1]
            self.active.pop()
        self.last = now
        while self.landing and self.landing[0][0] <= (now + 1e-9 if self.latency else math.inf):
            done.append(self.landing.pop(0)[1])
        return done

    def _progress(self, size: float) -> None:
        for transfer in self.active:
            transfer[1] = max(transfer[1] - size, 0.0)

    def earliest(self) -> float | None:
        """When the next transfer is done if none is added; None on an idle link."""
        if self.landing:
            return self.landing[0][0]
        if not self.active:
            return None
        least = min(left for _, left, _ in self.active)
        if not math.isfinite(self.rate):
            return self.last + self.latency
        total = 0.0
        for _, left, _ in self.active:
            total += min(left, least)
        return self.last + total / self.rate + self.latency


def earliest(*times: float | None) -> float | None:
    """The earliest of the times that there are."""
    return min((t for t in times if t is not None), default=None)
