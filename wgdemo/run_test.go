// SPDX-License-Identifier: Apache-2.0

package wgdemo

import (
	"context"
	"os"
	"os/signal"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"instar/internal/testutil"
)

// The test binary is the sandbox, or a gateway, when it gets one of these as its first
// argument.
const (
	sandboxArg = "wgdemo-sandbox"
	gatewayArg = "wgdemo-gateway"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case sandboxArg:
			ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM)
			code := Sandbox(ctx, os.Args[2:])
			stop()
			os.Exit(code)
		case gatewayArg:
			if file := os.Getenv(envWait); file != "" {
				beforeReady = func(g *Gateway) {
					g.event(Event{Kind: eventWaiting})
					for _, err := os.Stat(file); err != nil; _, err = os.Stat(file) {
						time.Sleep(time.Millisecond)
					}
				}
			}
			os.Exit(Main(context.Background(), os.Args[2:], Env{}))
		}
	}
	testutil.Main(m)
}

var program = Program{
	Self:    [2]string{"/proc/self/exe", "wgdemo"},
	Sandbox: []string{sandboxArg},
	Gateway: []string{gatewayArg},
}

// playScenario plays one and returns what it showed.
func playScenario(t *testing.T, o Options, scenario string) *Result {
	t.Helper()
	testutil.NeedRoot(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	var stderr strings.Builder
	report, err := run(ctx, task{Program: program, Options: o, Scenario: scenario}, &stderr, func(p Progress) {
		if p.Text != "" {
			t.Logf("%6.1fs  %s", p.At.Seconds(), p.Text)
		}
	})
	if err != nil {
		t.Fatalf("%v\n%s", err, stderr.String())
	}
	if len(report.Runs) != 1 {
		t.Fatalf("%d runs", len(report.Runs))
	}
	var table strings.Builder
	if err := WriteTable(&table, report); err != nil {
		t.Fatal(err)
	}
	t.Log("\n" + table.String())
	return &report.Runs[0]
}

// Nothing is lost when the gateway is upgraded.
func TestUpgrade(t *testing.T) {
	r := playScenario(t, Options{Upgrades: 2, Peers: 2}, "")
	if !r.OK() {
		t.Errorf("%+v", r)
	}
	if r.Upgrades != 2 || len(r.LeaveMS) != 2 {
		t.Errorf("%d upgrades, ended after %v ms", r.Upgrades, r.LeaveMS)
	}
}

// A successor that is killed costs what was on its way to it, the only packet of a new peer
// perhaps. The predecessor serves on, and the next upgrade is as good as any.
func TestKillSuccessor(t *testing.T) {
	r := playScenario(t, Options{Upgrades: 1, Peers: 2}, "kill successor")
	if r.TCPBroken != 0 || r.FailedHandshakes > 1 || len(r.Problems) != 0 || r.Upgrades != 1 {
		t.Errorf("%+v", r)
	}
}

// A predecessor that is killed after its peers moved is not missed.
func TestKillPredecessor(t *testing.T) {
	r := playScenario(t, Options{Upgrades: 1, Peers: 2}, "kill predecessor")
	if r.TCPBroken != 0 || r.FailedHandshakes != 0 || len(r.Problems) != 0 || r.Upgrades != 1 {
		t.Errorf("%+v", r)
	}
}

// The load notices losses: a gateway that is stopped and started again forgets where its
// peers are.
func TestRestart(t *testing.T) {
	r := playScenario(t, Options{Upgrades: 1, Peers: 1}, "restart")
	if r.LostInnerPackets == 0 || r.OK() || !strings.Contains(r.Failed(), "inner packets") {
		t.Errorf("%+v", r)
	}
}

// A peer that came to the predecessor when it had written its state is known to the
// successor.
func TestLatePeer(t *testing.T) {
	r := playScenario(t, Options{Upgrades: 1, Peers: 1}, "late peer")
	if r.Lost() != 0 || len(r.Problems) != 0 || r.Upgrades != 1 {
		t.Errorf("%+v", r)
	}
}
