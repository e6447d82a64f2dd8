// SPDX-License-Identifier: Apache-2.0

package drain

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"instar/internal/testutil"
)

// client2 is one HTTP/2 connection that speaks in frames.
type client2 struct {
	net.Conn
	*http2.Framer
	stream uint32
}

func newClient2(t testing.TB, c net.Conn) *client2 {
	t.Helper()
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	f := http2.NewFramer(c, c)
	_, err := io.WriteString(c, http2.ClientPreface)
	if err := errors.Join(err, f.WriteSettings(), f.WriteSettingsAck()); err != nil {
		t.Fatal(err)
	}
	return &client2{c, f, 0}
}

func dial2(t testing.TB, addr string, config *tls.Config) *client2 {
	t.Helper()
	config = config.Clone()
	config.NextProtos = []string{"h2"}
	c, err := tls.Dial("tcp4", addr, config)
	if err != nil {
		t.Fatal(err)
	}
	return newClient2(t, c)
}

// ask sends a GET on the next stream.
func (c *client2) ask(t testing.TB) uint32 {
	t.Helper()
	if c.stream++; c.stream > 1 {
		c.stream++
	}
	var b bytes.Buffer
	e := hpack.NewEncoder(&b)
	for _, f := range [][2]string{{":method", "GET"}, {":path", "/"}, {":scheme", "https"}, {":authority", "test"}} {
		_ = e.WriteField(hpack.HeaderField{Name: f[0], Value: f[1]})
	}
	err := c.WriteHeaders(http2.HeadersFrameParam{StreamID: c.stream, BlockFragment: b.Bytes(), EndStream: true, EndHeaders: true})
	if err != nil {
		t.Fatal(err)
	}
	return c.stream
}

// read reads until the stream has ended, or, for stream 0, until the
// connection has. It returns the GOAWAY that it saw.
func (c *client2) read(t testing.TB, stream uint32) (away *http2.GoAwayFrame) {
	t.Helper()
	for {
		f, err := c.ReadFrame()
		if err != nil {
			if stream == 0 && err == io.EOF {
				return away
			}
			t.Fatalf("read: %v", err)
		}
		switch f := f.(type) {
		case *http2.GoAwayFrame:
			away = &http2.GoAwayFrame{LastStreamID: f.LastStreamID, ErrCode: f.ErrCode}
		case *http2.RSTStreamFrame:
			t.Errorf("stream %d was reset: %v", f.StreamID, f.ErrCode)
		default:
			ended := f.Header().Type == http2.FrameData && f.Header().Flags.Has(http2.FlagDataEndStream) ||
				f.Header().Type == http2.FrameHeaders && f.Header().Flags.Has(http2.FlagHeadersEndStream)
			if ended && f.Header().StreamID == stream {
				return away
			}
		}
	}
}

func serve2(t testing.TB, o Options, handler http.HandlerFunc, set func(*http.Server)) (*site, *tls.Config) {
	serverTLS, clientTLS := certificate(t)
	return serve(t, o, handler, func(s *http.Server) {
		s.TLSConfig = serverTLS
		if set != nil {
			set(s)
		}
	}), clientTLS
}

// GOAWAY comes with the next request, on this connection alone; the others get
// theirs in the second half, when it is their turn, and all end orderly.
func TestGoAwayOneByOne(t *testing.T) {
	s, config := serve2(t, Options{Deadline: 5 * time.Second}, ok, nil)
	a, b := dial2(t, s.addr, config), dial2(t, s.addr, config)
	for _, c := range []*client2{a, b} {
		if away := c.read(t, c.ask(t)); away != nil {
			t.Error("GOAWAY before the drain")
		}
	}
	s.waitOpen(t, 2, idle)
	done := s.drain(context.Background())
	receive(t, s.Draining(), "the drain")
	stream := a.ask(t)
	away := a.read(t, stream)
	if last := a.read(t, 0); away == nil {
		away = last
	}
	if away == nil || away.ErrCode != http2.ErrCodeNo || away.LastStreamID != stream {
		t.Errorf("GOAWAY %+v, want stream %d, NO_ERROR", away, stream)
	}
	_ = a.Close()
	var r Report
	testutil.WaitFor(t, patience, func() bool { r = s.Report(); return r.Finished == 1 }, "the end of the first, got %v", &r)
	if r.Phase == PhaseWaiting && (len(r.Open) != 1 || r.Open[0].Told || r.Told != 1) {
		t.Errorf("in the first half: %+v", r)
	}
	if away := b.read(t, 0); away == nil || away.ErrCode != http2.ErrCodeNo || away.LastStreamID != 1 {
		t.Errorf("GOAWAY %+v of the idle connection", away)
	}
	_ = b.Close()
	ended(t, done, 1, 1, 0)
	if err := receive(t, s.served, "Serve"); err != http.ErrServerClosed {
		t.Errorf("Serve: %v", err)
	}
}

