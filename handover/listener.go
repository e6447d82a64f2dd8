// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"errors"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

// acceptor is a *net.TCPListener or a *net.UnixListener.
type acceptor interface {
	net.Listener
	syscall.Conn
	SetDeadline(time.Time) error
}

// Listener is what Handover.Listen returns. Its Accept waits while the process
// does not serve: before Ready, and while a successor is in its probation.
// Connections wait in the kernel's accept queue meanwhile, which both processes
// share, so none is lost.
type Listener struct {
	inner acceptor
	addr  net.Addr

	mu        sync.Mutex
	idle      sync.Cond // accepting became 0
	accepting int       // calls of inner.Accept
	open      chan struct{}
	isOpen    bool
	deadline  time.Time     // the user's
	moved     chan struct{} // closed when deadline changes
	closed    chan struct{}
	isClosed  bool
	ended     bool // closed by a planned stop
	released  bool // by the user's Close
}

func newListener(inner acceptor, addr net.Addr) *Listener {
	l := &Listener{inner: inner, addr: addr, open: make(chan struct{}), moved: make(chan struct{}), closed: make(chan struct{})}
	l.idle.L = &l.mu
	return l
}

// Accept waits for the next connection, while this process serves. After a
// planned stop its error is ErrSuperseded and net.ErrClosed; after Close it is
// net.ErrClosed only.
func (l *Listener) Accept() (net.Conn, error) {
	for {
		if err := l.enter(); err != nil {
			return nil, err
		}
		c, err := l.inner.Accept()
		if again, err := l.leave(err); !again {
			return c, err
		}
	}
}

// enter waits until the listener may accept.
func (l *Listener) enter() error {
	for {
		l.mu.Lock()
		switch {
		case l.isClosed:
			defer l.mu.Unlock()
			return l.closedError()
		case l.isOpen:
			l.accepting++
			l.mu.Unlock()
			return nil
		}
		open, moved, deadline := l.open, l.moved, l.deadline
		l.mu.Unlock()

		var expired <-chan time.Time
		if !deadline.IsZero() {
			timer := time.NewTimer(time.Until(deadline))
			defer timer.Stop()
			expired = timer.C
		}
		select {
		case <-open:
		case <-moved:
		case <-l.closed:
		case <-expired:
			return &net.OpError{Op: "accept", Net: l.addr.Network(), Addr: l.addr, Err: os.ErrDeadlineExceeded}
		}
	}
}

// leave ends a call of inner.Accept. again: a pause interrupted it.
func (l *Listener) leave(err error) (again bool, _ error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.accepting--; l.accepting == 0 {
		l.idle.Broadcast()
	}
	switch {
	case err == nil:
		return false, nil
	case l.isClosed:
		return false, l.closedError()
	case errors.Is(err, os.ErrDeadlineExceeded) && (l.deadline.IsZero() || time.Now().Before(l.deadline)):
		return true, nil
	}
	return false, err
}

// closedError's caller holds mu.
func (l *Listener) closedError() error {
	if l.ended {
		return &plannedError{l.addr}
	}
	return &net.OpError{Op: "accept", Net: l.addr.Network(), Addr: l.addr, Err: net.ErrClosed}
}

// resume lets Accept accept.
func (l *Listener) resume() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.isOpen || l.isClosed {
		return
	}
	_ = l.inner.SetDeadline(l.deadline) // it fails only when closed
	l.isOpen = true
	close(l.open)
	l.idle.Broadcast() // a pause at the same time ends without effect
}

// pause returns when nothing is accepted any more, or somebody resumed.
func (l *Listener) pause() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.isOpen || l.isClosed {
		return
	}
	l.isOpen = false
	l.open = make(chan struct{})
	_ = l.inner.SetDeadline(time.Unix(1, 0))
	for l.accepting > 0 && !l.isOpen && !l.isClosed {
		l.idle.Wait()
	}
}

// SetDeadline bounds calls of Accept, those under way too. Zero: no bound.
func (l *Listener) SetDeadline(t time.Time) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.isClosed {
		return &net.OpError{Op: "set", Net: l.addr.Network(), Addr: l.addr, Err: net.ErrClosed}
	}
	l.deadline = t
	close(l.moved)
	l.moved = make(chan struct{})
	if !l.isOpen {
		return nil
	}
	return l.inner.SetDeadline(t)
}

// Close closes this process's duplicate of the socket. Another process that
// has one goes on listening. It is no error when a planned stop or
// Handover.Close was faster; a second Close returns net.ErrClosed.
func (l *Listener) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.released {
		return &net.OpError{Op: "close", Net: l.addr.Network(), Addr: l.addr, Err: net.ErrClosed}
	}
	l.released = true
	return l.shut(false)
}

// end closes the listener for the Handover. The user's Close may come yet.
func (l *Listener) end(planned bool) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.shut(planned)
}

// shut closes the socket, once. Its caller holds mu.
func (l *Listener) shut(planned bool) error {
	if l.isClosed {
		return nil
	}
	l.isClosed, l.ended = true, planned
	close(l.closed)
	l.idle.Broadcast()
	return l.inner.Close()
}

// Addr is the local address.
func (l *Listener) Addr() net.Addr { return l.addr }

// SyscallConn reaches the socket, for options.
func (l *Listener) SyscallConn() (syscall.RawConn, error) { return l.inner.SyscallConn() }
