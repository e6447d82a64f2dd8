// SPDX-License-Identifier: Apache-2.0

package dispatch_test

import (
	"os"
	"testing"

	"instar/dispatch"
)

// tokenObject is a compiled dissector, that of an example.
func tokenObject(t testing.TB) []byte {
	t.Helper()
	b, err := os.ReadFile("../examples/token/token_bpfel.o")
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestObjectDissector(t *testing.T) {
	_, err := dispatch.ObjectDissector([]byte("nothing of the kind"), "token")
	wantRefused(t, "no object", err, "options", "no eBPF object")
	_, err = dispatch.ObjectDissector(tokenObject(t), "other")
	wantRefused(t, "no such program", err, "options", `no program "other"`)
	d, err := dispatch.ObjectDissector(tokenObject(t), "token")
	if err != nil {
		t.Fatal(err)
	}
	o := dispatch.Options{Address: "127.0.0.1:4433", Dissector: d}
	_, err = dispatch.Open(o)
	wantRefused(t, "of another steering", err, "options", "SteeringCustom", "quic")
}

// Tokens lead to their worker over a flip; the group is made with its dissector, opened
// without, and upgraded by whoever has it.
func TestDissector(t *testing.T) {
	w := newWorld(t)
	const address = "127.0.0.1:4433"
	d, err := dispatch.ObjectDissector(tokenObject(t), "token")
	w.must(err)
	o := w.options(address)
	o.Steering = dispatch.SteeringCustom
	_, err = dispatch.Open(o)
	wantRefused(t, "made without a dissector", err, "options", "Dissector")
	o.Dissector = d
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
	tokens := func() {
		t.Helper()
		for worker := range 2 {
			cookie := one.Cookie(worker)
			want("a token", []string{"1/0", "1/1"}[worker], 't', 'k', 1, byte(cookie>>8), byte(cookie))
		}
		want("no token", "2/0", 't', 'k', 0, 0, 0)
		want("another protocol", "2/0", 'x')
	}
	tokens()

	o.Dissector = nil
	late := w.open(o)
	late.SetProgramBuild("another")
	_, err = late.UpgradeProgram()
	wantRefused(t, "an upgrade without the dissector", err, "options", "dissector")
	if upgraded, err := g.UpgradeProgram(); err != nil || !upgraded {
		t.Errorf("upgrade: %t, %v", upgraded, err)
	}
	if upgraded, err := g.UpgradeProgram(); err != nil || upgraded {
		t.Errorf("upgrade to the same: %t, %v", upgraded, err)
	}
	tokens()
	if s := w.snapshot(late); s.Steering != "custom" || len(s.Program) != 12 {
		t.Errorf("%+v", s)
	}
}
