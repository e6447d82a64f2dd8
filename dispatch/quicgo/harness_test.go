// SPDX-License-Identifier: Apache-2.0

package quicgo_test

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/qlogwriter"

	"instar/dispatch"
	"instar/dispatch/quicgo"
	"instar/internal/testutil"
)

const (
	address  = "127.0.0.1:4433"
	protocol = "echo"
	patience = 20 * time.Second
)

var serverAddr = net.UDPAddrFromAddrPort(netip.MustParseAddrPort(address))

// site is where the servers and clients of a test are: a network namespace and
// a group.
type site struct {
	t    testing.TB
	ns   *testutil.Netns
	root string
}

func newSite(t testing.TB) *site {
	t.Helper()
	return &site{t, testutil.NetNS(t), testutil.BPFFS(t)}
}

func (s *site) options() dispatch.Options { return groupOptions(s.root) }

func groupOptions(root string) dispatch.Options {
	return dispatch.Options{
		Address: address, Service: "test", Root: root,
		// A burst of many clients at once is not to be lost in a full queue.
		ReceiveBuffer: 4 << 20,
	}
}

// snapshot reads the group.
func (s *site) snapshot() dispatch.Snapshot {
	s.t.Helper()
	list, err := dispatch.List(s.root)
	if err != nil || len(list) != 1 || list[0].Err != nil {
		s.t.Fatalf("groups: %+v, %v", list, err)
	}
	return *list[0].Snapshot
}

// verdictsSince returns the verdicts of the packets since the snapshot.
func (s *site) verdictsSince(before dispatch.Snapshot) map[string]uint64 {
	s.t.Helper()
	verdicts := s.snapshot().Verdicts
	for verdict, n := range before.Verdicts {
		verdicts[verdict] -= n
	}
	return verdicts
}

// only fails the test when packets have other verdicts than those.
func (s *site) only(verdicts map[string]uint64, want ...string) {
	s.t.Helper()
	for verdict, n := range verdicts {
		if n != 0 && !slices.Contains(want, verdict) {
			s.t.Errorf("%d packets have the verdict %s", n, verdict)
		}
	}
}

// setup says how a server differs from an ordinary one.
type setup struct {
	options   dispatch.Options
	workers   int // default 2
	tls       *tls.Config
	quic      *quic.Config
	transport func(worker int, t *quic.Transport)
}

// server is a generation that answers on each stream with a line that says who
// it is and where the client is, and then with what it hears.
type server struct {
	*dispatch.Generation
	created  atomic.Int64 // connections that were begun
	verified atomic.Int64 // those of them whose client proved its address with a token
	heard    atomic.Int64 // streams

	mu    sync.Mutex
	begun map[string]bool // the client's first connection ID of each of them

	transports []*quic.Transport
	working    sync.WaitGroup
	closeOnce  sync.Once
	closeErr   error
}

// openServer joins the group, listens and is staged.
func openServer(conf setup) (*server, error) {
	if conf.workers == 0 {
		conf.workers = 2
	}
	if conf.tls == nil {
		conf.tls = &tls.Config{Certificates: []tls.Certificate{certificate()}, NextProtos: []string{protocol}}
	}
	if conf.quic == nil {
		conf.quic = &quic.Config{Allow0RTT: true, HandshakeIdleTimeout: patience, MaxIdleTimeout: time.Minute}
	}
	group, err := dispatch.Open(conf.options)
	if err != nil {
		return nil, err
	}
	s := &server{begun: map[string]bool{}}
	conf.quic = conf.quic.Clone()
	conf.quic.Tracer = func(_ context.Context, _ bool, id quic.ConnectionID) qlogwriter.Trace {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.begun[string(id.Bytes())] = true
		return nil
	}
	if s.Generation, err = group.Join(conf.workers); err != nil {
		return nil, errors.Join(err, group.Close())
	}
	if s.transports, err = quicgo.Transports(s.Generation); err != nil {
		return nil, errors.Join(err, s.close())
	}
	for worker, transport := range s.transports {
		if conf.transport != nil {
			conf.transport(worker, transport)
		}
		transport.ConnContext = func(ctx context.Context, info *quic.ClientInfo) (context.Context, error) {
			s.created.Add(1)
			if info.AddrVerified {
				s.verified.Add(1)
			}
			return ctx, nil
		}
		listener, err := transport.ListenEarly(quicgo.ServerTLS(s.Generation, conf.tls), quicgo.ServerConfig(s.Generation, conf.quic))
		if err != nil {
			return nil, errors.Join(err, s.close())
		}
		for range 16 { // quic-go refuses connections when too many wait to be accepted
			s.working.Go(func() {
				for {
					conn, err := listener.Accept(context.Background())
					if err != nil {
						return
					}
					s.working.Go(func() { s.serve(conn, worker) })
				}
			})
		}
	}
	return s, nil
}

