"""Starts servers at once: a process that has imported what they need, and for each line of its input, the arguments of
`areal-x tinker` as JSON, forks one. Prints its process id, and when it has ended. argv: the backend."""

import json
import os
import sys
from importlib import import_module

for name in (f"areal_x_{sys.argv[1]}.trainer", "transformers", "areal_x.tinker.command"):
    import_module(name)

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        from areal_x.tinker import main

        sys.exit(main(json.loads(line)))
    print(f"PID {child}", flush=True)
    os.waitpid(child, 0)
    print("DEAD", flush=True)
