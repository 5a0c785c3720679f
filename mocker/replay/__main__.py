"""``python -m mocker.replay``: the replay command by itself."""
from ..cli import replay_main

if __name__ == "__main__":
    raise SystemExit(replay_main())
