// SPDX-License-Identifier: Apache-2.0

package quicdemo

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"instar/dispatch"
	"instar/handover"
	"instar/internal/capset"
	"instar/internal/content"
	"instar/internal/testutil"
)

const groupAddr = "127.0.0.1:4433"

// group is where a test's servers and clients are.
type group struct {
	ns   *testutil.Netns
	root string
}

func newGroup(t testing.TB) *group {
	t.Helper()
	return &group{testutil.NetNS(t), testutil.BPFFS(t)}
}

func (g *group) config() ServerConfig {
	return ServerConfig{Mode: ModeInstar, Addr: groupAddr, Root: g.root, HandshakeGrace: 100 * time.Millisecond}
}

func (g *group) load() LoadConfig {
	cfg := smallLoad(groupAddr)
	cfg.listen = g.listen
	return cfg
}

// listen opens a client socket in the namespace, from any goroutine.
func (g *group) listen(network string, laddr *net.UDPAddr) (c *net.UDPConn, err error) {
	g.ns.Run(func() { c, err = net.ListenUDP(network, laddr) })
	return c, err
}

func (g *group) loader(t testing.TB) *loader {
	t.Helper()
	l, err := newLoader(LoadConfig{Addr: groupAddr, listen: g.listen})
	if err != nil {
		t.Fatal(err)
	}
	l.work = t.Context()
	return l
}

// watcher runs a load and waits for what its samples show.
type watcher struct {
	cancel context.CancelFunc
	result chan *Result

	mu      sync.Mutex
	last    Sample
	moved   int
	changed chan struct{}
}

func watch(t testing.TB, cfg LoadConfig) *watcher {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	w := &watcher{cancel: cancel, result: make(chan *Result, 1), changed: make(chan struct{}, 1)}
	cfg.Sample = func(s Sample) {
		w.mu.Lock()
		w.last = s
		w.moved += s.Moved
		w.mu.Unlock()
		select {
		case w.changed <- struct{}{}:
		default:
		}
	}
	go func() {
		r, err := Load(ctx, cfg)
		if err != nil {
			t.Error(err)
		}
		w.result <- r
	}()
	t.Cleanup(func() {
		cancel()
		w.result <- <-w.result
	})
	return w
}

// until waits for a sample.
func (w *watcher) until(t testing.TB, what string, cond func(s Sample, moved int) bool) {
	t.Helper()
	timeout := time.After(patience)
	for {
		select {
		case <-w.changed:
			w.mu.Lock()
			ok := cond(w.last, w.moved)
			w.mu.Unlock()
			if ok {
				return
			}
		case <-timeout:
			t.Fatalf("waited in vain: %s", what)
		}
	}
}

func (w *watcher) stop() *Result {
	w.cancel()
	r := <-w.result
	w.result <- r
	return r
}

// only says whether all requests of a sample were answered by one generation.
func only(s Sample, generation uint32) bool {
	return s.Requests[generation] > 0 && len(s.Requests) == 1
}

func noLoss(t testing.TB, r *Result) {
	t.Helper()
	if r.Lost() != 0 {
		t.Errorf("losses:\n%s", r)
	}
}

// Two generations in one process: the load moves over and loses nothing, and
// the predecessor leaves by itself.
func TestUpgrade(t *testing.T) {
	g := newGroup(t)
	first, one := startServerIn(t, g.ns, g.config())
	w := watch(t, g.load())
	w.until(t, "load on the first generation", func(s Sample, _ int) bool { return s.Open == 10 && only(s, one.Generation) })
	second, two := startServerIn(t, g.ns, g.config())
	if two.Generation <= one.Generation || two.SPKI != one.SPKI {
		t.Errorf("generations %+v and %+v", one, two)
	}
	first.wait(t)
	w.until(t, "load on the second generation", func(s Sample, moved int) bool { return moved >= 10 && s.Open == 10 && only(s, two.Generation) })
	third, three := startServerIn(t, g.ns, g.config())
	second.wait(t)
	w.until(t, "load on the third generation", func(s Sample, moved int) bool { return moved >= 20 && s.Open == 10 && only(s, three.Generation) })
	r := w.stop()
	noLoss(t, r)
	t.Logf("\n%s", r)
	if r.Migrations == 0 || r.Rebinds == 0 || r.ZeroRTT.Accepted == 0 && !underRace || len(r.Generations) != 3 {
		t.Errorf("something was not done")
	}
	third.Stop()
	third.wait(t)
}

