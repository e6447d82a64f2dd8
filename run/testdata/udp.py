# SPDX-License-Identifier: Apache-2.0
"""A UDP echo that puts its process number in front."""

import os
import select
import signal
import sys

import activation

if len(sys.argv) > 1:
    with open(sys.argv[1]) as f:
        mode = f.read().strip()
    if mode == "exit":
        sys.exit("as asked")
    if mode == "hang":
        signal.pause()
stopped = False


def stop(*_):
    global stopped
    stopped = True


sockets = [s for _, s in activation.sockets()]
r, w = os.pipe()
os.set_blocking(w, False)
signal.set_wakeup_fd(w)
signal.signal(signal.SIGTERM, stop)
activation.notify("READY=1")
while not stopped:
    for s in select.select(sockets + [r], [], [])[0]:
        if s == r:
            os.read(r, 100)
            continue
        data, peer = s.recvfrom(2048)
        s.sendto(b"%d " % os.getpid() + data, peer)
