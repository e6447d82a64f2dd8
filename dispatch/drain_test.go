// SPDX-License-Identifier: Apache-2.0

package dispatch_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"instar/dispatch"
	"instar/internal/testutil"
)

// quiet joins, and nobody reads the sockets.
func (w *world) quiet(g *dispatch.Group, workers int) *dispatch.Generation {
	w.Helper()
	return w.join(g, workers)
}

// queue sends n numbered datagrams to the active generation of a stateless group and
// waits until they are in its queues.
func (w *world) queue(g *dispatch.Group, c *net.UDPConn, from, n int) {
	w.Helper()
	before := w.counts(g)
	for i := range n {
		if _, err := c.Write(binary.BigEndian.AppendUint64(nil, uint64(from+i))); err != nil {
			w.Fatal(err)
		}
		// A CPU's backlog has room for 1,000 packets.
		if i%500 == 499 || i == n-1 {
			w.wantCounts(g, "queued", before, counts{"new": uint64(i + 1)})
		}
	}
}

// collect reads the sockets of a generation until they are closed. It notes which
// datagrams came.
type collect struct {
	readers sync.WaitGroup
	seen    []atomic.Bool
	count   atomic.Int64
	twice   atomic.Int64
}

func newCollect(size int) *collect { return &collect{seen: make([]atomic.Bool, size)} }

func (c *collect) read(n *dispatch.Generation, pause func()) {
	for _, conn := range n.Conns() {
		c.readers.Go(func() {
			b := make([]byte, 64)
			for {
				size, _, err := conn.ReadFromUDPAddrPort(b)
				if errors.Is(err, net.ErrClosed) {
					return
				}
				if err != nil || size != 8 {
					continue
				}
				if c.seen[binary.BigEndian.Uint64(b)].Swap(true) {
					c.twice.Add(1)
				}
				c.count.Add(1)
				pause()
			}
		})
	}
}

func closed() <-chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}

// I11: what is queued when the generation leaves is read to the end.
func TestDrainReadsFullQueues(t *testing.T) {
	w := newWorld(t)
	const address, workers = "127.0.0.1:4433", 4
	datagrams := testutil.UnlessShort(200_000, 3200)
	o := w.options(address)
	o.Steering, o.ReceiveBuffer = dispatch.SteeringStateless, 96<<20
	g := w.open(o)
	n := w.quiet(g, workers)
	w.activate(n)
	// The program chooses by the hash of the client's address.
	clients := make([]*net.UDPConn, 64)
	for i := range clients {
		clients[i] = w.dial(address)
		w.queue(g, clients[i], i*datagrams/len(clients), datagrams/len(clients))
	}
	w.activate(w.quiet(g, 1))
	// The readers are late: they begin once the drain has seen the queues.
	late := make(chan struct{})
	dispatch.OnStep(t, func(done string) {
		if done == "count queues" {
			close(late)
		}
	})
	draining := drain(w.Context(), n, dispatch.DrainOptions{Done: closed()})
	select {
	case <-late:
	case d := <-draining:
		t.Fatalf("the drain ended before it looked at the queues: %+v", d)
	}
	got := newCollect(datagrams)
	got.read(n, func() {
		if got.count.Load() == int64(datagrams) {
			return
		}
		select {
		case d := <-draining:
			t.Errorf("the drain ended before all was read: %+v", d)
		default:
		}
	})
	d := w.took(draining)
	if d.err != nil || d.report.Reason != "done" || d.report.Queued != workers {
		t.Errorf("the drain: %+v", d)
	}
	w.must(n.Close())
	got.readers.Wait()
	if count, twice := got.count.Load(), got.twice.Load(); count != int64(datagrams) || twice != 0 {
		t.Errorf("%d of %d datagrams were read, %d of them twice", count, datagrams, twice)
	}
}

// A reader that is slow is a reader. The kernel accounts for what was read in large
// steps only.
func TestDrainWaitsForASlowReader(t *testing.T) {
	w := newWorld(t)
	const address, datagrams = "127.0.0.1:4433", 200
	// All of it takes twice as long as nothing may happen.
	const pause = 10 * time.Millisecond
	dispatch.SetUnreadLimit(t, datagrams*pause/2)
	o := w.options(address)
	o.Steering, o.ReceiveBuffer = dispatch.SteeringStateless, 64<<20
	g := w.open(o)
	n := w.quiet(g, 1)
	w.activate(n)
	w.queue(g, w.dial(address), 0, datagrams)
	w.activate(w.quiet(g, 1))
	draining := drain(w.Context(), n, dispatch.DrainOptions{Done: closed()})
	w.wait(n, dispatch.StateGone)
	got := newCollect(datagrams)
	got.read(n, func() { time.Sleep(pause) })
	if d := w.took(draining); d.err != nil || d.report.Queued != 1 {
		t.Errorf("the drain: %+v", d)
	}
	w.must(n.Close())
	got.readers.Wait()
	if count := got.count.Load(); count != datagrams {
		t.Errorf("%d of %d datagrams were read", count, datagrams)
	}
}

