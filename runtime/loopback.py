"""The network interface over which the ranks of one host talk."""

from __future__ import annotations

import socket
from pathlib import Path

from runtime.errors import RunError

_IFF_UP = 0x1
_IFF_LOOPBACK = 0x8


def loopback_interface() -> str:
    """Name of the loopback interface: "lo" almost everywhere.

    Raises:
        RunError: none is up.
    """
    names = [name for _, name in socket.if_nameindex()]
    for name in names:
        try:
            flags = int(Path(f"/sys/class/net/{name}/flags").read_text(), 16)
        except OSError:  # /sys is not mounted
            flags = _IFF_UP | _IFF_LOOPBACK if name == "lo" else 0
        if flags & _IFF_UP and flags & _IFF_LOOPBACK:
            return name
    raise RunError(
        f"ranks need a loopback network interface that is up, but the interfaces are "
        f"{', '.join(names) or 'none'}: bring it up with `ip link set lo up`"
    )
