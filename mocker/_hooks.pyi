from collections.abc import Callable

class ScoreHook:
    def __init__(self, address: int, function: Callable[[int, int, int, int, int], float] | object | None) -> None: ...
