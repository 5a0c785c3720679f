"""Lets the benchmark files import their cases by name."""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
