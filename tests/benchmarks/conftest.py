"""Makes the modules of the benchmarks importable, as for their own commands."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
