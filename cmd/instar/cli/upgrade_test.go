// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"instar/handover"
)

// upgradable is a server with a control socket. A successor does not get ready
// while there is a file "broken" beside the socket.
func upgradable(socket string) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	h, err := handover.New(handover.Options{Name: "upgradable", Build: "test", Socket: socket, Probation: 50 * time.Millisecond})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer h.Close()
	if _, err := h.Listen("web", "tcp", "127.0.0.1:0"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if _, err := os.Stat(socket + ".broken"); err == nil {
		return 7
	}
	if err := h.Ready(ctx); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	select {
	case <-h.Superseded():
	case <-ctx.Done():
	case <-time.After(time.Minute): // a script that failed leaves no server
	}
	return 0
}

// retry is the script command "retry COMMAND...": it has to succeed in the end.
func retry(ts *testscript.TestScript, _ bool, args []string) {
	deadline := time.Now().Add(30 * time.Second)
	for {
		err := ts.Exec(args[0], args[1:]...)
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			ts.Fatalf("%v: %v", args, err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// stopServer is the script command "stopserver SOCKET".
func stopServer(ts *testscript.TestScript, _ bool, args []string) {
	status, err := handover.RequestStatus(context.Background(), ts.MkAbs(args[0]))
	ts.Check(err)
	ts.Check(syscall.Kill(status.PID, syscall.SIGTERM))
	for deadline := time.Now().Add(30 * time.Second); syscall.Kill(status.PID, 0) == nil; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			ts.Fatalf("server %d does not end", status.PID)
		}
	}
}