func (s *server) serve(conn *quic.Conn, worker int) {
	for {
		stream, err := conn.AcceptStream(context.Background())
		if err != nil {
			return
		}
		s.heard.Add(1)
		s.working.Go(func() {
			_, err := fmt.Fprintf(stream, "%d %d %v\n", s.Number(), worker, conn.RemoteAddr())
			if err == nil {
				_, err = io.Copy(stream, stream)
			}
			if err == nil {
				_ = stream.Close() // a client that is gone
			}
		})
	}
}

// has says how many of the handshakes, named by the client's first connection
// ID, were begun here.
func (s *server) has(handshakes []string) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, id := range handshakes {
		if s.begun[id] {
			n++
		}
	}
	return n
}

// close ends the server without a word to its clients, as a crash does.
func (s *server) close() error {
	s.closeOnce.Do(func() {
		for _, transport := range s.transports {
			s.closeErr = errors.Join(s.closeErr, transport.Close())
		}
		s.working.Wait()
		s.closeErr = errors.Join(s.closeErr, s.Close(), s.Group().Close())
	})
	return s.closeErr
}

// start starts a server in this process.
func (s *site) start(conf setup) *server {
	s.t.Helper()
	if conf.options.Address == "" {
		conf.options = s.options()
	}
	var (
		server *server
		err    error
	)
	s.ns.Run(func() { server, err = openServer(conf) })
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { s.stop(server) })
	return server
}

func (s *site) stop(server *server) {
	s.t.Helper()
	if err := server.close(); err != nil {
		s.t.Error(err)
	}
}

// flip makes the server's generation active.
func (s *site) flip(server *server) {
	s.t.Helper()
	if err := server.Activate(); err != nil {
		s.t.Fatal(err)
	}
}

// serverProcess is a server that is a process of its own. Its arguments are the
// group's root and the number of workers.
var serverProcess = testutil.NewProgram("server", func(c *testutil.Conversation) error {
	workers, err := strconv.Atoi(c.Args[1])
	if err != nil {
		return err
	}
	s, err := openServer(setup{options: groupOptions(c.Args[0]), workers: workers})
	if err != nil {
		return err
	}
	c.Send("%d", s.Number())
	for {
		line, ok := c.Recv()
		switch {
		case !ok:
			return s.close()
		case line == "activate":
			if err := s.Activate(); err != nil {
				return err
			}
			c.Send("active")
		default:
			var ids []string
			for word := range strings.FieldsSeq(line) {
				id, err := hex.DecodeString(word)
				if err != nil {
					return err
				}
				ids = append(ids, string(id))
			}
			c.Send("%d", s.has(ids))
		}
	}
})

// process is a running serverProcess.
type process struct {
	*testutil.Process
	number uint32
}

func (s *site) startProcess(workers int) *process {
	s.t.Helper()
	p := &process{Process: serverProcess.Start(s.t, testutil.Options{NS: s.ns, Args: []string{s.root, strconv.Itoa(workers)}})}
	number, err := strconv.ParseUint(p.Recv(), 10, 32)
	if err != nil {
		s.t.Fatal(err)
	}
	p.number = uint32(number)
	return p
}

func (p *process) activate() {
	p.Send("activate")
	p.Expect("active")
}