func TestDrainThatNobodyReads(t *testing.T) {
	w := newWorld(t)
	const address = "127.0.0.1:4433"
	dispatch.SetUnreadLimit(t, 50*time.Millisecond)
	o := w.options(address)
	o.Steering = dispatch.SteeringStateless
	g := w.open(o)
	n := w.quiet(g, 2)
	w.activate(n)
	w.queue(g, w.dial(address), 0, 10)
	w.activate(w.quiet(g, 1))
	r, err := n.Drain(t.Context(), dispatch.DrainOptions{Done: closed()})
	wantRefused(t, "Drain", err, "unread", "drain generation 1", address, "keep reading until Drain returns")
	if r.Queued != 1 || r.Reason != "done" {
		t.Errorf("the report: %+v", r)
	}
	// It can drain again, with a reader.
	got := newCollect(10)
	got.read(n, func() {})
	if r, err := n.Drain(t.Context(), dispatch.DrainOptions{}); err != nil || r.Reason != "evicted" {
		t.Errorf("the second drain: %+v, %v", r, err)
	}
	w.must(n.Close())
	got.readers.Wait()
	if count := got.count.Load(); count != 10 {
		t.Errorf("%d of 10 datagrams were read", count)
	}
}

// What ends a drain, and what it leaves.
func TestEndOfADrain(t *testing.T) {
	needWorld(t)
	tool := func(w *world, g *dispatch.Group) *dispatch.Group {
		other, err := dispatch.OpenPath(g.Path())
		w.must(err)
		w.Cleanup(func() { _ = other.Close() })
		return other
	}
	for _, tc := range []struct {
		name    string
		options dispatch.DrainOptions
		// end is called while the drain waits.
		end    func(*world, *dispatch.Group)
		reason string
	}{
		{"done before it began", dispatch.DrainOptions{Done: closed()}, nil, "done"},
		{"idle", dispatch.DrainOptions{Idle: 30 * time.Millisecond}, nil, "idle"},
		{"deadline", dispatch.DrainOptions{Deadline: 30 * time.Millisecond}, nil, "deadline"},
		{"deadline, earlier than idle", dispatch.DrainOptions{Deadline: 30 * time.Millisecond, Idle: farOff}, nil, "deadline"},
		{"earlier deadline from before", dispatch.DrainOptions{Deadline: farOff}, nil, "deadline"},
		{"deadline from outside", dispatch.DrainOptions{}, func(w *world, g *dispatch.Group) {
			w.must(tool(w, g).SetDeadline(1, time.Now().Add(30*time.Millisecond)))
		}, "deadline"},
		{"deadline from outside, now", dispatch.DrainOptions{Deadline: farOff}, func(w *world, g *dispatch.Group) {
			w.must(tool(w, g).SetDeadline(1, time.Now()))
		}, "deadline"},
		{"deadline from outside, long ago", dispatch.DrainOptions{Idle: farOff}, func(w *world, g *dispatch.Group) {
			w.must(tool(w, g).SetDeadline(1, time.Unix(1, 0)))
		}, "deadline"},
		{"deadline taken away, then idle", dispatch.DrainOptions{Deadline: farOff, Idle: 400 * time.Millisecond}, func(w *world, g *dispatch.Group) {
			announced := func() bool { return !w.snapshot(g).Generations[1].Deadline.IsZero() }
			testutil.WaitFor(w, patience, announced, "the deadline is announced")
			w.must(g.SetDeadline(1, time.Time{}))
			if announced() {
				w.Error("the deadline is still there")
			}
		}, "idle"},
		{"evicted", dispatch.DrainOptions{Idle: farOff, Deadline: farOff}, func(w *world, g *dispatch.Group) {
			w.must(tool(w, g).Evict(1))
		}, "evicted"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t)
			dispatch.SetGuardEvery(t, farOff) // no tick helps
			const address = "127.0.0.1:4433"
			g := w.open(w.options(address))
			n := w.serve(g, 2)
			w.activate(n)
			c := w.client(address)
			f := w.newFlow(c, 1)
			w.activate(w.serve(g, 1))
			if strings.HasPrefix(tc.name, "earlier") {
				w.must(g.SetDeadline(1, time.Now().Add(30*time.Millisecond)))
			}
			before := w.counts(g)
			draining := drain(t.Context(), n, tc.options)
			if tc.end != nil {
				// It is under way.
				w.use(c, f)
				tc.end(w, g)
			}
			d := w.took(draining)
			if d.err != nil || d.report.Reason != tc.reason || d.report.Queued != 0 {
				t.Errorf("the drain: %+v, want reason %q", d, tc.reason)
			}
			if s := n.State(); s != dispatch.StateGone || !isClosed(n.Superseded()) {
				t.Errorf("after it: %v", s)
			}
			// The sockets are out of the map, and still open to send from.
			w.orphaned(c, f, 2)
			want := counts{"orphan": 1}
			if tc.end != nil {
				want["owner"] = 1
			}
			w.wantCounts(g, "after it", before, want)
			_, err := n.Conns()[0].WriteToUDPAddrPort([]byte("goodbye"), c.conn.LocalAddr().(*net.UDPAddr).AddrPort())
			w.must(err)
			if s := w.snapshot(g); len(s.Generations) != 1 || s.Active != 2 {
				t.Errorf("after it: %+v", s)
			}
			w.must(n.Close())
		})
	}
}

