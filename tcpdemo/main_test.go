// SPDX-License-Identifier: Apache-2.0

package tcpdemo

import (
	"context"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"os/signal"

	"instar/internal/testutil"
)

// The test binary is the sandbox, or a server, when it gets one of these as its
// first argument.
const (
	sandboxArg = "tcpdemo-sandbox"
	serverArg  = "tcpdemo-server"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case sandboxArg:
			ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM)
			code := Sandbox(ctx, os.Args[2:])
			stop()
			os.Exit(code)
		case serverArg:
			os.Exit(ServerMain(context.Background(), os.Args[2:], os.Stdout, os.Stderr))
		}
	}
	testutil.Main(m)
}

var program = Program{
	Self:    [2]string{"/proc/self/exe", "tcpdemo"},
	Sandbox: []string{sandboxArg},
	Server:  []string{serverArg},
}
