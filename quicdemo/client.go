// SPDX-License-Identifier: Apache-2.0

package quicdemo

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptrace"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"

	"instar/internal/content"
)

// request is one download.
type request struct {
	bytes  int64
	seed   uint64
	over   time.Duration // the server spreads it over this time
	resume bool          // on a resumed connection, as early data
	mid    func(*client) // runs in the middle of the download
}

// move makes the request one in whose middle the client moves.
func (q *request) move(mid func(*client)) {
	q.bytes, q.over, q.mid = max(q.bytes, moveBytes), moveTime, mid
}

// client is one connection and the sockets below it.
type client struct {
	l          *loader
	conn       *quic.Conn
	http       *http3.ClientConn
	began      time.Time
	early      bool // dialed with early data
	persistent bool

	// A client that migrates changes between two transports: quic-go never lets
	// go of a transport that a path was added with, and closing one ends the
	// connection.
	transports [2]*quic.Transport
	active     int
	path       *quic.Path

	once  sync.Once
	fault error // of the handshake
}

// sessionCache gives every connection a session state of its own: quic-go
// writes to it, and a cache hands the same one to connections that resume at
// the same time.
type sessionCache struct{ tls.ClientSessionCache }

func (c sessionCache) Get(key string) (*tls.ClientSessionState, bool) {
	cached, ok := c.ClientSessionCache.Get(key)
	if !ok {
		return nil, false
	}
	ticket, shared, err := cached.ResumptionState()
	if err != nil || shared == nil {
		return nil, false
	}
	encoded, err := shared.Bytes()
	if err != nil {
		return nil, false
	}
	state, err := tls.ParseSessionState(encoded)
	if err != nil {
		return nil, false
	}
	session, err := tls.NewResumptionState(ticket, state)
	return session, err == nil
}

// dial opens a connection. With resume it returns before the handshake is
// complete when early data can be sent.
func (l *loader) dial(resume bool) (*client, error) {
	c := &client{l: l, began: time.Now()}
	if err := c.addTransport(0); err != nil {
		return nil, err
	}
	tlsConfig, quicConfig := l.tls, l.quic
	if resume {
		tlsConfig = tlsConfig.Clone()
		tlsConfig.ClientSessionCache = l.sessions
		quicConfig = quicConfig.Clone()
		quicConfig.TokenStore = l.tokens
	}
	ctx, cancel := context.WithTimeoutCause(l.work, l.cfg.HandshakeTimeout, &quic.HandshakeTimeoutError{})
	defer cancel()
	conn, err := c.transports[0].DialEarly(ctx, l.addr, tlsConfig, quicConfig)
	if err != nil {
		c.close()
		return nil, err
	}
	c.conn = conn
	select {
	case <-conn.HandshakeComplete():
		// The server may have rejected early data by now. NextConnection makes the
		// connection usable, and does nothing otherwise.
		if c.conn, err = conn.NextConnection(ctx); err != nil {
			c.close()
			return nil, err
		}
		c.http = l.http.NewClientConn(c.conn)
		if err := c.established(); err != nil {
			c.close()
			return nil, err
		}
	default:
		c.early = true
		c.http = l.http.NewClientConn(conn)
		go func() { _ = c.established() }() // do waits for it
	}
	return c, nil
}

func (c *client) addTransport(i int) error {
	socket, err := newRebindConn(func() (*net.UDPConn, error) { return c.l.cfg.listen(c.l.network, nil) })
	if err != nil {
		return fmt.Errorf("open client socket: %w", err)
	}
	c.transports[i] = &quic.Transport{Conn: socket}
	return nil
}

// established waits for the end of the handshake, records it, once, and
// returns why it failed.
func (c *client) established() error {
	c.once.Do(func() {
		ctx, cancel := context.WithDeadline(c.l.work, c.began.Add(c.l.cfg.HandshakeTimeout))
		defer cancel()
		select {
		case <-c.conn.HandshakeComplete():
		case <-c.conn.Context().Done():
			// A connection may be over soon after its handshake; what counts is
			// whether it had one.
			select {
			case <-c.conn.HandshakeComplete():
			default:
				c.fault = context.Cause(c.conn.Context())
				return
			}
		case <-ctx.Done():
			c.fault = &quic.HandshakeTimeoutError{}
			return
		}
		c.l.rec.handshake(time.Since(c.began))
		state := c.conn.ConnectionState()
		c.l.rec.update(func(r *Result) {
			if state.TLS.DidResume {
				r.Resumed++
			}
			if state.Used0RTT {
				r.ZeroRTT.Attempted++
				r.ZeroRTT.Accepted++
			}
		})
	})
	return c.fault
}

