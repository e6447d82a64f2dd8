// SPDX-License-Identifier: Apache-2.0

package quicgo_test

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"instar/internal/testutil"
)

// 200 of 200 connections of a server with four workers survive two migrations,
// one of them across an upgrade: one that the client makes with validation of
// the path first, and one by a NAT that gives it another port. Each of them
// happens in the middle of a stream, whose bytes are verified, and the
// connection stays with its generation and worker.
func TestMigrationsOfAllClients(t *testing.T) {
	const workers = 4
	connections := testutil.UnlessShort(200, 30)
	s := newSite(t)
	before := s.start(setup{workers: workers})
	s.flip(before)

	clients := make([]*client, connections)
	homes := make([]answer, connections)
	all := func(what string, f func(i int, c *client) error) {
		var working sync.WaitGroup
		slots := make(chan struct{}, 64)
		for i, c := range clients {
			working.Go(func() {
				slots <- struct{}{}
				defer func() { <-slots }()
				if err := f(i, c); err != nil {
					t.Errorf("connection %d, %s: %v", i, what, err)
				}
			})
		}
		working.Wait()
	}
	for i := range clients {
		clients[i] = s.client()
	}
	all("dial", func(i int, c *client) (err error) {
		homes[i], err = c.visit()
		return err
	})
	perWorker := map[int]int{}
	for _, a := range homes {
		perWorker[a.worker]++
	}
	if len(perWorker) != workers {
		t.Errorf("connections by worker: %v, want %d workers", perWorker, workers)
	}

	migrate := func(i int, c *client, byNAT bool) error {
		words := make([]byte, 8<<10)
		_, _ = rand.NewChaCha8([32]byte{byte(i), byte(i >> 8)}).Read(words)
		step := c.move
		if byNAT {
			step = func() error { return c.current().rebind() }
		}
		if _, err := c.say(words, step); err != nil {
			return err
		}
		// The server knows the new address as soon as it has validated it.
		for end := time.Now().Add(patience); ; {
			a, err := c.talk()
			if err != nil {
				return err
			}
			if a.generation != before.Number() || a.worker != homes[i].worker {
				return fmt.Errorf("generation %d, worker %d answers, want %d and %d", a.generation, a.worker, before.Number(), homes[i].worker)
			}
			if a.remote == fmt.Sprintf("127.0.0.1:%d", port(c.current().LocalAddr())) {
				return nil
			}
			if time.Now().After(end) {
				return fmt.Errorf("the server sends to %s, want %v", a.remote, c.current().LocalAddr())
			}
		}
	}
	all("first migration", func(i int, c *client) error { return migrate(i, c, i%2 == 0) })

	after := s.start(setup{workers: workers})
	flip := s.snapshot()
	s.flip(after)
	all("second migration", func(i int, c *client) error { return migrate(i, c, i%2 == 1) })

	alive := 0
	for _, c := range clients {
		if c.conn.Context().Err() == nil {
			alive++
		}
	}
	t.Logf("%d of %d connections live, by worker: %v", alive, connections, perWorker)
	if n := after.created.Load(); alive != connections || n != 0 {
		t.Errorf("%d connections live, and %d were begun on the next generation", alive, n)
	}
	// Every packet since the flip named its socket.
	s.only(s.verdictsSince(flip), "owner")
	if _, a := s.visitor(); a.generation != after.Number() {
		t.Errorf("generation %d answers a new client, want %d", a.generation, after.Number())
	}
}
