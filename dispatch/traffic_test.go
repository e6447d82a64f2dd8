// SPDX-License-Identifier: Apache-2.0

package dispatch_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"instar/dispatch"
	"instar/dispatch/connid"
)

func contextWithPatience() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), patience)
}

// The tests speak a protocol that looks to the data plane like QUIC. Clients
// start a flow with a long header and a connection ID of their own; the answer
// has the server's ID, which later packets use. Every datagram is answered.
//
//	question: long header, or short header; then 8 octets that the answer repeats
//	answer:   kind, 4 octets generation, worker, the 8 octets, connection ID
const (
	answerNew   = 'N' // to a long header
	answerOwner = 'O' // to an ID of the socket's own
	answerReset = 'R' // to any other ID
	answerPlain = 'P' // to a datagram that is no QUIC: see plainQuestion

	answerHead = 1 + 4 + 1 + 8
)

// plainQuestion starts a datagram for stateless steering.
const plainQuestion = 0x00

// service answers on the sockets of a generation until they are closed.
type service struct {
	gen     *dispatch.Generation
	readers sync.WaitGroup
	// datagrams counts those that were read.
	datagrams atomic.Int64
}

func serve(n *dispatch.Generation) *service {
	s := &service{gen: n}
	for worker, conn := range n.Conns() {
		s.readers.Go(func() { s.read(worker, conn) })
	}
	return s
}

// wait waits until the sockets are closed.
func (s *service) wait() { s.readers.Wait() }

func (s *service) read(worker int, conn *net.UDPConn) {
	b := make([]byte, 2048)
	for {
		n, from, err := conn.ReadFromUDPAddrPort(b)
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			continue
		}
		s.datagrams.Add(1)
		// The client may be gone.
		_, _ = conn.WriteToUDPAddrPort(s.answer(worker, b[:n]), from)
	}
}

func (s *service) answer(worker int, question []byte) []byte {
	codec, own := s.gen.ConnectionIDs(), s.gen.Handle(worker)
	kind := byte(answerReset)
	switch {
	case len(question) == 9 && question[0] == plainQuestion:
		kind = answerPlain
	case len(question) > 0 && question[0]&0x80 != 0:
		kind = answerNew
	default:
		if id, ok := codec.ShortDCID(question); ok {
			// Only IDs of this generation open with its number.
			h, ok := codec.Open(id, func(connid.Handle) uint32 { return s.gen.Number() })
			if ok && h == own {
				kind = answerOwner
			}
		}
	}
	a := binary.BigEndian.AppendUint32([]byte{kind}, s.gen.Number())
	a = append(a, byte(worker))
	a = append(a, tail(question)...)
	if kind == answerNew {
		// It fails for generation 0 only.
		a, _ = codec.Append(a, own, s.gen.Number())
	}
	return a
}

// tail is the last 8 octets.
func tail(b []byte) []byte { return b[max(0, len(b)-8):] }

// flow is a client's connection.
type flow struct {
	id     []byte
	gen    uint32
	worker int
}

// client speaks the protocol on one socket, one question at a time.
type client struct {
	conn   *net.UDPConn
	serial uint64
	buffer [2048]byte
}

func (w *world) client(target string) *client {
	w.Helper()
	return &client{conn: w.dial(target), serial: rand.Uint64()}
}

var errLost = errors.New("lost")

// ask sends a question and returns its answer, or errLost.
func (c *client) ask(question []byte) (kind byte, f flow, err error) {
	c.serial++
	question = binary.BigEndian.AppendUint64(question, c.serial)
	if _, err := c.conn.Write(question); err != nil {
		return 0, f, err
	}
	if err := c.conn.SetReadDeadline(time.Now().Add(patience)); err != nil {
		return 0, f, err
	}
	n, err := c.conn.Read(c.buffer[:])
	if err != nil {
		return 0, f, fmt.Errorf("%w: %w", errLost, err)
	}
	a := c.buffer[:n]
	if n < answerHead || binary.BigEndian.Uint64(a[6:]) != c.serial {
		return 0, f, fmt.Errorf("strange answer %x", a)
	}
	f = flow{gen: binary.BigEndian.Uint32(a[1:]), worker: int(a[5]), id: bytes.Clone(a[answerHead:])}
	return a[0], f, nil
}

// start opens a flow. Each one has a random connection ID of the client.
func (c *client) start() (flow, error) {
	question := append([]byte{0xc3, 0, 0, 0, 1, 18}, make([]byte, 18)...)
	for i := 6; i < len(question); i += 6 {
		binary.BigEndian.PutUint32(question[i:], rand.Uint32())
	}
	kind, f, err := c.ask(question)
	if err == nil && kind != answerNew {
		err = fmt.Errorf("a new flow was answered with %q by generation %d", kind, f.gen)
	}
	return f, err
}

// use sends a packet of a flow, which has to reach the worker that has it.
func (c *client) use(f flow) error {
	kind, by, err := c.ask(append([]byte{0x40}, f.id...))
	if err != nil {
		return fmt.Errorf("flow of generation %d: %w", f.gen, err)
	}
	if kind != answerOwner || by.gen != f.gen || by.worker != f.worker {
		return fmt.Errorf("flow of %d/%d was answered with %q by %d/%d", f.gen, f.worker, kind, by.gen, by.worker)
	}
	return nil
}

