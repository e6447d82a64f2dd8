// SPDX-License-Identifier: Apache-2.0

package tcpdemo

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"instar/internal/content"
	"instar/internal/rawconn"
)

// query is what a request asks for.
type query struct {
	seed  uint64
	bytes int64
	over  time.Duration
	last  bool // the connection is to be closed after it
}

// client is one connection.
type client struct {
	load      *Load
	kind      Kind
	conn      net.Conn
	r         *bufio.Reader // of the client's Read
	ended     error         // what reading ended with
	connected time.Time
	answers   int
	// generation is the one that answered; 0 before.
	generation int
	began      func() // called when a response has begun; nil for nothing
	unhook     func() bool
}

// dial opens a connection. The kernel picks the port when it knows both ends
// (ip(7), IP_BIND_ADDRESS_NO_PORT), so that a port can serve several sources at
// once, and be used again while the server's end is in TIME_WAIT.
func (l *Load) dial(k Kind) (*client, error) {
	began := time.Now()
	d := net.Dialer{
		Timeout:   l.cfg.Timeout,
		LocalAddr: l.source(),
		KeepAlive: -1,
		Control: func(_, _ string, c syscall.RawConn) error {
			return rawconn.Control(c, func(fd int) error {
				return unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1)
			})
		},
	}
	conn, err := d.DialContext(l.ctx, "tcp", l.cfg.Addr)
	if err != nil {
		return nil, err
	}
	l.rec.connected(k, time.Since(began))
	c := &client{load: l, kind: k, conn: conn, connected: began}
	c.r = bufio.NewReaderSize(c, 4<<10)
	c.unhook = context.AfterFunc(l.ctx, func() { _ = conn.Close() })
	return c, nil
}

// Read reads from the connection.
func (c *client) Read(b []byte) (int, error) {
	n, err := c.conn.Read(b)
	if err != nil {
		c.ended = err
	}
	return n, err
}

func (c *client) close() {
	c.unhook()
	_ = c.conn.Close() // nothing is on its way
}

// errRaced means that the server closed the connection when the request was
// sent: it has not seen it.
var errRaced = errors.New("the connection was closed while it was idle")

// raceWindow is how soon after a request the end of an idle connection is due to
// a close before the request came. On one machine that is no time, but for a
// process that waits for a processor.
const raceWindow = 500 * time.Millisecond

// do sends a request and checks the response. told says that the server wants
// the connection closed.
func (c *client) do(q query) (told bool, err error) {
	began := time.Now()
	if err := c.conn.SetDeadline(began.Add(c.load.cfg.Timeout + q.over)); err != nil {
		return false, err
	}
	request := fmt.Appendf(make([]byte, 0, 160), "GET /bytes/%d?seed=%d&ms=%d HTTP/1.1\r\nHost: demo\r\n", q.bytes, q.seed, q.over.Milliseconds())
	if q.last {
		request = append(request, "Connection: close\r\n"...)
	}
	_, err = c.conn.Write(append(request, "\r\n"...))
	if err == nil {
		_, err = c.r.Peek(1)
	}
	took := time.Since(began)
	if err != nil {
		if l := classify(err); c.answers > 0 && (l == reset || l == cut) && took < raceWindow {
			return false, fmt.Errorf("%w: %w", errRaced, err)
		}
		return false, err
	}
	c.ended = nil
	resp, err := http.ReadResponse(c.r, nil)
	if err != nil {
		// Half a line is wrong to a parser, which does not see why it ends.
		err = cmp.Or(c.ended, err)
		return false, broken(err)
	}
	defer func() { _ = resp.Body.Close() }() // the whole was read, or something is wrong anyway
	if g, err := strconv.Atoi(resp.Header.Get(HeaderGeneration)); err == nil {
		c.generation = g
	}
	if resp.StatusCode != http.StatusOK {
		return false, fmt.Errorf("%w: status %s", errWrong, resp.Status)
	}
	if c.began != nil {
		c.began()
	}
	if err := content.Verify(resp.Body, q.seed, q.bytes, nil); err != nil {
		return false, broken(err)
	}
	pid, _ := strconv.Atoi(resp.Header.Get(HeaderPID))
	c.answers++
	c.load.rec.answer(Answer{
		Kind: c.kind, Generation: c.generation, PID: pid, Bytes: q.bytes,
		Connected: c.connected, Began: began, Ended: time.Now(),
	}, c.answers == 1, took)
	return resp.Close, nil
}

// broken says what an error in the middle of a response means.
func broken(err error) error {
	switch classify(err) {
	case cut, reset:
		return fmt.Errorf("%w: %w", errCut, err)
	case timedOut:
		return err
	}
	return fmt.Errorf("%w: %w", errWrong, err)
}

// finish waits for the server's end of the connection, so that it is the one
// in TIME_WAIT: a client has only so many ports.
func (c *client) finish() {
	_ = c.conn.SetDeadline(time.Now().Add(time.Second))
	_, _ = io.Copy(io.Discard, c.r) // the response is complete
	c.close()
}

// idle waits until the time, or until ctx ends. open is false when the server
// has closed the connection.
func (c *client) idle(ctx context.Context, until time.Time) (open bool, err error) {
	if err := c.conn.SetReadDeadline(until); err != nil {
		return false, err
	}
	stop := context.AfterFunc(ctx, func() { _ = c.conn.SetReadDeadline(time.Unix(1, 0)) })
	_, err = c.r.Peek(1)
	stop()
	select {
	case <-ctx.Done():
		return true, nil
	default:
	}
	how := classify(err)
	switch {
	case how == timedOut:
		return true, nil
	case how == cut, how == reset:
		return false, nil
	case err == nil:
		return false, fmt.Errorf("%w: it was not asked for", errWrong)
	}
	return false, err
}
