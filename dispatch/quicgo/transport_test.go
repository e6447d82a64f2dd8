// SPDX-License-Identifier: Apache-2.0

package quicgo_test

import (
	"testing"

	"instar/dispatch/connid"
	"instar/dispatch/quicgo"
)

// owner says that all sockets are of one generation.
func owner(s *server) func(connid.Handle) uint32 {
	return func(connid.Handle) uint32 { return s.Number() }
}

// Generations have the same keys, and connection IDs that name their sockets.
func TestTransport(t *testing.T) {
	s := newSite(t)
	first, second := s.start(setup{workers: 2}), s.start(setup{workers: 3})
	one, two := first.transports, second.transports
	if len(one) != 2 || len(two) != 3 {
		t.Fatalf("%d and %d transports", len(one), len(two))
	}
	for _, transport := range two {
		if *transport.StatelessResetKey != *one[0].StatelessResetKey || *transport.TokenGeneratorKey != *one[0].TokenGeneratorKey {
			t.Error("generations have different keys")
		}
	}
	if [32]byte(*one[0].StatelessResetKey) == [32]byte(*one[0].TokenGeneratorKey) {
		t.Error("one key for two purposes")
	}
	for i, transport := range two {
		if transport.Conn != second.Conns()[i] {
			t.Errorf("transport %d is not on socket %d", i, i)
		}
		id, err := transport.ConnectionIDGenerator.GenerateConnectionID()
		if err != nil || id.Len() != transport.ConnectionIDLength || id.Len() != transport.ConnectionIDGenerator.ConnectionIDLen() {
			t.Fatalf("connection ID %v, %v", id, err)
		}
		handle, ok := second.ConnectionIDs().Open(id.Bytes(), owner(second))
		if !ok || handle != second.Handle(i) {
			t.Errorf("connection ID of worker %d names %v, %t", i, handle, ok)
		}
		if _, ok := second.ConnectionIDs().Open(id.Bytes(), owner(first)); ok {
			t.Error("a connection ID is good for another generation")
		}
	}
	for _, worker := range []int{-1, 3} {
		if _, err := quicgo.Transport(second.Generation, worker); err == nil {
			t.Errorf("a transport for worker %d of 3", worker)
		}
	}
}