// has is server.has of the process.
func (p *process) has(t testing.TB, handshakes []string) int {
	t.Helper()
	line := ""
	for _, id := range handshakes {
		line += hex.EncodeToString([]byte(id)) + " "
	}
	n, err := strconv.Atoi(p.Ask("%s", line))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// certificate is the one of the servers that have no other.
var certificate = sync.OnceValue(func() tls.Certificate { return newCertificate("localhost") })

func newCertificate(name string) tls.Certificate {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		panic(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{name}, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		panic(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// wire is a client's packet connection. The test can hold what passes, send it
// again, and move the client to another port without its knowledge.
type wire struct {
	listen func() (*net.UDPConn, error)

	mu       sync.Mutex
	changed  *sync.Cond
	socket   *net.UDPConn
	deadline time.Time
	closed   bool
	leave    func(datagram []byte) bool // whether a datagram may leave; the others are held
	deaf     bool                       // what arrives waits
	held     []packet
	sent     []packet
	received [][]byte
}

type packet struct {
	data []byte
	to   net.Addr
}

var _ net.PacketConn = (*wire)(nil)

func (s *site) newWire() (*wire, error) {
	w := &wire{listen: func() (c *net.UDPConn, err error) {
		s.ns.Run(func() { c, err = net.ListenUDP("udp4", nil) })
		return c, err
	}}
	w.changed = sync.NewCond(&w.mu)
	var err error
	w.socket, err = w.listen()
	return w, err
}

// hold lets datagrams leave while leave says so, and holds the others.
func (w *wire) hold(leave func(datagram []byte) bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.leave = leave
}

// first lets n datagrams leave and holds the others.
func first(n int) func([]byte) bool {
	return func([]byte) bool {
		n--
		return n >= 0
	}
}

// listenNoMore makes everything that arrives wait.
func (w *wire) listenNoMore() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.deaf = true
}

// release ends hold and listenNoMore.
func (w *wire) release() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.leave, w.deaf = nil, false
	w.changed.Broadcast()
	for _, p := range w.held {
		if err := w.send(p); err != nil {
			return err
		}
	}
	w.held = nil
	return nil
}

// repeat sends again what was sent so far.
func (w *wire) repeat() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, p := range slices.Clone(w.sent) {
		if err := w.send(p); err != nil {
			return err
		}
	}
	return nil
}

// await waits until cond, which may read what was sent, held and received.
func (w *wire) await(cond func() bool) error {
	timer := time.AfterFunc(patience, w.changed.Broadcast)
	defer timer.Stop()
	end := time.Now().Add(patience)
	w.mu.Lock()
	defer w.mu.Unlock()
	for !cond() {
		if time.Now().After(end) {
			return fmt.Errorf("waited for datagrams in vain: %d sent, %d held, %d received", len(w.sent), len(w.held), len(w.received))
		}
		w.changed.Wait()
	}
	return nil
}

// forget forgets what was sent and received.
func (w *wire) forget() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.sent, w.received = nil, nil
}

// traffic is what was sent and received since the last call of forget.
func (w *wire) traffic() (sent, received [][]byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, p := range w.sent {
		sent = append(sent, p.data)
	}
	return sent, slices.Clone(w.received)
}

// rebind moves the client to another port, as a NAT does.
func (w *wire) rebind() error {
	next, err := w.listen()
	if err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	old := w.socket
	if err := next.SetReadDeadline(w.deadline); err != nil {
		return errors.Join(err, next.Close())
	}
	w.socket = next
	return old.Close()
}

// send needs mu.
func (w *wire) send(p packet) error {
	w.sent = append(w.sent, p)
	w.changed.Broadcast()
	_, err := w.socket.WriteTo(p.data, p.to)
	return err
}

func (w *wire) WriteTo(b []byte, to net.Addr) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := packet{slices.Clone(b), to}
	if w.leave != nil && !w.leave(b) {
		w.held = append(w.held, p)
		w.changed.Broadcast()
		return len(b), nil
	}
	return len(b), w.send(p)
}

func (w *wire) ReadFrom(b []byte) (int, net.Addr, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for {
		socket := w.socket
		w.mu.Unlock()
		n, from, err := socket.ReadFrom(b)
		w.mu.Lock()
		if err != nil {
			if w.socket != socket && !w.closed {
				continue // moved
			}
			return n, from, err
		}
		for w.deaf && !w.closed && w.deadline.IsZero() {
			w.changed.Wait()
		}
		w.received = append(w.received, slices.Clone(b[:n]))
		w.changed.Broadcast()
		return n, from, nil
	}
}

func (w *wire) SetReadDeadline(t time.Time) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.deadline = t
	w.changed.Broadcast()
	return w.socket.SetReadDeadline(t)
}

func (w *wire) Close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed = true
	w.changed.Broadcast()
	return w.socket.Close()
}

func (w *wire) LocalAddr() net.Addr {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.socket.LocalAddr()
}

func (w *wire) SetDeadline(t time.Time) error    { return w.SetReadDeadline(t) }
func (w *wire) SetWriteDeadline(time.Time) error { return nil }

// quic-go complains where these are missing.
func (w *wire) SetReadBuffer(int) error  { return nil }
func (w *wire) SetWriteBuffer(int) error { return nil }

// client is a QUIC client with at most one connection. Its methods return
// errors, so that many of them can work at once.
type client struct {
	site      *site
	wire      *wire
	transport *quic.Transport
	more      []*client // sockets that the connection moved to
	conn      *quic.Conn
	early     bool // talks before it hears anything of the server

	tls  *tls.Config
	quic *quic.Config
}

func (s *site) newClient() (*client, error) {
	w, err := s.newWire()
	if err != nil {
		return nil, err
	}
	return &client{
		site: s, wire: w, transport: &quic.Transport{Conn: w},
		tls:  &tls.Config{ServerName: "localhost", InsecureSkipVerify: true, NextProtos: []string{protocol}},
		quic: &quic.Config{HandshakeIdleTimeout: patience, MaxIdleTimeout: time.Minute},
	}, nil
}

