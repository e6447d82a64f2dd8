// SPDX-License-Identifier: Apache-2.0

package wgbind

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/conn"

	"instar/internal/rawconn"
)

const (
	// readBatch is how many datagrams, each of them joined from up to 128 by the kernel,
	// are read at once.
	readBatch = 8
	// maxDatagram holds what the kernel joined, too.
	maxDatagram = 1<<16 - 1
	// maxSegments is UDP_MAX_SEGMENTS of the oldest kernels that have it (linux/udp.h).
	maxSegments = 64
	// maxTrain is the payload of the longest IPv4 packet; IPv6 has room for more.
	maxTrain = 1<<16 - 1 - 20 - 8
)

// batchConn is an ipv4.PacketConn or ipv6.PacketConn, whose messages are of one type.
type batchConn interface {
	ReadBatch(ms []ipv4.Message, flags int) (int, error)
	WriteBatch(ms []ipv4.Message, flags int) (int, error)
}

// socket is a worker's.
type socket struct {
	conn  *net.UDPConn
	batch batchConn
	ipv6  bool // or dual stack
	// gso says whether the kernel and the device segment. It is given up once a device
	// turns out not to.
	gso atomic.Bool

	mu       sync.Mutex // of a receiver
	messages []ipv4.Message
	read     int // of messages are read
	next     int // of them is to be returned
	offset   int // into it
	last     *endpoint
}

func newSocket(c *net.UDPConn, o Options) (*socket, error) {
	s := &socket{conn: c}
	err := rawconn.Of(c, func(fd int) error {
		domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
		if err != nil {
			return os.NewSyscallError("getsockopt SO_DOMAIN", err)
		}
		s.ipv6 = domain == unix.AF_INET6
		if s.ipv6 {
			err = os.NewSyscallError("setsockopt IPV6_RECVPKTINFO", unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1))
		} else {
			err = os.NewSyscallError("setsockopt IP_PKTINFO", unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_PKTINFO, 1))
		}
		if err != nil {
			return err
		}
		if !o.NoReceiveOffload {
			// A kernel without it gives the datagrams as they came.
			_ = unix.SetsockoptInt(fd, unix.IPPROTO_UDP, unix.UDP_GRO, 1)
		}
		_, err = unix.GetsockoptInt(fd, unix.IPPROTO_UDP, unix.UDP_SEGMENT)
		s.gso.Store(err == nil && !o.NoSendOffload)
		return nil
	})
	if err != nil {
		return nil, err
	}
	if s.ipv6 {
		s.batch = ipv6.NewPacketConn(c)
	} else {
		s.batch = ipv4.NewPacketConn(c)
	}
	s.messages = make([]ipv4.Message, readBatch)
	for i := range s.messages {
		s.messages[i].Buffers = [][]byte{make([]byte, maxDatagram)}
		s.messages[i].OOB = make([]byte, receiveControl)
	}
	return s, nil
}

// interrupt unblocks the receiver.
func (s *socket) interrupt() error { return s.conn.SetReadDeadline(time.Unix(1, 0)) }

// reopen undoes interrupt, once the receiver that was interrupted has left.
func (s *socket) reopen() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.conn.SetReadDeadline(time.Time{})
}

// receive is a conn.ReceiveFunc, of one opening. What the kernel joined and does not fit
// stays for the next call.
func (s *socket) receive(o *opening, packets [][]byte, sizes []int, endpoints []conn.Endpoint) (n int, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if o.over.Load() {
		return 0, net.ErrClosed
	}
	for s.next == s.read {
		s.next, s.read = 0, 0
		read, err := s.batch.ReadBatch(s.messages, 0)
		if err == nil {
			s.read = read
		}
		switch {
		case o.over.Load():
			return 0, net.ErrClosed // what was read is the next opening's
		case err != nil && !ignored(err):
			return 0, err
		}
	}
	for n < len(packets) && s.next < s.read {
		m := &s.messages[s.next]
		data := m.Buffers[0][:m.N]
		src, segment := parseControl(m.OOB[:m.NN], s.ipv6)
		if segment <= 0 || segment > m.N {
			segment = m.N
		}
		from := s.endpoint(m.Addr, src)
		for n < len(packets) && (s.offset < m.N || m.N == 0) {
			end := min(s.offset+segment, m.N)
			sizes[n] = copy(packets[n], data[s.offset:end])
			endpoints[n] = from
			s.offset = end
			n++
			if m.N == 0 {
				break
			}
		}
		if s.offset == m.N {
			s.offset = 0
			s.next++
		}
	}
	return n, nil
}

