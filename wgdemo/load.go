// SPDX-License-Identifier: Apache-2.0

package wgdemo

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"instar/internal/content"
	"instar/internal/latency"
)

// Ports of the services inside.
const (
	echoPort = 7
	tcpPort  = 8000
)

const (
	// pingEvery is how often each peer, and the gateway each peer, sends a packet.
	pingEvery = 10 * time.Millisecond
	pingSize  = 200
	// answerLimit is how long an answer may take until its packet counts as lost.
	answerLimit = 5 * time.Second
	// chunk goes through each TCP connection every chunkEvery, there and back.
	chunk, chunkEvery = 16 << 10, 20 * time.Millisecond
	// endLimit is how long the rest of a TCP connection may take.
	endLimit = 20 * time.Second
	// handshakeLimit is how long a peer that comes anew may take to its first answer. A
	// lost handshake message is sent again after 5 s (RekeyTimeout).
	handshakeLimit = 20 * time.Second
	// visitPause is between two visits: a peer's initiations are at least 20 ms apart
	// (HandshakeInitationRate).
	visitPause = 100 * time.Millisecond
)

// Counts is what the peers saw.
type Counts struct {
	// InnerPackets were sent through the tunnels, half of them by the peers, half by the
	// gateway's side, each to be answered.
	InnerPackets int64 `json:"inner_packets"`
	// LostInnerPackets were not answered.
	LostInnerPackets int64 `json:"lost_inner_packets"`
	// Handshakes were made by peers that began anew, without a session.
	Handshakes int64 `json:"handshakes"`
	// FailedHandshakes led to no answer.
	FailedHandshakes int64 `json:"failed_handshakes"`
	// TCPBytes went through TCP connections inside the tunnels, and back, and were compared.
	TCPBytes int64 `json:"tcp_bytes"`
	// TCPBroken counts connections that ended, or had other content.
	TCPBroken int64 `json:"tcp_broken"`
	// Echo is how long answers took, and Handshake how long a peer without a session waited
	// for its first answer.
	Echo      latency.Summary `json:"echo_ms"`
	Handshake latency.Summary `json:"handshake_ms"`
	// Examples are the first few losses.
	Examples []string `json:"examples,omitempty"`
}

// Lost is the sum of what was lost.
func (c *Counts) Lost() int64 { return c.LostInnerPackets + c.FailedHandshakes + c.TCPBroken }

// load is traffic inside the tunnels.
type load struct {
	began    time.Time
	stopping chan struct{} // closed: send nothing new
	traffic  sync.WaitGroup
	cancel   context.CancelFunc
	services sync.WaitGroup
	closers  []io.Closer

	mu        sync.Mutex
	counts    Counts
	echo      latency.Reservoir
	handshake latency.Reservoir
}

// startLoad starts traffic of the peers, and of one more, if not nil, that comes again and
// again.
func startLoad(ctx context.Context, peers []*peer, visitor *peer) (l *load, err error) {
	ctx, cancel := context.WithCancel(ctx)
	l = &load{began: time.Now(), stopping: make(chan struct{}), cancel: cancel}
	defer func() {
		if err != nil {
			l.stop()
		}
	}()
	echo, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(innerGateway, echoPort)))
	if err != nil {
		return l, err
	}
	l.serve(echo)
	tcp, err := net.Listen("tcp4", netip.AddrPortFrom(innerGateway, tcpPort).String())
	if err != nil {
		return l, err
	}
	l.closers = append(l.closers, tcp)
	l.services.Go(func() { l.serveTCP(ctx, tcp) })
	for _, p := range peers {
		if err := l.start(ctx, p); err != nil {
			return l, fmt.Errorf("peer %d: %w", p.number, err)
		}
	}
	if visitor != nil {
		l.traffic.Go(func() { l.visit(ctx, visitor) })
	}
	return l, nil
}

