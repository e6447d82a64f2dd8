// SPDX-License-Identifier: Apache-2.0

package drain_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"time"

	"instar/handover/drain"
)

// A server of net/http that was superseded sends its clients to the successor.
func Example() {
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, "hello")
	})}
	drainer := drain.New(drain.Options{Deadline: 10 * time.Second})
	web := drainer.HTTP(server)
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	served := make(chan error)
	go func() { served <- server.Serve(web.Listener(ln)) }()

	get := func() {
		response, err := http.Get("http://" + ln.Addr().String())
		if err != nil {
			log.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, response.Body)
		_ = response.Body.Close()
		fmt.Println(response.Status, "last:", response.Close)
	}
	get()

	go func() {
		<-drainer.Draining()
		get() // on the same connection
	}()
	report, err := drainer.Run(context.Background())
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(<-served)
	fmt.Println(report)
	// Output:
	// 200 OK last: false
	// 200 OK last: true
	// http: Server closed
	// done: 0 open, 1 finished, 0 closed idle, 0 cut
}

// A protocol of one's own: a handler says when it waits for its client, and
// tells it to go when the drain begins.
func ExampleDrainer_Conns() {
	drainer := drain.New(drain.Options{Deadline: 100 * time.Millisecond})
	inner, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	ln := drainer.Conns(drain.ConnsOptions{Name: "lines"}).Track(inner)

	handled := make(chan error)
	go func() {
		conn, err := ln.Accept()
		if err != nil {
			log.Fatal(err)
		}
		c := conn.(*drain.Conn)
		defer c.Close()
		lines := bufio.NewReader(c)
		for {
			c.Idle()
			line, err := lines.ReadString('\n') // makes it busy
			if err != nil {
				handled <- err
				return
			}
			_, _ = io.WriteString(c, "you said "+line)
		}
	}()

	client, err := net.Dial("tcp4", inner.Addr().String())
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = client.Close() }()
	_, _ = io.WriteString(client, "hello\n")
	answers := bufio.NewReader(client)
	answer, _ := answers.ReadString('\n')
	fmt.Print(answer)

	go func() {
		_, err := answers.ReadByte()
		fmt.Println("client:", err)
		_ = client.Close()
	}()
	report, err := drainer.Run(context.Background())
	if err != nil {
		log.Panic(err)
	}
	fmt.Println("planned:", errors.Is(<-handled, drain.ErrPlanned))
	fmt.Println(report)
	// Output:
	// you said hello
	// client: EOF
	// planned: true
	// done: 0 open, 0 finished, 1 closed idle, 0 cut
}

// An event stream has no end of its own. Its handler makes one when the drain
// begins, and the client subscribes again, at the successor.
func ExampleDraining() {
	events := make(chan string)
	_ = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for {
			select {
			case <-drain.Draining(r.Context()):
				return
			case <-r.Context().Done():
				return
			case e := <-events:
				_, _ = fmt.Fprintf(w, "data: %s\n\n", e)
				_ = http.NewResponseController(w).Flush()
			}
		}
	})
}

// Progress counts down, and a second signal makes an end.
func ExampleDrainer_Hurry() {
	drainer := drain.New(drain.Options{
		Deadline: time.Minute,
		Progress: func(r drain.Report) {
			if r.Phase == drain.PhaseDone {
				fmt.Println(r)
			}
		},
	})
	a, b := net.Pipe() // a client that never goes
	defer b.Close()
	drainer.Conns(drain.ConnsOptions{}).Add(a)

	go func() {
		<-drainer.Draining()
		drainer.Hurry()
	}()
	if _, err := drainer.Run(context.Background()); err != nil {
		log.Panic(err)
	}
	// Output:
	// done: 0 open, 0 finished, 0 closed idle, 1 cut
}
