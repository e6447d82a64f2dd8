// SPDX-License-Identifier: Apache-2.0

package dispatch_test

import (
	"context"
	"errors"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"instar/dispatch"
)

// A server whose every packet stands for itself, such as DNS or NTP. Starting it again
// is its upgrade.
func ExampleOpen_stateless() {
	group, err := dispatch.Open(dispatch.Options{
		Address:  "192.0.2.1:53",
		Service:  "dns",
		Steering: dispatch.SteeringStateless,
	})
	if err != nil {
		log.Fatal(err)
	}
	generation, err := group.Join(4)
	if err != nil {
		log.Fatal(err)
	}
	for _, conn := range generation.Conns() {
		go func() {
			query := make([]byte, 1500)
			for {
				n, client, err := conn.ReadFromUDPAddrPort(query)
				if errors.Is(err, net.ErrClosed) {
					return
				}
				// Answer query[:n] here.
				_, _ = n, client
			}
		}()
	}
	if err := generation.Activate(); err != nil {
		log.Fatal(err)
	}

	<-generation.Superseded()
	// Nothing is remembered, so nothing has to be waited for: Drain returns when the
	// readers have read what the kernel had queued.
	over := make(chan struct{})
	close(over)
	if _, err := generation.Drain(context.Background(), dispatch.DrainOptions{Done: over}); err != nil {
		log.Print(err)
	}
	_ = generation.Close()
	_ = group.Close()
}

// An HTTP/1.1 server. Its connections are sockets of their own, which stay with the
// process; those that wait to be accepted when the listeners close go to the successor.
func ExampleGeneration_Listeners() {
	group, err := dispatch.Open(dispatch.Options{Network: "tcp", Address: "192.0.2.1:80", Service: "web"})
	if err != nil {
		log.Fatal(err)
	}
	generation, err := group.Join(1)
	if err != nil {
		log.Fatal(err)
	}
	server := &http.Server{ReadHeaderTimeout: 10 * time.Second}
	for _, l := range generation.Listeners() {
		go func() {
			if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
				log.Print(err)
			}
		}()
	}
	if err := generation.Activate(); err != nil {
		log.Fatal(err)
	}

	<-generation.Superseded()
	// Closes the listeners, and waits until the requests under way are answered.
	if err := server.Shutdown(context.Background()); err != nil {
		log.Print(err)
	}
	_ = generation.Close()
	_ = group.Close()
}

// A server that is told to end, and not to be replaced, drains while it is active.
func ExampleGeneration_Drain_final() {
	var generation *dispatch.Generation // as in the example of Open

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	<-ctx.Done()
	idle := make(chan struct{}) // to be closed when the last flow ended
	report, err := generation.Drain(context.Background(), dispatch.DrainOptions{
		Done:     idle,
		Deadline: 30 * time.Second,
		Final:    true,
	})
	if err != nil {
		log.Print(err)
	}
	log.Printf("drained after %v: %s", report.Waited, report.Reason)
	_ = generation.Close()
}

// What an operator's tool does: flip back to the generation that was active before.
func ExampleGroup_Rollback() {
	group, err := dispatch.OpenPath("/sys/fs/bpf/instar/1/udp4-192%2e0%2e2%2e1-443")
	if err != nil {
		log.Fatal(err)
	}
	if number, err := group.Rollback(); err != nil {
		log.Print(err)
	} else {
		log.Printf("generation %d is active again", number)
	}
	_ = group.Close()
}