func (c *client) close() {
	if c.conn != nil {
		_ = c.conn.CloseWithError(quic.ApplicationErrorCode(http3.ErrCodeNoError), "")
	}
	for _, t := range c.transports {
		if t != nil {
			_ = t.Close()
			_ = t.Conn.Close()
		}
	}
}

// get makes a request, verifies the body and records the success. When it
// returns sent false, nothing of the request reached the server.
func (c *client) get(q request) (sent bool, err error) {
	ctx, cancel := context.WithTimeoutCause(c.l.work, c.l.cfg.RequestTimeout, errTimeout)
	defer cancel()
	var wrote atomic.Bool
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{WroteHeaders: func() { wrote.Store(true) }})
	began := time.Now()
	generation, err := c.download(ctx, q)
	if err != nil {
		if ctx.Err() != nil {
			err = fmt.Errorf("%w: %w", context.Cause(ctx), err)
		}
		return wrote.Load(), err
	}
	took := time.Since(began)
	if q.over > 0 {
		took = 0 // the server was asked to be slow
	}
	c.l.rec.request(generation, q.bytes, took)
	return true, nil
}

func (c *client) download(ctx context.Context, q request) (generation uint32, err error) {
	url := fmt.Sprintf("https://%s/bytes/%d?seed=%d", net.JoinHostPort(c.l.cfg.ServerName, strconv.Itoa(c.l.addr.Port)), q.bytes, q.seed)
	if q.over > 0 {
		url += fmt.Sprintf("&ms=%d", q.over.Milliseconds())
	}
	method := http.MethodGet
	if c.early {
		method = http3.MethodGet0RTT
	}
	req, err := http.NewRequestWithContext(ctx, method, url, nil)
	if err != nil {
		return 0, err
	}
	resp, err := c.http.RoundTrip(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return 0, errStatus(resp.StatusCode)
	}
	var mid sync.WaitGroup
	defer mid.Wait()
	progress := func(total int64) {
		if q.mid != nil && total >= q.bytes/3 {
			run := q.mid
			q.mid = nil
			mid.Go(func() { run(c) })
		}
	}
	if err := content.Verify(resp.Body, q.seed, q.bytes, progress); err != nil {
		return 0, err
	}
	n, _ := strconv.ParseUint(resp.Header.Get(HeaderGeneration), 10, 32)
	return uint32(n), nil
}

// migrate moves the client to another port with path validation.
func (l *loader) migrate(c *client) {
	ctx, cancel := context.WithTimeout(c.conn.Context(), probeTime)
	defer cancel()
	err := c.switchPath(ctx)
	switch {
	case err == nil:
		l.rec.update(func(r *Result) { r.Migrations++ })
	case c.conn.Context().Err() == nil:
		l.rec.lost(lostMigration, err)
	}
}

func (c *client) switchPath(ctx context.Context) error {
	next := 1 - c.active
	if t := c.transports[next]; t == nil {
		if err := c.addTransport(next); err != nil {
			return err
		}
	} else if err := t.Conn.(*rebindConn).rebind(); err != nil {
		return err
	}
	path, err := c.conn.AddPath(c.transports[next])
	if err != nil {
		return err
	}
	if err := path.Probe(ctx); err != nil {
		return errors.Join(err, path.Close())
	}
	if err := path.Switch(); err != nil {
		return err
	}
	if c.path != nil {
		err = c.path.Close()
	}
	c.path, c.active = path, next
	return err
}

// rebind moves the client to another port as when a NAT forgets its mapping:
// the server learns about it from the client's next packet.
func (l *loader) rebind(c *client) {
	if err := c.transports[c.active].Conn.(*rebindConn).rebind(); err != nil {
		l.rec.lost(lostMigration, err)
		return
	}
	l.rec.update(func(r *Result) { r.Rebinds++ })
	// A client that only receives may have nothing to send for a while, not
	// even acknowledgements, as nothing arrives. A stream of a type that means
	// nothing (RFC 9114 section 6.2.3) is a packet that needs no answer.
	if stream, err := c.conn.OpenUniStream(); err == nil {
		_, _ = stream.Write([]byte{reservedStream})
		_ = stream.Close()
	}
}

// reservedStream is the first of the reserved HTTP/3 stream types, as a
// variable-length integer.
const reservedStream = 0x21
