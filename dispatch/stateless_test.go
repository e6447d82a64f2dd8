// SPDX-License-Identifier: Apache-2.0

package dispatch_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"instar/dispatch"
	"instar/internal/testutil"
)

// querent has sockets that ask at the same time, each one question at a time.
type querent struct {
	conns []*net.UDPConn
	// workers are those that answered a socket, by generation.
	workers []map[uint32]int
	answers map[uint32]int
	serial  uint64
	err     error
}

// round asks once with every socket and wants each answer once.
func (q *querent) round() error {
	question := append([]byte{plainQuestion}, make([]byte, 8)...)
	first := q.serial
	for i, c := range q.conns {
		binary.BigEndian.PutUint64(question[1:], first+uint64(i))
		if _, err := c.Write(question); err != nil {
			return err
		}
	}
	q.serial += uint64(len(q.conns))
	b := make([]byte, 64)
	for i, c := range q.conns {
		n, err := c.Read(b)
		if err != nil {
			return fmt.Errorf("%w: %w", errLost, err)
		}
		if n != answerHead || b[0] != answerPlain || binary.BigEndian.Uint64(b[6:]) != first+uint64(i) {
			return fmt.Errorf("strange answer %x to question %d", b[:n], first+uint64(i))
		}
		generation, worker := binary.BigEndian.Uint32(b[1:]), int(b[5])
		if before, known := q.workers[i][generation]; known && before != worker {
			return fmt.Errorf("workers %d and %d of generation %d answered one client: the hash of a client does not change", before, worker, generation)
		}
		q.workers[i][generation] = worker
		q.answers[generation]++
	}
	return nil
}

// more wants no answer to come twice.
func (q *querent) more() error {
	for _, c := range q.conns {
		if err := c.SetReadDeadline(time.Now()); err != nil {
			return err
		}
		if n, err := c.Read(make([]byte, 64)); !errors.Is(err, os.ErrDeadlineExceeded) {
			return fmt.Errorf("an answer of %d octets too many (%w)", n, err)
		}
	}
	return nil
}

// A1: 4, 7 and 1 workers succeed each other while a thousand clients ask all the time:
// each question is answered once, and the workers of a generation have equal shares of
// the clients.
func TestStatelessWorkersSucceedEachOther(t *testing.T) {
	w := newWorld(t)
	o := w.options("127.0.0.1:4433")
	const querents, sockets = 4, 256
	o.Steering, o.Workers = dispatch.SteeringStateless, 8
	o.ReceiveBuffer = querents * sockets * 2048 // all questions may wait at one worker
	g := w.open(o)
	rounds := int64(400)
	if testing.Short() {
		rounds = 40
	}
	generation := w.serve(g, 4)
	w.activate(generation)
	var all []*querent
	for range querents {
		q := &querent{answers: map[uint32]int{}}
		for range sockets {
			c := w.dial("127.0.0.1:4433")
			w.must(c.SetReadDeadline(time.Now().Add(4 * testTime)))
			q.conns = append(q.conns, c)
			q.workers = append(q.workers, map[uint32]int{})
		}
		all = append(all, q)
	}
	var (
		clients sync.WaitGroup
		done    atomic.Int64
		stop    = make(chan struct{})
	)
	began := time.Now()
	for _, q := range all {
		clients.Go(func() {
			for q.err == nil {
				select {
				case <-stop:
					q.err = q.more()
					return
				default:
				}
				q.err = q.round()
				done.Add(1)
			}
		})
	}
	for _, workers := range []int{7, 1} {
		goal := done.Load() + rounds
		testutil.WaitFor(t, 3*testTime, func() bool { return done.Load() >= goal }, "rounds of questions")
		next := w.serve(g, workers)
		w.activate(next)
		over := make(chan struct{})
		close(over)
		if _, err := generation.Drain(t.Context(), dispatch.DrainOptions{Done: over}); err != nil {
			t.Error(err)
		}
		w.must(generation.Close())
		generation = next
	}
	goal := done.Load() + rounds
	testutil.WaitFor(t, 3*testTime, func() bool { return done.Load() >= goal }, "rounds of questions")
	close(stop)
	clients.Wait()
	elapsed := time.Since(began)

	total := 0
	for _, q := range all {
		if q.err != nil {
			t.Error(q.err)
		}
		for _, n := range q.answers {
			total += n
		}
	}
	if t.Failed() {
		return
	}
	w.wantCounts(g, "in all", nil, counts{"new": uint64(total)})
	for number, workers := range map[uint32]int{1: 4, 2: 7, 3: 1} {
		share := make([]float64, workers)
		clients := 0.0
		for _, q := range all {
			for _, by := range q.workers {
				if worker, ok := by[number]; ok {
					share[worker]++
					clients++
				}
			}
		}
		if clients != querents*sockets {
			t.Errorf("generation %d answered %v clients, want all %d", number, clients, querents*sockets)
		}
		chi2 := 0.0
		for _, n := range share {
			expected := clients / float64(workers)
			chi2 += (n - expected) * (n - expected) / expected
		}
		// One run in a billion is beyond that with 6 degrees of freedom.
		if chi2 > 55 {
			t.Errorf("generation %d: %v clients each, chi-square %.1f", number, share, chi2)
		}
	}
	t.Logf("%d questions, %.0f/s", total, float64(total)/elapsed.Seconds())
}
