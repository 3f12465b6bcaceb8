"""The fork server as the process that asked for it sees it: start, orders, answers, end."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runtime.verdict import signal_name, tail

_BOOTSTRAP = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from runtime.forkserver import main; main(int(sys.argv[1]), sys.argv[2])"
)
_SERVER_ENVIRONMENT = {
    # A parallel region before the fork would hang every rank; ranks set their own number.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking for CUDA devices must not initialise CUDA
}
_CLOSE_SECONDS = 10.0

MARK = "RANKS_SERVER_MARK"
"""By this variable the processes of a server are known once it has been killed."""


class ServerProcess:
    """The server process and the socket to it."""

    def __init__(self, preload: Sequence[str], *, fork: bool) -> None:
        self.hello: dict[str, Any] | None = None
        self.mark = uuid.uuid4().hex
        """Value of `MARK` in the environment of the server and of all that descends from it."""
        self._incoming = bytearray()
        self._said = ""
        self._socket, theirs = socket.socketpair()
        # What imports print must go somewhere that cannot fill; it is read only when they fail.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-c",
                        _BOOTSTRAP,
                        str(theirs.fileno()),
                        json.dumps({"preload": list(preload), "fork": fork}),
                        *python_path(),
                    ],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,
                    stderr=self._output,
                    env={**os.environ, **_SERVER_ENVIRONMENT, MARK: self.mark},
                    cwd="/",
                    start_new_session=True,  # Ctrl-C in the terminal does not reach it
                )
        except BaseException:
            self._socket.close()
            self._output.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_for_hello(self, until: float) -> str:
        """Set `hello`; why it has not come, else ""."""
        while self.hello is None:
            messages = self.receive(until)
            if messages is None:
                return f"it {self.close(_CLOSE_SECONDS)}"
            if messages:
                self.hello = messages[0]
            elif time.monotonic() >= until:
                return "its imports took too long"
        return ""

    def send(self, message: dict[str, Any]) -> None:
        """Send an order. Where the server has gone, the next `receive` says so."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, until: float) -> list[dict[str, Any]] | None:
        """The messages that have arrived by then, [] where none has; None at the server's end."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
            return []
        try:
            data = self._socket.recv(1 << 20)
        except ConnectionResetError:
            data = b""
        if not data:
            return None
        self._incoming += data
        *lines, rest = self._incoming.split(b"\n")
        self._incoming = bytearray(rest)
        try:
            return [json.loads(line) for line in lines]
        except ValueError:  # Ctrl-C fell between two reads: what follows cannot be trusted
            return None

    def close(self, patience: float) -> str:
        """End the server, which ends its ranks; how it ended, as the end of a sentence.

        Within `patience` seconds it may end by itself, then it is killed; at once where it still
        imports and has no ranks.
        """
        self._socket.close()
        try:
            code = self._process.wait(patience if self.hello is not None else 0.1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if not self._output.closed:
            self._output.seek(0)
            lines = tail(self._output.read().decode(errors="replace")).splitlines()
            self._said = lines[-1] if lines else ""
            self._output.close()
        if code < 0:
            return f"was killed by {signal_name(-code)}"
        return f"exited with code {code}" + (f" ({self._said})" if self._said else "")


def python_path() -> list[str]:
    """`sys.path` for a process in another folder, our own packages included."""
    spec = importlib.util.find_spec("runtime")
    own = str(Path(spec.origin).resolve().parent.parent) if spec and spec.origin else ""
    path = [os.path.abspath(entry) for entry in sys.path if entry]
    return path if own in path else [own, *path]
