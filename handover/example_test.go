// SPDX-License-Identifier: Apache-2.0

package handover_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"instar/handover"
)

// run is a server of net/http from its start to its end. ctx ends at SIGTERM
// (signal.NotifyContext).
func run(ctx context.Context, options handover.Options, serving chan<- string) error {
	h, err := handover.NewContext(ctx, options) // first: before anything is opened
	if err != nil {
		return err
	}
	defer h.Close()                                  // last
	ln, err := h.Listen("web", "tcp", "127.0.0.1:0") // the predecessor's, if there is one
	if err != nil {
		return err
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = fmt.Fprintf(w, "hello from generation %d", h.Generation())
	})}

	// Nothing is accepted before Ready. After it Serve may return at any time, also
	// before this function sees Superseded, for the listener ends at the same moment.
	// It is then ErrSuperseded, or http.ErrServerClosed if somebody has called
	// Shutdown. Neither is a fault, and no reason to exit: there are connections yet.
	served := make(chan error, 1)
	go func() { served <- server.Serve(ln) }()
	if err := h.Ready(ctx); err != nil {
		return errors.Join(err, server.Close()) // the predecessor serves as before
	}
	serving <- ln.Addr().String()

	select {
	case <-h.Superseded(): // for good: the probation is over
	case <-ctx.Done(): // and nobody comes after this one
	case err := <-served:
		if !errors.Is(err, handover.ErrSuperseded) && !errors.Is(err, http.ErrServerClosed) {
			return err
		}
	}
	// Shutdown cuts off the requests that idle clients are about to send. Package
	// handover/drain does not; its listener also keeps Serve until the drain is over.
	drained, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := server.Shutdown(drained); err != nil {
		return err
	}
	if err := h.Err(); errors.Is(err, handover.ErrRolledBack) {
		return err // it was this process that had to leave
	}
	return nil
}

// A server takes over from another one, which drains and ends. They are in one
// process here; a server in production is upgraded by SIGHUP or SIGUSR2 without
// more code, or is started a second time with the same socket.
func Example() {
	folder, err := os.MkdirTemp("", "handover")
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(folder) }()
	options := handover.Options{
		Socket:    filepath.Join(folder, "control"),
		Probation: 100 * time.Millisecond,
		Signals:   []os.Signal{}, // two in one process
	}
	serving := make(chan string)
	ended := make(chan error)

	go func() { ended <- run(context.Background(), options, serving) }()
	addr := <-serving
	get := func() {
		client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
		response, err := client.Get("http://" + addr)
		if err != nil {
			log.Fatal(err)
		}
		body, _ := io.ReadAll(response.Body)
		_ = response.Body.Close()
		fmt.Println(string(body))
	}
	get()

	ctx, stop := context.WithCancel(context.Background())
	go func() { ended <- run(ctx, options, serving) }()
	<-serving
	get()
	fmt.Println("the first one ended:", <-ended)
	get()
	stop()
	fmt.Println("the second one ended:", <-ended)
	// Output:
	// hello from generation 1
	// hello from generation 2
	// the first one ended: <nil>
	// hello from generation 2
	// the second one ended: <nil>
}
