// SPDX-License-Identifier: Apache-2.0

package dispatch_test

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"instar/dispatch"
	"instar/internal/testutil"
)

// hammer goes through the life of a server again and again. Args are the options and
// how often. It says how many generations it had, and how many were refused because
// the group was full.
var hammer = testutil.NewProgram("hammer", func(c *testutil.Conversation) error {
	o, err := decode(c.Args[0])
	if err != nil {
		return err
	}
	rounds, err := strconv.Atoi(c.Args[1])
	if err != nil {
		return err
	}
	dispatch.SetSettle(2 * testTime) // the others may have no CPU for a while
	c.Send("ready")
	c.Recv()
	joined, full := 0, 0
	for i := range rounds {
		g, err := dispatch.Open(o)
		if err != nil {
			return fmt.Errorf("round %d: %w", i, err)
		}
		n, err := g.Join(1 + i%2)
		var f *dispatch.FullError
		switch {
		case errors.As(err, &f):
			full++
		case err != nil:
			return fmt.Errorf("round %d: %w", i, err)
		default:
			joined++
			s := serve(n)
			if err := n.Activate(); err != nil {
				return fmt.Errorf("round %d: %w", i, err)
			}
			if i%3 == 0 {
				// A rollback by anybody, to whoever was active before.
				if _, err := g.Rollback(); err != nil && !errors.Is(err, dispatch.ErrState) {
					return fmt.Errorf("round %d: %w", i, err)
				}
			}
			if err := n.Close(); err != nil {
				return fmt.Errorf("round %d: %w", i, err)
			}
			s.wait()
		}
		if err := g.Close(); err != nil {
			return fmt.Errorf("round %d: %w", i, err)
		}
	}
	c.Send("joined %d full %d", joined, full)
	return nil
})

// checkSnapshot checks what holds at any time.
func checkSnapshot(t *testing.T, s dispatch.Snapshot, limit int, mine uint32) {
	t.Helper()
	var numbers []uint32
	var slots []int
	state := dispatch.StateActive
	for i, n := range s.Generations {
		numbers, slots = append(numbers, n.Number), append(slots, n.Slot)
		if (n.State == dispatch.StateActive) != (n.Number == s.Active) || n.State == dispatch.StateActive && i != 0 {
			t.Errorf("generation %d in place %d is %v, and %d is active", n.Number, i, n.State, s.Active)
		}
		// Active, then draining, then staged.
		rank := map[dispatch.State]int{dispatch.StateActive: 0, dispatch.StateDraining: 1, dispatch.StateStaged: 2}
		if rank[n.State] < rank[state] {
			t.Errorf("%v after %v: %+v", n.State, state, s.Generations)
		}
		state = n.State
		if n.State == dispatch.StateStaged && i > 0 && s.Generations[i-1].State == dispatch.StateStaged && s.Generations[i-1].Number < n.Number {
			t.Errorf("staged generation %d comes before %d", s.Generations[i-1].Number, n.Number)
		}
	}
	if len(numbers) > limit || !slices.Contains(numbers, mine) || s.Active == 0 {
		t.Errorf("%d generations %d, active %d", len(numbers), numbers, s.Active)
	}
	slices.Sort(numbers)
	slices.Sort(slots)
	if len(slices.Compact(numbers)) != len(s.Generations) || len(slices.Compact(slots)) != len(s.Generations) {
		t.Errorf("twice the same: %+v", s.Generations)
	}
}