// ignored says whether the error is not of the socket but of something that was sent by
// it, as when the peer is not there (an ICMP error, udp(7)).
func ignored(err error) bool {
	return errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.EHOSTUNREACH) || errors.Is(err, unix.ENETUNREACH)
}

// endpoint is where a datagram came from. A sender is often that of the one before.
func (s *socket) endpoint(from net.Addr, src source) *endpoint {
	dst := unmap(from.(*net.UDPAddr).AddrPort())
	if last := s.last; last != nil && last.dst == dst {
		if was := last.src.Load(); was != nil && *was == src {
			return last
		}
	}
	e := &endpoint{dst: dst}
	if src.addr.IsValid() {
		e.src.Store(&src)
	}
	s.last = e
	return e
}

// train is what is sent with one call.
type train struct {
	messages []ipv4.Message
	control  [][]byte
}

var trains = sync.Pool{New: func() any { return &train{} }}

// send sends the packets in their order.
func (s *socket) send(packets [][]byte, to *endpoint, log *slog.Logger) error {
	t := trains.Get().(*train)
	defer trains.Put(t)
	defer t.clear()
	addr := net.UDPAddrFromAddrPort(to.dst)
	gso, src := s.gso.Load(), to.src.Load()
	for len(packets) > 0 {
		t.fill(packets, addr, src, s.ipv6, gso)
		sent, err := s.write(t.messages)
		// By datagrams, as the caller knows them.
		packets = packets[sent:]
		switch {
		case err == nil:
		case gso && errors.Is(err, unix.EIO):
			// udp_send_skb (net/ipv4/udp.c): the device computes no checksums.
			s.gso.Store(false)
			gso = false
			log.Info("segmentation offload given up: a network device does not support it", "address", s.conn.LocalAddr().String())
		case gso && (errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EMSGSIZE)):
			gso = false // longer than the path's MTU: as fragments
		case src != nil && (errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EADDRNOTAVAIL) || errors.Is(err, unix.ENETUNREACH) || errors.Is(err, unix.ENODEV)):
			// The address is not ours any more.
			to.src.CompareAndSwap(src, nil)
			src = nil
		default:
			return fmt.Errorf("send to %v: %w", to.dst, err)
		}
	}
	return nil
}

// write returns how many datagrams were sent.
func (s *socket) write(messages []ipv4.Message) (sent int, err error) {
	for len(messages) > 0 {
		n, err := s.batch.WriteBatch(messages, 0)
		for _, m := range messages[:max(n, 0)] {
			sent += len(m.Buffers)
		}
		if err != nil {
			return sent, err
		}
		messages = messages[n:]
	}
	return sent, nil
}

// fill makes messages of the packets: with segmentation, neighbours of one length, and a
// shorter one at the end, become one.
func (t *train) fill(packets [][]byte, addr *net.UDPAddr, src *source, v6, gso bool) {
	t.clear()
	for start := 0; start < len(packets); {
		end := start + 1
		if gso {
			end = start + trainLength(packets[start:])
		}
		i := len(t.messages)
		if i == len(t.control) {
			t.control = append(t.control, make([]byte, 0, sendControl))
		}
		control := appendSource(t.control[i][:0], src, v6)
		if end-start > 1 {
			control = appendSegment(control, len(packets[start]))
		}
		t.control[i] = control
		t.messages = append(t.messages, ipv4.Message{Buffers: packets[start:end:end], OOB: control, Addr: addr})
		start = end
	}
}

func (t *train) clear() {
	clear(t.messages) // the packets are the caller's
	t.messages = t.messages[:0]
}

// trainLength is how many of the packets, from the first on, the kernel can send as one.
func trainLength(packets [][]byte) int {
	size := len(packets[0])
	total := size
	for i, p := range packets[1:] {
		if total += len(p); i+1 == maxSegments || len(p) > size || len(p) == 0 || total > maxTrain {
			return i + 1
		}
		if len(p) < size {
			return i + 2 // it ends the train
		}
	}
	return len(packets)
}