// orphaned sends a packet of a flow whose owner is gone and says which
// generation answers with a reset.
func (c *client) orphaned(f flow) (uint32, error) {
	kind, by, err := c.ask(append([]byte{0x40}, f.id...))
	if err == nil && kind != answerReset {
		err = fmt.Errorf("a flow of the dead generation %d was answered with %q by %d/%d", f.gen, kind, by.gen, by.worker)
	}
	return by.gen, err
}

// plain sends a datagram of no flow and says who answers.
func (c *client) plain() (uint32, error) {
	kind, by, err := c.ask([]byte{plainQuestion})
	if err == nil && kind != answerPlain {
		err = fmt.Errorf("a plain datagram was answered with %q", kind)
	}
	return by.gen, err
}

// load is clients that ask all the time. Each has flows that live as long as the
// load does, and opens new ones.
type load struct {
	w       *world
	quit    chan struct{}
	clients sync.WaitGroup

	// questions are all that were asked.
	newFlows, oldFlows, plain atomic.Uint64

	mu       sync.Mutex
	failures []error
	// by counts the new flows, or plain datagrams, of each generation.
	by map[uint32]uint64
}

// load starts n clients. The flows that live long are there when it returns.
func (w *world) load(target string, n int, stateless bool) *load {
	w.Helper()
	l := &load{w: w, quit: make(chan struct{}), by: map[uint32]uint64{}}
	var ready sync.WaitGroup
	for range n {
		// Sockets are made in the namespace, which is this goroutine's.
		c := w.client(target)
		ready.Add(1)
		l.clients.Go(func() {
			if stateless {
				l.runStateless(c, ready.Done)
			} else {
				l.run(c, ready.Done)
			}
		})
	}
	ready.Wait()
	w.Cleanup(func() { l.end() })
	return l
}

func (l *load) run(c *client, ready func()) {
	kept := make([]flow, 0, 4)
	for range cap(kept) {
		if f, ok := l.start(c); ok {
			kept = append(kept, f)
		}
	}
	ready()
	for {
		select {
		case <-l.quit:
			return
		default:
		}
		short, ok := l.start(c)
		if !ok {
			continue
		}
		for _, f := range append(kept, short) {
			l.oldFlows.Add(1)
			if err := c.use(f); err != nil {
				l.fail(err)
			}
		}
	}
}

func (l *load) start(c *client) (flow, bool) {
	l.newFlows.Add(1)
	f, err := c.start()
	if err != nil {
		l.fail(err)
		return f, false
	}
	l.note(f.gen)
	return f, true
}

func (l *load) runStateless(c *client, ready func()) {
	for first := true; ; first = false {
		l.plain.Add(1)
		gen, err := c.plain()
		if err != nil {
			l.fail(err)
		} else {
			l.note(gen)
		}
		if first {
			ready()
		}
		select {
		case <-l.quit:
			return
		default:
		}
	}
}

func (l *load) fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failures = append(l.failures, err)
}

func (l *load) note(gen uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.by[gen]++
}

// got is how many new flows, or plain datagrams, a generation answered.
func (l *load) got(gen uint32) uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.by[gen]
}

// served waits until n more new flows, or plain datagrams, were answered.
func (l *load) served(n uint64) {
	l.w.Helper()
	total := func() uint64 {
		l.mu.Lock()
		defer l.mu.Unlock()
		var sum uint64
		for _, n := range l.by {
			sum += n
		}
		return sum + uint64(len(l.failures))
	}
	want := total() + n
	deadline := time.Now().Add(2 * patience)
	for total() < want {
		if time.Now().After(deadline) {
			l.w.Fatalf("the load stands still")
		}
		time.Sleep(time.Millisecond)
	}
}

func (l *load) end() {
	select {
	case <-l.quit:
	default:
		close(l.quit)
	}
	l.clients.Wait()
}

// lossless ends the load, in which nothing may have failed, and compares all
// counters of the group: each question was counted once, as what it was.
func (l *load) lossless(g *dispatch.Group, before counts) {
	l.w.Helper()
	l.end()
	if len(l.failures) > 0 {
		l.w.Errorf("%d questions failed, the first: %v", len(l.failures), l.failures[0])
	}
	l.w.wantCounts(g, "load", before, counts{"new": l.newFlows.Load() + l.plain.Load(), "owner": l.oldFlows.Load()})
}

// serve joins and answers on all workers until the generation is closed.
func (w *world) serve(g *dispatch.Group, workers int) *dispatch.Generation {
	w.Helper()
	n, err := g.Join(workers)
	w.must(err)
	s := serve(n)
	w.Cleanup(func() {
		if err := n.Close(); err != nil {
			w.Error(err)
		}
		s.wait()
	})
	return n
}

// newFlow opens a flow, which a generation has to get.
func (w *world) newFlow(c *client, gen uint32) flow {
	w.Helper()
	f, err := c.start()
	w.must(err)
	if f.gen != gen {
		w.Fatalf("a new flow went to generation %d, want %d", f.gen, gen)
	}
	return f
}

// use sends packets of flows, which have to reach their owners.
func (w *world) use(c *client, flows ...flow) {
	w.Helper()
	for _, f := range flows {
		if err := c.use(f); err != nil {
			w.Error(err)
		}
	}
}

// orphaned sends a packet of a flow whose owner is gone.
func (w *world) orphaned(c *client, f flow, by uint32) {
	w.Helper()
	if got, err := c.orphaned(f); err != nil || got != by {
		w.Errorf("an orphan of generation %d was reset by %d, want %d (%v)", f.gen, got, by, err)
	}
}