// client makes a client that is closed when the test ends.
func (s *site) client() *client {
	s.t.Helper()
	c, err := s.newClient()
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() {
		if err := c.close(); err != nil {
			s.t.Error(err)
		}
	})
	return c
}

// visitor is a client that connected and talked.
func (s *site) visitor() (*client, answer) {
	s.t.Helper()
	c := s.client()
	a, err := c.visit()
	if err != nil {
		s.t.Fatal(err)
	}
	return c, a
}

func (c *client) dial() error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var err error
	c.conn, err = c.transport.Dial(ctx, serverAddr, c.tls, c.quic)
	return err
}

// dialEarly connects. With early, which needs a session to resume with 0-RTT,
// it returns before the handshake is complete, and the client hears the server
// once it said something. Otherwise quic-go v0.65 reads the server's transport
// parameters for the stream while it writes them for the handshake.
func (c *client) dialEarly(early bool) error {
	if c.early = early; early {
		c.wire.listenNoMore()
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var err error
	c.conn, err = c.transport.DialEarly(ctx, serverAddr, c.tls, c.quic)
	return err
}

func (c *client) visit() (answer, error) {
	if err := c.dial(); err != nil {
		return answer{}, fmt.Errorf("dial: %w", err)
	}
	return c.talk()
}

// answer says who answered, and which address the client has there.
type answer struct {
	generation uint32
	worker     int
	remote     string
}

// talk says something and wants to hear it again.
func (c *client) talk() (answer, error) { return c.say(make([]byte, 100), nil) }

// say sends the words, which are not empty, and calls mid, if there is one,
// when half of them came back.
func (c *client) say(words []byte, mid func() error) (a answer, err error) {
	ctx, cancel := context.WithTimeout(c.conn.Context(), patience)
	defer cancel()
	stream, err := c.conn.OpenStreamSync(ctx)
	if err != nil {
		return a, fmt.Errorf("open stream: %w", err)
	}
	if err := stream.SetDeadline(time.Now().Add(patience)); err != nil {
		return a, err
	}
	half := len(words) / 2
	if _, err := stream.Write(words[:half]); err != nil {
		return a, fmt.Errorf("send: %w", err)
	}
	if c.early {
		c.early = false
		if err := c.wire.release(); err != nil {
			return a, err
		}
	}
	heard := bufio.NewReader(stream)
	line, err := heard.ReadString('\n')
	if err != nil {
		return a, fmt.Errorf("receive: %w", err)
	}
	if _, err := fmt.Sscan(line, &a.generation, &a.worker, &a.remote); err != nil {
		return a, fmt.Errorf("receive %q: %w", line, err)
	}
	back := make([]byte, half)
	if _, err := io.ReadFull(heard, back); err != nil {
		return a, fmt.Errorf("receive first half: %w", err)
	}
	if mid != nil {
		if err := mid(); err != nil {
			return a, err
		}
	}
	if _, err := stream.Write(words[half:]); err != nil {
		return a, fmt.Errorf("send: %w", err)
	}
	if err := stream.Close(); err != nil {
		return a, err
	}
	rest, err := io.ReadAll(heard)
	if err != nil {
		return a, fmt.Errorf("receive second half: %w", err)
	}
	if sha256.Sum256(append(back, rest...)) != sha256.Sum256(words) {
		return a, errors.New("heard something else than was said")
	}
	return a, nil
}

// move migrates the connection to another socket.
func (c *client) move() error {
	next, err := c.site.newClient()
	if err != nil {
		return err
	}
	c.more = append(c.more, next)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	path, err := c.conn.AddPath(next.transport)
	if err != nil {
		return fmt.Errorf("add path: %w", err)
	}
	if err := path.Probe(ctx); err != nil {
		return fmt.Errorf("probe path: %w", err)
	}
	if err := path.Switch(); err != nil {
		return fmt.Errorf("switch path: %w", err)
	}
	return nil
}

// current is the packet connection that the client sends on.
func (c *client) current() *wire {
	if n := len(c.more); n > 0 {
		return c.more[n-1].wire
	}
	return c.wire
}

func (c *client) close() error {
	var err error
	if c.conn != nil {
		err = c.conn.CloseWithError(0, "")
	}
	for _, s := range append(c.more, c) {
		err = errors.Join(err, s.transport.Close(), s.transport.Conn.Close())
	}
	return err
}

func port(addr net.Addr) int { return addr.(*net.UDPAddr).Port }

// within fails the test when the channel is not closed in time.
func within(t testing.TB, done <-chan struct{}, what string) {
	t.Helper()
	select {
	case <-done:
	case <-time.After(patience):
		t.Fatalf("waited in vain: %s", what)
	}
}