// A4, E10: processes that come and go as fast as they can, in two groups at once. A
// generation that stays keeps its flows, and the table is true at any time.
func TestManyProcessesAtOnce(t *testing.T) {
	w := newWorld(t)
	const limit = 4
	processes, rounds := testutil.UnlessShort(8, 3), testutil.UnlessShort(50, 10)
	type group struct {
		g       *dispatch.Group
		n       *dispatch.Generation
		c       *client
		f       flow
		hammers []*testutil.Process
	}
	var groups []*group
	for _, address := range []string{"127.0.0.1:4433", "[::]:4434"} {
		o := w.options(address)
		x := &group{g: w.open(o), c: w.client(strings.Replace(address, "[::]", "[::1]", 1))}
		x.n = w.serve(x.g, 2)
		w.activate(x.n)
		x.f = w.newFlow(x.c, 1)
		groups = append(groups, x)
		for range processes {
			p := hammer.Start(t, testutil.Options{Args: []string{encode(o), strconv.Itoa(rounds / 2)}, NS: w.ns, Timeout: 2 * testTime})
			p.Expect("ready")
			x.hammers = append(x.hammers, p)
		}
	}
	for _, x := range groups {
		for _, p := range x.hammers {
			p.Send("go")
		}
	}
	ended := func() bool {
		for _, x := range groups {
			for _, p := range x.hammers {
				if !isClosed(p.Done()) {
					return false
				}
			}
		}
		return true
	}
	used := make([]uint64, len(groups))
	for !ended() {
		for i, x := range groups {
			checkSnapshot(t, w.snapshot(x.g), limit, 1)
			w.use(x.c, x.f)
			used[i]++
		}
		if t.Failed() {
			break
		}
	}
	for i, x := range groups {
		joined := 0
		for _, p := range x.hammers {
			var j, full int
			if _, err := fmt.Sscanf(p.Recv(), "joined %d full %d", &j, &full); err != nil || j+full != rounds/2 {
				t.Errorf("%s: joined %d, full %d (%v)", p, j, full, err)
			}
			joined += j
			if code := p.Wait(); code != 0 {
				t.Errorf("%s ended with %d", p, code)
			}
		}
		// Every generation had a number of its own.
		if next := x.g.Control().NextNumber; int(next) != joined+2 {
			t.Errorf("%d generations, and the next number is %d", joined+1, next)
		}
		s := w.snapshot(x.g)
		if len(s.Generations) != 1 || s.Active != 1 || x.n.State() != dispatch.StateActive {
			t.Errorf("in the end: %+v", s)
		}
		w.newFlow(x.c, 1)
		w.wantCounts(x.g, "in the end", nil, counts{"new": 2, "owner": used[i]})
		t.Logf("%d of %d generations joined", joined, processes*rounds/2)
	}
}

// Whoever makes a group, there is one.
func TestProcessesMakeTheGroupAtOnce(t *testing.T) {
	w := newWorld(t)
	const processes = 4
	for port := range testutil.UnlessShort(12, 2) {
		o := w.options(fmt.Sprintf("127.0.0.1:%d", 5000+port))
		var all []*testutil.Process
		for range processes {
			all = append(all, w.start(o, nil))
		}
		for _, p := range all {
			p.Send("open")
			p.Send("join 1")
			p.Send("activate")
			p.Send("secret key")
		}
		numbers, secrets := map[string]bool{}, map[string]bool{}
		for _, p := range all {
			p.Expect("ok")
			numbers[p.Recv()] = true
			p.Expect("ok")
			secrets[p.Recv()] = true
		}
		if len(numbers) != processes || len(secrets) != 1 {
			t.Errorf("numbers %v, secrets %v", numbers, secrets)
		}
		for _, p := range all {
			p.Kill()
		}
	}
	if names := list(t, w.root); len(names) != 1 {
		t.Errorf("%q", names)
	}
}

// All methods of one Group from many goroutines, and Close in the middle of them.
func TestManyGoroutines(t *testing.T) {
	w := newWorld(t)
	o := w.options("127.0.0.1:4433")
	keeper := w.open(o)
	n := w.serve(keeper, 1)
	w.activate(n)
	c := w.client("127.0.0.1:4433")
	f := w.newFlow(c, 1)
	for range 5 {
		g, err := dispatch.Open(o)
		w.must(err)
		var all sync.WaitGroup
		begin := make(chan struct{})
		each := func(name string, f func() error) {
			all.Go(func() {
				<-begin
				for range 20 {
					if err := f(); errors.Is(err, dispatch.ErrClosed) {
						return
					} else if err != nil {
						t.Errorf("%s: %v", name, err)
						return
					}
				}
			})
		}
		join := func() (err error) {
			w.ns.Run(func() {
				var m *dispatch.Generation
				m, err = g.Join(1)
				var full *dispatch.FullError
				if errors.As(err, &full) {
					err = nil
					return
				}
				if err != nil {
					return
				}
				// The group may be closed at any moment; the sockets are closed anyway.
				err = errors.Join(m.Activate(), m.Close())
			})
			return err
		}
		each("join", join)
		each("join", join)
		each("snapshot", func() error { s, err := g.Snapshot(); _ = s; return err })
		each("rollback", func() error {
			_, err := g.Rollback()
			if errors.Is(err, dispatch.ErrState) {
				err = nil
			}
			return err
		})
		each("repair", g.Repair)
		each("secret", func() error { _, err := g.Secret("x", 16); return err })
		each("upgrade", func() (err error) {
			w.ns.Run(func() { _, err = g.UpgradeProgram() })
			return err
		})
		var closer sync.WaitGroup
		closer.Go(func() {
			<-begin
			for range 10 {
				if _, err := g.Snapshot(); err != nil {
					t.Error(err)
				}
			}
			if err := g.Close(); err != nil {
				t.Error(err)
			}
		})
		close(begin)
		all.Wait()
		closer.Wait()
		w.use(c, f)
	}
	w.must(keeper.Repair())
	if s := w.snapshot(keeper); s.Active != 1 || len(s.Generations) != 1 {
		t.Errorf("in the end: %+v", s)
	}
	w.newFlow(c, 1)
}
