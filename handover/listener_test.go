// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"errors"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// countingListener counts what the kernel gave.
type countingListener struct {
	*net.TCPListener
	n atomic.Int64
}

func (l *countingListener) Accept() (net.Conn, error) {
	c, err := l.TCPListener.Accept()
	if err == nil {
		l.n.Add(1)
	}
	return c, err
}

// Whatever pause, resume, deadlines and Close come in whatever order, while several
// goroutines accept: nothing is accepted after pause, each connection is accepted
// once, a deadline ends every Accept that it concerns and no other, and Close ends
// all of them, for the reason that fits (F1, F4).
func TestListenerProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		inner, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
		if err != nil {
			t.Fatal(err)
		}
		counted := &countingListener{TCPListener: inner}
		l := newListener(counted, inner.Addr())
		var (
			wg                  sync.WaitGroup
			accepted, deadlines atomic.Int64
			ended               = make(chan error, 8)
			acceptors           = rapid.IntRange(1, 4).Draw(t, "acceptors")
			wake                = make(chan struct{}, 1024) // after a deadline each asks again
			stop                = make(chan struct{})
		)
		for range acceptors {
			wg.Go(func() {
				for {
					c, err := l.Accept()
					switch {
					case err == nil:
						accepted.Add(1)
						_ = c.Close()
					case errors.Is(err, os.ErrDeadlineExceeded):
						deadlines.Add(1)
						select {
						case <-wake:
						case <-stop:
						}
					default:
						ended <- err
						return
					}
				}
			})
		}
		var conns []net.Conn
		dialed := int64(0)
		open, expired := false, false
		atPause := int64(0)
		until := func(what string, cond func() bool) {
			for deadline := time.Now().Add(patience); !cond(); time.Sleep(50 * time.Microsecond) {
				if time.Now().After(deadline) {
					t.Fatalf("waited in vain: %s", what)
				}
			}
		}
		// Every acceptor that a deadline ended asks again.
		restart := func() {
			for n := deadlines.Swap(0); n > 0; n-- {
				wake <- struct{}{}
			}
		}
		dial := func(t *rapid.T) {
			if len(conns) > 50 {
				t.Skip("enough")
			}
			c, err := net.Dial("tcp", inner.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			conns = append(conns, c)
			dialed++
			if open && !expired {
				until("a connection to be accepted", func() bool { return accepted.Load() == dialed })
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"pause": func(*rapid.T) {
				l.pause()
				if open {
					atPause = counted.n.Load()
				}
				open = false
			},
			"resume": func(*rapid.T) {
				l.resume()
				open = true
				if !expired {
					until("what waited to be accepted", func() bool { return accepted.Load() == dialed })
				}
			},
			"dial": dial,
			"expire": func(t *rapid.T) {
				if expired {
					t.Skip("it is")
				}
				if err := l.SetDeadline(time.Now()); err != nil {
					t.Fatal(err)
				}
				expired = true
				until("the deadline to end each Accept", func() bool { return deadlines.Load() == int64(acceptors) })
			},
			"extend": func(t *rapid.T) {
				var at time.Time
				if rapid.Bool().Draw(t, "far") {
					at = time.Now().Add(time.Hour)
				}
				if err := l.SetDeadline(at); err != nil {
					t.Fatal(err)
				}
				expired = false
				restart()
				if open {
					until("what waited to be accepted", func() bool { return accepted.Load() == dialed })
				}
			},
			"all at once": func(t *rapid.T) {
				// None of these may block another, or be lost.
				var now sync.WaitGroup
				for range 4 {
					now.Go(l.resume)
					now.Go(l.pause)
					now.Go(func() { _ = l.SetDeadline(time.Now().Add(time.Hour)) })
				}
				now.Wait()
				l.pause()
				expired, open = false, false
				atPause = counted.n.Load()
				restart()
			},
			"": func(t *rapid.T) {
				if now := counted.n.Load(); !open && now != atPause {
					t.Fatalf("%d connections were accepted during a pause", now-atPause)
				}
				if accepted.Load() > dialed {
					t.Fatalf("%d accepted of %d", accepted.Load(), dialed)
				}
			},
		})
		planned := rapid.Bool().Draw(t, "planned")
		racing := rapid.Bool().Draw(t, "racing")
		var now sync.WaitGroup
		if racing {
			now.Go(l.resume)
			now.Go(l.pause)
			now.Go(func() { _ = l.SetDeadline(time.Now().Add(time.Hour)) })
		}
		if err := l.end(planned); err != nil {
			t.Fatal(err)
		}
		close(stop)
		now.Wait()
		wg.Wait()
		for range acceptors {
			if err := <-ended; !errors.Is(err, net.ErrClosed) || errors.Is(err, ErrSuperseded) != planned {
				t.Fatalf("accept after an end (planned: %t): %v", planned, err)
			}
		}
		// Who ended it does not matter to the user, who closes it once.
		if err := l.Close(); err != nil {
			t.Fatalf("Close after an end (planned: %t): %v", planned, err)
		}
		if err := l.Close(); !errors.Is(err, net.ErrClosed) {
			t.Fatalf("second Close: %v", err)
		}
		if err := l.SetDeadline(time.Time{}); !errors.Is(err, net.ErrClosed) {
			t.Fatalf("deadline after Close: %v", err)
		}
		for _, c := range conns {
			_ = c.Close()
		}
	})
}
