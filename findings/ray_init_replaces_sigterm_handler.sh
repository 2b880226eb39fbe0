#!/usr/bin/env bash
# Ray 2.60.0 on Linux, CPython: `ray.init` replaces a handler of SIGTERM that the program has set before, without a word,
# by one that raises SystemExit(15). Where the signal comes while Python runs a callback of a fork (`os.register_at_fork`;
# the standard library and torch have such callbacks), Python prints and discards what the callback raises: the program
# goes on as if nobody had asked it to end. A handler that only sets a flag is not lost there, so a program that saves
# at SIGTERM must set its own again after `ray.init`. Seen: "signal in a fork's callback: after init: ray's, own handler
# called 0 times, goes on, exit code 0, SystemExit printed and discarded: 1", "signal elsewhere: exit code 15, output:
# ''". Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -qq --disable-pip-version-check "ray==2.60.0"
cat >"$folder/program.py" <<'PYTHON'
import os
import signal
import sys

import ray

calls = []


def own(number, frame):
    calls.append(number)


signal.signal(signal.SIGTERM, own)
ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
whose = "own" if signal.getsignal(signal.SIGTERM) is own else "ray's"
if sys.argv[1] == "elsewhere":
    os.kill(os.getpid(), signal.SIGTERM)
    print("goes on")
parent = os.getpid()
os.register_at_fork(before=lambda: os.kill(parent, signal.SIGTERM))
child = os.fork()
if not child:
    os._exit(0)
os.waitpid(child, 0)
print(f"after init: {whose}, own handler called {len(calls)} times, goes on")
PYTHON
code=0
seen=$("$folder/env/bin/python" "$folder/program.py" fork 2>"$folder/errors") || code=$?
ignored=$(grep -c "SystemExit" "$folder/errors" || true)
echo "signal in a fork's callback: $seen, exit code $code, SystemExit printed and discarded: $ignored"
elsewhere=0
"$folder/env/bin/python" "$folder/program.py" elsewhere >"$folder/output" 2>/dev/null || elsewhere=$?
echo "signal elsewhere: exit code $elsewhere, output: '$(cat "$folder/output")'"
[ "$code" = 0 ] && [ "$ignored" -gt 0 ] && [ "$elsewhere" = 15 ] &&
    [ "$seen" = "after init: ray's, own handler called 0 times, goes on" ]