// A download that began before the upgrade ends after it, with the client
// changing its port on the way.
func TestUpgradeMidFlow(t *testing.T) {
	g := newGroup(t)
	cfg := g.config()
	cfg.Workers = 4
	first, one := startServerIn(t, g.ns, cfg)
	l := g.loader(t)
	var clients [8]*client
	for i := range clients {
		clients[i] = dialTest(t, l, false)
	}
	var flipped sync.WaitGroup
	var once sync.Once
	flip := make(chan struct{})
	var second *running
	for i, c := range clients {
		flipped.Go(func() {
			q := request{bytes: 200_000, seed: uint64(i), over: 2 * time.Second}
			q.mid = func(c *client) {
				l.migrate(c)
				once.Do(func() { close(flip) })
				testutil.WaitFor(t, patience, func() bool { return first.sockets.state() == "draining" }, "the flip")
				l.rebind(c)
				l.migrate(c)
			}
			if _, err := c.get(q); err != nil {
				t.Errorf("client %d: %v", i, err)
			}
		})
	}
	<-flip
	second, two := startServerIn(t, g.ns, cfg)
	flipped.Wait()
	r := l.rec.finish(0)
	noLoss(t, r)
	// On a slow machine a connection may have ended before its last move.
	if r.Migrations <= 8 || r.Rebinds != 8 || r.Generations[one.Generation] != 8 || r.Generations[two.Generation] != 0 {
		t.Errorf("\n%s", r)
	}
	first.wait(t)
	second.Stop()
	second.wait(t)
}

// Session tickets and early data go over to the next generation.
func TestUpgradeZeroRTT(t *testing.T) {
	skipUnderRace(t)
	g := newGroup(t)
	_, _ = startServerIn(t, g.ns, g.config())
	l := g.loader(t)
	visit := func() {
		if c := l.do(nil, request{bytes: 1000, seed: 1, resume: true}, false); c != nil {
			c.close()
		}
	}
	visit()
	_, two := startServerIn(t, g.ns, g.config())
	visit()
	r := l.rec.finish(0)
	noLoss(t, r)
	if r.Resumed != 1 || r.ZeroRTT != (ZeroRTT{1, 1}) || r.Generations[two.Generation] != 1 {
		t.Errorf("\n%s", r)
	}
}

// A predecessor whose successor leaves while it drains is active again, serves
// its old clients and new ones, and hands over to the next successor.
func TestReinstated(t *testing.T) {
	g := newGroup(t)
	first, one := startServerIn(t, g.ns, g.config())
	l := g.loader(t)
	// A long request keeps the predecessor draining.
	holder := dialTest(t, l, false)
	held := make(chan error, 1)
	ctx, release := context.WithCancel(t.Context())
	defer release()
	reading := make(chan struct{})
	go func() {
		req, _ := http.NewRequestWithContext(ctx, http.MethodGet, "https://localhost/stream?seconds=60", nil)
		resp, err := holder.http.RoundTrip(req)
		close(reading)
		if err == nil {
			_, err = io.Copy(io.Discard, resp.Body)
		}
		held <- err
	}()
	<-reading

	second, _ := startServerIn(t, g.ns, g.config())
	testutil.WaitFor(t, patience, func() bool { _, untold := first.conns.size(); return untold == 0 }, "the first generation to say GOAWAY")
	second.cancel()
	second.wait(t)
	// Steering needs no one's help: the very next connection is served.
	c := dialTest(t, l, false)
	if s := c.status(t); s.Generation != one.Generation {
		t.Errorf("generation %d answers, want %d", s.Generation, one.Generation)
	}
	testutil.WaitFor(t, patience, func() bool { return first.sockets.state() == "active" }, "the first generation to be active")
	select {
	case err := <-held:
		t.Errorf("the long request ended: %v", err)
	default:
	}
	if s := c.status(t); s.State != "active" || s.Connections != 2 {
		t.Errorf("status: %+v", s)
	}

	// Once more, this time to the end.
	third, three := startServerIn(t, g.ns, g.config())
	release()
	if err := <-held; err == nil {
		t.Error("the long request ended before it was cancelled")
	}
	first.wait(t)
	if s := dialTest(t, l, false).status(t); s.Generation != three.Generation {
		t.Errorf("generation %d answers, want %d", s.Generation, three.Generation)
	}
	third.Stop()
	third.wait(t)
}

