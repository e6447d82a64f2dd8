// SPDX-License-Identifier: Apache-2.0

package drain

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// ConnsOptions configure a Conns. The zero value works.
type ConnsOptions struct {
	// Name is what reports call the connections. Default "conn".
	Name string
	// Deadline is how long these connections may stay, counted from Run, when
	// that is shorter than for the others. Run refuses one that is longer.
	// Default 0: Options.Deadline.
	Deadline time.Duration
}

// Conns tracks connections that the caller handles: of protocols of its own,
// or hijacked from net/http (WebSocket).
type Conns struct {
	d       *Drainer
	options ConnsOptions

	mu    sync.Mutex
	gates []*gate
}

// Conns adds a tracker.
func (d *Drainer) Conns(o ConnsOptions) *Conns {
	if o.Name == "" {
		o.Name = "conn"
	}
	c := &Conns{d: d, options: o}
	d.join(c)
	return c
}

// Track wraps a listener: its connections are added, and are of type *Conn.
// When the drain begins the listener is closed, and Accept returns an error
// that matches ErrPlanned and net.ErrClosed.
func (c *Conns) Track(ln net.Listener) net.Listener {
	g := &gate{Listener: ln, closed: make(chan struct{})}
	g.came = func(conn net.Conn) net.Conn { return c.Add(conn) }
	c.mu.Lock()
	c.gates = append(c.gates, g)
	c.mu.Unlock()
	select {
	case <-c.d.draining:
		_ = g.shut() // begin may have missed it
	default:
	}
	return g
}

// Add adds one connection, which belongs to the returned Conn from then on. It
// may be added during a drain, too.
func (c *Conns) Add(conn net.Conn) *Conn {
	t := &Conn{Conn: conn}
	t.entry = newEntry(c.d, c.options.Name, conn, t)
	t.entry.limit = c.options.Deadline
	t.entry.busy, t.entry.fresh = true, false
	t.ctx, t.entry.cancel = context.WithCancelCause(withDraining(context.Background(), c.d))
	c.d.add(t.entry)
	return t
}

// Draining returns a channel that is closed when the drain begins.
func (c *Conns) Draining() <-chan struct{} { return c.d.draining }

// Len is the number of connections that are open.
func (c *Conns) Len() int {
	c.d.mu.Lock()
	defer c.d.mu.Unlock()
	n := 0
	for e := range c.d.open {
		if t, ok := e.way.(*Conn); ok && t.entry.member == c.options.Name {
			n++
		}
	}
	return n
}

func (c *Conns) fits(o Options) error {
	name := fmt.Sprintf("ConnsOptions.Deadline of %q", c.options.Name)
	switch {
	case c.options.Deadline < 0:
		return fmt.Errorf("check %s, %v: %w; it is negative", name, c.options.Deadline, ErrOptions)
	case c.options.Deadline > o.Deadline:
		return &ConflictError{name, "Options.Deadline", c.options.Deadline, o.Deadline}
	}
	return nil
}

func (c *Conns) begin() error {
	c.mu.Lock()
	gates := c.gates
	c.mu.Unlock()
	var errs []error
	for _, g := range gates {
		errs = append(errs, g.shut())
	}
	return errors.Join(errs...)
}

func (c *Conns) pending() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, g := range c.gates {
		if g.pending() {
			return true
		}
	}
	return false
}

func (c *Conns) finish() error { return nil }

// Conn is a tracked connection. It is busy until its handler calls Idle, and
// a busy one is not closed before the deadline.
//
// It keeps what the connection below can do: ReadFrom and WriteTo are
// sendfile(2) and splice(2) where they would be, SyscallConn reaches the
// descriptor, and NetConn returns the connection itself. Who reads and writes
// the latter gets its errors, which do not match ErrPlanned, and has to call Busy
// when something comes.
type Conn struct {
	net.Conn
	entry *entry
	ctx   context.Context

	reading sync.Mutex   // held while the connection is read
	planned atomic.Bool  // the drain closes it: nobody else reads or writes
	why     atomic.Value // of type *plannedError, set before planned
}

// Idle says that the connection waits for its client, who loses nothing when it
// is closed. It is busy again when something was read, or Busy was called.
func (c *Conn) Idle() { c.entry.setBusy(false) }

// Busy says that something is going on. It returns false when it is too
// late, since the connection is being closed as an idle one.
func (c *Conn) Busy() bool {
	c.entry.mu.Lock()
	defer c.entry.mu.Unlock()
	if c.entry.leaving == leavingIdle {
		return false
	}
	c.entry.busy = true
	return true
}

// Draining returns a channel that is closed when the drain begins: the
// time to tell the client that it has to go, in whatever way the protocol has.
func (c *Conn) Draining() <-chan struct{} { return c.entry.d.draining }

// Context is done when the connection is closed. When the drain does that
// context.Cause matches ErrPlanned, and the handler of a busy connection has a
// second until it loses the connection.
func (c *Conn) Context() context.Context { return c.ctx }

// NetConn returns the connection below.
func (c *Conn) NetConn() net.Conn { return c.Conn }

// Read reads. What it reads makes the connection busy.
func (c *Conn) Read(b []byte) (int, error) {
	c.reading.Lock()
	defer c.reading.Unlock()
	if c.planned.Load() {
		return 0, c.refused("read")
	}
	n, err := c.Conn.Read(b)
	if n > 0 && !c.Busy() {
		c.entry.d.crossed()
		return 0, c.refused("read")
	}
	return n, c.failed("read", err)
}

