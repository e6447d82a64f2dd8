// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"instar/dispatch/connid"
	"instar/internal/testutil"
)

// setMTU changes lo of the namespace of the calling goroutine.
func setMTU(t *testing.T, mtu uint32) {
	t.Helper()
	fd := openSocket(t, loopback4)
	defer func() { _ = unix.Close(fd) }()
	lo, err := unix.NewIfreq("lo")
	if err != nil {
		t.Fatal(err)
	}
	lo.SetUint32(mtu)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFMTU, lo); err != nil {
		t.Fatalf("set MTU of lo to %d: %v", mtu, err)
	}
}

// sendFragments sends an IPv4 datagram cut at the given offsets of its UDP
// packet, multiples of eight.
func (g *group) sendFragments(datagram []byte, cuts ...int) {
	g.t.Helper()
	raw, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	if err != nil {
		g.t.Fatal(err)
	}
	defer func() { _ = unix.Close(raw) }()
	udp := make([]byte, 8, 8+len(datagram))
	binary.BigEndian.PutUint16(udp, 4444)
	binary.BigEndian.PutUint16(udp[2:], g.address.Port())
	binary.BigEndian.PutUint16(udp[4:], uint16(8+len(datagram)))
	udp = append(udp, datagram...)
	cuts = append(cuts, len(udp))
	from := 0
	for i, to := range cuts {
		ip := make([]byte, 20, 20+to-from)
		ip[0], ip[8], ip[9] = 0x45, 64, unix.IPPROTO_UDP
		binary.BigEndian.PutUint16(ip[4:], 77) // the kernel fills in lengths and checksum
		offset := uint16(from / 8)
		if i < len(cuts)-1 {
			offset |= 1 << 13 // more fragments
		}
		binary.BigEndian.PutUint16(ip[6:], offset)
		copy(ip[12:], g.address.Addr().AsSlice())
		copy(ip[16:], g.address.Addr().AsSlice())
		sendTo(g.t, raw, netip.AddrPortFrom(g.address.Addr(), 0), append(ip, udp[from:to]...))
		from = to
	}
}

// TestNonLinear steers packets whose payload a program cannot read in place, or
// not all of it: by the same rules.
func TestNonLinear(t *testing.T) {
	const defaultMTU = 65536
	ns := testutil.NetNS(t)
	g := newGroup(t, quicConfig, loopback4)

	// What such a packet looks like to a program is asked of another one.
	spec, err := loadClassify()
	if err != nil {
		t.Fatal(err)
	}
	probe := load(t, spec, ebpf.CollectionOptions{})
	extent := mapped[classifyInstarExtent](t, probe.Maps[".data.extent"])
	attach := func(program *ebpf.Program) {
		t.Helper()
		if err := unix.SetsockoptInt(g.bystander, unix.SOL_SOCKET, unix.SO_ATTACH_REUSEPORT_EBPF, program.FD()); err != nil {
			t.Fatal(err)
		}
	}

	whole := func(g *group, datagram []byte) { g.send(datagram) }
	for _, tc := range []struct {
		name   string
		hosts  []netip.Addr
		mtu    uint32
		length int
		send   func(*group, []byte)
		linear func(n uint32) bool // octets from the UDP header
	}{
		{"paged", []netip.Addr{loopback4, loopback6}, defaultMTU, 60000, whole,
			func(n uint32) bool { return n < 100 }}, // 8 by now; Linux 5.10 has a little more
		{"reassembled from large fragments", []netip.Addr{loopback4, loopback6}, 1280, 20000, whole,
			func(n uint32) bool { return n > 1000 && n < 1280 }},
		{"reassembled after a bare UDP header", []netip.Addr{loopback4}, defaultMTU, 3000,
			func(g *group, d []byte) { g.sendFragments(d, 8) },
			func(n uint32) bool { return n == 8 }},
		{"reassembled, cut within the connection ID", []netip.Addr{loopback4}, defaultMTU, 3000,
			func(g *group, d []byte) { g.sendFragments(d, 16) },
			func(n uint32) bool { return n == 16 }},
		{"reassembled, short, cut within the connection ID", []netip.Addr{loopback4}, defaultMTU, 30,
			func(g *group, d []byte) { g.sendFragments(d, 16, 24) },
			func(n uint32) bool { return n < 40 }},
	} {
		for _, host := range tc.hosts {
			t.Run(fmt.Sprint(tc.name, " ", host), func(t *testing.T) {
				ns.Run(func() {
					setMTU(t, tc.mtu)
					defer setMTU(t, defaultMTU)
					g.reset(t, host)
					g.world()

					attach(probe.Programs[classifyProgLinear])
					*extent = classifyInstarExtent{}
					tc.send(g, make([]byte, tc.length))
					testutil.WaitFor(t, patience, func() bool { return extent.Total != 0 }, "the packet")
					if int(extent.Total) != 8+tc.length || !tc.linear(extent.Linear) {
						t.Errorf("a program sees %d of %d octets: the packet is not what the test is about", extent.Linear, extent.Total)
					}
					// This program chooses nobody, so anyone may have the packet.
					drainOne(t, g)
					attach(g.program)

					steer := func(what string, head []byte, socket, counted string) string {
						t.Helper()
						datagram := slices.Concat(head, g.random.octets(tc.length-len(head)))
						before := g.counted()
						tc.send(g, datagram)
						got, gotCounted := g.arrived(datagram, before)
						if !matches(got, socket) || gotCounted != counted {
							t.Errorf("%s: went to %s and counted %q, want %s and %q", what, got, gotCounted, socket, counted)
						}
						return got
					}
					steer("owner, short header", shortHeader(g.id(slotDraining, 2)), "3/2", "owner=1 slot3=1")
					steer("owner, long header", longHeader(version1, g.id(slotDraining, 1)), "3/1", "owner=1 slot3=1")
					steer("unknown", shortHeader(g.random.octets(14)), "1/*", "unknown=1 slot1=1")
					dcid := g.random.octets(20)
					first := connid.MakeHandle(slotActive, g.share(dcid, workersOfEach)).String()
					steer("Initial", longHeader(version1, dcid), first, "new=1 slot1=1")
					g.wantSteered("Initial, repeated as a small packet", longHeader(version1, dcid), first, "known=1 slot1=1")
					steer("invalid", append(longHeader(version1, nil)[:5], 255), "1/*", map[bool]string{
						true:  "new=1 slot1=1", // there are as many octets as its header claims
						false: "invalid=1 slot1=1",
					}[tc.length >= 6+255])
				})
			})
		}
	}
}

// drainOne takes one datagram from whichever member of the group has it.
func drainOne(t *testing.T, g *group) {
	t.Helper()
	buf := make([]byte, 1<<16)
	testutil.WaitFor(t, patience, func() bool {
		fds := []int{g.bystander}
		for _, fd := range g.sockets {
			fds = append(fds, fd)
		}
		for _, fd := range fds {
			if _, _, err := unix.Recvfrom(fd, buf, unix.MSG_DONTWAIT); err == nil {
				return true
			}
		}
		return false
	}, "the packet to be received")
}
