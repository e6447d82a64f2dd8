// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// gate stops whoever passes it while it is shut.
type gate struct {
	shut    atomic.Bool
	entered chan struct{} // has room
	open    chan struct{}
	once    sync.Once
}

// release opens the gate for good. A test defers it, so that what it holds ends when
// the test fails.
func (g *gate) release() { g.once.Do(func() { close(g.open) }) }

func newGate() *gate {
	return &gate{entered: make(chan struct{}, 100), open: make(chan struct{})}
}

func (g *gate) pass(ctx context.Context) {
	if !g.shut.Load() {
		return
	}
	g.entered <- struct{}{}
	select {
	case <-g.open:
	case <-ctx.Done():
	}
}

// behind is a ListenConfig that binds behind the gate.
func (g *gate) behind() net.ListenConfig {
	return net.ListenConfig{Control: func(string, string, syscall.RawConn) error {
		g.pass(context.Background())
		return nil
	}}
}

// at shuts the gate, at a step of a handover.
func (g *gate) at(step string) func(string, *peer) error {
	g.shut.Store(true)
	return func(now string, _ *peer) error {
		if now == step {
			g.pass(context.Background())
		}
		return nil
	}
}

// within fails the test when f does not end.
func within(t testing.TB, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	select {
	case <-done:
	case <-time.After(patience):
		t.Fatalf("%s does not end", what)
	}
}

func receiveError(t testing.TB, what string, errs <-chan error) (err error) {
	t.Helper()
	within(t, what, func() { err = <-errs })
	return err
}

// While a socket takes its time to be made, nothing but its name is taken: the
// process tells its status and is upgraded. What comes too late is not kept.
func TestListenTakesItsTime(t *testing.T) {
	listen := map[string]func(h *Handover, path string) (io.Closer, error){
		"tcp": func(h *Handover, _ string) (io.Closer, error) {
			return h.Listen("slow", "tcp", "127.0.0.1:0")
		},
		"unix": func(h *Handover, path string) (io.Closer, error) {
			return h.Listen("slow", "unix", path)
		},
		"udp": func(h *Handover, _ string) (io.Closer, error) {
			return h.ListenPacket("slow", "udp", "127.0.0.1:0")
		},
		"unixgram": func(h *Handover, path string) (io.Closer, error) {
			return h.ListenPacket("slow", "unixgram", path)
		},
	}
	for kind, listen := range listen {
		for _, end := range []string{"in time", "superseded", "closed"} {
			t.Run(kind+"/"+end, func(t *testing.T) {
				before := openFiles(t)
				socket, path := socketPath(t), filepath.Join(t.TempDir(), "slow")
				g := newGate()
				options := testOptions(t, socket)
				options.ListenConfig = g.behind()
				first := mustStart(t, options, nil)
				g.shut.Store(true)
				defer g.release()
				result := make(chan error, 1)
				go func() {
					c, err := listen(first.Handover, path)
					if err == nil {
						err = c.Close()
					}
					result <- err
				}()
				within(t, "binding", func() { <-g.entered })
				within(t, "Status", func() {
					if s := first.Status(); s.Phase != "active" || slices.Contains(s.Handed, "slow") {
						t.Errorf("status %+v", s)
					}
				})
				within(t, "a second Listen", func() {
					if _, err := listen(first.Handover, path); err == nil {
						t.Error("two sockets have one name")
					}
				})
				var want error
				switch end {
				case "superseded":
					want = ErrSuperseded
					within(t, "the upgrade", func() {
						second := mustStart(t, testOptions(t, socket), nil)
						superseded(t, first)
						settled(t, second)
						second.stop()
					})
				case "closed":
					want = ErrClosed
					within(t, "Close", first.stop)
				}
				g.release()
				if err := receiveError(t, "Listen", result); !errors.Is(err, want) {
					t.Errorf("Listen: %v, want %v", err, want)
				}
				first.stop()
				if _, err := os.Lstat(path); want != nil && !errors.Is(err, os.ErrNotExist) {
					t.Errorf("the path is left over: %v", err)
				}
				if after := openFiles(t); after != before {
					t.Errorf("%d open files, before %d", after, before)
				}
			})
		}
	}
}

// resolveBehind has host names resolved behind the gate, and none exists.
func resolveBehind(t testing.TB, g *gate) {
	old := net.DefaultResolver
	net.DefaultResolver = &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		g.pass(ctx)
		return nil, errors.New("no name server")
	}}
	t.Cleanup(func() { net.DefaultResolver = old })
}

