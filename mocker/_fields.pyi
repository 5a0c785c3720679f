from typing import Any

class Reader:
    name: str
    def __get__(self, record: Any, owner: type) -> Any: ...

def given(values: dict[str, Any], defaults: dict[str, Any]) -> list[str]: ...
