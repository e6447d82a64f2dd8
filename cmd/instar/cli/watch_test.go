// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"testing"
	"time"

	"instar/dispatch"
	"instar/internal/testutil"
)

// watching is "instar watch" in the background.
type watching struct {
	t      *testing.T
	lines  chan string
	stderr bytes.Buffer
	code   chan int
	cancel context.CancelFunc
}

func watch(t *testing.T, ns *testutil.Netns, root string, args ...string) *watching {
	ctx, cancel := context.WithCancel(t.Context())
	r, out := io.Pipe()
	w := &watching{t: t, lines: make(chan string, 100), code: make(chan int, 1), cancel: cancel}
	go ns.Run(func() {
		w.code <- Main(Env{Context: ctx, Args: append([]string{"watch"}, args...), Stdout: out, Stderr: &w.stderr, Root: root})
		_ = out.Close()
	})
	go func() {
		defer close(w.lines)
		for scan := bufio.NewScanner(r); scan.Scan(); {
			w.lines <- scan.Text()
		}
	}()
	return w
}

func (w *watching) want(patterns ...string) string {
	w.t.Helper()
	var line string
	for _, pattern := range patterns {
		select {
		case line = <-w.lines:
		case <-time.After(30 * time.Second):
			w.t.Fatalf("no line, want %s", pattern)
		}
		if !regexp.MustCompile(pattern).MatchString(line) {
			w.t.Fatalf("line %q, want %s", line, pattern)
		}
	}
	return line
}

func (w *watching) stop(code int) {
	w.t.Helper()
	w.cancel()
	if got := <-w.code; got != code {
		w.t.Errorf("exit code %d, want %d: %s", got, code, w.stderr.String())
	}
	for line := range w.lines {
		w.t.Errorf("one more line: %s", line)
	}
}

func TestWatch(t *testing.T) {
	ns, root := testutil.NetNS(t), filepath.Join(testutil.BPFFS(t), "instar")
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	open := func(address string) *dispatch.Group {
		t.Helper()
		g, err := dispatch.Open(dispatch.Options{Address: address, Service: "test", Build: "b1", Root: root, FlowEntries: 64})
		must(err)
		t.Cleanup(func() { must(g.Close()) })
		return g
	}
	join := func(g *dispatch.Group) *dispatch.Generation {
		t.Helper()
		n, err := g.Join(1)
		must(err)
		t.Cleanup(func() { must(n.Close()) })
		return n
	}
	// All groups, before there is any: not even the root.
	all := watch(t, ns, root)
	a := open("127.0.0.1:443")
	const time3339 = `^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\S+  `
	all.want(time3339 + `udp4-127\.0\.0\.1-443  watched     active generation 0$`)
	one := watch(t, ns, root, "127.0.0.1:443", "--json")
	one.want(`"change":"watched"`)
	first := join(a)
	all.want(time3339 + `udp4-127\.0\.0\.1-443  joined      generation 1, pid \d+ \S+, build b1$`)
	must(first.Activate())
	all.want(`  activated   generation 1, `)
	one.want(`"change":"joined"`, `"change":"activated"`)

	// A group that is made meanwhile.
	b := open("127.0.0.1:444")
	all.want(`  udp4-127\.0\.0\.1-444  watched     active generation 0$`)
	must(join(b).Activate())
	all.want(`-444  joined `, `-444  activated `)

	second := join(a)
	must(second.Activate())
	all.want(`-443  joined      generation 2`, `-443  activated   generation 2`, `-443  superseded  generation 1`)
	must(first.Close())
	all.want(`-443  left        generation 1`)
	line := one.want(`"joined"`, `"activated"`, `"superseded"`, `"left"`)
	var e struct {
		Version    int
		Group      string
		Path       string
		Change     string
		Generation uint32
		PID        int
		Time       time.Time
	}
	must(json.Unmarshal([]byte(line), &e))
	must(checkSchema([]string{"instar", "watch", "--json"}, line))
	if e.Version != 1 || e.Group != "udp4-127.0.0.1-443" || e.Path != a.Path() || e.Change != "left" || e.Generation != 1 || e.PID != os.Getpid() || e.Time.IsZero() {
		t.Errorf("%+v of %s", e, line)
	}

	// A group that is forgotten, and one that is made in its place.
	must(second.Close())
	all.want(`-443  left        generation 2`)
	one.want(`"left"`)
	must(dispatch.Forget(a.Path()))
	all.want(`-443  forgotten$`)
	one.want(`"forgotten"`)
	if code := <-one.code; code != 0 {
		t.Errorf("exit code %d when the group is forgotten", code)
	}
	open("127.0.0.1:443")
	all.want(`-443  watched     active generation 0$`)
	all.stop(0)

	// What cannot be read is said once.
	must(os.Mkdir(filepath.Join(filepath.Dir(a.Path()), "udp4-strange"), 0o755))
	some := watch(t, ns, root)
	some.want(`  watched `, `  watched `)
	some.stop(0)
	if text := some.stderr.String(); !regexp.MustCompile(`^instar: watch: udp4-strange is left out: .*\n$`).MatchString(text) {
		t.Errorf("standard error: %q", text)
	}
}
