// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"syscall"

	"github.com/cilium/ebpf"
	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"

	"instar/dispatch"
	"instar/internal/rawconn"
)

const (
	// workers is the number of sockets of each group, and of flows that a row of
	// packets comes from.
	workers = 4
	// receiveBuffer has room for all that is sent before somebody reads.
	receiveBuffer = 4 << 20
)

// receiver is the sockets at one address, and the program that chooses between
// them.
type receiver struct {
	name    string // of the program
	addr    string
	conns   []*net.UDPConn
	program *ebpf.Program // nil: none
	// Of Instar's receivers.
	group      *dispatch.Group
	generation *dispatch.Generation
	listeners  []*net.TCPListener

	// drains read what a socket holds.
	drains []func() int
	// owned are closed with the receiver, the last one first.
	owned []func() error
}

// newPlain binds sockets with SO_REUSEPORT, without a program.
func newPlain(addr string) (r *receiver, err error) {
	r = &receiver{name: plainName, addr: addr}
	defer r.closeOn(&err)
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		return rawconn.Control(c, func(fd int) error {
			return errors.Join(
				os.NewSyscallError("setsockopt SO_REUSEPORT", unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)),
				os.NewSyscallError("setsockopt SO_RCVBUFFORCE", unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer)))
		})
	}}
	for range workers {
		c, err := config.ListenPacket(context.Background(), "udp4", addr)
		if err != nil {
			return r, err
		}
		r.conns = append(r.conns, c.(*net.UDPConn))
		r.own(c.Close)
	}
	return r, r.prepare()
}

// attach gives the sockets of a plain receiver a program, which it owns from then on.
func (r *receiver) attach(p *ebpf.Program) error {
	r.program = p
	r.own(p.Close)
	return rawconn.Of(r.conns[0], func(fd int) error {
		return os.NewSyscallError("setsockopt SO_ATTACH_REUSEPORT_EBPF",
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ATTACH_REUSEPORT_EBPF, p.FD()))
	})
}

// newEmpty is a plain receiver whose program decides nothing.
func newEmpty(addr string) (r *receiver, err error) {
	if r, err = newPlain(addr); err != nil {
		return nil, err
	}
	defer r.closeOn(&err)
	r.name = emptyName
	p, err := emptyProgram()
	if err != nil {
		return r, err
	}
	return r, r.attach(p)
}

// newSelect is a plain receiver whose program selects from an array and does
// nothing else.
func newSelect(addr string) (r *receiver, err error) {
	if r, err = newPlain(addr); err != nil {
		return nil, err
	}
	defer r.closeOn(&err)
	sockets, err := ebpf.NewMap(&ebpf.MapSpec{
		Type: ebpf.ReusePortSockArray, KeySize: 4, ValueSize: 8, MaxEntries: workers,
	})
	if err != nil {
		return r, err
	}
	r.own(sockets.Close)
	for i, c := range r.conns {
		if err := rawconn.Of(c, func(fd int) error { return sockets.Put(uint32(i), uint64(fd)) }); err != nil {
			return r, err
		}
	}
	p, err := selectProgram(sockets)
	if err != nil {
		return r, err
	}
	return r, r.attach(p)
}

// newInstar is a group with one active generation.
func newInstar(root, addr string, s dispatch.Steering, set ...func(*dispatch.Options)) (r *receiver, err error) {
	r = &receiver{name: s.String(), addr: addr}
	defer r.closeOn(&err)
	o := dispatch.Options{Address: addr, Root: root, Steering: s, ReceiveBuffer: receiveBuffer}
	for _, f := range set {
		f(&o)
	}
	r.group, err = dispatch.Open(o)
	if err != nil {
		return r, err
	}
	r.own(r.group.Close)
	if r.generation, err = r.group.Join(workers); err != nil {
		return r, err
	}
	r.own(r.generation.Close)
	if err := r.generation.Activate(); err != nil {
		return r, err
	}
	r.conns, r.listeners = r.generation.Conns(), r.generation.Listeners()
	if r.program, err = ebpf.LoadPinnedProgram(filepath.Join(r.group.Path(), "program"), nil); err != nil {
		return r, fmt.Errorf("open program of %s: %w", addr, err)
	}
	r.own(r.program.Close)
	return r, r.prepare()
}

// prepare makes the functions that read the sockets.
func (r *receiver) prepare() error {
	for _, c := range r.conns {
		raw, err := c.SyscallConn()
		if err != nil {
			return err
		}
		n, b := 0, make([]byte, 1)
		empty := func(fd uintptr) bool {
			for n = 0; ; n++ {
				if _, err := unix.Read(int(fd), b); err != nil {
					return true
				}
			}
		}
		r.drains = append(r.drains, func() int {
			if raw.Read(empty) != nil {
				return 0
			}
			return n
		})
	}
	for _, l := range r.listeners {
		r.drains = append(r.drains, func() (n int) {
			_ = rawconn.Of(l, func(fd int) error {
				// Until the queue is empty.
				for c, _, err := unix.Accept4(fd, unix.SOCK_CLOEXEC); err == nil; c, _, err = unix.Accept4(fd, unix.SOCK_CLOEXEC) {
					_ = unix.Close(c)
					n++
				}
				return nil
			})
			return n
		})
	}
	return nil
}

// drain takes all that the sockets hold, and returns how many datagrams, or connections,
// that was.
func (r *receiver) drain() int {
	n := 0
	for _, d := range r.drains {
		n += d()
	}
	return n
}

func (r *receiver) own(f func() error) { r.owned = append(r.owned, f) }

func (r *receiver) close() error {
	var errs []error
	for i := len(r.owned) - 1; i >= 0; i-- {
		errs = append(errs, r.owned[i]())
	}
	r.owned = nil
	return errors.Join(errs...)
}

// closeOn closes a receiver that could not be made.
func (r *receiver) closeOn(err *error) {
	if *err != nil {
		*err = errors.Join(*err, r.close())
	}
}

// flow is a client's socket, connected to a receiver.
type flow struct {
	conn  *net.UDPConn
	batch *ipv4.PacketConn
}

func newFlow(addr string) (flow, error) {
	c, err := net.Dial("udp4", addr)
	if err != nil {
		return flow{}, err
	}
	return flow{c.(*net.UDPConn), ipv4.NewPacketConn(c.(*net.UDPConn))}, nil
}

// connect makes connections, and resets them at once: nothing is left of them.
func connect(addr string, n int) error {
	a, err := netip.ParseAddrPort(addr)
	if err != nil {
		return err
	}
	for range n {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return os.NewSyscallError("socket", err)
		}
		err = errors.Join(
			os.NewSyscallError("setsockopt SO_LINGER", unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})),
			os.NewSyscallError("connect", unix.Connect(fd, &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()})),
			os.NewSyscallError("close", unix.Close(fd)))
		if err != nil {
			return err
		}
	}
	return nil
}

// send sends all of the messages.
func (f flow) send(m []ipv4.Message) error {
	for len(m) > 0 {
		n, err := f.batch.WriteBatch(m, 0)
		if err != nil {
			return err
		}
		m = m[n:]
	}
	return nil
}