// Resolving a name, to see whether it is the predecessor's address, keeps nothing
// up either, and Close ends it.
func TestResolverTakesItsTime(t *testing.T) {
	g := newGate()
	resolveBehind(t, g)
	g.shut.Store(true)
	defer g.release()
	socket := socketPath(t)
	first := mustStart(t, testOptions(t, socket), nil)
	h, err := New(testOptions(t, socket))
	if err != nil {
		t.Fatal(err)
	}
	result := make(chan error, 1)
	go func() {
		_, err := h.Listen("web", "tcp", "host.instar.test:0")
		result <- err
	}()
	within(t, "resolving", func() { <-g.entered })
	within(t, "Status", func() { h.Status() })
	within(t, "Close", func() {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := receiveError(t, "Listen", result); !errors.Is(err, ErrClosed) {
		t.Errorf("Listen: %v", err)
	}
	// A name that does not exist is an error, and what was inherited is there yet.
	g.release()
	settledUpgrade(t, first)
	second := mustStart(t, testOptions(t, socket), func(g *generation) {
		if err := g.l.Close(); err != nil {
			t.Error(err)
		}
	})
	superseded(t, first)
	settled(t, second)
	second.stop()
}

// What a Listen that failed did not use is there for the next one.
func TestFailedListenTakesNothing(t *testing.T) {
	resolveBehind(t, newGate())
	socket := socketPath(t)
	first := mustStart(t, testOptions(t, socket), nil)
	h, err := New(testOptions(t, socket))
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	if _, err := h.Listen("web", "tcp", "host.instar.test:0"); err == nil {
		t.Fatal("a name that does not exist was bound")
	}
	l, err := h.Listen("web", "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if l.Addr().String() != first.l.Addr().String() {
		t.Errorf("address %v, the predecessor's is %v", l.Addr(), first.l.Addr())
	}
}

// A process that was superseded, or taken back, gets no new listener.
func TestListenTooLate(t *testing.T) {
	socket := socketPath(t)
	var reject atomic.Bool
	var binds atomic.Int64
	bind := net.ListenConfig{Control: func(string, string, syscall.RawConn) error {
		binds.Add(1)
		return nil
	}}
	options, theirs := testOptions(t, socket), testOptions(t, socket)
	options.step, options.ListenConfig, theirs.ListenConfig = rejecting(&reject), bind, bind
	tooLate := func(h *Handover, want error) {
		t.Helper()
		before := binds.Load()
		for network, address := range map[string]string{"tcp": "127.0.0.1:0", "unix": filepath.Join(t.TempDir(), "late")} {
			if l, err := h.Listen("late", network, address); !errors.Is(err, want) {
				t.Errorf("Listen %s: %v, %v", network, l, err)
			}
		}
		if c, err := h.ListenPacket("late", "udp", "127.0.0.1:0"); !errors.Is(err, want) {
			t.Errorf("ListenPacket: %v, %v", c, err)
		}
		if now := binds.Load(); now != before {
			t.Errorf("%d sockets were bound all the same", now-before)
		}
	}
	first := mustStart(t, options, nil)
	reject.Store(true)
	rolledBack := mustStart(t, theirs, nil)
	<-rolledBack.Superseded()
	tooLate(rolledBack.Handover, ErrRolledBack)
	settledUpgrade(t, first)
	reject.Store(false)
	second := mustStart(t, testOptions(t, socket), nil)
	superseded(t, first)
	settled(t, second)
	tooLate(first.Handover, ErrSuperseded)
}

// rejecting makes a predecessor take back at the end of the probation.
func rejecting(on *atomic.Bool) func(string, *peer) error {
	return func(step string, _ *peer) error {
		if step == "probation-over" && on.Load() {
			return errors.New("not good enough")
		}
		return nil
	}
}

// The path of a Unix socket is removed by the process that made it if it never
// serves or is taken back, and by the last one that serves, whoever made it.
func TestWhoUnlinks(t *testing.T) {
	folder := t.TempDir()
	path := func(name string) string { return filepath.Join(folder, name) }
	there := func(want ...string) {
		t.Helper()
		files, err := os.ReadDir(folder)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, f := range files {
			got = append(got, f.Name())
		}
		if !slices.Equal(got, want) {
			t.Errorf("there are %q, want %q", got, want)
		}
	}
	socket := path("control")
	open := func(g *generation, names ...string) {
		t.Helper()
		for _, name := range names {
			var err error
			if name[0] == 'd' {
				var c net.PacketConn
				if c, err = g.ListenPacket(name, "unixgram", path(name)); err == nil {
					t.Cleanup(func() { _ = c.Close() })
				}
			} else {
				_, err = g.Listen(name, "unix", path(name))
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	var reject atomic.Bool
	options := testOptions(t, socket)
	options.step = rejecting(&reject)
	first := mustStart(t, options, func(g *generation) { open(g, "a", "d1") })
	open(first, "b", "d2") // while it serves
	there("a", "b", "control", "d1", "d2")

	// One that never serves.
	h, err := New(testOptions(t, socket))
	if err != nil {
		t.Fatal(err)
	}
	open(&generation{Handover: h}, "a", "c", "d1", "d3")
	there("a", "b", "c", "control", "d1", "d2", "d3")
	if err := h.Close(); err != nil {
		t.Error(err)
	}
	there("a", "b", "control", "d1", "d2")
	settledUpgrade(t, first)

	// One that is taken back.
	reject.Store(true)
	back := mustStart(t, testOptions(t, socket), func(g *generation) { open(g, "a", "c", "d1", "d3") })
	<-back.Superseded()
	back.stop()
	there("a", "b", "control", "d1", "d2")
	settledUpgrade(t, first)
	// One that closes itself in its probation.
	first.opt.Probation = time.Minute
	quits := mustStart(t, testOptions(t, socket), func(g *generation) { open(g, "a", "c", "d1", "d3") })
	quits.stop()
	there("a", "b", "control", "d1", "d2")
	settledUpgrade(t, first)
	first.opt.Probation = 0
	reject.Store(false)

	// The last one.
	second := mustStart(t, testOptions(t, socket), func(g *generation) { open(g, "a", "b", "d1", "d2") })
	superseded(t, first)
	settled(t, second)
	first.stop()
	open(second, "d4", "e") // while it serves
	there("a", "b", "control", "d1", "d2", "d4", "e")
	second.stop()
	there()
}

// What the predecessor hands over goes before what socket activation has.
func TestPredecessorGoesFirst(t *testing.T) {
	options := testOptions(t, "")
	if err := options.defaults(); err != nil {
		t.Fatal(err)
	}
	var addrs []string
	h := &Handover{opt: options, log: options.Logger, ctx: t.Context(), items: map[string]*item{}, claims: map[string]bool{}, paths: map[string]inode{}, mine: map[string]bool{}}
	for _, source := range []string{fromActivation, fromPredecessor} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		fd, err := duplicate(l.(*net.TCPListener))
		if err = errors.Join(err, l.Close()); err != nil {
			t.Fatal(err)
		}
		i := &inherited{source: source, fd: fd}
		if i.entry, err = describe(fd); err != nil {
			t.Fatal(err)
		}
		i.Name = "web"
		h.inherited = append(h.inherited, i)
		addrs = append(addrs, i.Address)
	}
	for _, want := range []string{addrs[1], addrs[0]} {
		l, err := h.Listen("web", "tcp", "")
		if err != nil {
			t.Fatal(err)
		}
		if got := l.Addr().String(); got != want {
			t.Errorf("listens at %s, want %s", got, want)
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, err := h.Listen("web", "tcp", ""); !errors.Is(err, ErrNotInherited) {
		t.Errorf("a third: %v", err)
	}
}

// A relative folder is one of the folder that this process started in, wherever it
// is by now.
func TestRelativeDir(t *testing.T) {
	for dir, want := range map[string]string{"": startDir, "sub": filepath.Join(startDir, "sub"), "/": "/"} {
		o := Options{Dir: dir}
		if err := o.defaults(); err != nil || o.Dir != want {
			t.Errorf("Dir %q became %q, %v; want %q", dir, o.Dir, err, want)
		}
	}
}

// The roles of the handover's own descriptors are checked, too.
func TestOwnRolesAreChecked(t *testing.T) {
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "l"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	listening, err := duplicate(l.(*net.UnixListener))
	if err != nil {
		t.Fatal(err)
	}
	defer closeAll([]int{listening})
	connected, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer closeAll(connected[:])
	for _, tc := range []struct {
		role  roleName
		fd    int
		right bool
	}{
		{roleControl, listening, true}, {roleControl, connected[0], false},
		{roleLifeline, listening, false}, {roleLifeline, connected[0], true},
	} {
		c, err := cookie(tc.fd)
		if err != nil {
			t.Fatal(err)
		}
		i := &inherited{entry: entry{Role: tc.role, Cookie: c}, fd: tc.fd, source: fromPredecessor}
		if err := i.check(); (err == nil) != tc.right {
			t.Errorf("%s: %v", tc.role, err)
		}
	}
}
