// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	"instar/internal/testutil"
	"instar/quicdemo"
)

// nobody is a user with no rights at all.
const nobody = 65534

// After instar prepare --owner nobody a server that runs as nobody, with no
// capability, joins, activates and upgrades twice under load, and nothing is
// lost.
func TestUpgradeAsNobody(t *testing.T) {
	s := newSite(t, "quicdemo", "instar")
	prepare := s.start(options{}, s.command("instar"),
		"prepare", "--root", s.root, "--owner", "nobody", "--service", "quicdemo", address)
	if code := prepare.exit(); code != 0 {
		t.Fatalf("instar prepare exits with %d", code)
	}

	p := s.serve(&syscall.Credential{Uid: nobody, Gid: nobody}, "--handshake-grace", "200ms")
	powerless := func() {
		t.Helper()
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.now.PID))
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{"Uid:\t65534\t65534\t65534\t65534", "CapPrm:\t0000000000000000", "CapEff:\t0000000000000000", "CapAmb:\t0000000000000000"} {
			if !strings.Contains(string(status), want+"\n") {
				t.Errorf("generation %d, process %d: no %q in its status", p.now.Generation, p.now.PID, want)
			}
		}
	}
	powerless()

	var output strings.Builder
	load := s.start(options{stdout: func(line string) { output.WriteString(line) }}, s.command("quicdemo"),
		"load", "--addr", address, "--json", "--connections", "20", "--requests", "4", "--new", "10", "--migrations", "5", "--rebinds", "5")
	served := func() {
		t.Helper()
		before := s.received(p.now.Generation)
		testutil.WaitFor(t, patience, func() bool { return s.received(p.now.Generation) > before+1000 || !load.alive() }, "load on generation %d", p.now.Generation)
	}
	served()
	generations := []uint32{p.now.Generation}
	for range 2 {
		p.upgrade()
		powerless()
		served()
		generations = append(generations, p.now.Generation)
	}
	if err := load.cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	code := load.exit()
	load.flush()
	var result quicdemo.Result
	if err := json.Unmarshal([]byte(output.String()), &result); err != nil {
		t.Fatalf("quicdemo load exits with %d, %v, and reports %q", code, err, output.String())
	}
	t.Logf("\n%s", &result)
	if code != 0 || result.Lost() != 0 {
		t.Errorf("quicdemo load exits with %d, %d losses", code, result.Lost())
	}
	for _, n := range generations {
		if result.Generations[n] == 0 {
			t.Errorf("generation %d answered no request", n)
		}
	}
	if result.Migrations == 0 || result.Rebinds == 0 || result.ZeroRTT.Accepted == 0 {
		t.Error("something was not tried")
	}
	if code := p.exit(); code != 0 {
		t.Errorf("the first generation exits with %d", code)
	}
}