// start starts the traffic of a peer once its tunnel works.
func (l *load) start(ctx context.Context, p *peer) error {
	if err := p.up(); err != nil {
		return err
	}
	if err := l.knock(ctx, p); err != nil {
		return err
	}
	theirs, err := p.listenUDP(echoPort)
	if err != nil {
		return err
	}
	l.serve(theirs)
	inward, err := p.dial(ctx, "udp4", echoPort)
	if err != nil {
		return err
	}
	outward, err := net.Dial("udp4", netip.AddrPortFrom(p.inner, echoPort).String())
	if err != nil {
		return errors.Join(err, inward.Close())
	}
	l.traffic.Go(func() { l.ping(fmt.Sprintf("peer %d", p.number), inward) })
	l.traffic.Go(func() { l.ping(fmt.Sprintf("gateway to peer %d", p.number), outward) })
	stream, err := p.dial(ctx, "tcp4", tcpPort)
	if err != nil {
		return err
	}
	l.traffic.Go(func() { l.stream(ctx, p.number, stream) })
	return nil
}

// serve answers datagrams with themselves.
func (l *load) serve(c *net.UDPConn) {
	l.closers = append(l.closers, c)
	l.services.Go(func() {
		b := make([]byte, 2048)
		for {
			n, from, err := c.ReadFromUDPAddrPort(b)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				_, _ = c.WriteToUDPAddrPort(b[:n], from) // what is lost counts there
			}
		}
	})
}

func (l *load) serveTCP(ctx context.Context, listener net.Listener) {
	for {
		c, err := listener.Accept()
		if err != nil {
			return
		}
		l.services.Go(func() {
			defer c.Close()
			defer context.AfterFunc(ctx, func() { _ = c.Close() })()
			_, _ = io.Copy(c, c) // the other end says what is missing
		})
	}
}

// ping sends numbered packets and counts those that are not answered.
func (l *load) ping(who string, c net.Conn) {
	sent := map[uint64]time.Time{}
	var mu sync.Mutex
	var answers sync.WaitGroup
	answers.Go(func() {
		b := make([]byte, 2*pingSize)
		for {
			n, err := c.Read(b)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil || n != pingSize {
				continue
			}
			number := binary.BigEndian.Uint64(b)
			mu.Lock()
			at, ok := sent[number]
			delete(sent, number)
			mu.Unlock()
			if ok {
				l.update(func(*Counts) { l.echo.Add(time.Since(at)) })
			}
		}
	})
	tick := time.NewTicker(pingEvery)
	defer tick.Stop()
	b := make([]byte, pingSize)
	number := uint64(0)
	for stopping := false; !stopping; {
		select {
		case <-l.stopping:
			stopping = true
		case <-tick.C:
			number++
			binary.BigEndian.PutUint64(b, number)
			mu.Lock()
			sent[number] = time.Now()
			mu.Unlock()
			_, _ = c.Write(b) // an error is that of an earlier packet, or this one is lost
		}
	}
	for deadline := time.Now().Add(answerLimit); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		mu.Lock()
		left := len(sent)
		mu.Unlock()
		if left == 0 {
			break
		}
	}
	_ = c.Close()
	answers.Wait()
	l.update(func(counts *Counts) {
		counts.InnerPackets += int64(number)
		counts.LostInnerPackets += int64(len(sent))
		for number, at := range sent {
			l.example("%s: packet %d, sent at %.3f s, was not answered", who, number, at.Sub(l.began).Seconds())
		}
	})
}

// stream sends chunks through a connection and compares what comes back.
func (l *load) stream(ctx context.Context, number int, c net.Conn) {
	defer c.Close()
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	seed := uint64(number)
	var writing sync.WaitGroup
	writing.Go(func() {
		source := content.New(seed, content.Max)
		tick := time.NewTicker(chunkEvery)
		defer tick.Stop()
		for {
			select {
			case <-l.stopping:
				_ = c.(*net.TCPConn).CloseWrite()
				return
			case <-tick.C:
			}
			if _, err := io.CopyN(c, source, chunk); err != nil {
				_ = c.Close()
				return // the reader says so
			}
		}
	})
	ending := make(chan struct{})
	l.traffic.Go(func() {
		select {
		case <-l.stopping:
			_ = c.SetReadDeadline(time.Now().Add(endLimit))
		case <-ending:
		}
	})
	var total int64
	err := l.compare(c, content.New(seed, content.Max), &total)
	close(ending)
	writing.Wait()
	select {
	case <-l.stopping:
	default:
		if err == nil {
			err = io.ErrUnexpectedEOF
		}
	}
	l.update(func(counts *Counts) {
		if err != nil {
			counts.TCPBroken++
			l.example("TCP connection of peer %d after %d bytes: %v", number, total, err)
		}
	})
}

