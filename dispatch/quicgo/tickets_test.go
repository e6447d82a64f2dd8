// SPDX-License-Identifier: Apache-2.0

package quicgo

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"math/big"
	"net"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"

	"instar/internal/testutil"
)

func TestMain(m *testing.M) { testutil.Main(m) }

// clock is a time that tests set.
type clock struct{ atomic.Int64 }

func (c *clock) set(epoch float64) { c.Store(int64(epoch * ticketEpoch.Seconds())) }
func (c *clock) now() time.Time    { return time.Unix(c.Load(), 0) }

// secretOf derives secrets as a group does: from one master secret.
func secretOf(master string) func(string, int) ([]byte, error) {
	return func(label string, n int) ([]byte, error) {
		sum := sha256.Sum256([]byte(master + "/" + label))
		return sum[:n], nil
	}
}

func certificate(t testing.TB, name string) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{name}, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// server is a QUIC server whose connections complete their handshake and wait.
type server struct {
	addr net.Addr
}

func serve(t testing.TB, tlsConfig *tls.Config, quicConfig *quic.Config) *server {
	t.Helper()
	socket, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	transport := &quic.Transport{Conn: socket}
	if _, err := transport.ListenEarly(tlsConfig, quicConfig); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(transport.Close(), socket.Close()); err != nil {
			t.Error(err)
		}
	})
	return &server{socket.LocalAddr()}
}

// cache is a session cache that says when it got a ticket.
type cache struct {
	tls.ClientSessionCache
	put chan struct{}
}

func newCache() *cache { return &cache{tls.NewLRUClientSessionCache(1), make(chan struct{}, 16)} }

func (c *cache) Put(key string, state *tls.ClientSessionState) {
	c.ClientSessionCache.Put(key, state)
	c.put <- struct{}{}
}

// visit connects, waits for a session ticket and returns the state of the
// connection.
func (s *server) visit(t testing.TB, sessions *cache) quic.ConnectionState {
	t.Helper()
	socket, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	transport := &quic.Transport{Conn: socket}
	defer transport.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	conn, err := transport.DialEarly(ctx, s.addr, &tls.Config{
		ServerName: "localhost", InsecureSkipVerify: true, NextProtos: []string{http3.NextProtoH3}, ClientSessionCache: sessions,
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.CloseWithError(0, "") }()
	if conn, err = conn.NextConnection(ctx); err != nil {
		t.Fatal(err)
	}
	select {
	case <-sessions.put:
	case <-ctx.Done():
		t.Fatal("no session ticket")
	}
	return conn.ConnectionState()
}

// Generations with one master secret take each other's tickets, however the
// configurations are wrapped; others do not.
func TestTicketsOfGenerations(t *testing.T) {
	base := func() *tls.Config {
		return &tls.Config{Certificates: []tls.Certificate{certificate(t, "localhost")}}
	}
	conf := &quic.Config{Allow0RTT: true}
	var time clock
	time.set(1000)
	keys := func(master string) *ticketKeys { return &ticketKeys{secret: secretOf(master), now: time.now} }
	forms := map[string]func(master string) *tls.Config{
		"around": func(master string) *tls.Config { return http3.ConfigureTLSConfig(serverTLS(base(), keys(master))) },
		"within": func(master string) *tls.Config { return serverTLS(http3.ConfigureTLSConfig(base()), keys(master)) },
		"per client": func(master string) *tls.Config {
			outer, inner := base(), base()
			outer.NextProtos = []string{http3.NextProtoH3}
			inner.NextProtos = outer.NextProtos
			outer.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) { return inner, nil }
			return serverTLS(outer, keys(master))
		},
		"per client, none": func(master string) *tls.Config {
			outer := base()
			outer.NextProtos = []string{http3.NextProtoH3}
			outer.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) { return nil, nil }
			return serverTLS(outer, keys(master))
		},
	}
	for name, form := range forms {
		first, second, stranger := serve(t, form("a"), conf), serve(t, form("a"), conf), serve(t, form("b"), conf)
		sessions := newCache()
		if s := first.visit(t, sessions); s.TLS.DidResume || s.Used0RTT {
			t.Errorf("%s: the first visit resumes", name)
		}
		if s := first.visit(t, sessions); !s.TLS.DidResume || !s.Used0RTT {
			t.Errorf("%s: the same generation does not take its own ticket", name)
		}
		if s := second.visit(t, sessions); !s.TLS.DidResume || !s.Used0RTT {
			t.Errorf("%s: the next generation does not take the ticket", name)
		}
		if s := stranger.visit(t, sessions); s.TLS.DidResume || s.Used0RTT {
			t.Errorf("%s: a server with another secret takes the ticket", name)
		}
	}
	// http3.Server wraps the tickets once more when it makes the listener.
	sessions := newCache()
	for i := range 3 {
		s := serveHTTP3(t, serverTLS(base(), keys("a")))
		if got := s.visit(t, sessions).TLS.DidResume; got != (i > 0) {
			t.Errorf("http3.Server, visit %d: resumed = %t", i, got)
		}
	}
}

func serveHTTP3(t testing.TB, conf *tls.Config) *server {
	t.Helper()
	socket, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	srv := &http3.Server{TLSConfig: conf}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = srv.Serve(socket)
	}()
	t.Cleanup(func() {
		srv.Close()
		<-done
		socket.Close()
	})
	return &server{socket.LocalAddr()}
}

