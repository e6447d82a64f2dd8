# SPDX-License-Identifier: Apache-2.0
"""Socket activation and notification, as any server under systemd does them."""

import os
import socket


def sockets():
    """The inherited sockets: a list of (name, socket)."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        raise SystemExit("LISTEN_PID is %r, not %d" % (os.environ.get("LISTEN_PID"), os.getpid()))
    names = os.environ["LISTEN_FDNAMES"].split(":")
    count = int(os.environ["LISTEN_FDS"])
    if len(names) != count:
        raise SystemExit("%d names for %d sockets" % (len(names), count))
    return [(names[i], socket.socket(fileno=3 + i)) for i in range(count)]


def notify(text):
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address[0] == "@":
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.connect(address)
        s.send(text.encode())
