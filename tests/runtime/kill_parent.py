"""A process that runs ranks, for tests that kill it or its server: `kill_parent.py JOB RANKS`.

Prints the server's pid, and the shared memory and the processes that ranks report, then waits
for the group's end and prints how the next group does.
"""

from __future__ import annotations

import sys

from runtime.launch import Launcher
from tests.runtime.test_launch import start


def main(job: str, ranks: int) -> None:
    with Launcher() as launcher:
        assert launcher.problems == ()
        assert launcher.server_pid is not None
        print("server", launcher.server_pid, flush=True)
        with start(launcher, job, ranks=ranks, stay=True) as group:
            for count, event in enumerate(group.events()):
                pids = [event.data.get("rank") or event.data["pid"], *event.data.get("pids", [])]
                print("memory", event.data.get("memory", ""), flush=True)
                print("pids", *pids, flush=True)
                if count == ranks - 1:
                    print("running", flush=True)
        assert group.end is not None
        print("end", group.end.outcome.value, group.end.reason, flush=True)
        with start(launcher, "total", ranks=2) as group:
            values = [event.data["value"] for event in group.events()]
        print("next", values, flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
