// SPDX-License-Identifier: Apache-2.0

package dispatch_test

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"instar/dispatch"
	"instar/internal/rawconn"
	"instar/internal/testutil"
)

// forger sends UDP packets with senders of its own invention, from 127.64.0.0/10.
type forger struct {
	w   *world
	fd  int
	to  unix.RawSockaddrInet4
	rng *rand.PCG
}

const forgedBatch = 64

func (w *world) forger(target netip.AddrPort) *forger {
	w.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	w.must(err)
	w.Cleanup(func() { _ = unix.Close(fd) })
	port := target.Port()
	return &forger{w: w, fd: fd, rng: rand.NewPCG(rand.Uint64(), rand.Uint64()),
		to: unix.RawSockaddrInet4{Family: unix.AF_INET, Port: port<<8 | port>>8, Addr: target.Addr().As4()}}
}

// mmsghdr is struct mmsghdr (sendmmsg(2)).
type mmsghdr struct {
	unix.Msghdr
	length uint32
	_      [4]byte
}

// send sends so many packets, a multiple of forgedBatch.
func (f *forger) send(n int) {
	f.w.Helper()
	var packets [forgedBatch][28 + 9]byte
	var vectors [forgedBatch]unix.Iovec
	var messages [forgedBatch]mmsghdr
	for i := range packets {
		p := packets[i][:]
		p[0], p[8], p[9] = 0x45, 64, unix.IPPROTO_UDP // the kernel fills in length and checksum
		copy(p[16:], f.to.Addr[:])
		binary.NativeEndian.PutUint16(p[22:], f.to.Port)
		binary.BigEndian.PutUint16(p[24:], uint16(len(p)-20))
		vectors[i].Base = &p[0]
		vectors[i].SetLen(len(p))
		messages[i].Name = (*byte)(unsafe.Pointer(&f.to))
		messages[i].Namelen = unix.SizeofSockaddrInet4
		messages[i].Iov = &vectors[i]
		messages[i].SetIovlen(1)
	}
	for sent := 0; sent < n; {
		for i := range packets {
			r := f.rng.Uint64()
			p := packets[i][:]
			p[12], p[13] = 127, 64|byte(r)&63
			binary.BigEndian.PutUint16(p[14:], uint16(r>>16))
			binary.BigEndian.PutUint16(p[20:], uint16(r>>32)|1)
		}
		for done := 0; done < forgedBatch; {
			got, _, errno := unix.Syscall6(unix.SYS_SENDMMSG, uintptr(f.fd), uintptr(unsafe.Pointer(&messages[done])),
				uintptr(forgedBatch-done), 0, 0, 0)
			if errno != 0 && !errors.Is(errno, unix.EINTR) {
				f.w.Fatal(os.NewSyscallError("sendmmsg", errno))
			}
			done += int(got)
		}
		sent += forgedBatch
	}
}

// quietened returns once a generation has read all that it got.
func (w *world) quietened(n *dispatch.Generation) {
	w.Helper()
	testutil.WaitFor(w, patience, func() bool {
		for _, c := range n.Conns() {
			queued := 0
			w.must(rawconn.Of(c, func(fd int) (err error) {
				queued, err = unix.IoctlGetInt(fd, unix.SIOCINQ)
				return err
			}))
			if queued > 0 {
				return false
			}
		}
		return true
	}, "empty queues")
}

