// SPDX-License-Identifier: Apache-2.0

package drain

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"
)

// HTTP is a server of net/http that drains.
type HTTP struct {
	d      *Drainer
	server *http.Server
	next   http.Handler // nil: http.DefaultServeMux

	mu     sync.Mutex
	conns  map[net.Conn]*entry
	gates  []*gate
	served int // calls of Serve
}

// HTTP adds a server, before its first Serve and after its fields were set. It
// chains itself in front of Handler, ConnState, ConnContext and BaseContext;
// what is there goes on working. Where the server would use net/http's HTTP/2
// it sets TLSNextProto to the same implementation.
//
// The server has to get its listeners from [HTTP.Listener].
func (d *Drainer) HTTP(server *http.Server) *HTTP {
	h := &HTTP{d: d, server: server, next: server.Handler, conns: make(map[net.Conn]*entry)}
	server.Handler = http.HandlerFunc(h.handle)

	connContext := server.ConnContext
	server.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		if connContext != nil {
			if ctx = connContext(ctx, c); ctx == nil {
				return nil // net/http complains
			}
		}
		return h.came(ctx, c)
	}
	connState := server.ConnState
	server.ConnState = func(c net.Conn, s http.ConnState) {
		h.state(c, s)
		if connState != nil {
			connState(c, s)
		}
	}
	baseContext := server.BaseContext
	server.BaseContext = func(ln net.Listener) context.Context {
		h.mu.Lock()
		h.served++
		h.mu.Unlock()
		if baseContext != nil {
			return baseContext(ln)
		}
		return context.Background()
	}
	h.configureHTTP2()
	d.join(h)
	return h
}

// Listener wraps a listener for the server's Serve or ServeTLS, or for
// tls.NewListener. When the drain begins the listener is closed, and Accept waits,
// so that Serve returns only when the drain has ended, with http.ErrServerClosed.
// The connections are those of ln, as they are.
//
// A listener that ends on its own because it was handed over, before Run is
// called, is taken for the same when its error matches ErrPlanned or has a method
// Planned() bool that returns true. Any other error ends Serve.
//
// With any other listener new connections go on coming until the end of
// the drain, and each is told to go with its first response.
func (h *HTTP) Listener(ln net.Listener) net.Listener {
	g := &gate{Listener: ln, wait: true, closed: make(chan struct{})}
	h.mu.Lock()
	h.gates = append(h.gates, g)
	h.mu.Unlock()
	select {
	case <-h.d.draining:
		_ = g.shut() // begin may have missed it
	default:
	}
	return g
}

type (
	entryKey struct{}
	drainKey struct{}
)

// Draining returns a channel that is closed when the drain of the server that
// a request came to begins. It is nil, and blocks for ever, when ctx is of no request
// to a server that was added to a Drainer.
func Draining(ctx context.Context) <-chan struct{} {
	c, _ := ctx.Value(drainKey{}).(<-chan struct{})
	return c
}

func withDraining(ctx context.Context, d *Drainer) context.Context {
	return context.WithValue(ctx, drainKey{}, d.Draining())
}

// came enters a new connection.
func (h *HTTP) came(ctx context.Context, c net.Conn) context.Context {
	w := &httpWay{}
	e := newEntry(h.d, "http", c, w)
	ctx, e.cancel = context.WithCancelCause(withDraining(ctx, h.d))
	h.mu.Lock()
	h.conns[c] = e
	h.mu.Unlock()
	h.d.add(e)
	return context.WithValue(ctx, entryKey{}, e)
}

func (h *HTTP) entry(c net.Conn) *entry {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.conns[c]
}

func (h *HTTP) state(c net.Conn, s http.ConnState) {
	e := h.entry(c)
	if e == nil {
		return
	}
	switch s {
	case http.StateActive:
		e.setBusy(true)
	case http.StateIdle:
		e.setBusy(false)
	case http.StateHijacked, http.StateClosed:
		h.mu.Lock()
		delete(h.conns, c)
		h.mu.Unlock()
		h.d.end(e, s == http.StateClosed)
		if s == http.StateClosed {
			e.cancel(nil)
		}
	}
}

