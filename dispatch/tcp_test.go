// SPDX-License-Identifier: Apache-2.0

package dispatch_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"instar/dispatch"
	"instar/internal/kernel"
	"instar/internal/rawconn"
	"instar/internal/testutil"
)

const tcpAddress = "127.0.0.1:4433"

// newTCPWorld is a world whose kernel moves connections.
func newTCPWorld(t *testing.T) *world {
	w := newWorld(t)
	testutil.Since(t, kernel.Version{Major: 5, Minor: 14}, "SEC(\"sk_reuseport/migrate\")")
	return w
}

func (w *world) tcpOptions(address string) dispatch.Options {
	o := w.options(address)
	o.Steering = dispatch.SteeringTCP
	return o
}

// say makes a connection and sends a byte, which its server answers when it likes.
func (w *world) say(address string) *net.TCPConn {
	w.Helper()
	c, err := net.DialTimeout("tcp", address, patience)
	w.must(err)
	w.Cleanup(func() { _ = c.Close() })
	w.must(c.SetDeadline(time.Now().Add(patience)))
	_, err = c.Write([]byte{1})
	w.must(err)
	return c.(*net.TCPConn)
}

// answered reads a server's answer, the number of its generation.
func answered(c net.Conn) (uint32, error) {
	b := make([]byte, 4)
	if _, err := io.ReadFull(c, b); err != nil {
		return 0, err
	}
	return binary.BigEndian.Uint32(b), nil
}

// wantAnswers wants a generation to answer all connections.
func (w *world) wantAnswers(generation uint32, conns ...*net.TCPConn) {
	w.Helper()
	for _, c := range conns {
		if by, err := answered(c); err != nil || by != generation {
			w.Errorf("generation %d answered, want %d (%v)", by, generation, err)
		}
	}
}

// answer accepts connections and answers each byte of theirs until the listener closes.
func answer(l net.Listener, number uint32) {
	var conns sync.WaitGroup
	defer conns.Wait()
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		conns.Go(func() {
			defer c.Close()
			for b := make([]byte, 1); ; {
				if _, err := io.ReadFull(c, b); err != nil {
					return
				}
				if _, err := c.Write(binary.BigEndian.AppendUint32(nil, number)); err != nil {
					return
				}
			}
		})
	}
}

// serveTCP joins and answers on all listeners until they are closed.
func (w *world) serveTCP(g *dispatch.Group, workers int) *dispatch.Generation {
	w.Helper()
	n := w.join(g, workers)
	for _, l := range n.Listeners() {
		go answer(l, n.Number())
	}
	return n
}

// waits returns once so many connections wait at the listeners of a generation.
func (w *world) waits(n *dispatch.Generation, want int) {
	w.Helper()
	testutil.WaitFor(w, patience, func() bool {
		got := 0
		for _, l := range n.Listeners() {
			got += waiting(w, l)
		}
		return got == want
	}, "%d connections in the accept queues", want)
}

