// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"fmt"
	"runtime"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"instar/dispatch/connid"
	"instar/internal/testutil"
)

// newFlipper is a group with two generations, and the words that make the one
// or the other active.
func newFlipper(t *testing.T, c Config) (g *group, words [2]uint64) {
	t.Helper()
	testutil.NetNS(t)
	g = newGroup(t, c, loopback4)
	g.join(1, 11, 2)
	g.join(2, 12, 3)
	g.setOrder(0, []uint8{1, 2}, nil)
	g.setOrder(1, []uint8{2, 1}, nil)
	words = [2]uint64{g.word(1, 0), g.word(2, 1)}
	g.activate(words[0])
	return g, words
}

// TestFlipUnderTraffic stores control.active 10,000 times while handshakes come
// in at full speed: each of them gets to one of the two generations.
func TestFlipUnderTraffic(t *testing.T) {
	needBPF(t)
	const atMost = 1_000_000
	flips := uint64(testutil.UnlessShort(10_000, 1000))
	for _, steering := range []uint32{SteeringQUIC, SteeringStateless} {
		t.Run(fmt.Sprint("steering ", steering), func(t *testing.T) {
			g, words := newFlipper(t, configOf(steering))
			before := g.counted()
			var sent atomic.Uint64
			var done atomic.Bool
			failed := make(chan error, 1)
			go func() {
				defer close(failed)
				to := sockaddr(g.address)
				datagram := longHeader(version1, make([]byte, 8))
				for i := uint64(1); !done.Load() && i <= atMost; i++ {
					token(datagram, int(i))
					if err := unix.Sendto(g.client, datagram, 0, to); err != nil {
						failed <- err
						return
					}
					sent.Store(i)
					for i%window == 0 {
						counted, err := g.count()
						if err != nil {
							failed <- err
							return
						}
						if counted.total()-before.total()+window/2 >= i {
							break
						}
					}
				}
			}()
			// Two packets or more between two flips: each one is about to be
			// sent, or steered, while another is stored.
			for i := range flips {
				for sent.Load() < 2*i && sent.Load() < atMost {
					select {
					case err := <-failed:
						t.Fatal(err)
					default:
						runtime.Gosched()
					}
				}
				atomic.StoreUint64(&g.control.Active, words[(i+1)%2])
			}
			done.Store(true)
			if err := <-failed; err != nil {
				t.Fatal(err)
			}
			n := sent.Load()
			if n < 2*(flips-1) || n == atMost {
				t.Fatalf("%d packets in %d flips", n, flips)
			}
			g.waitCounted(before.total() + n)
			var slots counts
			for _, r := range g.receive(int(n)) {
				slots.slots[r.by.Slot()]++
			}
			slots.verdicts[VerdictNew] = n
			if got := g.counted().minus(before); got != slots {
				t.Errorf("counted %q, received %q", got, slots)
			}
			// Where there is one CPU, time slices decide how many.
			least := n / uint64(testutil.UnlessShort(10, 100))
			if slots.slots[1] < least || slots.slots[2] < least {
				t.Errorf("%q: the flips were not among the packets", slots)
			}
			t.Log(n, "packets:", slots)
		})
	}
}

// TestHandshakeOnTwoCPUs sends both packets of each handshake at the same time
// while the active generation changes: they stay together.
func TestHandshakeOnTwoCPUs(t *testing.T) {
	const senders = 2
	handshakes := testutil.UnlessShort(5000, 500)
	c := quicConfig
	c.FlowEntries = 1 << 16 // nothing is pushed out
	g, words := newFlipper(t, c)
	var step atomic.Int64
	failed := make(chan error, senders)
	clients := [senders]int{g.client}
	for i := 1; i < senders; i++ {
		clients[i] = openSocket(t, loopback4)
		defer func() { _ = unix.Close(clients[i]) }()
	}
	for s := range senders {
		go func() {
			to := sockaddr(g.address)
			for i := range handshakes {
				// Everyone waits here for the others.
				step.Add(1)
				for step.Load() < int64(i+1)*senders {
					runtime.Gosched()
				}
				datagram := token(longHeader(version1, make([]byte, 8)), i)
				if err := unix.Sendto(clients[s], datagram, 0, to); err != nil {
					step.Store(1 << 60)
					failed <- err
					return
				}
			}
			failed <- nil
		}()
	}
	for i := 0; step.Load() < int64(handshakes*senders); i++ {
		atomic.StoreUint64(&g.control.Active, words[i%2])
		runtime.Gosched()
	}
	for range senders {
		if err := <-failed; err != nil {
			t.Fatal(err)
		}
	}
	by := make(map[int]connid.Handle)
	split := 0
	var slots counts
	for _, r := range g.receive(handshakes * senders) {
		i := tokenOf(r.datagram)
		if other, ok := by[i]; ok && other != r.by {
			split++
		}
		by[i] = r.by
		slots.slots[r.by.Slot()]++
	}
	if split != 0 {
		t.Errorf("%d of %d handshakes were split", split, handshakes)
	}
	slots.verdicts[VerdictNew], slots.verdicts[VerdictKnown] = uint64(handshakes), uint64(handshakes*(senders-1))
	if got := g.counted(); got != slots {
		t.Errorf("counted %q, want %q", got, slots)
	}
}