// The operator takes the upgrade back.
func TestRollback(t *testing.T) {
	g := newGroup(t)
	cfg := g.config()
	cfg.HandshakeGrace = time.Minute
	first, one := startServerIn(t, g.ns, cfg)
	second, _ := startServerIn(t, g.ns, cfg)
	testutil.WaitFor(t, patience, func() bool { return first.sockets.state() == "draining" }, "the flip")
	back, err := second.sockets.(*instarSockets).group.Rollback()
	if err != nil || back != one.Generation {
		t.Fatalf("Rollback = %d, %v", back, err)
	}
	if s := dialTest(t, g.loader(t), false).status(t); s.Generation != one.Generation || s.State != "active" {
		t.Errorf("status: %+v", s)
	}
	// Both are stopped: the one that was taken back leaves, too.
	second.Stop()
	second.wait(t)
	first.Stop()
	first.wait(t)
}

// A generation that is stopped while its predecessor drains hands back, and
// nothing is refused. When both are stopped, both leave.
func TestStopHandsBack(t *testing.T) {
	g := newGroup(t)
	cfg := g.config()
	cfg.HandshakeGrace = time.Minute
	first, one := startServerIn(t, g.ns, cfg)
	cfg.HandshakeGrace = -1
	second, two := startServerIn(t, g.ns, cfg)
	l := g.loader(t)
	c := dialTest(t, l, false)
	q := request{bytes: 200_000, seed: 1, over: 500 * time.Millisecond}
	q.mid = func(*client) {
		second.Stop()
		testutil.WaitFor(t, patience, func() bool { return second.sockets.state() == "draining" }, "the second generation to hand back")
		if s := dialTest(t, l, false).status(t); s.Generation != one.Generation || s.State != "active" {
			t.Errorf("status: %+v", s)
		}
	}
	if _, err := c.get(q); err != nil {
		t.Errorf("request that was under way: %v", err)
	}
	second.wait(t)
	if got := l.rec.finish(0).Generations[two.Generation]; got != 1 {
		t.Errorf("the second generation answered %d requests", got)
	}

	third, _ := startServerIn(t, g.ns, cfg)
	first.Stop()
	third.Stop()
	first.wait(t)
	third.wait(t)
}

// process is a quicdemo serve of its own.
type process struct {
	t     testing.TB
	cmd   *testutil.Cmd
	lines chan Ready    // ready lines, of successors too
	ended chan struct{} // closed when the process ended

	mu  sync.Mutex
	log strings.Builder
}

// command returns a copy of the test binary that can be replaced.
func command(t testing.TB) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "quicdemo")
	install(t, path)
	return path
}