// Traffic holds an idle drain up.
func TestIdleCountsFromTheLastPacket(t *testing.T) {
	w := newWorld(t)
	const address = "127.0.0.1:4433"
	g := w.open(w.options(address))
	n := w.serve(g, 1)
	w.activate(n)
	c := w.client(address)
	f := w.newFlow(c, 1)
	w.activate(w.serve(g, 1))
	const idle = 300 * time.Millisecond
	draining := drain(t.Context(), n, dispatch.DrainOptions{Idle: idle})
	var last time.Time
	for until := time.Now().Add(2 * idle); time.Now().Before(until); {
		last = time.Now()
		w.use(c, f)
		select {
		case d := <-draining:
			if quiet := time.Since(last); quiet < idle {
				t.Fatalf("the drain ended %v after a packet: %+v", quiet, d)
			}
			return // the machine stood still meanwhile
		case <-time.After(idle / 20):
		}
	}
	d := w.took(draining)
	if quiet := time.Since(last); d.err != nil || d.report.Reason != "idle" || quiet < idle-50*time.Millisecond {
		t.Errorf("%v after the last packet: %+v", quiet, d)
	}
}

// A drain that its owner gives up leaves the generation draining.
func TestCancelledDrain(t *testing.T) {
	w := newWorld(t)
	const address = "127.0.0.1:4433"
	g := w.open(w.options(address))
	n := w.serve(g, 1)
	w.activate(n)
	c := w.client(address)
	f := w.newFlow(c, 1)
	w.activate(w.serve(g, 1))
	ctx, cancel := context.WithCancelCause(t.Context())
	draining := drain(ctx, n, dispatch.DrainOptions{Idle: farOff})
	w.use(c, f)
	cancel(errors.New("enough"))
	d := w.took(draining)
	if !errors.Is(d.err, context.Canceled) || !strings.Contains(d.err.Error(), "drain generation 1 of udp4 "+address) {
		t.Errorf("the drain: %+v", d)
	}
	if s := n.State(); s != dispatch.StateDraining {
		t.Errorf("after it: %v", s)
	}
	w.use(c, f)
	w.newFlow(c, 2)
	if r, err := n.Drain(t.Context(), dispatch.DrainOptions{Done: closed()}); err != nil || r.Reason != "done" {
		t.Errorf("the second drain: %+v, %v", r, err)
	}
	w.orphaned(c, f, 2)
}

