// SPDX-License-Identifier: Apache-2.0

package quicgo_test

import (
	"encoding/binary"
	"errors"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/quic-go/quic-go"
	"golang.org/x/sys/unix"

	"instar/internal/kernel"
	"instar/internal/testutil"
)

// seen is what passed on the loopback device in one direction.
type seen struct {
	packets int
	trains  int // longer than any QUIC packet: several in one, for the kernel to segment
	marked  int // ECN-capable
}

// sniffer counts the UDP packets of the server's port as they arrive.
type sniffer struct {
	file *os.File
	done sync.WaitGroup

	mu                 sync.Mutex
	toServer, toClient seen
}

// longest is the longest IPv4 packet with one QUIC packet of quic-go in it.
const longest = 20 + 8 + 1452

func (s *site) sniff() *sniffer {
	s.t.Helper()
	var (
		fd  int
		err error
	)
	all := uint16(unix.ETH_P_IP)
	s.ns.Run(func() {
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, int(all<<8|all>>8))
	})
	if err != nil {
		s.t.Fatal(os.NewSyscallError("socket", err))
	}
	n := &sniffer{file: os.NewFile(uintptr(fd), "sniffer")}
	s.t.Cleanup(n.stop)
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20); err != nil {
		s.t.Fatal(err)
	}
	raw, err := n.file.SyscallConn()
	if err != nil {
		s.t.Fatal(err)
	}
	n.done.Go(func() {
		head := make([]byte, 28)
		for {
			var failed error
			err := raw.Read(func(fd uintptr) bool {
				_, _, failed = unix.Recvfrom(int(fd), head, 0)
				return !errors.Is(failed, unix.EAGAIN)
			})
			if err != nil || failed != nil {
				return // closed
			}
			n.count(head)
		}
	})
	return n
}

// count takes an IPv4 header without options and a UDP header.
func (n *sniffer) count(head []byte) {
	port := uint16(serverAddr.Port)
	n.mu.Lock()
	defer n.mu.Unlock()
	s := &n.toServer
	if binary.BigEndian.Uint16(head[20:]) == port {
		s = &n.toClient
	} else if binary.BigEndian.Uint16(head[22:]) != port {
		return
	}
	s.packets++
	if binary.BigEndian.Uint16(head[2:]) > longest {
		s.trains++
	}
	if head[1]&3 == 2 { // RFC 3168, section 5
		s.marked++
	}
}

func (n *sniffer) stop() {
	_ = n.file.Close() // closing again does nothing
	n.done.Wait()
}

// batchReaders counts the goroutines that wait in quic-go's batched read.
func batchReaders() (n int) {
	buf := make([]byte, 1<<20)
	buf = buf[:runtime.Stack(buf, true)]
	for stack := range strings.SplitSeq(string(buf), "\n\n") {
		if strings.Contains(stack, "quic-go.(*oobConn).ReadPacket") && strings.Contains(stack, ").ReadBatch(") {
			n++
		}
	}
	return n
}

// recvTOS reads IP_RECVTOS: whether the socket's reader learns of ECN marks.
func recvTOS(t *testing.T, c *net.UDPConn) bool {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	value := 0
	var failed error
	if err := raw.Control(func(fd uintptr) {
		value, failed = unix.GetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_RECVTOS)
	}); err != nil || failed != nil {
		t.Fatal(err, failed)
	}
	return value == 1
}

// quic-go uses segmentation offload, ECN and batched reads on the sockets of a
// generation, as it does on any *net.UDPConn, and none of them on a socket in a
// wrapper.
func TestOffloads(t *testing.T) {
	testutil.NeedRoot(t)
	const workers = 2
	megabytes := testutil.UnlessShort(8, 1)
	for name, wrapped := range map[string]bool{"as it is": false, "in a wrapper": true} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t)
			conf := setup{workers: workers}
			if wrapped {
				t.Setenv("QUIC_GO_DISABLE_RECEIVE_BUFFER_WARNING", "1")
				conf.transport = func(_ int, t *quic.Transport) { t.Conn = struct{ net.PacketConn }{t.Conn} }
			}
			server := s.start(conf)
			s.flip(server)

			want := workers
			if wrapped {
				want = 0
			}
			testutil.WaitFor(t, patience, func() bool { return batchReaders() == want }, "%d sockets to be read in batches", want)
			for worker, c := range server.Conns() {
				if conn, ok := server.transports[worker].Conn.(*net.UDPConn); !wrapped && (!ok || conn != c) {
					t.Errorf("worker %d: the transport is on %T", worker, server.transports[worker].Conn)
				}
				if recvTOS(t, c) == wrapped {
					t.Errorf("worker %d: ECN is read: %t", worker, !wrapped)
				}
			}

			c := s.client()
			if err := c.transport.Conn.Close(); err != nil {
				t.Fatal(err)
			}
			var err error
			if c.transport.Conn, err = c.wire.listen(); err != nil {
				t.Fatal(err)
			}
			wire := s.sniff()
			if _, err := c.visit(); err != nil {
				t.Fatal(err)
			}
			for range megabytes {
				if _, err := c.say(make([]byte, 1<<20), nil); err != nil {
					t.Fatal(err)
				}
			}
			wire.stop()
			t.Logf("to the client %+v, to the server %+v", wire.toClient, wire.toServer)
			if !wrapped && wire.toClient.trains == 0 {
				testutil.Since(t, kernel.Version{Major: 6, Minor: 1}, "trains of UDP packets are cut before lo")
			}
			if (wire.toClient.trains > 0) == wrapped {
				t.Errorf("of %d packets of the server %d are trains", wire.toClient.packets, wire.toClient.trains)
			}
			// Both sides mark their packets, but for the first few, only while the
			// other one reports the marks that it sees.
			for side, n := range map[string]seen{"server": wire.toClient, "client": wire.toServer} {
				if most := n.marked > n.packets/2; most == wrapped {
					t.Errorf("of %d packets of the %s %d are marked as ECN-capable", n.packets, side, n.marked)
				}
			}
		})
	}
}
