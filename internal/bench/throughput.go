// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"time"

	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"

	"instar/dispatch"
)

const (
	// sharedBatches and apartTime are the size of a window.
	sharedBatches = 4
	apartTime     = 5 * time.Millisecond
)

// Throughput compares a receiving loop behind a program of Instar's with one
// behind plain SO_REUSEPORT.
type Throughput struct {
	Program string `json:"program"`
	// Way is how the CPUs are shared: "one CPU for all", or "a CPU for the loop"
	// and another one for the sender and the kernel's receive path.
	Way string `json:"way"`
	// Packets a second that the loop received.
	Plain  Spread `json:"plain_pps"`
	Instar Spread `json:"instar_pps"`
	// Ratio is Instar's in parts of the plain one's, round by round.
	Ratio Spread `json:"ratio"`
}

// stream is one receiver and what is sent to it: a single flow, so that one socket
// gets everything, as with plain SO_REUSEPORT.
type stream struct {
	to      *receiver
	flow    flow
	traffic *traffic
	socket  *reader
}

// throughputs measures the ways in turns, so many rounds each. A round has many short
// windows, of the receivers in turns, and the median of them is its result: somebody
// else's work on the CPUs disturbs windows, not rounds.
func throughputs(ctx context.Context, root string, rounds int) (list []Throughput, err error) {
	streams, closeAll, err := throughputStreams(root)
	defer func() { err = errors.Join(err, closeAll()) }()
	if err != nil {
		return nil, err
	}
	ways := []way{{"one CPU for all", 100, shared}}
	if runtime.NumCPU() > 1 {
		ways = append(ways, way{"a CPU for the loop", 10, apart})
	}
	for _, w := range ways {
		results := make([][]float64, len(streams))
		for range rounds {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			pps, err := w.round(streams)
			if err != nil {
				return nil, err
			}
			for i, v := range pps {
				results[i] = append(results[i], v)
			}
		}
		for i, s := range streams[1:] {
			ratio := make([]float64, rounds)
			for j := range ratio {
				ratio[j] = results[i+1][j] / results[0][j]
			}
			list = append(list, Throughput{
				Program: s.to.name, Way: w.name,
				Plain: spread(results[0]), Instar: spread(results[i+1]), Ratio: spread(ratio),
			})
		}
	}
	return list, nil
}

// way is how sender and receiver share the machine.
type way struct {
	name    string
	windows int // of each receiver in a round
	window  func(*stream) (pps float64, err error)
}

// round returns packets a second of each stream.
func (w way) round(streams []*stream) ([]float64, error) {
	windows := make([][]float64, len(streams))
	// The first one warms up.
	for i := range w.windows + 1 {
		for j, s := range streams {
			pps, err := w.window(s)
			if err != nil {
				return nil, fmt.Errorf("throughput of %s, %s: %w", s.to.name, w.name, err)
			}
			if i > 0 {
				windows[j] = append(windows[j], pps)
			}
		}
	}
	pps := make([]float64, len(streams))
	for j := range streams {
		pps[j] = spread(windows[j]).Median
	}
	return pps, nil
}

func throughputStreams(root string) (streams []*stream, closeAll func() error, err error) {
	var owned []func() error
	closeAll = func() error {
		var errs []error
		for i := len(owned) - 1; i >= 0; i-- {
			errs = append(errs, owned[i]())
		}
		return errors.Join(errs...)
	}
	add := func(r *receiver, err error, make func(*dispatch.Generation) (*traffic, error)) error {
		if err != nil {
			return err
		}
		owned = append(owned, r.close)
		t, err := make(r.generation)
		if err != nil {
			return err
		}
		f, err := newFlow(r.addr)
		if err != nil {
			return err
		}
		owned = append(owned, f.conn.Close)
		s := &stream{to: r, flow: f, traffic: t}
		streams = append(streams, s)
		return s.find()
	}
	anything := func(*dispatch.Generation) (*traffic, error) { return plainTraffic() }
	plain, err := newPlain("127.0.0.1:4011")
	if err = add(plain, err, anything); err != nil {
		return nil, closeAll, err
	}
	stateless, err := newInstar(root, "127.0.0.1:4012", dispatch.SteeringStateless)
	if err = add(stateless, err, anything); err != nil {
		return nil, closeAll, err
	}
	quic, err := newInstar(root, "127.0.0.1:4013", dispatch.SteeringQUIC)
	return streams, closeAll, add(quic, err, func(n *dispatch.Generation) (*traffic, error) { return ownTraffic(n, 1) })
}

