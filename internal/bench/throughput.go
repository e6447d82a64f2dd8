// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
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
	// Program is Instar's, or "empty": one that decides nothing, whose loss is that of
	// any program; or "plain": none, which shows what the measurement is worth.
	Program string `json:"program"`
	// Way is how the CPUs are shared: "one CPU for all", or "a CPU for the loop"
	// and another one for the sender and the kernel's receive path.
	Way string `json:"way"`
	// Packets a second that the loop received.
	Plain Spread `json:"plain_pps"`
	With  Spread `json:"with_pps"`
	// Ratio is what is left with the program, in parts of the plain one's, round by
	// round.
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
// else's work on the CPUs disturbs windows, not rounds. Each round has new sockets,
// since where they happen to be in memory makes some faster than others for as long as
// they live.
func throughputs(ctx context.Context, root string, rounds int) ([]Throughput, error) {
	ways := []way{{"one CPU for all", 100, shared}}
	if runtime.NumCPU() > 1 {
		ways = append(ways, way{"a CPU for the loop", 10, apart})
	}
	var list []Throughput
	for _, w := range ways {
		var names []string
		var results [][]float64 // by round and receiver
		for range rounds {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			streams, closeAll, err := throughputStreams(root)
			var pps []float64
			if err == nil {
				pps, err = w.round(streams)
			}
			if err := errors.Join(err, closeAll()); err != nil {
				return nil, err
			}
			results = append(results, pps)
			names = nil
			for _, s := range streams {
				names = append(names, s.to.name)
			}
		}
		for i, name := range names[1:] {
			var plain, with, ratio []float64
			for _, pps := range results {
				plain = append(plain, pps[0])
				with = append(with, pps[i+1])
				ratio = append(ratio, pps[i+1]/pps[0])
			}
			list = append(list, Throughput{
				Program: name, Way: w.name, Plain: spread(plain), With: spread(with), Ratio: spread(ratio),
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
		for k := range streams {
			j := (i + k) % len(streams)
			s := streams[j]
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

// throughputStreams makes the receivers, the plain one first. They get the same packets
// out of the same memory and read them into the same.
func throughputStreams(root string) (streams []*stream, closeAll func() error, err error) {
	var owned []func() error
	closeAll = func() error {
		var errs []error
		for i := len(owned) - 1; i >= 0; i-- {
			errs = append(errs, owned[i]())
		}
		return errors.Join(errs...)
	}
	plain := func() (*receiver, error) { return newPlain("127.0.0.1:4011") }
	again := func() (*receiver, error) { return newPlain("127.0.0.1:4015") }
	empty := func() (*receiver, error) { return newEmpty("127.0.0.1:4012") }
	stateless := func() (*receiver, error) { return newInstar(root, "127.0.0.1:4013", dispatch.SteeringStateless) }
	quic := func() (*receiver, error) { return newInstar(root, "127.0.0.1:4014", dispatch.SteeringQUIC) }
	for _, f := range []func() (*receiver, error){plain, again, empty, stateless, quic} {
		r, err := f()
		if err != nil {
			return nil, closeAll, err
		}
		owned = append(owned, r.close)
		f, err := newFlow(r.addr)
		if err != nil {
			return nil, closeAll, err
		}
		owned = append(owned, f.conn.Close)
		streams = append(streams, &stream{to: r, flow: f})
	}
	// The last one is that of QUIC.
	t, err := ownTraffic(streams[len(streams)-1].to.generation, 1)
	if err != nil {
		return nil, closeAll, err
	}
	buffers := newBuffers()
	for _, s := range streams {
		s.traffic = t
		if err := s.find(buffers); err != nil {
			return nil, closeAll, err
		}
	}
	return streams, closeAll, nil
}

// find sends a packet and sees which socket got it.
func (s *stream) find(buffers []ipv4.Message) error {
	if err := s.flow.send(s.traffic.batch()[:1]); err != nil {
		return err
	}
	for deadline := time.Now().Add(settleTime); time.Now().Before(deadline); {
		for i, drain := range s.to.drains {
			if drain() > 0 {
				s.socket = &reader{ipv4.NewPacketConn(s.to.conns[i]), buffers}
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

func newBuffers() []ipv4.Message {
	m := make([]ipv4.Message, batchSize)
	for i := range m {
		m[i].Buffers = [][]byte{make([]byte, payload)}
	}
	return m
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