// handle is the server's handler.
func (h *HTTP) handle(w http.ResponseWriter, r *http.Request) {
	next := h.next
	if next == nil {
		next = http.DefaultServeMux
	}
	e, _ := r.Context().Value(entryKey{}).(*entry)
	if e == nil {
		next.ServeHTTP(w, r)
		return
	}
	done, tell, ok := e.request()
	if !ok {
		refuse(r)
	}
	defer func() {
		done()
		select {
		case <-e.gone: // hijacked, or closed; nobody else cancels the first
			e.cancel(nil)
		default:
		}
	}()
	// A response that switches protocols has another use for Connection.
	if tell && !e.way.(*httpWay).goAway() && !upgrades(r) {
		w.Header().Set("Connection", "close")
	}
	next.ServeHTTP(w, r)
}

func upgrades(r *http.Request) bool {
	return r.ProtoMajor == 1 && r.Header.Get("Upgrade") != "" && strings.Contains(strings.ToLower(r.Header.Get("Connection")), "upgrade")
}

// refuse reads on, without executing the request, until the client has seen
// that the connection ends or its time is over. The handler that panics with ErrAbortHandler makes
// the server close it.
func refuse(r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body)
	<-r.Context().Done()
	panic(http.ErrAbortHandler)
}

// httpWay closes connections of net/http.
type httpWay struct {
	mu sync.Mutex
	h2 *http.Server // of this HTTP/2 connection alone
}

// goAway sends GOAWAY; false when that is not to be had.
func (w *httpWay) goAway() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.h2 == nil {
		return false
	}
	_ = w.h2.Shutdown(context.Background()) // has no connections of its own, so does not wait
	return true
}

func (w *httpWay) multiplexed() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.h2 != nil
}

func (w *httpWay) leave(e *entry) {
	if w.goAway() {
		e.tell(e.d.mustTell)
		// net/http closes it a second after its last stream.
		for {
			await(2*linger, e.gone, nil)
			select {
			case <-e.gone:
				return
			default:
			}
			e.mu.Lock()
			idle := !e.busy && e.requests == 0 && time.Since(e.idleSince) > 2*linger
			e.mu.Unlock()
			if idle {
				break
			}
		}
	} else if closeWrite(e.conn) {
		await(linger, e.gone, nil)
	}
	w.close(e, errIdle)
}

func (w *httpWay) cut(e *entry, why error, grace time.Duration) {
	e.cancel(why)
	if grace > 0 {
		w.goAway()
		await(grace, e.gone, e.calm)
		select {
		case <-e.calm: // the handlers have ended their responses
			if w.multiplexed() {
				// Its last frames may not be written yet. net/http closes it a second
				// after them.
				await(2*linger, e.gone, nil)
			} else if closeWrite(e.conn) {
				await(linger, e.gone, nil)
			}
		default:
		}
	}
	w.close(e, why)
}

func (w *httpWay) close(e *entry, why error) {
	e.cancel(why)
	_ = e.conn.Close() // may be closed already
	// The server says so itself, unless a handler does not return.
	await(linger/10, e.gone, nil)
	e.d.end(e, true)
}

func (h *HTTP) fits(Options) error { return nil }

func (h *HTTP) begin() error {
	h.mu.Lock()
	gates, served := h.gates, h.served
	h.mu.Unlock()
	if served > len(gates) {
		h.d.log.Warn("a server has listeners that did not come from HTTP.Listener; they accept until the drain has ended")
	}
	var errs []error
	for _, g := range gates {
		errs = append(errs, g.shut())
	}
	return errors.Join(errs...)
}

func (h *HTTP) pending() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, g := range h.gates {
		if g.pending() {
			return true
		}
	}
	return false
}

// finish ends Serve with http.ErrServerClosed.
func (h *HTTP) finish() error {
	ctx, cancel := context.WithCancel(context.Background())
	cancel() // there is nobody to wait for
	if err := h.server.Shutdown(ctx); err != nil && !errors.Is(err, context.Canceled) && !errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}