func waiting(t testing.TB, l *net.TCPListener) (n int) {
	t.Helper()
	err := rawconn.Of(l, func(fd int) error {
		info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
		if err == nil {
			n = int(info.Unacked)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// New connections go to the active generation, those that are established stay.
func TestTCPGenerations(t *testing.T) {
	for _, address := range []string{tcpAddress, "[::1]:4433", "[::]:4433"} {
		t.Run(address, func(t *testing.T) {
			w := newTCPWorld(t)
			target := address
			if address == "[::]:4433" {
				target = tcpAddress // it is dual stack
			}
			g := w.open(w.tcpOptions(address))
			if len(g.Path()) == 0 || w.snapshot(g).Steering != "tcp" {
				t.Errorf("%+v", w.snapshot(g))
			}
			n1 := w.serveTCP(g, 2)
			if len(n1.Listeners()) != 2 || n1.Conns() != nil || n1.Workers() != 2 {
				t.Errorf("listeners %v, conns %v", n1.Listeners(), n1.Conns())
			}
			w.activate(n1)
			old := w.say(target)
			w.wantAnswers(1, old)
			n2 := w.serveTCP(g, 2)
			w.wantAnswers(1, w.say(target), w.say(target)) // staged
			w.activate(n2)
			w.wantAnswers(2, w.say(target), w.say(target))
			_, err := old.Write([]byte{1})
			w.must(err)
			w.wantAnswers(1, old)
			if _, err := g.Rollback(); err != nil {
				t.Fatal(err)
			}
			w.wantAnswers(1, w.say(target))
			w.activate(n2)
			report, err := n1.Drain(t.Context(), dispatch.DrainOptions{Deadline: time.Nanosecond})
			if err != nil || report.Reason != "deadline" {
				t.Errorf("%+v, %v", report, err)
			}
			w.must(n1.Close())
			w.wantAnswers(2, w.say(target))
			_, err = old.Write([]byte{1})
			w.must(err)
			w.wantAnswers(1, old)
			w.wantCounts(g, "in all", nil, counts{"new": 7})
		})
	}
}

// A7: connections that wait at the listener which closes, accepted by nobody, are served
// by its successor, with what was sent on them. Sockets that only share the address
// lose theirs.
func TestWaitingConnectionsMove(t *testing.T) {
	w := newTCPWorld(t)
	const n = 50
	g := w.open(w.tcpOptions(tcpAddress))
	n1 := w.join(g, 2)
	w.activate(n1)
	var conns []*net.TCPConn
	for range n {
		conns = append(conns, w.say(tcpAddress))
	}
	w.waits(n1, n)
	n2 := w.serveTCP(g, 2)
	w.activate(n2)
	w.must(n1.Close())
	w.wantAnswers(2, conns...)
	w.wantCounts(g, "in all", nil, counts{"new": n, "known": n})

	const plainAddress = "127.0.0.1:4434"
	var listeners []*net.TCPListener
	for range 2 {
		l, err := plainListener("tcp4", plainAddress, "")
		w.must(err)
		defer l.Close()
		listeners = append(listeners, l)
	}
	conns = nil
	for range n {
		conns = append(conns, w.say(plainAddress))
	}
	testutil.WaitFor(t, patience, func() bool { return waiting(t, listeners[0])+waiting(t, listeners[1]) == n }, "connections in the accept queues")
	doomed := waiting(t, listeners[0])
	w.must(listeners[0].Close())
	go answer(listeners[1], 2)
	lost := 0
	for _, c := range conns {
		if _, err := answered(c); err != nil {
			lost++
		}
	}
	if lost == 0 || lost != doomed {
		t.Errorf("of %d connections at a plain listener that closed %d were lost: nothing is shown", doomed, lost)
	}
}

// Connections whose handshake is under way move as well. TCP_DEFER_ACCEPT leaves them in
// that state until the client sends something.
func TestHalfOpenConnectionsMove(t *testing.T) {
	w := newTCPWorld(t)
	const n = 50
	g := w.open(w.tcpOptions(tcpAddress))
	n1, n2 := w.join(g, 1), w.serveTCP(g, 2)
	w.must(rawconn.Of(n1.Listeners()[0], func(fd int) error {
		return unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_DEFER_ACCEPT, 30)
	}))
	w.activate(n1)
	var conns []*net.TCPConn
	for range n {
		c, err := net.DialTimeout("tcp", tcpAddress, patience)
		w.must(err)
		t.Cleanup(func() { _ = c.Close() })
		w.must(c.SetDeadline(time.Now().Add(patience)))
		conns = append(conns, c.(*net.TCPConn))
	}
	w.activate(n2)
	if got := waiting(t, n1.Listeners()[0]); got != 0 {
		t.Fatalf("%d connections are established: nothing is shown", got)
	}
	w.must(n1.Close())
	for _, c := range conns {
		_, err := c.Write([]byte{1})
		w.must(err)
	}
	w.wantAnswers(2, conns...)
	w.wantCounts(g, "in all", nil, counts{"new": n, "known": n})
}

// acceptor is a server that joins and activates itself, and accepts nothing. Args are
// the options.
var acceptor = testutil.NewProgram("acceptor", func(c *testutil.Conversation) error {
	o, err := decode(c.Args[0])
	if err != nil {
		return err
	}
	g, err := dispatch.Open(o)
	if err != nil {
		return err
	}
	n, err := g.Join(1)
	if err != nil {
		return err
	}
	if err := n.Activate(); err != nil {
		return err
	}
	c.Send("active")
	c.Recv()
	return n.Close()
})

// A3: the active process is killed. What waited at its listener goes to its predecessor,
// which still drains, and so does what comes later.
func TestKilledWithWaitingConnections(t *testing.T) {
	w := newTCPWorld(t)
	const n = 20
	o := w.tcpOptions(tcpAddress)
	g := w.open(o)
	w.activate(w.serveTCP(g, 2))
	p := acceptor.Start(w, testutil.Options{Args: []string{encode(o)}, NS: w.ns})
	p.Expect("active")
	var conns []*net.TCPConn
	for range n {
		conns = append(conns, w.say(tcpAddress))
	}
	p.Kill()
	w.wantAnswers(1, conns...)
	w.wantAnswers(1, w.say(tcpAddress))
	w.must(g.Repair())
	if s := w.snapshot(g); s.Active != 1 {
		t.Errorf("generation %d is active", s.Active)
	}
}

// The last generation: Drain refuses new connections and waits until the owner has
// accepted those that had come before.
func TestLastTCPGenerationDrains(t *testing.T) {
	w := newTCPWorld(t)
	const n = 10
	dispatch.SetUnreadLimit(t, 50*time.Millisecond)
	g := w.open(w.tcpOptions(tcpAddress))
	n1 := w.join(g, 1)
	w.activate(n1)
	var conns []*net.TCPConn
	for range n {
		conns = append(conns, w.say(tcpAddress))
	}
	w.waits(n1, n)
	now := dispatch.DrainOptions{Final: true, Deadline: time.Nanosecond}
	_, err := n1.Drain(t.Context(), now)
	wantRefused(t, "a drain that nobody accepts in", err, "unread", "10 connections on "+tcpAddress, "keep reading")
	if c, err := net.DialTimeout("tcp", tcpAddress, patience); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("a connection after it: %v, %v", c, err)
	}
	dispatch.SetUnreadLimit(t, patience)
	go answer(n1.Listeners()[0], 1)
	report, err := n1.Drain(t.Context(), now)
	if err != nil || report.Queued > 1 {
		t.Errorf("%+v, %v", report, err)
	}
	w.must(n1.Close())
	w.wantAnswers(1, conns...)
}

// An http.Server that shuts down leaves the group by that alone.
func TestShutdownLeaves(t *testing.T) {
	w := newTCPWorld(t)
	g := w.open(w.tcpOptions(tcpAddress))
	n1 := w.join(g, 2)
	server := &http.Server{Handler: http.NotFoundHandler(), ReadHeaderTimeout: patience}
	done := make(chan error, 2)
	for _, l := range n1.Listeners() {
		go func() { done <- server.Serve(l) }()
	}
	w.activate(n1)
	n2 := w.serveTCP(g, 1)
	w.activate(n2)
	w.must(server.Shutdown(t.Context()))
	for range 2 {
		if err := <-done; !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	}
	w.must(g.Repair())
	if s := w.snapshot(g); len(s.Generations) != 1 || s.Active != 2 || n1.State() != dispatch.StateGone {
		t.Errorf("%+v", s)
	}
	w.wantAnswers(2, w.say(tcpAddress))
	w.must(n1.Close())
}

// A1, A7: twenty generations follow each other while clients connect as fast as they
// can. Each predecessor stops accepting before it closes, so that its queue is full.
func TestTCPUpgradesUnderLoad(t *testing.T) {
	w := newTCPWorld(t)
	generations, each := 20, 1000
	if testing.Short() {
		generations, each = 5, 200
	}
	g := w.open(w.tcpOptions(tcpAddress))
	var (
		served, moved sync.Map
		dialed        atomic.Int64
		clients       sync.WaitGroup
		ctx, stop     = context.WithCancel(t.Context())
	)
	defer clients.Wait()
	defer stop()
	// start serves on a generation until stopped, with two goroutines a listener.
	start := func() (n *dispatch.Generation, halt func()) {
		n = w.join(g, 4)
		var acceptors sync.WaitGroup
		for _, l := range n.Listeners() {
			for range 2 {
				acceptors.Go(func() {
					for {
						c, err := l.AcceptTCP()
						if err != nil {
							return
						}
						go func() {
							defer c.Close()
							b := make([]byte, 1)
							if _, err := io.ReadFull(c, b); err == nil {
								served.LoadOrStore(n.Number(), true)
								_, _ = c.Write(binary.BigEndian.AppendUint32(nil, n.Number()))
								_, _ = c.Read(b) // until the client closes
							}
						}()
					}
				})
			}
		}
		return n, func() {
			for _, l := range n.Listeners() {
				w.must(l.SetDeadline(time.Unix(1, 0)))
			}
			acceptors.Wait()
		}
	}
	current, halt := start()
	w.activate(current)
	failures := make(chan error, 1)
	for i := range 8 {
		dialer := net.Dialer{Timeout: patience, LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, byte(10+i))}}
		dialer.SetMultipathTCP(false)
		clients.Go(func() {
			w.ns.Run(func() {
				for ctx.Err() == nil {
					if err := ask(&dialer); err != nil {
						select {
						case failures <- err:
						default:
						}
						return
					}
					dialed.Add(1)
				}
			})
		})
	}
	began := time.Now()
	for i := range generations {
		goal := int64((i + 1) * each)
		testutil.WaitFor(t, patience, func() bool {
			if len(failures) > 0 {
				t.Fatalf("%v; %v", <-failures, w.counts(g))
			}
			return dialed.Load() >= goal
		}, "connections")
		next, haltNext := start()
		halt()
		waited := 0
		testutil.WaitFor(t, patience, func() bool {
			waited = 0
			for _, l := range current.Listeners() {
				waited += waiting(t, l)
			}
			return waited > 0
		}, "a connection in a queue that nobody empties")
		w.activate(next)
		w.must(current.Close())
		moved.Store(current.Number(), waited)
		current, halt = next, haltNext
	}
	stop()
	clients.Wait()
	elapsed := time.Since(began)
	if len(failures) > 0 {
		t.Fatal(<-failures)
	}
	c := w.counts(g)
	if c["known"] < uint64(generations) || c["new"] < uint64(dialed.Load()) || c["drop"]+c["fallback"] > 0 {
		t.Errorf("%d connections were counted as %v", dialed.Load(), c)
	}
	count := func(m *sync.Map) (n int) { m.Range(func(_, _ any) bool { n++; return true }); return n }
	if n := count(&served); n < generations {
		t.Errorf("%d generations served", n)
	}
	t.Logf("%d connections, %.0f/s, %d upgrades, %d connections moved, 0 lost", dialed.Load(),
		float64(dialed.Load())/elapsed.Seconds(), count(&moved), c["known"])
}

