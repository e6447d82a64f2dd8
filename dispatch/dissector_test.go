// SPDX-License-Identifier: Apache-2.0

package dispatch_test

import (
	"errors"
	"testing"

	"golang.org/x/net/bpf"

	"instar/dispatch"
	"instar/dispatch/cbpf"
)

// G1: a classic program finds the cookie behind a "t"; a packet that is too short for it, and
// one of another kind, are nobody's.
func TestClassicDissector(t *testing.T) {
	program, err := bpf.Assemble([]bpf.Instruction{
		bpf.LoadAbsolute{Off: 0, Size: 1},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: 't', SkipTrue: 2},
		bpf.LoadAbsolute{Off: 1, Size: 2},
		bpf.RetA{},
		bpf.RetConstant{Val: 1 << 20},
	})
	if err != nil {
		t.Fatal(err)
	}
	w := newWorld(t)
	const address = "127.0.0.1:4433"
	o := w.options(address)
	o.Steering = dispatch.SteeringCustom
	o.Dissector, err = dispatch.ClassicDissector(program)
	w.must(err)
	g := w.open(o)
	one := w.join(g, 2)
	w.activate(one)
	two := w.join(g, 1)
	w.activate(two)
	c := w.dial(address)
	want := func(what, by string, b ...byte) {
		t.Helper()
		_, err := c.Write(b)
		w.must(err)
		if got := w.received(one, two); got != by {
			t.Errorf("%s came to %s, want %s", what, got, by)
		}
	}
	for worker, by := range []string{"1/0", "1/1"} {
		cookie := one.Cookie(worker)
		if cookie == 0 {
			t.Errorf("worker %d has cookie 0", worker)
		}
		want("a cookie", by, 't', byte(cookie>>8), byte(cookie))
	}
	want("cookie 0", "2/0", 't', 0, 0)
	want("too short", "2/0", 't', 0xff)
	want("another kind", "2/0", 'x', 0xff, 0xff)
	want("a cookie of nobody", "2/0", 't', 0, 1)
	w.wantCounts(g, "classic", nil, counts{"owner": 2, "new": 3, "orphan": 1})

	program[1].Jt = 9
	_, err = dispatch.ClassicDissector(program)
	wantRefused(t, "a jump out of the program", err, "options", "instruction 1")
	if !errors.As(err, new(*cbpf.InstructionError)) {
		t.Errorf("%T", err)
	}
	o.MaxGenerations, o.Workers = dispatch.LimitGenerations, dispatch.LimitWorkers
	_, err = dispatch.Open(o)
	wantRefused(t, "no cookies left", err, "options", "one less")
}
