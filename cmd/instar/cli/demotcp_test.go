// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bufio"
	"bytes"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"instar/internal/testutil"
	"instar/tcpdemo"
)

// TestDemoTCPInterrupted checks that no process is left of a demonstration that
// was ended early, and that the scenarios before are reported.
func TestDemoTCPInterrupted(t *testing.T) {
	testutil.NeedRoot(t)
	bin := commands(t)
	for name, signal := range map[string]unix.Signal{"INT": unix.SIGINT, "KILL": unix.SIGKILL} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), filepath.Join(bin, "instar"), "demo", "tcp", "--scenario", "a,c",
				"--upgrades", "1", "--rate", "50", "--keepalive", "5")
			var stdout bytes.Buffer
			cmd.Stdout = &stdout
			stderr, err := cmd.StderrPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			lines, last := bufio.NewScanner(stderr), ""
			for lines.Scan() {
				last = lines.Text()
				if strings.HasPrefix(last, "scenario c") && strings.Contains(last, "generation 1") {
					break
				}
			}
			if got := processes(t, bin); len(got) != 3 {
				t.Errorf("%d processes, want the command, the sandbox and a server: %q, %s", len(got), got, last)
			}
			if err := cmd.Process.Signal(signal); err != nil {
				t.Fatal(err)
			}
			for lines.Scan() {
				last = lines.Text()
			}
			_ = cmd.Wait()
			if signal != unix.SIGKILL {
				if got := cmd.ProcessState.ExitCode(); got != exitInterrupted || last != "instar: demo tcp: interrupted" {
					t.Errorf("exit code %d, last line %q", got, last)
				}
				if got := stdout.String(); !strings.Contains(got, "\na ") || strings.Contains(got, "\nc ") {
					t.Errorf("table:\n%s", got)
				}
			}
			// Nobody waits for the sandbox of a command that was killed.
			testutil.WaitFor(t, 10*time.Second, func() bool { return len(processes(t, bin)) == 0 }, "the end of all processes")
		})
	}
}

// TestTCPTable checks what is shown of a scenario that did not go well.
func TestTCPTable(t *testing.T) {
	report := &tcpdemo.Report{Scenarios: []tcpdemo.Outcome{
		{Scenario: "a", Method: tcpdemo.ModeRestart, OK: true, Verdict: "7 connections refused, as expected"},
		{Scenario: "c", Title: "Instar", Method: tcpdemo.ModeInstar, Verdict: "1 lost", Problems: []string{"a problem"}},
	}}
	report.Scenarios[1].Counts = tcpdemo.Counts{Connections: 10, Requests: 20, Wrong: 1, Other: 2}
	report.Scenarios[1].Examples = []string{"an example"}
	var plain, coloured bytes.Buffer
	if err := writeTCPTable(&plain, report, false); err != nil {
		t.Fatal(err)
	}
	if err := writeTCPTable(&coloured, report, true); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"ok: 7 connections refused, as expected\n", "FAILED: 1 lost\n", "10           20", "\nscenario c (Instar):\n  a problem\n  an example\n"} {
		if !strings.Contains(plain.String(), want) {
			t.Errorf("no %q in\n%s", want, &plain)
		}
	}
	if got := coloured.String(); !strings.Contains(got, colourRed+"c ") || !strings.Contains(got, colourGreen+"a ") {
		t.Errorf("%q", got)
	}
	if report.OK() || report.Failed() != "c (1 lost)" {
		t.Error(report.Failed())
	}
}
