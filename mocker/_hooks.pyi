from collections.abc import Callable

class ScoreHook:
    def __init__(self, address: int, function: Callable[..., float] | object | None, numbers: int,
                 timed: bool = True, looks: bool = True) -> None: ...
