// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"encoding/binary"
	"testing"

	"instar/dispatch/connid"
	"instar/internal/testutil"
)

var wireguardConfig = Config{Steering: SteeringWireGuard, MaxGenerations: 8, MaxWorkers: 16, FlowEntries: 4096, Prefix: PrefixMin, FlowTimeout: 300}

// wireguardMessage is a message of a type and length that names an index where the type has
// its receiver's.
func wireguardMessage(typ uint32, length int, index uint32) []byte {
	b := make([]byte, max(length, 12))
	binary.LittleEndian.PutUint32(b, typ)
	at := 4
	if typ == 2 {
		binary.LittleEndian.PutUint32(b[4:], ^index) // the sender's
		at = 8
	}
	binary.LittleEndian.PutUint32(b[at:], index)
	return b[:length]
}

// Initiations go to the active generation, everything else to whoever announced its index
// (C1, C2).
func TestWireGuard(t *testing.T) {
	testutil.NetNS(t)
	g := newGroup(t, wireguardConfig, loopback4)
	g.join(1, 7, 2)
	g.join(2, 8, 2)
	g.setOrder(1, []uint8{2, 1}, nil)
	g.activate(g.word(2, 1))
	const index = 0x01020304
	set := func(v Tracked) {
		t.Helper()
		if err := g.coll.Maps[MapFlows].Put(uint32(index), v); err != nil {
			t.Fatal(err)
		}
	}
	now := g.monotonic()
	set(Tracked{Owner: owner(1, 1, 7), Seen: now})

	for _, tc := range []struct {
		name     string
		datagram []byte
		socket   string
		counted  string
	}{
		{"initiation", wireguardMessage(1, 148, index), "2/*", "new=1 slot2=1"},
		{"response", wireguardMessage(2, 92, index), "1/1", "known=1 slot1=1"},
		{"cookie reply", wireguardMessage(3, 64, index), "1/1", "known=1 slot1=1"},
		{"data", wireguardMessage(4, 1400, index), "1/1", "known=1 slot1=1"},
		{"keepalive", wireguardMessage(4, 32, index), "1/1", "known=1 slot1=1"},
		{"large data", wireguardMessage(4, 60000, index), "1/1", "known=1 slot1=1"},
		{"data of an unknown index", wireguardMessage(4, 1400, index+1), "2/*", "unknown=1 slot2=1"},
		{"response to an unknown index", wireguardMessage(2, 92, index+1), "2/*", "unknown=1 slot2=1"},
		{"initiation that is too long", wireguardMessage(1, 149, index), "2/*", "invalid=1 slot2=1"},
		{"response that is too short", wireguardMessage(2, 91, index), "2/*", "invalid=1 slot2=1"},
		{"cookie reply that is too long", wireguardMessage(3, 65, index), "2/*", "invalid=1 slot2=1"},
		{"data that is too short", wireguardMessage(4, 31, index), "2/*", "invalid=1 slot2=1"},
		{"type 0", wireguardMessage(0, 148, index), "2/*", "invalid=1 slot2=1"},
		{"type 5", wireguardMessage(5, 148, index), "2/*", "invalid=1 slot2=1"},
		{"type 4 with a reserved octet set", wireguardMessage(4|1<<16, 148, index), "2/*", "invalid=1 slot2=1"},
		{"11 octets", wireguardMessage(4, 11, index), "2/*", "invalid=1 slot2=1"},
		{"nothing", nil, "2/*", "invalid=1 slot2=1"},
	} {
		g.wantSteered(tc.name, tc.datagram, tc.socket, tc.counted)
	}
	data := wireguardMessage(4, 100, index)
	set(Tracked{Owner: owner(1, 1, 7), Seen: now - 299e9})
	g.wantSteered("299 of 300 s old", data, "1/1", "known=1 slot1=1")
	set(Tracked{Owner: owner(1, 1, 7), Seen: now - 301e9})
	g.wantSteered("301 of 300 s old", data, "2/*", "orphan=1 slot2=1")
	set(Tracked{Owner: owner(1, 1, 7), Seen: now})
	g.close(connid.MakeHandle(1, 1))
	g.wantSteered("the worker is dead, its process lives", data, "1/0", "known=1 slot1=1")
	g.close(connid.MakeHandle(1, 0))
	g.wantSteered("the process is dead", data, "2/*", "orphan=1 slot2=1")
	g.join(1, 9, 2)
	g.wantSteered("its slot has another user", data, "2/*", "orphan=1 slot2=1")
	for w := range uint8(2) {
		g.close(connid.MakeHandle(2, w))
	}
	g.setOrder(2, []uint8{2, 1}, nil)
	g.activate(g.word(2, 2))
	g.wantSteered("the active one is dead", wireguardMessage(1, 148, 0), "1/*", "fallback=1 slot1=1")
}

// Whatever comes ends in one verdict, and at the active generation unless its index is known.
func TestWireGuardOfStrangers(t *testing.T) {
	testutil.NetNS(t)
	g := newGroup(t, wireguardConfig, loopback6)
	g.join(1, 7, 3)
	g.setOrder(1, []uint8{1}, nil)
	g.activate(g.word(1, 1))
	for i := range testutil.UnlessShort(2000, 100) {
		datagram := g.random.octets(g.random.IntN(200))
		if i%2 == 0 && len(datagram) > 4 {
			copy(datagram, []byte{byte(1 + i/2%4), 0, 0, 0})
		}
		socket, counted := g.steer(datagram)
		if !matches(socket, "1/*") || counted != "invalid=1 slot1=1" && counted != "unknown=1 slot1=1" && counted != "new=1 slot1=1" {
			t.Fatalf("%x: went to %s, counted %q", datagram, socket, counted)
		}
	}
}