// Streams that were open when GOAWAY went out are served to their end.
func TestOpenStreamsFinish(t *testing.T) {
	hold := make(chan struct{})
	var n atomic.Int64
	s, config := serve2(t, Options{Deadline: time.Minute}, func(w http.ResponseWriter, r *http.Request) {
		if n.Add(1) == 1 {
			<-hold
		}
		ok(w, r)
	}, nil)
	c := dial2(t, s.addr, config)
	slow := c.ask(t)
	s.waitOpen(t, 1, func(o Open) bool { return o.Requests == 1 })
	done := s.drain(context.Background())
	receive(t, s.Draining(), "the drain")
	fast := c.ask(t)
	c.read(t, fast)
	close(hold)
	c.read(t, slow)
	c.read(t, 0)
	_ = c.Close()
	ended(t, done, 1, 0, 0)
}

// A stream that is open at the deadline is cut, and its handler knows why.
func TestStreamIsCut(t *testing.T) {
	causes := make(chan error, 1)
	s, config := serve2(t, Options{Deadline: 100 * time.Millisecond}, func(w http.ResponseWriter, r *http.Request) {
		<-r.Context().Done()
		causes <- context.Cause(r.Context())
	}, nil)
	c := dial2(t, s.addr, config)
	stream := c.ask(t)
	s.waitOpen(t, 1, busy)
	done := s.drain(context.Background())
	if err := receive(t, causes, "a cause"); !errors.Is(err, ErrPlanned) {
		t.Errorf("cause %v", err)
	}
	c.read(t, stream) // the handler's empty response
	_ = c.Close()
	ended(t, done, 0, 0, 1)
}

// The same without TLS.
func TestUnencryptedHTTP2(t *testing.T) {
	s := serve(t, Options{Deadline: time.Second}, ok, func(s *http.Server) {
		s.Protocols = new(http.Protocols)
		s.Protocols.SetHTTP1(true)
		s.Protocols.SetUnencryptedHTTP2(true)
	})
	conn, err := net.Dial("tcp4", s.addr)
	if err != nil {
		t.Fatal(err)
	}
	c := newClient2(t, conn)
	c.read(t, c.ask(t))
	one := dial(t, s.addr)
	one.mustDo(t)
	s.waitOpen(t, 2, idle)
	done := s.drain(context.Background())
	if away := c.read(t, 0); away == nil || away.ErrCode != http2.ErrCodeNo {
		t.Errorf("GOAWAY %+v", away)
	}
	_ = c.Close()
	one.wantEOF(t)
	_ = one.Close()
	ended(t, done, 0, 2, 0)
}

// An HTTP/2 that is not net/http's stays, and its clients are told with
// their next response.
func TestForeignHTTP2(t *testing.T) {
	var own any
	s, config := serve2(t, Options{Deadline: time.Minute}, ok, func(s *http.Server) {
		if err := http2.ConfigureServer(s, nil); err != nil { //nolint:staticcheck // what servers do that have it from there
			t.Fatal(err)
		}
		own = len(s.TLSNextProto)
	})
	if own != len(s.server.TLSNextProto) {
		t.Error("TLSNextProto was changed")
	}
	c := dial2(t, s.addr, config)
	c.read(t, c.ask(t))
	s.waitOpen(t, 1, idle)
	done := s.drain(context.Background())
	receive(t, s.Draining(), "the drain")
	away := c.read(t, c.ask(t))
	if last := c.read(t, 0); away == nil {
		away = last
	}
	if away == nil || away.ErrCode != http2.ErrCodeNo {
		t.Errorf("GOAWAY %+v", away)
	}
	_ = c.Close()
	ended(t, done, 1, 0, 0)
}