// Write writes.
func (c *Conn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	return n, c.failed("write", err)
}

// ReadFrom implements io.ReaderFrom.
func (c *Conn) ReadFrom(r io.Reader) (int64, error) {
	rf, ok := c.Conn.(io.ReaderFrom)
	if !ok {
		n, err := io.Copy(struct{ io.Writer }{c.Conn}, r)
		return n, c.failed("write", err)
	}
	n, err := rf.ReadFrom(r)
	return n, c.failed("write", err)
}

// WriteTo implements io.WriterTo. The connection is busy meanwhile.
func (c *Conn) WriteTo(w io.Writer) (int64, error) {
	c.reading.Lock()
	defer c.reading.Unlock()
	if c.planned.Load() || !c.Busy() {
		return 0, c.refused("read")
	}
	wt, ok := c.Conn.(io.WriterTo)
	if !ok {
		n, err := io.Copy(w, struct{ io.Reader }{c.Conn})
		return n, c.failed("read", err)
	}
	n, err := wt.WriteTo(w)
	return n, c.failed("read", err)
}

// SetDeadline sets both deadlines, unless the drain is closing the connection.
func (c *Conn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

// SetReadDeadline sets the deadline of Read, unless the drain is closing the
// connection.
func (c *Conn) SetReadDeadline(t time.Time) error {
	c.entry.mu.Lock()
	defer c.entry.mu.Unlock()
	if c.planned.Load() {
		return c.refused("set deadline")
	}
	return c.Conn.SetReadDeadline(t)
}

// SetWriteDeadline sets the deadline of Write, unless the drain is closing the
// connection.
func (c *Conn) SetWriteDeadline(t time.Time) error {
	c.entry.mu.Lock()
	defer c.entry.mu.Unlock()
	if c.planned.Load() {
		return c.refused("set deadline")
	}
	return c.Conn.SetWriteDeadline(t)
}

// CloseWrite says that no more will be sent.
func (c *Conn) CloseWrite() error {
	if w, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return c.failed("close", w.CloseWrite())
	}
	return fmt.Errorf("close the sending side of %T: %w", c.Conn, errors.ErrUnsupported)
}

// CloseRead says that no more will be read.
func (c *Conn) CloseRead() error {
	if r, ok := c.Conn.(interface{ CloseRead() error }); ok {
		return c.failed("close", r.CloseRead())
	}
	return fmt.Errorf("close the receiving side of %T: %w", c.Conn, errors.ErrUnsupported)
}

// SyscallConn implements syscall.Conn.
func (c *Conn) SyscallConn() (syscall.RawConn, error) { return syscallConn(c.Conn) }

// Close closes the connection and takes it out. When the drain is closing it
// already, Close leaves it to the drain and returns nil.
func (c *Conn) Close() error {
	c.entry.cancel(nil)
	if c.planned.Load() {
		return nil
	}
	err := c.Conn.Close()
	c.entry.d.end(c.entry, true)
	return c.failed("close", err)
}

// failed makes a planned error of one that came because of the drain.
func (c *Conn) failed(op string, err error) error {
	if err == nil || !c.planned.Load() || errors.Is(err, ErrPlanned) {
		return err
	}
	return c.refused(op)
}

func (c *Conn) refused(op string) error {
	why := errIdle
	if w, ok := c.why.Load().(*plannedError); ok {
		why = w
	}
	return &plannedError{op: op, addr: c.RemoteAddr(), why: why.why}
}

func (c *Conn) leave(e *entry) { c.farewell(errIdle) }

func (c *Conn) cut(e *entry, why error, grace time.Duration) {
	e.cancel(why)
	await(grace, e.gone, e.calm)
	select {
	case <-e.gone:
		return
	default:
	}
	if grace > 0 {
		c.farewell(why)
		return
	}
	c.plan(why)
	_ = c.Conn.Close()
	e.d.end(e, true)
}

func (c *Conn) multiplexed() bool { return false }

// plan takes reading and writing away from the handler.
func (c *Conn) plan(why error) {
	c.why.CompareAndSwap(nil, why)
	c.entry.cancel(why)
	c.entry.mu.Lock()
	defer c.entry.mu.Unlock()
	c.planned.Store(true)
	_ = c.Conn.SetDeadline(time.Unix(1, 0)) // wakes the handler
}

// farewell closes the connection so that nothing which was written is lost:
// what the client sends until it sees the FIN would otherwise be answered
// with a reset, which overtakes what it did not read yet.
func (c *Conn) farewell(why error) {
	c.plan(why)
	c.reading.Lock() // the handler reads no more
	_ = c.Conn.SetDeadline(time.Now().Add(linger))
	if closeWrite(c.Conn) {
		if n, _ := io.Copy(io.Discard, c.Conn); n > 0 {
			c.entry.d.crossed()
		}
	}
	c.reading.Unlock()
	_ = c.Conn.Close()
	c.entry.d.end(c.entry, true)
}

func syscallConn(v any) (syscall.RawConn, error) {
	if sc, ok := v.(syscall.Conn); ok {
		return sc.SyscallConn()
	}
	return nil, fmt.Errorf("reach the descriptor of %T: %w", v, errors.ErrUnsupported)
}
