"""One system under measurement, in a process of its own, commanded line by line.

    echo 2.0 | python benchmarks/serve.py '{"runner": "limits.stock", ...}'

``suite.py`` starts it, sometimes with another environment's interpreter. A line on
stdin holds seconds; the answer is a line of JSON. Systems so live side by side and are
measured in turn, which a busy machine slows alike, and none shares its modules, threads
or settings with another.
"""

import importlib
import json
import os
import signal
import sys
import traceback

from harness.served import System


def main() -> None:
    """Build the system, then answer one line for each line."""
    answers = os.dup(1)
    os.dup2(2, 1)  # Libraries print to stdout.
    os.set_inheritable(answers, False)
    given = json.loads(sys.argv[1])
    os.environ["MARL_BENCHMARK_COPY"] = str(given.pop("copy", 0))
    system = System(**given)
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
        # What workers are left does not always end when it is asked to.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os._exit(0 if sys.exc_info()[0] is None else 1)


if __name__ == "__main__":
    main()
