// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
)

// get is the script command "get SOCKET PATH FILE": it writes what is served there, once
// somebody serves.
func get(ts *testscript.TestScript, _ bool, args []string) {
	socket := ts.MkAbs(args[0])
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", socket)
	}}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport, Timeout: 30 * time.Second}
	var response *http.Response
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		var err error
		if response, err = client.Get("http://instar" + args[1]); err == nil {
			break
		}
		if time.Now().After(deadline) {
			ts.Fatalf("%v", err)
		}
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	ts.Check(err)
	text := response.Status + "\n" + response.Header.Get("Content-Type") + "\n" + string(body)
	ts.Check(os.WriteFile(ts.MkAbs(args[2]), []byte(text), 0o600))
}

// sigterm is the script command "sigterm", to the command that was started last in the
// background.
func sigterm(ts *testscript.TestScript, _ bool, _ []string) {
	running := ts.BackgroundCmds()
	ts.Check(running[len(running)-1].Process.Signal(syscall.SIGTERM))
}

// listen is the script command "listen VARIABLE [PATH]": somebody listens at the address that
// the variable then holds, until the script ends.
func listen(ts *testscript.TestScript, _ bool, args []string) {
	network, address := "tcp", "127.0.0.1:0"
	if len(args) > 1 {
		network, address = "unix", filepath.Clean(ts.MkAbs(args[1]))
	}
	l, err := net.Listen(network, address)
	ts.Check(err)
	ts.Defer(func() { _ = l.Close() })
	ts.Setenv(args[0], l.Addr().String())
}
