"""Runs one system under test in a process of its own, controlled through stdin.

    echo 2.0 | python benchmarks/serve.py '{"runner": "limits.stock", ...}'

``suite.py`` starts it, with the interpreter of another virtual environment if needed.
Each line on stdin is a number of seconds to measure; the answer is one line of JSON.
All systems exist at the same time and are measured in turn, so a busy machine slows all
of them, and they share no modules, threads or settings.
"""

import importlib
import json
import os
import signal
import sys
import traceback

from harness.served import System


def main() -> None:
    """Build the system, then answer each line with one line."""
    answers = os.dup(1)
    os.dup2(2, 1)  # Libraries print to stdout.
    os.set_inheritable(answers, False)
    fields = json.loads(sys.argv[1])
    os.environ["MARL_BENCHMARK_COPY"] = str(fields.pop("copy", 0))
    system = System(**fields)
    try:
        measure = importlib.import_module(system.runner).build(system)
        os.write(answers, b'{"ready": true}\n')
        for line in sys.stdin:
            os.write(answers, json.dumps(measure(float(line))).encode() + b"\n")
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        raise
    finally:
        # Some libraries leave workers behind that ignore requests to end.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os._exit(0 if sys.exc_info()[0] is None else 1)


if __name__ == "__main__":
    main()
