// SPDX-License-Identifier: Apache-2.0

package quicgo

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"

	"instar/dispatch"
	"instar/dispatch/connid"
	"instar/internal/testutil"
)

const (
	groupAddr = "127.0.0.1:4433"
	patience  = 10 * time.Second
)

// generation is a generation that echoes streams.
type generation struct {
	*dispatch.Generation
	transports []*quic.Transport
	accepted   chan *quic.Conn
}

// join opens the group once more and serves on a new generation of it.
func join(t testing.TB, root string, workers int, configure ...func(*quic.Transport)) *generation {
	t.Helper()
	group, err := dispatch.Open(dispatch.Options{Address: groupAddr, Root: root, Service: "test"})
	if err != nil {
		t.Fatal(err)
	}
	gen, err := group.Join(workers)
	if err != nil {
		t.Fatal(errors.Join(err, group.Close()))
	}
	g := &generation{Generation: gen, accepted: make(chan *quic.Conn, 256)}
	t.Cleanup(func() {
		g.stop(t)
		if err := errors.Join(gen.Close(), group.Close()); err != nil {
			t.Error(err)
		}
	})
	if g.transports, err = Transports(gen); err != nil {
		t.Fatal(err)
	}
	tlsConfig := ServerTLS(gen, &tls.Config{Certificates: []tls.Certificate{certificate(t, "localhost")}, NextProtos: []string{http3.NextProtoH3}})
	for _, transport := range g.transports {
		for _, f := range configure {
			f(transport)
		}
		listener, err := transport.ListenEarly(tlsConfig, ServerConfig(gen, &quic.Config{Allow0RTT: true}))
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			for {
				conn, err := listener.Accept(context.Background())
				if err != nil {
					return
				}
				g.accepted <- conn
				go echo(conn)
			}
		}()
	}
	return g
}

// stop ends the transports without a word to the clients, as a crash does.
func (g *generation) stop(t testing.TB) {
	t.Helper()
	for _, transport := range g.transports {
		if err := transport.Close(); err != nil {
			t.Error(err)
		}
	}
}

func echo(conn *quic.Conn) {
	for {
		stream, err := conn.AcceptStream(context.Background())
		if err != nil {
			return
		}
		go func() {
			if _, err := io.Copy(stream, stream); err == nil {
				_ = stream.Close()
			}
		}()
	}
}

func activate(t testing.TB, g *generation) {
	t.Helper()
	if err := g.Activate(); err != nil {
		t.Fatal(err)
	}
}

// peer is a client with a connection.
type peer struct {
	*quic.Conn
	t testing.TB
}

func newTransport(t testing.TB) *quic.Transport {
	t.Helper()
	socket, err := net.ListenUDP("udp4", nil)
	if err != nil {
		t.Fatal(err)
	}
	transport := &quic.Transport{Conn: socket}
	t.Cleanup(func() {
		if err := errors.Join(transport.Close(), socket.Close()); err != nil {
			t.Error(err)
		}
	})
	return transport
}