// A ticket is good until the end of the next epoch.
func TestTicketRotation(t *testing.T) {
	var time clock
	conf := serverTLS(&tls.Config{Certificates: []tls.Certificate{certificate(t, "localhost")}, NextProtos: []string{http3.NextProtoH3}},
		&ticketKeys{secret: secretOf("a"), now: time.now})
	s := serve(t, conf, &quic.Config{Allow0RTT: true})
	for _, tc := range []struct {
		issued, used float64
		resumes      bool
	}{
		{1000, 1000.9, true},
		{1000.1, 1001.9, true},
		{1000.9, 1002.1, false},
		{1001.1, 1000.9, true}, // issued by a clock that is ahead
		{1002.1, 1000.9, false},
	} {
		sessions := newCache()
		time.set(tc.issued)
		s.visit(t, sessions)
		time.set(tc.used)
		if got := s.visit(t, sessions).TLS.DidResume; got != tc.resumes {
			t.Errorf("issued at %v, used at %v: resumed = %t, want %t", tc.issued, tc.used, got, tc.resumes)
		}
	}
}

func TestTicketKeys(t *testing.T) {
	var (
		time   clock
		broken error
		labels []string
	)
	k := &ticketKeys{now: time.now, secret: func(label string, n int) ([]byte, error) {
		labels = append(labels, fmt.Sprint(label, " ", n))
		if broken != nil {
			return nil, broken
		}
		return secretOf("a")(label, n)
	}}
	broken = errors.New("broken")
	if _, _, err := k.current(); !errors.Is(err, broken) {
		t.Errorf("without any key: %v", err)
	}
	broken, labels = nil, nil
	time.set(40000.5)
	epoch, list, err := k.current()
	want := []string{"tls session ticket 40000 32", "tls session ticket 39999 32", "tls session ticket 40001 32"}
	if err != nil || epoch != 40000 || len(list) != 3 || !slices.Equal(labels, want) {
		t.Errorf("epoch %d, %d keys, %v; labels %q", epoch, len(list), err, labels)
	}
	labels = nil
	if _, _, err := k.current(); err != nil || len(labels) != 0 {
		t.Errorf("derived again within the epoch: %q, %v", labels, err)
	}
	// The group may be closed when an old generation still accepts handshakes.
	broken = errors.New("closed")
	time.set(40001)
	if e, again, err := k.current(); err != nil || e != 40000 || &again[0] != &list[0] {
		t.Errorf("no new keys: epoch %d, %v", e, err)
	}
}

// The certificate is chosen for each handshake.
func TestCertificateForEachHandshake(t *testing.T) {
	var served atomic.Pointer[tls.Certificate]
	conf := serverTLS(&tls.Config{
		NextProtos:     []string{http3.NextProtoH3},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return served.Load(), nil },
	}, &ticketKeys{secret: secretOf("a"), now: time.Now})
	s := serve(t, conf, nil)
	for _, name := range []string{"one", "two"} {
		cert := certificate(t, name)
		served.Store(&cert)
		state := s.visit(t, newCache())
		if got := state.TLS.PeerCertificates[0].DNSNames; !slices.Equal(got, []string{name}) {
			t.Errorf("served %v, want %s", got, name)
		}
	}
}

// Only an active generation takes early data. The handshake works either way.
func TestEarlyData(t *testing.T) {
	var active atomic.Bool
	perClient := &quic.Config{Allow0RTT: true}
	for name, base := range map[string]*quic.Config{
		"plain":            {Allow0RTT: true},
		"per client":       {GetConfigForClient: func(*quic.ClientInfo) (*quic.Config, error) { return perClient, nil }},
		"per client, none": {Allow0RTT: true, GetConfigForClient: func(*quic.ClientInfo) (*quic.Config, error) { return nil, nil }},
	} {
		active.Store(true)
		tlsConfig := serverTLS(&tls.Config{Certificates: []tls.Certificate{certificate(t, "localhost")}, NextProtos: []string{http3.NextProtoH3}},
			&ticketKeys{secret: secretOf("a"), now: time.Now})
		s := serve(t, tlsConfig, serverConfig(base, active.Load))
		sessions := newCache()
		s.visit(t, sessions)
		if s := s.visit(t, sessions); !s.TLS.DidResume || !s.Used0RTT {
			t.Errorf("%s: active: resumed = %t, early data = %t", name, s.TLS.DidResume, s.Used0RTT)
		}
		active.Store(false)
		if s := s.visit(t, sessions); !s.TLS.DidResume || s.Used0RTT {
			t.Errorf("%s: not active: resumed = %t, early data = %t", name, s.TLS.DidResume, s.Used0RTT)
		}
		if !perClient.Allow0RTT {
			t.Fatalf("%s: changed a configuration of the caller", name)
		}
	}
	// None is allowed where none was, and refusals stay refusals.
	if c, err := serverConfig(nil, func() bool { return true }).GetConfigForClient(nil); err != nil || c.Allow0RTT {
		t.Errorf("no base: %+v, %v", c, err)
	}
	refusal := errors.New("no")
	_, err := serverConfig(&quic.Config{GetConfigForClient: func(*quic.ClientInfo) (*quic.Config, error) { return nil, refusal }},
		func() bool { return true }).GetConfigForClient(nil)
	if !errors.Is(err, refusal) {
		t.Errorf("refusal: %v", err)
	}
}