// HTTP/2 that was turned off stays off.
func TestHTTP2TurnedOff(t *testing.T) {
	for name, set := range map[string]func(*http.Server){
		"TLSNextProto": func(s *http.Server) { s.TLSNextProto = map[string]func(*http.Server, *tls.Conn, http.Handler){} },
		"Protocols": func(s *http.Server) {
			s.Protocols = new(http.Protocols)
			s.Protocols.SetHTTP1(true)
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, config := serve2(t, Options{}, ok, set)
			config.NextProtos = []string{"h2", "http/1.1"}
			c, err := tls.Dial("tcp4", s.addr, config)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if p := c.ConnectionState().NegotiatedProtocol; p != "http/1.1" {
				t.Errorf("negotiated %q", p)
			}
		})
	}
}

// The server's own Shutdown still sends GOAWAY.
func TestShutdownSendsGoAway(t *testing.T) {
	s, config := serve2(t, Options{}, ok, nil)
	c := dial2(t, s.addr, config)
	c.read(t, c.ask(t))
	shut := make(chan error, 1)
	go func() { shut <- s.server.Shutdown(context.Background()) }()
	if away := c.read(t, 0); away == nil || away.ErrCode != http2.ErrCodeNo {
		t.Errorf("GOAWAY %+v", away)
	}
	if err := receive(t, shut, "Shutdown"); err != nil {
		t.Error(err)
	}
}

// The server's HTTP/2 settings and hooks are still its own.
func TestHTTP2Settings(t *testing.T) {
	states := make(chan http.ConnState, 20)
	s, config := serve2(t, Options{}, ok, func(s *http.Server) {
		s.HTTP2 = &http.HTTP2Config{MaxConcurrentStreams: 7}
		s.ConnState = func(_ net.Conn, st http.ConnState) { states <- st }
	})
	c := dial2(t, s.addr, config)
	f, err := c.ReadFrame()
	if err != nil {
		t.Fatal(err)
	}
	if v, _ := f.(*http2.SettingsFrame).Value(http2.SettingMaxConcurrentStreams); v != 7 {
		t.Errorf("%d streams, want 7", v)
	}
	c.read(t, c.ask(t))
	if st := receive(t, states, "a state"); st != http.StateNew {
		t.Errorf("first state %v", st)
	}
}

// Go's client, many requests at a time on each connection, and a drain in
// the middle: it repeats what GOAWAY says was not executed, and each request is
// executed once.
func TestHTTP2LosesNothing(t *testing.T) {
	const transports, workers, requests = 20, 8, 40
	var handled atomic.Int64
	handler := func(w http.ResponseWriter, r *http.Request) {
		handled.Add(1)
		ok(w, r)
	}
	s, config := serve2(t, Options{Deadline: 10 * time.Second}, handler, nil)
	successor := serve(t, Options{}, handler, func(o *http.Server) { o.TLSConfig = s.server.TLSConfig.Clone() })
	addr := &atomic.Value{}
	addr.Store(s.addr)

	var group, warm sync.WaitGroup
	warm.Add(transports)
	begin := make(chan struct{})
	for range transports {
		transport := &http.Transport{
			ForceAttemptHTTP2: true,
			TLSClientConfig:   config.Clone(),
			DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, network, addr.Load().(string))
			},
		}
		t.Cleanup(transport.CloseIdleConnections)
		client := &http.Client{Transport: transport, Timeout: patience}
		post := func() error {
			r, err := client.Post("https://test/", "text/plain", bytes.NewReader([]byte("body")))
			if err != nil {
				return err
			}
			_, err = io.Copy(io.Discard, r.Body)
			if r.ProtoMajor != 2 {
				err = errors.Join(err, errors.New(r.Proto))
			}
			return errors.Join(err, r.Body.Close())
		}
		group.Go(func() {
			if err := post(); err != nil { // makes the connection
				t.Error(err)
			}
			warm.Done()
			<-begin
			var all sync.WaitGroup
			for range workers {
				all.Go(func() {
					for range requests {
						if err := post(); err != nil {
							t.Error(err)
						}
						time.Sleep(time.Duration(rand.IntN(30)) * time.Millisecond) // think
					}
				})
			}
			all.Wait()
		})
	}
	warm.Wait()
	close(begin)
	testutil.WaitFor(t, patience, func() bool { return handled.Load() > transports*workers*3 }, "some load")
	addr.Store(successor.addr)
	r := receive(t, s.drain(context.Background()), "the end of the drain")
	group.Wait()
	if want := int64(transports * (workers*requests + 1)); handled.Load() != want {
		t.Errorf("%d requests handled, want %d", handled.Load(), want)
	}
	if r.err != nil || r.Cut != 0 || r.Crossed != 0 || r.Finished+r.ClosedIdle < transports {
		t.Errorf("%+v, %v", r.Report, r.err)
	}
}
