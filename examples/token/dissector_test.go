// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"instar/dispatch"
	"instar/internal/testutil"
)

func wantRefused(t *testing.T, err, kind error, word string) {
	t.Helper()
	if !errors.Is(err, kind) || !strings.Contains(err.Error(), word) {
		t.Errorf("%v; want %v and %q", err, kind, word)
	}
}

func TestObjectDissector(t *testing.T) {
	_, err := dispatch.ObjectDissector([]byte("nothing of the kind"), "token")
	wantRefused(t, err, dispatch.ErrOptions, "no eBPF object")
	_, err = dispatch.ObjectDissector(_TokenBytes, "other")
	wantRefused(t, err, dispatch.ErrOptions, `no program "other"`)
	d, err := dispatch.ObjectDissector(_TokenBytes, "token")
	if err != nil {
		t.Fatal(err)
	}
	_, err = dispatch.Open(dispatch.Options{Address: addr, Dissector: d})
	wantRefused(t, err, dispatch.ErrOptions, "SteeringCustom")
}

// Tokens lead to their worker over a flip; the group is made with its dissector, opened
// without, and its program upgraded by whoever has it.
func TestDissector(t *testing.T) {
	testutil.NetNS(t)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	o := dispatch.Options{Address: addr, Root: testutil.BPFFS(t) + "/instar", Service: "test", Steering: dispatch.SteeringCustom}
	open := func() *dispatch.Group {
		t.Helper()
		g, err := dispatch.Open(o)
		must(err)
		t.Cleanup(func() { must(g.Close()) })
		return g
	}
	join := func(g *dispatch.Group, workers int) *dispatch.Generation {
		t.Helper()
		n, err := g.Join(workers)
		must(err)
		t.Cleanup(func() { must(n.Close()) })
		must(n.Activate())
		return n
	}
	_, err := dispatch.Open(o)
	wantRefused(t, err, dispatch.ErrOptions, "Dissector")
	o.Dissector, err = dispatch.ObjectDissector(_TokenBytes, "token")
	must(err)
	g := open()
	one, two := join(g, 2), join(g, 1)
	client, err := net.Dial("udp", addr)
	must(err)
	defer client.Close()
	// Who gets the datagram has it alone.
	want := func(what string, to *net.UDPConn, datagram ...byte) {
		t.Helper()
		_, err := client.Write(datagram)
		must(err)
		b := make([]byte, 100)
		must(to.SetReadDeadline(time.Now().Add(patience)))
		if n, err := to.Read(b); err != nil || string(b[:n]) != string(datagram) {
			t.Errorf("%s: %q, %v", what, b[:n], err)
		}
		for _, c := range append(one.Conns(), two.Conns()...) {
			must(c.SetReadDeadline(time.Unix(1, 0)))
			if _, err := c.Read(b); !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("%s: somebody else got it, too (%v)", what, err)
			}
		}
	}
	tokens := func() {
		t.Helper()
		for worker, conn := range one.Conns() {
			cookie := one.Cookie(worker)
			want("a token", conn, 't', 'k', 1, byte(cookie>>8), byte(cookie))
		}
		want("no token", two.Conns()[0], 't', 'k', 0, 0, 0)
		want("another protocol", two.Conns()[0], 'x')
	}
	tokens()

	if upgraded, err := g.UpgradeProgram(); err != nil || upgraded {
		t.Errorf("upgrade to the same program: %t, %v", upgraded, err)
	}
	o.Dissector = nil
	_, err = open().UpgradeProgram()
	wantRefused(t, err, dispatch.ErrOptions, "dissector")
	// A later version of the server, whose dissector differs.
	o.Dissector, err = dispatch.ObjectDissector(append(_TokenBytes[:len(_TokenBytes):len(_TokenBytes)], 0), "token")
	must(err)
	if upgraded, err := open().UpgradeProgram(); err != nil || !upgraded {
		t.Errorf("upgrade to another program: %t, %v", upgraded, err)
	}
	tokens()
	if s, err := g.Snapshot(); err != nil || s.Steering != "custom" || len(s.Program) != 12 {
		t.Errorf("%+v, %v", s, err)
	}
}
