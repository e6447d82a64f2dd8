// SPDX-License-Identifier: Apache-2.0

package dispatch_test

import (
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"instar/dispatch"
	"instar/internal/rawconn"
	"instar/internal/testutil"
)

// flood is as many packets to a generation as its receive queues have room for.
type flood struct {
	w              *world
	sent, received atomic.Int64
	stop           chan struct{}
	senders        sync.WaitGroup
}

// floodSenders times floodBurst fit in the receive queue of one socket.
const (
	floodSenders = 2
	floodBurst   = 50
)

func (w *world) flood(address string, n *dispatch.Generation) *flood {
	w.Helper()
	f := &flood{w: w, stop: make(chan struct{})}
	var readers sync.WaitGroup
	for _, conn := range n.Conns() {
		readers.Go(func() {
			for b := make([]byte, 64); ; {
				if _, err := conn.Read(b); err != nil {
					return
				}
				f.received.Add(1)
			}
		})
	}
	w.Cleanup(func() {
		if err := n.Close(); err != nil {
			w.Error(err)
		}
		readers.Wait()
	})
	for range floodSenders {
		c := w.dial(address)
		f.senders.Go(func() { f.send(c) })
	}
	return f
}

func (f *flood) send(c *net.UDPConn) {
	for {
		select {
		case <-f.stop:
			return
		default:
		}
		for range floodBurst {
			if _, err := c.Write([]byte("question")); err != nil {
				f.w.Error(err)
				return
			}
			f.sent.Add(1)
		}
		for deadline := time.Now().Add(time.Second); f.lost() > floodBurst && time.Now().Before(deadline); {
			time.Sleep(50 * time.Microsecond)
		}
	}
}

// lost is how many were not received (yet).
func (f *flood) lost() int64 { return f.sent.Load() - f.received.Load() }

// lossless ends the flood, of which nothing may be lost.
func (f *flood) lossless() {
	f.w.Helper()
	close(f.stop)
	f.senders.Wait()
	for deadline := time.Now().Add(patience); f.lost() > 0 && time.Now().Before(deadline); {
		time.Sleep(time.Millisecond)
	}
	if f.lost() != 0 {
		f.w.Errorf("%d of %d packets were lost", f.lost(), f.sent.Load())
	}
	f.w.Logf("%d packets", f.sent.Load())
}

// workerPerCPU is a generation that has a socket for each CPU that senders run on.
func (w *world) workerPerCPU(o dispatch.Options) (*dispatch.Group, *dispatch.Generation) {
	w.Helper()
	if runtime.NumCPU() > dispatch.LimitWorkers {
		w.Skipf("a generation cannot have a socket for each of %d CPUs", runtime.NumCPU())
	}
	o.Steering = dispatch.SteeringStateless
	o.Workers = dispatch.LimitWorkers
	g := w.open(o)
	n := w.join(g, runtime.NumCPU())
	w.activate(n)
	return g, n
}

// Sockets that leave the address, a generation's and the one through which a program is
// attached, take no packet with them, whatever their place in the kernel's hash chain
// (B3, I11). Without closeSockets one in fifty of them does.
func TestLeavingSocketsLoseNothing(t *testing.T) {
	testutil.Slow(t)
	needWorld(t)
	for _, address := range []string{"127.0.0.1:4433", "[::1]:4433"} {
		t.Run(address, func(t *testing.T) {
			w := newWorld(t)
			g, active := w.workerPerCPU(w.options(address))
			f := w.flood(address, active)
			for range 150 {
				n := w.join(g, 1)
				w.must(n.Close())
				g.SetProgramBuild("another")
				if _, err := g.UpgradeProgram(); err != nil {
					t.Fatal(err)
				}
			}
			f.lossless()
		})
	}
}

// Where every CPU is preferred by a worker not even a socket that just closes takes a
// packet along; without that, one in a hundred does. A hidden one has the same window, so
// much shorter that this test would not see it.
func TestClosedSocketOnPreferredCPUsLosesNothing(t *testing.T) {
	needWorld(t)
	w := newWorld(t)
	const address = "127.0.0.1:4433"
	_, active := w.workerPerCPU(w.options(address))
	f := w.flood(address, active)
	for range testutil.UnlessShort(20_000, 200) {
		c, err := plainSocket("udp4", address, "", true)
		w.must(err)
		w.must(c.Close())
	}
	f.lossless()
}

// Who leaves gives the preference up first: a closing socket that has it is as good a
// match as those that stay.
func TestWorkersPreferCPUs(t *testing.T) {
	w := newWorld(t)
	g := w.open(w.options("127.0.0.1:4433"))
	n := w.join(g, 3)
	seen := map[int]bool{}
	for worker, conn := range n.Conns() {
		w.must(rawconn.Of(conn, func(fd int) error {
			cpu, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_INCOMING_CPU)
			if cpu < 0 || seen[cpu] {
				t.Errorf("worker %d prefers CPU %d", worker, cpu)
			}
			seen[cpu] = true
			return err
		}))
	}
}
