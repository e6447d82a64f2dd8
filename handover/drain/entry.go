// SPDX-License-Identifier: Apache-2.0

package drain

import (
	"context"
	"net"
	"sync"
	"time"
)

// entry is one connection, or one server of HTTP/3.
type entry struct {
	d      *Drainer
	member string
	remote string
	since  time.Time
	conn   net.Conn                // nil for HTTP/3
	cancel context.CancelCauseFunc // of what is done for the client
	limit  time.Duration           // earlier deadline of its own, or 0
	way    way
	gone   chan struct{} // closed by Drainer.end

	mu        sync.Mutex // before Drainer.mu
	busy      bool       // its transport or handler says so
	requests  int
	fresh     bool // had no request yet
	idleSince time.Time
	told      bool
	leaving   leaving
	ended     bool
	calm      chan struct{} // closed when it becomes idle while it is cut off
}

// way is how a kind of entry is closed. Both take little more than linger
// and run in a goroutine of their own.
type way interface {
	// leave closes it as an idle one.
	leave(*entry)
	// cut closes it while it is busy; what goes on has the time of grace to end.
	cut(e *entry, why error, grace time.Duration)
	// multiplexed says that requests which come while it leaves are served.
	multiplexed() bool
}

// watcher is a way that looks at its entry once a tick.
type watcher interface{ look(*entry) }

type leaving int

const (
	staying leaving = iota
	leavingIdle
	leavingCut
)

func newEntry(d *Drainer, member string, conn net.Conn, w way) *entry {
	now := time.Now()
	e := &entry{
		d: d, member: member, conn: conn, way: w,
		since: now, idleSince: now, fresh: true,
		gone: make(chan struct{}), calm: make(chan struct{}),
	}
	if conn != nil && conn.RemoteAddr() != nil {
		e.remote = conn.RemoteAddr().String()
	}
	return e
}

func (e *entry) describe() Open {
	o := Open{Member: e.member, Remote: e.remote, Since: e.since}
	if e.conn != nil {
		o.Unread, o.Unsent = queues(e.conn)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	o.Requests = e.requests
	o.Busy = e.busy || e.requests > 0
	o.Told = e.told
	o.Leaving = e.leaving != staying
	return o
}

// setBusy notes what the transport says.
func (e *entry) setBusy(busy bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.busy = busy
	if busy {
		e.fresh = false
	}
	e.rest()
}

// rest notes that the entry became idle, if it did. e.mu is held.
func (e *entry) rest() {
	if e.busy || e.requests > 0 {
		return
	}
	e.idleSince = time.Now()
	if e.leaving == leavingCut {
		select {
		case <-e.calm:
		default:
			close(e.calm)
		}
	}
}

// request counts a request until done is called. It returns ok false when the
// request must not be executed, and tell true when the client is to be told to
// go with its response.
func (e *entry) request() (done func(), tell, ok bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.leaving != staying && !e.way.multiplexed() {
		e.d.crossed()
		return nil, false, false
	}
	e.requests++
	e.fresh = false
	return e.requestDone, e.tellLocked(e.d.mayTell), true
}

func (e *entry) requestDone() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.requests--
	e.rest()
}

// tell marks the client as told, if the permission is given, which counts it;
// false when it was told already.
func (e *entry) tell(permission func() bool) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.tellLocked(permission)
}

func (e *entry) tellLocked(permission func() bool) bool {
	if e.told || !permission() {
		return false
	}
	e.told = true
	return true
}

// idleFor says whether the entry could be closed, and for how long already.
func (e *entry) idleFor(now time.Time) (time.Duration, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.idleForLocked(now)
}

func (e *entry) idleForLocked(now time.Time) (time.Duration, bool) {
	if e.busy || e.requests > 0 || e.leaving != staying {
		return 0, false
	}
	since := now.Sub(e.idleSince)
	if e.fresh && since < shy {
		return 0, false
	}
	return since, true
}

// cuttable says whether it takes a cut to end the entry.
func (e *entry) cuttable() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch e.leaving {
	case leavingCut:
		return false
	case leavingIdle:
		// Of what is not multiplexed, leave makes an end.
		return e.way.multiplexed() && (e.busy || e.requests > 0)
	}
	return true
}

// letGo closes the entry if it is idle.
func (e *entry) letGo(now time.Time) bool {
	if e.conn != nil {
		if unread, _ := queues(e.conn); unread > 0 {
			return false // a request has come
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if _, ok := e.idleForLocked(now); !ok {
		return false
	}
	e.leaving = leavingIdle
	e.d.work.Go(func() { e.way.leave(e) })
	return true
}

// cutOff closes the entry even if it is busy.
func (e *entry) cutOff(why error, grace time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.leaving == leavingCut && grace > 0 {
		return
	}
	if e.leaving == staying || e.way.multiplexed() {
		e.leaving = leavingCut
	}
	if !e.busy && e.requests == 0 {
		e.rest()
	}
	e.d.work.Go(func() { e.way.cut(e, why, grace) })
}

// await waits for one of the channels, but no longer than d.
func await(d time.Duration, a, b <-chan struct{}) {
	if d <= 0 {
		return
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-a:
	case <-b:
	case <-timer.C:
	}
}

// bottom returns the connection below all wrappers that tell what they wrap,
// as *tls.Conn does.
func bottom(conn net.Conn) net.Conn {
	for {
		w, ok := conn.(interface{ NetConn() net.Conn })
		if !ok {
			return conn
		}
		conn = w.NetConn()
	}
}

// closeWrite says that no more will be sent: close_notify where there is TLS,
// and FIN. False when the connection cannot be half closed.
func closeWrite(conn net.Conn) bool {
	type closeWriter interface{ CloseWrite() error }
	c, ok := bottom(conn).(closeWriter)
	if !ok {
		return false
	}
	if above, ok := conn.(closeWriter); ok && above != c {
		_ = above.CloseWrite() // refused before the end of TLS's handshake
	}
	return c.CloseWrite() == nil
}