// ask makes a connection, asks and closes it with a reset, which leaves no TIME_WAIT.
func ask(d *net.Dialer) error {
	c, err := d.Dial("tcp4", tcpAddress)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	if _, err := c.Write([]byte{1}); err != nil {
		return err
	}
	if _, err := answered(c); err != nil {
		return err
	}
	return c.(*net.TCPConn).SetLinger(0)
}

// What would not be TCP, or not as the caller thinks, is refused before anything is made.
func TestTCPOptions(t *testing.T) {
	for _, tt := range []struct {
		name  string
		o     dispatch.Options
		words []string
	}{
		{"steering of UDP", dispatch.Options{Network: "tcp", Steering: dispatch.SteeringFlow}, []string{"steering flow", "tcp4"}},
		{"steering of TCP", dispatch.Options{Network: "udp4", Steering: dispatch.SteeringTCP}, []string{"steering tcp", "udp4"}},
		{"network", dispatch.Options{Network: "tcp5"}, []string{`"tcp5"`, "tcp, tcp4 or tcp6"}},
		{"family", dispatch.Options{Network: "tcp6"}, []string{`not of network "tcp6"`}},
		{"receive buffer", dispatch.Options{Network: "tcp", ReceiveBuffer: 1}, []string{"ReceiveBuffer is of UDP"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.o.Address = tcpAddress
			g, err := dispatch.Open(tt.o)
			if err == nil {
				_ = g.Close()
			}
			wantRefused(t, "open", err, "options", tt.words...)
		})
	}
}

