// SPDX-License-Identifier: Apache-2.0

package quicdemo

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"strings"
	"testing"

	"instar/internal/testutil"
)

// envMain makes the test binary the command quicdemo.
const envMain = "QUICDEMO_TEST_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(envMain) != "" {
		os.Exit(Main(context.Background(), os.Args[1:], Env{}))
	}
	testutil.Main(m)
}

func TestUsage(t *testing.T) {
	for _, tc := range []struct {
		args           string
		code           int
		stdout, stderr string
	}{
		{"", ExitOK, "serve", ""},
		{"--help", ExitOK, "Exit codes:", ""},
		{"serve --help", ExitOK, "HUP, USR2", ""},
		{"load --help", ExitOK, "--migrations", ""},
		{"nonsense", ExitUsage, "", `unknown command "nonsense"`},
		{"serve extra", ExitUsage, "", `unknown command "extra"`},
		{"serve --mode other", ExitUsage, "", `unknown mode "other"`},
		{"serve --workers 1000", ExitUsage, "", "1000 workers; use 1 to 256"},
		{"serve --no-such-flag", ExitUsage, "", "unknown flag"},
		{"serve --mode plain --addr 192.0.2.1:4433", ExitError, "", "cannot assign requested address"},
		{"load --addr 127.0.0.1", ExitUsage, "", "missing port"},
		{"load --addr 127.0.0.1:0", ExitUsage, "", "has no port"},
		{"load --min 10 --max 5", ExitUsage, "", "in order"},
		{"load --cert /nonexistent", ExitError, "", "no such file"},
	} {
		var stdout, stderr bytes.Buffer
		code := Main(t.Context(), strings.Fields(tc.args), Env{Stdout: &stdout, Stderr: &stderr, Getenv: func(string) string { return "" }})
		if code != tc.code || !strings.Contains(stdout.String(), tc.stdout) || !strings.Contains(stderr.String(), tc.stderr) {
			t.Errorf("quicdemo %s: exit code %d, want %d\nstdout (want %q): %s\nstderr (want %q): %s",
				tc.args, code, tc.code, tc.stdout, &stdout, tc.stderr, &stderr)
		}
	}
}

// The load command's exit code and report say what was lost.
func TestLoadCommand(t *testing.T) {
	_, ready := startServer(t, ServerConfig{})
	run := func(addr string) (int, Result) {
		var stdout, stderr bytes.Buffer
		code := Main(t.Context(), []string{"load", "--addr", addr, "--json", "--duration", "500ms",
			"--connections", "4", "--new", "20", "--requests", "10", "--seed", "7"}, Env{Stdout: &stdout, Stderr: &stderr})
		var r Result
		if err := json.Unmarshal(stdout.Bytes(), &r); err != nil {
			t.Fatalf("report: %v\n%s%s", err, &stdout, &stderr)
		}
		return code, r
	}
	code, r := run(ready.Addr)
	if code != ExitOK || r.Lost() != 0 || r.Requests == 0 {
		t.Errorf("exit code %d\n%s", code, &r)
	}
	code, r = run(refusingServer(t))
	if code != ExitLost || r.FailedHandshakes == 0 || r.Lost() != r.FailedHandshakes || r.Errors["handshake: connection_refused"] != r.FailedHandshakes {
		t.Errorf("server that refuses: exit code %d\n%s", code, &r)
	}
	for _, want := range []string{"lost", "handshake: connection_refused"} {
		if !strings.Contains(r.String(), want) {
			t.Errorf("no %q in\n%s", want, &r)
		}
	}
}
