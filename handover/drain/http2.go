// SPDX-License-Identifier: Apache-2.0

package drain

import (
	"crypto/tls"
	"errors"
	"net"
	"net/http"
)

// The names in http.Server.TLSNextProto; the second is net/http's for HTTP/2
// with prior knowledge and without TLS (http.Protocols.SetUnencryptedHTTP2).
const (
	protoH2  = "h2"
	protoH2C = "unencrypted_http2"
)

// configureHTTP2 gives each HTTP/2 connection an http.Server of its own, next to
// the real one, whose Shutdown sends GOAWAY on this connection and no other.
// The real one's Shutdown sends it on all of them at once. The server's fields
// (handler, timeouts, hooks, log) are read from the real one.
func (h *HTTP) configureHTTP2() {
	s := h.server
	if _, set := s.TLSNextProto[protoH2]; set {
		return // golang.org/x/net, or somebody else's
	}
	protocols := s.Protocols
	switch {
	case protocols == nil && s.TLSNextProto != nil:
		return // the way to turn HTTP/2 off
	case protocols == nil:
		protocols = new(http.Protocols)
		protocols.SetHTTP1(true)
		protocols.SetHTTP2(true)
	case !protocols.HTTP2() && !protocols.UnencryptedHTTP2():
		return
	}
	probe := h2Server(s, protocols)
	for _, name := range []string{protoH2, protoH2C} {
		if probe.TLSNextProto[name] == nil {
			return // turned off by GODEBUG or a build tag
		}
	}
	next := make(map[string]func(*http.Server, *tls.Conn, http.Handler), len(s.TLSNextProto)+2)
	for name, f := range s.TLSNextProto {
		next[name] = f
	}
	for _, name := range []string{protoH2, protoH2C} {
		next[name] = func(real *http.Server, c *tls.Conn, handler http.Handler) {
			own := h2Server(real, protocols)
			if e := h.entry(plain(c)); e != nil {
				w := e.way.(*httpWay)
				w.mu.Lock()
				w.h2 = own
				w.mu.Unlock()
			}
			own.TLSNextProto[name](real, c, handler)
		}
	}
	s.TLSNextProto = next
	s.RegisterOnShutdown(h.goAwayAll)
}

// h2Server makes a server that serves nothing but has HTTP/2 set up.
func h2Server(s *http.Server, protocols *http.Protocols) *http.Server {
	own := &http.Server{
		Protocols:   protocols,
		HTTP2:       s.HTTP2,
		IdleTimeout: s.IdleTimeout,
		ReadTimeout: s.ReadTimeout,
		ErrorLog:    s.ErrorLog,
	}
	_ = own.Serve(noListener{}) // sets up HTTP/2 first
	return own
}

// plain is the connection as the server's hooks know it. net/http disguises
// one without TLS as a *tls.Conn.
func plain(c *tls.Conn) net.Conn {
	if u, ok := c.NetConn().(interface{ UnencryptedNetConn() net.Conn }); ok {
		return u.UnencryptedNetConn()
	}
	return c
}

// goAwayAll is what net/http's own HTTP/2 does when the server is shut down.
func (h *HTTP) goAwayAll() {
	h.mu.Lock()
	ways := make([]*httpWay, 0, len(h.conns))
	for _, e := range h.conns {
		ways = append(ways, e.way.(*httpWay))
	}
	h.mu.Unlock()
	for _, w := range ways {
		w.goAway()
	}
}

// noListener refuses at once.
type noListener struct{}

var errNoListener = errors.New("serves nothing")

func (noListener) Accept() (net.Conn, error) { return nil, errNoListener }
func (noListener) Close() error              { return nil }
func (noListener) Addr() net.Addr            { return &net.TCPAddr{} }
