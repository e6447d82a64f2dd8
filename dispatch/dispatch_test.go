// SPDX-License-Identifier: Apache-2.0

package dispatch_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"instar/dispatch"
	"instar/internal/capset"
	"instar/internal/testutil"
)

func TestMain(m *testing.M) { testutil.Main(m) }

// world is a network namespace and a bpffs folder of the test's own.
type world struct {
	*testing.T
	ns   *testutil.Netns
	root string
}

// needWorld skips a test whose subtests all need a world.
func needWorld(t *testing.T) {
	t.Helper()
	testutil.Need(t, capset.SysAdmin, capset.NetAdmin)
}

func newWorld(t *testing.T) *world {
	ns := testutil.NetNS(t)
	return &world{T: t, ns: ns, root: testutil.BPFFS(t) + "/instar"}
}

func (w *world) options(address string) dispatch.Options {
	return dispatch.Options{Address: address, Service: "test", Root: w.root, Workers: 4, MaxGenerations: 4}
}

func (w *world) open(o dispatch.Options) *dispatch.Group {
	w.Helper()
	g, err := dispatch.Open(o)
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() {
		if err := g.Close(); err != nil {
			w.Error(err)
		}
	})
	return g
}

func (w *world) join(g *dispatch.Group, workers int) *dispatch.Generation {
	w.Helper()
	n, err := g.Join(workers)
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() {
		if err := n.Close(); err != nil {
			w.Error(err)
		}
	})
	return n
}

func (w *world) activate(n *dispatch.Generation) {
	w.Helper()
	if err := n.Activate(); err != nil {
		w.Fatal(err)
	}
}

func (w *world) snapshot(g *dispatch.Group) dispatch.Snapshot {
	w.Helper()
	s, err := g.Snapshot()
	if err != nil {
		w.Fatal(err)
	}
	return s
}

// dial opens a client socket.
func (w *world) dial(address string) *net.UDPConn {
	w.Helper()
	c, err := net.Dial("udp", address)
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() { _ = c.Close() })
	return c.(*net.UDPConn)
}

// received says which generation and worker gets the next datagram, as
// "generation/worker".
func (w *world) received(generations ...*dispatch.Generation) string {
	w.Helper()
	ctx, cancel := context.WithTimeout(w.Context(), 5*time.Second)
	defer cancel()
	got := make(chan string, 16)
	n := 0
	for _, g := range generations {
		for i, c := range g.Conns() {
			n++
			go func() {
				b := make([]byte, 2048)
				if _, _, err := c.ReadFromUDP(b); err != nil {
					got <- ""
					return
				}
				got <- fmt.Sprintf("%d/%d", g.Number(), i)
			}()
		}
	}
	answer := ""
	for i := range n {
		select {
		case s := <-got:
			if s != "" && answer != "" {
				answer += "," + s
			} else if s != "" {
				answer = s
			}
		case <-ctx.Done():
			w.Fatal("no generation got the datagram")
		}
		if i == 0 {
			for _, g := range generations {
				for _, c := range g.Conns() {
					_ = c.SetReadDeadline(time.Unix(1, 0))
				}
			}
		}
	}
	for _, g := range generations {
		for _, c := range g.Conns() {
			_ = c.SetReadDeadline(time.Time{})
		}
	}
	return answer
}

func TestLifeOfTwoGenerations(t *testing.T) {
	w := newWorld(t)
	for _, address := range []string{"127.0.0.1:4433", "[::1]:4434", "[::]:4435", "0.0.0.0:4436"} {
		t.Run(address, func(t *testing.T) {
			w.ns.Run(func() { lifeOfTwoGenerations(&world{t, w.ns, w.root}, address) })
		})
	}
}

func lifeOfTwoGenerations(w *world, address string) {
	target := strings.NewReplacer("[::]", "127.0.0.1", "0.0.0.0", "127.0.0.1").Replace(address)
	g := w.open(w.options(address))
	first := w.join(g, 1)
	if s := first.State(); s != dispatch.StateStaged {
		w.Fatalf("after Join the generation is %v", s)
	}
	w.activate(first)
	client := w.dial(target)
	id, err := first.ConnectionIDs().Append([]byte{0x40}, first.Handle(0), first.Number())
	if err != nil {
		w.Fatal(err)
	}
	old := slices.Concat(id, make([]byte, 40))
	send := func(b []byte) {
		w.Helper()
		if _, err := client.Write(b); err != nil {
			w.Fatal(err)
		}
	}
	send(old)
	if got := w.received(first); got != "1/0" {
		w.Errorf("the only generation's packet went to %s", got)
	}
	second := w.join(g, 1)
	w.activate(second)
	select {
	case <-first.Superseded():
	case <-time.After(time.Second):
		w.Error("the first generation did not learn that it was superseded")
	}
	if s := first.State(); s != dispatch.StateDraining {
		w.Errorf("the superseded generation is %v", s)
	}
	send(old)
	if got := w.received(first, second); got != "1/0" {
		w.Errorf("an old connection's packet went to %s", got)
	}
	send(append([]byte{0x40}, make([]byte, 50)...))
	if got := w.received(first, second); got != "2/0" {
		w.Errorf("a stranger's packet went to %s", got)
	}
	done := make(chan struct{})
	close(done)
	report, err := first.Drain(w.Context(), dispatch.DrainOptions{Done: done})
	if err != nil || report.Reason != "done" {
		w.Errorf("Drain: %+v, %v", report, err)
	}
	if err := first.Close(); err != nil {
		w.Error(err)
	}
	send(old)
	if got := w.received(second); got != "2/0" {
		w.Errorf("an orphan went to %s", got)
	}
	s := w.snapshot(g)
	if s.Active != 2 || len(s.Generations) != 1 {
		w.Errorf("at the end: %+v", s)
	}
	want := map[string]uint64{"owner": 2, "unknown": 1, "orphan": 1, "known": 0, "new": 0, "invalid": 0, "fallback": 0, "drop": 0}
	for v, n := range want {
		if s.Verdicts[v] != n {
			w.Errorf("%d packets with verdict %s, want %d", s.Verdicts[v], v, n)
		}
	}
}

func TestFullGroupRefusesBeforeItBinds(t *testing.T) {
	w := newWorld(t)
	g := w.open(w.options("127.0.0.1:4433"))
	generations := []*dispatch.Generation{}
	for range 4 {
		n := w.join(g, 1)
		w.activate(n)
		generations = append(generations, n)
	}
	before := w.snapshot(g)
	_, err := g.Join(1)
	var full *dispatch.FullError
	if !errors.As(err, &full) || full.Limit != 4 || len(full.Occupants) != 4 {
		t.Fatalf("the fifth generation: %v", err)
	}
	for _, n := range generations {
		if !strings.Contains(err.Error(), fmt.Sprintf("%d (", n.Number())) {
			t.Errorf("the error does not name generation %d: %v", n.Number(), err)
		}
	}
	after := w.snapshot(g)
	if before.Active != after.Active || len(after.Generations) != 4 {
		t.Errorf("before %+v, after %+v", before, after)
	}
	if err := generations[0].Close(); err != nil {
		t.Fatal(err)
	}
	w.activate(w.join(g, 1))
}
