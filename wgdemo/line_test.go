// SPDX-License-Identifier: Apache-2.0

package wgdemo

import (
	"context"
	"log/slog"
	"net/netip"
	"sync"
	"testing"
	"time"
)

// A predecessor knows when its successor has all peers that it was told of.
func TestLine(t *testing.T) {
	near, c, err := newLine()
	if err != nil {
		t.Fatal(err)
	}
	far := &line{conn: c}
	words := make(chan word, 10)
	var readers sync.WaitGroup
	log := slog.New(slog.DiscardHandler)
	readers.Go(func() { near.receive(log, func(w word) { near.answered(w.Moved) }) })
	readers.Go(func() { far.receive(log, func(w word) { words <- w }) })
	defer func() {
		_, _ = near.conn.Close(), far.conn.Close()
		readers.Wait()
	}()
	answer := func(number int) { far.send(word{Moved: &number}) }
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	moved := func() bool {
		select {
		case <-near.moved(ctx):
			return true
		case <-time.After(50 * time.Millisecond):
			return false
		}
	}
	peers := make([]peerStatus, maxPeers+1)
	for i := range peers {
		peers[i].endpoint = netip.MustParseAddrPort("192.0.2.1:1")
	}
	if moved() {
		t.Error("moved before anything was said")
	}
	near.tell(peers)
	if w := <-words; w.Number != 1 || len(w.Peers) != maxPeers {
		t.Errorf("word %d with %d peers", w.Number, len(w.Peers))
	}
	if w := <-words; w.Number != 2 || len(w.Peers) != 1 || near.last() != 2 {
		t.Errorf("word %d with %d peers", w.Number, len(w.Peers))
	}
	answer(0)
	answer(1)
	if moved() {
		t.Error("moved although the last word was not answered")
	}
	answer(2)
	<-near.moved(ctx)
	// A successor that failed does not count, even if it is heard late.
	near.forget()
	answer(2)
	if moved() {
		t.Error("moved to a successor that failed")
	}
	answer(near.last())
	<-near.moved(ctx)
}