// compare reads to the end. What was sent comes back in whole chunks.
func (l *load) compare(r io.Reader, want io.Reader, total *int64) error {
	a, b := make([]byte, 32<<10), make([]byte, 32<<10)
	for {
		n, err := r.Read(a)
		_, _ = io.ReadFull(want, b[:n])
		if !bytes.Equal(a[:n], b[:n]) {
			return content.ErrCorrupt
		}
		*total += int64(n)
		l.update(func(counts *Counts) { counts.TCPBytes += int64(n) })
		switch {
		case err == io.EOF && *total%chunk != 0:
			return io.ErrUnexpectedEOF
		case err == io.EOF:
			return nil
		case err != nil:
			return err
		}
	}
}

// visit makes a peer come anew, again and again: handshake, one packet, and away.
func (l *load) visit(ctx context.Context, p *peer) {
	for {
		began := time.Now()
		err := p.up()
		if err == nil {
			err = l.knock(ctx, p)
		}
		if ctx.Err() != nil {
			return
		}
		l.update(func(counts *Counts) {
			if err != nil {
				counts.FailedHandshakes++
				l.example("handshake at %.3f s: %v", began.Sub(l.began).Seconds(), err)
				return
			}
			counts.Handshakes++
			l.handshake.Add(time.Since(began))
		})
		_ = p.down()
		select {
		case <-l.stopping:
			return
		case <-time.After(visitPause):
		}
	}
}

// knock sends one packet and waits for the answer. The peer keeps it until it has a session.
func (l *load) knock(ctx context.Context, p *peer) error {
	c, err := p.dial(ctx, "udp4", echoPort)
	if err != nil {
		return err
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	if err := c.SetDeadline(time.Now().Add(handshakeLimit)); err != nil {
		return err
	}
	b := []byte("knock")
	if _, err := c.Write(b); err != nil {
		return err
	}
	_, err = c.Read(b)
	return err
}

// insist sends packets until one is answered.
func (l *load) insist(ctx context.Context, p *peer) error {
	c, err := p.dial(ctx, "udp4", echoPort)
	if err != nil {
		return err
	}
	defer c.Close()
	b := []byte("insist")
	for end := time.Now().Add(handshakeLimit); time.Now().Before(end) && ctx.Err() == nil; {
		if _, err = c.Write(b); err != nil {
			continue
		}
		if err = c.SetReadDeadline(time.Now().Add(pingEvery)); err != nil {
			return err
		}
		if _, err = c.Read(b); err == nil {
			return nil
		}
	}
	return errors.Join(ctx.Err(), err)
}

func (l *load) update(change func(*Counts)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	change(&l.counts)
}

// maxExamples is how many losses are described.
const maxExamples = 5

// example is called within update.
func (l *load) example(format string, args ...any) {
	if len(l.counts.Examples) < maxExamples {
		l.counts.Examples = append(l.counts.Examples, fmt.Sprintf(format, args...))
	}
}

// snapshot is the result so far; packets are counted at the end.
func (l *load) snapshot() Counts {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.counts
	c.Examples = append([]string(nil), c.Examples...)
	c.Echo, c.Handshake = l.echo.Summary(), l.handshake.Summary()
	return c
}

// finish sends nothing more, waits for what is on its way, and returns what was lost.
func (l *load) finish() Counts {
	close(l.stopping)
	l.traffic.Wait()
	c := l.snapshot()
	l.release()
	return c
}

// stop ends everything at once.
func (l *load) stop() {
	l.cancel()
	select {
	case <-l.stopping:
	default:
		close(l.stopping)
	}
	l.traffic.Wait()
	l.release()
}

func (l *load) release() {
	l.cancel()
	for _, c := range l.closers {
		_ = c.Close()
	}
	l.services.Wait()
}
