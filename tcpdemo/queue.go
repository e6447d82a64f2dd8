// SPDX-License-Identifier: Apache-2.0

package tcpdemo

import (
	"errors"
	"net"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"instar/internal/rawconn"
)

// queue is a listener that can be slow in accepting: it takes all that waits in
// the accept queue, and then nothing for a while. So does every server whose
// processors are busy.
type queue struct {
	net.Listener
	every time.Duration

	// left is how many of the current round are to be accepted, and next when
	// the next round begins. They belong to the caller of Accept.
	left int
	next time.Time

	closing   chan struct{}
	closeOnce sync.Once
	closed    error
	// onClose is told how many connections waited in the accept queue just
	// before it was closed.
	onClose func(waiting int)
}

func newQueue(l net.Listener, every time.Duration, onClose func(waiting int)) *queue {
	return &queue{Listener: l, every: every, next: time.Now().Add(every), closing: make(chan struct{}), onClose: onClose}
}

// Accept is called by one goroutine at a time.
func (q *queue) Accept() (net.Conn, error) {
	for q.every > 0 && q.left == 0 {
		timer := time.NewTimer(time.Until(q.next))
		select {
		case <-timer.C:
		case <-q.closing:
		}
		timer.Stop()
		q.next = time.Now().Add(q.every)
		var err error
		if q.left, err = waiting(q.Listener); err != nil {
			q.left = 1 // of Accept's error
		}
	}
	if q.left > 0 {
		q.left--
	}
	return q.Listener.Accept()
}

// Close closes the listener, unless a handover has done so.
func (q *queue) Close() error {
	q.closeOnce.Do(func() {
		close(q.closing)
		n, err := waiting(q.Listener)
		if q.closed = q.Listener.Close(); errors.Is(q.closed, net.ErrClosed) {
			q.closed = nil
		}
		if err == nil {
			q.onClose(n)
		}
	})
	return q.closed
}

// waiting is the number of connections in the accept queue: of a socket that
// listens, tcpi_unacked is that (tcp_get_info in net/ipv4/tcp.c).
func waiting(l net.Listener) (n int, err error) {
	c, ok := l.(syscall.Conn)
	if !ok {
		return 0, errors.ErrUnsupported
	}
	err = rawconn.Of(c, func(fd int) error {
		info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
		if err == nil {
			n = int(info.Unacked)
		}
		return err
	})
	return n, err
}
