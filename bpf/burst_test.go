// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// burst sends many datagrams with few system calls.
type burst struct {
	g    *group
	iovs [64]unix.Iovec
	msgs [64]mmsghdr
	n    int
	sent uint64
	base uint64 // what the data plane had counted before
}

type mmsghdr struct {
	header unix.Msghdr
	length uint32
}

// window is how many datagrams may be on their way: the kernel queues up to
// 1,000 of a CPU's loopback packets (net.core.netdev_max_backlog) and drops the
// others, unseen by any program, and the queue is shared with other tests.
const window = 256

// newBurst connects the client, which saves a route lookup for each packet.
func (g *group) newBurst() *burst {
	g.t.Helper()
	if err := unix.Connect(g.client, sockaddr(g.address)); err != nil {
		g.t.Fatal(err)
	}
	return &burst{g: g, base: g.counted().total()}
}

// add sends a datagram with those that follow. Its memory may not change before
// the next flush.
func (b *burst) add(datagram []byte) error {
	iov := &b.iovs[b.n]
	*iov = unix.Iovec{}
	if len(datagram) > 0 {
		iov.Base = &datagram[0]
		iov.SetLen(len(datagram))
	}
	m := &b.msgs[b.n]
	*m = mmsghdr{header: unix.Msghdr{Iov: iov}}
	m.header.SetIovlen(1)
	if b.n++; b.n == len(b.msgs) {
		return b.flush()
	}
	return nil
}

func (b *burst) flush() error {
	for done := 0; done < b.n; {
		n, _, errno := unix.Syscall6(unix.SYS_SENDMMSG, uintptr(b.g.client), uintptr(unsafe.Pointer(&b.msgs[done])), uintptr(b.n-done), 0, 0, 0)
		if errno == unix.EAGAIN || errno == unix.ENOBUFS || errno == unix.EINTR {
			runtime.Gosched()
			continue
		}
		if errno != 0 {
			return errno
		}
		done += int(n)
	}
	b.sent += uint64(b.n)
	b.n = 0
	runtime.KeepAlive(b)
	return nil
}

var errLost = errors.New("the data plane has not seen all packets")

// settle waits until at most the given number of packets is on its way. Nobody
// else may send meanwhile.
func (b *burst) settle(left uint64) error {
	deadline := time.Now().Add(patience)
	for {
		counted, err := b.g.count()
		if err != nil {
			return err
		}
		if counted.total()-b.base+left >= b.sent {
			return nil
		}
		if time.Now().After(deadline) {
			return errLost
		}
		runtime.Gosched()
	}
}

// sendAll sends n datagrams. It does not return before all are counted.
func (b *burst) sendAll(n int, next func(i int) []byte) error {
	for i := range n {
		if err := b.add(next(i)); err != nil {
			return err
		}
		if b.n == 0 {
			if err := b.settle(window); err != nil {
				return err
			}
		}
	}
	return errors.Join(b.flush(), b.settle(0))
}
