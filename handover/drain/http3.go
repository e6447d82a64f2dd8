// SPDX-License-Identifier: Apache-2.0

package drain

import (
	"context"
	"net"
	"net/http"
	"time"
)

// Shutdowner is a server of HTTP/3. Shutdown sends GOAWAY and returns when the
// connections have ended, or ctx is done.
type Shutdowner interface {
	Shutdown(ctx context.Context) error
}

// HTTP3 is a server of HTTP/3, or that of one connection, that drains.
type HTTP3 struct {
	e       *entry
	s       Shutdowner
	close   func() error
	serving context.Context // Shutdown's
	stop    context.CancelFunc
	cutting context.Context // of all requests: done when they are cut off
	cutWith context.CancelCauseFunc

	// Guarded by e.mu.
	counted bool      // Handler was called
	toldAt  time.Time // when Shutdown was called
}

// HTTP3Options configure an HTTP3. The zero value works.
type HTTP3Options struct {
	// Remote is the client's address, for a server of one connection.
	Remote net.Addr
	// Close closes what Shutdown left: the connection (with H3_NO_ERROR), or
	// the server. Default: nothing more than the end of Shutdown's context.
	Close func() error
}

// HTTP3 adds a server of HTTP/3, at any time. A server that serves one
// connection, one for each, is sent away like any other connection; one that serves
// all is told as a whole, with the first request that comes, and is closed when
// it has no request.
//
// The server has to get its handler from [HTTP3.Handler]. Without, nothing is
// known about its requests: it is told at once, and has until the deadline.
//
// It is taken out when Shutdown has returned, or by [HTTP3.Done]. New
// connections are stopped by whoever has the socket.
func (d *Drainer) HTTP3(s Shutdowner, o HTTP3Options) *HTTP3 {
	h := &HTTP3{s: s, close: o.Close}
	h.e = newEntry(d, "http3", nil, h)
	if o.Remote != nil {
		h.e.remote = o.Remote.String()
	}
	h.e.busy = true // until its requests are counted
	h.serving, h.stop = context.WithCancel(context.Background())
	h.cutting, h.cutWith = context.WithCancelCause(context.Background())
	h.e.cancel = h.cutWith
	d.add(h.e)
	return h
}

// Handler wraps the server's handler. Contexts of requests have Draining, and
// are cancelled with a cause that matches ErrPlanned at the deadline.
func (h *HTTP3) Handler(next http.Handler) http.Handler {
	h.e.mu.Lock()
	h.counted = true
	h.e.busy = false
	h.e.idleSince = time.Now()
	h.e.mu.Unlock()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		done, tell, _ := h.e.request()
		defer done()
		if tell {
			h.shutdown(false)
		}
		ctx, cancel := context.WithCancelCause(withDraining(r.Context(), h.e.d))
		defer cancel(nil)
		defer context.AfterFunc(h.cutting, func() { cancel(context.Cause(h.cutting)) })()
		next.ServeHTTP(w, r.WithContext(ctx))
	})
}

// Done takes the server out, when its connection has ended.
func (h *HTTP3) Done() {
	h.stop()
	h.e.d.end(h.e, true)
}

// shutdown sends GOAWAY, once. Whoever closes the entry may do it even when
// that has begun.
func (h *HTTP3) shutdown(closing bool) {
	h.e.mu.Lock()
	defer h.e.mu.Unlock()
	if !h.toldAt.IsZero() || h.e.ended || !closing && h.e.leaving != staying {
		return
	}
	h.toldAt = time.Now()
	h.e.d.work.Go(func() {
		err := h.s.Shutdown(h.serving)
		if err != nil && h.serving.Err() == nil {
			h.e.d.log.Warn("shut down HTTP/3", "remote", h.e.remote, "error", err)
			return // until the deadline
		}
		h.e.d.end(h.e, true)
	})
}

// look tells a server whose requests are not counted.
func (h *HTTP3) look(e *entry) {
	e.mu.Lock()
	counted := h.counted
	e.mu.Unlock()
	if !counted && e.tell(e.d.mayTell) {
		h.shutdown(false)
	}
}

func (h *HTTP3) leave(e *entry) {
	e.tell(e.d.mustTell)
	h.shutdown(true)
	for {
		wait := h.quiet()
		if wait <= 0 {
			break
		}
		await(wait, e.gone, nil)
		select {
		case <-e.gone:
			return
		default:
		}
	}
	h.end()
}

// quiet is how long the client still has to act on GOAWAY or to read its last
// response; it is above 0 while it has a request.
func (h *HTTP3) quiet() time.Duration {
	h.e.mu.Lock()
	defer h.e.mu.Unlock()
	since := h.toldAt
	if h.e.idleSince.After(since) {
		since = h.e.idleSince
	}
	wait := heed - time.Since(since)
	if h.e.requests > 0 {
		return max(wait, tick)
	}
	return wait
}

func (h *HTTP3) cut(e *entry, why error, grace time.Duration) {
	h.cutWith(why)
	if grace > 0 {
		e.tell(e.d.mustTell)
		h.shutdown(true)
		await(grace, e.gone, e.calm)
		select {
		case <-e.calm:
			await(heed, e.gone, nil) // the client reads
		default:
		}
	}
	h.end()
}

func (h *HTTP3) end() {
	select {
	case <-h.e.gone: // by itself
		h.stop()
		return
	default:
	}
	h.stop()
	if h.close != nil {
		if err := h.close(); err != nil {
			h.e.d.log.Debug("close HTTP/3", "remote", h.e.remote, "error", err)
		}
	}
	h.e.d.end(h.e, true)
}

func (h *HTTP3) multiplexed() bool { return true }
