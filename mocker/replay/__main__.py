"""``python -m mocker.replay``: the replay command by itself."""
from ..cli import replay_main
from ..cli.replay import REFERENCE_PROG

if __name__ == "__main__":
    raise SystemExit(replay_main(prog=REFERENCE_PROG))