// find sends a packet and sees which socket got it.
func (s *stream) find() error {
	if err := s.flow.send(s.traffic.batch()[:1]); err != nil {
		return err
	}
	for deadline := time.Now().Add(settleTime); time.Now().Before(deadline); {
		for i, drain := range s.to.drains {
			if drain() > 0 {
				s.socket = newReader(s.to.conns[i])
				return nil
			}
		}
	}
	return errors.New("a packet did not come")
}

// reader is a loop of recvmmsg.
type reader struct {
	conn     *ipv4.PacketConn
	messages []ipv4.Message
}

func newReader(c *net.UDPConn) *reader {
	r := &reader{ipv4.NewPacketConn(c), make([]ipv4.Message, batchSize)}
	for i := range r.messages {
		r.messages[i].Buffers = [][]byte{make([]byte, payload)}
	}
	return r
}

func (r *reader) read() (int, error) { return r.conn.ReadBatch(r.messages, 0) }

// shared sends batches and receives each before the next.
func shared(s *stream) (float64, error) {
	unpin, err := pin(0)
	if err != nil {
		return 0, err
	}
	defer unpin()
	start := time.Now()
	if err := s.socket.conn.SetReadDeadline(start.Add(settleTime)); err != nil {
		return 0, err
	}
	for range sharedBatches {
		if err := s.flow.send(s.traffic.batch()); err != nil {
			return 0, err
		}
		for got := 0; got < batchSize; {
			n, err := s.socket.read()
			if err != nil {
				return 0, err
			}
			got += n
		}
	}
	return sharedBatches * batchSize / time.Since(start).Seconds(), nil
}

// apart sends as fast as it can on one CPU and receives on another.
func apart(s *stream) (float64, error) {
	start := time.Now()
	if err := s.socket.conn.SetReadDeadline(start.Add(apartTime)); err != nil {
		return 0, err
	}
	sent := make(chan error, 1)
	go func() {
		unpin, err := pin(0)
		if err != nil {
			sent <- err
			return
		}
		defer unpin()
		for err == nil && time.Since(start) < apartTime {
			err = s.flow.send(s.traffic.batch())
		}
		sent <- err
	}()
	received, err := receive(s.socket)
	elapsed := time.Since(start)
	err = errors.Join(err, <-sent)
	// What came after the deadline is not of the next round.
	s.to.drain()
	return float64(received) / elapsed.Seconds(), err
}

// receive reads on the second CPU until the socket's deadline.
func receive(r *reader) (received int, err error) {
	unpin, err := pin(1)
	if err != nil {
		return 0, err
	}
	defer unpin()
	for {
		n, err := r.read()
		received += n
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return received, nil
		}
		if err != nil {
			return received, err
		}
	}
}

// maxCPUs is the size of a unix.CPUSet.
const maxCPUs = 1024

// pin keeps the calling goroutine on the i-th CPU that the process may use, until
// unpin is called.
func pin(i int) (unpin func(), err error) {
	runtime.LockOSThread()
	var all unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		runtime.UnlockOSThread()
		return nil, os.NewSyscallError("sched_getaffinity", err)
	}
	var one unix.CPUSet
	for cpu, n := 0, 0; n <= i && cpu < maxCPUs; cpu++ {
		if all.IsSet(cpu) {
			if n == i {
				one.Set(cpu)
			}
			n++
		}
	}
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		runtime.UnlockOSThread()
		return nil, os.NewSyscallError("sched_setaffinity", err)
	}
	return func() {
		// When the thread cannot be given back as it was, the goroutine keeps it.
		if unix.SchedSetaffinity(0, &all) == nil {
			runtime.UnlockOSThread()
		}
	}, nil
}
