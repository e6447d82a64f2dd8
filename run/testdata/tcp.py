# SPDX-License-Identifier: Apache-2.0
"""An HTTP server that answers with its process number and user.

The file that its argument names says how it behaves: "exit", "hang" before
READY=1, "die" right after it, "orphans" to leave some,
"stubborn" to ignore SIGTERM; else it serves.
"""

import http.server
import os
import signal
import socket
import sys
import threading

import activation

MODE = "serve"
if len(sys.argv) > 1:
    with open(sys.argv[1]) as f:
        MODE = f.read().strip()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b"%d %d" % (os.getpid(), os.getuid())
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self):
        return "client"

    def log_message(self, *args):
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = False

    def __init__(self, listener):
        super().__init__(("", 0), Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener


if MODE == "exit":
    sys.exit("as asked")
servers = [Server(s) for _, s in activation.sockets()]
if MODE == "orphans":
    for _ in range(3):
        if os.fork() == 0:
            os.setpgid(0, 0)
            os.fork()
            os._exit(0)
if MODE == "hang":
    print("hangs", flush=True)
    signal.pause()
stop = threading.Event()
signal.signal(signal.SIGTERM, signal.SIG_IGN if MODE == "stubborn" else lambda *_: stop.set())
signal.signal(signal.SIGUSR1, lambda *_: print("got USR1", flush=True))
if MODE == "die":
    # It has accepted nothing: what a process accepted dies with it.
    activation.notify("READY=1")
    os._exit(7)
threads = [threading.Thread(target=s.serve_forever, args=(0.05,)) for s in servers]
for t in threads:
    t.start()
activation.notify("STATUS=serves\nREADY=1")
while not stop.wait(0.05):
    pass
for s in servers:
    s.shutdown()
for s in servers:
    s.server_close()
