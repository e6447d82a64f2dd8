// SPDX-License-Identifier: Apache-2.0

package drain

import (
	"errors"
	"net"
	"sync"
	"syscall"
)

// gate is a listener that a drain closes.
type gate struct {
	net.Listener
	// wait says that Accept, after the drain closed the listener, waits for
	// Close. Otherwise it returns an error that is ErrPlanned.
	wait bool
	// came wraps and enters a connection. Where it is nil the caller of Accept
	// enters it, before the next call.
	came func(net.Conn) net.Conn

	once   sync.Once
	closed chan struct{} // by Close

	mu       sync.Mutex
	shutting bool
	// accepting counts calls of Accept whose connection may be on its way. One
	// that nobody has entered is on its way until Accept is called again, which
	// handed counts.
	accepting, handed int
}

// Accept waits for the next connection.
func (g *gate) Accept() (net.Conn, error) {
	g.mu.Lock()
	if g.handed > 0 {
		g.handed--
		g.accepting--
	}
	if g.shutting {
		g.mu.Unlock()
		return nil, g.refuse()
	}
	g.accepting++
	g.mu.Unlock()

	c, err := g.Listener.Accept()
	if err == nil && g.came != nil {
		c = g.came(c)
	}

	g.mu.Lock()
	if err == nil && g.came == nil {
		g.handed++
	} else {
		g.accepting--
	}
	shutting := g.shutting
	g.mu.Unlock()
	if err != nil && (shutting || planned(err)) {
		return nil, g.refuse()
	}
	return c, err
}

// planned says whether a listener below ended by plan: handed over before the
// drain began.
func planned(err error) bool {
	var p interface{ Planned() bool }
	return errors.Is(err, ErrPlanned) || errors.As(err, &p) && p.Planned()
}

func (g *gate) refuse() error {
	if g.wait {
		<-g.closed
	}
	return &plannedError{op: "accept", addr: g.Addr(), why: "the server is leaving"}
}

// shut closes the listener for the drain.
func (g *gate) shut() error {
	g.mu.Lock()
	first := !g.shutting
	g.shutting = true
	g.mu.Unlock()
	if !first {
		return nil
	}
	if err := g.Listener.Close(); !errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil // by whoever handed it over
}

// pending says whether a connection may be on its way.
func (g *gate) pending() bool {
	select {
	case <-g.closed:
		return false
	default:
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.accepting > 0
}

// Close closes the listener.
func (g *gate) Close() error {
	g.once.Do(func() { close(g.closed) })
	g.mu.Lock()
	shutting := g.shutting
	g.mu.Unlock()
	if shutting {
		return nil // done
	}
	return g.Listener.Close()
}

// SyscallConn reaches the descriptor, as *net.TCPListener's does.
func (g *gate) SyscallConn() (syscall.RawConn, error) { return syscallConn(g.Listener) }
