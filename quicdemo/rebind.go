// SPDX-License-Identifier: Apache-2.0

package quicdemo

import (
	"errors"
	"net"
	"sync"
	"time"
)

// rebindConn is a packet connection whose socket can be replaced while it is
// in use, as when a NAT forgets its mapping: from then on packets come from
// another port, and what is on its way to the old port is lost. Nobody above
// it notices.
type rebindConn struct {
	listen func() (*net.UDPConn, error)

	mu       sync.Mutex
	socket   *net.UDPConn
	deadline time.Time
}

var _ net.PacketConn = (*rebindConn)(nil)

// socketBuffer is the size of a client socket's buffers. A whole congestion
// window has to fit, or the client loses what nobody else lost.
const socketBuffer = 1 << 20

func newRebindConn(listen func() (*net.UDPConn, error)) (*rebindConn, error) {
	c := &rebindConn{listen: listen}
	var err error
	c.socket, err = c.open()
	return c, err
}

func (c *rebindConn) open() (*net.UDPConn, error) {
	socket, err := c.listen()
	if err != nil {
		return nil, err
	}
	// The kernel gives what its limit allows.
	_ = socket.SetReadBuffer(socketBuffer)
	_ = socket.SetWriteBuffer(socketBuffer)
	return socket, nil
}

// rebind moves to another port.
func (c *rebindConn) rebind() error {
	next, err := c.open()
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := next.SetReadDeadline(c.deadline); err != nil {
		return errors.Join(err, next.Close())
	}
	old := c.socket
	c.socket = next
	return old.Close()
}

func (c *rebindConn) current() *net.UDPConn {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.socket
}

func (c *rebindConn) ReadFrom(b []byte) (int, net.Addr, error) {
	for {
		socket := c.current()
		n, from, err := socket.ReadFrom(b)
		if err == nil || c.current() == socket {
			return n, from, err
		}
	}
}

func (c *rebindConn) WriteTo(b []byte, to net.Addr) (int, error) {
	for {
		socket := c.current()
		n, err := socket.WriteTo(b, to)
		if err == nil || c.current() == socket {
			return n, err
		}
	}
}

func (c *rebindConn) SetReadDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.deadline = t
	return c.socket.SetReadDeadline(t)
}

func (c *rebindConn) Close() error                     { return c.current().Close() }
func (c *rebindConn) LocalAddr() net.Addr              { return c.current().LocalAddr() }
func (c *rebindConn) SetDeadline(t time.Time) error    { return c.SetReadDeadline(t) }
func (c *rebindConn) SetWriteDeadline(time.Time) error { return nil }
func (c *rebindConn) SetReadBuffer(int) error          { return nil } // open did
func (c *rebindConn) SetWriteBuffer(int) error         { return nil }
