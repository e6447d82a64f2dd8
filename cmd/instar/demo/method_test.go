// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"bytes"
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"instar/internal/sandbox"
	"instar/internal/testutil"
	"instar/quicdemo"
)

func TestMain(m *testing.M) { testutil.Main(m) }

// shell is a program that runs the file demo-server of the current folder.
var shell = [2]string{"/bin/sh", "sh"}

// fakeServer puts a server there that is the body of a shell script.
func fakeServer(t *testing.T, body string) {
	t.Helper()
	t.Chdir(t.TempDir())
	if err := os.WriteFile(ServerCommand, []byte(body), 0o600); err != nil {
		t.Fatal(err)
	}
}

// serving is a server that says that it is ready, and leaves when it is told to.
const serving = `
trap 'exit 0' TERM
echo starting
echo '{"generation":1,"pid":1}'
while :; do sleep 0.01; done
`

func startFake(t *testing.T, body string) *server {
	t.Helper()
	fakeServer(t, body)
	st := sandbox.NewStarter()
	t.Cleanup(st.Stop)
	s, err := startServer(st, 1, shell, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Kill)
	return s
}

func TestServerServes(t *testing.T) {
	s := startFake(t, serving)
	if err := s.waitReady(t.Context(), time.Minute); err != nil {
		t.Fatal(err)
	}
	if s.Wait(t.Context(), 0) {
		t.Error("it ended by itself")
	}
	s.terminate()
	if !s.Wait(t.Context(), time.Minute) || s.How() != "exit code 0" || s.ExitCode() != 0 {
		t.Errorf("ended with %s", s.How())
	}
}

func TestServerFails(t *testing.T) {
	for name, c := range map[string]struct {
		body     string
		patience time.Duration
		want     string
	}{
		"ends":      {"echo no way >&2\nexit 3", time.Minute, "server 1: not ready: exit status 3: no way"},
		"says so":   {"echo hello\nexit 0", time.Minute, "server 1: not ready: exit code 0"},
		"is silent": {"while :; do sleep 0.01; done", 50 * time.Millisecond, "server 1: not ready after 50ms"},
	} {
		t.Run(name, func(t *testing.T) {
			s := startFake(t, c.body)
			err := s.waitReady(t.Context(), c.patience)
			if !errors.Is(err, errNotReady) || err.Error() != c.want {
				t.Errorf("got %v, want %s", err, c.want)
			}
		})
	}
}

func TestServerKilled(t *testing.T) {
	_, echo, _ := strings.Cut(serving, "echo")
	s := startFake(t, "trap '' TERM\necho"+echo)
	if err := s.waitReady(t.Context(), time.Minute); err != nil {
		t.Fatal(err)
	}
	s.terminate()
	if s.Wait(t.Context(), 50*time.Millisecond) {
		t.Error("it ended although it ignores the signal")
	}
	s.Kill()
	if s.ExitCode() != -1 || s.How() != "signal: killed" {
		t.Errorf("ended with %s", s.How())
	}
}

// fakeLoad takes its time and finds what it is told.
func fakeLoad(result quicdemo.Result) func(context.Context, Options, func(quicdemo.Sample)) (*quicdemo.Result, error) {
	return func(ctx context.Context, o Options, sample func(quicdemo.Sample)) (*quicdemo.Result, error) {
		sample(quicdemo.Sample{At: step, Requests: map[uint32]int{1: 7}})
		sample(quicdemo.Sample{At: 2 * step, Requests: map[uint32]int{1: 1, 2: 2}, Failures: 3})
		select {
		case <-time.After(o.Duration):
		case <-ctx.Done():
		}
		return &result, nil
	}
}