// A flood of forged senders, of whom no two are alike. Flows that the server assured stay
// where they are, and nothing is remembered of the flood. Where a flow is remembered with
// its first packet the flood pushes others out, which is counted: those that have sent no second
// packet, as the kernel takes what was used again for the last.
func TestForgedSenders(t *testing.T) {
	needWorld(t)
	flood := 256 * 1024
	if os.Getenv("INSTAR_TEST_LONG") == "1" {
		flood = 10_000_000
	}
	if testing.Short() {
		flood = 32 * 1024
	}
	flood -= flood % forgedBatch
	const entries = 4096
	for _, learning := range []dispatch.Learning{dispatch.LearnAssured, dispatch.LearnReceived} {
		t.Run(learning.String(), func(t *testing.T) {
			w := newWorld(t)
			o := w.flowOptions("127.0.0.1:4433")
			o.FlowLearning, o.FlowEntries, o.FlowTimeout = learning, entries, time.Hour
			g := w.open(o)
			one := w.serve(g, 2)
			w.activate(one)
			confirmed := w.client("127.0.0.1:4433")
			w.wantAnswer(confirmed, 1)
			if learning == dispatch.LearnAssured {
				w.must(one.Assure(0, confirmed.peer()))
			}
			var short []*client // flows of one packet
			for range 64 {
				c := w.client("127.0.0.1:4433")
				w.wantAnswer(c, 1)
				short = append(short, c)
			}
			two := w.serve(g, 2)
			w.activate(two)
			w.wantAnswer(confirmed, 1)
			before := w.counts(g)

			began := time.Now()
			w.forger(netip.MustParseAddrPort("127.0.0.1:4433")).send(flood)
			t.Logf("%d packets, %.0f/s", flood, float64(flood)/time.Since(began).Seconds())
			w.quietened(two)
			got := w.counts(g)
			c := w.flowCounts(g)
			if learning == dispatch.LearnAssured {
				if n := got["new"] - before["new"]; n != uint64(flood) || got["known"] != before["known"] {
					t.Errorf("%d packets of the flood were new (%v), want %d", n, got, flood)
				}
				if c.Live[1] != 1 || c.Live[2] != 0 || c.Evicted != 0 {
					t.Errorf("after the flood: %+v", c)
				}
				w.wantAnswer(confirmed, 1)
				return
			}
			// Senders repeat themselves by chance.
			fresh, again := got["new"]-before["new"], got["known"]-before["known"]
			if fresh+again != uint64(flood) || again > fresh/100 {
				t.Errorf("of %d packets %d were new and %d known", flood, fresh, again)
			}
			// One entry of the confirmed flow, one of each short one, and one for each that is new.
			present, all := uint64(c.Live[1]+c.Live[2]+c.Ended), uint64(1+len(short))+fresh
			if c.Evicted != all-present || present > entries || present < entries/2 {
				t.Errorf("%d were evicted and %d are there, of %d", c.Evicted, present, all)
			}
			lost := 0
			for _, c := range short {
				by, err := c.plain()
				w.must(err)
				if by != 1 {
					lost++
				}
			}
			if lost < len(short)/2 {
				t.Errorf("of %d flows %d were lost: nothing is shown", len(short), lost)
			}
			by, err := confirmed.plain()
			w.must(err)
			t.Logf("lost were %d of %d flows of one packet; generation %d answered the one of several", lost, len(short), by)
		})
	}
}

// A1, B1: a hundred generations in a row while flows of all ages go on: each stays where it
// began, and each packet is counted as what it was.
func TestFlowsUnderLoad(t *testing.T) {
	w := newWorld(t)
	o := w.flowOptions("127.0.0.1:4433")
	o.MaxGenerations = 128
	g := w.open(o)
	generations, loads, each := 100, 8, int64(40)
	if testing.Short() {
		generations = 16
	}
	var (
		clients sync.WaitGroup
		stop    = make(chan struct{})
		asked   atomic.Int64
		mu      sync.Mutex
		failed  []error
	)
	keep := func(c *client, gen uint32) {
		clients.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				by, err := c.plain()
				asked.Add(1)
				if err != nil || by != gen {
					mu.Lock()
					failed = append(failed, errors.Join(err, errors.New("a flow changed its generation")))
					mu.Unlock()
					return
				}
			}
		})
	}
	fresh := uint64(0)
	began := time.Now()
	for i := range generations {
		n := w.serve(g, 2)
		w.activate(n)
		for range 2 {
			c := w.client("127.0.0.1:4433")
			w.wantAnswer(c, n.Number())
			fresh++
			if i%(generations/loads) == 0 {
				keep(c, n.Number())
			}
		}
		for goal := asked.Load() + each; asked.Load() < goal && !t.Failed(); {
			mu.Lock()
			if len(failed) > 0 {
				t.Errorf("after %d generations: %v", i+1, failed)
			}
			mu.Unlock()
			time.Sleep(100 * time.Microsecond)
		}
	}
	rate := float64(asked.Load()) / time.Since(began).Seconds()
	close(stop)
	clients.Wait()
	if len(failed) > 0 {
		t.Error(failed)
	}
	w.wantCounts(g, "in all", nil, counts{"new": fresh, "known": uint64(asked.Load())})
	if c := w.flowCounts(g); len(c.Live) != generations || c.Evicted != 0 || c.Ended != 0 {
		t.Errorf("%+v", c)
	}
	t.Logf("%d generations, %d packets of old flows, %.0f/s", generations, asked.Load(), rate)
}
