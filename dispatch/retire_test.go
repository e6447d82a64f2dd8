// SPDX-License-Identifier: Apache-2.0

package dispatch_test

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"instar/dispatch"
)

// Sockets that leave the address, a generation's and the one through which a program is
// attached, take no packet with them, whatever their place in the kernel's hash chain
// (B3, I11). Without closeSockets one in fifty of them does.
func TestLeavingSocketsLoseNothing(t *testing.T) {
	needWorld(t)
	for _, address := range []string{"127.0.0.1:4433", "[::1]:4433"} {
		t.Run(address, func(t *testing.T) {
			w := newWorld(t)
			o := w.options(address)
			o.Steering = dispatch.SteeringStateless
			g := w.open(o)
			active := w.join(g, 1)
			w.activate(active)

			var received, sent atomic.Int64
			var reader, senders sync.WaitGroup
			conn := active.Conns()[0]
			reader.Go(func() {
				for b := make([]byte, 64); ; {
					if _, err := conn.Read(b); err != nil {
						return
					}
					received.Add(1)
				}
			})
			stop := make(chan struct{})
			for range 2 {
				c := w.dial(address)
				senders.Go(func() {
					for {
						select {
						case <-stop:
							return
						default:
						}
						// No more at once than fit in the receive queue.
						for range 50 {
							if _, err := c.Write([]byte("question")); err != nil {
								t.Error(err)
								return
							}
							sent.Add(1)
						}
						for deadline := time.Now().Add(time.Second); sent.Load()-received.Load() > 50 && time.Now().Before(deadline); {
							time.Sleep(50 * time.Microsecond)
						}
					}
				})
			}
			for range 150 {
				n := w.join(g, 1)
				w.must(n.Close())
				g.SetProgramBuild("another")
				if _, err := g.UpgradeProgram(); err != nil {
					t.Fatal(err)
				}
			}
			close(stop)
			senders.Wait()
			lost := func() int64 { return sent.Load() - received.Load() }
			deadline := time.Now().Add(patience)
			for lost() > 0 && time.Now().Before(deadline) {
				time.Sleep(time.Millisecond)
			}
			if lost() != 0 {
				t.Errorf("%d of %d packets were lost", lost(), sent.Load())
			}
			t.Logf("%d packets", sent.Load())
			w.must(active.Close())
			reader.Wait()
		})
	}
}
