// SPDX-License-Identifier: Apache-2.0

package wgbind

import (
	"bytes"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/conn"

	"instar/internal/rawconn"
	"instar/internal/testutil"
)

var discard = slog.New(slog.DiscardHandler)

// listen makes a socket, alone at its address.
func listen(t *testing.T, network, address string) *net.UDPConn {
	t.Helper()
	c, err := net.ListenPacket(network, address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	if err := c.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	return c.(*net.UDPConn)
}

func wrap(t *testing.T, c *net.UDPConn, o Options) *socket {
	t.Helper()
	s, err := newSocket(c, o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func to(c net.PacketConn) *endpoint {
	return &endpoint{dst: unmap(c.LocalAddr().(*net.UDPAddr).AddrPort())}
}

// batch is packets of the lengths.
func batch(lengths ...int) (all [][]byte) {
	for i, n := range lengths {
		all = append(all, bytes.Repeat([]byte{byte('a' + i)}, n))
	}
	return all
}

// The kernel segments what is sent, and joins what is received: several packets take one
// call.
func TestOffload(t *testing.T) {
	for _, tc := range []struct{ network, address string }{{"udp4", "127.0.0.1:0"}, {"udp6", "[::1]:0"}} {
		t.Run(tc.network, func(t *testing.T) {
			testutil.NetNS(t)
			sender := wrap(t, listen(t, tc.network, tc.address), Options{})
			if !sender.gso.Load() {
				t.Fatal("no segmentation offload, which the kernel has since 4.18")
			}
			packets := batch(1000, 1000, 1000, 1000, 400)

			// One datagram for who can take it.
			raw := listen(t, tc.network, tc.address)
			err := rawconn.Of(raw, func(fd int) error {
				return os.NewSyscallError("setsockopt UDP_GRO", unix.SetsockoptInt(fd, unix.IPPROTO_UDP, unix.UDP_GRO, 1))
			})
			if err != nil {
				t.Fatal(err)
			}
			if err := sender.send(packets, to(raw), discard); err != nil {
				t.Fatal(err)
			}
			b := make([]byte, maxDatagram)
			n, err := raw.Read(b)
			if err != nil || !bytes.Equal(b[:n], bytes.Join(packets, nil)) {
				t.Fatalf("%d bytes, %v; want 4400 at once", n, err)
			}

			// Five for the device, of one call, whose rest stays for the next one.
			receiver := wrap(t, listen(t, tc.network, tc.address), Options{})
			if err := sender.send(packets, to(receiver.conn), discard); err != nil {
				t.Fatal(err)
			}
			bufs, sizes, endpoints := [][]byte{make([]byte, 2000), make([]byte, 2000)}, make([]int, 2), make([]conn.Endpoint, 2)
			var got [][]byte
			for _, want := range []int{2, 2, 1} {
				n, err := receiver.receive(&opening{}, bufs, sizes, endpoints)
				if err != nil || n != want || receiver.read != 1 {
					t.Fatalf("%d packets of %d messages, %v; want %d of 1", n, receiver.read, err, want)
				}
				for i := range n {
					got = append(got, bytes.Clone(bufs[i][:sizes[i]]))
				}
			}
			if !slices.EqualFunc(got, packets, bytes.Equal) {
				t.Errorf("%q", got)
			}

			// Without: as they are.
			plain := wrap(t, listen(t, tc.network, tc.address), Options{NoReceiveOffload: true, NoSendOffload: true})
			if err := plain.send(packets, to(plain.conn), discard); err != nil {
				t.Fatal(err)
			}
			if n, err := plain.receive(&opening{}, bufs, sizes, endpoints); err != nil || n != 2 || plain.read < 2 {
				t.Errorf("%d packets of %d messages, %v", n, plain.read, err)
			}
		})
	}
}

// Packets longer than the MTU are not segmented by the kernel; they go as fragments.
func TestLongerThanMTU(t *testing.T) {
	testutil.NetNS(t)
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetMTU(lo, 1300); err != nil {
		t.Fatal(err)
	}
	sender, receiver := wrap(t, listen(t, "udp4", "127.0.0.1:0"), Options{}), listen(t, "udp4", "127.0.0.1:0")
	packets := batch(1400, 1400, 1400, 100)
	if err := sender.send(packets, to(receiver), discard); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 2000)
	for i, want := range packets {
		n, err := receiver.Read(b)
		if err != nil || !bytes.Equal(b[:n], want) {
			t.Fatalf("packet %d: %d bytes, %v", i, n, err)
		}
	}
	if !sender.gso.Load() {
		t.Error("segmentation offload given up for a path")
	}
}

// A source address that is not, or no more, of this machine is given up.
func TestForeignSource(t *testing.T) {
	testutil.NetNS(t)
	for _, tc := range []struct{ network, address, src string }{
		{"udp4", "127.0.0.1:0", "192.0.2.1"}, {"udp6", "[::1]:0", "2001:db8::1"}, {"udp", "[::]:0", "192.0.2.1"},
	} {
		sender, receiver := wrap(t, listen(t, tc.network, tc.address), Options{}), listen(t, tc.network, tc.address)
		e := to(receiver)
		if e.dst.Addr().IsUnspecified() {
			e.dst = netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), e.dst.Port())
		}
		e.src.Store(&source{addr: netip.MustParseAddr(tc.src)})
		packets := batch(100, 100, 50)
		if err := sender.send(packets, e, discard); err != nil {
			t.Fatalf("%s: %v", tc.network, err)
		}
		b := make([]byte, 200)
		for _, want := range packets {
			if n, err := receiver.Read(b); err != nil || n != len(want) {
				t.Fatalf("%s: %d bytes, %v", tc.network, n, err)
			}
		}
		if e.SrcIP().IsValid() {
			t.Errorf("%s: the source is still %v", tc.network, e.SrcIP())
		}
	}
}

func TestTrainLength(t *testing.T) {
	repeat := func(n, length int) []int { return slices.Repeat([]int{length}, n) }
	for _, tc := range []struct {
		lengths []int
		want    int
	}{
		{[]int{1}, 1},
		{[]int{5, 5}, 2},
		{[]int{5, 6}, 1},
		{[]int{5, 4, 5}, 2},
		{[]int{5, 0}, 1},
		{repeat(64, 10), 64},
		{repeat(65, 10), 64},
		{repeat(10, 10_000), 6},
		{append(repeat(6, 10_000), 5507), 7}, // 65,507 bytes
		{append(repeat(6, 10_000), 5508), 6},
	} {
		packets := make([][]byte, len(tc.lengths))
		for i, n := range tc.lengths {
			packets[i] = make([]byte, n)
		}
		if got := trainLength(packets); got != tc.want {
			t.Errorf("%v: %d, want %d", tc.lengths, got, tc.want)
		}
	}
}