// install puts a copy of the test binary, or a script, at path.
func install(t testing.TB, path string, script ...string) {
	t.Helper()
	data := []byte(strings.Join(script, "\n"))
	if len(script) == 0 {
		self, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		if data, err = os.ReadFile(self); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(path+".new", data, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

func (g *group) start(t testing.TB, path string, args ...string) *process {
	t.Helper()
	args = append([]string{"serve", "--json", "--addr", groupAddr, "--root", g.root, "--handshake-grace", "100ms", "--probation", "200ms"}, args...)
	p := &process{t: t, cmd: g.ns.Command(path, args...), lines: make(chan Ready, 16), ended: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), envMain+"=1", "GORACE=atexit_sleep_ms=0")
	// Successors are in the group and hold our pipes.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	stdout, outW, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	stderr, errW, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	p.cmd.Stdout, p.cmd.Stderr = outW, errW
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(outW.Close(), errW.Close()); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(p.ended)
		_ = p.cmd.Wait()
	}()
	var readers sync.WaitGroup
	readers.Go(func() {
		scan := bufio.NewScanner(stdout)
		for scan.Scan() {
			var r Ready
			if err := json.Unmarshal(scan.Bytes(), &r); err != nil {
				t.Errorf("output: %s", scan.Text())
			}
			p.lines <- r
		}
	})
	readers.Go(func() {
		scan := bufio.NewScanner(stderr)
		for scan.Scan() {
			t.Logf("server: %s", scan.Text())
			p.mu.Lock()
			p.log.WriteString(scan.Text() + "\n")
			p.mu.Unlock()
		}
	})
	t.Cleanup(func() {
		_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
		<-p.ended
		readers.Wait()
		if err := errors.Join(stdout.Close(), stderr.Close()); err != nil {
			t.Error(err)
		}
	})
	return p
}

func (p *process) ready(t testing.TB) Ready {
	t.Helper()
	select {
	case r := <-p.lines:
		return r
	case <-time.After(patience):
		t.Fatal("no generation is ready")
		return Ready{}
	}
}

func (p *process) signal(t testing.TB, sig syscall.Signal) {
	t.Helper()
	if err := p.cmd.Process.Signal(sig); err != nil {
		t.Fatal(err)
	}
}

// exit waits for the first process's exit code.
func (p *process) exit(t testing.TB) int {
	t.Helper()
	select {
	case <-p.ended:
		return p.cmd.ProcessState.ExitCode()
	case <-time.After(patience):
		t.Fatal("the process does not end")
		return 0
	}
}

// logged waits until the log has a line with all of these words.
func (p *process) logged(t testing.TB, words ...string) {
	t.Helper()
	testutil.WaitFor(t, patience, func() bool { return p.has(words...) }, "a log line with %q", words)
}

func (p *process) has(words ...string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for line := range strings.Lines(p.log.String()) {
		all := true
		for _, w := range words {
			all = all && strings.Contains(line, w)
		}
		if all {
			return true
		}
	}
	return false
}

// The server replaces itself, twice, under load, with the binary that is there
// at that time.
func TestUpgradeOfProcess(t *testing.T) {
	withAndWithoutPins(t, testUpgradeOfProcess)
}

// withAndWithoutPins runs a test with a pinned group, and with one that goes from server
// to server as descriptors.
func withAndWithoutPins(t *testing.T, test func(t *testing.T, args ...string)) {
	t.Helper()
	testutil.Need(t, capset.SysAdmin, capset.NetAdmin)
	t.Run("pins", func(t *testing.T) { test(t) })
	t.Run("descriptors", func(t *testing.T) { test(t, "--pinless") })
}

func testUpgradeOfProcess(t *testing.T, args ...string) {
	g := newGroup(t)
	path := command(t)
	p := g.start(t, path, args...)
	one := p.ready(t)
	list, err := dispatch.List(g.root)
	if err != nil || len(list) != 1-len(args) {
		t.Errorf("groups with pins: %v, %v", list, err)
	}
	w := watch(t, g.load())
	w.until(t, "load on the first generation", func(s Sample, _ int) bool { return s.Open == 10 && only(s, one.Generation) })
	install(t, path) // the old inode is gone
	p.signal(t, syscall.SIGHUP)
	two := p.ready(t)
	if two.Generation <= one.Generation || two.PID == one.PID || two.SPKI != one.SPKI || two.Build == one.Build {
		t.Errorf("generations %+v and %+v", one, two)
	}
	p.logged(t, "superseded", one.Build, two.Build)
	if code := p.exit(t); code != 0 {
		t.Errorf("the predecessor exits with %d", code)
	}
	w.until(t, "load on the second generation", func(s Sample, moved int) bool { return moved >= 10 && s.Open == 10 && only(s, two.Generation) })
	if err := syscall.Kill(two.PID, syscall.SIGUSR2); err != nil {
		t.Fatal(err)
	}
	three := p.ready(t)
	w.until(t, "load on the third generation", func(s Sample, moved int) bool { return moved >= 20 && s.Open == 10 && only(s, three.Generation) })
	r := w.stop()
	noLoss(t, r)
	t.Logf("\n%s", r)
	if err := syscall.Kill(three.PID, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	testutil.WaitFor(t, patience, func() bool { return syscall.Kill(three.PID, 0) != nil }, "the last generation to end")
}

// The active generation is killed while its predecessor drains: the
// predecessor serves new connections at once, and the clients of the dead one
// learn of it at once.
func TestKillActive(t *testing.T) {
	withAndWithoutPins(t, testKillActive)
}

func testKillActive(t *testing.T, args ...string) {
	g := newGroup(t)
	p := g.start(t, command(t), append(args, "--handshake-grace", "1m", "--probation", "1m")...)
	one := p.ready(t)
	l := g.loader(t)
	old := dialTest(t, l, false)
	old.status(t)
	p.signal(t, syscall.SIGHUP)
	two := p.ready(t)
	orphan := dialTest(t, l, false)
	if s := orphan.status(t); s.Generation != two.Generation {
		t.Fatalf("generation %d answers, want %d", s.Generation, two.Generation)
	}
	if err := syscall.Kill(two.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	killed := time.Now()
	p.logged(t, "active again")
	p.logged(t, "took back from the successor")
	if s := dialTest(t, l, false).status(t); s.Generation != one.Generation || s.State != "active" {
		t.Errorf("status: %+v", s)
	}
	if s := old.status(t); s.Generation != one.Generation {
		t.Errorf("old connection: %+v", s)
	}
	_, err := orphan.get(request{bytes: 1000, seed: 1})
	if got := classify(err); got != "stateless_reset" {
		t.Errorf("client of the dead generation: %s (%v)", got, err)
	}
	t.Logf("%v after the kill", time.Since(killed))
	// And it can upgrade again.
	p.signal(t, syscall.SIGHUP)
	three := p.ready(t)
	if s := dialTest(t, l, false).status(t); s.Generation != three.Generation {
		t.Errorf("generation %d answers, want %d", s.Generation, three.Generation)
	}
}

// Killed in the middle of load, with a predecessor that drains: whatever is
// lost is lost by the dead process's own connections, and quickly.
func TestKillActiveUnderLoad(t *testing.T) {
	g := newGroup(t)
	p := g.start(t, command(t), "--handshake-grace", "1m")
	one := p.ready(t)
	p.signal(t, syscall.SIGHUP)
	two := p.ready(t)
	cfg := g.load()
	cfg.IdleTimeout = 3 * time.Second
	w := watch(t, cfg)
	w.until(t, "load on the second generation", func(s Sample, _ int) bool { return s.Open == 10 && only(s, two.Generation) })
	if err := syscall.Kill(two.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	w.until(t, "load on the first generation", func(s Sample, _ int) bool { return s.Open == 10 && only(s, one.Generation) })
	r := w.stop()
	t.Logf("\n%s", r)
	// A client that has nothing to say but acknowledgements gets no reset: quic-go
	// sends none for packets of up to 42 bytes.
	resets, silent := r.Errors["connection: stateless_reset"], r.Errors["connection: idle_timeout"]
	if resets == 0 || resets+silent != r.BrokenConnections {
		t.Errorf("%d of %d broken connections got a stateless reset", resets, r.BrokenConnections)
	}
}

// Whatever becomes of a successor, the server serves on and the next upgrade
// works.
func TestUpgradeFails(t *testing.T) {
	g := newGroup(t)
	path := command(t)
	p := g.start(t, path, "--upgrade-timeout", "1s")
	one := p.ready(t)
	l := g.loader(t)
	c := dialTest(t, l, false)
	served := func() {
		t.Helper()
		if s := dialTest(t, l, false).status(t); s.Generation != one.Generation {
			t.Errorf("generation %d answers, want %d", s.Generation, one.Generation)
		}
		if s := c.status(t); s.Generation != one.Generation || s.State != "active" {
			t.Errorf("status: %+v", s)
		}
	}
	for _, tc := range []struct {
		script []string
		want   []string
	}{
		{[]string{"#!/bin/sh", "exit 7"}, []string{"no upgrade", "exit status 7"}},
		{[]string{"#!/bin/sh", "exec sleep 100"}, []string{"no upgrade", "not ready after 1s"}},
		{[]string{"not a program"}, []string{"no upgrade", "exec format error"}},
		{[]string{"#!/bin/sh", "exit 0"}, []string{"no upgrade", "exit status 0", "without being superseded"}},
	} {
		install(t, path, tc.script...)
		p.signal(t, syscall.SIGHUP)
		p.logged(t, tc.want...)
		served()
	}
	// A successor that says why it cannot.
	install(t, path, "#!/bin/sh", "shift", fmt.Sprintf("exec %s serve --mode plain \"$@\"", testBinary(t)))
	p.signal(t, syscall.SIGHUP)
	p.logged(t, "no upgrade", "address already in use")
	served()
	// Nothing at the path at all.
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	p.signal(t, syscall.SIGHUP)
	p.logged(t, "no upgrade", "no such file")
	served()

	install(t, path)
	p.signal(t, syscall.SIGHUP)
	two := p.ready(t)
	if s := dialTest(t, l, false).status(t); s.Generation != two.Generation {
		t.Errorf("generation %d answers, want %d", s.Generation, two.Generation)
	}
}

func testBinary(t testing.TB) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return self
}

// Signals that come together start one successor; the predecessor starts none.
func TestOneUpgradeAtATime(t *testing.T) {
	g := newGroup(t)
	path := command(t)
	p := g.start(t, path, "--handshake-grace", "1m")
	one := p.ready(t)
	// The successor waits until we let it go on.
	gate := filepath.Join(filepath.Dir(path), "gate")
	if err := syscall.Mkfifo(gate, 0o600); err != nil {
		t.Fatal(err)
	}
	install(t, path, "#!/bin/sh", "read line <"+gate, "exec "+testBinary(t)+` "$@"`)
	p.signal(t, syscall.SIGHUP)
	p.logged(t, "started a successor")
	p.signal(t, syscall.SIGUSR2)
	p.logged(t, "no upgrade", handover.ErrUpgrading.Error())
	f, err := os.OpenFile(gate, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(func() error { _, err := f.WriteString("go\n"); return err }(), f.Close()); err != nil {
		t.Fatal(err)
	}
	two := p.ready(t)
	if two.Generation != one.Generation+1 {
		t.Errorf("generations %d and %d", one.Generation, two.Generation)
	}
	p.logged(t, "superseded")
	// The upgrade's end is not logged, so the answer may be the first one again.
	testutil.WaitFor(t, patience, func() bool {
		p.signal(t, syscall.SIGHUP)
		return p.has("no upgrade", handover.ErrNotActive.Error())
	}, "the predecessor to refuse upgrades")
	if len(p.lines) != 0 {
		t.Error("one more generation")
	}
}

// TERM waits for requests; a second one does not.
func TestTerminate(t *testing.T) {
	g := newGroup(t)
	for _, signals := range []int{1, 2} {
		p := g.start(t, testBinary(t))
		p.ready(t)
		c := dialTest(t, g.loader(t), false)
		q := request{bytes: 200_000, seed: 1, over: 500 * time.Millisecond}
		if signals == 2 {
			q.over = time.Minute
		}
		began := make(chan struct{})
		result := make(chan error, 1)
		go func() {
			once := sync.OnceFunc(func() { close(began) })
			result <- c.read(q, once)
		}()
		<-began
		p.signal(t, syscall.SIGTERM)
		p.logged(t, "stopping", "connections")
		if signals == 2 {
			p.signal(t, syscall.SIGTERM)
		}
		err := <-result
		if signals == 1 && err != nil {
			t.Errorf("request that was under way: %v", err)
		}
		if signals == 2 {
			// The request ends first, the connection in the next packet.
			<-c.conn.Context().Done()
			if why := context.Cause(c.conn.Context()); !graceful(why) {
				t.Errorf("connection ended by %v", why)
			}
		}
		if code := p.exit(t); code != 0 {
			t.Errorf("%d signals: exit code %d", signals, code)
		}
	}
}

// read downloads and calls began when the first bytes are there.
func (c *client) read(q request, began func()) error {
	req, err := http.NewRequest(http.MethodGet, fmt.Sprintf("https://localhost/bytes/%d?seed=%d&ms=%d", q.bytes, q.seed, q.over.Milliseconds()), nil)
	if err != nil {
		return err
	}
	resp, err := c.http.RoundTrip(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	return content.Verify(resp.Body, q.seed, q.bytes, func(int64) { began() })
}

// The generation's numbers are those of the group.
func TestGroupOfServer(t *testing.T) {
	g := newGroup(t)
	s, one := startServerIn(t, g.ns, g.config())
	snapshot, err := s.sockets.(*instarSockets).group.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	if snapshot.Active != one.Generation || snapshot.Service != "quicdemo" || len(snapshot.Generations) != 1 ||
		snapshot.Generations[0].Workers != 2 || snapshot.Generations[0].State != dispatch.StateActive {
		t.Errorf("%+v", snapshot)
	}
}

// A server that stops takes a successor that is not ready with it.
func TestStopDuringUpgrade(t *testing.T) {
	g := newGroup(t)
	path := command(t)
	p := g.start(t, path)
	p.ready(t)
	pid := filepath.Join(filepath.Dir(path), "pid")
	install(t, path, "#!/bin/sh", "echo $$ >"+pid+".new", "mv "+pid+".new "+pid, "exec sleep 100")
	p.signal(t, syscall.SIGHUP)
	var successor int
	testutil.WaitFor(t, patience, func() bool {
		data, err := os.ReadFile(pid)
		if err != nil {
			return false
		}
		_, err = fmt.Sscan(string(data), &successor)
		return err == nil
	}, "the successor to start")
	p.signal(t, syscall.SIGTERM)
	if code := p.exit(t); code != 0 {
		t.Errorf("exit code %d", code)
	}
	testutil.WaitFor(t, patience, func() bool { return syscall.Kill(successor, 0) != nil }, "the successor to end")
}