// The end of a service, and a drain that comes at the wrong time.
func TestDrainOfTheActiveGeneration(t *testing.T) {
	w := newWorld(t)
	dispatch.SetGuardEvery(t, farOff)
	const address = "127.0.0.1:4433"
	g := w.open(w.options(address))
	first, second := w.serve(g, 1), w.serve(g, 1)
	w.activate(first)
	c := w.client(address)
	old := w.newFlow(c, 1)
	w.activate(second)
	young := w.newFlow(c, 2)

	// It was superseded and reinstated before its owner got round to draining it.
	_, err := g.Rollback()
	w.must(err)
	for _, o := range []dispatch.DrainOptions{{Done: closed()}, {Deadline: time.Nanosecond}, {Idle: time.Nanosecond}} {
		_, err := first.Drain(t.Context(), o)
		wantRefused(t, "Drain", err, "reinstated", "drain generation 1", "active again")
	}
	w.use(c, old, young)
	if s := w.snapshot(g); s.Active != 1 || !s.Generations[0].Deadline.IsZero() {
		t.Errorf("after refused drains: %+v", s)
	}

	// The successor died, and the drain is what finds out.
	third := w.serve(g, 1)
	w.activate(third)
	w.must(third.Conns()[0].Close())
	_, err = first.Drain(t.Context(), dispatch.DrainOptions{Done: closed()})
	wantRefused(t, "Drain after the successor died", err, "reinstated", "active again")
	w.use(c, old, young)
	if s := first.State(); s != dispatch.StateActive {
		t.Errorf("the first generation is %v", s)
	}

	r, err := first.Drain(t.Context(), dispatch.DrainOptions{Done: closed(), Final: true})
	if err != nil || r.Reason != "done" || second.State() != dispatch.StateActive {
		t.Errorf("the final drain: %+v, %v; the second generation is %v", r, err, second.State())
	}
	w.orphaned(c, old, 2)
	w.use(c, young)
	w.newFlow(c, 2)
	if isClosed(second.Superseded()) {
		t.Error("the reinstated generation is held to be superseded")
	}

	// The last of all.
	draining := drain(t.Context(), second, dispatch.DrainOptions{Deadline: 50 * time.Millisecond, Final: true})
	w.use(c, young)
	if d := w.took(draining); d.err != nil || d.report.Reason != "deadline" {
		t.Errorf("the last drain: %+v", d)
	}
	if s := w.snapshot(g); s.Active != 0 || len(s.Generations) != 0 {
		t.Errorf("in the end: %+v", s)
	}
	before := w.counts(g)
	if _, err := c.conn.Write([]byte("anybody?")); err != nil {
		t.Fatal(err)
	}
	w.wantCounts(g, "in the end", before, counts{"drop": 1})
}

// Nothing is lost when packets come while generations flip and leave.
func TestFlipsAndDrainsUnderConstantFire(t *testing.T) {
	testutil.Slow(t)
	w := newWorld(t)
	const address, rounds, senders, window = "127.0.0.1:4433", 50, 2, 200
	o := w.options(address)
	o.Steering, o.ReceiveBuffer = dispatch.SteeringStateless, 8<<20
	g := w.open(o)
	got := newCollect(1 << 24)
	begin := func() *dispatch.Generation {
		n := w.quiet(g, 2)
		got.read(n, func() {})
		w.activate(n)
		return n
	}
	n := begin()

	var sent, serial atomic.Int64
	stop := make(chan struct{})
	var fire sync.WaitGroup
	for range senders {
		c := w.dial(address)
		fire.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				// More than this would be lost in a CPU's backlog.
				if sent.Load()-got.count.Load() > window {
					time.Sleep(50 * time.Microsecond)
					continue
				}
				if _, err := c.Write(binary.BigEndian.AppendUint64(nil, uint64(serial.Add(1)-1))); err != nil {
					t.Error(err)
					return
				}
				sent.Add(1)
			}
		})
	}
	for range rounds {
		next := begin()
		r, err := n.Drain(t.Context(), dispatch.DrainOptions{Done: closed(), Grace: time.Millisecond})
		if err != nil || r.Reason != "done" {
			t.Errorf("drain: %+v, %v", r, err)
		}
		w.must(n.Close())
		n = next
	}
	close(stop)
	fire.Wait()
	deadline := time.Now().Add(patience)
	for got.count.Load() < sent.Load() && time.Now().Before(deadline) {
		time.Sleep(time.Millisecond)
	}
	if count, twice := got.count.Load(), got.twice.Load(); count != sent.Load() || twice != 0 || count < rounds {
		t.Errorf("%d of %d datagrams came, %d twice", count, sent.Load(), twice)
	}
	w.wantCounts(g, "fire", nil, counts{"new": uint64(sent.Load())})
	w.must(n.Close())
	got.readers.Wait()
	t.Log(fmt.Sprint(sent.Load(), " datagrams in ", rounds, " upgrades"))
}
