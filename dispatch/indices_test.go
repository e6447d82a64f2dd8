// SPDX-License-Identifier: Apache-2.0

package dispatch_test

import (
	"encoding/binary"
	"testing"
	"time"

	"instar/dispatch"
)

func (w *world) wireguardOptions() dispatch.Options {
	o := w.options("127.0.0.1:51820")
	o.Steering = dispatch.SteeringWireGuard
	return o
}

// data is a WireGuard data message to an index.
func data(index uint32) []byte {
	b := make([]byte, 64)
	b[0] = 4
	binary.LittleEndian.PutUint32(b[4:], index)
	return b
}

// C1 to C3: sessions stay with the generation that announced their index; initiations go to
// the active one; of two generations with one index the first has it while it lives.
func TestIndices(t *testing.T) {
	w := newWorld(t)
	g := w.open(w.wireguardOptions())
	one := w.join(g, 2)
	w.activate(one)
	client := w.dial("127.0.0.1:51820")
	send := func(b []byte) {
		t.Helper()
		if _, err := client.Write(b); err != nil {
			t.Fatal(err)
		}
	}
	want := func(what string, b []byte, by string, all ...*dispatch.Generation) {
		t.Helper()
		send(b)
		if got := w.received(all...); got != by {
			t.Errorf("%s came to %s, want %s", what, got, by)
		}
	}
	w.must(one.OwnIndex(1, 0x11223344))
	want("a session of the active one", data(0x11223344), "1/1", one)

	two := w.join(g, 1)
	w.activate(two)
	initiation := append([]byte{1, 0, 0, 0}, make([]byte, 144)...)
	want("a session of the draining one", data(0x11223344), "1/1", one, two)
	want("an initiation", initiation, "2/0", one, two)
	want("an unknown index", data(7), "2/0", one, two)

	wantRefused(t, "an index of another", two.OwnIndex(0, 0x11223344), "conflict", "generation 1 has it")
	want("after the conflict", data(0x11223344), "1/1", one, two)
	w.must(one.OwnIndex(0, 0x11223344)) // its own it can move
	want("moved", data(0x11223344), "1/0", one, two)
	w.must(two.ReleaseIndex(0x11223344)) // not its own
	want("released by another", data(0x11223344), "1/0", one, two)
	w.must(one.ReleaseIndex(0x11223344))
	w.must(one.ReleaseIndex(0x11223344))
	want("released", data(0x11223344), "2/0", one, two)
	w.must(two.OwnIndex(0, 0x11223344))

	// Of a generation that is gone everybody takes it.
	w.must(one.OwnIndex(0, 5))
	w.must(one.Close())
	want("of one that is gone", data(5), "2/0", two)
	w.must(two.OwnIndex(0, 5))
	want("its heir's", data(5), "2/0", two)

	wantRefused(t, "no such worker", two.OwnIndex(1, 9), "options", "0 to 0")
	other := w.join(w.open(w.options("127.0.0.1:4433")), 1)
	wantRefused(t, "another steering", other.OwnIndex(0, 9), "state", "quic")
	wantRefused(t, "another steering", other.ReleaseIndex(9), "state", "quic")
}

// An index ends by itself.
func TestIndexEnds(t *testing.T) {
	w := newWorld(t)
	o := w.wireguardOptions()
	o.FlowTimeout = time.Second
	g := w.open(o)
	one, two := w.join(g, 1), w.join(g, 1)
	w.must(one.OwnIndex(0, 5))
	wantRefused(t, "while it lasts", two.OwnIndex(0, 5), "conflict")
	// No conflict only because it has ended: the deadline is the test's own.
	for start := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		err := two.OwnIndex(0, 5)
		if err == nil {
			break
		}
		if time.Since(start) > patience {
			t.Fatal(err)
		}
	}
	if s := w.snapshot(g); s.Steering != "wireguard" || s.FlowTimeout != 1 {
		t.Errorf("%+v", s)
	}
}