// A2, A9: whoever has the address without being of the group is told from whom it is held.
func TestTCPStrangers(t *testing.T) {
	w := newTCPWorld(t)
	stranger, err := plainListener("tcp4", tcpAddress, "")
	w.must(err)
	defer stranger.Close()
	_, err = dispatch.Open(w.tcpOptions(tcpAddress))
	wantRefused(t, "beside a stranger", err, "occupied", "a socket on tcp4 "+tcpAddress, fmt.Sprint(os.Getpid()), "not registered")
	_, err = dispatch.Open(w.tcpOptions("0.0.0.0:4433"))
	wantRefused(t, "around a stranger", err, "occupied", "more specific")
	// UDP of the same number is nobody's rival, and connections are not either.
	g := w.open(w.options(tcpAddress))
	w.activate(w.serve(g, 1))
	c, err := net.DialTimeout("tcp", tcpAddress, patience)
	w.must(err)
	defer c.Close()
	w.must(stranger.Close())
	h := w.open(w.tcpOptions(tcpAddress))
	if g.Path() == h.Path() {
		t.Errorf("both are at %s", g.Path())
	}
	w.activate(w.serveTCP(h, 1))
	w.wantAnswers(1, w.say(tcpAddress))
}

// A5: the program is replaced under the listeners, and descriptors stand for pins.
func TestTCPProgramAndFiles(t *testing.T) {
	w := newTCPWorld(t)
	first := newPassed(t)
	o := w.withoutPins(tcpAddress, first)
	o.Steering = dispatch.SteeringTCP
	g := w.open(o)
	n1 := w.join(g, 2)
	w.activate(n1)
	o.Files = first.next()
	h := w.open(o)
	h.SetProgramBuild("old") // as if another build had made it
	if upgraded, err := h.UpgradeProgram(); err != nil || !upgraded {
		t.Fatal(upgraded, err)
	}
	conn := w.say(tcpAddress)
	w.waits(n1, 1)
	n2 := w.serveTCP(h, 2)
	w.activate(n2)
	// The first process has the old program, and joins the others all the same.
	n3 := w.serveTCP(g, 1)
	w.must(n1.Close())
	w.wantAnswers(2, conn, w.say(tcpAddress))
	w.activate(n3)
	w.wantAnswers(3, w.say(tcpAddress))
}
