// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"instar/dispatch/connid"
	"instar/internal/testutil"
)

// longEnv in the environment makes the hostile test send ten million packets.
const longEnv = "INSTAR_TEST_LONG"

// TestHostile sends random and mutated packets through sockets. All that is
// counted is what the codec makes of them; no socket is there for the purely
// random ones; the kernel has nothing to complain about.
func TestHostile(t *testing.T) {
	packets := testutil.UnlessShort(300_000, 10000)
	if os.Getenv(longEnv) == "1" {
		packets = 10_000_000
	}
	ns := testutil.NetNS(t)
	g := newGroup(t, quicConfig, loopback6)
	log := openKernelLog(t)
	for _, half := range []struct {
		name   string
		host   netip.Addr
		random bool
	}{{"random", loopback6, true}, {"mutated", loopback4, false}} {
		t.Run(half.name, func(t *testing.T) {
			ns.Run(func() {
				g.reset(t, half.host)
				g.world()
				for _, fd := range g.sockets {
					// What overflows the queues is of no interest here.
					if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 0); err != nil {
						t.Fatal(err)
					}
				}
				sendHostile(t, g, packets/2, half.random)
			})
		})
	}
	t.Run("kernel log", func(t *testing.T) {
		lines, err := log.complaints()
		if err != nil {
			testutil.Skip(t, "cannot read the kernel log: %v", err)
		}
		for _, line := range lines {
			t.Error(line)
		}
	})
}

func sendHostile(t *testing.T, g *group, packets int, random bool) {
	m := newMutator(t, g.random, g.codec)
	m.numbers = [MaxSlots]uint32{}
	for i, s := range g.control.Slots {
		m.numbers[i] = s.Number
	}
	// Mostly the sockets that there are, or nearly so.
	m.handle = func() connid.Handle {
		if m.IntN(8) == 0 {
			return connid.Handle(m.Uint32())
		}
		return connid.MakeHandle(uint8(m.IntN(8)), uint8(m.IntN(workersOfEach+1)))
	}
	generation := func(h connid.Handle) uint32 {
		if int(h.Worker()) >= g.config.MaxWorkers {
			return 0
		}
		return g.control.Slots[h.Slot()].Number
	}
	large := m.octets(20000)
	var want counts
	handshakes, ours := uint64(0), uint64(0)
	before := g.counted()
	b := g.newBurst()
	err := b.sendAll(packets, func(i int) []byte {
		var d []byte
		if random {
			d = m.noise()
		} else {
			d = m.datagram()
		}
		if i%1000 == 0 {
			d = append(d, large...) // does not fit into the linear part
		}
		class := g.codec.Classify(d, generation)
		_, lives := g.sockets[class.Handle]
		if class.Kind == connid.KindOurs {
			ours++
		}
		switch {
		case class.Kind == connid.KindOurs && lives:
			want.verdicts[VerdictOwner]++
			want.slots[class.Handle.Slot()]++
			return d
		case class.Long:
			handshakes++
		case class.Kind == connid.KindOurs:
			want.verdicts[VerdictOrphan]++
		case class.Kind == connid.KindForeignShort:
			want.verdicts[VerdictUnknown]++
		default:
			want.verdicts[VerdictInvalid]++
		}
		want.slots[slotActive]++
		return d
	})
	if err != nil {
		t.Fatal(err)
	}
	got := g.counted().minus(before)
	// Whether a handshake is new depends on what the flow table still holds.
	want.verdicts[VerdictNew] = got.verdicts[VerdictNew]
	want.verdicts[VerdictKnown] = handshakes - got.verdicts[VerdictNew]
	if got != want {
		t.Errorf("counted %q, want %q", got, want)
	}
	if got.total() != uint64(packets) {
		t.Errorf("counted %d packets, sent %d", got.total(), packets)
	}
	if random && ours != 0 || !random && want.verdicts[VerdictOwner] == 0 {
		t.Errorf("%d of %d packets have an ID of ours", ours, packets)
	}
	t.Logf("%d packets: %v", packets, got)
	if n, _, err := unix.Recvfrom(g.bystander, make([]byte, 1), unix.MSG_DONTWAIT); !errors.Is(err, unix.EAGAIN) {
		t.Errorf("a socket that is not registered got %d bytes, %v", n, err)
	}
}

// kernelLog is /dev/kmsg from the time when it was opened.
type kernelLog struct {
	fd  int
	err error
}

func openKernelLog(t *testing.T) kernelLog {
	fd, err := unix.Open("/dev/kmsg", unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return kernelLog{err: err}
	}
	t.Cleanup(func() {
		if err := unix.Close(fd); err != nil {
			t.Error(err)
		}
	})
	_, err = unix.Seek(fd, 0, io.SeekEnd)
	return kernelLog{fd, err}
}

var complaint = regexp.MustCompile(`\b(WARNING|BUG|Oops|RIP|Call Trace|general protection fault|KASAN|UBSAN)\b|rcu.*stall|soft lockup`)

// complaints are the lines since then that tell of a fault of the kernel.
func (l kernelLog) complaints() (lines []string, err error) {
	if l.err != nil {
		return nil, l.err
	}
	buf := make([]byte, 1<<13)
	for {
		n, err := unix.Read(l.fd, buf)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return lines, nil
		case errors.Is(err, unix.EPIPE): // overwritten before it was read
			lines = append(lines, "records of the kernel log were lost")
			continue
		case err != nil:
			return lines, fmt.Errorf("read: %w", err)
		}
		// priority,sequence,time,flags;text, and lines of details
		_, text, _ := strings.Cut(string(buf[:n]), ";")
		text, _, _ = strings.Cut(text, "\n")
		if complaint.MatchString(text) {
			lines = append(lines, text)
		}
	}
}

func TestComplaints(t *testing.T) {
	for text, want := range map[string]bool{
		"WARNING: CPU: 0 PID: 1 at net/core/filter.c:1 bpf_sk_select_reuseport": true,
		"BUG: kernel NULL pointer dereference, address: 0000000000000000":       true,
		"Oops: 0002 [#1] SMP":                                    true,
		"rcu: INFO: rcu_preempt self-detected stall on CPU":      true,
		"watchdog: BUG: soft lockup - CPU#0 stuck for 22s!":      true,
		"EXT4-fs (vda): mounted filesystem":                      false,
		"veth0: renamed from one":                                false,
		"process 'x' launched '/dev/fd/3' with NULL argv: DEBUG": false,
	} {
		if got := complaint.MatchString(text); got != want {
			t.Errorf("%q: %v, want %v", text, got, want)
		}
	}
}