// TestUpgradeFails checks that a successor that does not get ready is one
// failure, and that the demo goes on with the next one.
func TestUpgradeFails(t *testing.T) {
	for _, method := range []Method{MethodRestart, MethodReuseport} {
		t.Run(string(method), func(t *testing.T) {
			fakeServer(t, `if [ "$QUICDEMO_GENERATION" = 2 ]; then echo no way >&2; exit 3; fi`+serving)
			st := sandbox.NewStarter()
			defer st.Stop()
			var out bytes.Buffer
			r := &runner{method: method, o: Options{Upgrades: 2, Duration: leadIn + 1500*time.Millisecond}, self: shell, starter: st, out: sandbox.NewSender(&out),
				load: fakeLoad(quicdemo.Result{Requests: 10, FailedRequests: 3})}
			got, err := r.do(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			const want = "upgrade 1: server 2: not ready: exit status 3: no way"
			if got.Upgrades != 1 || got.ServerFailures != 1 || len(got.Problems) != 1 || got.Problems[0] != want {
				t.Errorf("%d upgrades, %d failures: %q", got.Upgrades, got.ServerFailures, got.Problems)
			}
			if len(got.Servers) != 3 {
				t.Fatalf("servers: %+v", got.Servers)
			}
			for i, code := range []int{0, 3, 0} {
				s := got.Servers[i]
				if s.Number != uint32(i+1) || s.ExitCode == nil || *s.ExitCode != code || s.Ended == nil || *s.Ended < s.Started {
					t.Errorf("server: %+v", s)
				}
			}
			if first := got.Servers[0]; first.Started > 0 || *first.Active > 0 || *first.Replaced < leadIn.Seconds() || first.Requests != 8 {
				t.Errorf("times: %+v", first)
			}
			if len(got.Timeline) != 2 || got.Timeline[0].Requests[1] != 7 || got.Timeline[1].Requests[2] != 2 || got.Timeline[1].Failures != 3 {
				t.Errorf("timeline: %+v", got.Timeline)
			}
			if got.OK() || got.Lost() != 3 {
				t.Errorf("%d lost", got.Lost())
			}
			if text := out.String(); !strings.Contains(text, want) || !strings.Contains(text, `"failures":3`) {
				t.Errorf("messages: %s", text)
			}
		})
	}
}

// TestRunInterrupted checks that a run ends at once when it is told to, and
// leaves no server.
func TestRunInterrupted(t *testing.T) {
	fakeServer(t, serving)
	st := sandbox.NewStarter()
	defer st.Stop()
	ctx, cancel := context.WithCancel(t.Context())
	var out bytes.Buffer
	r := &runner{method: MethodRestart, o: Options{Upgrades: 1, Duration: time.Hour}, self: shell, starter: st, out: sandbox.NewSender(&out),
		load: func(ctx context.Context, _ Options, _ func(quicdemo.Sample)) (*quicdemo.Result, error) {
			cancel()
			<-ctx.Done()
			return nil, ctx.Err()
		}}
	if _, err := r.do(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if len(r.servers) != 1 || !r.servers[0].Wait(t.Context(), 0) {
		t.Errorf("servers left of %d", len(r.servers))
	}
	if strings.Contains(out.String(), "ended with") {
		t.Errorf("what we killed is blamed: %s", out.String())
	}
}

// TestRunInterruptedKeepsResult checks that what was measured is not thrown away
// when a run is told to end, and that requests under way still find the server.
func TestRunInterruptedKeepsResult(t *testing.T) {
	fakeServer(t, serving)
	st := sandbox.NewStarter()
	defer st.Stop()
	ctx, cancel := context.WithCancel(t.Context())
	var r *runner
	r = &runner{method: MethodReuseport, o: Options{Upgrades: 1, Duration: time.Hour}, self: shell, starter: st, out: sandbox.NewSender(&bytes.Buffer{}),
		load: func(ctx context.Context, _ Options, sample func(quicdemo.Sample)) (*quicdemo.Result, error) {
			sample(quicdemo.Sample{At: step, Requests: map[uint32]int{1: 7}})
			cancel()
			<-ctx.Done()
			if r.servers[0].Wait(t.Context(), 50*time.Millisecond) {
				t.Error("the server ended before the load")
			}
			return &quicdemo.Result{Requests: 8, Seconds: 1}, nil
		}}
	got, err := r.do(ctx)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if !got.Interrupted || got.Requests != 8 || got.ServerFailures != 0 || len(got.Timeline) != 1 || len(got.Servers) != 1 {
		t.Errorf("%+v", got)
	}
	if !r.servers[0].Wait(t.Context(), 0) {
		t.Error("the server is left")
	}
}