func dial(t testing.TB) *peer {
	t.Helper()
	addr, err := net.ResolveUDPAddr("udp", groupAddr)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	conn, err := newTransport(t).Dial(ctx, addr, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{http3.NextProtoH3}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return &peer{conn, t}
}

// talk says something and wants to hear it again.
func (p *peer) talk() error {
	ctx, cancel := context.WithTimeout(p.t.Context(), patience)
	defer cancel()
	stream, err := p.OpenStreamSync(ctx)
	if err != nil {
		return err
	}
	if err := stream.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	const words = "is anybody there"
	if _, err := io.WriteString(stream, words); err != nil {
		return err
	}
	if err := stream.Close(); err != nil {
		return err
	}
	heard, err := io.ReadAll(stream)
	if err == nil && string(heard) != words {
		err = errors.New("heard " + string(heard))
	}
	return err
}

// move migrates to a new port.
func (p *peer) move() error {
	ctx, cancel := context.WithTimeout(p.t.Context(), patience)
	defer cancel()
	path, err := p.AddPath(newTransport(p.t))
	if err != nil {
		return err
	}
	if err := path.Probe(ctx); err != nil {
		return err
	}
	return path.Switch()
}

// 200 of 200 connections of a server with several workers survive two
// migrations, one of them after an upgrade.
func TestMigrationsAcrossUpgrade(t *testing.T) {
	testutil.NetNS(t)
	root := testutil.BPFFS(t)
	first := join(t, root, 4)
	activate(t, first)
	peers := make([]*peer, 200)
	for i := range peers {
		peers[i] = dial(t)
		if err := peers[i].move(); err != nil {
			t.Fatalf("first migration of connection %d: %v", i, err)
		}
		if err := peers[i].talk(); err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
	}
	second := join(t, root, 3)
	activate(t, second)
	for i, p := range peers {
		if err := p.move(); err != nil {
			t.Errorf("second migration of connection %d: %v", i, err)
			continue
		}
		if err := p.talk(); err != nil {
			t.Errorf("connection %d after the upgrade: %v", i, err)
		}
	}
	if n := len(second.accepted); n != 0 {
		t.Errorf("the second generation accepted %d connections", n)
	}
	if err := dial(t).talk(); err != nil {
		t.Errorf("new connection: %v", err)
	}
	if n := len(second.accepted); n != 1 {
		t.Errorf("the second generation accepted %d connections, want 1", n)
	}
}

// The client of a generation that died learns of it in one round trip, from
// the generation that is active now.
func TestStatelessReset(t *testing.T) {
	testutil.NetNS(t)
	root := testutil.BPFFS(t)
	first := join(t, root, 2)
	activate(t, first)
	p := dial(t)
	if err := p.talk(); err != nil {
		t.Fatal(err)
	}
	second := join(t, root, 2)
	activate(t, second)
	first.stop(t)
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	err := p.talk()
	if _, ok := errors.AsType[*quic.StatelessResetError](err); !ok {
		t.Errorf("talk to a dead server: %v, want a stateless reset", err)
	}
	if took := time.Since(began); took > time.Second {
		t.Errorf("the client heard it after %v", took)
	}
}

// owner says that all sockets are of one generation.
func owner(g *generation) func(connid.Handle) uint32 {
	return func(connid.Handle) uint32 { return g.Number() }
}

// Generations have the same keys, and connection IDs that name their sockets.
func TestTransport(t *testing.T) {
	testutil.NetNS(t)
	root := testutil.BPFFS(t)
	first, second := join(t, root, 2), join(t, root, 3)
	one, two := first.transports, second.transports
	if len(one) != 2 || len(two) != 3 {
		t.Fatalf("%d and %d transports", len(one), len(two))
	}
	for _, transport := range two {
		if *transport.StatelessResetKey != *one[0].StatelessResetKey || *transport.TokenGeneratorKey != *one[0].TokenGeneratorKey {
			t.Error("generations have different keys")
		}
	}
	if [32]byte(*one[0].StatelessResetKey) == [32]byte(*one[0].TokenGeneratorKey) {
		t.Error("one key for two purposes")
	}
	for i, transport := range two {
		if transport.Conn != second.Conns()[i] {
			t.Errorf("transport %d is not on socket %d", i, i)
		}
		id, err := transport.ConnectionIDGenerator.GenerateConnectionID()
		if err != nil || id.Len() != transport.ConnectionIDLength || id.Len() != transport.ConnectionIDGenerator.ConnectionIDLen() {
			t.Fatalf("connection ID %v, %v", id, err)
		}
		handle, ok := second.ConnectionIDs().Open(id.Bytes(), owner(second))
		if !ok || handle != second.Handle(i) {
			t.Errorf("connection ID of worker %d names %v, %t", i, handle, ok)
		}
		if _, ok := second.ConnectionIDs().Open(id.Bytes(), owner(first)); ok {
			t.Error("a connection ID is good for another generation")
		}
	}
	for _, worker := range []int{-1, 3} {
		if _, err := Transport(second.Generation, worker); err == nil {
			t.Errorf("a transport for worker %d of 3", worker)
		}
	}
}

// A token that one generation gave counts as proof of the address in the next.
func TestTokenOfPredecessor(t *testing.T) {
	testutil.NetNS(t)
	root := testutil.BPFFS(t)
	verified := make(chan bool, 1)
	watch := func(transport *quic.Transport) {
		transport.ConnContext = func(ctx context.Context, info *quic.ClientInfo) (context.Context, error) {
			verified <- info.AddrVerified
			return ctx, nil
		}
	}
	activate(t, join(t, root, 1, watch))
	tokens := quic.NewLRUTokenStore(1, 4)
	visit := func() {
		addr, err := net.ResolveUDPAddr("udp", groupAddr)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		conn, err := newTransport(t).Dial(ctx, addr, &tls.Config{ServerName: "localhost", InsecureSkipVerify: true, NextProtos: []string{http3.NextProtoH3}},
			&quic.Config{TokenStore: tokens})
		if err != nil {
			t.Fatal(err)
		}
		if err := (&peer{conn, t}).talk(); err != nil {
			t.Fatal(err)
		}
		if err := conn.CloseWithError(0, ""); err != nil {
			t.Fatal(err)
		}
	}
	visit()
	if <-verified {
		t.Error("the first visit has a token")
	}
	visit()
	if !<-verified {
		t.Error("the generation does not take its own token")
	}
	activate(t, join(t, root, 1, watch))
	visit()
	if !<-verified {
		t.Error("the next generation does not take the token")
	}
}
